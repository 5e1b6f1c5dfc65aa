"""How a scheme is written, and what it costs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.scheme import QuantScheme

schemes = st.builds(
    QuantScheme, st.sampled_from([2, 3, 4, 8]), st.one_of(st.none(), st.integers(1, 4096)), st.booleans()
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
    ],
)
def test_reads(text: str, expected: QuantScheme) -> None:
    assert QuantScheme.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("int5-g32", "5 bits are not supported, only 2, 3, 4, 8"),
        ("int0-g32", "0 bits"),
        ("int4-g0", "group size must be at least 1"),
        ("int4", "is not a scheme"),
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
    ],
)
def test_stored_bits_count_codes_scales_and_zero_points(text: str, shape: tuple[int, int], bits: int) -> None:
    assert QuantScheme.parse(text).stored_bits(shape) == bits


@pytest.mark.parametrize(("bits", "levels", "midpoint"), [(2, 4, 2), (3, 8, 4), (4, 16, 8), (8, 256, 128)])
def test_levels(bits: int, levels: int, midpoint: int) -> None:
    assert (QuantScheme(bits, 32).levels, QuantScheme(bits, 32).midpoint) == (levels, midpoint)
