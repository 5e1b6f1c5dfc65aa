"""The standard dialect: nothing but operators of ONNX, right in ONNX Runtime and in OpenVINO."""

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
from compress.models.topology import describe
from compress.packing import unpack_bits
from compress.recipe import loads
from compress.runner.artifact import find_artifact
from compress.runner.ort import OrtRuntime
from compress.scheme import QuantScheme
from compress.session import CompressedModel
from exporters.onnx import OnnxExporter
from exporters.onnx.layout import to_columns
from tests.compress.families import VARIANTS, saved, tokens_of
from tests.compress.runs import sentences
from tests.exporters.generation import by_genai, by_runtime
from tests.exporters.test_onnx_families import CLOSE, LENGTH, check_padded_rows, torch_logits
from tests.support import mean_kld, naive_round, rounded_model, tiny_tokenizer

EXPORTER = OnnxExporter(dialect="standard")
pytestmark = pytest.mark.usefixtures("one_thread")
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def written(variant: str, folder: Path, scheme: str = "int4-g16", exporter: Any = EXPORTER) -> CompressedModel:
    """The model; its file is ``model.onnx`` in ``folder``/out. Some layers have another scheme, or none."""
    checkpoint = saved(variant, folder / "model")
    linears = list(describe(json.loads((checkpoint / "config.json").read_text())).all_linears())
    plan = dict.fromkeys(linears[1::5], "int8-g16-asym") | dict.fromkeys(linears[2::5]) | {linears[-1]: "int4-channel"}
    model = rounded_model(checkpoint, folder / "work", scheme, plan)
    (folder / "out").mkdir()
    exporter.write(model, folder / "out")
    return model


@every_variant
def test_the_file_holds_and_computes_what_was_chosen_with_standard_operators_alone(
    variant: str, tmp_path: Path
) -> None:
    model, tokens = written(variant, tmp_path), tokens_of(1, LENGTH)
    entry = tmp_path / "out" / "model.onnx"
    loaded = onnx.load(entry, load_external_data=False)
    assert {node.domain for node in loaded.graph.node} == {""}
    assert [(opset.domain, opset.version) for opset in loaded.opset_import] == [("", 23)]
    onnx.checker.check_model(str(entry))

    artifact = find_artifact(tmp_path / "out")
    for layer, values in EXPORTER.read_back(artifact, list(model.layers())):
        assert values.tobytes() == model.weight(layer).numpy().tobytes(), layer
    rows = {row.layer: row for row in EXPORTER.inspect(artifact) if row.layer}
    assert rows.keys() == {*model.layers(), *describe(model.config).float_linears()}
    for layer, shape in model.shapes.items():
        assert rows[layer].shape == shape
        assert 8 * rows[layer].bytes == EXPORTER.stored_bits(model.schemes.get(layer), shape), layer

    runtime = OrtRuntime(spin=False, chunk=5, exact=True)
    runtime.load(entry, threads=1, context=LENGTH)
    found = [*runtime.prefill(tokens[0, :13].numpy(), all_logits=True), *map(runtime.decode, tokens[0, 13:].tolist())]
    torch.testing.assert_close(torch.from_numpy(np.stack(found)), torch_logits(model, tokens)[0], **CLOSE)


@pytest.mark.parametrize("variant", ["gemma3", "qwen3_moe", "phi3, heads rotated in part", "smollm3"])
def test_padded_rows_are_as_if_alone(variant: str, tmp_path: Path) -> None:
    import onnxruntime

    model = written(variant, tmp_path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    check_padded_rows(model, onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", options))


@pytest.mark.parametrize("variant", ["gemma3", "qwen2 with a window"])
def test_half_precision_stays_close(variant: str, tmp_path: Path) -> None:
    half = OnnxExporter(float_type="f16", dialect="standard")
    model, tokens = written(variant, tmp_path, exporter=half), tokens_of(1, LENGTH)
    runtime = OrtRuntime(spin=False, chunk=9, exact=True)
    runtime.load(tmp_path / "out" / "model.onnx", threads=1, context=LENGTH)
    found = torch.from_numpy(runtime.prefill(tokens[0].numpy(), all_logits=True))
    assert 0 < mean_kld(torch_logits(model, tokens)[0], found) < half.parity_kld
    assert not [row.name for row in half.inspect(find_artifact(tmp_path / "out")) if row.type == "float32"]


@pytest.mark.parametrize("scheme", ["int4-g32", "int4-g32-asym", "int8-g64", "int8-channel-asym"])
def test_codes_lie_column_by_column_low_half_first(scheme: str) -> None:
    weight = naive_round(torch.randn(6, 64), QuantScheme.parse(scheme))
    packed = to_columns("layer", weight)
    bits = weight.scheme.bits
    codes = unpack_bits(packed.codes[None], bits, 6 * 64).reshape(64, 6).astype(np.int64)
    if weight.zero is None:
        codes = (codes + weight.scheme.midpoint) % weight.scheme.levels
        assert packed.type == f"int{bits}"
    np.testing.assert_array_equal(codes, weight.codes.numpy().T)


@pytest.mark.parametrize(
    ("layer", "scheme", "reason"),
    [
        ("a.q", "int2-g32", "the standard dialect stores 4 or 8 bits"),
        ("a.q", "nf4-g32", "the standard dialect stores 4 or 8 bits"),
        ("a.q", "int4-g128", "DequantizeLinear needs groups that divide the 200 inputs"),
        ("a.q", "int8-channel", "DequantizeLinear needs groups that divide the 200 inputs"),
        ("model.embed_tokens", "int4-g8", "no runtime gathers columns of 4-bit numbers; use int8-g32"),
    ],
)
def test_what_the_dialect_cannot_store_is_refused(layer: str, scheme: str, reason: str) -> None:
    spec = describe({"model_type": "llama", "num_hidden_layers": 1})
    [complaint] = EXPORTER.check(spec, {layer: QuantScheme.parse(scheme)}, {layer: (64, 200)})
    assert complaint.startswith(f"{layer} (64 x 200): {scheme}: {reason}")
    assert "use " in complaint


def test_a_dialect_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="dialect 'standart' is not known; did you mean 'standard'"):
        OnnxExporter(dialect="standart")


def test_a_run_proves_the_artifact_and_says_what_a_runtime_decides(tmp_path: Path) -> None:
    folder = saved("gemma3", tmp_path / "model", head_dim=16)
    tiny_tokenizer(folder)
    (tmp_path / "text.txt").write_text(sentences(1, 400))
    text = f"{{source: text, path: {tmp_path}/text.txt, sequence_length: 32"
    recipe = loads(
        f"model: {folder}\npasses: [rtn]\nexport: [{{onnx: {{dialect: standard}}}}]\nmeasure: false\n"
        f"calibration: {text}, samples: 4}}\nevaluate: {text}, windows: 2}}\n",
        registry.load,
    )
    report = engine.run(recipe, tmp_path / "out")
    (artifact,) = report.artifacts
    assert artifact.parity is not None
    assert artifact.parity.exact
    assert artifact.parity.kld_mean < 1e-7
    assert any("a runtime decides whether activations are rounded" in line for line in report.warnings)


@pytest.mark.parametrize("variant", ["gemma3", "qwen3_moe"])
def test_genai_generates_what_the_runtime_generates(variant: str, tmp_path: Path) -> None:
    written(variant, tmp_path)
    prompt, count = tokens_of(1, LENGTH)[0].tolist(), 8
    found = by_genai(tmp_path / "out", prompt, count)
    expected = by_runtime(tmp_path / "out" / "model.onnx", prompt, len(found))
    assert found == expected


@every_variant
def test_openvino_computes_it_too(variant: str, tmp_path: Path) -> None:
    import openvino

    model, tokens = written(variant, tmp_path), tokens_of(2, LENGTH)
    # By itself it rounds activations, to bfloat16 or to 8 bits in groups.
    settings = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "INFERENCE_NUM_THREADS": 1}
    compiled = openvino.Core().compile_model(str(tmp_path / "out" / "model.onnx"), "CPU", settings)
    spec = describe(model.config)
    names = [item.get_any_name() for item in compiled.inputs]
    empty = np.zeros((2, spec.kv_heads, 0, spec.head_dim), np.float32)
    cache: dict[str, Any] = {name: empty for name in names if name.startswith("past")}
    found, done = [], 0
    for count in (LENGTH - 4, 1, 1, 2):
        ids = tokens[:, done : done + count].numpy()
        done += count
        out = compiled({"input_ids": ids, "attention_mask": np.ones((2, done), np.int64)} | cache)
        cache = {name: out[name.replace("past_key_values", "present")] for name in cache}
        found.append(torch.from_numpy(out["logits"].copy()))
    expected: Tensor = torch_logits(model, tokens)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, **CLOSE)
