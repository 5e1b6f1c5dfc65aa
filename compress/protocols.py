"""What a pass, an exporter and a runtime are. Whoever has these methods is one: no base class is needed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from compress.scheme import QuantScheme

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from compress.kv import KVScheme
    from compress.models.checkpoint import Checkpoint
    from compress.models.topology import DecoderSpec
    from compress.report import LayerRecord, PassRecord
    from compress.session import Block, CompressedModel, Session

Resource = Literal["weights", "inputs", "activations", "plan", "quantized", "residual", "kv", "levels"]
"""What passes hand on: weights, statistics of layer inputs, what enters a block, plans, quantised layers, what lies
beside them, the scales of a key/value cache, layers whose activations are not rounded."""


class Planner(Protocol):
    """A pass over the whole model that runs before any block is quantised, and writes ``session.plan``.

    A frozen dataclass: its fields are its arguments in the recipe.
    """

    scope: ClassVar[Literal["model"]]
    reads: ClassVar[frozenset[Resource]]
    writes: ClassVar[frozenset[Resource]]

    @property
    def plans_ends(self) -> bool:
        """Whether it plans the embedding and the head too, which otherwise are pinned to 8 bits."""
        ...

    def check(self, session: Session) -> Sequence[str]:
        """Complaints about this model, one an offender, before any work; empty when all is well."""
        ...

    def candidates(self, session: Session) -> Sequence[Mapping[str, QuantScheme]]:
        """Plans that between them hold every scheme that each layer may get: exporters check them before any work."""
        ...

    def kept_windows(self, samples: int) -> int:
        """Of ``samples`` calibration windows, those whose hidden states before every block it keeps at the same time.

        Room is asked for by it.
        """
        ...

    def apply(self, session: Session) -> PassRecord:
        """Do it, and say what was done.

        What it hands on in the session is the plan, and other fields that map layers to tensors.
        """
        ...


class BlockPass(Protocol):
    """A pass that sees one block at a time: a transform (writes weights) or a quantiser (writes quantized).

    A frozen dataclass: its fields are its arguments in the recipe.
    """

    scope: ClassVar[Literal["block"]]
    reads: ClassVar[frozenset[Resource]]
    writes: ClassVar[frozenset[Resource]]

    def check(self, session: Session) -> Sequence[str]:
        """Complaints about this model, one an offender, before any work. A quantiser fills an empty plan here."""
        ...

    def apply(self, session: Session, block: Block) -> Sequence[LayerRecord]:
        """Do it to ``block``, and say what was done to each layer."""
        ...


class SourcePass(Protocol):
    """A pass that turns the checkpoint into another that computes the same, before anything else looks at it.

    A frozen dataclass: its fields are its arguments in the recipe.
    """

    scope: ClassVar[Literal["source"]]
    reads: ClassVar[frozenset[Resource]]
    writes: ClassVar[frozenset[Resource]]

    def rewrite(self, checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, Any]]:
        """The other checkpoint, its tensors computed when they are read, and the summary for the report.

        Its config may differ too (a head that is no longer the embedding). InputError for a model that it cannot take.
        """
        ...

    def check(self, session: Session) -> Sequence[str]:
        """Complaints about this model, one an offender, before any work; empty when all is well."""
        ...


Pass = SourcePass | Planner | BlockPass
SCOPES = ("source", "model", "block")
"""In the order in which they run."""


@dataclass(frozen=True)
class Artifact:
    """Files that a stock runtime loads. ``path`` is their folder, ``entry`` the file that the runtime opens."""

    format: str
    path: Path
    entry: str


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as an artifact stores it: ``type`` in the format's words, ``bytes`` with scales and zero points."""

    name: str
    type: str
    shape: tuple[int, ...]
    bytes: int
    layer: str | None = None
    """The layer of the model whose weight this holds, if it is one."""


class Exporter(Protocol):
    """Writes a compressed model as one format. A frozen dataclass: its fields are its arguments in the recipe.

    It may have two attributes more: ``holds_residual``, True where a low-rank product can lie beside a layer (recipes
    with one are refused else), and ``has_levels``, True where the file says layer by layer if activations are rounded.
    """

    format: ClassVar[str]
    reader: ClassVar[str]
    """The library, not ours, that :meth:`read_back` uses."""

    @property
    def parity_kld(self) -> float:
        """Highest mean KLD (nats) against the fake-quantised torch model, activations not rounded where it can be."""
        ...

    def check_tokenizer(self, folder: Path, vocab_size: int) -> Sequence[str]:
        """Remarks for the report about the tokenizer in ``folder``; InputError if the format cannot hold it."""
        ...

    def check(
        self,
        spec: DecoderSpec,
        plan: Mapping[str, QuantScheme],
        shapes: Mapping[str, tuple[int, int]],
        kv: KVScheme | None = None,
        biased: Collection[str] = (),
    ) -> Sequence[str]:
        """Complaints (layer, shape, why, and what would do), one an offender, before any work; also about the cache.

        ``biased`` are the layers that have a bias.
        """
        ...

    def remarks(self, spec: DecoderSpec, plan: Mapping[str, QuantScheme]) -> Sequence[str]:
        """What a user of a file of this model with such layers should know; for the report."""
        ...

    def context_length(self, spec: DecoderSpec) -> int:
        """Tokens of the longest sequence that a file computes as the model does: its positions, or fewer."""
        ...

    def one_scheme(self, spec: DecoderSpec) -> Sequence[Sequence[str]]:
        """Layers that must have one scheme, as the file has one tensor or one product for them; disjoint."""
        ...

    def stored_bits(self, scheme: QuantScheme | None, shape: tuple[int, int]) -> int:
        """Bits that the file holds for a linear layer [out, in], scales and zero points included.

        None is a layer in floating point. Any number will do for a scheme that :meth:`check` refuses.
        """
        ...

    def write(self, model: CompressedModel, out: Path) -> Artifact:
        """Write the files into the empty folder ``out``; OSError (disk full, ...) passes through."""
        ...

    def read_back(self, artifact: Artifact, layers: Sequence[str]) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """(layer, float32 [out, in] in the checkpoint's own row order) of each weight, by the independent reader."""
        ...

    def inspect(self, artifact: Artifact) -> Sequence[StoredTensor]:
        """Every tensor in the files. Reads headers only."""
        ...


class Runtime(Protocol):
    """Runs one artifact, sequence by sequence. Lives in :mod:`compress.runner`; imports no torch."""

    @classmethod
    def exact(cls) -> Runtime | None:
        """A runtime that computes the same file without rounding activations, or None where the library cannot."""
        ...

    def load(self, entry: Path, threads: int, context: int) -> None:
        """Open the file for at most ``context`` tokens."""
        ...

    def prefill(self, tokens: NDArray[np.int64], all_logits: bool = False) -> NDArray[np.float32]:
        """Start a new sequence; logits [vocab] after the last token, or [tokens, vocab]."""
        ...

    def decode(self, token: int) -> NDArray[np.float32]:
        """Append one token; logits [vocab]."""
        ...

    def describe(self) -> dict[str, Any]:
        """Library version and the number of threads it really uses."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...
