"""Coordinate descent against the same thing written weight by weight, and that no step goes up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.descent import descend
from compress.grid import output_power, round_to_nearest
from compress.scheme import QuantScheme
from compress.tensor import QuantizedTensor
from tests.compress.test_blockgrid import check_parts
from tests.reference.descent import descend as textbook


def problem(columns: int, rows: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight [rows, columns], and a positive definite Hessian with strong correlations."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(2 * columns, 8, generator=generator) @ torch.randn(8, columns, generator=generator)
    inputs = mixed + 0.5 * torch.randn(2 * columns, columns, generator=generator)
    hessian = inputs.T @ inputs / len(inputs)
    hessian.diagonal().add_(0.01 * float(hessian.diagonal().mean()))
    return torch.randn(rows, columns, generator=generator), hessian


def loss(weight: Tensor, quantized: QuantizedTensor, hessian: Tensor) -> float:
    return output_power(quantized.dequantize() - weight, hessian)


SCHEMES = [
    ("int4-g32", 200),
    ("int4-g32-asym", 72),
    ("int2-g16-asym", 96),
    ("int3-g48", 96),
    ("int4-channel", 150),
    ("int4-g160", 300),
    ("nf4-g32", 96),
    ("int8-g32", 64),
    ("q5_1", 64),
    ("q2_k", 256),
    ("q3_k", 256),
    ("q4_k", 512),
]


@pytest.mark.parametrize(("text", "columns"), SCHEMES)
def test_agrees_with_a_descent_by_single_weights(text: str, columns: int) -> None:
    weight, hessian = problem(columns, rows=6)
    start = round_to_nearest(weight, QuantScheme.parse(text))
    ours, theirs = (step(weight, start, hessian, 2) for step in (descend, textbook))
    # A tie that float32 and float64 break differently changes the rest of its row.
    same = (ours.dequantize() == theirs.dequantize()).all(dim=1)
    assert float(same.float().mean()) >= 0.8
    assert loss(weight, ours, hessian) == pytest.approx(loss(weight, theirs, hessian), rel=0.02)


@pytest.mark.parametrize(("text", "columns"), SCHEMES)
def test_every_sweep_lowers_the_error(text: str, columns: int) -> None:
    weight, hessian = problem(columns)
    quantized = round_to_nearest(weight, QuantScheme.parse(text))
    before = loss(weight, quantized, hessian)
    first = before
    for _ in range(6):
        quantized = descend(weight, quantized, hessian, 1)
        after = loss(weight, quantized, hessian)
        assert after <= before * (1 + 1e-5)
        before = after
    assert before < 0.6 * first


@pytest.mark.parametrize(("text", "columns"), SCHEMES)
def test_scales_stay_what_files_hold(text: str, columns: int) -> None:
    weight, hessian = problem(columns)
    scheme = QuantScheme.parse(text)
    found = descend(weight, round_to_nearest(weight, scheme), hessian, 3)
    assert int(found.codes.max()) < scheme.levels
    if scheme.block_type is not None:
        check_parts(found)
        return
    assert torch.equal(found.scale.half().float(), found.scale)
    if found.zero is not None:
        minima = found.zero * found.scale
        assert torch.equal(minima.half().float(), minima)


@pytest.mark.parametrize(("text", "columns"), SCHEMES)
def test_the_start_stays_as_it_was(text: str, columns: int) -> None:
    weight, hessian = problem(columns)
    start = round_to_nearest(weight, QuantScheme.parse(text))
    before = {name: part.clone() for name, part in start.tensors().items()}
    found = descend(weight, start, hessian, 1)
    assert all(torch.equal(part, before[name]) for name, part in start.tensors().items())
    assert not torch.equal(found.dequantize(), start.dequantize())


def test_no_sweep_changes_nothing() -> None:
    weight, hessian = problem(96)
    start = round_to_nearest(weight, QuantScheme.parse("int4-g32-asym"))
    same = descend(weight, start, hessian, 0)
    assert torch.equal(same.dequantize(), start.dequantize())
    assert same.codes.dtype == start.codes.dtype


def test_zero_groups_stay_zero() -> None:
    weight, hessian = problem(96)
    weight[:, 32:64] = 0
    # Without correlations nothing asks the zero group to make up for the others.
    found = descend(weight, round_to_nearest(weight, QuantScheme.parse("int4-g32")), torch.diag(hessian.diagonal()), 3)
    assert (found.dequantize()[:, 32:64] == 0).all()
    assert found.scale.isfinite().all()
