"""The graph computes what the fake-quantised torch model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

from compress.session import CompressedModel
from exporters.onnx import OnnxExporter
from tests.support import fake_quantized, mean_kld, rounded_model, tiny_llama

AS_RUN_KLD = 8e-3
"""What 8-bit activations cost at most at these sizes."""
FP32_NOISE_KLD = 1e-9
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def session(model: CompressedModel, folder: Path, accuracy_level: int = 0, optimisation: Any = None) -> Any:
    folder.mkdir()
    artifact = OnnxExporter(accuracy_level).write(model, folder)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if optimisation is not None:
        options.graph_optimization_level = optimisation
    return onnxruntime.InferenceSession(artifact.path / artifact.entry, options)


def step(opened: Any, ids: Tensor, mask: Tensor, past: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
    """(logits, past for the next step); without ``past`` the cache is empty."""
    feeds = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    for item in opened.get_inputs():
        if item.name.startswith("past_key_values."):
            _, heads, _, size = item.shape
            feeds[item.name] = np.zeros((len(ids), heads, 0, size), np.float32) if past is None else past[item.name]
    outputs = [item.name for item in opened.get_outputs()]
    values = dict(zip(outputs, opened.run(outputs, feeds), strict=True))
    logits = torch.from_numpy(values.pop("logits"))
    return logits, {name.replace("present.", "past_key_values."): value for name, value in values.items()}


def tokens(batch: int = 1, length: int = 24, seed: int = 1) -> Tensor:
    return torch.randint(0, 281, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits_of(model: CompressedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = fake_quantized(model)(ids).logits
    return logits


def kld(model: CompressedModel, folder: Path, ids: Tensor, accuracy_level: int = 0) -> float:
    actual, _ = step(session(model, folder, accuracy_level), ids, torch.ones_like(ids))
    return mean_kld(logits_of(model, ids), actual)


def random_biases(parameters: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        if name.endswith(".bias"):
            parameter.copy_(torch.randn_like(parameter))


@pytest.mark.parametrize("shape", [{}, {"hidden_size": 96, "intermediate_size": 200}], ids=["even", "odd"])
@pytest.mark.parametrize(
    "scheme",
    [
        "int4-g32",
        "int4-g32-asym",
        "int8-g32",
        "int8-g64-asym",
        "int2-g32-asym",
        "int2-g256",
        "int4-g16-asym",
        "int4-g128",
        "int4-channel",
        "int8-channel-asym",
    ],
)
def test_every_scheme_agrees_with_torch(tmp_path: Path, scheme: str, shape: dict[str, int]) -> None:
    model = rounded_model(tiny_llama(tmp_path / "m", **shape), tmp_path / "w", scheme)
    assert kld(model, tmp_path / "out", tokens()) < FP32_NOISE_KLD <= OnnxExporter().parity_kld


@pytest.mark.parametrize("width", [64, 96, 104], ids=["2 blocks", "3 blocks", "3.25 blocks"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("ends", [None, "int8-g32", "int4-g32-asym", "int2-g32-asym"])
def test_embedding_and_head_agree_with_torch(tmp_path: Path, ends: str | None, tied: bool, width: int) -> None:
    folder = tiny_llama(tmp_path / "m", tie_word_embeddings=tied, hidden_size=width, head_dim=16)
    model = rounded_model(folder, tmp_path / "w", ends=ends)
    assert kld(model, tmp_path / "out", tokens()) < FP32_NOISE_KLD


def test_layers_may_differ_in_scheme_or_stay_in_float(tmp_path: Path) -> None:
    plan = {
        "model.embed_tokens": None,
        "model.layers.0.self_attn.q_proj": "int2-g64",
        "model.layers.0.mlp.down_proj": "int8-g32",
        "model.layers.1.self_attn.v_proj": None,
        "model.layers.1.mlp.up_proj": "int4-g16-asym",
    }
    model = rounded_model(tiny_llama(tmp_path / "m"), tmp_path / "w", plan=plan)
    assert kld(model, tmp_path / "out", tokens()) < FP32_NOISE_KLD


@pytest.mark.parametrize("scheme", ["int4-g32", "int4-g32-asym", "int8-g32", "int2-g32"])
@pytest.mark.parametrize("accuracy_level", [0, 4])
def test_biases_are_added(tmp_path: Path, scheme: str, accuracy_level: int) -> None:
    folder = tiny_llama(tmp_path / "m", random_biases, attention_bias=True, mlp_bias=True)
    model = rounded_model(folder, tmp_path / "w", scheme, plan={"model.layers.1.mlp.gate_proj": None})
    limit = FP32_NOISE_KLD if accuracy_level == 0 else AS_RUN_KLD
    assert kld(model, tmp_path / "out", tokens(), accuracy_level) < limit


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_activations_agree_with_torch(tmp_path: Path, activation: str) -> None:
    model = rounded_model(tiny_llama(tmp_path / "m", hidden_act=activation), tmp_path / "w")
    assert kld(model, tmp_path / "out", tokens()) < FP32_NOISE_KLD


@pytest.mark.parametrize(
    "rope",
    [
        LLAMA3_ROPE,
        {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
@pytest.mark.parametrize("head_dim", [16, 24])
def test_rotary_scaling_agrees_with_torch(tmp_path: Path, rope: dict[str, Any], head_dim: int) -> None:
    model = rounded_model(tiny_llama(tmp_path / "m", rope_parameters=rope, head_dim=head_dim), tmp_path / "w")
    assert kld(model, tmp_path / "out", tokens(length=200)) < FP32_NOISE_KLD


def test_eight_bit_activations_differ_a_little(tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "m", hidden_size=96, intermediate_size=200), tmp_path / "w")
    found = kld(model, tmp_path / "out", tokens(length=100), accuracy_level=4)
    assert 1e-6 < found < AS_RUN_KLD


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("scheme", ["int4-g32", "int4-g32-asym", "int8-g32", "int2-g32"])
def test_a_session_without_graph_optimisation_is_right_too(tmp_path: Path, scheme: str, tied: bool) -> None:
    model = rounded_model(tiny_llama(tmp_path / "m", tie_word_embeddings=tied), tmp_path / "w", scheme, ends=scheme)
    off = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    opened, ids = session(model, tmp_path / "out", 4, off), tokens()
    assert mean_kld(logits_of(model, ids), step(opened, ids, torch.ones_like(ids))[0]) < AS_RUN_KLD


@pytest.mark.parametrize("head_dim", [16, 24], ids=["rotary inside attention", "rotary operator"])
@pytest.mark.parametrize(
    ("batch", "chunks"),
    [(2, (14,)), (2, (10, 1, 1, 1, 1)), (1, (10, 1, 1, 1, 1)), (1, (5, 6, 3)), (2, (5, 6, 3))],
    ids=str,
)
def test_sequences_continue_from_their_past(tmp_path: Path, batch: int, chunks: tuple[int, ...], head_dim: int) -> None:
    model = rounded_model(tiny_llama(tmp_path / "m", head_dim=head_dim), tmp_path / "w")
    ids = tokens(batch, length=14)
    opened = session(model, tmp_path / "out")
    parts, past, done = [], None, 0
    for length in chunks:
        mask = torch.ones(batch, done + length, dtype=torch.int64)
        logits, past = step(opened, ids[:, done : done + length], mask, past)
        parts.append(logits)
        done += length
    torch.testing.assert_close(torch.cat(parts, dim=1), logits_of(model, ids), atol=2e-4, rtol=0)


def test_bfloat16_checkpoint_is_computed_in_fp32(tmp_path: Path) -> None:
    plan = {"model.layers.0.mlp.up_proj": None}
    model = rounded_model(tiny_llama(tmp_path / "m", dtype=torch.bfloat16), tmp_path / "w", plan=plan)
    assert kld(model, tmp_path / "out", tokens()) < FP32_NOISE_KLD
