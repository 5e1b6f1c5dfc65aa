"""GPTQ against the paper's own column loop, against plain rounding, and on inputs that starve it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from calibration.stats import InputStats
from compress.errors import InputError
from compress.grid import output_error, round_to_nearest
from compress.passes.gptq import Gptq, column_groups, factorise, quantize_with_feedback
from compress.report import LayerRecord
from compress.runner import memory
from compress.scheme import QuantScheme
from compress.session import Block, Session
from compress.store import Store
from compress.tensor import QuantizedTensor
from tests.compress.test_blockgrid import check_parts
from tests.reference.gptq import column_order
from tests.reference.gptq import gptq as textbook
from tests.support import naive_round


def parse(text: str) -> QuantScheme:
    return QuantScheme.parse(text)


def correlated(tokens: int, columns: int, seed: int = 0, rank: int = 12) -> Tensor:
    """Inputs [tokens, columns] that are mostly mixtures of a few directions, with a few loud channels."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
    inputs = mixed + 0.5 * torch.randn(tokens, columns, generator=generator)
    return inputs * torch.exp(0.7 * torch.randn(columns, generator=generator))


def stats_of(inputs: Tensor) -> InputStats:
    stats = InputStats(inputs.shape[1])
    stats.update(inputs)
    return stats


def solve(weight: Tensor, stats: InputStats, text: str, damping: float = 0.01, order: bool = True) -> QuantizedTensor:
    groups = column_groups(stats.importance, parse(text), order)
    _, upper, _ = factorise(stats, damping, 0.0, torch.cat(groups), ["layer"])
    return quantize_with_feedback(weight, parse(text), upper, groups, stats.importance)


def run(
    layers: Mapping[str, tuple[Tensor, InputStats | None]],
    scheme: str = "int4-g32",
    plan: Mapping[str, str] | None = None,
    **arguments: Any,
) -> tuple[Block, list[LayerRecord]]:
    """The pass over one block of ``layers``: name -> (weight, statistics of its inputs)."""
    weights = {name: weight for name, (weight, _) in layers.items()}
    shapes = {name: (weight.shape[0], weight.shape[1]) for name, weight in weights.items()}
    chosen = {name: parse(text) for name, text in (plan or {}).items()}
    session = Session(cast(Any, None), torch.zeros(0, 1), Store(Path()), shapes, {}, chosen)
    step = Gptq(scheme=parse(scheme), **arguments)
    assert step.check(session) == []
    block = Block("block", weights, {name: stats for name, (_, stats) in layers.items() if stats is not None})
    return block, step.apply(session, block)


SHAPES = [
    ("int4-g32", 200),
    ("int4-g32-asym", 200),
    ("int4-g32", 96),
    ("int2-g32-asym", 96),
    ("int2-g16", 96),
    ("int3-g32", 96),
    ("int3-g48-asym", 96),
    ("int8-g32", 96),
    ("int8-g32-asym", 72),
    ("int4-channel", 96),
    ("int4-channel-asym", 200),
    ("int4-g128", 96),
    ("int4-g160", 300),
    ("int4-g8", 20),
    ("int5-g32-asym", 72),
    ("iq4_nl", 96),
    ("mxfp4", 96),
    ("ternary-g48", 96),
    ("q5_1", 96),
    ("q2_k", 512),
    ("q3_k", 512),
    ("q4_k", 512),
    ("q6_k", 512),
]


@pytest.mark.parametrize(("text", "columns"), SHAPES)
@pytest.mark.parametrize("order", [True, False])
def test_agrees_with_the_textbook_column_loop(text: str, columns: int, order: bool) -> None:
    stats = stats_of(correlated(3 * columns, columns, seed=columns))
    weight = torch.randn(96, columns, generator=torch.Generator().manual_seed(1))
    ours = solve(weight, stats, text, order=order)
    theirs = textbook(weight, stats.gram, stats.tokens, parse(text), order=order)
    assert ours.scale.shape == theirs.scale.shape == (96, parse(text).groups(columns))
    # A tie that float32 and float64 break differently changes the rest of its row: rows, not codes, are counted.
    same = (ours.dequantize() == theirs.dequantize()).all(dim=1)
    # With two levels a row is more columns, and such a tie can move whole scales.
    assert float(same.float().mean()) >= (0.8 if parse(text).two_level else 0.9)
    error, expected = (output_error(weight, q.dequantize(), stats.gram) for q in (ours, theirs))
    assert error == pytest.approx(expected, rel=0.06 if parse(text).two_level else 0.02)


@pytest.mark.parametrize(("text", "columns"), [row for row in SHAPES if row[0] != "int4-g8"])
def test_beats_plain_rounding_clearly_on_correlated_inputs(text: str, columns: int) -> None:
    inputs = correlated(3 * columns, columns, seed=5)
    stats = stats_of(inputs)
    weight = torch.randn(48, columns, generator=torch.Generator().manual_seed(2))
    target = inputs @ weight.T

    def loss(quantized: QuantizedTensor) -> float:
        return float((inputs @ quantized.dequantize().T - target).square().sum())

    solved = loss(solve(weight, stats, text))
    assert solved < 0.3 * loss(naive_round(weight, parse(text)))
    assert solved < 0.4 * loss(round_to_nearest(weight, parse(text), stats.importance))


def test_fresh_inputs_of_the_same_kind_gain_too() -> None:
    inputs = correlated(2000, 96, seed=5)
    stats = stats_of(inputs[:1000])
    weight = torch.randn(48, 96)
    fresh = stats_of(inputs[1000:])
    solved = output_error(weight, solve(weight, stats, "int3-g32").dequantize(), fresh.gram)
    assert solved < 0.75 * output_error(weight, round_to_nearest(weight, parse("int3-g32")).dequantize(), fresh.gram)


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize(
    ("text", "columns"), [("int4-g32", 200), ("int2-g16", 40), ("int4-channel", 30), ("q4_k", 768), ("q6_k", 768)]
)
def test_columns_are_taken_group_by_group(text: str, columns: int, order: bool) -> None:
    importance = torch.rand(columns, generator=torch.Generator().manual_seed(columns))
    ours = [group.tolist() for group in column_groups(importance, parse(text), order)]
    assert ours == column_order(importance, parse(text), order)
    assert sorted(column for group in ours for column in group) == list(range(columns))
    width = parse(text).width(columns)
    assert all(len({column // width for column in group}) == 1 for group in ours)
    if parse(text).two_level:
        assert all(len({group[0] // 256 for group in ours[at : at + 256 // width]}) == 1 for at in (0, 256 // width))


def test_order_pays_where_channels_differ() -> None:
    inputs = correlated(600, 128, seed=9) * torch.logspace(0, 2, 128)
    stats = stats_of(inputs)
    weight = torch.randn(64, 128)
    ordered, unordered = (
        output_error(weight, solve(weight, stats, "int3-g32", order=order).dequantize(), stats.gram)
        for order in (True, False)
    )
    assert ordered < 0.9 * unordered


def test_layers_solved_together_are_solved_as_if_alone() -> None:
    stats = stats_of(correlated(400, 96))
    weights = {name: torch.randn(rows, 96) for name, rows in (("q", 40), ("k", 7), ("v", 16))}
    together, _ = run({name: (weight, stats) for name, weight in weights.items()})
    for name, weight in weights.items():
        alone, _ = run({name: (weight, stats)})
        one, other = together.quantized[name], alone.quantized[name]
        assert torch.equal(one.scale, other.scale)
        assert torch.equal(one.codes, other.codes)


def test_layers_with_other_inputs_or_schemes_do_not_mix() -> None:
    first, second = stats_of(correlated(400, 96, seed=1)), stats_of(correlated(300, 64, seed=2))
    layers = {"a": (torch.randn(8, 96), first), "b": (torch.randn(9, 64), second), "c": (torch.randn(8, 96), first)}
    block, records = run(layers, plan={"c": "int8-g32"}, sweeps=0, shrinkage=0.0, damping=0.01)
    assert [record.layer for record in records] == ["a", "b", "c"]
    assert [record.scheme for record in records] == ["int4-g32", "int4-g32", "int8-g32"]
    assert [record.tokens for record in records] == [400, 300, 400]
    for name, (weight, stats) in layers.items():
        expected = solve(weight, stats, str(block.quantized[name].scheme))
        assert torch.equal(block.quantized[name].codes, expected.codes)


def test_a_layer_without_a_plan_stays_and_one_without_inputs_is_rounded() -> None:
    weight = torch.randn(8, 64)
    session = Session(
        cast(Any, None),
        torch.zeros(0, 1),
        Store(Path()),
        {"a": (8, 64), "e": (8, 64)},
        {"a": None, "e": parse("int8-g32")},
        {"e": parse("int8-g32")},
    )
    step = Gptq()
    step.check(session)
    block = Block("block", {"a": weight, "e": weight}, {})
    (record,) = step.apply(session, block)
    assert (record.layer, record.scheme, record.output_error, record.tokens) == ("e", "int8-g32", None, 0)
    assert record.bytes == 8 * (64 + 2 * 2)
    assert torch.equal(block.quantized["e"].codes, round_to_nearest(weight, parse("int8-g32")).codes)
    assert "a" not in block.quantized


@pytest.mark.parametrize("text", ["int4-g32", "int4-g32-asym", "int2-g32", "int2-g32-asym", "int3-channel"])
def test_zero_groups_rows_and_layers_decode_to_exactly_zero(text: str) -> None:
    stats = stats_of(correlated(400, 96))
    weight = torch.randn(8, 96)
    weight[5] = 0
    block, records = run({"o": (weight, stats), "k": (torch.zeros(4, 96), stats)}, text)
    for quantized in block.quantized.values():
        assert quantized.scale.isfinite().all()
        assert (quantized.scale != 0).all()
    assert (block.quantized["o"].dequantize()[5] == 0).all()
    assert (block.quantized["k"].dequantize() == 0).all()
    assert records[1].output_error == 0.0


@pytest.mark.parametrize("text", ["int4-g32", "int4-g32-asym", "int2-g32"])
def test_a_zero_group_of_a_layer_costs_nothing_elsewhere(text: str) -> None:
    # Errors of earlier groups may be made up for in the zero group: only a worse output would be wrong.
    stats = stats_of(correlated(400, 96))
    weight = torch.randn(8, 96)
    weight[:, 0:32] = 0
    block, (record,) = run({"q": (weight, stats)}, text)
    assert block.quantized["q"].dequantize().isfinite().all()
    assert cast(float, record.output_error) <= cast(float, record.rounding_error)


@pytest.mark.parametrize("text", ["q2_k", "q3_k", "q4_k", "q6_k"])
def test_two_levels_stay_exact_through_solve_and_descent(text: str) -> None:
    stats = stats_of(correlated(1200, 512))
    block, (record,) = run({"q": (torch.randn(16, 512), stats)}, text)
    check_parts(block.quantized["q"])
    assert record.fallback is None
    assert cast(float, record.output_error) < 0.5 * cast(float, record.rounding_error)


@pytest.mark.parametrize("text", ["int4-g32", "int2-g16-asym", "int4-channel"])
def test_dead_inputs_get_zero_weights_and_disturb_nobody(text: str) -> None:
    inputs = correlated(400, 96)
    dead = [0, 7, *range(64, 96)]
    inputs[:, dead] = 0
    stats = stats_of(inputs)
    weight = torch.randn(12, 96)
    weight[:, dead] *= 1e4
    quantized = solve(weight, stats, text)
    decoded = quantized.dequantize()
    assert quantized.scale.isfinite().all()
    assert (decoded[:, dead] == 0).all()
    expected = textbook(weight, stats.gram, stats.tokens, parse(text))
    assert float((decoded == expected.dequantize()).all(dim=1).float().mean()) >= 0.75


def starving(kind: str) -> InputStats:
    """Statistics of 256 inputs that no factorisation survives without damping."""
    if kind == "one token repeated":
        return stats_of(correlated(1, 256).repeat(64, 1))
    return stats_of(correlated(16, 256, rank=16))


@pytest.mark.parametrize("kind", ["one token repeated", "16 tokens"])
def test_too_few_tokens_finish_with_the_default_damping(kind: str) -> None:
    weight, stats = torch.randn(16, 256), starving(kind)
    block, (record,) = run({"q": (weight, stats)})
    assert record.damping == 0.05
    assert record.fallback is None
    assert record.tokens == stats.tokens
    assert block.quantized["q"].dequantize().isfinite().all()
    assert cast(float, record.output_error) < 0.5 * cast(float, record.rounding_error)


@pytest.mark.parametrize("kind", ["one token repeated", "16 tokens"])
def test_damping_that_is_too_small_is_raised_and_recorded(kind: str) -> None:
    weight, stats = torch.randn(16, 256), starving(kind)
    block, records = run({"q": (weight, stats), "k": (weight[:4], stats)}, damping=1e-12, shrinkage=0.0)
    for record in records:
        assert record.damping is not None
        assert 1e-12 < record.damping <= 0.01
        assert record.damping == float(f"{record.damping:.0e}")
        assert f"damping raised from 1e-12 to {record.damping:g}" in str(record.fallback)
        assert cast(float, record.output_error) <= cast(float, record.rounding_error)
    assert block.quantized["q"].dequantize().isfinite().all()


@pytest.mark.parametrize("kind", ["one token repeated", "16 tokens"])
def test_no_damping_and_too_few_tokens_is_an_error_with_the_numbers(kind: str) -> None:
    stats = starving(kind)
    with pytest.raises(InputError) as caught:
        run(
            {"model.layers.0.q": (torch.randn(4, 256), stats), "model.layers.0.k": (torch.randn(4, 256), stats)},
            damping=0.0,
            shrinkage=0.0,
        )
    assert "model.layers.0.q, model.layers.0.k" in str(caught.value)
    assert f"{stats.tokens} calibration tokens for 256 input columns" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("kind", ["one token repeated", "16 tokens"])
def test_a_shrunk_hessian_needs_no_damping(kind: str) -> None:
    block, (record,) = run({"q": (torch.randn(4, 256), starving(kind))}, damping=0.0)
    assert record.damping == 0.0
    assert record.fallback is None
    assert block.quantized["q"].dequantize().isfinite().all()


def test_shrinkage_helps_where_tokens_are_few() -> None:
    inputs = correlated(2200, 96, seed=3)
    few, fresh = stats_of(inputs[:200]), stats_of(inputs[200:])
    weight = torch.randn(64, 96)
    errors = []
    for shrinkage in (0.0, 0.2):
        block, _ = run({"q": (weight, few)}, "int3-g32", shrinkage=shrinkage, damping=0.01)
        errors.append(output_error(weight, block.quantized["q"].dequantize(), fresh.gram))
    assert errors[1] < 0.97 * errors[0]


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_nonsense_shrinkage_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="shrinkage"):
        Gptq(shrinkage=value)


def test_no_damping_works_where_tokens_suffice() -> None:
    stats = stats_of(correlated(800, 64))
    _, (record,) = run({"q": (torch.randn(8, 64), stats)}, damping=0.0, shrinkage=0.0)
    assert record.damping == 0.0
    assert record.fallback is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_inputs_that_are_not_finite_are_named_as_such(value: float) -> None:
    inputs = correlated(100, 64)
    inputs[50, 3] = value
    with pytest.raises(InputError, match="q: the layer's inputs are not finite"):
        run({"q": (torch.randn(8, 64), stats_of(inputs))})


def wild(seed: int) -> tuple[Tensor, InputStats]:
    """A weight, and independent inputs of very different magnitudes: little to gain, much to lose."""
    generator = torch.Generator().manual_seed(seed)
    loudness = torch.logspace(-3, 1, 96)[torch.randperm(96, generator=generator)]
    inputs = torch.randn(40, 96, generator=generator) * loudness
    return torch.randn(6, 96, generator=generator), stats_of(inputs)


@pytest.mark.parametrize("damping", [1e-7, 0.01, 0.5])
@pytest.mark.parametrize("seed", [1, 2, 8])
def test_never_worse_than_plain_rounding(seed: int, damping: float) -> None:
    weight, stats = wild(seed)
    block, (record,) = run({"q": (weight, stats)}, damping=damping)
    plain = round_to_nearest(weight, parse("int4-g32"), stats.importance).dequantize()
    error = output_error(weight, block.quantized["q"].dequantize(), stats.gram)
    rounding_error = output_error(weight, plain, stats.gram)
    assert error <= rounding_error
    assert record.output_error == pytest.approx(error, rel=1e-4)
    assert record.rounding_error == pytest.approx(rounding_error, rel=1e-4)


def test_says_for_each_layer_whether_it_fell_back_to_plain_rounding() -> None:
    weight, stats = wild(1)
    good = correlated(400, 96)
    layers = {"lost": (weight, stats), "won": (weight, stats_of(good))}
    block, (lost, won) = run(layers, damping=1e-7)
    assert "plain rounding: GPTQ's error" in str(lost.fallback)
    plain = round_to_nearest(weight, parse("int4-g32"), stats.importance)
    assert torch.equal(block.quantized["lost"].dequantize(), plain.dequantize())
    assert won.fallback is None
    assert cast(float, won.output_error) < cast(float, won.rounding_error)


def test_scales_are_what_a_file_can_hold() -> None:
    stats = stats_of(correlated(400, 200))
    for text in ("int4-g32", "int4-g32-asym", "int2-g32-asym"):
        quantized = solve(torch.randn(16, 200) * 1e-3, stats, text)
        assert torch.equal(quantized.scale.half().float(), quantized.scale)
        if quantized.zero is not None:
            minima = quantized.zero * quantized.scale
            assert torch.equal(minima.half().float(), minima)


def test_a_descent_follows_and_gains() -> None:
    stats = stats_of(correlated(600, 200))
    weight = torch.randn(24, 200)
    errors = []
    for sweeps in (0, 1, 4):
        _, (record,) = run({"q": (weight, stats)}, sweeps=sweeps)
        errors.append(cast(float, record.output_error))
    assert errors[2] < errors[1] < errors[0]
    assert errors[2] < 0.95 * errors[0]


def test_says_how_many_inputs_are_dead() -> None:
    inputs = correlated(400, 96)
    inputs[:, [0, 7]] = 0
    _, (record,) = run({"q": (torch.randn(8, 96), stats_of(inputs))})
    assert record.fallback == "2 inputs are always 0: their weights became 0"


def test_negative_sweeps_are_refused() -> None:
    with pytest.raises(ValueError, match="sweeps: -1 is negative"):
        Gptq(sweeps=-1)


@pytest.mark.parametrize("damping", [-0.1, 1.5, float("nan")])
def test_nonsense_damping_is_refused(damping: float) -> None:
    with pytest.raises(ValueError, match="damping"):
        Gptq(damping=damping)


def test_a_solve_holds_few_matrices() -> None:
    """A 7B model's widest layer has Hessians of half a gigabyte: each one more shows."""
    columns = 2048
    stats = InputStats(columns)
    stats.update(torch.randn(columns, columns, generator=torch.Generator().manual_seed(0)))
    before = memory.resident().total
    with memory.peak_of_phase() as phase:
        factorise(stats, 0.05, 0.2, torch.arange(columns), ["layer"])
    assert phase.peak - before < 4.5 * 8 * columns**2
