"""Layers that read one input from one product: where they are stored alike, and with ``join_projections``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress import engine, registry
from compress.models.checkpoint import open_checkpoint
from compress.models.topology import describe
from compress.recipe import loads
from compress.runner.artifact import find_artifact
from compress.runner.ort import OrtRuntime
from compress.scheme import QuantScheme
from exporters.onnx import OnnxExporter
from exporters.onnx.limits import joined_layers
from tests.compress.families import saved
from tests.compress.runs import sentences
from tests.exporters.test_onnx_file import graph_of
from tests.support import fake_quantized, rounded_model, tiny_llama, tiny_tokenizer

LLAMA: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 2}

JOINED = ("self_attn.q_proj+k_proj+v_proj", "mlp.gate_proj+up_proj")
"""Nodes of a block that multiply by several layers."""


@pytest.mark.parametrize(
    ("plan", "levels", "products"),
    [
        ({}, (), {"qkv": 1, "mlp": 1}),
        ({"k_proj": "int4-g32-asym", "up_proj": "int8-g32"}, (), {"qkv": 3, "mlp": 2}),
        ({"v_proj": None, "gate_proj": None}, (), {"qkv": 2, "mlp": 1}),
        ({}, ("*.q_proj", "*.up_proj"), {"qkv": 3, "mlp": 2}),
        ({f"{name}_proj": "nf4-g64" for name in ("q", "k", "v", "gate", "up")}, (), {"qkv": 0, "mlp": 0}),
    ],
)
def test_layers_of_one_input_stored_alike_are_one_product(
    tmp_path: Path, plan: dict[str, str | None], levels: tuple[str, ...], products: dict[str, int]
) -> None:
    block = "model.layers.0"
    layers = {
        "qkv": [f"{block}.self_attn.{name}_proj" for name in "qkv"],
        "mlp": [f"{block}.mlp.{name}_proj" for name in ("gate", "up")],
    }
    every = [layer for found in layers.values() for layer in found]
    named = {layer: plan[name] for layer in every if (name := layer.rpartition(".")[2]) in plan}
    folder = tiny_llama(tmp_path / "m", attention_bias=True, mlp_bias=True)
    model = rounded_model(folder, tmp_path / "w", plan=named)
    (tmp_path / "out").mkdir()
    exporter = OnnxExporter(4, float_activations=levels)
    artifact = exporter.write(model, tmp_path / "out")
    nodes = {node.name for node in graph_of(artifact).node if node.op_type == "MatMulNBits"}
    for kind, joined in zip(layers, JOINED, strict=True):
        assert len(nodes & {*layers[kind], f"{block}.{joined}"}) == products[kind]
    for layer, weight in exporter.read_back(artifact, every):
        np.testing.assert_array_equal(weight, model.weight(layer).numpy())
    listed = {tensor.layer: tensor for tensor in exporter.inspect(artifact)}
    assert all(listed[layer].shape == model.shapes[layer] for layer in every)
    assert all(
        8 * listed[layer].bytes == exporter.stored_bits(model.schemes.get(layer), model.shapes[layer])
        for layer in every
    )
    runtime, tokens = OrtRuntime(spin=False, exact=True), np.arange(1, 30)
    runtime.load(artifact.path / artifact.entry, threads=1, context=32)
    with torch.no_grad():
        expected = fake_quantized(model)(torch.from_numpy(tokens)[None]).logits[0].numpy()
    np.testing.assert_allclose(runtime.prefill(tokens, all_logits=True), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("join", [True, False])
def test_a_mixed_plan_has_one_scheme_for_what_one_product_serves(join: bool, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m", num_hidden_layers=4)
    plan, nodes = mixed_run(folder, tmp_path, f"[onnx: {{join_projections: {str(join).lower()}}}]")
    assert set(plan.values()) == {"int4-g32", "int8-g32"}
    groups = joined_layers(describe(open_checkpoint(folder).config))
    assert len(groups) == 8
    alike = [len({plan[layer] for layer in layers}) == 1 for layers in groups]
    assert all(alike) == join
    assert [f"model.layers.{index}.{name}" in nodes for index in range(4) for name in JOINED] == alike


def test_experts_of_one_tensor_and_of_one_product_have_one_scheme_together(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path / "m", hidden_size=64, intermediate_size=64)
    tiny_tokenizer(folder)
    plan, nodes = mixed_run(folder, tmp_path, "[gguf, onnx: {join_projections: true}]")
    spec = describe(open_checkpoint(folder).config)
    for index in range(spec.layers):
        experts = spec.expert_linears(index)
        assert len({plan[expert[role]] for expert in experts for role in ("gate", "up")}) == 1
        assert {f"{expert['gate']}+w3" for expert in experts} <= nodes
    assert set(plan.values()) == {"int4-g32", "int8-g32"}


def mixed_run(folder: Path, out: Path, export: str) -> tuple[dict[str, str], set[str]]:
    """(layer -> scheme, names of the products in the graph) of a run that mixes 4 and 8 bits."""
    (out / "text.txt").write_text(sentences(1, 400))
    recipe = loads(
        f"model: {folder}\npasses: [mixed: {{target_bits: 6.5, samples: 2}}, rtn: {{}}]\n"
        f"export: {export}\nmeasure: false\nevaluate: false\n"
        f"calibration: {{source: text, path: {out}/text.txt, sequence_length: 32, samples: 4}}\n",
        registry.load,
    )
    report = engine.run(recipe, out / "out")
    plan = {one.layer: str(one.scheme) for record in report.passes if record.name == "mixed" for one in record.layers}
    graph = graph_of(find_artifact(out / "out" / "onnx"))
    return plan, {node.name for node in graph.node if node.op_type == "MatMulNBits"}


def test_a_plan_that_keeps_them_apart_is_told() -> None:
    spec = describe(LLAMA)
    plan = dict.fromkeys(spec.all_linears(), QuantScheme(4, 32)) | {
        "model.layers.1.self_attn.k_proj": QuantScheme(8, 32),
        "model.layers.0.mlp.up_proj": QuantScheme(8, 32),
    }
    (told,) = OnnxExporter(join_projections=True).remarks(spec, plan)
    assert told.startswith("join_projections: ")
    gate_up = "model.layers.0.mlp.gate_proj and model.layers.0.mlp.up_proj, "
    assert told.partition("differ: ")[2] == gate_up + " and ".join(
        f"model.layers.1.self_attn.{name}_proj" for name in "qkv"
    )
    assert OnnxExporter().remarks(spec, plan) == []
    exporter = OnnxExporter(join_projections=True, float_activations=("*.1.mlp.gate_proj",))
    told, _ = exporter.remarks(spec, dict.fromkeys(spec.all_linears(), QuantScheme(4, 32)))
    assert told.endswith("differ: model.layers.1.mlp.gate_proj and model.layers.1.mlp.up_proj")


def test_a_file_without_padding_is_told() -> None:
    (told,) = OnnxExporter(padding=False).remarks(describe(LLAMA), {})
    assert told.startswith("padding: false: ")


def test_the_standard_dialect_moves_and_joins_nothing() -> None:
    with pytest.raises(ValueError, match="padding: the standard dialect"):
        OnnxExporter(padding=False, dialect="standard")
    with pytest.raises(ValueError, match="join_projections: the standard dialect"):
        OnnxExporter(join_projections=True, dialect="standard")
