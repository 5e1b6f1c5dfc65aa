"""The file holds what the passes chose, to the bit, and llama.cpp computes what torch computes with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import libgguf
import numpy as np
import pytest
import torch
from torch import Tensor

from compress.errors import InputError
from compress.models.topology import describe
from compress.protocols import Artifact
from compress.runner.llamacpp import LlamaCppRuntime
from compress.scheme import QuantScheme
from compress.session import CompressedModel
from exporters.gguf import FLOAT_PARITY_KLD, GgufExporter
from exporters.gguf.reader import stored_tensors
from exporters.gguf.writer import interleaved_rows
from tests.support import fake_quantized, mean_kld, naive_round, rounded_model, tiny_llama

GROUPED: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
TOKENS = 160


def shake_vectors(parameters: dict[str, Tensor]) -> None:
    """Norms away from 1 and biases away from 0, so that a lost or misplaced one shows."""
    for parameter in parameters.values():
        if parameter.ndim == 1:
            parameter.add_(0.5 * torch.randn(parameter.shape))


def export(model: CompressedModel, out: Path, float_type: str = "f16") -> Artifact:
    out.mkdir()
    return GgufExporter(float_type).write(model, out)


def all_float(folder: Path, workdir: Path) -> CompressedModel:
    config = rounded_model(folder, workdir).config
    return rounded_model(folder, workdir / "float", plan=dict.fromkeys(describe(config).all_linears()), ends=None)


def divergence(model: CompressedModel, artifact: Artifact) -> float:
    tokens = torch.randint(0, 281, (TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        reference = fake_quantized(model)(tokens[None]).logits[0]
    runtime = LlamaCppRuntime()
    runtime.load(artifact.path / artifact.entry, threads=1, context=TOKENS)
    found = runtime.prefill(tokens.numpy(), all_logits=True)
    runtime.close()
    return mean_kld(reference, torch.from_numpy(found))


@pytest.mark.parametrize("float_type", ["f16", "f32", "bf16"])
def test_float_file_computes_what_torch_computes(float_type: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if float_type == "bf16" else torch.float32
    model = all_float(tiny_llama(tmp_path / "model", edit=shake_vectors, dtype=dtype, **GROUPED), tmp_path)
    assert divergence(model, export(model, tmp_path / "out", float_type)) < FLOAT_PARITY_KLD


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_bias": True, **GROUPED},
        {"mlp_bias": True},
        {"tie_word_embeddings": True, **GROUPED},
        {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 1},
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_parameters": LLAMA3_ROPE, "head_dim": 24},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        {"rope_parameters": YARN_ROPE},
        {"rope_parameters": YARN_ROPE | {"beta_fast": 32.0, "beta_slow": 1.0}, "head_dim": 64},
        {"rms_norm_eps": 0.03, "intermediate_size": 200, "vocab_size": 997},
    ],
    ids=str,
)
def test_every_kind_of_llama_computes_what_torch_computes(settings: dict[str, Any], tmp_path: Path) -> None:
    model = all_float(tiny_llama(tmp_path / "model", edit=shake_vectors, **settings), tmp_path)
    assert divergence(model, export(model, tmp_path / "out", "f32")) < FLOAT_PARITY_KLD


@pytest.mark.parametrize("scheme", ["int4-g32", "int4-g32-asym", "int8-g32", "int5-g32", "q5_1", "iq4_nl", "mxfp4"])
def test_quantised_file_computes_the_fake_quantised_model(scheme: str, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", edit=shake_vectors, attention_bias=True, **GROUPED)
    model = rounded_model(folder, tmp_path / "work", scheme)
    assert divergence(model, export(model, tmp_path / "out")) < GgufExporter.parity_kld


@pytest.mark.parametrize(
    "scheme",
    [
        "int4-g32",
        "int4-g64",
        "int4-g128",
        "int4-channel",
        "int4-g32-asym",
        "int4-g64-asym",
        "int8-g32",
        "int8-channel",
        "q4_1",
        "q5_1",
        "iq4_nl",
        "mxfp4",
        "int5-channel",
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_two_other_readers_give_back_every_weight_to_the_bit(scheme: str, tied: bool, tmp_path: Path) -> None:
    folder = tiny_llama(
        tmp_path / "model", tie_word_embeddings=tied, hidden_size=96, intermediate_size=160, vocab_size=300, **GROUPED
    )
    # 96 and 160 are no multiples of 64 and 128: the last group of a row is narrower.
    model = rounded_model(folder, tmp_path / "work", scheme, ends=scheme)
    artifact = export(model, tmp_path / "out")
    found = dict(GgufExporter().read_back(artifact, list(model.shapes)))
    assert list(found) == list(model.layers())
    other = by_libgguf(artifact)
    for layer, weight in found.items():
        expected = model.quantized(layer).dequantize().numpy()
        np.testing.assert_array_equal(weight, expected, err_msg=layer)
        if "q_proj" not in layer and "k_proj" not in layer:
            np.testing.assert_array_equal(other[layer], expected, err_msg=layer)


def by_libgguf(artifact: Artifact) -> dict[str, Any]:
    """Rows in the order of the file."""
    layers = {item.name: item.layer for item in stored_tensors(artifact.path / artifact.entry) if item.layer}
    reader = gguf.GGUFReader(artifact.path / artifact.entry)
    tensors = {layers[tensor.name]: tensor for tensor in reader.tensors if tensor.name in layers}
    return {layer: libgguf.dequantize_rows(tensor.data, tensor.tensor_type) for layer, tensor in tensors.items()}


def test_negative_and_zero_scales_are_stored_as_they_are(tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "model"), tmp_path / "work")
    layer = "model.layers.1.self_attn.q_proj"
    before = model.quantized(layer)
    scale = before.scale.clone()
    scale[::2] *= -1
    scale[3] = 0
    model._store.put("odd", {layer: replace(before, scale=scale)}, {})
    [(_, weight)] = GgufExporter().read_back(export(model, tmp_path / "out"), [layer])
    np.testing.assert_array_equal(weight, model.quantized(layer).dequantize().numpy())


def test_layers_left_in_floating_point_keep_their_type_and_rows(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", dtype=torch.bfloat16, **GROUPED)
    kept = "model.layers.0.self_attn.k_proj"
    model = rounded_model(folder, tmp_path / "work", plan={kept: None})
    artifact = export(model, tmp_path / "out", "bf16")
    [(_, weight)] = GgufExporter().read_back(artifact, [kept])
    np.testing.assert_array_equal(weight, model.weight(kept).numpy())
    assert {item.type for item in GgufExporter().inspect(artifact) if item.layer == kept} == {"BF16"}


def test_bfloat16_rounds_as_gguf_py_rounds(tmp_path: Path) -> None:
    model = all_float(tiny_llama(tmp_path / "model"), tmp_path)
    for layer, weight in GgufExporter("bf16").read_back(export(model, tmp_path / "out", "bf16"), list(model.shapes)):
        rounded = gguf.quantize(model.weight(layer).numpy(), gguf.GGMLQuantizationType.BF16)
        np.testing.assert_array_equal(weight, gguf.dequantize(rounded, gguf.GGMLQuantizationType.BF16))


def test_one_changed_byte_is_seen(tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "model"), tmp_path / "work")
    artifact = export(model, tmp_path / "out")
    path, layer = artifact.path / artifact.entry, "model.layers.1.mlp.down_proj"
    tensor = next(item for item in gguf.GGUFReader(path).tensors if item.name == "blk.1.ffn_down.weight")
    with path.open("r+b") as file:
        file.seek(tensor.data_offset + 5)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))
    [(_, weight)] = GgufExporter().read_back(artifact, [layer])
    assert (weight != model.quantized(layer).dequantize().numpy()).sum() == 1


def test_two_exports_are_the_same_bytes(tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "model", **GROUPED), tmp_path / "work", "int4-g32-asym")
    first, second = export(model, tmp_path / "one"), export(model, tmp_path / "two")
    assert (first.path / first.entry).read_bytes() == (second.path / second.entry).read_bytes()
    assert [file.name for file in first.path.iterdir()] == ["model.gguf"]


def test_small_chunks_write_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = rounded_model(tiny_llama(tmp_path / "model", **GROUPED), tmp_path / "work")
    whole = export(model, tmp_path / "whole")
    monkeypatch.setattr("exporters.gguf.writer.CHUNK_BYTES", 7 * 4 * 64)
    parts = export(model, tmp_path / "parts")
    assert (whole.path / whole.entry).read_bytes() == (parts.path / parts.entry).read_bytes()


def test_inspect_agrees_with_gguf_py(tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "model"), tmp_path / "work", "int4-g32-asym")
    artifact = export(model, tmp_path / "out")
    expected = [
        (item.name, item.tensor_type.name, tuple(item.shape[::-1].tolist()), item.n_bytes)
        for item in gguf.GGUFReader(artifact.path / artifact.entry).tensors
    ]
    found = GgufExporter().inspect(artifact)
    assert [(item.name, item.type, item.shape, item.bytes) for item in found] == expected
    layers = {item.layer: item.type for item in found if item.layer}
    assert (layers["lm_head"], layers["model.layers.0.mlp.up_proj"], len(layers)) == ("Q8_0", "Q4_1", 16)


def test_inspect_refuses_what_is_no_gguf_file(tmp_path: Path) -> None:
    artifact = export(rounded_model(tiny_llama(tmp_path / "model"), tmp_path / "work"), tmp_path / "out")
    path = artifact.path / artifact.entry
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(InputError, match="cut short"):
        GgufExporter().inspect(artifact)
    path.write_bytes(b"PK" + bytes(100))
    with pytest.raises(InputError, match="no GGUF file"):
        GgufExporter().inspect(artifact)


def test_metadata_says_what_the_checkpoint_says(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", head_dim=32, rms_norm_eps=0.01, **GROUPED)
    artifact = export(rounded_model(folder, tmp_path / "work"), tmp_path / "out")
    fields = gguf.GGUFReader(artifact.path / artifact.entry).fields
    expected = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "tiny",
        "general.quantized_by": "edgepress 0.1.0",
        "general.file_type": gguf.LlamaFileType.MOSTLY_Q4_0,
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 8,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.rope.dimension_count": 32,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": pytest.approx(0.01),
        "llama.vocab_size": 320,
        "tokenizer.ggml.model": "gpt2",
    }
    assert {key: fields[key].contents() for key in expected} == expected


def test_rows_are_interleaved_within_each_head() -> None:
    assert interleaved_rows(12, 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_importing_the_exporter_imports_nothing_heavy() -> None:
    code = "import sys, exporters.gguf; exporters.gguf.GgufExporter(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "gguf", "numpy", "transformers", "llama_cpp"} & set(loaded)


def greedy(step: Any, first: np.ndarray[Any, Any], count: int) -> Iterator[int]:
    logits = first
    for _ in range(count):
        token = int(logits.argmax())
        yield token
        logits = step(token)


def test_greedy_text_is_the_same_as_in_torch(tmp_path: Path) -> None:
    model = all_float(tiny_llama(tmp_path / "model", **GROUPED), tmp_path)
    artifact = export(model, tmp_path / "out", "f32")
    prompt = torch.arange(20, 40)
    runtime = LlamaCppRuntime()
    runtime.load(artifact.path / artifact.entry, threads=1, context=64)
    found = list(greedy(runtime.decode, runtime.prefill(prompt.numpy()), 32))
    runtime.close()
    expected = fake_quantized(model).generate(
        prompt[None], max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert found == expected[0, 20:].tolist()


def test_naive_rounding_of_tests_is_the_grid_of_the_files() -> None:
    """gguf-py rounds the same symmetric grid where its scale is ours: the largest weight of each block negative."""
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(3))
    weight[:, ::32] = -4.0
    ours = naive_round(weight, QuantScheme.parse("int4-g32")).dequantize().numpy()
    theirs = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_0)
    np.testing.assert_array_equal(ours, gguf.dequantize(theirs, gguf.GGMLQuantizationType.Q4_0))
