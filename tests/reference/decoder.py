"""A decoder computed from a :class:`DecoderSpec` and tensors by their checkpoint names alone, one window at a time.

What an exporter must build. It knows no family: where a family is peculiar, the spec must say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from compress.models.topology import DecoderSpec, rope_frequencies

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": lambda x: gelu(x, approximate="tanh"),
}


class ReferenceDecoder:
    """``tensors`` float32 by checkpoint name; ``config`` is the checkpoint's config.json."""

    def __init__(self, spec: DecoderSpec, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.spec, self.config, self.tensors = spec, config, tensors

    def logits(self, tokens: Tensor) -> Tensor:
        """[length, vocab] for int64 ``tokens`` [length]."""
        spec, family, scaling = self.spec, self.spec.family, self.spec.scaling
        hidden = self.tensors[f"{family.embedding}.weight"][tokens] * scaling.embedding
        for index in range(spec.layers):
            for branch, compute in (("attention", self._attention), ("feed_forward", self._feed_forward)):
                entering = self._normed(index, branch, hidden)
                leaving = self._normed(index, f"{branch}_out", compute(index, entering))
                hidden = hidden + scaling.residual * leaving
        head = self.tensors[f"{family.embedding if spec.tied else family.head}.weight"]
        found = self._norm(f"{family.final_norm}.weight", hidden) @ head.T * scaling.logits
        return capped(found, scaling.logits_cap)

    def _normed(self, index: int, role: str, hidden: Tensor) -> Tensor:
        if role not in self.spec.family.norms:
            return hidden
        return self._norm(f"{self.spec.norm(index, role)}.weight", hidden)

    def _norm(self, name: str, hidden: Tensor) -> Tensor:
        gain = self.tensors[name] + self.spec.family.norm_offset
        return hidden / (hidden.square().mean(-1, keepdim=True) + self.spec.norm_eps).sqrt() * gain

    def _linear(self, layer: str, inputs: Tensor) -> Tensor:
        out = inputs @ self.tensors[f"{layer}.weight"].T
        bias = self.tensors.get(f"{layer}.bias")
        return out if bias is None else out + bias

    def _roles(self, index: int, inputs: Tensor, roles: tuple[str, ...], rows: tuple[int, ...]) -> list[Tensor]:
        """Outputs of ``roles``, each a layer of its own or some rows of a fused one."""
        family = self.spec.family
        for fused, parts in family.fused.items():
            if tuple(parts) == roles:
                return list(torch.split(self._linear(self.spec.linear(index, fused), inputs), list(rows), dim=-1))
        return [self._linear(self.spec.linear(index, role), inputs) for role in roles]

    def _attention(self, index: int, inputs: Tensor) -> Tensor:
        spec, kind = self.spec, self.spec.attentions[index]
        wide, narrow = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        outputs = dict(zip("qkv", self._roles(index, inputs, ("q", "k", "v"), (wide, narrow, narrow)), strict=True))
        heads = {}
        for role, values in outputs.items():
            norm, width = spec.family.head_norms.get(role), spec.head_dim
            if norm:
                shape = values.shape if spec.family.whole_head_norms else (len(inputs), -1, width)
                name = f"{spec.family.block.format(index=index)}.{norm}.weight"
                outputs[role] = self._norm(name, values.reshape(shape))
            heads[role] = outputs[role].reshape(len(inputs), -1, width).transpose(0, 1)
            if role != "v" and kind.rope is not None:
                heads[role] = self._rotated(index, heads[role])
        key, value = (heads[role].repeat_interleave(spec.heads // spec.kv_heads, dim=0) for role in "kv")
        assert spec.scaling.attention is not None
        scores = capped(heads["q"] @ key.transpose(1, 2) * spec.scaling.attention, spec.scaling.attention_cap)
        distance = torch.arange(len(inputs))[:, None] - torch.arange(len(inputs))
        hidden_from = (distance < 0) | (distance >= (kind.window or len(inputs)))
        mixed = scores.masked_fill(hidden_from, -torch.inf).softmax(-1) @ value
        return self._linear(spec.linear(index, "o"), mixed.transpose(0, 1).reshape(len(inputs), wide))

    def _rotated(self, index: int, heads: Tensor) -> Tensor:
        frequencies, factor = rope_frequencies(self.config, index)
        angles = torch.arange(heads.shape[1])[:, None] * torch.tensor(frequencies)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        pairs = len(frequencies)
        first, second, rest = heads[..., :pairs], heads[..., pairs : 2 * pairs], heads[..., 2 * pairs :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def _feed_forward(self, index: int, inputs: Tensor) -> Tensor:
        if self.spec.has_experts(index):
            return self._experts(index, inputs)
        rows = (self.spec.intermediate_size,) * 2
        gate, up = self._roles(index, inputs, ("gate", "up"), rows)
        return self._linear(self.spec.linear(index, "down"), ACTIVATIONS[self.spec.activation](gate) * up)

    def _experts(self, index: int, inputs: Tensor) -> Tensor:
        names, experts = self.spec.family.experts, self.spec.experts
        assert names is not None
        assert experts is not None
        block = self.spec.family.block.format(index=index)
        chances = self._linear(f"{block}.{names.router}", inputs).softmax(-1)
        out = torch.zeros_like(inputs)
        for token, chance in enumerate(chances):
            chosen = chance.sort(descending=True).indices[: experts.per_token]
            share = float(chance[chosen].sum()) if experts.normalised else 1.0
            for expert in chosen.tolist():
                linears = self.spec.expert_linears(index)[expert]
                out[token] += chance[expert] / share * self._gated(linears, inputs[token])
        if names.shared:
            shared = {role: f"{block}.{name}" for role, name in names.shared.items()}
            weight = self._linear(f"{block}.{names.shared_gate}", inputs).sigmoid() if names.shared_gate else 1.0
            out = out + weight * self._gated(shared, inputs)
        return out

    def _gated(self, linears: Mapping[str, str], inputs: Tensor) -> Tensor:
        gate, up = (self._linear(linears[role], inputs) for role in ("gate", "up"))
        return self._linear(linears["down"], ACTIVATIONS[self.spec.activation](gate) * up)


def capped(values: Tensor, cap: float | None) -> Tensor:
    return values if cap is None else cap * torch.tanh(values / cap)
