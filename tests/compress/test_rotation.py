"""Hadamard matrices of every construction, and their products with vectors."""

from __future__ import annotations

import pytest
import torch

from compress.rotation import make_rotation, paley, sylvester
from tests.reference.rotate import dense

WIDTHS = {
    1: "signs",
    3: "random orthogonal 3",
    6: "random orthogonal 3 x hadamard 2",
    12: "hadamard 12",
    60: "hadamard 60",
    64: "hadamard 64",
    80: "hadamard 20 x hadamard 4",
    90: "random orthogonal 45 x hadamard 2",
    256: "hadamard 256",
    576: "hadamard 36 x hadamard 16",
    896: "hadamard 28 x hadamard 32",
    960: "hadamard 60 x hadamard 16",
    1536: "hadamard 12 x hadamard 128",
}


@pytest.mark.parametrize("matrix", [*(paley(n) for n in (4, 12, 20, 24, 28, 36, 44, 60, 76)), sylvester(16)], ids=len)
def test_hadamard_matrices_hold_signs_and_are_orthogonal(matrix: torch.Tensor) -> None:
    order = len(matrix)
    assert torch.equal(matrix.abs(), torch.ones(order, order, dtype=torch.float64))
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("order", [6, 18, 40, 92])
def test_paley_refuses_other_orders(order: int) -> None:
    with pytest.raises(ValueError, match=f"no Paley matrix of order {order}"):
        paley(order)


@pytest.mark.parametrize(("width", "kind"), WIDTHS.items())
def test_a_rotation_is_orthogonal_and_spreads_evenly_where_a_hadamard_matrix_fits(width: int, kind: str) -> None:
    rotation = make_rotation(width, seed=3)
    matrix = dense(rotation)
    assert rotation.kind == kind
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width, dtype=torch.float64), atol=1e-12, rtol=0)
    if "random" not in kind:
        torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, width**-0.5), atol=1e-12, rtol=0)


@pytest.mark.parametrize("width", [3, 60, 80, 90, 256, 1536])
def test_products_equal_those_with_the_whole_matrix(width: int) -> None:
    rotation, generator = make_rotation(width, seed=1), torch.Generator().manual_seed(width)
    matrix = torch.randn(5, width, generator=generator, dtype=torch.float64)
    gain = torch.randn(width, generator=generator, dtype=torch.float64)
    whole = dense(rotation)
    torch.testing.assert_close(rotation.right(matrix), matrix @ whole)
    torch.testing.assert_close(rotation.right(matrix, gain), matrix @ torch.diag(gain) @ whole)
    torch.testing.assert_close(rotation.left(matrix.T), whole.T @ matrix.T)
    assert rotation.right(matrix.float()).dtype == torch.float32


def test_many_rows_are_turned_a_part_at_a_time() -> None:
    rotation = make_rotation(6, seed=0)
    matrix = torch.randn(10_000, 6, dtype=torch.float64)
    torch.testing.assert_close(rotation.right(matrix), matrix @ dense(rotation))


def test_the_seed_decides() -> None:
    one, same, other = (make_rotation(90, seed) for seed in (5, 5, 6))
    assert torch.equal(dense(one), dense(same))
    assert not torch.equal(one.signs, other.signs)
    assert not torch.equal(one.factors[0], other.factors[0])
