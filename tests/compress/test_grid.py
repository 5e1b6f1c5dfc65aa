"""Scales and zero points: never worse than min/max, near the best there is, and always what a file can hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.errors import InputError
from compress.grid import MAX_WEIGHT, fit_groups, output_error, round_to_nearest, split_groups
from compress.levels import FP16_MAX, codes_of, storable
from compress.scheme import QuantScheme
from compress.tensor import expand_groups
from tests.reference.grid import has_significant_bits, least_error
from tests.support import naive_round

SCHEMES = (
    "int2-g32",
    "int3-g32",
    "int4-g32",
    "int8-g32",
    "int2-g32-asym",
    "int3-g32-asym",
    "int4-g32-asym",
    "nf4-g32",
)


def parse(text: str) -> QuantScheme:
    return QuantScheme.parse(text)


def group_errors(
    weight: torch.Tensor, scheme: QuantScheme, importance: torch.Tensor | None, search: bool
) -> torch.Tensor:
    """Weighted squared error of each group, [rows, groups]."""
    quantized = round_to_nearest(weight, scheme, importance, search)
    square = (quantized.dequantize() - weight).square()
    if importance is not None:
        square = square * importance
    return split_groups(square, scheme).sum(-1)


@pytest.mark.parametrize("text", [*SCHEMES, "int8-g32-asym", "int4-channel", "int2-channel-asym"])
@pytest.mark.parametrize("columns", [96, 200, 7])
def test_the_search_is_never_worse_than_min_max(text: str, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(24, columns, generator=generator) * torch.logspace(-6, 3, 24)[:, None]
    weight[3] += weight[3].abs().max()
    for importance in (None, torch.rand(columns, generator=generator)):
        searched = group_errors(weight, parse(text), importance, search=True)
        plain = group_errors(weight, parse(text), importance, search=False)
        assert (searched <= plain * (1 + 1e-6)).all()
        assert searched.sum() < plain.sum()


@pytest.mark.parametrize(
    "text", ["int2-g16", "int2-g32-asym", "int3-g32", "int3-g16-asym", "int4-g32", "int4-g32-asym", "nf4-g32"]
)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_search_comes_near_the_best_grid_there_is(text: str, weighted: bool) -> None:
    scheme = parse(text)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(32, scheme.width(32), generator=generator)
    importance = torch.exp(1.5 * torch.randn(scheme.width(32), generator=generator)) if weighted else None
    best = sum(least_error(group, scheme, importance) for group in weight)
    found = float(group_errors(weight, scheme, importance, search=True).sum())
    plain = float(group_errors(weight, scheme, importance, search=False).sum())
    assert best * (1 - 1e-5) <= found <= best * (1.25 if weighted else 1.06)
    # Most of what min/max loses is found again.
    assert found - best < 0.4 * (plain - best)


@settings(deadline=None)
@given(st.floats(2.0**-24, FP16_MAX, width=32), st.booleans())
def test_symmetric_scales_are_the_nearest_fp16_numbers(scale: float, negative: bool) -> None:
    given_scale = -scale if negative else scale
    stored = float(storable(torch.tensor([given_scale]), parse("int4-g32")))
    assert stored == float(np.float16(stored)) == float(np.float16(given_scale))


@settings(deadline=None)
@given(st.floats(2.0**-24, 65024.0, width=32), st.sampled_from([2, 3, 4]))
def test_asymmetric_minima_are_fp16_numbers_at_every_magnitude(scale: float, bits: int) -> None:
    scheme = QuantScheme(bits, 32, symmetric=False)
    stored = storable(torch.tensor([scale]), scheme)
    assert has_significant_bits(float(stored), 7)
    assert abs(float(stored) - scale) <= max(scale * 2.0**-7, 2.0**-25)
    minima = torch.arange(scheme.levels) * stored
    fits = minima <= FP16_MAX
    assert torch.equal(minima[fits].half().float(), minima[fits])


@settings(deadline=None)
@given(st.floats(2.0**-30, 2.0**-13, width=32))
def test_subnormal_scales_stay_positive_numbers_that_fp16_holds(scale: float) -> None:
    for text in ("int4-g32", "int4-g32-asym"):
        stored = storable(torch.tensor([scale]), parse(text))
        assert float(stored) > 0
        assert torch.equal(stored.half().float(), stored)


def test_a_scale_that_would_round_beyond_fp16_is_infinite_not_wrong() -> None:
    for scale in (65300.0, 1e5, 1e30):
        assert float(storable(torch.tensor([scale]), parse("int4-g32-asym"))) == float("inf")
    assert float(storable(torch.tensor([66000.0]), parse("int4-g32"))) == float("inf")


def test_a_scale_beyond_fp16_is_never_taken() -> None:
    for text in SCHEMES:
        groups = torch.full((1, 1, 32), 1e9)
        grid = fit_groups(groups, parse(text))
        assert grid.scale.isfinite().all()
        assert float(grid.scale.abs().max()) <= FP16_MAX
        assert codes_of(groups, grid, parse(text)).isfinite().all()


@pytest.mark.parametrize("value", [MAX_WEIGHT * 1.01, 1e30, float("inf"), float("nan")])
def test_weights_that_fp16_scales_cannot_serve_are_refused_by_name(value: float) -> None:
    weight = torch.randn(4, 64)
    weight[2, 40] = -value
    with pytest.raises(InputError, match=r"layer\.7: weights up to"):
        round_to_nearest(weight, parse("int4-g32"), layer="layer.7")


@pytest.mark.parametrize("text", [*SCHEMES, "int8-g32-asym"])
@pytest.mark.parametrize("search", [True, False])
def test_the_largest_weights_taken_have_fp16_scales_and_minima(text: str, search: bool) -> None:
    weight = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) * 2 * MAX_WEIGHT - MAX_WEIGHT
    weight[:, ::32] = MAX_WEIGHT
    weight[::2, 1::32] = -MAX_WEIGHT
    quantized = round_to_nearest(weight, parse(text), search=search)
    assert torch.equal(quantized.scale.half().float(), quantized.scale)
    if quantized.zero is not None and quantized.scheme.bits <= 4:
        minima = quantized.zero * quantized.scale
        assert torch.equal(minima.half().float(), minima)
    step = quantized.scale.abs().max()
    assert (quantized.dequantize() - weight).abs().max() <= 1.3 * step


@pytest.mark.parametrize("text", SCHEMES)
def test_zero_groups_decode_to_exactly_zero_with_finite_scales(text: str) -> None:
    weight = torch.randn(8, 96)
    weight[:, 32:64] = 0
    weight[5] = 0
    for search in (True, False):
        quantized = round_to_nearest(weight, parse(text), search=search)
        assert quantized.scale.isfinite().all()
        assert (quantized.scale != 0).all()
        decoded = quantized.dequantize()
        assert (decoded[:, 32:64] == 0).all()
        assert (decoded[5] == 0).all()


@pytest.mark.parametrize("text", [*SCHEMES, "int4-channel"])
def test_a_zero_importance_column_has_no_say(text: str) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(16, 70, generator=generator)
    importance = torch.ones(70)
    importance[::7] = 0
    outliers = weight.clone()
    outliers[:, ::7] = 0
    calm = group_errors(outliers, parse(text), None, search=True)
    disturbed = weight.clone()
    disturbed[:, ::7] *= 1.5
    found = group_errors(disturbed, parse(text), importance, search=True)
    assert found.sum() < 1.3 * calm.sum()


def test_importance_of_zero_everywhere_falls_back_to_min_max() -> None:
    weight = torch.randn(8, 64)
    for text in SCHEMES:
        ignored = round_to_nearest(weight, parse(text), torch.zeros(64))
        plain = round_to_nearest(weight, parse(text), search=False)
        assert torch.equal(ignored.dequantize(), plain.dequantize())


def test_the_tail_group_is_fitted_alone() -> None:
    weight = torch.randn(6, 200)
    weight[:, 192:] *= 1000
    for text in SCHEMES:
        whole = round_to_nearest(weight, parse(text))
        tail = round_to_nearest(weight[:, 192:], parse(text))
        assert whole.scale.shape == (6, 7)
        torch.testing.assert_close(whole.dequantize()[:, 192:], tail.dequantize())


@pytest.mark.parametrize("text", SCHEMES)
def test_the_layout_in_memory_does_not_matter(text: str) -> None:
    for columns in (96, 70):
        weight = torch.randn(columns, 12).T
        importance = torch.rand(columns, 2)[:, 0]
        one = round_to_nearest(weight, parse(text), importance)
        other = round_to_nearest(weight.contiguous(), parse(text), importance.contiguous())
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.scale, other.scale)


def test_symmetric_grids_give_the_extra_code_to_the_larger_side() -> None:
    weight = torch.tensor([[8.0, 1.0, -1.0, 0.0], [-8.0, 1.0, -1.0, 0.0]])
    quantized = round_to_nearest(weight, parse("int4-channel"), search=False)
    assert torch.equal(quantized.dequantize(), weight)
    assert float(quantized.scale[0]) == -1.0
    assert float(quantized.scale[1]) == 1.0


@pytest.mark.parametrize("text", ["int2-g32-asym", "int3-g32-asym", "int4-g32-asym", "int8-g32-asym"])
@pytest.mark.parametrize("search", [True, False])
def test_asymmetric_groups_of_one_sign_are_covered_to_the_ends(text: str, search: bool) -> None:
    # A zero point is a code: the grid always reaches 0, however far the weights are from it.
    weight = torch.rand(16, 64, generator=torch.Generator().manual_seed(0)) + 3.0
    weight[8:] *= -1
    quantized = round_to_nearest(weight, parse(text), search=search)
    step = expand_groups(quantized.scale, quantized.scheme, 64)
    assert ((quantized.dequantize() - weight).abs() <= 1.2 * step).all()


@pytest.mark.parametrize("text", [*SCHEMES, "int4-channel-asym"])
def test_better_than_naive_rounding_on_every_scheme(text: str) -> None:
    weight = torch.randn(48, 200, generator=torch.Generator().manual_seed(2))
    naive = (naive_round(weight, parse(text)).dequantize() - weight).square().sum()
    found = (round_to_nearest(weight, parse(text)).dequantize() - weight).square().sum()
    assert found < 0.98 * naive


def test_splitting_the_work_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(33, 96)
    whole = round_to_nearest(weight, parse("int4-g32"))
    monkeypatch.setattr("compress.grid.ROW_CHUNK", 1)
    pieces = round_to_nearest(weight, parse("int4-g32"))
    assert torch.equal(whole.codes, pieces.codes)
    assert torch.equal(whole.scale, pieces.scale)


def test_output_error_is_the_relative_squared_error_of_the_outputs() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs, weight = torch.randn(50, 40, generator=generator), torch.randn(9, 40, generator=generator)
    other = weight + 0.1 * torch.randn(9, 40, generator=generator)
    expected = float((inputs @ (other - weight).T).square().sum() / (inputs @ weight.T).square().sum())
    assert output_error(weight, other, inputs.T @ inputs) == pytest.approx(expected, rel=1e-4)
    assert output_error(torch.zeros(9, 40), other, torch.zeros(40, 40)) == 0.0
