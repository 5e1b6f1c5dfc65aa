"""Calibration text that the model writes itself: what is written, that it comes again, and what is refused."""

from __future__ import annotations

import json
from collections import namedtuple
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from calibration import writing
from calibration.errors import DataError
from calibration.writing import LIKELIEST, SHORTEST_TEXT, Writing, write_windows
from compress import engine, room
from compress.__main__ import main
from compress.errors import InputError
from compress.models.checkpoint import open_checkpoint
from compress.models.decoder import Decoder
from compress.report import Report
from tests.compress.families import VARIANTS, saved, whole_model
from tests.compress.runs import Bench, progress_that
from tests.support import tiny_llama, tiny_tokenizer

SELF = "{source: self, samples: 4, sequence_length: 48}"


def how(**changes: Any) -> Writing:
    settings: dict[str, Any] = {"prefix": [5], "starts": torch.arange(10, 300), "ends": [0], "seed": 3}
    return Writing(**(settings | changes))


def naive(model: Any, how: Writing, samples: int, length: int) -> Tensor:
    """The same by the whole model over the whole window for each token, without a cache."""
    generator = torch.Generator().manual_seed(how.seed)
    starts = how.starts[torch.randint(len(how.starts), (samples, 1), generator=generator)]
    tokens = torch.cat([torch.tensor(how.prefix, dtype=torch.int64).repeat(samples, 1), starts], 1)
    while tokens.shape[1] < length:
        with torch.no_grad():
            logits = model(tokens).logits[:, -1] / how.temperature
        for window, row in zip(tokens, logits, strict=True):
            ended = [place for place, token in enumerate(window.tolist()) if token in how.ends]
            text = len(window) - (ended[-1] + 1 if ended else len(how.prefix))
            if text < SHORTEST_TEXT:
                row[how.ends] = -torch.inf
        drawn = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)
        likeliest = logits.argmax(-1, keepdim=True)
        chosen = likeliest if tokens.shape[1] <= len(how.prefix) + LIKELIEST else drawn
        tokens = torch.cat([tokens, chosen], 1)
    return tokens


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_writes_what_it_would_without_a_cache(variant: str, tmp_path: Path) -> None:
    folder = saved(variant, tmp_path / "model")
    with Decoder(open_checkpoint(folder)).whole() as model:
        found, _ = write_windows(model, how(), 3, 40)
    assert torch.equal(found, naive(whole_model(folder), how(), 3, 40))


def written(folder: Path, samples: int, length: int, **changes: Any) -> tuple[Tensor, int]:
    with Decoder(open_checkpoint(folder)).whole() as model:
        return write_windows(model, how(**changes), samples, length)


def test_a_model_is_gone_from_memory_when_it_has_written(tmp_path: Path) -> None:
    decoder = Decoder(open_checkpoint(tiny_llama(tmp_path / "model")))
    with decoder.whole() as model:
        assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_a_seed_gives_the_same_text_again_and_another_gives_another(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model")
    first, again, other = (written(folder, 4, 48, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len({tuple(window) for window in first.tolist()}) == 4


def test_more_windows_than_are_written_at_once_are_other_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "WINDOWS_AT_ONCE", 2)
    found, _ = written(tiny_llama(tmp_path / "model"), 5, 24)
    assert found.shape == (5, 24)
    assert len({tuple(window) for window in found.tolist()}) == 5


def test_what_stands_before_every_text_and_where_texts_start(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model")
    found, _ = written(folder, 32, 8, prefix=[7, 8], starts=torch.tensor([50, 60]))
    assert (found[:, :2] == torch.tensor([7, 8])).all()
    assert set(found[:, 2].tolist()) == {50, 60}
    assert set(written(folder, 32, 8, prefix=[], starts=torch.tensor([50, 60]))[0][:, 0].tolist()) == {50, 60}
    assert written(folder, 2, 1, prefix=[])[0].shape == (2, 1)
    assert written(folder, 2, 1)[0].tolist() == [[5], [5]]


def test_the_first_tokens_are_the_likeliest_and_the_others_are_drawn(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model")
    found, _ = written(folder, 64, 20, starts=torch.tensor([50]))
    assert len({tuple(window) for window in found[:, : 2 + LIKELIEST].tolist()}) == 1
    assert len({tuple(window) for window in found.tolist()}) == 64
    cold, _ = written(folder, 64, 20, starts=torch.tensor([50]), temperature=1e-4)
    assert len({tuple(window) for window in cold.tolist()}) == 1


def test_tokens_are_drawn_with_the_probabilities_of_the_model(tmp_path: Path) -> None:
    folder, count = tiny_llama(tmp_path / "model"), 4096
    length = 3 + LIKELIEST
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "WINDOWS_AT_ONCE", count)
        found, texts = written(folder, count, length, starts=torch.tensor([50]), ends=[])
    assert texts == count
    with torch.no_grad():
        expected = torch.softmax(whole_model(folder)(found[:1, :-1]).logits[0, -1].double(), -1)
    counted = torch.bincount(found[:, -1], minlength=len(expected)).double()
    likely = expected * count >= 5
    assert likely.sum() > 20
    # Chi squared over its degrees of freedom: near 1 if they agree.
    deviation = ((counted - expected * count).square() / (expected * count))[likely].sum() / likely.sum()
    assert deviation < 1.7


def test_a_text_does_not_end_at_once_again(tmp_path: Path) -> None:
    ends = [*range(0, 320, 2)]
    found, texts = written(tiny_llama(tmp_path / "model"), 4, 64, ends=ends, starts=torch.tensor([51]))
    places = [[place for place, token in enumerate(window) if token % 2 == 0] for window in found.tolist()]
    assert all(later - earlier > SHORTEST_TEXT for window in places for earlier, later in pairwise(window))
    assert all(len(window) >= 2 for window in places)
    assert texts == 4 + sum(place < 63 for window in places for place in window)


def test_predictions_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    def overflow(parameters: dict[str, Tensor]) -> None:
        parameters["lm_head.weight"].fill_(3e38)

    with pytest.raises(DataError, match="NaN or infinite"):
        written(tiny_llama(tmp_path / "model", overflow), 2, 16)


def test_a_run_is_calibrated_on_what_the_model_wrote(bench: Bench, tmp_path: Path) -> None:
    steps: list[str] = []
    recipe = bench.recipe(passes="[gptq]", calibration=SELF)
    report = engine.run(recipe, tmp_path / "out", progress=progress_that(steps.append))
    audit = report.calibration
    assert audit["origin"] == "the model itself, seed 0, temperature 1"
    assert (audit["requested_tokens"], audit["obtained_tokens"], audit["written"]) == (192, 192, True)
    assert audit["overlap_with_evaluation"] == 0
    assert {layer.tokens for layer in report.passes[0].layers if ".layers." in layer.layer} == {192}
    assert steps.index("writing calibration text") > steps.index("scanning weights")
    assert "write calibration text" in report.timings
    again = engine.run(recipe, tmp_path / "again")
    assert again.calibration == audit
    assert "the model itself" in (tmp_path / "out/report.md").read_text()
    other = engine.run(bench.recipe(passes="[gptq]", calibration=SELF.replace("}", ", seed: 1}")), tmp_path / "other")
    assert other.calibration["tokens_sha256"] != audit["tokens_sha256"]


def test_a_rotated_model_writes_what_the_model_writes(bench: Bench, tmp_path: Path) -> None:
    plain, rotated = (
        engine.run(bench.recipe(passes=passes, calibration=SELF), tmp_path / passes[1:4])
        for passes in ("[gptq]", "[rotate, gptq]")
    )
    assert plain.calibration["tokens_sha256"] == rotated.calibration["tokens_sha256"]


def test_a_plan_says_what_would_be_written_and_writes_nothing(bench: Bench, capsys: Any, tmp_path: Path) -> None:
    recipe = bench.file(tmp_path / "recipe.yaml", passes="[gptq]", calibration=SELF)
    assert main(["plan", str(recipe), "--json", "-q"]) == 0
    audit = json.loads(capsys.readouterr().out)["calibration"]
    assert audit["origin"].startswith("the model itself")
    assert (audit["requested_tokens"], audit["written"], "obtained_tokens" in audit) == (192, False, False)


def test_a_pass_that_needs_no_text_has_none_written(bench: Bench, tmp_path: Path) -> None:
    report = engine.run(bench.recipe(passes="[rtn]", calibration=SELF), tmp_path / "out")
    assert report.calibration == {"used": False}
    assert "write calibration text" not in report.timings


def test_a_model_that_does_not_fit_into_memory_is_refused_before_any_work(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What every run may keep of mapped files is more than this model.
    monkeypatch.setattr(room, "UNMAP_BYTES", 0)
    parts = {"model": str(tiny_llama(tmp_path / "deep", num_hidden_layers=80)), "passes": "[gptq]"}
    recipe = bench.recipe(calibration="{source: self, samples: 4, sequence_length: 8}", **parts)
    read = bench.recipe(calibration="{samples: 4, sequence_length: 8}", **parts)
    needed, without = (engine.plan(wanted).needed["memory_bytes"] for wanted in (recipe, read))
    assert needed > without
    memory = namedtuple("memory", "available")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(needed - 1))
    with pytest.raises(InputError, match=r"source: self needs the whole model in memory"):
        engine.plan(recipe)
    engine.plan(read)


def test_special_tokens_start_no_text_and_a_begin_token_stands_before_it(bench: Bench, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    folder = tiny_llama(tmp_path / "model")
    tokenizer = tiny_tokenizer(folder)
    tokenizer.add_special_tokens({"bos_token": "<begin>", "additional_special_tokens": ["<turn>"]})
    begin = tokenizer.convert_tokens_to_ids("<begin>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<begin> $A", None, [("<begin>", begin)])
    tokenizer.save_pretrained(folder)
    out = tmp_path / "out"
    kept: list[Any] = []

    def keep(model: Any, writing: Writing, *more: Any) -> tuple[Tensor, int]:
        kept.append(writing)
        return write_windows(model, writing, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compress.texts.write_windows", keep)
        engine.run(bench.recipe(model=str(folder), passes="[gptq]", calibration=SELF), out)
    (writing,) = kept
    assert list(writing.prefix) == [begin]
    assert list(writing.ends) == [0]
    special = {0, begin, tokenizer.convert_tokens_to_ids("<turn>")}
    assert set(writing.starts.tolist()) == set(range(len(tokenizer))) - special
    assert Report.read(out / "report.json").calibration["obtained_samples"] == 4
