"""QuaRot's offline rotations as the paper's text has them: whole matrices, one product after the other, in float64.

Ashkboos et al. 2024, sec. 4: gains into the matrices that read the stream (stage 1a), ``W_in R`` and ``R^T W_out``; and
the value heads (stage 1c), one query head after the other. Only the matrices R are the product's own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.rotation import Rotation


def dense(rotation: Rotation) -> Tensor:
    """The matrix R, float64, from its factors by Kronecker's product."""
    product = torch.ones(1, 1, dtype=torch.float64)
    for factor in rotation.factors:
        product = torch.kron(product, factor.contiguous())
    return torch.diag(rotation.signs) @ product


def rotate_llama(
    tensors: Mapping[str, Tensor], stream: Tensor, value: Tensor, heads: int, kv_heads: int
) -> dict[str, Tensor]:
    """The rotated llama's tensors, float64, from those of the original; the head has its own matrix afterwards."""
    found = {name: tensor.double() for name, tensor in tensors.items()}
    head = found.get("lm_head.weight", found["model.embed_tokens.weight"])
    found["lm_head.weight"] = head @ torch.diag(found["model.norm.weight"]) @ stream
    found["model.embed_tokens.weight"] = found["model.embed_tokens.weight"] @ stream
    found["model.norm.weight"] = torch.ones_like(found["model.norm.weight"])
    blocks = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    for index in range(blocks):
        _rotate_block(found, f"model.layers.{index}", stream, value, heads, kv_heads)
    return found


def _rotate_block(
    found: dict[str, Tensor], block: str, stream: Tensor, value: Tensor, heads: int, kv_heads: int
) -> None:
    readers = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }
    for norm, layers in readers.items():
        gain = found[f"{block}.{norm}.weight"]
        for layer in layers:
            found[f"{block}.{layer}.weight"] = found[f"{block}.{layer}.weight"] @ torch.diag(gain) @ stream
        found[f"{block}.{norm}.weight"] = torch.ones_like(gain)
    width = len(value)
    for name in (f"{block}.self_attn.v_proj.weight", f"{block}.self_attn.v_proj.bias"):
        if name in found:
            parts = torch.split(found[name], width)
            assert len(parts) == kv_heads
            found[name] = torch.cat([value.T @ part for part in parts])
    output = f"{block}.self_attn.o_proj.weight"
    parts = torch.split(found[output], width, dim=1)
    assert len(parts) == heads
    found[output] = torch.cat([part @ value for part in parts], dim=1)
    for layer in ("self_attn.o_proj", "mlp.down_proj"):
        for name in (f"{block}.{layer}.weight", f"{block}.{layer}.bias"):
            if name in found:
                found[name] = stream.T @ found[name]
