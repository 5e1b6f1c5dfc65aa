"""Plain rounding to nearest, with a search for the scales. Needs no calibration data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from compress.errors import InputError
from compress.protocols import Resource
from compress.report import LayerRecord
from compress.scheme import QuantScheme

if TYPE_CHECKING:
    from torch import Tensor

    from compress.session import Block, Session


@dataclass(frozen=True)
class Rtn:
    """Round every weight to its nearest code.

    ``scheme`` holds where no planner chose another. ``search`` looks for the scales with the least squared weight
    error; without it, scales are those of the largest weight (min/max). ``importance``: an importance matrix of
    llama.cpp (``compress imatrix`` writes one); the error of each weight then counts by the mean square of its input.
    """

    scheme: QuantScheme = QuantScheme(4, 32)
    search: bool = True
    importance: Path | None = None

    scope: ClassVar[Literal["block"]] = "block"
    reads: ClassVar[frozenset[Resource]] = frozenset({"weights", "plan"})
    writes: ClassVar[frozenset[Resource]] = frozenset({"quantized"})

    def __post_init__(self) -> None:
        if self.importance is not None and not self.search:
            raise ValueError("importance: only the search for scales weighs weights; leave search at true")

    def check(self, session: Session) -> Sequence[str]:
        """Plan ``scheme`` for every layer that nobody planned; complaints where the importance is another model's."""
        session.plan_rest(self.scheme)
        if self.importance is None:
            return []
        from compress.models.gguf.imatrix import misfits, read_imatrix

        try:
            found = misfits(read_imatrix(self.importance), session.decoder.spec, session.shapes)
        except InputError as error:
            return [f"rtn.importance: {error}"]
        return [f"rtn.importance: {self.importance}: {text}" for text in found]

    def apply(self, session: Session, block: Block) -> list[LayerRecord]:
        """Quantise every planned layer of the block."""
        from compress.grid import round_to_nearest

        weighed = self._weighed(session, block)
        records = []
        for layer, weight in block.weights.items():
            if (scheme := session.plan.get(layer)) is None:
                continue
            counts, fallback = weighed.get(layer, (None, None))
            block.quantized[layer] = round_to_nearest(weight, scheme, counts, self.search, layer)
            bytes_ = session.stored_bits(scheme, session.shapes[layer]) // 8
            records.append(LayerRecord(layer, str(scheme), bytes_, fallback=fallback))
        return records

    def _weighed(self, session: Session, block: Block) -> dict[str, tuple[Tensor | None, str | None]]:
        """Layer -> (what each input counts [in], why they count all the same); an embedding has no inputs."""
        if self.importance is None:
            return {}
        import torch

        from compress.models.gguf.imatrix import entry_of, read_imatrix

        spec, imatrix = session.decoder.spec, read_imatrix(self.importance)
        entries, found = entry_of(spec), {}
        for layer in block.weights:
            name, matrix = entries.get(layer, ("", 0))
            if name in imatrix.sums:
                squares = imatrix.mean_squares(name, matrix)
                counts = None if squares is None else torch.from_numpy(squares)
                found[layer] = (counts, "no token reached it in the importance matrix" if counts is None else None)
            elif layer != spec.family.embedding or spec.tied:
                found[layer] = (None, "no entry in the importance matrix")
        return found
