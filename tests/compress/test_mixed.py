"""Mixed precision: the sensitivities are the model's own, the plan is the best there is, the budget is kept."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from compress.artifacts import inspect
from compress.engine import run as run_recipe
from compress.fields import ByteSize
from compress.grid import round_to_nearest
from compress.models.checkpoint import open_checkpoint
from compress.models.decoder import Decoder
from compress.passes.mixed import Mixed, fisher_information
from compress.report import PassRecord
from compress.scheme import FLOAT_BITS, INT8_G32, QuantScheme
from compress.session import Session
from compress.store import Store
from tests.compress.families import saved, whole_model
from tests.compress.runs import Bench
from tests.reference.mixed import fisher
from tests.support import mean_kld, tiny_llama

Plan = Mapping[str, QuantScheme | None]


def parse(*texts: str) -> tuple[QuantScheme, ...]:
    return tuple(map(QuantScheme.parse, texts))


TWO = parse("int4-g32", "int8-g32")
THREE = parse("int2-g32", "int4-g32", "int8-g32-asym")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("mixed") / "tiny")


def tokens_of(windows: int, length: int = 24) -> torch.Tensor:
    return torch.randint(0, 281, (windows, length), generator=torch.Generator().manual_seed(7))


def session_for(folder: Path, pinned: Plan | None = None, windows: int = 4, seed: int = 3) -> Session:
    decoder = Decoder(open_checkpoint(folder))
    spec = decoder.spec
    layers = [spec.ends[0], *spec.all_linears(), *spec.ends[1:]]
    found = {layer: decoder.checkpoint.shape(f"{layer}.weight") for layer in layers}
    shapes = {layer: (shape[0], shape[1]) for layer, shape in found.items()}
    fixed: Plan = {**dict.fromkeys(spec.ends, INT8_G32), **(pinned or {})}
    plan = {layer: scheme for layer, scheme in fixed.items() if scheme is not None}
    return Session(decoder, tokens_of(windows), Store(Path()), shapes, fixed, plan, seed)


def run(session: Session, step: Mixed) -> PassRecord:
    assert step.check(session) == []
    return step.apply(session)


# --- the sensitivities


@pytest.mark.parametrize(
    "overrides", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "num_hidden_layers": 3}]
)
def test_fisher_information_is_that_of_the_whole_model(tmp_path: Path, overrides: dict[str, Any]) -> None:
    folder = tiny_llama(tmp_path / "tiny", **overrides)
    session = session_for(folder)
    layers = list(session.decoder.spec.all_linears())
    expected = fisher(folder, session.tokens[:3], layers, session.seed)
    seen = []
    for layer, weight, found in fisher_information(session, 3, set(layers)):
        seen.append(layer)
        assert torch.equal(weight, session.decoder.parameter(f"{layer}.weight"))
        assert not weight.requires_grad
        scale = float(expected[layer].max())
        torch.testing.assert_close(found.double(), expected[layer], rtol=1e-3, atol=1e-6 * scale)
    assert sorted(seen) == sorted(layers)
    assert not [name for name, parameter in session.decoder._model.named_parameters() if not parameter.is_meta]


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_measured_as_the_whole_model_has_them(tmp_path: Path, tied: bool) -> None:
    folder = tiny_llama(tmp_path / "tiny", tie_word_embeddings=tied)
    session = session_for(folder)
    ends = session.decoder.spec.ends
    # Of a tied matrix its two uses are added up: as a model has them where head and embedding are equal, and two.
    apart = _untied(folder, tmp_path / "apart") if tied else folder
    expected = fisher(apart, session.tokens[:3], ["model.embed_tokens", "lm_head"], session.seed)
    if tied:
        expected = {"model.embed_tokens": sum(expected.values())}  # type: ignore[dict-item]
    found = {layer: (weight, information) for layer, weight, information in fisher_information(session, 3, set(ends))}
    assert set(found) == set(expected)
    for layer, (weight, information) in found.items():
        assert torch.equal(weight, session.decoder.parameter(f"{layer}.weight"))
        scale = float(expected[layer].max())
        torch.testing.assert_close(information.double(), expected[layer], rtol=1e-3, atol=1e-6 * scale)
    assert not [name for name, parameter in session.decoder._model.named_parameters() if not parameter.is_meta]


def test_a_scaled_embedding_is_measured_with_its_scale(tmp_path: Path) -> None:
    folder = saved("gemma", tmp_path / "gemma")
    checkpoint = open_checkpoint(folder)
    session = session_for(folder)
    ((_, _, information),) = fisher_information(session, 2, {"model.embed_tokens"})
    model = whole_model(folder)
    tokens, used = session.tokens[:2], torch.zeros(checkpoint.shape("model.embed_tokens.weight"), dtype=torch.float64)
    generator = torch.Generator().manual_seed(session.seed)
    for window in tokens:
        rows = model.get_input_embeddings().weight.detach().clone().requires_grad_(True)
        head = rows.detach().clone().requires_grad_(True)
        hidden = model.model(inputs_embeds=rows[window][None] * session.decoder.spec.scaling.embedding)
        logits = hidden.last_hidden_state[0] @ head.T
        log_p = torch.log_softmax(logits, -1)
        drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
        (-log_p.gather(1, drawn).sum()).backward()  # type: ignore[no-untyped-call]
        assert rows.grad is not None
        assert head.grad is not None
        used += rows.grad.double().square() + head.grad.double().square()
    used /= tokens.numel()
    torch.testing.assert_close(information.double(), used, rtol=1e-3, atol=1e-6 * float(used.max()))


def _untied(folder: Path, out: Path) -> Path:
    """The same model with a head of its own."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(out / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_only_wanted_layers_are_measured(folder: Path) -> None:
    session = session_for(folder)
    wanted = {"model.layers.1.mlp.up_proj", "model.layers.0.self_attn.k_proj"}
    assert [name for name, _, _ in fisher_information(session, 2, wanted)] == [
        "model.layers.1.mlp.up_proj",
        "model.layers.0.self_attn.k_proj",
    ]


@pytest.mark.parametrize("layer", ["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.v_proj"])
def test_predicted_divergence_is_near_the_real_one(folder: Path, layer: str) -> None:
    from transformers import AutoModelForCausalLM

    session = session_for(folder, windows=64)
    ((_, weight, information),) = fisher_information(session, 64, {layer})
    rounded = round_to_nearest(weight, QuantScheme.parse("int4-g32")).dequantize()
    predicted = 0.5 * float((information * (rounded - weight).square()).sum())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        original = model(session.tokens).logits
        model.get_parameter(f"{layer}.weight").copy_(rounded)
        real = mean_kld(original, model(session.tokens).logits)
    assert predicted == pytest.approx(real, rel=0.25)


# --- the pass


def bits_of(session: Session) -> Fraction:
    """Average over the block linears, from the plan alone."""
    total = weights = 0
    for layer in session.decoder.spec.all_linears():
        rows, columns = session.shapes[layer]
        weights += rows * columns
        scheme = session.plan.get(layer)
        total += rows * columns * FLOAT_BITS if scheme is None else scheme.stored_bits((rows, columns))
    return Fraction(total, weights)


@pytest.mark.parametrize(
    ("target", "choices"), [(4.5, TWO), (5.3, TWO), (8.5, TWO), (2.5, THREE), (4.07, THREE), (100, TWO)]
)
def test_the_achieved_bits_are_those_of_the_plan_and_within_the_target(
    folder: Path, target: float, choices: tuple[QuantScheme, ...]
) -> None:
    session = session_for(folder)
    record = run(session, Mixed(target, choices, samples=2))
    achieved = record.summary["achieved_bits"]
    assert achieved == pytest.approx(float(bits_of(session)), rel=1e-12)
    assert achieved <= target
    linears = list(session.decoder.spec.all_linears())
    assert [layer.layer for layer in record.layers] == linears
    for layer in record.layers:
        assert layer.scheme == str(session.plan[layer.layer])
        assert layer.sensitivity is not None
        assert set(layer.sensitivity) == set(map(str, choices))
        assert layer.bytes == session.plan[layer.layer].stored_bits(session.shapes[layer.layer]) // 8
    assert sum(record.summary["layers_per_scheme"].values()) == len(linears)
    chosen = sum((layer.sensitivity or {})[layer.scheme] for layer in record.layers)
    assert record.summary["predicted_kld"] == pytest.approx(chosen)


def test_the_budget_is_not_cut_by_a_float() -> None:
    # 4.6 is no binary fraction: as floats, the product falls one bit short, and with it a whole layer.
    assert int(4.6 * 106_168_320) == 488_374_271
    assert Mixed(4.6, TWO)._budget(106_168_320) == 488_374_272


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 10**9), st.integers(1, 99_999))
def test_the_budget_is_exact_for_every_decimal_target(weights: int, thousandths: int) -> None:
    target = thousandths / 1000
    budget = Mixed(target, TWO)._budget(weights)
    assert budget == thousandths * weights // 1000
    assert budget / weights <= target


def test_more_bits_never_predict_more_loss_and_all_bits_pick_the_best(folder: Path) -> None:
    losses = []
    for target in (4.5, 5.0, 6.0, 7.0, 8.5):
        record = run(session_for(folder), Mixed(target, TWO, samples=2))
        losses.append(record.summary["predicted_kld"])
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == pytest.approx(record.summary["predicted_kld_uniform"]["int4-g32"])
    assert losses[-1] == pytest.approx(record.summary["predicted_kld_uniform"]["int8-g32"])


def test_the_plan_beats_random_plans_of_the_same_bits(folder: Path) -> None:
    session = session_for(folder)
    record = run(session, Mixed(5.5, TWO, samples=4))
    budget = bits_of(session)
    loss = {layer.layer: layer.sensitivity or {} for layer in record.layers}
    chooser, tried = random.Random(0), []
    for _ in range(200):
        for layer in loss:
            session.plan[layer] = TWO[0]
        for layer in chooser.sample(list(loss), len(loss)):
            session.plan[layer] = TWO[1]
            if bits_of(session) > budget:
                session.plan[layer] = TWO[0]
        tried.append(sum(loss[layer][str(session.plan[layer])] for layer in loss))
    assert record.summary["predicted_kld"] <= min(tried) * (1 + 1e-6)
    assert record.summary["predicted_kld"] < 0.9 * sum(tried) / len(tried)


def test_the_same_seed_gives_the_same_plan_and_numbers(folder: Path) -> None:
    one, other, third = (run(session_for(folder, seed=seed), Mixed(5.0, TWO, samples=2)) for seed in (1, 1, 2))
    assert one.layers == other.layers
    assert one.layers != third.layers


def test_pinned_layers_keep_their_schemes_and_count(folder: Path) -> None:
    pinned: Plan = {
        "model.layers.0.mlp.down_proj": QuantScheme.parse("int8-g32"),
        "model.layers.1.self_attn.o_proj": None,
    }
    session = session_for(folder, pinned)
    record = run(session, Mixed(7.5, TWO, samples=2))
    assert session.plan["model.layers.0.mlp.down_proj"] == INT8_G32
    assert "model.layers.1.self_attn.o_proj" not in session.plan
    assert not {layer.layer for layer in record.layers} & set(pinned)
    assert record.summary["achieved_bits"] == pytest.approx(float(bits_of(session)))
    assert record.summary["achieved_bits"] <= 7.5
    for end in session.decoder.spec.ends:
        assert session.plan[end] == INT8_G32


# --- a target in bytes


@pytest.mark.parametrize("tied", [False, True])
def test_a_size_is_kept_by_everything_that_the_files_hold(bench: Bench, tmp_path: Path, tied: bool) -> None:
    folder = tiny_llama(tmp_path / "tiny", tie_word_embeddings=tied)
    shapes = session_for(folder).shapes
    least, most = (sum(scheme.stored_bits(shape) for shape in shapes.values()) // 8 for scheme in TWO)
    target = (least + most) // 2
    passes = f"[{{mixed: {{target_size: {target}, samples: 2}}}}, gptq]"
    report = run_recipe(bench.recipe(model=str(folder), passes=passes, export="[onnx, gguf]"), tmp_path / "out")
    (planned, _) = report.passes
    assert {layer.layer for layer in planned.layers} == set(shapes)
    assert 0.9 * target < planned.summary["achieved_bytes"] <= target
    for format_ in ("onnx", "gguf"):
        tensors = inspect(tmp_path / "out" / format_).tensors
        assert sum(tensor.bytes for tensor in tensors if tensor.layer in shapes) <= target


def test_a_size_that_cannot_be_reached_is_refused_with_the_least(folder: Path) -> None:
    session = session_for(folder, windows=1)
    for end in session.decoder.spec.ends:
        session.plan.pop(end)
    free = replace(session, pinned={})
    least = sum(TWO[0].stored_bits(shape) for shape in session.shapes.values()) // 8
    (complaint,) = Mixed(choices=TWO, target_size=ByteSize(least - 1)).check(free)
    assert f"mixed.target_size: {least - 1} bytes cannot be reached" in complaint
    assert f"the least is {least} (" in complaint
    assert Mixed(choices=TWO, target_size=ByteSize(least)).check(free) == []
    assert set(free.plan.values()) == {TWO[0]}


@pytest.mark.parametrize("arguments", [{}, {"target_bits": 5.0, "target_size": ByteSize(10**6)}])
def test_a_target_is_given_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give either target_bits or target_size"):
        Mixed(**arguments)


# --- refusals, before any work


@pytest.mark.parametrize(
    ("target", "choices", "pinned", "least"),
    [
        (4.4, TWO, {}, "4.500"),
        (2.0, THREE, {}, "2.500"),
        (4.5, TWO, {"model.layers.0.self_attn.o_proj": None}, "6.334"),
    ],
)
def test_an_unreachable_target_is_refused_with_the_least(
    folder: Path, target: float, choices: tuple[QuantScheme, ...], pinned: Plan, least: str
) -> None:
    session = session_for(folder, pinned, windows=1)
    (complaint,) = Mixed(target, choices).check(session)
    assert f"mixed.target_bits: {target:g} bits a weight cannot be reached" in complaint
    assert f"the least is {least}" in complaint
    assert Mixed(float(least), choices).check(session_for(folder, pinned, windows=1)) == []


def test_a_first_plan_is_there_for_the_exporters_to_check(folder: Path) -> None:
    session = session_for(folder)
    assert Mixed(5.0, TWO).check(session) == []
    assert {session.plan[layer] for layer in session.decoder.spec.all_linears()} == {TWO[0]}


def test_nothing_left_to_choose_is_a_complaint(folder: Path) -> None:
    everything: Plan = dict.fromkeys(session_for(folder).shapes, INT8_G32)
    (complaint,) = Mixed(9.0, TWO).check(session_for(folder, everything))
    assert "nothing to choose" in complaint


def test_says_how_many_windows_it_really_used(folder: Path) -> None:
    assert run(session_for(folder, windows=2), Mixed(5.0, TWO, samples=6)).summary["windows"] == 2
    assert run(session_for(folder, windows=4), Mixed(5.0, TWO, samples=3)).summary["windows"] == 3


@pytest.mark.parametrize("arguments", [{"choices": TWO[:1]}, {"choices": (TWO[0], TWO[0])}, {"samples": 0}])
def test_nonsense_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"choices|samples"):
        Mixed(4.5, **arguments)
