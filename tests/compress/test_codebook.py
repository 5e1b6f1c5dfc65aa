"""The quick search for the nearest code against trying every code."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.codebook import CELLS, code_values, nearest_code
from compress.scheme import CODEBOOKS

BOOKS = pytest.mark.parametrize("name", CODEBOOKS)


@BOOKS
@settings(deadline=None)
@given(values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40))
def test_the_nearest_code_is_nearest(name: str, values: list[float]) -> None:
    given_values = torch.tensor(values)
    found = code_values(nearest_code(given_values, name), name).double()
    least = (torch.tensor(CODEBOOKS[name]).double() - given_values.double()[:, None]).abs().amin(-1)
    assert ((found - given_values.double()).abs() <= least * (1 + 1e-7)).all()


@BOOKS
def test_boundaries_and_the_edges_of_cells_fall_where_a_bisection_puts_them(name: str) -> None:
    table = torch.tensor(CODEBOOKS[name])
    between, span = (table[1:] + table[:-1]) / 2, float(table[-1] - table[0])
    edges = torch.arange(-2, CELLS + 3) * (span / CELLS) + table[0]
    exact = torch.cat([table, between, edges])
    up, down = (torch.nextafter(exact, torch.tensor(end)) for end in (999.0, -999.0))
    values = torch.cat([exact, up, down, torch.rand(100_000) * 1.1 * span + table[0] - 0.05 * span])
    assert torch.equal(nearest_code(values, name), torch.bucketize(values, between).float())


@BOOKS
def test_every_code_is_the_nearest_to_its_own_value_in_any_shape(name: str) -> None:
    codes = (torch.arange(16.0) % len(CODEBOOKS[name])).view(2, 4, 2)
    for order in (codes, codes.transpose(0, 1)):
        assert torch.equal(nearest_code(code_values(order, name), name), order)
