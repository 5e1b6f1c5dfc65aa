"""Numbers to the bytes of ggml's block types, as ``ggml-common.h`` lays them out. Vectorised; no file I/O.

Each function encodes whole rows and returns uint8 [rows, bytes of a row].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from compress.errors import CompressError
from compress.scheme import QuantScheme
from exporters.gguf.storage import BLOCK

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


def encode_quantized(layer: str, scheme: QuantScheme, codes: U8, scale: F32, zero: U8 | None) -> U8:
    """Rows of a quantised layer as Q4_0, Q4_1 or Q8_0 blocks.

    ``codes`` [rows, columns], ``scale`` and ``zero`` [rows, groups]; zero is None for a symmetric scheme.
    CompressError names the layer when a scale or minimum is no fp16 number: rounding it would change the weights.
    """
    columns = codes.shape[1]
    group_of_block = np.arange(0, columns, BLOCK) // scheme.width(columns)
    scales = _half(scale[:, group_of_block], layer, "scales")
    blocks = codes.reshape(codes.shape[0], -1, BLOCK)
    if scheme.bits == 8:
        # Subtracting the midpoint 128 and reading as int8 is flipping the top bit.
        parts = [scales, blocks ^ np.uint8(128)]
    elif zero is None:
        parts = [scales, _nibbles(blocks)]
    else:
        minima = -zero[:, group_of_block].astype(np.float32) * scale[:, group_of_block]
        parts = [scales, _half(minima, layer, "minima (-zero * scale)"), _nibbles(blocks)]
    return np.concatenate(parts, axis=-1).reshape(codes.shape[0], -1)


def _nibbles(blocks: U8) -> U8:
    """4-bit codes [..., 32] to bytes [..., 16]: elements 0-15 in the low halves, 16-31 in the high halves."""
    low, high = blocks[..., : BLOCK // 2], blocks[..., BLOCK // 2 :]
    packed: U8 = low | (high << np.uint8(4))
    return packed


def _half(values: F32, layer: str, what: str) -> U8:
    """fp16 bytes [..., 2] of numbers that fp16 holds exactly."""
    with np.errstate(over="ignore"):
        half = values.astype("<f2")
    wrong = ~np.isfinite(values) | (half.astype(np.float32) != values)
    if wrong.any():
        raise CompressError(
            f"{int(wrong.sum())} of {wrong.size} {what} are not fp16 numbers, the first is {values[wrong][0]!r}",
            where=layer,
            fix="the pass that chose the scales must round them to what the file stores",
        )
    return half[..., None].view(np.uint8)


def encode_float(name: str, values: F32, type_name: str) -> U8:
    """Rows [rows, columns] of a floating-point tensor as F32, F16 or BF16.

    CompressError names the tensor if a value is not finite, or overflows the type.
    """
    with np.errstate(over="ignore"):
        encoded = _FLOAT_ENCODERS[type_name](values)
    finite, fits = np.isfinite(values), np.isfinite(_FLOAT_DECODERS[type_name](encoded))
    if not fits.all():
        bad = int((~finite).sum())
        what = f"{bad} values are not finite" if bad else f"{int((~fits).sum())} values are too large for {type_name}"
        raise CompressError(what, where=name, fix="" if bad else "export with float_type: f32 or bf16")
    return np.ascontiguousarray(encoded).view(np.uint8).reshape(values.shape[0], -1)


def _to_bfloat16(values: F32) -> NDArray[np.uint16]:
    """The upper half of each float32, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4").astype(np.uint64)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded


def _from_bfloat16(halves: NDArray[np.uint16]) -> F32:
    return (halves.astype(np.uint32) << 16).view(np.float32)


_FLOAT_ENCODERS: Mapping[str, Callable[[F32], NDArray[np.generic]]] = MappingProxyType(
    {"F32": lambda v: v.astype("<f4"), "F16": lambda v: v.astype("<f2"), "BF16": _to_bfloat16}
)
_FLOAT_DECODERS: Mapping[str, Callable[[NDArray[np.generic]], NDArray[np.floating]]] = MappingProxyType(
    {"F32": lambda v: v, "F16": lambda v: v, "BF16": _from_bfloat16}  # type: ignore[dict-item, return-value]
)
