"""How a scheme is written, and what it costs."""

from __future__ import annotations

import struct
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.scheme import CODEBOOKS, NAMED, QuantScheme

groups = st.one_of(st.none(), st.integers(1, 4096))
schemes = st.one_of(
    st.builds(QuantScheme, st.sampled_from([2, 3, 4, 5, 8]), groups, st.booleans()),
    st.builds(QuantScheme, st.just(4), groups, codebook=st.just("nf4")),
    st.builds(QuantScheme, st.just(2), groups, codebook=st.just("ternary")),
    st.sampled_from(list(NAMED.values())),
)


@settings(deadline=None)
@given(schemes)
def test_what_is_written_is_read_back(scheme: QuantScheme) -> None:
    assert QuantScheme.parse(str(scheme)) == scheme


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int4-g32", QuantScheme(4, 32)),
        ("int2-g64-asym", QuantScheme(2, 64, symmetric=False)),
        ("int8-channel", QuantScheme(8, None)),
        ("int3-channel-asym", QuantScheme(3, None, symmetric=False)),
        ("nf4-g64", QuantScheme(4, 64, codebook="nf4")),
        ("nf4-channel", QuantScheme(4, None, codebook="nf4")),
        ("int5-g32", QuantScheme(5, 32)),
        ("ternary-g256", QuantScheme(2, 256, codebook="ternary")),
        ("iq4_nl", QuantScheme(4, 32, codebook="iq4_nl")),
        ("q4_k", QuantScheme(4, 32, symmetric=False, block_type="q4_k")),
        ("q6_k", QuantScheme(6, 16, block_type="q6_k")),
    ],
)
def test_reads(text: str, expected: QuantScheme) -> None:
    assert QuantScheme.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("int6-g32", "6 bits are not supported, only 2, 3, 4, 5, 8"),
        ("int0-g32", "0 bits"),
        ("int4-g0", "group size must be at least 1"),
        ("int4", "is not a scheme"),
        ("nf4", "is not a scheme"),
        ("q4_k-g32", "is not a scheme"),
        ("iq4_nl-g64", "is not a scheme"),
        ("Q4_K", "is not a scheme"),
        ("ternary-g256-asym", "ternary has no zero points; write ternary-g256"),
        ("nf3-g64", "is not a scheme"),
        ("nf4-g0", "one group per row is written nf4-channel"),
        ("nf4-g64-asym", "nf4 has no zero points; write nf4-g64"),
        ("int4-g-1", "is not a scheme"),
        ("int4-g32-sym", "is not a scheme"),
        ("INT4-G32", "is not a scheme"),
        (" int4-g32", "is not a scheme"),
        ("int4-g32\n", "is not a scheme"),
        ("", "is not a scheme"),
        (4, "is not a scheme"),
        (None, "is not a scheme"),
    ],
)
def test_says_what_is_wrong_with_another_text(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        QuantScheme.parse(text)


@pytest.mark.parametrize(
    ("text", "columns", "width", "groups"),
    [
        ("int4-g32", 96, 32, 3),
        ("int4-g32", 200, 32, 7),
        ("int4-g32", 8, 32, 1),
        ("int4-channel", 200, 200, 1),
        ("int4-g1", 5, 1, 5),
    ],
)
def test_groups_of_a_row(text: str, columns: int, width: int, groups: int) -> None:
    scheme = QuantScheme.parse(text)
    assert (scheme.width(columns), scheme.groups(columns)) == (width, groups)


@pytest.mark.parametrize(
    ("text", "shape", "bits"),
    [
        ("int4-g32", (10, 96), 10 * (96 * 4 + 3 * 16)),
        ("int4-g32-asym", (10, 96), 10 * (96 * 4 + 3 * (16 + 4))),
        ("int4-g32", (10, 200), 10 * (200 * 4 + 7 * 16)),
        ("int8-channel", (3, 50), 3 * (50 * 8 + 16)),
        ("int2-g64-asym", (1, 64), 64 * 2 + 18),
        ("nf4-g64", (10, 200), 10 * (200 * 4 + 4 * 16)),
        ("mxfp4", (10, 64), 10 * (64 * 4 + 2 * 8)),
        ("q5_1", (10, 64), 10 * (64 * 5 + 2 * 32)),
        ("q2_k", (3, 512), 3 * 2 * 84 * 8),
        ("q3_k", (3, 512), 3 * 2 * 110 * 8),
        ("q4_k", (3, 512), 3 * 2 * 144 * 8),
        ("q5_k", (3, 512), 3 * 2 * 176 * 8),
        ("q6_k", (3, 512), 3 * 2 * 210 * 8),
    ],
)
def test_stored_bits_count_codes_scales_and_zero_points(text: str, shape: tuple[int, int], bits: int) -> None:
    assert QuantScheme.parse(text).stored_bits(shape) == bits


@pytest.mark.parametrize(("bits", "levels", "midpoint"), [(2, 4, 2), (3, 8, 4), (4, 16, 8), (8, 256, 128)])
def test_levels(bits: int, levels: int, midpoint: int) -> None:
    assert (QuantScheme(bits, 32).levels, QuantScheme(bits, 32).midpoint) == (levels, midpoint)


def test_the_codebook_is_that_of_the_paper() -> None:
    """QLoRA, appendix E; sec. 3: quantiles of N(0, 1) with an exact zero, 8 codes on one side and 9 on the other."""
    codes = CODEBOOKS["nf4"]
    quantile = NormalDist().inv_cdf
    edge = 0.9677083  # (1 - 1/30 + 1 - 1/32) / 2, the paper's offset
    positive = [quantile(edge + step * (0.5 - edge) / 8) for step in range(8)]
    negative = [-quantile(edge + step * (0.5 - edge) / 7) for step in range(7)]
    expected = sorted([*positive, *negative, 0.0])
    largest = max(expected)
    assert [value / largest for value in expected] == pytest.approx(codes, abs=1e-6)
    assert all(struct.unpack("f", struct.pack("f", value))[0] == value for value in codes)
