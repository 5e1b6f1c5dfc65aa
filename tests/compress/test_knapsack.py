"""The solver of plans against trying everything, and what it prints."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compress.knapsack import solve
from compress.scheme import QuantScheme
from tests.reference.mixed import INFINITY, best_plan

THREE = tuple(map(QuantScheme.parse, ("int2-g32", "int4-g32", "int8-g32-asym")))


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[list[float]], list[list[int]], int]:
    layers, choices = draw(st.integers(1, 5)), draw(st.integers(2, 4))
    size = st.integers(1, 10 ** draw(st.integers(1, 10)))
    # Losses of very different magnitudes: a sensitive layer must not hide the others.
    value = st.one_of(st.floats(0, 10), st.floats(-12, 4).map(lambda exponent: 10.0**exponent))
    loss = [[draw(value) for _ in range(choices)] for _ in range(layers)]
    bits = [[draw(size) for _ in range(choices)] for _ in range(layers)]
    plan = [draw(st.integers(0, choices - 1)) for _ in range(layers)]
    slack = draw(st.integers(-2, 2))
    return loss, bits, sum(row[choice] for row, choice in zip(bits, plan, strict=True)) + slack


@settings(deadline=None, max_examples=150)
@given(instances())
@example(([[1.0, 1.0, 5e-324, 0.0], [0.0] * 4, [0.0] * 4], [[1, 1, 1, 2], [1] * 4, [1] * 4], 3))  # 1 / 5e-324 is inf
def test_the_solver_finds_what_trying_everything_finds(
    instance: tuple[list[list[float]], list[list[int]], int],
) -> None:
    loss, bits, budget = instance
    best, _ = best_plan(loss, bits, budget)
    if best == INFINITY:
        with pytest.raises(ValueError, match="no choice of schemes fits"):
            solve(loss, bits, budget)
        return
    picked = solve(loss, bits, budget)
    assert sum(row[choice] for row, choice in zip(bits, picked, strict=True)) <= budget
    found = sum(row[choice] for row, choice in zip(loss, picked, strict=True))
    assert found <= best * (1 + 1e-5) + 1e-300


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([(64, 64), (32, 64), (96, 64), (64, 96), (7, 50)]), min_size=1, max_size=5), st.data())
def test_real_shapes_and_schemes_are_solved_too(shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    bits = [[scheme.stored_bits(shape) for scheme in THREE] for shape in shapes]
    loss = [[data.draw(st.floats(1e-6, 1.0)) * 4.0**-scheme.bits for scheme in THREE] for _ in shapes]
    least, most = (sum(pick(row) for row in bits) for pick in (min, max))
    budget = data.draw(st.integers(least, most))
    picked = solve(loss, bits, budget)
    best, _ = best_plan(loss, bits, budget)
    assert sum(row[choice] for row, choice in zip(bits, picked, strict=True)) <= budget
    assert sum(row[choice] for row, choice in zip(loss, picked, strict=True)) <= best * (1 + 1e-5)


def test_one_bit_too_few_is_too_few_even_among_billions() -> None:
    bits = [[4_000_000_001, 8_000_000_003]] * 10
    exact = 9 * bits[0][0] + bits[0][1]
    loss = [[1.0, 0.0]] * 10
    assert sum(solve(loss, bits, exact)) == 1
    assert sum(solve(loss, bits, exact - 1)) == 0


def test_nothing_is_printed_where_reports_go(capfd: pytest.CaptureFixture[str]) -> None:
    # HiGHS printed a line of its debugging for this one (jump-dev/HiGHS.jl #312), into C's buffer.
    generator = np.random.default_rng(3)
    weights = generator.choice([576 * 576, 576 * 192, 576 * 1536], 20)
    bits = [[int(count * each) for each in (4.5, 4.625, 8.5)] for count in weights]
    loss = [[float(scale * share) for share in (1, 0.8, 0.004)] for scale in generator.lognormal(0, 1.5, 20)]
    print("before")
    solve(loss, bits, int(sum(weights) * generator.uniform(4.7, 6)))
    ctypes.CDLL(None).fflush(None)
    print("after")
    assert capfd.readouterr() == ("before\nafter\n", "")
