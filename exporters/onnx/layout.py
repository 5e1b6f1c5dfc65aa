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
from exporters.onnx.limits import block_size, standard_block

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


@dataclass(frozen=True)
class ColumnLayout:
    """The three tensors of a layer for DequantizeLinear, [in, out] and [in / block, out], packed throughout.

    ``codes`` and ``zero_points`` are bytes of numbers of ``type`` (int4, int8, uint4, uint8); without zero points codes
    are centred on 0. ``scales`` float16. ``shape``: (in, out).
    """

    block: int
    shape: tuple[int, int]
    type: str
    codes: U8
    scales: NDArray[np.float16]
    zero_points: U8 | None


def to_columns(layer: str, weight: QuantizedTensor) -> ColumnLayout:
    """Pack ``weight``, low half first (ONNX, TensorProto); CompressError as for :func:`to_blocks`."""
    scheme, (rows, columns) = weight.scheme, weight.shape
    block = standard_block(scheme, columns)
    assert block is not None
    group = np.arange(columns // block) * block // scheme.width(columns)
    codes, zero = weight.codes.numpy(), None
    if weight.zero is None:
        # Of a signed number only the low bits are kept.
        codes = (codes - np.uint8(scheme.midpoint)) & np.uint8(scheme.levels - 1)
    else:
        zero = _through(weight.zero.numpy()[:, group], scheme.bits)
    kind = f"{'int' if zero is None else 'uint'}{scheme.bits}"
    scales = np.ascontiguousarray(_half(layer, weight.scale.numpy()[:, group]).T)
    return ColumnLayout(block, (columns, rows), kind, _through(codes, scheme.bits), scales, zero)


def _through(numbers: U8, bits: int) -> U8:
    """Bytes of the transposed matrix, element after element."""
    packed: U8 = pack_bits(np.ascontiguousarray(numbers.T).reshape(1, -1), bits)[0]
    return packed


def _half(layer: str, scales: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        stored = scales.astype(np.float16)
    wrong = int((stored.astype(np.float32) != scales).sum())
    if wrong:
        raise CompressError(f"{wrong} of {scales.size} scales are not fp16 numbers", where=layer)
    return stored
