"""What the files hold: tensors and their layout, attributes, nothing unreferenced, and what stands beside them."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from compress.errors import CompressError
from compress.models.topology import describe
from compress.packing import unpack_bits
from compress.protocols import Artifact
from compress.runner.ort import OrtRuntime
from compress.scheme import QuantScheme
from compress.session import CompressedModel
from compress.tensor import QuantizedTensor
from exporters.onnx import OnnxExporter
from exporters.onnx.layout import to_blocks
from exporters.onnx.writer import GraphWriter
from tests.exporters.generation import by_genai, by_runtime
from tests.support import TEMPLATE, naive_round, rounded_model, tiny_llama

ODD = {"hidden_size": 96, "intermediate_size": 200}
LLAMA = {"model_type": "llama", "num_hidden_layers": 1}


def export(model: CompressedModel, folder: Path, accuracy_level: int = 4) -> Artifact:
    folder.mkdir()
    return OnnxExporter(accuracy_level).write(model, folder)


def graph_of(artifact: Artifact) -> Any:
    return onnx.load(artifact.path / artifact.entry, load_external_data=False).graph


def idle_nodes(artifact: Artifact) -> set[str]:
    """Nodes that run for nothing: no node reads their outputs, nor does the caller."""
    graph = graph_of(artifact)
    read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    return {node.name for node in graph.node if read.isdisjoint(node.output)}


def attributes(node: Any) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def places(graph: Any) -> list[tuple[int, int]]:
    """(offset, length) of each tensor in the data file, in order."""
    found = []
    for tensor in graph.initializer:
        where = {entry.key: entry.value for entry in tensor.external_data}
        if where:
            assert where["location"] == "model.onnx.data"
            found.append((int(where["offset"]), int(where["length"])))
    return sorted(found)


def test_vectors_lie_together_behind_the_matrices(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    shapes = {"norm": (600,), "weight": (600, 8)}
    arrays = {
        f"{kind}.{index}": generator.random(shape, dtype=np.float32)
        for index in range(3)
        for kind, shape in shapes.items()
    }
    codes = np.arange(5000, dtype=np.uint8)
    with GraphWriter(tmp_path / "model.onnx", "f32") as writer:
        for name, array in arrays.items():
            writer.floats(name, array)
        writer.tensor("codes", codes)
        assert (tmp_path / "model.onnx.data").stat().st_size >= 3 * 600 * 8 * 4
        writer.save({})
    graph = onnx.load(tmp_path / "model.onnx").graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    assert all(np.array_equal(stored[name], array) for name, array in {**arrays, "codes": codes}.items())
    lengths = [length for _, length in places(onnx.load(tmp_path / "model.onnx", load_external_data=False).graph)]
    assert lengths == [600 * 8 * 4] * 3 + [5000] + [600 * 4] * 3


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("level", [0, 4])
def test_every_quantised_node_carries_the_accuracy_level(tmp_path: Path, level: int, tied: bool) -> None:
    model = rounded_model(tiny_llama(tmp_path / "m", tie_word_embeddings=tied), tmp_path / "w")
    nodes = [node for node in graph_of(export(model, tmp_path / "out", level)).node if node.op_type == "MatMulNBits"]
    alike = {layer for layer in model.schemes if not layer.endswith(("o_proj", "down_proj", "embed_tokens", "lm_head"))}
    names = ("self_attn.q_proj+k_proj+v_proj", "mlp.gate_proj+up_proj")
    joined = {f"model.layers.{index}.{name}" for index in range(2) for name in names}
    assert {node.name for node in nodes} == {*model.schemes, *joined, "lm_head"} - alike - {"model.embed_tokens"}
    assert all(attributes(node)["accuracy_level"] == level for node in nodes)


def test_layers_may_be_excepted_from_the_level_and_are_named(tmp_path: Path) -> None:
    plan = {"model.layers.0.mlp.up_proj": "int8-g32"}
    model = rounded_model(tiny_llama(tmp_path / "m", tie_word_embeddings=True), tmp_path / "w", plan=plan)
    spec, schemes = describe(model.config), model.schemes
    exporter = OnnxExporter(float_activations=("*.v_proj", "model.layers.0.mlp.up_proj", "lm_head"))
    (tmp_path / "out").mkdir()
    levels = {
        node.name: attributes(node)["accuracy_level"]
        for node in graph_of(exporter.write(model, tmp_path / "out")).node
        if node.op_type == "MatMulNBits"
    }
    excepted = [layer for layer in levels if levels[layer] == 0]
    values = [f"model.layers.{index}.self_attn.v_proj" for index in range(2)]
    assert sorted(excepted) == sorted([*values, "model.layers.0.mlp.up_proj", "lm_head"])
    named, slow = exporter.remarks(spec, schemes)
    assert named.startswith("activations stay in fp32 in 4 layers: model.layers.0.self_attn.v_proj, ")
    assert all(layer in named for layer in excepted)
    assert slow.endswith("many times slower: model.layers.0.mlp.up_proj, lm_head")
    assert OnnxExporter().remarks(spec, schemes) == []


def test_patterns_of_excepted_layers_are_checked() -> None:
    assert OnnxExporter(float_activations=("*.v_proj", "*.w_proj")).check(describe(LLAMA), {}, {}) == [
        "float_activations: '*.w_proj' names no layer"
    ]
    for arguments, said in (
        ({"float_activations": ("re:(",)}, "not a regular expression"),
        ({"float_activations": ("*",), "dialect": "standard"}, "float_activations: in the standard dialect"),
    ):
        with pytest.raises(ValueError, match=said):
            OnnxExporter(**arguments)


@pytest.mark.parametrize(("columns", "stored"), [(32, 1), (96, 2), (200, 4)])
def test_zero_points_are_packed_row_by_row(columns: int, stored: int) -> None:
    weight = naive_round(torch.randn(8, columns), QuantScheme.parse("int4-g32-asym"))
    packed = to_blocks("layer", weight).zero_points
    assert packed is not None
    assert packed.shape == (8, stored)
    assert weight.zero is not None
    np.testing.assert_array_equal(unpack_bits(packed, 4, weight.zero.shape[1]), weight.zero.numpy())


def test_symmetric_layers_store_no_zero_points(tmp_path: Path) -> None:
    graph = graph_of(export(rounded_model(tiny_llama(tmp_path / "m"), tmp_path / "w"), tmp_path / "out"))
    assert all(len(node.input) == 3 for node in graph.node if node.op_type == "MatMulNBits")
    assert not [tensor.name for tensor in graph.initializer if "zero_points" in tensor.name]


def test_scales_are_stored_in_half_precision(tmp_path: Path) -> None:
    graph = graph_of(export(rounded_model(tiny_llama(tmp_path / "m"), tmp_path / "w"), tmp_path / "out"))
    types = {tensor.data_type for tensor in graph.initializer if tensor.name.endswith(".scales")}
    assert types == {onnx.TensorProto.FLOAT16}


@pytest.mark.parametrize("scale", [0.1, 1e6, 1e-12, float("nan")])
def test_a_scale_that_fp16_cannot_hold_is_refused(scale: float) -> None:
    codes, scales = torch.zeros(2, 32, dtype=torch.uint8), torch.ones(2, 1)
    scales[1] = scale
    with pytest.raises(CompressError, match="1 of 2 scales are not fp16 numbers"):
        to_blocks("layer", QuantizedTensor(QuantScheme(4, 32), codes, scales))


@pytest.mark.parametrize("ends", ["int8-g32", None])
def test_data_file_holds_the_referenced_tensors_and_nothing_else(tmp_path: Path, ends: str | None) -> None:
    model = rounded_model(tiny_llama(tmp_path / "m", **ODD), tmp_path / "w", ends=ends)
    artifact = export(model, tmp_path / "out")
    end = 0
    for offset, length in places(graph_of(artifact)):
        assert end <= offset < end + 64
        end = offset + length
    assert (artifact.path / "model.onnx.data").stat().st_size == end


def test_exporting_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "m"), tmp_path / "w")
    first, second = export(model, tmp_path / "a").path, export(model, tmp_path / "b").path
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_an_existing_data_file_is_never_appended_to(tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "m"), tmp_path / "w")
    artifact = export(model, tmp_path / "out")
    with pytest.raises(FileExistsError):
        OnnxExporter().write(model, artifact.path)


def test_a_tied_embedding_is_stored_once(tmp_path: Path) -> None:
    for ends in ("int8-g32", None):
        sizes = []
        for tied in (True, False):
            folder = tiny_llama(tmp_path / f"m{tied}{ends}", tie_word_embeddings=tied)
            model = rounded_model(folder, tmp_path / f"w{tied}{ends}", ends=ends)
            artifact = export(model, tmp_path / f"out{tied}{ends}")
            sizes.append(sum(length for _, length in places(graph_of(artifact))))
        embedding = 320 * 64 * 4 if ends is None else 320 * (64 + 2 * 2)
        assert sizes[1] - sizes[0] == embedding


def test_a_full_disk_is_an_oserror(tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "m"), tmp_path / "w")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            export(model, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("scheme", "ends"),
    [
        ("int4-g32-asym", "int8-g32-asym"),
        ("int2-g32", "int4-g64-asym"),
        ("int8-g128", "int2-g16-asym"),
        ("int4-channel", "int8-channel-asym"),
        ("int2-g256-asym", None),
    ],
)
def test_read_back_is_what_was_chosen_bit_for_bit(tmp_path: Path, scheme: str, ends: str | None, tied: bool) -> None:
    folder = tiny_llama(tmp_path / "m", tie_word_embeddings=tied, **ODD)
    plan = {"model.layers.1.mlp.down_proj": None}
    model = rounded_model(folder, tmp_path / "w", scheme, plan, ends)
    artifact = export(model, tmp_path / "out", 0)
    found = dict(OnnxExporter().read_back(artifact, list(model.layers())))
    assert list(found) == list(model.shapes)
    for layer, values in found.items():
        assert values.dtype == np.float32
        assert values.tobytes() == model.weight(layer).numpy().tobytes(), layer


def test_read_back_sees_a_corrupted_code(tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "m"), tmp_path / "w")
    artifact = export(model, tmp_path / "out")
    layer = "model.layers.1.mlp.down_proj"
    tensor = next(tensor for tensor in graph_of(artifact).initializer if tensor.name == f"{layer}.codes")
    offset = next(int(entry.value) for entry in tensor.external_data if entry.key == "offset")
    with (artifact.path / "model.onnx.data").open("r+b") as file:
        file.seek(offset + 7)
        byte = file.read(1)[0]
        file.seek(offset + 7)
        file.write(bytes([byte ^ 0x10]))
    found = dict(OnnxExporter().read_back(artifact, list(model.layers())))
    wrong = [name for name, values in found.items() if not np.array_equal(values, model.weight(name).numpy())]
    assert wrong == [layer]
    assert (found[layer] != model.weight(layer).numpy()).sum() == 1


def test_read_back_names_layers_that_are_not_there(tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "m", tie_word_embeddings=True), tmp_path / "w")
    with pytest.raises(KeyError, match=r"stores no weight of lm_head, model\.norm, model\.layers\.9"):
        list(OnnxExporter().read_back(export(model, tmp_path / "out"), ["lm_head", "model.norm", "model.layers.9"]))


def test_inspect_counts_every_stored_byte(tmp_path: Path) -> None:
    plan = {"model.layers.0.mlp.up_proj": "int8-g32-asym", "model.layers.1.self_attn.k_proj": None}
    model = rounded_model(tiny_llama(tmp_path / "m"), tmp_path / "w", plan=plan)
    artifact = export(model, tmp_path / "out")
    rows = OnnxExporter().inspect(artifact)
    layers = {row.layer: row for row in rows if row.layer}
    assert {layer: row.shape for layer, row in layers.items()} == model.shapes
    for layer, row in layers.items():
        scheme = model.schemes.get(layer)
        stored = row.shape[0] * row.shape[1] * 32 if scheme is None else scheme.stored_bits(row.shape)
        assert (row.type, row.bytes * 8) == ("float32" if scheme is None else str(scheme), stored), layer
    inline = sum(numpy_helper.to_array(t).nbytes for t in graph_of(artifact).initializer if not t.external_data)
    assert sum(row.bytes for row in rows) == inline + sum(length for _, length in places(graph_of(artifact)))


def test_importing_the_exporter_imports_no_heavy_library() -> None:
    heavy = ("torch", "onnx", "onnxruntime", "transformers")
    program = f"import sys, exporters.onnx; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_companions_are_copied(tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "m", chat_template=TEMPLATE), tmp_path / "w")
    artifact = export(model, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (artifact.path / name).read_bytes() == (model.folder / name).read_bytes(), name
    assert json.loads((artifact.path / "config.json").read_text()) == model.config


@pytest.mark.parametrize("head_dim", [16, 24], ids=["rotary inside attention", "rotary operator"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_genai_generates_what_the_runtime_generates(tmp_path: Path, tied: bool, head_dim: int) -> None:
    import onnxruntime_genai

    def quieten_embedding(parameters: dict[str, torch.Tensor]) -> None:
        # A tied embedding as loud as its blocks repeats the last token for ever.
        parameters["model.embed_tokens.weight"].mul_(0.1)

    folder = tiny_llama(tmp_path / "m", quieten_embedding, TEMPLATE, tie_word_embeddings=tied, head_dim=head_dim)
    generation = json.loads((folder / "generation_config.json").read_text()) | {"eos_token_id": [318, 319]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    artifact = export(rounded_model(folder, tmp_path / "w"), tmp_path / "out")
    tokenizer = onnxruntime_genai.Tokenizer(onnxruntime_genai.Model(str(artifact.path)))
    message = json.dumps([{"role": "user", "content": "quick brown fox"}])
    prompt = tokenizer.encode(tokenizer.apply_chat_template(message, add_generation_prompt=True))
    found = by_genai(artifact.path, prompt, 20)
    expected = by_runtime(artifact.path / artifact.entry, prompt, 20, ends={318, 319})
    assert found == expected
    assert len(set(found)) > 1


LIMIT = 64_000
"""Bytes: in the place of protobuf's 2 GB (optimum #300). Weights of any size must stay out of the graph."""


def test_no_weight_is_in_the_file_that_protobuf_limits(tmp_path: Path) -> None:
    large = {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 512}
    sizes = []
    for name, settings in (("small", {}), ("large", large)):
        model = rounded_model(tiny_llama(tmp_path / name, **settings), tmp_path / f"{name}-work", ends=None)
        artifact = export(model, tmp_path / f"{name}-out")
        sizes.append((artifact.path / artifact.entry).stat().st_size)
        inline = [tensor for tensor in graph_of(artifact).initializer if not tensor.external_data]
        assert max(len(tensor.raw_data) for tensor in inline) <= 1024
        stored = sum(file.stat().st_size for file in artifact.path.glob("model.onnx*"))
        assert sizes[-1] < LIMIT
        assert stored > (3 if name == "small" else 40) * LIMIT
    assert abs(sizes[1] - sizes[0]) < 4000


def test_a_moved_folder_runs_from_another_working_directory(tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "m"), tmp_path / "w", ends=None)
    artifact = export(model, tmp_path / "out")
    tokens = np.arange(12)
    runtime = OrtRuntime()
    runtime.load(artifact.path / artifact.entry, 1, 16)
    expected = runtime.prefill(tokens)
    runtime.close()
    moved, elsewhere = tmp_path / "moved" / "here", tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved.parent.mkdir()
    artifact.path.rename(moved)
    code = (
        "import sys; from pathlib import Path; import numpy as np; from compress.runner.ort import OrtRuntime\n"
        "runtime = OrtRuntime(); runtime.load(Path(sys.argv[1]), 1, 16)\n"
        "np.save('logits.npy', runtime.prefill(np.arange(12)))"
    )
    subprocess.run([sys.executable, "-c", code, "../moved/here/model.onnx"], cwd=elsewhere, check=True)
    np.testing.assert_array_equal(np.load(elsewhere / "logits.npy"), expected)
