"""Codes, scales and zero points back to numbers, exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compress.scheme import CODEBOOKS, QuantScheme
from compress.tensor import QuantizedTensor, expand_groups


def random_tensor(text: str, rows: int, columns: int) -> QuantizedTensor:
    scheme = QuantScheme.parse(text)
    generator = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(0, scheme.levels, (rows, columns), generator=generator, dtype=torch.uint8)
    scale = torch.randn(rows, scheme.groups(columns), generator=generator).half().float()
    zero = torch.randint(0, scheme.levels, scale.shape, generator=generator, dtype=torch.uint8)
    return QuantizedTensor(scheme, codes, scale, None if scheme.symmetric else zero)


@pytest.mark.parametrize("text", ["int4-g32", "int4-g32-asym", "int8-g32", "int8-g32-asym", "int2-g16", "int3-channel"])
@pytest.mark.parametrize("columns", [96, 200, 7])
def test_every_weight_is_code_minus_zero_times_scale(text: str, columns: int) -> None:
    quantized = random_tensor(text, 5, columns)
    width = quantized.scheme.width(columns)
    decoded = quantized.dequantize()
    assert decoded.dtype == torch.float32
    assert decoded.shape == quantized.shape == (5, columns)
    for row in range(5):
        for column in range(columns):
            group = column // width
            zero = quantized.scheme.midpoint if quantized.zero is None else int(quantized.zero[row, group])
            exact = (int(quantized.codes[row, column]) - zero) * float(quantized.scale[row, group])
            assert float(decoded[row, column]) == exact


def test_dequantising_leaves_the_parts_alone() -> None:
    quantized = random_tensor("int4-g32-asym", 4, 96)
    before = [part.clone() for part in (quantized.codes, quantized.scale, quantized.zero) if part is not None]
    first = quantized.dequantize()
    first.zero_()
    after = [part for part in (quantized.codes, quantized.scale, quantized.zero) if part is not None]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not torch.equal(quantized.dequantize(), first)


def test_groups_repeat_along_the_row_and_the_last_is_cut() -> None:
    expanded = expand_groups(torch.tensor([[1.0, 2.0, 3.0]]), QuantScheme(4, 2), 5)
    assert expanded.tolist() == [[1.0, 1.0, 2.0, 2.0, 3.0]]


@pytest.mark.parametrize("text", ["nf4-g32", "nf4-channel"])
@pytest.mark.parametrize("columns", [96, 200])
def test_a_codebooks_weight_is_one_float32_product(text: str, columns: int) -> None:
    quantized = random_tensor(text, 5, columns)
    width, decoded = quantized.scheme.width(columns), quantized.dequantize()
    for row in range(5):
        for column in range(columns):
            value = np.float32(CODEBOOKS["nf4"][int(quantized.codes[row, column])])
            scale = np.float32(quantized.scale[row, column // width])
            assert float(decoded[row, column]) == float(value * scale)
