"""A quantised key/value cache with static scales, as ONNX Runtime's GroupQueryAttention stores it.

Keys have channels that are large at every token (Hooper et al. 2024, "KVQuant", sec. 3.1; Liu et al. 2024, "KIVI"), so
a scale for each channel loses far less than one for all. Scales are found after the rotary positions, on what the
quantised block makes of the calibration tokens; each is the one that leaves the least squared error.

A position far on turns what two channels hold from one into the other. Scales found on short windows alone would clip
keys of a long context, so keys are turned to positions all over it (docs/decisions/kv-cache.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from compress.kv import BITS, KVScheme
from compress.protocols import Resource
from compress.report import LayerRecord

if TYPE_CHECKING:
    from torch import Tensor

    from compress.session import Block, Session

CANDIDATES = 32
LEAST_SHARE = 0.3
"""Scales are tried from the one that just holds the largest number down to this share of it."""


@dataclass(frozen=True)
class Kv:
    """Store keys and values in ``bits`` (4 or 8), with a scale for each channel, or for the whole tensor.

    Scales are chosen on the first ``samples`` calibration windows, for keys at any of the first ``context`` positions
    (default: all of the model's). ``search`` tries scales that clip the largest numbers; without it each scale just
    holds them.
    """

    bits: int = 8
    scales: Literal["channel", "tensor"] = "channel"
    samples: int = 16
    search: bool = True
    context: int | None = None

    scope: ClassVar[Literal["block"]] = "block"
    reads: ClassVar[frozenset[Resource]] = frozenset({"activations", "quantized", "residual"})
    writes: ClassVar[frozenset[Resource]] = frozenset({"kv"})

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits: {self.bits} is not {' or '.join(map(str, BITS))}")
        if self.samples < 1:
            raise ValueError(f"samples: {self.samples} is not at least 1")
        if self.context is not None and self.context < 1:
            raise ValueError(f"context: {self.context} is not at least 1")

    def check(self, session: Session) -> Sequence[str]:
        """Plan the cache, which every family has; refuse positions that the model does not have."""
        session.kv = KVScheme(self.bits, self.scales == "channel")
        most = session.decoder.spec.max_positions
        if self.context is not None and self.context > most:
            return [f"kv.context: {self.context} is more than the model's {most} positions"]
        return []

    def apply(self, session: Session, block: Block) -> list[LayerRecord]:
        """Choose the block's scales; a record for its keys and one for its values."""
        from compress.kv import KVScales
        from compress.models.folding import block_index

        index, scheme = block_index(session.decoder.spec, block.name), session.kv
        if index is None or scheme is None:
            return []
        context = self.context or session.decoder.spec.max_positions
        parts = zip(*_cached(session, block, index, self.samples, context), strict=True)
        found = [fit_scale(list(part), scheme, self.search) for part in parts]
        block.kv = KVScales(scheme, *(fit.scale for fit in found))
        spec = session.decoder.spec
        bytes_ = spec.kv_heads * spec.head_dim * scheme.bits // 8
        return [
            LayerRecord(f"{block.name} {what}", str(scheme), bytes_, fit.tokens, None, fit.error, fit.plain_error)
            for what, fit in zip(("keys", "values"), found, strict=True)
        ]


def _cached(session: Session, block: Block, index: int, samples: int, context: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [kv heads, tokens, head size] of each window, as the quantised block makes them; no padding.

    Keys are those of positions below ``context``, drawn for each token.
    """
    import torch

    from compress.models.topology import rope_frequencies

    assert block.entering is not None
    generator = torch.Generator().manual_seed(session.seed)
    rope = session.decoder.spec.attentions[index].rope
    frequencies = [] if rope is None else rope_frequencies(session.decoder.checkpoint.config, index)[0]
    tensors = block.dense | {f"{layer}.weight": weight for layer, weight in block.weights.items()}
    tensors |= {f"{layer}.weight": item.dequantize() for layer, item in block.quantized.items()}
    found = []
    with session.decoder.block(index, tensors) as module:
        for window in range(min(samples, len(block.entering))):
            keys, values = session.decoder.keys_and_values(index, module, block.entering[window : window + 1])
            real = slice(None) if session.real is None else session.real[window]
            shifts = torch.randint(max(1, context - keys.shape[2] + 1), (keys.shape[2],), generator=generator)
            keys = turned(keys[0], shifts, frequencies)
            found.append((keys[:, real], values[0][:, real]))
    return found


def turned(keys: Tensor, shifts: Tensor, frequencies: Sequence[float]) -> Tensor:
    """``keys`` [kv heads, tokens, head size] moved on by ``shifts`` [tokens] positions.

    Pair i, channels i and i + len(frequencies), turns by shift times frequency i.
    """
    import torch

    pairs = len(frequencies)
    angles = torch.outer(shifts.double(), torch.tensor(frequencies, dtype=torch.float64))
    cos, sin = angles.cos().float(), angles.sin().float()
    first, second, rest = keys.float().tensor_split((pairs, 2 * pairs), dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


@dataclass(frozen=True)
class Fit:
    """A scale, float32 [kv heads, head size] or [1, 1], and what it costs: squared error relative to the power."""

    scale: Tensor
    tokens: int
    error: float
    plain_error: float
    """With the scale that just holds the largest number."""


def fit_scale(parts: Sequence[Tensor], scheme: KVScheme, search: bool = True) -> Fit:
    """The scale with the least squared error over ``parts``, float32 [kv heads, tokens, head size] each."""
    import torch

    largest = torch.stack([part.abs().amax(1) for part in parts]).amax(0)
    if not scheme.per_channel:
        largest = largest.amax().view(1, 1)
    # A channel that is always 0 has any scale.
    plain = torch.where(largest > 0, largest / scheme.high, torch.ones_like(largest))
    scale, least = plain, _error(parts, plain, scheme)
    plain_error = least
    for step in range(1, CANDIDATES if search else 1):
        tried = plain * (1 - (1 - LEAST_SHARE) * step / (CANDIDATES - 1))
        error = _error(parts, tried, scheme)
        scale = torch.where(error < least, tried, scale)
        least = torch.minimum(error, least)
    power = float(sum(part.double().square().sum() for part in parts)) or 1.0
    tokens = sum(part.shape[1] for part in parts)
    return Fit(scale, tokens, float(least.double().sum()) / power, float(plain_error.double().sum()) / power)


def _error(parts: Sequence[Tensor], scale: Tensor, scheme: KVScheme) -> Tensor:
    """Summed squared error of each scale's numbers, in the shape of ``scale``."""
    import torch

    total = torch.stack([(part - scheme.rounded(part, scale)).square_().sum(1) for part in parts]).sum(0)
    return total if scheme.per_channel else total.sum().view(1, 1)
