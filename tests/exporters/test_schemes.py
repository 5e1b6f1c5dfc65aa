"""Every scheme in every format: either the file holds what the passes chose, to the bit, or it is refused up front."""

from __future__ import annotations

import itertools
import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from compress import engine, registry
from compress.models.topology import DecoderSpec, describe
from compress.recipe import loads
from compress.runner.artifact import find_artifact
from compress.runner.ort import OrtRuntime
from compress.scheme import CODEBOOKS, NAMED, QuantScheme
from exporters.onnx import OnnxExporter
from exporters.onnx.layout import to_codebook_blocks
from tests.compress.runs import sentences
from tests.support import fake_quantized, mean_kld, naive_round, rounded_model, tiny_llama

GROUPS = ("g16", "g32", "g64", "g128", "g256", "channel")
KINDS = (*(f"int{bits}" for bits in (2, 3, 4, 5, 8)), "nf4", "ternary")
SCHEMES = [
    f"{kind}-{group}{end}"
    for kind, group, end in itertools.product(KINDS, GROUPS, ("", "-asym"))
    if not (kind in CODEBOOKS and end)
] + list(NAMED)
STORED = {
    "onnx": {
        scheme
        for scheme in SCHEMES
        # 2 bits in groups of 16 have no kernel with 8-bit activations.
        if not scheme.startswith(("int3", "int5", "ternary", "int2-g16")) and scheme not in NAMED
    },
    "gguf": {
        f"{kind}-{group}" + end
        for kind, end in (("int4", ""), ("int4", "-asym"), ("int5", ""), ("int5", "-asym"), ("int8", ""))
        for group in GROUPS
        if group != "g16"
    }
    | {"ternary-g256", "ternary-channel", *NAMED},
}
FEW = re.compile(r".*-(g64|channel)(-asym)?|\w+_\w+|mxfp4")
"""For the passes that take their time."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("schemes")
    (root / "text.txt").write_text(sentences(1, 400))
    tiny_llama(root / "few", hidden_size=256, intermediate_size=256, num_hidden_layers=3)
    return tiny_llama(root / "model", hidden_size=256, intermediate_size=256, num_hidden_layers=8)


@cache
def spec_of(folder: Path) -> DecoderSpec:
    return describe(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("format", STORED)
def test_what_a_format_cannot_store_is_refused_with_the_layer_why_and_what_would_do(folder: Path, format: str) -> None:
    spec, exporter = spec_of(folder), registry.load("exporters", format)()
    layer = spec.linear(3, "up")
    for scheme in SCHEMES:
        complaints = exporter.check(spec, {layer: QuantScheme.parse(scheme)}, {layer: (512, 256)})
        assert len(complaints) == (scheme not in STORED[format]), scheme
        for text in complaints:
            assert text.startswith(layer)
            assert scheme in text
            assert "use " in text


@pytest.mark.parametrize("passes", ["rtn", "gptq", "awq, rtn"])
@pytest.mark.parametrize("format", STORED)
def test_what_a_format_stores_is_right_to_the_bit(folder: Path, tmp_path: Path, format: str, passes: str) -> None:
    schemes = sorted(STORED[format])
    if passes != "rtn":
        folder, schemes = folder.parent / "few", [scheme for scheme in schemes if FEW.fullmatch(scheme)]
    spec = spec_of(folder)
    pins = dict(zip(spec.all_linears(), itertools.cycle(schemes), strict=False))
    text = f"{{source: text, path: {folder.parent}/text.txt, sequence_length: 32"
    recipe = loads(
        f"model: {folder}\npasses: [{passes}]\nexport: [{format}]\nmeasure: false\npin: {json.dumps(pins)}\n"
        f"calibration: {text}, samples: 8}}\nevaluate: {text}, windows: 2}}\n",
        registry.load,
    )
    # Every layer of every scheme is read back and compared, and the runtime's logits with torch's: or this raises.
    report = engine.run(recipe, tmp_path / "out")
    (artifact,) = report.artifacts
    assert artifact.parity is not None
    assert artifact.parity.tensors == 2 + len(pins)
    assert set(pins.values()) == set(schemes)
    exporter = registry.load("exporters", format)()
    found = {item.layer: item for item in exporter.inspect(find_artifact(tmp_path / "out", format))}
    for layer, scheme in pins.items():
        rows, columns = found[layer].shape
        assert 8 * found[layer].bytes == exporter.stored_bits(QuantScheme.parse(scheme), (rows, columns)), scheme
    warned = [line for line in report.warnings if "MatMulBnb4" in line]
    assert len(warned) == (format == "onnx")


# --- nf4 in ONNX


@pytest.mark.parametrize(
    ("group", "rows", "columns", "block"),
    [("g64", 5, 128, 64), ("g64", 4, 96, 32), ("g48", 3, 96, 16), ("channel", 7, 80, 16), ("g512", 2, 1024, 256)],
)
def test_codes_lie_high_half_first_and_a_scale_is_repeated_over_blocks(
    group: str, rows: int, columns: int, block: int
) -> None:
    weight = naive_round(torch.randn(rows, columns), QuantScheme.parse(f"nf4-{group}"))
    packed = to_codebook_blocks("layer", weight)
    assert packed.block == block
    width = weight.scheme.width(columns)
    for flat in range(rows * columns):
        row, column = divmod(flat, columns)
        byte = int(packed.codes[flat // 2])
        assert (byte & 15 if flat % 2 else byte >> 4) == int(weight.codes[row, column])
        assert float(packed.scales[flat // block]) == float(weight.scale[row, column // width])


@pytest.mark.parametrize("level", [0, 4])
def test_the_runtime_computes_with_nf4_what_torch_computes(tmp_path: Path, level: int) -> None:
    odd = {"hidden_size": 96, "intermediate_size": 208, "attention_bias": True, "mlp_bias": True}
    checkpoint = tiny_llama(tmp_path / "m", edit=_shake_vectors, **odd)
    model = rounded_model(checkpoint, tmp_path / "w", "nf4-g64", {"lm_head": "nf4-channel"})
    (tmp_path / "out").mkdir()
    artifact = OnnxExporter(level).write(model, tmp_path / "out")
    types = {item.layer: item.type for item in OnnxExporter().inspect(artifact) if item.layer}
    assert types["model.layers.1.mlp.up_proj"] == "nf4-g32"
    assert types["lm_head"] == "nf4-g32"
    tokens = torch.randint(0, 281, (48,), generator=torch.Generator().manual_seed(0))
    runtime = OrtRuntime(spin=False)
    runtime.load(artifact.path / artifact.entry, 1, 48)
    found = torch.from_numpy(runtime.prefill(tokens.numpy(), all_logits=True))
    runtime.close()
    with torch.no_grad():
        expected = fake_quantized(model)(tokens[None]).logits[0]
    # With nothing but nf4 layers nothing is rounded at run time, whatever the level says.
    assert mean_kld(expected, found) < 1e-8


def _shake_vectors(parameters: dict[str, torch.Tensor]) -> None:
    for parameter in parameters.values():
        if parameter.ndim == 1:
            parameter.add_(0.3 * torch.randn(parameter.shape))


@pytest.mark.parametrize(
    ("layer", "columns", "reason"),
    [
        ("model.layers.0.mlp.down_proj", 200, "MatMulBnb4 needs groups and a width of a multiple of 16; use int4-g32"),
        ("model.embed_tokens", 64, "no operator gathers rows of an embedding in nf4; use int8-g32"),
    ],
)
def test_layers_that_nf4_cannot_serve_are_refused(folder: Path, layer: str, columns: int, reason: str) -> None:
    shape = (64, columns)
    (complaint,) = OnnxExporter().check(spec_of(folder), {layer: QuantScheme.parse("nf4-g64")}, {layer: shape})
    assert complaint.startswith(f"{layer} (64 x {columns}): nf4-g64: {reason}")


def test_three_bits_are_refused_and_the_advice_keeps_the_group(folder: Path) -> None:
    layer, shape = spec_of(folder).linear(0, "q"), (64, 256)
    plan = {layer: QuantScheme.parse("int3-g64-asym")}
    (onnx,) = OnnxExporter().check(spec_of(folder), plan, {layer: shape})
    assert "3 bits in cells of 4 would take as much as 4; use int4-g64, or int2" in onnx


def test_the_values_of_nf4_are_the_runtimes_own() -> None:
    import onnxruntime
    from onnx import TensorProto, helper

    codes = np.arange(16, dtype=np.uint8)
    nodes = [
        helper.make_node("MatMulBnb4", ["x", "b", "s"], ["y"], domain="com.microsoft", K=16, N=1, block_size=16,
                         quant_type=1)
    ]  # fmt: skip
    weight = naive_round(torch.zeros(1, 16), QuantScheme.parse("nf4-g16"))
    weight.codes[0] = torch.from_numpy(codes)
    stored = to_codebook_blocks("layer", weight)
    initializers = [
        helper.make_tensor("b", TensorProto.UINT8, [8], stored.codes.tobytes(), raw=True),
        helper.make_tensor("s", TensorProto.FLOAT, [1], [1.0]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [16, size]) for name, size in (("x", 16), ("y", 1))]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.eye(16, dtype=np.float32)})
    assert np.array_equal(found[:, 0], weight.dequantize()[0].numpy())
