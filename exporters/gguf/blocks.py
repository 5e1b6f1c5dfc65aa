"""Numbers to the bytes of ggml's block types, as ``ggml-common.h`` lays them out. Vectorised; no file I/O.

Each function encodes whole rows and returns uint8 [rows, bytes of a row].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from compress.errors import CompressError
from compress.packing import pack_bits
from compress.scheme import CODEBOOKS, QuantScheme
from compress.tensor import QuantizedTensor
from exporters.gguf.storage import Layout

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

EXPONENT_BIAS = 127
"""Of E8M0: a scale of 1."""


def encode_quantized(layer: str, quantized: QuantizedTensor, layout: Layout) -> U8:
    """Rows of a quantised layer as blocks of a type that decodes as its scheme does.

    CompressError names the layer when the type cannot hold a scale or minimum: rounding it would change the weights.
    """
    found = np.concatenate(_ENCODERS[layout.type](_Blocks(layer, quantized, layout.block)), axis=-1)
    return found.reshape(quantized.shape[0], -1)


@dataclass(frozen=True)
class _Blocks:
    """Rows of a layer, seen block by block."""

    layer: str
    quantized: QuantizedTensor
    block: int

    @property
    def scheme(self) -> QuantScheme:
        return self.quantized.scheme

    @property
    def codes(self) -> U8:
        """[rows, blocks, inputs of a block]."""
        codes: U8 = self.quantized.codes.numpy()
        return codes.reshape(codes.shape[0], -1, self.block)

    def scales(self) -> U8:
        """The fp16 scale of each block, [rows, blocks, 2]."""
        return _half(self._of_blocks(self.quantized.scale.numpy()), self.layer, "scales")

    def minima(self) -> U8:
        """The fp16 number of each block that is added to the product, [rows, blocks, 2]."""
        if self.quantized.minimum is not None:
            return _half(-self._of_blocks(self.quantized.minimum.numpy()), self.layer, "minima")
        assert self.quantized.zero is not None
        minima = -self.quantized.zero.numpy().astype(np.float32) * self.quantized.scale.numpy()
        return _half(self._of_blocks(minima), self.layer, "minima (-zero * scale)")

    def exponents(self) -> U8:
        """E8M0: the exponent of a power of two, [rows, blocks, 1]."""
        scale = self._of_blocks(self.quantized.scale.numpy())
        mantissa, exponent = np.frexp(scale)
        stored = exponent - 1 + EXPONENT_BIAS
        self._refuse((mantissa != 0.5) | (stored < 2) | (stored > 254), scale, "scales are no powers of two")
        found: U8 = stored.astype(np.uint8)[..., None]
        return found

    def shared(self) -> U8:
        """``d`` of each super-block, [rows, blocks, 2]."""
        assert self.quantized.d is not None
        return _half(self.quantized.d.numpy(), self.layer, "d")

    def shared_minimum(self) -> U8:
        """``dmin`` of each super-block, [rows, blocks, 2]."""
        assert self.quantized.dmin is not None
        return _half(self.quantized.dmin.numpy(), self.layer, "dmin")

    def whole_scales(self) -> NDArray[np.int32]:
        """The whole numbers whose product with ``d`` is the scale, [rows, super-blocks, groups of one]."""
        assert self.quantized.d is not None
        assert self.scheme.two_level is not None
        least, most = self.scheme.two_level.scale_range
        return self._multiples(self.quantized.scale.numpy(), self.quantized.d.numpy(), least, most, "scales")

    def whole_minima(self) -> NDArray[np.int32]:
        """The same of minima and ``dmin``."""
        assert self.quantized.minimum is not None
        assert self.quantized.dmin is not None
        assert self.scheme.two_level is not None
        most = self.scheme.two_level.scale_range[1]
        return self._multiples(self.quantized.minimum.numpy(), self.quantized.dmin.numpy(), 0, most, "minima")

    def _of_blocks(self, per_group: F32) -> F32:
        columns = self.quantized.shape[1]
        found: F32 = per_group[:, np.arange(0, columns, self.block) // self.scheme.width(columns)]
        return found

    def _multiples(self, values: F32, shared: F32, least: int, most: int, what: str) -> NDArray[np.int32]:
        each = values.reshape(*shared.shape, -1)
        whole = np.round(each / shared[..., None])
        wrong = (whole * shared[..., None] != each) | (whole < least) | (whole > most)
        self._refuse(wrong, each, f"{what} are no multiples, {least} to {most}, of the super-block's number")
        found: NDArray[np.int32] = whole.astype(np.int32)
        return found

    def _refuse(self, wrong: NDArray[np.bool_], values: F32, what: str) -> None:
        if wrong.any():
            raise CompressError(
                f"{int(wrong.sum())} of {wrong.size} {what}, the first is {values[wrong][0]!r}",
                where=self.layer,
                fix="the pass that chose the scales must round them to what the file stores",
            )


def _planes(codes: U8, width: int, bits: int) -> U8:
    """Codes [..., n] of ``bits`` in runs of ``width``: ``8 / bits`` runs share the bytes of one, the first lowest."""
    lanes = 8 // bits
    runs = codes.reshape(*codes.shape[:-1], -1, lanes, width)
    shifts = (np.arange(lanes, dtype=np.uint8) * np.uint8(bits))[:, None]
    packed: U8 = np.bitwise_or.reduce(runs << shifts, axis=-2)
    return packed.reshape(*codes.shape[:-1], -1)


def _nibbles(codes: U8) -> U8:
    """4-bit codes [..., 32] to bytes [..., 16]: elements 0-15 in the low halves, 16-31 in the high halves."""
    return _planes(codes & np.uint8(15), 16, 4)


def _q4(parts: _Blocks) -> list[U8]:
    minima = [] if parts.scheme.symmetric else [parts.minima()]
    return [parts.scales(), *minima, _nibbles(parts.codes)]


def _q5(parts: _Blocks) -> list[U8]:
    *scales, low = _q4(parts)
    return [*scales, pack_bits(parts.codes >> np.uint8(4), 1), low]


def _q8_0(parts: _Blocks) -> list[U8]:
    # Subtracting the midpoint 128 and reading as int8 is flipping the top bit.
    return [parts.scales(), parts.codes ^ np.uint8(128)]


_MXFP4 = np.array([8 * (value < 0) + [0, 0.5, 1, 1.5, 2, 3, 4, 6].index(abs(value)) for value in CODEBOOKS["mxfp4"]])
"""Our code -> the file's: sign and magnitude."""


def _mxfp4(parts: _Blocks) -> list[U8]:
    return [parts.exponents(), _nibbles(_MXFP4.astype(np.uint8)[parts.codes])]


def _tq1_0(parts: _Blocks) -> list[U8]:
    """Five digits to base 3 a byte (four in the last bytes), as a fraction of 256."""
    codes = parts.codes.astype(np.uint16)
    found = []
    for start, stop, digits in ((0, 160, 5), (160, 240, 5), (240, 256, 4)):
        runs = codes[..., start:stop].reshape(*codes.shape[:-1], digits, -1)
        powers = 3 ** np.arange(4, 4 - digits, -1, dtype=np.uint16)
        number = (runs * powers[:, None]).sum(axis=-2, dtype=np.uint32)
        found.append(((number * 256 + 242) // 243).astype(np.uint8))
    return [*found, parts.scales()]


def _tq2_0(parts: _Blocks) -> list[U8]:
    return [_planes(parts.codes, 32, 2), parts.scales()]


def _q2_k(parts: _Blocks) -> list[U8]:
    scales = (parts.whole_scales() | parts.whole_minima() << 4).astype(np.uint8)
    return [scales, _planes(parts.codes, 32, 2), parts.shared(), parts.shared_minimum()]


def _q3_k(parts: _Blocks) -> list[U8]:
    scales = (parts.whole_scales() + 32).astype(np.uint8)
    packed = [_planes(scales & np.uint8(15), 8, 4), _planes(scales >> np.uint8(4), 4, 2)]
    codes = parts.codes
    return [_planes(codes >> np.uint8(2), 32, 1), _planes(codes & np.uint8(3), 32, 2), *packed, parts.shared()]


def _six_bit_pairs(parts: _Blocks) -> U8:
    """Eight scales and eight minima of 6 bits in 12 bytes: the upper bits of the last four lie over the first four."""
    scales, minima = (found.astype(np.uint8) for found in (parts.whole_scales(), parts.whole_minima()))
    first = [each[..., :4] | (each[..., 4:] >> np.uint8(4)) << np.uint8(6) for each in (scales, minima)]
    last = scales[..., 4:] & np.uint8(15) | (minima[..., 4:] & np.uint8(15)) << np.uint8(4)
    return np.concatenate([*first, last], axis=-1)


def _q4_k(parts: _Blocks) -> list[U8]:
    return [parts.shared(), parts.shared_minimum(), _six_bit_pairs(parts), _planes(parts.codes & np.uint8(15), 32, 4)]


def _q5_k(parts: _Blocks) -> list[U8]:
    *scales, low = _q4_k(parts)
    return [*scales, _planes(parts.codes >> np.uint8(4), 32, 1), low]


def _q6_k(parts: _Blocks) -> list[U8]:
    codes = parts.codes
    scales = parts.whole_scales().astype(np.int8).view(np.uint8)
    return [_planes(codes & np.uint8(15), 64, 4), _planes(codes >> np.uint8(4), 32, 2), scales, parts.shared()]


_ENCODERS: Mapping[str, Callable[[_Blocks], list[U8]]] = MappingProxyType(
    {
        "Q4_0": _q4,
        "Q4_1": _q4,
        "Q5_0": _q5,
        "Q5_1": _q5,
        "Q8_0": _q8_0,
        "IQ4_NL": _q4,
        "MXFP4": _mxfp4,
        "TQ1_0": _tq1_0,
        "TQ2_0": _tq2_0,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
"""GGUF type -> the parts of its blocks, each uint8 [rows, blocks, bytes], in the order of the file (ggml-common.h)."""


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
