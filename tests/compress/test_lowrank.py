"""The low-rank product beside a layer: the best of its rank, in the file to the bit, counted, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from compress import engine, registry
from compress.errors import InputError
from compress.passes.lowrank import best_product, side_path
from compress.recipe import loads
from compress.scheme import QuantScheme, lowrank_bits
from compress.store import Store
from compress.tensor import LowRank, QuantizedTensor
from exporters.onnx import OnnxExporter
from exporters.onnx.reader import read_weights
from tests.compress.runs import Bench
from tests.reference.lowrank import output_error, qera, truncated
from tests.support import naive_round

OUT, IN, TOKENS, RANK = 40, 64, 400, 6
NO_EVALUATION = {"measure": "false", "evaluate": "false"}


def layer(seed: int = 0) -> tuple[Tensor, QuantizedTensor, Tensor]:
    """(weight, rounded over several groups, correlated inputs [tokens, in] with loud channels)."""
    torch.manual_seed(seed)
    weight = torch.randn(OUT, IN)
    inputs = torch.randn(TOKENS, 12) @ torch.randn(12, IN) + 0.2 * torch.randn(TOKENS, IN)
    return weight, naive_round(weight, QuantScheme(3, 16)), inputs * torch.logspace(-1, 1, IN)


@pytest.mark.parametrize("rank", [1, RANK, 20])
def test_the_product_is_that_of_the_theorem(rank: int) -> None:
    weight, rounded, inputs = layer()
    error, gram = weight - rounded.base(), inputs.T @ inputs
    u, v = best_product(error, gram, rank)
    assert (u.shape, v.shape) == ((OUT, rank), (rank, IN))
    wanted = qera(error.double().numpy(), gram.double().numpy(), rank)
    np.testing.assert_allclose((u @ v).numpy(), wanted, atol=1e-6 * np.abs(wanted).max())


def test_it_beats_the_svd_of_the_weight_error_clearly_and_fp16_costs_little() -> None:
    for seed in range(3):
        weight, rounded, inputs = layer(seed)
        error, gram = weight - rounded.base(), inputs.T @ inputs
        found = side_path(error, gram, RANK)
        given, rows = error.double().numpy(), inputs.double().numpy()
        left = {
            "none": output_error(given, rows),
            "svd": output_error(given - truncated(given, RANK), rows),
            "exact": output_error(given - qera(given, gram.double().numpy(), RANK), rows),
            "found": output_error(given - (found.u.double() @ found.v.double()).numpy(), rows),
        }
        assert left["exact"] < 0.6 * left["svd"] < 0.6 * left["none"]
        assert left["exact"] <= left["found"] < 1.01 * left["exact"]
        for matrix in (found.u, found.v):
            assert torch.equal(matrix, matrix.half().float())


def test_inputs_that_are_never_used_do_no_harm() -> None:
    weight, rounded, inputs = layer()
    inputs[:, ::3] = 0
    error, gram = weight - rounded.base(), inputs.T @ inputs
    found = side_path(error, gram, RANK)
    product = found.u @ found.v
    assert product.isfinite().all()
    assert product[:, ::3].abs().max() < 1e-3 * product.abs().max()
    assert output_error((error - product).double().numpy(), inputs.double().numpy()) < 0.6 * output_error(
        error.double().numpy(), inputs.double().numpy()
    )


def test_a_tensor_with_a_residual_is_stored_and_taken_apart(tmp_path: Path) -> None:
    _, rounded, _ = layer()
    whole = QuantizedTensor.of(rounded.scheme, rounded.tensors() | {"u": torch.randn(OUT, 2), "v": torch.randn(2, IN)})
    assert whole.residual is not None
    assert whole.residual.bits == lowrank_bits((OUT, IN), 2) == 16 * 2 * (OUT + IN)
    assert torch.equal(whole.base(), rounded.dequantize())
    product = whole.residual.u @ whole.residual.v
    torch.testing.assert_close(whole.dequantize(), rounded.dequantize() + product)
    torch.testing.assert_close(whole.rows(slice(3, 9)).dequantize(), whole.dequantize()[3:9])
    store = Store(tmp_path)
    store.put("block", {"a": whole, "ab": layer(1)[1]}, {})
    found = store.quantized("a")
    assert isinstance(found.residual, LowRank)
    assert torch.equal(found.dequantize(), whole.dequantize())
    beside = store.residual("a")
    assert beside is not None
    assert torch.equal(beside.v, whole.residual.v)
    assert store.residual("ab") is store.quantized("ab").residual is None


@pytest.mark.parametrize(
    ("passes", "export"),
    [
        ("gptq, {lowrank: {rank: 8}}", "onnx"),
        ("{lowrank: {rank: 4}}, {rtn: {scheme: int2-g32-asym}}, {kv: {bits: 8}}", "onnx"),
        ("rtn, {lowrank: {rank: 8}}", "{onnx: {dialect: standard}}"),
        ("rtn, {lowrank: {rank: 8}}", "{onnx: {float_type: f16}}"),
    ],
)
def test_a_run_proves_measures_and_counts_it(passes: str, export: str, bench: Bench, tmp_path: Path) -> None:
    rank = 4 if "rank: 4" in passes else 8
    recipe = bench.recipe(passes=f"[{passes}]", export=f"[{export}]", measure="false")
    report = engine.run(recipe, tmp_path / "out")
    (artifact,) = report.artifacts
    assert artifact.parity is not None
    assert artifact.parity.passed
    record = next(found for found in report.passes if found.name == "lowrank")
    assert len(record.layers) == 14
    assert all((row.output_error or 1) < (row.rounding_error or 0) for row in record.layers)
    shapes = {row.layer: row.shape for row in OnnxExporter().inspect(found_artifact(tmp_path / "out")) if row.layer}
    weights = sum(shapes[row.layer][0] * shapes[row.layer][1] for row in record.layers)
    assert artifact.bits_per_weight == pytest.approx(8 * sum(row.bytes for row in record.layers) / weights)
    assert artifact.bits_per_weight > sum(16 * rank * sum(shapes[row.layer]) for row in record.layers) / weights + 2


def found_artifact(out: Path) -> Any:
    from compress.runner.artifact import find_artifact

    return find_artifact(out, "onnx")


def test_both_matrices_are_read_back_and_a_changed_one_is_noticed(bench: Bench, tmp_path: Path) -> None:
    recipe = bench.recipe(passes="[rtn, {lowrank: {rank: 8}}]", **NO_EVALUATION)
    engine.run(recipe, tmp_path / "out")
    entry = tmp_path / "out" / "onnx" / "model.onnx"
    name = "model.layers.1.mlp.down_proj"
    found = dict(read_weights(entry, [name, f"{name}.lowrank.u", f"{name}.lowrank.v"]))
    assert [found[part].shape for part in found] == [(64, 96), (64, 8), (8, 96)]
    graph = onnx.load(entry, load_external_data=False).graph
    kinds = {tensor.data_type for tensor in graph.initializer if ".lowrank." in tensor.name}
    assert kinds == {onnx.TensorProto.FLOAT16}


def test_a_file_without_what_was_chosen_is_no_artifact(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from exporters.onnx.layers import LayerWriter

    beside = LayerWriter._beside

    def halved(self: Any, name: str, residual: LowRank, *values: str) -> str:
        return beside(self, name, LowRank(residual.u / 2, residual.v), *values)

    monkeypatch.setattr(LayerWriter, "_beside", halved)
    with pytest.raises(Exception, match=r"14 of 16 tensors read back .*q_proj\.lowrank\.u"):
        engine.run(bench.recipe(passes="[rtn, {lowrank: {rank: 8}}]", **NO_EVALUATION), tmp_path / "out")


def test_mixed_pays_for_it_from_its_target(bench: Bench) -> None:
    least = "{mixed: {target_bits: 4.6, choices: [int4-g32, int8-g32]}}, rtn"
    engine.plan(bench.recipe(passes=f"[{least}]"))
    with pytest.raises(InputError, match=r"4\.6 bits a weight cannot be reached .*: the least is 8\.367"):
        engine.plan(bench.recipe(passes=f"[{least}, {{lowrank: {{rank: 8}}}}]"))
    layers = engine.plan(bench.recipe(passes="[rtn, {lowrank: {rank: 8}}]")).layers
    found = next(row for row in layers if row["layer"].endswith("0.mlp.up_proj"))
    assert found["bytes"] == 96 * (64 * 4 + 2 * 16) // 8 + 2 * 8 * (96 + 64)


def test_what_cannot_be_is_refused_at_once(bench: Bench) -> None:
    with pytest.raises(InputError) as refusal:
        engine.plan(bench.recipe(passes="[rtn, lowrank]", export="[onnx, gguf]"))
    assert "gguf: the file has no place for a low-rank product beside a layer: an adapter file" in refusal.value.what
    assert "onnx:" not in refusal.value.what
    with pytest.raises(InputError, match=r"lowrank: .*k_proj \[32, 64\] has no more than rank 32"):
        engine.plan(bench.recipe(passes="[rtn, {lowrank: {rank: 32}}]"))
    with pytest.raises(InputError, match="rank: 0 is not at least 1"):
        loads("model: x\npasses: [rtn, {lowrank: {rank: 0}}]\nexport: [onnx]\n", registry.load)


def test_a_run_that_goes_on_has_it_too(bench: Bench, tmp_path: Path) -> None:
    from tests.compress.runs import at_step, digests

    recipe = bench.recipe(passes="[gptq, {lowrank: {rank: 8}}]", **NO_EVALUATION)
    engine.run(recipe, tmp_path / "whole")

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run(recipe, tmp_path / "out", progress=at_step("writing onnx", interrupt))
    engine.run(recipe, tmp_path / "out", resume=True)
    one, two = digests(tmp_path / "whole"), digests(tmp_path / "out")
    assert one["onnx/model.onnx.data"] == two["onnx/model.onnx.data"]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["passes"][1]["name"] == "lowrank"
