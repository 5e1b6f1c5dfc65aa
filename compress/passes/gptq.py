"""GPTQ: Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training Quantization", ICLR 2023.

Columns are rounded one by one, and the error of each is made up for by the columns still to come. Here whole groups are
ordered by importance (so that no file needs an index of columns), and each group's scales are searched on the weights
as they are when its turn comes, weighing each column by what an error in it would really cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from compress.errors import InputError
from compress.protocols import Resource
from compress.report import LayerRecord
from compress.scheme import QuantScheme

if TYPE_CHECKING:
    from torch import Tensor

    from calibration.stats import InputStats
    from compress.grid import Grid
    from compress.session import Block, Session
    from compress.tensor import QuantizedTensor

COLUMNS_AT_ONCE = 128
DAMPING_STEP, DAMPING_MAX = 10.0, 1.0
TOKENS_PER_COLUMN = 2
"""An expert that fewer tokens reach is rounded: its Hessian tells more of those tokens than of the layer."""


@dataclass(frozen=True)
class Gptq:
    """Quantise with error feedback along the inputs.

    ``scheme`` holds where no planner chose another. ``damping`` is added to the Hessian's diagonal, as a share of its
    mean; where the factorisation still fails it is raised tenfold, up to 1, and the report says so. ``order`` takes
    groups with large inputs first.
    """

    scheme: QuantScheme = QuantScheme(4, 32)
    damping: float = 0.01
    order: bool = True

    scope: ClassVar[Literal["block"]] = "block"
    reads: ClassVar[frozenset[Resource]] = frozenset({"weights", "inputs", "plan"})
    writes: ClassVar[frozenset[Resource]] = frozenset({"quantized"})

    def __post_init__(self) -> None:
        if not 0 <= self.damping <= DAMPING_MAX:
            raise ValueError(f"damping: {self.damping} is not between 0 and {DAMPING_MAX:g}")

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
        """An embedding multiplies nothing: it has no inputs whose errors could make up for each other."""
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

        from compress.grid import output_error, round_to_nearest

        stats = block.inputs[layers[0]]
        factor, used = inverse_factor(stats, self.damping, layers)
        rows = torch.cat([block.weights[layer] for layer in layers])
        solved = quantize_with_feedback(rows, scheme, factor, stats.importance, self.order)
        plain = round_to_nearest(rows, scheme, stats.importance, layer=", ".join(layers))
        records, start = [], 0
        for layer in layers:
            weight = block.weights[layer]
            here = slice(start, start + weight.shape[0])
            start = here.stop
            chosen, rounded = _rows(solved, here), _rows(plain, here)
            error = output_error(weight, chosen.dequantize(), stats.gram)
            rounding_error = output_error(weight, rounded.dequantize(), stats.gram)
            notes = [f"damping raised from {self.damping:g} to {used:g}"] if used != self.damping else []
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


def _rows(whole: QuantizedTensor, rows: slice) -> QuantizedTensor:
    from compress.tensor import QuantizedTensor

    zero = None if whole.zero is None else whole.zero[rows]
    return QuantizedTensor(whole.scheme, whole.codes[rows], whole.scale[rows], zero)


def inverse_factor(stats: InputStats, damping: float, layers: Sequence[str]) -> tuple[Tensor, float]:
    """(H + damping)^-1, float64 [in, in], and the damping it took. Inputs that were never non-zero are set apart.

    Raises InputError when no damping up to 1 makes the Hessian positive definite, or damping 0 was asked for.
    """
    import torch

    hessian = stats.hessian.to(torch.float64)
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    mean = float(diagonal[~dead].mean()) if bool((~dead).any()) else 1.0
    if not math.isfinite(mean):
        raise InputError(
            "the layer's inputs are not finite: no damping can mend that",
            where=", ".join(layers),
            fix="look for overflow in the layers before it",
        )
    diagonal[dead] = mean
    used = damping
    while True:
        damped = hessian.clone()
        damped.diagonal().add_(used * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        # A factor of a near-singular matrix may come out, and be useless: its smallest pivot says so.
        if not failed and float(lower.diagonal().min()) > 1e-7 * float(lower.diagonal().max()):
            inverse: Tensor = torch.cholesky_inverse(lower)
            return inverse, used
        if damping == 0 or used * DAMPING_STEP > DAMPING_MAX:
            raise InputError(
                f"the Hessian is not positive definite with damping {used:g}: "
                f"{stats.tokens} calibration tokens for {hessian.shape[0]} input columns",
                where=", ".join(layers),
                fix="give more calibration samples, or gptq: {damping: 0.01} or more",
            )
        # Without the last digits' noise, since reports show it.
        used = float(f"{used * DAMPING_STEP:.12g}")


def quantize_with_feedback(
    weight: Tensor, scheme: QuantScheme, inverse: Tensor, importance: Tensor, order: bool
) -> QuantizedTensor:
    """GPTQ on ``weight`` float32 [out, in], given the inverse Hessian float64 [in, in] and mean squares [in].

    The solve runs in permuted column order; what comes back is in the original order.
    """
    import torch

    from compress.grid import Grid, assemble, fit_groups, one_thread

    columns = weight.shape[1]
    groups = column_groups(importance, scheme, order)
    permutation = torch.cat(groups)
    inverse = inverse[permutation][:, permutation]
    # Rows of the upper factor spread a column's error over the later columns; its diagonal is the price of an error.
    upper = torch.linalg.cholesky(inverse, upper=True).to(torch.float32)
    price = upper.diagonal().square().reciprocal()
    price = price * (importance[permutation] > 0)
    # Column-major: each step touches one contiguous column.
    work = weight.T[permutation].contiguous()
    work[importance[permutation] == 0] = 0
    codes = torch.empty_like(work)
    scale = torch.empty(weight.shape[0], len(groups))
    zero = torch.empty_like(scale)
    start = 0
    for group in groups:
        stop = start + len(group)
        grid = fit_groups(work[start:stop].T[:, None, :].contiguous(), scheme, price[None, start:stop])
        # A group keeps its place in the file, wherever the order put it in the solve.
        place = int(group[0]) // scheme.width(columns)
        scale[:, place], zero[:, place] = grid.scale[:, 0], grid.zero[:, 0]
        for left in range(start, stop, COLUMNS_AT_ONCE):
            right = min(left + COLUMNS_AT_ONCE, stop)
            with one_thread():
                errors = _round_columns(work, codes, upper, left, right, grid, scheme)
            work[right:].addmm_(upper[left:right, right:].T, errors, alpha=-1)
        start = stop
    original = torch.empty_like(codes)
    original[permutation] = codes
    return assemble(original.T.contiguous(), Grid(scale, zero), scheme)


def _round_columns(
    work: Tensor, codes: Tensor, upper: Tensor, left: int, right: int, grid: Grid, scheme: QuantScheme
) -> Tensor:
    """Round columns ``left..right`` in turn, each error fed to those after it; the scaled errors [columns, out]."""
    import torch

    from compress.grid import nearest_codes, values_of

    scale, zero = grid.scale[:, 0], grid.zero[:, 0]
    errors = torch.empty(right - left, work.shape[1])
    diagonal = upper.diagonal()[left:right].tolist()
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
    """The columns of each group, in the order in which they are rounded."""
    import torch

    groups = list(torch.split(torch.arange(len(importance)), scheme.width(len(importance))))
    if not order:
        return groups
    within = [group[torch.argsort(importance[group], descending=True, stable=True)] for group in groups]
    totals = torch.stack([importance[group].mean() for group in groups])
    return [within[i] for i in torch.argsort(totals, descending=True, stable=True).tolist()]
