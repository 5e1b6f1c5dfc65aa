"""A quantised layer as MatMulNBits stores it: blocks of packed codes, fp16 scales, zero points packed per row.

Source: the operator schemas of MatMulNBits, GatherBlockQuantized and MatMulBnb4 in ONNX Runtime's ContribOperators.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compress.errors import CompressError
from compress.packing import U8, pack_bits
from exporters.onnx.limits import block_size

if TYPE_CHECKING:
    from compress.tensor import QuantizedTensor


@dataclass(frozen=True)
class BlockLayout:
    """The three tensors of a layer.

    ``codes`` uint8 [out, blocks, block * bits / 8]; ``scales`` float16 [out, blocks]; ``zero_points`` uint8
    [out, ceil(blocks * bits / 8)], or None for the midpoint.
    """

    block: int
    codes: U8
    scales: NDArray[np.float16]
    zero_points: U8 | None


def to_blocks(layer: str, weight: QuantizedTensor) -> BlockLayout:
    """Pack ``weight``; CompressError when fp16 cannot hold one of its scales (a pass broke its promise)."""
    rows, columns = weight.shape
    bits = weight.scheme.bits
    block = block_size(weight.scheme, columns)
    blocks = -(-columns // block)
    # A group may span several blocks: which group does each block belong to?
    group = np.arange(blocks) * block // weight.scheme.width(columns)

    stored = _half(layer, weight.scale.numpy()[:, group])
    codes = np.zeros((rows, blocks * block), dtype=np.uint8)
    codes[:, :columns] = weight.codes.numpy()
    packed = pack_bits(codes.reshape(rows, blocks, block), bits)
    zero_points = None if weight.zero is None else pack_bits(weight.zero.numpy()[:, group], bits)
    return BlockLayout(block, packed, stored, zero_points)


def to_codebook_blocks(layer: str, weight: QuantizedTensor) -> BlockLayout:
    """Pack ``weight`` for MatMulBnb4: row after row, two codes a byte, the first in the high half.

    ``codes`` uint8 [out * in / 2], ``scales`` float16 [out * in / block]. CompressError as for :func:`to_blocks`.
    """
    columns = weight.shape[1]
    block = block_size(weight.scheme, columns)
    group = np.arange(columns // block) * block // weight.scheme.width(columns)
    pairs = weight.codes.numpy().reshape(-1, 2)
    packed = pairs[:, 0] << np.uint8(4) | pairs[:, 1]
    return BlockLayout(block, packed, _half(layer, weight.scale.numpy()[:, group]).reshape(-1), None)


def _half(layer: str, scales: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        stored = scales.astype(np.float16)
    wrong = int((stored.astype(np.float32) != scales).sum())
    if wrong:
        raise CompressError(f"{wrong} of {scales.size} scales are not fp16 numbers", where=layer)
    return stored
