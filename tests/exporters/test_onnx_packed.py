"""Queries, keys and values of a block from one product: where layers are stored alike, and with ``packed_qkv``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress import engine, registry
from compress.models.topology import describe
from compress.recipe import loads
from compress.runner.artifact import find_artifact
from compress.runner.ort import OrtRuntime
from compress.scheme import QuantScheme
from exporters.onnx import OnnxExporter
from tests.compress.runs import sentences
from tests.exporters.test_onnx_file import graph_of
from tests.support import fake_quantized, rounded_model, tiny_llama

LLAMA: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("plan", "levels", "products"),
    [
        ({}, (), 1),
        ({"k_proj": "int4-g32-asym"}, (), 3),
        ({"v_proj": None}, (), 2),
        ({}, ("*.q_proj",), 3),
        ({"q_proj": "nf4-g64", "k_proj": "nf4-g64", "v_proj": "nf4-g64"}, (), 0),
    ],
)
def test_projections_stored_alike_are_one_product(
    tmp_path: Path, plan: dict[str, str | None], levels: tuple[str, ...], products: int
) -> None:
    layers = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    named = {f"model.layers.0.self_attn.{name}": scheme for name, scheme in plan.items()}
    model = rounded_model(tiny_llama(tmp_path / "m", attention_bias=True), tmp_path / "w", plan=named)
    (tmp_path / "out").mkdir()
    exporter = OnnxExporter(4, float_activations=levels)
    artifact = exporter.write(model, tmp_path / "out")
    nodes = [node for node in graph_of(artifact).node if node.name in (*layers, "model.layers.0.qkv")]
    assert len([node for node in nodes if node.op_type == "MatMulNBits"]) == products
    for layer, weight in exporter.read_back(artifact, layers):
        np.testing.assert_array_equal(weight, model.weight(layer).numpy())
    listed = {tensor.layer: tensor for tensor in exporter.inspect(artifact)}
    assert all(listed[layer].shape == model.shapes[layer] for layer in layers)
    assert all(
        8 * listed[layer].bytes == exporter.stored_bits(model.schemes.get(layer), model.shapes[layer])
        for layer in layers
    )
    runtime, tokens = OrtRuntime(spin=False, exact=True), np.arange(1, 30)
    runtime.load(artifact.path / artifact.entry, threads=1, context=32)
    with torch.no_grad():
        expected = fake_quantized(model)(torch.from_numpy(tokens)[None]).logits[0].numpy()
    np.testing.assert_allclose(runtime.prefill(tokens, all_logits=True), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("packed", [True, False])
def test_a_mixed_plan_has_one_scheme_for_what_one_product_serves(packed: bool, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m", num_hidden_layers=4)
    (tmp_path / "text.txt").write_text(sentences(1, 400))
    recipe = loads(
        f"model: {folder}\npasses: [mixed: {{target_bits: 6.5, samples: 2}}, rtn: {{}}]\n"
        f"export: [onnx: {{packed_qkv: {str(packed).lower()}}}]\nmeasure: false\nevaluate: false\n"
        f"calibration: {{source: text, path: {tmp_path}/text.txt, sequence_length: 32, samples: 4}}\n",
        registry.load,
    )
    report = engine.run(recipe, tmp_path / "out")
    planned = {one.layer: one.scheme for record in report.passes if record.name == "mixed" for one in record.layers}
    assert set(planned.values()) == {"int4-g32", "int8-g32"}
    blocks = [f"model.layers.{index}" for index in range(4)]
    alike = [len({planned[f"{block}.self_attn.{name}_proj"] for name in "qkv"}) == 1 for block in blocks]
    assert all(alike) == packed
    nodes = graph_of(find_artifact(tmp_path / "out" / "onnx")).node
    names = {node.name for node in nodes if node.op_type == "MatMulNBits"}
    assert [f"{block}.qkv" in names for block in blocks] == alike


def test_a_plan_that_keeps_them_apart_is_told() -> None:
    spec = describe(LLAMA)
    layers = [f"model.layers.{index}.self_attn.{name}_proj" for index in range(2) for name in "qkv"]
    plan = dict.fromkeys(layers, QuantScheme(4, 32)) | {layers[4]: QuantScheme(8, 32)}
    (told,) = OnnxExporter(packed_qkv=True).remarks(spec, plan)
    assert told.startswith("packed_qkv: ")
    assert told.endswith(" in model.layers.1.self_attn")
    assert OnnxExporter().remarks(spec, plan) == []


@pytest.mark.parametrize(
    ("changes", "said"), [({"model_type": "qwen3"}, "qwen3 norms its heads"), ({"head_dim": 24}, "no heads of 24")]
)
def test_models_whose_projections_stay_apart_are_refused(changes: dict[str, Any], said: str) -> None:
    spec = describe(LLAMA | changes)
    (complaint,) = OnnxExporter(packed_qkv=True).check(spec, {}, {})
    assert said in complaint
    assert complaint.endswith("leave it out")
    assert OnnxExporter().check(spec, {}, {}) == []


def test_the_standard_dialect_packs_nothing() -> None:
    with pytest.raises(ValueError, match="packed_qkv: the standard dialect"):
        OnnxExporter(packed_qkv=True, dialect="standard")
