"""A llama file read back by transformers, which turns the rows of q and k back by itself (transformers #31766)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from compress.models.checkpoint import open_checkpoint
from compress.protocols import Artifact
from compress.session import CompressedModel
from tests.exporters.test_gguf import GROUPED, all_float, export, shake_vectors
from tests.support import fake_quantized, mean_kld, rounded_model, tiny_llama

HEADS: list[dict[str, Any]] = [
    GROUPED,
    {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32},
    {"num_attention_heads": 4, "num_key_value_heads": 4},
]


def by_transformers(artifact: Artifact) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(artifact.path, gguf_file=artifact.entry, dtype=torch.float32).eval()


def models(folder: Path, heads: dict[str, Any]) -> dict[str, tuple[CompressedModel, str]]:
    """Stored as -> (model, type of what stays in floating point)."""
    source = tiny_llama(folder / "model", edit=shake_vectors, **heads)
    return {
        "f32": (all_float(source, folder / "float"), "f32"),
        "q8_0": (rounded_model(source, folder / "rounded", "int8-g32"), "f32"),
    }


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("stored", ["f32", "q8_0"])
def test_transformers_computes_what_the_passes_chose(heads: dict[str, Any], stored: str, tmp_path: Path) -> None:
    model, float_type = models(tmp_path, heads)[stored]
    found = by_transformers(export(model, tmp_path / "out", float_type))
    tokens = torch.randint(0, 281, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert mean_kld(fake_quantized(model)(tokens).logits, found(tokens).logits) < 1e-9
    for role in ("q_proj", "k_proj"):
        layer = f"model.layers.1.self_attn.{role}"
        assert torch.equal(found.get_submodule(layer).weight, model.weight(layer))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_biases_turn_with_their_rows(heads: dict[str, Any], tmp_path: Path) -> None:
    """transformers reads no biases of a llama from GGUF: turned back by hand."""
    folder = tiny_llama(tmp_path / "model", edit=shake_vectors, attention_bias=True, **heads)
    artifact = export(all_float(folder, tmp_path), tmp_path / "out", "f32")
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(artifact.path / artifact.entry).tensors}
    original = open_checkpoint(folder)
    for role, count in (("q", heads["num_attention_heads"]), ("k", heads["num_key_value_heads"]), ("v", 0)):
        for index in range(2):
            expected = original.tensor(f"model.layers.{index}.self_attn.{role}_proj.bias").numpy()
            found = stored[f"blk.{index}.attn_{role}.bias"]
            if count:
                # The file has the pairs of a head side by side, the checkpoint its two halves.
                found = found.reshape(count, -1, 2).swapaxes(1, 2).reshape(-1)
            np.testing.assert_array_equal(found, expected)
