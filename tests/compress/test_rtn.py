"""Plain rounding as a pass: what it plans, what it writes, what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from compress.errors import InputError
from compress.passes.rtn import Rtn
from compress.scheme import QuantScheme
from compress.session import Block, Session
from compress.store import Store
from tests.support import naive_round

PINNED = QuantScheme.parse("int8-g32")


def session_for(weights: dict[str, Tensor], pinned: dict[str, QuantScheme | None] | None = None) -> Session:
    shapes = {name: (weight.shape[0], weight.shape[1]) for name, weight in weights.items()}
    fixed = pinned or {}
    plan = {name: scheme for name, scheme in fixed.items() if scheme is not None}
    return Session(cast(Any, None), torch.zeros(0, 1), Store(Path()), shapes, fixed, plan)


def test_quantises_what_is_planned_and_respects_pins() -> None:
    weights = {"free": torch.randn(8, 200), "pinned": torch.randn(8, 64), "float": torch.randn(8, 64)}
    session = session_for(weights, {"pinned": PINNED, "float": None})
    step = Rtn(QuantScheme.parse("int4-g32-asym"))
    assert step.check(session) == []
    block = Block("block", weights, {})
    records = step.apply(session, block)
    assert [(record.layer, record.scheme) for record in records] == [("free", "int4-g32-asym"), ("pinned", "int8-g32")]
    assert [record.bytes for record in records] == [8 * (200 * 4 + 7 * 20) // 8, 8 * (64 * 8 + 2 * 16) // 8]
    assert set(block.quantized) == {"free", "pinned"}
    assert block.quantized["free"].codes.dtype == torch.uint8


def test_a_planner_goes_first() -> None:
    weights = {"a": torch.randn(8, 64), "b": torch.randn(8, 64)}
    session = session_for(weights)
    session.plan["a"] = PINNED
    step = Rtn(QuantScheme.parse("int4-g32"))
    step.check(session)
    records = step.apply(session, Block("block", weights, {}))
    assert [record.scheme for record in records] == ["int8-g32", "int4-g32"]


@pytest.mark.parametrize("text", ["int4-g32", "int4-channel", "int2-g32", "int3-g32", "int4-g32-asym"])
def test_the_search_beats_min_max_and_naive_rounding(text: str) -> None:
    weights = {"a": torch.randn(32, 200, generator=torch.Generator().manual_seed(0))}
    errors = []
    for search in (True, False):
        step = Rtn(QuantScheme.parse(text), search=search)
        session, block = session_for(weights), Block("block", weights, {})
        step.check(session)
        step.apply(session, block)
        errors.append(float((block.quantized["a"].dequantize() - weights["a"]).square().sum()))
    naive = float((naive_round(weights["a"], QuantScheme.parse(text)).dequantize() - weights["a"]).square().sum())
    searched, min_max = errors
    assert searched < 0.95 * min_max
    assert searched < 0.95 * naive
    assert min_max <= 1.02 * naive


def test_a_weight_that_no_scale_can_hold_is_an_input_error_with_its_layer() -> None:
    weights = {"model.layers.3.mlp.up_proj": torch.full((4, 64), 1e6)}
    session = session_for(weights)
    step = Rtn()
    step.check(session)
    with pytest.raises(InputError, match=r"model\.layers\.3\.mlp\.up_proj: weights up to 1e\+06"):
        step.apply(session, Block("block", weights, {}))
