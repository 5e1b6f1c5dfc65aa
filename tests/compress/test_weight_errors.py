"""Weights that a format or a number type cannot hold: said with every layer before the work, or stored as they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from compress import engine, registry
from compress.errors import InputError
from compress.models.sources import open_model
from compress.protocols import Artifact
from tests.compress.runs import Bench
from tests.compress.test_run_errors import Captured, refused
from tests.support import tiny_llama

# --- widths that a group does not divide (llm-compressor #2353)


@pytest.fixture(scope="module")
def odd(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 inputs, and 200 in down_proj."""
    folder = tmp_path_factory.mktemp("odd") / "model"
    return tiny_llama(folder, vocab_size=997, hidden_size=96, intermediate_size=200)


ODD_LAYERS = {
    "self_attn.q_proj": (96, 96),
    "self_attn.k_proj": (48, 96),
    "self_attn.v_proj": (48, 96),
    "self_attn.o_proj": (96, 96),
    "mlp.gate_proj": (200, 96),
    "mlp.up_proj": (200, 96),
    "mlp.down_proj": (96, 200),
}


@pytest.mark.parametrize(
    ("export", "group", "roles"),
    [("onnx", "g48", list(ODD_LAYERS)), ("gguf", "g48", list(ODD_LAYERS))]
    + [("gguf", group, ["mlp.down_proj"]) for group in ("g128", "g64", "g32", "channel")],
)
def test_every_layer_that_a_format_cannot_hold_is_named_with_its_shape(
    bench: Bench, odd: Path, tmp_path: Path, capsys: Captured, export: str, group: str, roles: list[str]
) -> None:
    passes = f"[{{gptq: {{scheme: int4-{group}}}}}]"
    recipe = bench.file(tmp_path / "recipe.yaml", model=str(odd), passes=passes, export=f"[{export}]")
    said = refused(capsys, "run", recipe)
    named = [line for line in said.splitlines() if re.match(rf"{export}: model\.layers\.\d", line)]
    assert len(named) == 2 * len(roles)
    for line in named:
        role = ".".join(re.split(r"[ :,]", line)[2].split(".")[3:])
        rows, columns = ODD_LAYERS[role]
        assert re.search(rf"\b{rows}\b.*\b{columns}\b", line)
        assert f"int4-{group}" in line
    assert "ignore" in said


def test_complaints_of_both_formats_come_at_once(bench: Bench, odd: Path) -> None:
    with pytest.raises(InputError) as caught:
        engine.plan(bench.recipe(model=str(odd), passes="[{rtn: {scheme: int4-g48}}]", export="[onnx, gguf]"))
    lines = caught.value.what.splitlines()
    assert [line.split(":")[0] for line in lines] == ["onnx"] * 14 + ["gguf"] * 14


@pytest.mark.parametrize(
    ("scheme", "export", "ignore"),
    [
        ("int4-g64-asym", "onnx", "[]"),
        ("int4-g128", "onnx", "[]"),
        ("int4-channel", "onnx", "[]"),
        ("int4-g64", "gguf", '["*.down_proj"]'),
    ],
)
def test_a_narrower_last_group_is_stored_and_computed(
    bench: Bench, odd: Path, tmp_path: Path, scheme: str, export: str, ignore: str
) -> None:
    passes = f"[{{rtn: {{scheme: {scheme}}}}}]"
    recipe = bench.recipe(model=str(odd), passes=passes, export=f"[{export}]", ignore=ignore)
    report = engine.run(recipe, tmp_path / "out")
    (artifact,) = report.artifacts
    assert artifact.parity is not None
    assert artifact.parity.passed
    assert {layer.scheme for layer in report.passes[0].layers} == {scheme, "int8-g32"}
    exporter = registry.load("exporters", export)()
    layers = [f"model.layers.1.{role}" for role in ODD_LAYERS if f"*.{role.split('.')[1]}" not in ignore]
    original = open_model(str(odd))
    stored = Artifact(export, tmp_path / "out" / export, f"model.{export}")
    for layer, weight in exporter.read_back(stored, layers):
        wanted = original.tensor(f"{layer}.weight").numpy()
        last = slice(-8, None)
        # Dropped or misplaced columns would be off by as much as the weights themselves.
        assert np.abs(weight - wanted)[:, last].mean() < 0.2 * np.abs(wanted)[:, last].mean()


@pytest.mark.parametrize("scheme", ["int4-g32", "int4-g64", "int4-channel"])
@pytest.mark.parametrize("passes", ["[{{gptq: {{scheme: {0}}}}}]", "[awq, {{rtn: {{scheme: {0}}}}}]"])
def test_torch_and_both_files_agree_where_the_last_group_is_narrower(
    bench: Bench, odd: Path, tmp_path: Path, scheme: str, passes: str
) -> None:
    parts = {"passes": passes.format(scheme), "export": "[onnx, gguf]", "ignore": '["*.down_proj"]'}
    report = engine.run(bench.recipe(model=str(odd), **parts), tmp_path / "out")
    assert all(artifact.parity is not None and artifact.parity.passed for artifact in report.artifacts)
    layers = [f"model.layers.1.{role}" for role in ODD_LAYERS if "down" not in role]
    onnx, gguf = (
        dict(registry.load("exporters", name)().read_back(Artifact(name, tmp_path / "out" / name, entry), layers))
        for name, entry in (("onnx", "model.onnx"), ("gguf", "model.gguf"))
    )
    for layer in layers:
        np.testing.assert_array_equal(onnx[layer], gguf[layer])
    assert set(report.model["float_layers"]) == {f"model.layers.{index}.mlp.down_proj" for index in range(2)}


# --- values that are not finite (exllamav3 #58)


def spoil(name: str, place: tuple[int, ...], value: float) -> Callable[[dict[str, Tensor]], None]:
    def edit(parameters: dict[str, Tensor]) -> None:
        parameters[name][place] = value

    return edit


EVERY_PASS = ("[rtn]", "[gptq]", "[awq, rtn]", "[{mixed: {target_bits: 6}}, rtn]", "[rotate, rtn]")
SELF = {"calibration": "{source: self, samples: 4, sequence_length: 32}"}
"""Text that the model writes would be nonsense."""


@pytest.mark.parametrize(
    ("name", "place", "value", "count"),
    [
        ("model.layers.0.mlp.down_proj.weight", (3, 5), float("nan"), "1 of 6144"),
        ("model.embed_tokens.weight", (200,), float("inf"), "64 of 20480"),
        ("lm_head.weight", (0, 0), float("nan"), "1 of 20480"),
    ],
)
@pytest.mark.parametrize("passes", EVERY_PASS)
def test_values_that_are_not_finite_are_counted_and_named_before_any_work(
    bench: Bench,
    tmp_path: Path,
    capsys: Captured,
    passes: str,
    name: str,
    place: tuple[int, ...],
    value: float,
    count: str,
) -> None:
    model = tiny_llama(tmp_path / "model", spoil(name, place, value), dtype=torch.bfloat16)
    recipe = bench.file(tmp_path / "recipe.yaml", model=str(model), passes=passes, export="[onnx, gguf]", **SELF)
    assert f"{name}: {count} values are NaN or infinite" in refused(capsys, "run", recipe)


@pytest.mark.parametrize("passes", EVERY_PASS)
@pytest.mark.parametrize("source", ["text", "self"])
def test_a_model_that_overflows_is_refused_with_the_place(
    bench: Bench, tmp_path: Path, capsys: Captured, passes: str, source: str
) -> None:
    def overflow(parameters: dict[str, Tensor]) -> None:
        parameters["model.layers.0.mlp.down_proj.weight"].fill_(1e38)

    model = tiny_llama(tmp_path / "model", overflow)
    parts = SELF if source == "self" else {}
    passes = passes.replace("target_bits: 6", "target_bits: 20")
    recipe = bench.file(tmp_path / "recipe.yaml", model=str(model), passes=passes, ignore="['*.down_proj']", **parts)
    said = refused(capsys, "run", recipe)
    if source == "self" and passes not in ("[rtn]", "[rotate, rtn]"):
        assert "predictions are NaN or infinite: it cannot write its own calibration text" in said
    else:
        assert "what leaves block 0 is not finite" in said


@pytest.mark.parametrize("passes", EVERY_PASS)
def test_weights_beyond_what_scales_hold_are_named(bench: Bench, tmp_path: Path, capsys: Captured, passes: str) -> None:
    model = tiny_llama(tmp_path / "model", spoil("model.layers.1.mlp.down_proj.weight", (0, 0), 1e6))
    said = refused(capsys, "run", bench.file(tmp_path / "recipe.yaml", model=str(model), passes=passes))
    assert "model.layers.1.mlp.down_proj: weights up to 1" in said
