"""Which layers keep fp32 activations: costs are what rounding really does, and the file says so node by node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor

from compress import engine, registry
from compress.errors import InputError
from compress.models.checkpoint import open_checkpoint
from compress.models.decoder import Decoder
from compress.passes.activations import activation_costs, round_rows
from compress.passes.rtn import Rtn
from compress.prepare import layer_shapes
from compress.recipe import loads
from compress.session import Session
from compress.store import Store
from tests.compress.families import saved, tokens_of, whole_model
from tests.compress.runs import Bench, at_step
from tests.support import mean_kld

WIDTH = 32


def naive_rounded(row: list[float], width: int) -> list[float]:
    found: list[float] = []
    for start in range(0, len(row), width):
        block = row[start : start + width]
        scale = max(map(abs, block)) / 127
        found += [round(x / scale) * scale if scale else 0.0 for x in block]
    return found


@pytest.mark.parametrize("columns", [64, 72, 20])
def test_rows_are_rounded_block_by_block(columns: int) -> None:
    inputs = torch.randn(3, columns, generator=torch.Generator().manual_seed(columns)) * 5
    inputs[1, :WIDTH] = 0
    wanted = torch.tensor([naive_rounded(row, WIDTH) for row in inputs.tolist()])
    torch.testing.assert_close(round_rows(inputs, WIDTH), wanted, atol=1e-5, rtol=1e-5)


def session_of(folder: Path, tokens: Tensor, real: Tensor | None = None) -> Session:
    decoder = Decoder(open_checkpoint(folder))
    shapes = layer_shapes(decoder.checkpoint, decoder.spec)
    pinned = dict.fromkeys(decoder.spec.ends)
    session = Session(decoder, tokens, Store(folder / "work"), shapes, pinned, real=real)
    Rtn().check(session)
    return session


def true_costs(folder: Path, layers: list[str], tokens: Tensor) -> dict[str, float]:
    """KLD of the model with the inputs of one layer rounded, from the model."""
    model = whole_model(folder)
    with torch.no_grad():
        exact, found = model(tokens).logits, {}
        for layer in layers:
            module = model.get_submodule(layer)
            handle = module.register_forward_pre_hook(lambda _, given: (round_rows(given[0], WIDTH),))
            found[layer] = mean_kld(exact, model(tokens).logits)
            handle.remove()
    return found


@pytest.mark.parametrize("variant", ["llama", "gemma2", "phi3"])
def test_costs_are_what_rounding_does(variant: str, tmp_path: Path) -> None:
    tokens = tokens_of(12, 64)
    folder = saved(variant, tmp_path / "model")
    found = activation_costs(session_of(folder, tokens), 12)
    wanted = true_costs(folder, list(found), tokens)
    assert set(found) == set(Decoder(open_checkpoint(folder)).spec.all_linears())
    # Predicted from one drawn token for each position: close in sum, and each of its size.
    assert sum(found.values()) == pytest.approx(sum(wanted.values()), rel=0.3)
    assert all(0.4 < found[layer] / wanted[layer] < 2.5 for layer in found)


def test_padding_costs_nothing(tmp_path: Path) -> None:
    folder, tokens = saved("llama", tmp_path / "model"), tokens_of(4, 32)
    real = torch.ones_like(tokens, dtype=torch.bool)
    real[:, 20:] = False
    other = torch.where(real, tokens, 7)
    one, two = (activation_costs(session_of(folder, given, real), 4) for given in (tokens, other))
    assert one == pytest.approx(two, rel=1e-4)


def levels_of(out: Path) -> dict[str, int]:
    graph = onnx.load(out / "onnx" / "model.onnx", load_external_data=False).graph
    parts = {
        node.name.removesuffix(".codes"): [name.removesuffix(".codes") for name in node.input]
        for node in graph.node
        if node.op_type == "Concat" and node.name.endswith(".codes")
    }
    return {
        layer: next(helper.get_attribute_value(a) for a in node.attribute if a.name == "accuracy_level")
        for node in graph.node
        if node.op_type == "MatMulNBits"
        for layer in parts.get(node.name, [node.name])
    }


def test_a_run_keeps_the_chosen_layers_in_fp32_and_loses_less(bench: Bench, tmp_path: Path) -> None:
    lost: dict[str, Any] = {}
    for name, passes in (("all", "rtn"), ("less", "rtn, {activations: {share: 0.2, samples: 8}}")):
        recipe = bench.recipe(passes=f"[{passes}]", measure="false")
        report = engine.run(recipe, tmp_path / name)
        (artifact,) = report.artifacts
        assert artifact.parity is not None
        lost[name] = artifact.parity.kld_as_run
    record = next(found for found in report.passes if found.name == "activations")
    chosen = record.summary["fp32_activations"]
    assert chosen
    assert {layer for layer, level in levels_of(tmp_path / "less").items() if level == 0} == set(chosen)
    assert set(levels_of(tmp_path / "all").values()) == {4}
    assert 0 < record.summary["share_of_weights"] <= 0.2
    assert record.summary["predicted_kld_left"] < record.summary["predicted_kld"]
    assert lost["less"] < 0.9 * lost["all"]
    # Those that gain most for each weight.
    sizes = {row.layer: row.bytes for row in record.layers}
    worth = {row.layer: (row.sensitivity or {})["8-bit activations"] / sizes[row.layer] for row in record.layers}
    assert max(worth, key=worth.__getitem__) in chosen


def test_only_four_bits_are_chosen_and_a_plan_is_followed(bench: Bench, tmp_path: Path) -> None:
    passes = "[{activations: {share: 0.5}}, {mixed: {target_bits: 6, samples: 2}}, rtn]"
    report = engine.run(bench.recipe(passes=passes, measure="false", evaluate="false"), tmp_path / "out")
    record = next(found for found in report.passes if found.name == "activations")
    assert [found.name for found in report.passes] == ["mixed", "activations", "rtn"]
    assert {row.scheme for row in record.layers} == {"int4-g32"}
    assert record.summary["share_of_weights"] <= 0.5


def test_a_run_that_goes_on_keeps_what_was_chosen(bench: Bench, tmp_path: Path) -> None:
    recipe = bench.recipe(passes="[rtn, {activations: {share: 0.2}}]", measure="false", evaluate="false")

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run(recipe, tmp_path / "out", progress=at_step("writing onnx", interrupt))
    engine.run(recipe, tmp_path / "out", resume=True)
    assert 0 in levels_of(tmp_path / "out").values()


def test_formats_that_decide_themselves_say_so_and_settings_are_checked(bench: Bench) -> None:
    for export, names in (("[onnx, gguf]", ["gguf"]), ("[{onnx: {dialect: standard}}]", ["onnx"])):
        warnings = engine.plan(bench.recipe(passes="[rtn, activations]", export=export)).warnings
        said = [
            line
            for line in warnings
            if line.endswith("decides itself where activations are rounded: no pass changes that")
        ]
        assert [line.partition(":")[0] for line in said] == names
    for value, what in (("{share: 0}", "share: 0.0 is not above 0"), ("{samples: 0}", "samples: 0 is not at least 1")):
        with pytest.raises(InputError, match=what):
            loads(f"model: x\npasses: [rtn, {{activations: {value}}}]\nexport: [onnx]\n", registry.load)
