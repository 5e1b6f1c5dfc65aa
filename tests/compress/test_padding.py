"""Short documents side by side: padding changes nothing, whatever it is and however many windows go at once.

A loader that dropped the mask is NVIDIA/Model-Optimizer #1261; a tokenizer without a pad token, lemonade #68.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import engine
from compress.models import decoder
from compress.models.checkpoint import open_checkpoint
from compress.passes.awq import Awq
from compress.passes.gptq import Gptq
from compress.passes.mixed import Mixed, fisher_information
from compress.passes.rtn import Rtn
from compress.scheme import QuantScheme
from tests.compress.families import ROUTED, VARIANTS, Compressed, Watch, compressed, saved, tokens_of
from tests.compress.runs import Bench, sentences
from tests.support import tiny_llama

LENGTHS = torch.tensor([4, 32])
REAL = torch.arange(32) < LENGTHS[:, None]


def pair(padding: int = 0) -> Tensor:
    """Two documents of 4 and 32 tokens, the first padded with ``padding``."""
    return torch.where(REAL, tokens_of(2, 32), padding)


def alone(index: int) -> Tensor:
    return pair()[index : index + 1, : int(LENGTHS[index])]


def watched(folder: Path, workdir: Path, tokens: Tensor, real: Tensor | None = None) -> Watch:
    watch = Watch()
    compressed(folder, workdir, [watch], tokens, real)
    return watch


@pytest.mark.parametrize("variant", VARIANTS)
def test_statistics_of_padded_documents_are_those_of_each_alone(variant: str, tmp_path: Path) -> None:
    folder = saved(variant, tmp_path / "model")
    both = watched(folder, tmp_path / "both", pair(), REAL).seen
    single = [watched(folder, tmp_path / str(index), alone(index)).seen for index in range(2)]
    layers = {name for name in both if name.startswith("model.layers.0.") or "layers" not in name}
    for layer in layers:
        tokens = sum(seen[layer].tokens for seen in single)
        assert both[layer].tokens == tokens
        if not both[layer].routed:
            assert tokens == 36
        gram = single[0][layer].gram + single[1][layer].gram
        torch.testing.assert_close(both[layer].gram, gram, rtol=1e-4, atol=1e-3 * float(gram.abs().max() + 1e-9))


PASSES: dict[str, list[Any]] = {
    "gptq": [Gptq(QuantScheme(4, 32))],
    "awq": [Awq(steps=5), Rtn(QuantScheme(4, 32))],
    "mixed": [Mixed(6, samples=2), Gptq()],
}


def codes(found: Compressed) -> dict[str, Tensor]:
    return {layer: found.model.quantized(layer).codes for layer in found.model.schemes}


def unlike(one: Compressed, other: Compressed) -> float:
    """Share of the codes that differ."""
    pairs = [(found, codes(other)[layer]) for layer, found in codes(one).items()]
    return sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("variant", ["llama", ROUTED[1]])
def test_no_pass_sees_what_the_padding_is(name: str, variant: str, tmp_path: Path) -> None:
    folder = saved(variant, tmp_path / "model")
    one = compressed(folder, tmp_path / "one", PASSES[name], pair(0), REAL)
    other = compressed(folder, tmp_path / "other", PASSES[name], pair(7), REAL)
    unmasked = compressed(folder, tmp_path / "unmasked", PASSES[name], pair(7))
    # Experts multiply real and padding tokens at once: how many of these there are decides the order of the sums.
    assert unlike(one, other) <= (0.005 if variant in ROUTED else 0)
    assert unlike(one, unmasked) > 0.02


@pytest.mark.parametrize("name", ["gptq", "awq"])
@pytest.mark.parametrize("variant", ["llama", "mistral", ROUTED[1]])
def test_one_window_at_a_time_gives_what_two_give(
    name: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(variant, tmp_path / "model")
    two = compressed(folder, tmp_path / "two", PASSES[name], pair(), REAL)
    monkeypatch.setattr(decoder, "TOKENS_PER_FORWARD", 32)
    one = compressed(folder, tmp_path / "one", PASSES[name], pair(), REAL)
    assert [layer.tokens for done in one.done for layer in done.layers] == [
        layer.tokens for done in two.done for layer in done.layers
    ]
    # Of two scales that are nearly as good, another order of the sums may choose the other.
    found = {layer: one.model.quantized(layer).dequantize() for layer in one.model.schemes}
    apart = {layer: first - two.model.quantized(layer).dequantize() for layer, first in found.items()}
    assert all(float(apart[layer].norm()) <= 0.03 * float(first.norm()) for layer, first in found.items())
    assert together(apart) <= 0.01 * together(found)


def together(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors.values()]).norm())


def fisher(folder: Path, workdir: Path, tokens: Tensor, real: Tensor | None, samples: int) -> dict[str, Tensor]:
    found = compressed(folder, workdir, [Rtn()], tokens, real)
    wanted = set(found.session.decoder.spec.all_linears())
    return {layer: value for layer, _, value in fisher_information(found.session, samples, wanted)}


@pytest.mark.parametrize("variant", ["llama", ROUTED[2]])
def test_sensitivity_of_a_padded_document_is_that_of_the_document(variant: str, tmp_path: Path) -> None:
    folder = saved(variant, tmp_path / "model")
    padded = fisher(folder, tmp_path / "padded", pair(), REAL, 1)
    single = fisher(folder, tmp_path / "single", alone(0), None, 1)
    for layer, value in padded.items():
        torch.testing.assert_close(value, single[layer], rtol=1e-3, atol=1e-5 * float(value.max()))


def text_of(model: Path, count: int, seed: int) -> str:
    """A text of ``count`` tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.pad_token_id is None
    ids = tokenizer(sentences(seed, 2 * count)).input_ids[:count]
    text = str(tokenizer.decode(ids))
    assert len(tokenizer(text).input_ids) == count
    return text


@pytest.mark.parametrize("passes", ["[gptq]", "[awq, {rtn: {scheme: int4-g32}}]"])
def test_a_run_counts_the_tokens_of_two_short_texts(bench: Bench, tmp_path: Path, passes: str) -> None:
    rows = [{"text": text_of(bench.model, 4, 1)}, {"text": text_of(bench.model, 32, 2)}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f"{{source: jsonl, path: {path}, samples: 2, sequence_length: 64, packing: false}}"
    report = engine.run(bench.recipe(passes=passes, calibration=text), tmp_path / "out")
    counted = {"obtained_samples": 2, "obtained_tokens": 36, "longest": 32, "shortest": 4, "packing": False}
    assert counted.items() <= report.calibration.items()
    seen = {layer.tokens for layer in report.passes[0].layers if ".layers." in layer.layer}
    assert seen == {36}


def test_documents_longer_than_a_window_are_cut_and_counted(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text(text_of(bench.model, 100, 3))
    text = f"{{source: text, path: {path}, samples: 1, sequence_length: 64, packing: false}}"
    audit = engine.plan(bench.recipe(passes="[gptq]", calibration=text)).calibration
    assert (audit["obtained_tokens"], audit["tokens_dropped"], audit["documents_truncated"]) == (64, 36, 1)


def test_the_tokenizer_needs_no_pad_token_and_the_model_takes_any(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model")
    assert open_checkpoint(folder).config["pad_token_id"] is None
    seen = watched(folder, tmp_path / "work", pair(319), REAL).seen
    assert all(torch.isfinite(stats.gram).all() for stats in seen.values())
