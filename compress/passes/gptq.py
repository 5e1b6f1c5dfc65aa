"""GPTQ: Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training Quantization", ICLR 2023.

Columns are rounded one by one, and the error of each is made up for by the columns still to come. Here whole groups are
ordered by importance (so that no file needs an index of columns), and each group's scales are searched on the weights
as they are when its turn comes, weighing each column by what an error in it would really cost. A descent over codes and
scales then takes what the one-way order left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from compress.errors import InputError
from compress.protocols import Resource
from compress.report import LayerRecord
from compress.scheme import SUPER_BLOCK, QuantScheme

if TYPE_CHECKING:
    from torch import Tensor

    from calibration.stats import InputStats
    from compress.levels import Grid
    from compress.session import Block, Session
    from compress.tensor import QuantizedTensor

COLUMNS_AT_ONCE = 128
ROWS_AT_ONCE = 1 << 15
CHUNK = SUPER_BLOCK
DAMPING_STEP, DAMPING_MAX = 10.0, 1.0
TOKENS_PER_COLUMN = 2
"""An expert that fewer tokens reach is rounded: its Hessian tells more of those tokens than of the layer."""


@dataclass(frozen=True)
class Gptq:
    """Quantise with error feedback along the inputs.

    ``scheme`` holds where no planner chose another. The Hessian's diagonal grows by ``shrinkage``, as a share of
    itself, since how inputs vary together depends on the text more than how large they are; and by ``damping``, as a
    share of its mean. Where the factorisation still fails damping is raised tenfold, up to 1, and the report says so.
    ``order`` takes groups with large inputs first. ``sweeps`` of coordinate descent follow; 0 leaves them out.
    """

    scheme: QuantScheme = QuantScheme(4, 32)
    damping: float = 0.05
    shrinkage: float = 0.2
    order: bool = True
    sweeps: int = 4

    scope: ClassVar[Literal["block"]] = "block"
    reads: ClassVar[frozenset[Resource]] = frozenset({"weights", "inputs", "plan"})
    writes: ClassVar[frozenset[Resource]] = frozenset({"quantized"})

    def __post_init__(self) -> None:
        if not 0 <= self.damping <= DAMPING_MAX:
            raise ValueError(f"damping: {self.damping} is not between 0 and {DAMPING_MAX:g}")
        if not 0 <= self.shrinkage < math.inf:
            raise ValueError(f"shrinkage: {self.shrinkage} is not 0 or more")
        if self.sweeps < 0:
            raise ValueError(f"sweeps: {self.sweeps} is negative")

    def check(self, session: Session) -> Sequence[str]:
        """Plan ``scheme`` for every layer that nobody planned."""
        session.plan_rest(self.scheme)
        return []

    def apply(self, session: Session, block: Block) -> list[LayerRecord]:
        """Quantise every planned layer; layers with one input and one scheme are solved together, row by row."""
        together: dict[tuple[int, QuantScheme], list[str]] = {}
        for layer in block.weights:
            if (scheme := session.plan.get(layer)) is not None:
                together.setdefault((id(block.inputs.get(layer)), scheme), []).append(layer)
        records = {}
        for (_, scheme), layers in together.items():
            stats = block.inputs.get(layers[0])
            solve = self._plain if stats is None else self._rare if is_rare(stats) else self._solve
            for record in solve(session, block, layers, scheme):
                records[record.layer] = record
        return [records[layer] for layer in block.weights if layer in records]

    def _plain(self, session: Session, block: Block, layers: list[str], scheme: QuantScheme) -> list[LayerRecord]:
        """An embedding multiplies nothing: unless a pass says what errors in its rows cost, it is rounded."""
        from compress.grid import round_to_nearest

        records = []
        for layer in layers:
            block.quantized[layer] = round_to_nearest(block.weights[layer], scheme, layer=layer)
            bytes_ = session.stored_bits(scheme, session.shapes[layer]) // 8
            records.append(LayerRecord(layer, str(scheme), bytes_))
        return records

    def _rare(self, session: Session, block: Block, layers: list[str], scheme: QuantScheme) -> list[LayerRecord]:
        """An expert that few tokens were routed to, or none: plain rounding, the scales searched for those tokens."""
        from compress.grid import output_error, round_to_nearest

        stats = block.inputs[layers[0]]
        seen, error = stats.tokens > 0, None
        reason = f"plain rounding: {stats.tokens} tokens for {len(stats.gram)} columns"
        records = []
        for layer in layers:
            weight = block.weights[layer]
            chosen = round_to_nearest(weight, scheme, stats.importance if seen else None, layer=layer)
            if seen:
                error = output_error(weight, chosen.dequantize(), stats.gram)
            block.quantized[layer] = chosen
            bytes_ = session.stored_bits(scheme, session.shapes[layer]) // 8
            records.append(LayerRecord(layer, str(scheme), bytes_, stats.tokens, None, error, error, reason))
        return records

    def _solve(self, session: Session, block: Block, layers: list[str], scheme: QuantScheme) -> list[LayerRecord]:
        import torch

        from compress.descent import descend
        from compress.grid import output_error, output_power, round_to_nearest
        from compress.tensor import QuantizedTensor

        stats = block.inputs[layers[0]]
        groups = column_groups(stats.importance, scheme, self.order)
        hessian, upper, used = factorise(stats, self.damping, self.shrinkage, torch.cat(groups), layers)
        weights = [block.weights[layer] for layer in layers]
        # No row hears of another: a large vocabulary's go piece by piece.
        pieces = torch.split(weights[0] if len(weights) == 1 else torch.cat(weights), ROWS_AT_ONCE)
        named, alive = ", ".join(layers), stats.importance > 0
        plain = QuantizedTensor.joined(
            [round_to_nearest(rows, scheme, stats.importance, layer=named) for rows in pieces]
        )
        first = [quantize_with_feedback(rows, scheme, upper, groups, stats.importance) for rows in pieces]
        del upper
        solved = QuantizedTensor.joined(
            [descend(rows * alive, found, hessian, self.sweeps) for rows, found in zip(pieces, first, strict=True)]
        )
        dead = int((stats.importance == 0).sum())
        records, start = [], 0
        for layer, weight in zip(layers, weights, strict=True):
            here = slice(start, start + weight.shape[0])
            start = here.stop
            chosen, rounded = solved.rows(here), plain.rows(here)
            power = output_power(weight, stats.gram)
            error = output_error(weight, chosen.dequantize(), stats.gram, power)
            rounding_error = output_error(weight, rounded.dequantize(), stats.gram, power)
            notes = [f"damping raised from {self.damping:g} to {used:g}"] if used != self.damping else []
            if dead:
                notes.append(f"{dead} inputs are always 0: their weights became 0")
            if not error <= rounding_error:
                notes.append(f"plain rounding: GPTQ's error {error:.3g} was not below {rounding_error:.3g}")
                chosen, error = rounded, rounding_error
            block.quantized[layer] = chosen
            bytes_ = session.stored_bits(scheme, session.shapes[layer]) // 8
            fallback = "; ".join(notes) or None
            records.append(LayerRecord(layer, str(scheme), bytes_, stats.tokens, used, error, rounding_error, fallback))
        return records


def is_rare(stats: InputStats) -> bool:
    """Whether the layer belongs to an expert that saw too few tokens for a Hessian."""
    return stats.routed and stats.tokens < TOKENS_PER_COLUMN * len(stats.gram)


def factorise(
    stats: InputStats, damping: float, shrinkage: float, order: Tensor, layers: Sequence[str]
) -> tuple[Tensor, Tensor, float]:
    """The shrunk and damped Hessian H, the factor U of its inverse, and the damping that it took.

    H float32 [in, in]; U float32 [in, in], upper, in the columns' ``order`` (int64 [in]), with H^-1 = UT U. Inputs that
    were never non-zero are set apart.

    Raises InputError when no damping up to 1 makes the Hessian positive definite, or damping 0 was asked for.
    """
    import torch

    hessian = stats.hessian
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    mean = float(diagonal[~dead].double().mean()) if bool((~dead).any()) else 1.0
    if not math.isfinite(mean):
        raise InputError(
            "the layer's inputs are not finite: no damping can mend that",
            where=", ".join(layers),
            fix="look for overflow in the layers before it",
        )
    diagonal.mul_(1 + shrinkage)
    diagonal[dead] = mean
    # With rows and columns from last to first, a lower factor of H is an upper one, and its inverse is U. Matrices of
    # a wide layer are large: no more of them are in memory at a time than it takes.
    backwards = order.flip(0)
    matrix = hessian[backwards[:, None], backwards].to(torch.float64)
    undamped, used = matrix.diagonal().clone(), damping
    while True:
        matrix.diagonal().copy_(undamped + used * mean)
        lower, failed = torch.linalg.cholesky_ex(matrix)
        # A factor of a near-singular matrix may come out, and be useless: its smallest pivot says so.
        if not failed and float(lower.diagonal().min()) > 1e-7 * float(lower.diagonal().max()):
            break
        if damping == 0 or used * DAMPING_STEP > DAMPING_MAX:
            raise InputError(
                f"the Hessian is not positive definite with damping {used:g}: "
                f"{stats.tokens} calibration tokens for {hessian.shape[0]} input columns",
                where=", ".join(layers),
                fix="give more calibration samples, or gptq: {damping: 0.05} or more",
            )
        # Without the last digits' noise, since reports show it.
        used = float(f"{used * DAMPING_STEP:.12g}")
    del matrix
    invert_lower(lower)
    inverse = lower.to(torch.float32)
    del lower
    hessian.diagonal().add_(used * mean)
    return hessian, inverse.flip(0, 1), used


def invert_lower(matrix: Tensor) -> None:
    """Invert a lower triangular matrix in its place, half by half: products where a solve would go by columns."""
    import torch

    size = len(matrix)
    if size <= COLUMNS_AT_ONCE:
        matrix.copy_(torch.linalg.solve_triangular(matrix, torch.eye(size, dtype=matrix.dtype), upper=False))
        return
    half = size // 2
    left, right, corner = matrix[:half, :half], matrix[half:, half:], matrix[half:, :half]
    invert_lower(left)
    invert_lower(right)
    corner.copy_(-(right @ corner) @ left)


def quantize_with_feedback(
    weight: Tensor, scheme: QuantScheme, upper: Tensor, groups: Sequence[Tensor], importance: Tensor
) -> QuantizedTensor:
    """GPTQ on ``weight`` float32 [out, in], in the order of ``groups`` of columns; columns of no importance become 0.

    ``upper`` float32 [in, in], in that order: its rows spread a column's error over the later columns, and its diagonal
    is the price of an error. What comes back is in the original order.

    Where super-blocks share numbers, these are chosen when the first of their columns is due, and each group then takes
    the best multiples of them for its weights as they are by then.
    """
    import torch

    from compress.grid import fit_groups
    from compress.levels import Grid, assemble

    permutation = torch.cat(list(groups))
    price = upper.diagonal().square().reciprocal()
    # Column-major: each step touches one contiguous column.
    work = weight.T[permutation].contiguous()
    work[importance[permutation] == 0] = 0
    codes = torch.empty_like(work)
    width, blocks = scheme.width(weight.shape[1]), weight.shape[1] // SUPER_BLOCK
    # Scales and zeros, d and dmin.
    parts = [torch.empty(len(weight), count) for count in (len(groups), len(groups), blocks, blocks)]
    start = 0
    for chunk in _chunks(groups):
        end = start + sum(map(len, chunk))
        errors = torch.empty(end - start, len(weight))
        left = start
        for group, within in zip(chunk, _shared(work[start:end], scheme, price[start:end], len(chunk)), strict=True):
            stop = left + len(group)
            grid = fit_groups(work[left:stop].T[:, None, :], scheme, price[None, left:stop], within=within)
            # A group keeps its place in the file, wherever the order put it in the solve.
            places = [int(group[0]) // width] * 2 + [int(group[0]) // SUPER_BLOCK] * 2
            for part, place, found in zip(parts, places, (grid.scale, grid.zero, grid.d, grid.dmin), strict=True):
                if found is not None:
                    part[:, place] = found[:, 0]
            while left < stop:
                right = min(left + COLUMNS_AT_ONCE, stop)
                spread = _round_columns(work, codes, upper, left, right, grid, scheme)
                work[right:end].addmm_(upper[left:right, right:end].T, spread, alpha=-1)
                errors[left - start : right - start] = spread
                left = right
        work[end:].addmm_(upper[start:end, end:].T, errors, alpha=-1)
        start = end
    original = torch.empty_like(codes)
    original[permutation] = codes
    return assemble(original.T.contiguous(), Grid(*parts[: 4 if scheme.two_level else 2]), scheme)


def _shared(work: Tensor, scheme: QuantScheme, price: Tensor, groups: int) -> list[Grid | None]:
    """The grid of each group as it is when the first column of its super-block is due: all share ``d`` and ``dmin``.

    ``work`` [columns, out] and ``price`` [columns] are the super-block's. None for each where groups share nothing.
    """
    import torch

    from compress.grid import fit_groups
    from compress.levels import Grid

    if not scheme.two_level:
        return [None] * groups
    whole = fit_groups(work.T.reshape(work.shape[1], groups, -1), scheme, price.view(groups, -1))
    each = zip(torch.split(whole.scale, 1, dim=1), torch.split(whole.zero, 1, dim=1), strict=True)
    return [Grid(scale, zero, whole.d, whole.dmin) for scale, zero in each]


def _chunks(groups: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Runs of groups of up to CHUNK columns, or of one larger group: then the columns after them hear of the errors."""
    together = max(1, CHUNK // max(map(len, groups)))
    for first in range(0, len(groups), together):
        yield groups[first : first + together]


def _round_columns(
    work: Tensor, codes: Tensor, upper: Tensor, left: int, right: int, grid: Grid, scheme: QuantScheme
) -> Tensor:
    """Round columns ``left..right`` in turn, each error fed to those after it; the scaled errors [columns, out]."""
    import torch

    from compress.grid import one_thread
    from compress.levels import nearest_codes, values_of

    scale, zero = grid.scale[:, 0], grid.zero[:, 0]
    errors = torch.empty(right - left, work.shape[1])
    diagonal = upper.diagonal()[left:right].tolist()
    with one_thread():
        for step, column in enumerate(range(left, right)):
            current = work[column]
            code = nearest_codes(current, scale, zero, scheme)
            codes[column] = code
            error = values_of(code, scale, zero, scheme).neg_().add_(current).div_(diagonal[step])
            errors[step] = error
            if column + 1 < right:
                work[column + 1 : right].addr_(upper[column, column + 1 : right], error, alpha=-1)
    return errors


def column_groups(importance: Tensor, scheme: QuantScheme, order: bool) -> list[Tensor]:
    """The columns of each group, in the order in which they are rounded; groups of one super-block stay together."""
    import torch

    groups = list(torch.split(torch.arange(len(importance)), scheme.width(len(importance))))
    if not order:
        return groups
    within = [group[torch.argsort(importance[group], descending=True, stable=True)] for group in groups]
    together = SUPER_BLOCK // len(groups[0]) if scheme.two_level else 1
    totals = torch.stack([importance[group].mean() for group in groups]).view(-1, together)
    first = torch.argsort(totals.mean(1), descending=True, stable=True) * together
    then = torch.argsort(totals, dim=1, descending=True, stable=True)[first // together]
    return [within[i] for i in (first[:, None] + then).flatten().tolist()]
