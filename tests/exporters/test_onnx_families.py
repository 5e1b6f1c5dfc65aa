"""The graph of every family computes what the torch decoder computes with the same weights."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress import engine, registry
from compress.errors import CompressError
from compress.models.checkpoint import open_checkpoint
from compress.models.decoder import Decoder
from compress.models.topology import describe
from compress.protocols import Artifact
from compress.recipe import loads
from compress.runner.artifact import find_artifact
from compress.runner.ort import OrtRuntime
from compress.session import CompressedModel
from exporters.onnx import OnnxExporter
from tests.compress.families import ROUTED, VARIANTS, saved, tokens_of
from tests.compress.runs import sentences
from tests.exporters.generation import by_genai, by_runtime
from tests.exporters.test_onnx_file import graph_of, idle_nodes
from tests.exporters.test_onnx_parity import session, step
from tests.support import mean_kld, rounded_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
every_variant = pytest.mark.parametrize("variant", VARIANTS)
CLOSE = {"atol": 2e-4, "rtol": 0.0}
LENGTH = 24
"""Three times the windows of the variants."""


def model_of(variant: str, folder: Path, scheme: str | None = "int4-g32", **overrides: Any) -> CompressedModel:
    """Rounded naively, or (None) with every layer in floating point."""
    checkpoint = saved(variant, folder / "model", **overrides)
    return rounded_model(checkpoint, folder / "work", scheme, ends=None if scheme is None else "int8-g32")


def torch_logits(model: CompressedModel, tokens: Tensor) -> Tensor:
    return torch.stack(list(Decoder(open_checkpoint(model.folder), model.parameter).logits(tokens)))


def export(model: CompressedModel, folder: Path, accuracy_level: int = 0, float_type: str = "f32") -> Artifact:
    folder.mkdir()
    return OnnxExporter(accuracy_level, float_type).write(model, folder)


@every_variant
@pytest.mark.parametrize("scheme", [None, "int4-g32"])
def test_logits_are_those_of_the_torch_decoder(variant: str, scheme: str | None, tmp_path: Path) -> None:
    model, tokens = model_of(variant, tmp_path, scheme), tokens_of(2, LENGTH)
    found, _ = step(session(model, tmp_path / "out"), tokens, torch.ones_like(tokens))
    expected = torch_logits(model, tokens)
    assert float(expected.std()) > 0.3
    torch.testing.assert_close(found, expected, **CLOSE)


HEADS: list[tuple[str, dict[str, Any]]] = [
    # Rotated inside GroupQueryAttention in part, outside in part, outside whole.
    ("phi3, heads rotated in part", {"num_attention_heads": 2, "num_key_value_heads": 1}),
    ("phi3, heads rotated in part", {"num_attention_heads": 8}),
    ("qwen3", {"head_dim": 8}),
    ("olmo2", {"num_attention_heads": 8}),
    ("gemma3", {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 1}),
]


@pytest.mark.parametrize(("variant", "heads"), HEADS, ids=str)
def test_heads_of_other_sizes_agree_too(variant: str, heads: dict[str, Any], tmp_path: Path) -> None:
    model, tokens = model_of(variant, tmp_path, **heads), tokens_of(1, LENGTH)
    found, _ = step(session(model, tmp_path / "out"), tokens, torch.ones_like(tokens))
    torch.testing.assert_close(found, torch_logits(model, tokens), **CLOSE)


STEPS = (
    # A prompt padded on the left, on the right, and in between; a chunk after it; single tokens; a row that waits.
    ("..000000000000", "0000000......", "0..0.000.0000"),
    ("...00", "00000", ".0.00"),
    ("0", "0", "0"),
    ("0", ".", "0"),
    ("0", "0", "0"),
)
"""Columns of each row at each step: 0 is a token, a point is padding."""


@every_variant
def test_padded_rows_are_as_if_alone_at_every_step(variant: str, tmp_path: Path) -> None:
    model = model_of(variant, tmp_path)
    check_padded_rows(model, session(model, tmp_path / "out"))


def check_padded_rows(model: CompressedModel, opened: Any) -> None:
    """Go through :data:`STEPS` and compare each row with the torch decoder's on that row alone."""
    steps = [[row.ljust(max(map(len, rows)), ".") for row in rows] for rows in STEPS]
    kept = [sum(rows[row].count("0") for rows in steps) for row in range(3)]
    alone = tokens_of(3, max(kept))
    expected = torch_logits(model, alone)
    mask, past, done = torch.zeros(3, 0, dtype=torch.int64), None, [0, 0, 0]
    for rows in steps:
        real = torch.tensor([[column == "0" for column in row] for row in rows])
        ids = torch.full(real.shape, 7)
        for row in range(3):
            ids[row, real[row]] = alone[row, done[row] : done[row] + int(real[row].sum())]
        mask = torch.cat([mask, real.long()], dim=1)
        logits, past = step(opened, ids, mask, past)
        for row in range(3):
            count = int(real[row].sum())
            torch.testing.assert_close(logits[row, real[row]], expected[row, done[row] : done[row] + count], **CLOSE)
            done[row] += count
    assert done == kept
    assert min(kept) > 8


def test_a_row_without_a_token_is_an_error_not_a_wrong_answer(tmp_path: Path) -> None:
    opened, tokens = session(model_of("llama", tmp_path), tmp_path / "out"), tokens_of(2, 6)
    mask = torch.ones_like(tokens)
    mask[1] = 0
    with pytest.raises(Exception, match="seqlens_k"):
        step(opened, tokens, mask)


@every_variant
def test_the_runtime_writes_its_cache_in_place_chunk_by_chunk(variant: str, tmp_path: Path) -> None:
    model, tokens = model_of(variant, tmp_path), tokens_of(1, LENGTH)
    artifact = export(model, tmp_path / "out")
    runtime = OrtRuntime(spin=False, chunk=5)
    runtime.load(artifact.path / artifact.entry, threads=1, context=LENGTH + 10)
    prompt, rest = tokens[0, :13].numpy(), tokens[0, 13:].tolist()
    found = [*runtime.prefill(prompt, all_logits=True), *(runtime.decode(token) for token in rest)]
    torch.testing.assert_close(torch.from_numpy(np.stack(found)), torch_logits(model, tokens)[0], **CLOSE)


@every_variant
def test_every_layer_reads_back_and_takes_what_was_promised(variant: str, tmp_path: Path) -> None:
    checkpoint = saved(variant, tmp_path / "model")
    schemes = itertools.cycle(["int4-g32", "int8-g32-asym", None, "int2-g32", "nf4-g16", "int4-channel-asym"])
    plan = dict(zip(describe(open_checkpoint(checkpoint).config).all_linears(), schemes, strict=False))
    model = rounded_model(checkpoint, tmp_path / "work", plan=plan)
    artifact, exporter = export(model, tmp_path / "out"), OnnxExporter()
    for layer, values in exporter.read_back(artifact, list(model.layers())):
        assert values.tobytes() == model.weight(layer).numpy().tobytes(), layer
    rows = {row.layer: row for row in exporter.inspect(artifact) if row.layer}
    assert rows.keys() == {*model.layers(), *describe(model.config).float_linears()}
    for layer, shape in model.shapes.items():
        assert rows[layer].shape == shape
        assert 8 * rows[layer].bytes == exporter.stored_bits(model.schemes.get(layer), shape), layer
    tokens = tokens_of(1, LENGTH)
    found, _ = step(session(model, tmp_path / "again"), tokens, torch.ones_like(tokens))
    torch.testing.assert_close(found, torch_logits(model, tokens), **CLOSE)


@every_variant
def test_half_precision_halves_the_cache_and_stays_close(variant: str, tmp_path: Path) -> None:
    model, tokens = model_of(variant, tmp_path), tokens_of(1, LENGTH)
    found, sizes = [], []
    for float_type in ("f32", "f16"):
        artifact = export(model, tmp_path / float_type, 0, float_type)
        runtime = OrtRuntime(spin=False, chunk=7)
        runtime.load(artifact.path / artifact.entry, threads=1, context=LENGTH + 6)
        logits = [
            *runtime.prefill(tokens[0, :15].numpy(), all_logits=True),
            *map(runtime.decode, tokens[0, 15:].tolist()),
        ]
        found.append(torch.from_numpy(np.stack(logits)))
        sizes.append(runtime.kv_bytes(LENGTH))
    assert sizes[0] == 2 * sizes[1]
    assert found[1].dtype == torch.float32
    assert 0 < mean_kld(found[0], found[1]) < OnnxExporter(float_type="f16").parity_kld
    if variant not in ROUTED:
        # A token may choose another expert for a rounding.
        torch.testing.assert_close(found[1], found[0], atol=2e-2, rtol=0)


@pytest.mark.parametrize("variant", ["gemma2", "qwen2_moe", "phi3"])
def test_half_precision_stores_what_is_no_code_in_16_bits(variant: str, tmp_path: Path) -> None:
    checkpoint = saved(variant, tmp_path / "model")
    linears = list(describe(open_checkpoint(checkpoint).config).all_linears())
    model = rounded_model(checkpoint, tmp_path / "work", plan=dict.fromkeys(linears[::2]), ends=None)
    artifact, exporter = export(model, tmp_path / "out", 4, "f16"), OnnxExporter(float_type="f16")
    for layer, values in exporter.read_back(artifact, list(model.layers())):
        expected = model.weight(layer) if layer in model.schemes else model.weight(layer).half().float()
        assert values.tobytes() == expected.numpy().tobytes(), layer
    rows = exporter.inspect(artifact)
    assert not [row.name for row in rows if row.type == "float32"]
    sizes = {row.layer: 8 * row.bytes for row in rows}
    assert all(
        sizes[layer] == exporter.stored_bits(model.schemes.get(layer), shape) for layer, shape in model.shapes.items()
    )
    assert exporter.stored_bits(None, (3, 5)) == 3 * 5 * 16


def test_a_number_that_half_precision_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][3] = 1e5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = rounded_model(folder, tmp_path / "work")
    with pytest.raises(CompressError, match="1 of 64 numbers are too large for float16") as refusal:
        export(model, tmp_path / "out", 4, "f16")
    assert refusal.value.where == "model.layers.1.input_layernorm.weight"
    export(model, tmp_path / "single")


@pytest.mark.parametrize("variant", ROUTED)
@pytest.mark.parametrize("level", [0, 4])
def test_a_session_without_graph_optimisation_routes_alike(variant: str, level: int, tmp_path: Path) -> None:
    model, tokens = model_of(variant, tmp_path), tokens_of(2, LENGTH)
    off = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    found, _ = step(session(model, tmp_path / "out", level, off), tokens, torch.ones_like(tokens))
    # Nothing is packed there, and activations stay in fp32 at either level.
    torch.testing.assert_close(found, torch_logits(model, tokens), **CLOSE)


@every_variant
def test_a_run_proves_the_artifact(variant: str, tmp_path: Path) -> None:
    folder = saved(variant, tmp_path / "model")
    tiny_tokenizer(folder)
    (tmp_path / "text.txt").write_text(sentences(1, 400))
    text = f"{{source: text, path: {tmp_path}/text.txt, sequence_length: 32"
    recipe = loads(
        f"model: {folder}\npasses: [rtn]\nexport: [onnx]\nmeasure: false\ncalibration: {text}, samples: 4}}\n"
        f"evaluate: {text}, windows: 2}}\n",
        registry.load,
    )
    (artifact,) = engine.run(recipe, tmp_path / "out").artifacts
    assert artifact.parity is not None
    assert artifact.parity.passed
    assert artifact.parity.exact
    assert artifact.parity.kld_mean < 1e-7
    spec = describe(open_checkpoint(folder).config)
    assert artifact.parity.tensors == len([*spec.ends, *spec.all_linears()])
    config = json.loads((find_artifact(tmp_path / "out").path / "genai_config.json").read_text())["model"]["decoder"]
    assert (config["head_size"], config["num_key_value_heads"]) == (spec.head_dim, spec.kv_heads)


@pytest.mark.parametrize(("variant", "float_type"), [*((name, "f32") for name in VARIANTS), ("qwen3_moe", "f16")])
def test_genai_generates_what_the_runtime_generates(variant: str, float_type: str, tmp_path: Path) -> None:
    artifact = export(model_of(variant, tmp_path, eos_token_id=319), tmp_path / "out", 0, float_type)
    assert not idle_nodes(artifact)
    tiny_tokenizer(artifact.path)
    prompt, count = tokens_of(1, LENGTH)[0].tolist(), 12
    found = by_genai(artifact.path, prompt, count)
    expected = by_runtime(artifact.path / artifact.entry, prompt, count, ends={319})
    assert found == expected


@every_variant
def test_without_padding_nothing_is_moved(variant: str, tmp_path: Path) -> None:
    model, tokens = model_of(variant, tmp_path), tokens_of(2, LENGTH)
    (tmp_path / "out").mkdir()
    artifact = OnnxExporter(0, padding=False).write(model, tmp_path / "out")
    entry = artifact.path / artifact.entry
    assert "GatherElements" not in {node.op_type for node in graph_of(artifact).node}
    assert not idle_nodes(artifact)
    opened = onnxruntime.InferenceSession(entry, providers=["CPUExecutionProvider"])
    expected = torch_logits(model, tokens)
    for rows, ends in ((2, (LENGTH - 2, LENGTH - 1, LENGTH)), (1, (9, LENGTH - 1, LENGTH))):
        past, found, start = None, [], 0
        for end in ends:
            logits, past = step(opened, tokens[:rows, start:end], torch.ones(rows, end, dtype=torch.int64), past)
            found.append(logits)
            start = end
        torch.testing.assert_close(torch.cat(found, dim=1), expected[:rows], **CLOSE)
