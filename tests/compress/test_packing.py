"""Codes in bytes: low bits first, rows on byte boundaries, nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from compress.packing import pack_bits, unpack_bits


@st.composite
def codes_and_bits(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    bits = draw(st.sampled_from([1, 2, 4, 8]))
    shape = draw(stn.array_shapes(min_dims=1, max_dims=3, max_side=9))
    return draw(stn.arrays(np.uint8, shape, elements=st.integers(0, 2**bits - 1))), bits


@settings(deadline=None)
@given(codes_and_bits())
def test_unpacking_gives_the_codes_back(given_codes: tuple[np.ndarray, int]) -> None:
    codes, bits = given_codes
    packed = pack_bits(codes, bits)
    assert packed.dtype == np.uint8
    assert packed.shape == (*codes.shape[:-1], -(-codes.shape[-1] * bits // 8))
    np.testing.assert_array_equal(unpack_bits(packed, bits, codes.shape[-1]), codes)


@settings(deadline=None)
@given(codes_and_bits())
def test_the_bytes_are_those_of_a_little_endian_bit_string(given_codes: tuple[np.ndarray, int]) -> None:
    codes, bits = given_codes
    for row, packed in zip(
        codes.reshape(-1, codes.shape[-1]),
        pack_bits(codes, bits).reshape(-1, -(-codes.shape[-1] * bits // 8)),
        strict=True,
    ):
        number = sum(int(code) << (bits * place) for place, code in enumerate(row))
        assert packed.tobytes() == number.to_bytes(len(packed), "little")


def test_rows_do_not_share_bytes() -> None:
    packed = pack_bits(np.full((8, 3), 15, dtype=np.uint8), 4)
    assert packed.tolist() == [[0xFF, 0x0F]] * 8


def test_views_are_packed_like_copies() -> None:
    codes = np.arange(64, dtype=np.uint8).reshape(8, 8) % 16
    np.testing.assert_array_equal(pack_bits(codes.T[::2], 4), pack_bits(codes.T[::2].copy(), 4))
    assert pack_bits(codes.T, 8).flags.c_contiguous


@pytest.mark.parametrize("bits", [3, 5, 6, 0, 16])
def test_widths_that_straddle_bytes_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="straddle"):
        pack_bits(np.zeros((2, 8), dtype=np.uint8), bits)
    with pytest.raises(ValueError, match="straddle"):
        unpack_bits(np.zeros((2, 8), dtype=np.uint8), bits, 8)
