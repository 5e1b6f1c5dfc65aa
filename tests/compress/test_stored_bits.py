"""A target in bits is kept by the very files: what the planner counts is recomputed from them by other libraries."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest
from onnx import helper

from compress import engine, registry
from compress.errors import InputError
from compress.recipe import Recipe, loads
from compress.report import Report
from tests.compress.runs import sentences
from tests.support import tiny_llama

BLOCKS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose untied head is a large part of it."""
    root = tmp_path_factory.mktemp("bits")
    (root / "text.txt").write_text(sentences(1, 600))
    tiny_llama(root / "model", vocab_size=2000, intermediate_size=128, num_hidden_layers=BLOCKS)
    return root


def recipe(folder: Path, target: float, choices: str, export: str, rest: str = "") -> Recipe:
    text = f"{{source: text, path: {folder}/text.txt, sequence_length: 32"
    return loads(
        f"model: {folder}/model\npasses: [mixed: {{target_bits: {target}, choices: [{choices}], samples: 2}}, rtn]\n"
        f"export: [{export}]\nmeasure: false\n"
        f"calibration: {text}, samples: 4}}\nevaluate: {text}, windows: 2}}\n{rest}",
        registry.load,
    )


def gguf_bits(out: Path) -> float:
    """Bits a weight of the matrices in the blocks, by gguf-py."""
    tensors = [tensor for tensor in gguf.GGUFReader(out / "gguf/model.gguf").tensors if tensor.name.startswith("blk.")]
    matrices = [tensor for tensor in tensors if len(tensor.shape) == 2]
    assert len(matrices) == 7 * BLOCKS
    return 8 * sum(int(t.n_bytes) for t in matrices) / sum(int(np.prod(t.shape)) for t in matrices)


def onnx_bits(out: Path, weights: int) -> float:
    """Bits a weight of what the file holds under the names of the linear layers, by onnx."""
    graph = onnx.load(out / "onnx/model.onnx", load_external_data=False).graph
    parts = (".codes", ".scales", ".zero_points", ".weight")
    stored = 0
    for tensor in graph.initializer:
        if tensor.name.startswith("model.layers.") and "norm" not in tensor.name and tensor.name.endswith(parts):
            itemsize = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            stored += 8 * math.prod(tensor.dims) * itemsize
    return stored / weights


def achieved(report: Report) -> float:
    (summary,) = (record.summary for record in report.passes if record.name == "mixed")
    found: float = summary["achieved_bits"]
    return found


TWO_FOUR_EIGHT = "int2-g32, int4-g32, int8-g32"
FOURS = "int4-g32, int4-g32-asym, int8-g32"


@pytest.mark.parametrize(
    ("target", "choices", "export", "rest"),
    [
        (3.0, TWO_FOUR_EIGHT, "onnx", "pin: {lm_head: int8-g32}"),
        (4.1, TWO_FOUR_EIGHT, "onnx", "pin: {lm_head: int4-g32, '*.o_proj': int8-g64}"),
        (4.8, FOURS, "gguf", "pin: {lm_head: int8-g32}"),
        (4.8, FOURS, "onnx, gguf", ""),
        (7.0, FOURS, "gguf", "ignore: [model.layers.1.mlp.up_proj]"),
        (5.1, "iq4_nl, mxfp4, int5-g32, q5_1", "gguf", ""),
        (5.2, "int4-channel, int4-g64-asym, int8-g32", "onnx, gguf", "pin: {lm_head: float}"),
    ],
)
def test_the_files_keep_the_target(
    folder: Path, tmp_path: Path, target: float, choices: str, export: str, rest: str
) -> None:
    report = engine.run(recipe(folder, target, choices, export, rest), tmp_path / "out")
    counted, weights = achieved(report), report.model["linear_weights"]
    assert counted <= target
    readers = {"onnx": lambda out: onnx_bits(out, weights), "gguf": gguf_bits}
    found = {artifact.format: readers[artifact.format](tmp_path / "out") for artifact in report.artifacts}
    for artifact in report.artifacts:
        assert artifact.bits_per_weight == pytest.approx(found[artifact.format], rel=1e-12)
    # One artifact: to the bit. Several: the plan counts the larger for each layer, so no file is above it.
    assert max(found.values()) <= counted + 1e-12
    if len(found) == 1:
        assert max(found.values()) == pytest.approx(counted, rel=1e-12)
    else:
        assert max(found.values()) >= 0.98 * counted


def test_k_quants_are_planned_where_256_divides_the_width(
    folder: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wide = tmp_path_factory.mktemp("wide")
    (wide / "text.txt").symlink_to(folder / "text.txt")
    tiny_llama(wide / "model", hidden_size=256, intermediate_size=512, num_hidden_layers=BLOCKS)
    report = engine.run(recipe(wide, 5.2, "q2_k, q4_k, q6_k", "gguf"), tmp_path / "out")
    (summary,) = (record.summary for record in report.passes if record.name == "mixed")
    assert achieved(report) <= 5.2
    assert gguf_bits(tmp_path / "out") == pytest.approx(achieved(report), rel=1e-12)
    assert sum(count > 0 for count in summary["layers_per_scheme"].values()) >= 2
    with pytest.raises(InputError) as refused:
        engine.plan(recipe(folder, 5.2, "q4_k, q6_k", "gguf"))
    # Either choice, for all but the layers that it suits: none here.
    assert refused.value.what.count("GGUF cannot store q4_k") == 7 * BLOCKS
    assert "use iq4_nl for this layer" in refused.value.what


@pytest.mark.parametrize(
    ("target", "choices", "export", "least"),
    [
        (2.0, TWO_FOUR_EIGHT, "onnx", "2.500"),
        (4.7, "int4-g32-asym, int8-g32", "gguf", "5.000"),
        (4.3, "int4-g64, int8-g32", "onnx, gguf", "4.500"),
    ],
)
def test_a_target_that_the_files_cannot_keep_is_refused_with_the_least(
    folder: Path, target: float, choices: str, export: str, least: str
) -> None:
    with pytest.raises(InputError, match=f"the least is {least}"):
        engine.plan(recipe(folder, target, choices, export))
    engine.plan(recipe(folder, float(least), choices, export))


def test_the_plan_lists_what_the_files_will_hold(folder: Path) -> None:
    plan = engine.plan(recipe(folder, 5.0, "int4-g32-asym, int8-g32", "gguf"))
    listed = {layer["layer"]: layer for layer in plan.layers}
    assert listed["model.layers.0.mlp.up_proj"]["scheme"] == "int4-g32-asym"
    assert listed["model.layers.0.mlp.up_proj"]["bytes"] == 128 * 64 * 20 // 32
