"""Plain rounding to nearest, with a search for the scales. Needs no calibration data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from compress.protocols import Resource
from compress.report import LayerRecord
from compress.scheme import QuantScheme

if TYPE_CHECKING:
    from compress.session import Block, Session


@dataclass(frozen=True)
class Rtn:
    """Round every weight to its nearest code.

    ``scheme`` holds where no planner chose another. ``search`` looks for the scales with the least squared weight
    error; without it, scales are those of the largest weight (min/max).
    """

    scheme: QuantScheme = QuantScheme(4, 32)
    search: bool = True

    scope: ClassVar[Literal["block"]] = "block"
    reads: ClassVar[frozenset[Resource]] = frozenset({"weights", "plan"})
    writes: ClassVar[frozenset[Resource]] = frozenset({"quantized"})

    def check(self, session: Session) -> Sequence[str]:
        """Plan ``scheme`` for every layer that nobody planned."""
        session.plan_rest(self.scheme)
        return []

    def apply(self, session: Session, block: Block) -> list[LayerRecord]:
        """Quantise every planned layer of the block."""
        from compress.grid import round_to_nearest

        records = []
        for layer, weight in block.weights.items():
            if (scheme := session.plan.get(layer)) is None:
                continue
            block.quantized[layer] = round_to_nearest(weight, scheme, search=self.search, layer=layer)
            bytes_ = session.stored_bits(scheme, session.shapes[layer]) // 8
            records.append(LayerRecord(layer, str(scheme), bytes_))
        return records
