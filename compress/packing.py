"""Codes to bytes and back. Low bits first, each row starts on a byte: the order that ONNX and GGUF share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]


def pack_bits(codes: U8, bits: int) -> U8:
    """Pack ``codes [..., n]`` of 1, 2, 4 or 8 bits into ``[..., ceil(n * bits / 8)]`` bytes, low bits first."""
    _check(bits)
    if bits == 8:
        return np.ascontiguousarray(codes)
    per_byte = 8 // bits
    short = -codes.shape[-1] % per_byte
    if short:
        codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, short)])
    lanes = codes.reshape(*codes.shape[:-1], -1, per_byte)
    packed = np.zeros(lanes.shape[:-1], dtype=np.uint8)
    for lane in range(per_byte):
        packed |= lanes[..., lane] << np.uint8(bits * lane)
    return packed


def unpack_bits(packed: U8, bits: int, count: int) -> U8:
    """The first ``count`` codes of each row of ``packed [..., bytes]``: the inverse of :func:`pack_bits`."""
    _check(bits)
    if bits == 8:
        return packed[..., :count]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], -1)[..., :count]


def _check(bits: int) -> None:
    if bits not in {1, 2, 4, 8}:
        raise ValueError(f"codes of {bits} bits would straddle bytes")
