"""The quick search for the nearest code against trying every code."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.codebook import CELLS, code_values, nearest_code
from compress.scheme import CODEBOOKS

TABLE = torch.tensor(CODEBOOKS["nf4"])
BETWEEN = (TABLE[1:] + TABLE[:-1]) / 2


@settings(deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40))
def test_the_nearest_code_is_nearest(values: list[float]) -> None:
    given_values = torch.tensor(values)
    found = code_values(nearest_code(given_values, "nf4"), "nf4").double()
    least = (TABLE.double() - given_values.double()[:, None]).abs().amin(-1)
    assert ((found - given_values.double()).abs() <= least * (1 + 1e-7)).all()


def test_boundaries_and_the_edges_of_cells_fall_where_a_bisection_puts_them() -> None:
    edges = torch.arange(-2, CELLS + 3) / (CELLS / 2) - 1
    exact = torch.cat([TABLE, BETWEEN, edges])
    up, down = (torch.nextafter(exact, torch.tensor(end)) for end in (9.0, -9.0))
    values = torch.cat([exact, up, down, torch.rand(100_000) * 2.2 - 1.1])
    assert torch.equal(nearest_code(values, "nf4"), torch.bucketize(values, BETWEEN).float())


def test_every_code_is_the_nearest_to_its_own_value_in_any_shape() -> None:
    codes = torch.arange(16.0).view(2, 4, 2)
    for order in (codes, codes.transpose(0, 1)):
        assert torch.equal(nearest_code(code_values(order, "nf4"), "nf4"), order)
