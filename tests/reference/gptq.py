"""GPTQ as the paper's text has it: column by column, float64, the remaining inverse Hessian updated explicitly.

Frantar et al. 2023, eq. 2 (error and update of one column) and eq. 3 (the inverse after a column is gone). No Cholesky
factor, no blocks of columns. Only the scale fit of a group is the product's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.grid import fit_groups
from compress.levels import Grid, assemble
from compress.scheme import CODEBOOKS, SUPER_BLOCK, QuantScheme
from compress.tensor import QuantizedTensor


def column_order(mean_square: Tensor, scheme: QuantScheme, order: bool) -> list[list[int]]:
    """The columns of each group in the order of rounding: large inputs first, inside groups and among them."""
    columns = len(mean_square)
    width = scheme.width(columns)
    groups = [list(range(start, min(start + width, columns))) for start in range(0, columns, width)]
    if order:
        groups = [sorted(group, key=lambda c: -float(mean_square[c])) for group in groups]
        groups.sort(key=lambda group: -float(mean_square[group].mean()))
    if order and scheme.two_level:
        # Super-blocks first, in each its groups as they stand.
        blocks = [[group for group in groups if group[0] // SUPER_BLOCK == b] for b in range(columns // SUPER_BLOCK)]
        blocks.sort(key=lambda block: -float(mean_square[[c for group in block for c in group]].mean()))
        groups = [group for block in blocks for group in block]
    return groups


def damped_inverse(gram: Tensor, tokens: int, damping: float) -> Tensor:
    """(2 / tokens * gram + damping * mean diagonal)^-1 in float64; dead inputs stand alone."""
    hessian = 2.0 / tokens * gram.double()
    alive = [c for c in range(len(hessian)) if hessian[c, c] > 0]
    mean = float(hessian.diagonal()[alive].mean())
    for column in range(len(hessian)):
        if hessian[column, column] == 0:
            hessian[column, column] = mean
        hessian[column, column] += damping * mean
    inverse: Tensor = torch.linalg.inv(hessian)
    return inverse


def column_costs(inverse: Tensor, order: list[int]) -> Tensor:
    """What a squared error in each column costs once the columns before it (in ``order``) are fixed: 1 / [H^-1]cc."""
    inverse, costs = inverse.clone(), torch.zeros(len(order), dtype=torch.float64)
    for column in order:
        costs[column] = 1.0 / inverse[column, column]
        inverse = _without(inverse, column)
    return costs


def _without(inverse: Tensor, column: int) -> Tensor:
    pivot = float(inverse[column, column])
    reduced = inverse - torch.outer(inverse[:, column], inverse[column]) / pivot
    reduced[column, :] = 0
    reduced[:, column] = 0
    return reduced


def gptq(
    weight: Tensor, gram: Tensor, tokens: int, scheme: QuantScheme, damping: float = 0.01, order: bool = True
) -> QuantizedTensor:
    """Quantise ``weight`` [out, in], given the Gram matrix [in, in] of ``tokens`` inputs."""
    mean_square = gram.diagonal() / tokens
    inverse = damped_inverse(gram, tokens, damping)
    groups = column_order(mean_square, scheme, order)
    costs = column_costs(inverse, [column for group in groups for column in group])
    costs[mean_square == 0] = 0
    work = weight.double().clone()
    work[:, mean_square == 0] = 0
    codes = torch.zeros(weight.shape, dtype=torch.float32)
    scale = torch.zeros(weight.shape[0], len(groups))
    zero = torch.zeros_like(scale)
    shared = [torch.zeros(weight.shape[0], weight.shape[1] // SUPER_BLOCK) for _ in range(2 if scheme.two_level else 0)]
    block, within = -1, None
    for index, group in enumerate(groups):
        if scheme.two_level:
            if group[0] // SUPER_BLOCK != block:
                block, first = group[0] // SUPER_BLOCK, index
                each = groups[first : first + SUPER_BLOCK // len(group)]
                whole = fit_groups(
                    torch.stack([work[:, one].float() for one in each], dim=1),
                    scheme,
                    torch.stack([costs[one].float() for one in each]),
                )
                for numbers, found in zip(shared, (whole.d, whole.dmin), strict=True):
                    assert found is not None
                    numbers[:, block] = found[:, 0]
            here = slice(index - first, index - first + 1)
            within = Grid(whole.scale[:, here], whole.zero[:, here], whole.d, whole.dmin)
        grid = fit_groups(work[:, group].float()[:, None], scheme, costs[group].float()[None], within=within)
        place = group[0] // scheme.width(weight.shape[1])
        scale[:, place], zero[:, place] = grid.scale[:, 0], grid.zero[:, 0]
        for column in group:
            codes[:, column], rounded = _rounded(work[:, column].float(), scale[:, place], zero[:, place], scheme)
            error = (work[:, column] - rounded.double()) / float(inverse[column, column])
            work -= torch.outer(error, inverse[column])
            inverse = _without(inverse, column)
    return assemble(codes, Grid(scale, zero, *shared), scheme)


def _rounded(values: Tensor, scale: Tensor, zero: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """The nearest codes, and what they stand for."""
    if scheme.codebook is not None:
        table = torch.tensor(CODEBOOKS[scheme.codebook])
        codes = (values[:, None] - table * scale[:, None]).abs().argmin(1)
        return codes.float(), table[codes] * scale
    if scheme.has_minima:
        codes = torch.round((values + zero) / scale).clamp(0, scheme.levels - 1)
        return codes, codes * scale - zero
    codes = torch.round(values / scale + zero).clamp(0, scheme.levels - 1)
    return codes, (codes - zero) * scale
