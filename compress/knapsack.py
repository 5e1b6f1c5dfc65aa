"""The best choice for each of many layers within a budget of bits: a knapsack, solved exactly."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

GAP = 1e-6
"""Share of the loss by which the solver may miss the best plan."""
ROOM_SCALE = 1e6


def solve(loss: Sequence[Sequence[float]], bits: Sequence[Sequence[int]], budget: int) -> list[int]:
    """The choice for each layer with the least total loss and total bits <= budget (mixed-integer program, exact).

    Within a millionth of the loss above the sum of every layer's least; ValueError if no choice fits.
    """
    cost, size = np.array(loss, dtype=np.float64), np.array(bits, dtype=np.int64)
    cost -= cost.min(axis=1, keepdims=True)
    spare = budget - int(size.min(axis=1).sum())
    if spare < 0:
        raise ValueError(f"no choice of schemes fits {budget} bits")
    size -= size.min(axis=1, keepdims=True)
    # In units that all sizes share the numbers are small, and the solver's absolute tolerances are harmless.
    unit = max(int(np.gcd.reduce(size.ravel())), 1)
    size, spare = size // unit, spare // unit
    rows = np.arange(len(cost))
    best = np.lexsort((cost, size), axis=1)[:, 0]
    room = spare
    while (total := float(cost[rows, best].sum())) > 0 and room >= 0:
        # What costs more than the best so far is out; the rest, scaled to it, is within the solver's precision.
        found = _milp(np.minimum(cost, total) / total, size, room, (cost <= total) & (size <= room))
        if found is None:
            break
        excess = int(size[rows, found].sum()) - spare
        if excess > 0:
            room -= excess
        elif cost[rows, found].sum() < (1 - GAP) * total:
            best = found
        else:
            break
    picked: list[int] = best.tolist()
    return picked


@contextmanager
def _nothing_printed() -> Iterator[None]:
    """The solver says a line of its debugging now and then, whatever it is told: it would be in the midst of our JSON.

    The line waits in C's buffer until that is emptied, so it is here that it is.
    """
    library = ctypes.CDLL(None)
    sys.stdout.flush()
    library.fflush(None)
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        library.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _milp(cost: NDArray[Any], size: NDArray[Any], room: int, allowed: NDArray[Any]) -> NDArray[Any] | None:
    """The option of each row with the least cost and total size <= room, to the solver's tolerances; None if none."""
    columns = np.arange(cost.size)
    one_each = coo_array((np.ones(cost.size), (columns // cost.shape[1], columns)))
    scale = max(room / ROOM_SCALE, 1.0)
    with _nothing_printed():
        found = milp(
            np.where(allowed, cost, 0.0).ravel(),
            integrality=np.ones(cost.size),
            bounds=Bounds(0, allowed.ravel().astype(np.float64)),
            constraints=[
                LinearConstraint(one_each, 1, 1),
                LinearConstraint(np.where(allowed, size, 0).reshape(1, -1) / scale, -np.inf, room / scale),
            ],
            options={"mip_rel_gap": GAP},
        )
    if found.x is None:
        return None
    picked: NDArray[Any] = np.argmax(found.x.reshape(cost.shape), axis=1)
    return picked
