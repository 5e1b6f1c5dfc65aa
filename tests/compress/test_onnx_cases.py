"""Faults that other exporters had, each with the models that showed it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from safetensors.torch import load_file, save_file

from compress import engine
from compress.errors import InputError
from compress.protocols import Artifact
from compress.runner.ort import OrtRuntime
from compress.scheme import QuantScheme
from exporters.onnx import OnnxExporter
from exporters.onnx.layout import to_blocks
from tests.compress.families import saved, tokens_of
from tests.compress.runs import Bench
from tests.support import fake_quantized, naive_round, rounded_model, tiny_llama, tiny_tokenizer

QUIET = {"measure": "false", "evaluate": "false"}


def logits_of(artifact: Artifact, tokens: Any) -> torch.Tensor:
    runtime = OrtRuntime(spin=False, exact=True)
    runtime.load(artifact.path / artifact.entry, 1, len(tokens))
    return torch.from_numpy(runtime.prefill(tokens.numpy(), all_logits=True))


@pytest.mark.parametrize("variant", ["gemma", "llama"])
def test_ends_are_tied_in_the_file_if_and_only_if_they_are_in_the_model(variant: str, tmp_path: Path) -> None:
    """onnxruntime-genai #2306: a flag tied what was not tied, and nobody compared the tensors."""
    tied = variant == "gemma"
    folder = saved(variant, tmp_path / "model")
    assert json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", tied) is tied
    model = rounded_model(folder, tmp_path / "work", ends="int4-g32-asym")
    (tmp_path / "out").mkdir()
    artifact = OnnxExporter(0).write(model, tmp_path / "out")
    stored = {tensor.layer for tensor in OnnxExporter().inspect(artifact)}
    assert ("lm_head" in stored) is not tied
    assert json.loads((artifact.path / "config.json").read_text()) == model.config
    (tokens,) = tokens_of(1, 20)
    with torch.no_grad():
        expected = fake_quantized(model)(tokens[None]).logits[0]
    torch.testing.assert_close(logits_of(artifact, tokens), expected, atol=1e-3, rtol=1e-3)


def test_a_tied_head_has_no_scheme_of_its_own(bench: Bench, tmp_path: Path) -> None:
    folder = saved("gemma", tmp_path / "model")
    tiny_tokenizer(folder)
    with pytest.raises(InputError, match="'lm_head' matches no layer"):
        engine.plan(bench.recipe(model=str(folder), pin="{lm_head: int4-g32}"))


def test_an_untied_model_without_a_head_is_refused(bench: Bench, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model")
    file = folder / "model.safetensors"
    save_file({name: x for name, x in load_file(file).items() if name != "lm_head.weight"}, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"lacks tensors that its config\.json promises\nlm_head\.weight"):
        engine.plan(bench.recipe(model=str(folder)))


@pytest.mark.parametrize("columns", [32, 96, 200])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_an_odd_number_of_zero_points_runs_as_it_was_chosen(columns: int, bits: int) -> None:
    """Quark #20: zero points of the blocks of one row, packed to whole bytes."""
    torch.manual_seed(columns)
    weight = naive_round(torch.randn(8, columns), QuantScheme(bits, 32, symmetric=False))
    packed = to_blocks("layer", weight)
    assert packed.zero_points is not None
    inputs = {"codes": packed.codes, "scales": packed.scales.astype(np.float32), "zero_points": packed.zero_points}

    def opened(zero_points: Any) -> Any:
        node = helper.make_node(
            "MatMulNBits",
            ["x", *inputs],
            ["y"],
            domain="com.microsoft",
            K=columns,
            N=8,
            bits=bits,
            block_size=32,
            accuracy_level=0,
        )
        stored = [onnx.numpy_helper.from_array(x, n) for n, x in (inputs | {"zero_points": zero_points}).items()]
        ends = [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, [3, size]) for n, size in (("x", columns), ("y", 8))
        ]
        graph = helper.make_graph([node], "g", ends[:1], ends[1:], stored)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    x = torch.randn(3, columns)
    (found,) = opened(packed.zero_points).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), x @ weight.dequantize().T, atol=1e-4, rtol=1e-4)
    # All zero points in one run, without the rest of each row's last byte, are as many bytes less: refused.
    if bits == 4 and columns != 32 * 2:
        with pytest.raises(Exception, match="zero_points"):
            opened(packed.zero_points.reshape(-1)[: 8 * len(packed.scales[0]) // 2])


def test_a_second_run_leaves_nothing_of_the_first(bench: Bench, tmp_path: Path) -> None:
    """onnx #6655: saving again with external data appends to the data file."""
    larger = tiny_llama(tmp_path / "larger", hidden_size=128, intermediate_size=256)
    sizes = []
    for model in (bench.model, bench.model, larger, bench.model):
        out = tmp_path / "out"
        engine.run(bench.recipe(model=str(model), **QUIET), out, overwrite=True)
        graph = onnx.load(out / "onnx" / "model.onnx", load_external_data=False).graph
        places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in graph.initializer]
        end = max(int(place["offset"]) + int(place["length"]) for place in places if place)
        sizes.append((out / "onnx" / "model.onnx.data").stat().st_size)
        assert sizes[-1] == end
    assert sizes[0] == sizes[1] == sizes[3] < sizes[2]


@pytest.mark.parametrize(
    ("variant", "settings", "size"),
    [
        ("phi3", {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 2}, 96),
        ("qwen3", {"head_dim": 32}, 32),
        ("llama", {"head_dim": 24}, 24),
    ],
)
def test_a_quantised_cache_takes_heads_of_any_size_that_runs(
    variant: str, settings: dict[str, int], size: int, bench: Bench, tmp_path: Path
) -> None:
    """mlx-vlm #2061: a head size that is no multiple of the group crashed in the middle of a text."""
    folder = saved(variant, tmp_path / "model", **settings)
    tiny_tokenizer(folder)
    recipe = bench.recipe(model=str(folder), passes="[{kv: {bits: 4}}, rtn]")
    (artifact,) = engine.run(recipe, tmp_path / "out").artifacts
    assert artifact.parity is not None
    assert artifact.parity.passed
    assert artifact.performance is not None
    heads = 2 * 2 * settings.get("num_key_value_heads", 2)
    assert artifact.performance.memory["kv"].value == heads * size * 4 // 8 * (8 + 4)


def test_a_head_size_that_does_not_run_is_refused_before_any_work(bench: Bench, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model", head_dim=20)
    tiny_tokenizer(folder)
    with pytest.raises(InputError, match="onnx: head size 20: GroupQueryAttention needs a multiple of 8"):
        engine.plan(bench.recipe(model=str(folder), passes="[{kv: {bits: 4}}, rtn]"))
