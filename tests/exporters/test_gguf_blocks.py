"""The bytes of every block type, decoded by gguf-py and by libgguf, against what the numbers stand for."""

from __future__ import annotations

from typing import Any

import gguf
import libgguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.scheme import BLOCK_TYPES, CODEBOOKS, POWERS_OF_TWO, SUPER_BLOCK, QuantScheme
from compress.tensor import QuantizedTensor
from exporters.gguf.blocks import encode_quantized
from exporters.gguf.storage import FLOATS, LAYOUTS, TERNARY, TypeChoices

SCHEMES = ["int4-g32", "int4-g64-asym", "int5-g32", "int5-g64-asym", "int8-channel", "iq4_nl", "mxfp4", "ternary-g256"]
SCHEMES += list(BLOCK_TYPES)
COLUMNS = 2 * SUPER_BLOCK
LARGEST = 65504.0


def whole(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    """Whole numbers from low to high, ends included and often."""
    drawn = torch.randint(low - 2, high + 3, shape, generator=generator).clamp(low, high)
    return drawn.float()


def half(generator: torch.Generator, kind: str, *shape: int) -> Tensor:
    """fp16 numbers, never 0: of usual size, subnormal, the largest."""
    sizes = {"usual": 2.0**-7, "subnormal": 2.0**-18, "largest": LARGEST}
    drawn = (torch.rand(shape, generator=generator) + 0.01) * sizes[kind]
    if kind == "largest":
        drawn = torch.full(shape, LARGEST)
    drawn = drawn.half().float()
    return torch.where(drawn == 0, 2.0**-24, drawn)


def drawn(text: str, seed: int, kind: str, rows: int = 3) -> QuantizedTensor:
    """Any numbers that the type of a scheme holds."""
    scheme, generator = QuantScheme.parse(text), torch.Generator().manual_seed(seed)
    groups = scheme.groups(COLUMNS)
    codes = whole(generator, 0, scheme.levels - 1, rows, COLUMNS).to(torch.uint8)
    signs = whole(generator, 0, 1, rows, groups) * 2 - 1
    if (blocks := scheme.two_level) is not None:
        supers = COLUMNS // SUPER_BLOCK
        least, most = blocks.scale_range
        scales = whole(generator, least, most, rows, supers, groups // supers)
        scales = torch.where(scales == 0, 1.0, scales)
        d, dmin = half(generator, kind, rows, supers), half(generator, kind, rows, supers)
        scale = (scales * d[..., None]).flatten(1)
        if not blocks.minima:
            return QuantizedTensor(scheme, codes, scale, d=d)
        minimum = (whole(generator, 0, most, rows, supers, groups // supers) * dmin[..., None]).flatten(1)
        return QuantizedTensor(scheme, codes, scale, None, minimum, d, dmin)
    scale = half(generator, kind, rows, groups)
    if scheme.has_minima:
        return QuantizedTensor(scheme, codes, scale, None, signs * half(generator, kind, rows, groups))
    if scheme.codebook in POWERS_OF_TWO:
        return QuantizedTensor(scheme, codes, torch.exp2(torch.round(torch.log2(scale))))
    if scheme.symmetric:
        return QuantizedTensor(scheme, codes, scale * signs)
    exponents = whole(generator, -24, 5, rows, groups)
    zero = whole(generator, 0, scheme.levels - 1, rows, groups).to(torch.uint8)
    return QuantizedTensor(scheme, codes, torch.exp2(exponents), zero)


def decoded(quantized: QuantizedTensor, ternary: str = "tq2_0") -> tuple[Any, Any]:
    layout = TypeChoices(ternary=ternary).layout(quantized.scheme)
    data = encode_quantized("layer", quantized, layout)
    assert 8 * data.size == TypeChoices(ternary=ternary).stored_bits(quantized.scheme, quantized.shape)
    qtype = gguf.GGMLQuantizationType[layout.type]
    return gguf.dequantize(data, qtype), libgguf.dequantize_rows(data, qtype)


@pytest.mark.parametrize("text", SCHEMES)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["usual", "subnormal", "largest"]))
def test_two_other_readers_decode_what_the_numbers_stand_for(text: str, seed: int, kind: str) -> None:
    quantized = drawn(text, seed, kind)
    expected = quantized.dequantize().numpy()
    for found in decoded(quantized):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("ternary", TERNARY)
@pytest.mark.parametrize("text", ["ternary-g256", "ternary-g512", "ternary-channel"])
def test_ternary_weights_in_either_type(text: str, ternary: str) -> None:
    quantized = drawn(text, 7, "usual", rows=40)
    for found in decoded(quantized, ternary):
        np.testing.assert_array_equal(found, quantized.dequantize().numpy())


@pytest.mark.parametrize("text", SCHEMES)
def test_every_code_alone_lies_in_its_own_place(text: str) -> None:
    """One weight of each row differs from the others."""
    scheme = QuantScheme.parse(text)
    quantized = drawn(text, 3, "usual", rows=COLUMNS)
    codes = torch.zeros(COLUMNS, COLUMNS, dtype=torch.uint8)
    codes.fill_diagonal_(scheme.levels - 1)
    parts = {name: part[:1].expand_as(part).contiguous() for name, part in quantized.tensors().items()}
    single = QuantizedTensor(scheme, **(parts | {"codes": codes}))
    for found in decoded(single):
        np.testing.assert_array_equal(found, single.dequantize().numpy())


def test_sizes_of_blocks_are_ggmls() -> None:
    for name, layout in LAYOUTS.items():
        assert (layout.block, layout.size) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        prefix = "" if layout.file_type.startswith("ALL_") else "MOSTLY_"
        assert f"{prefix}{layout.file_type}" in gguf.LlamaFileType.__members__
    assert set(FLOATS.values()) <= set(LAYOUTS)


def test_values_of_codebooks_are_ggmls() -> None:
    names = {"iq4_nl": gguf.quants.IQ4_NL, "mxfp4": gguf.quants.MXFP4}
    for name, theirs in names.items():
        doubled = 2 if name == "mxfp4" else 1
        assert sorted({value / doubled for value in theirs.kvalues}) == list(CODEBOOKS[name])
