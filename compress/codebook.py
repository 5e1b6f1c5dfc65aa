"""Codes of a codebook, both ways: the nearest code to a number, and the number that a code stands for."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from compress.scheme import CODEBOOKS

CELLS = 1024
"""Equal cells from the least to the greatest value, each with at most one boundary near: quicker than a bisection."""


def code_values(codes: Tensor, name: str) -> Tensor:
    """float32: what ``codes`` (whole numbers of any dtype) of the codebook ``name`` stand for before scaling."""
    return _table(name).index_select(0, codes.to(torch.int32).reshape(-1)).view(codes.shape)


def nearest_code(values: Tensor, name: str) -> Tensor:
    """float32: the code of the codebook ``name`` that stands for the number nearest to each of ``values``, finite.

    Half way between two codes it is the lower one.
    """
    lower, boundary = _cells(name)
    low, *_, high = CODEBOOKS[name]
    cell = ((values - low) * (CELLS / (high - low))).clamp_(0, CELLS - 1).to(torch.int32).reshape(-1)
    code = lower.index_select(0, cell).view(values.shape)
    return code.add_(values > boundary.index_select(0, cell).view(values.shape))


@cache
def _table(name: str) -> Tensor:
    return torch.tensor(CODEBOOKS[name])


@cache
def _cells(name: str) -> tuple[Tensor, Tensor]:
    """For each cell: the code before the first boundary that may be in it, and that boundary."""
    table = _table(name)
    boundaries = torch.cat([(table[:-1] + table[1:]) / 2, torch.tensor([torch.inf])])
    # From one cell before: which cell a number near an edge falls into is a matter of rounding.
    low, high = table[0], table[-1]
    before = (torch.arange(CELLS) - 1) * ((high - low) / CELLS) + low
    lower = torch.bucketize(before, boundaries)
    return lower.to(torch.float32), boundaries[lower]
