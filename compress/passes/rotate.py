"""QuaRot: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", NeurIPS 2024; its offline parts.

A network with RMS norms computes the same when its residual stream is turned by an orthogonal matrix and every weight
that reads or writes it is turned with it (sec. 4, stage 1a, "R1"). Channels with large values are spread over all
others, and so are the weights that belong to them. The value heads are turned likewise between v and o (stage 1c's
part that needs no operation at run time).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.errors import InputError
from compress.protocols import Resource

if TYPE_CHECKING:
    from torch import Tensor

    from compress.models.checkpoint import Checkpoint
    from compress.models.topology import DecoderSpec
    from compress.rotation import Rotation
    from compress.session import Session

Compute = Callable[[], "Tensor"]
Turn = Callable[["Tensor"], "Tensor"]


@dataclass(frozen=True)
class Rotate:
    """Turn the residual stream and the value heads, so that no channel sticks out; the model computes the same.

    ``residual`` turns the stream between the blocks: a head that is the embedding becomes a matrix of its own, since
    the final norm's gains go into it alone. With ``keep_tied`` it does not: the graph itself turns the stream back for
    those gains, and forth again. ``heads`` turns the value heads. ``seed`` draws the signs (and what no Hadamard matrix
    fits).
    """

    residual: bool = True
    heads: bool = True
    seed: int = 0
    keep_tied: bool = False

    scope: ClassVar[Literal["source"]] = "source"
    reads: ClassVar[frozenset[Resource]] = frozenset({"weights"})
    writes: ClassVar[frozenset[Resource]] = frozenset({"weights"})

    def __post_init__(self) -> None:
        if not (self.residual or self.heads):
            raise ValueError("residual and heads are both false: there is nothing to rotate")
        if self.seed < 0:
            raise ValueError(f"seed: {self.seed} is negative")
        if self.keep_tied and not self.residual:
            raise ValueError("keep_tied: without residual a tied head stays tied anyway: leave it out")

    def check(self, session: Session) -> Sequence[str]:
        """Nothing is left to complain about: :meth:`rewrite` has met the model before."""
        return []

    def rewrite(self, checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, Any]]:
        """The rotated model, each tensor computed in float64 when it is read; and what was done, for the report.

        InputError for a family whose norms do not let a rotation through.
        """
        from compress.models.rewritten import Rewritten
        from compress.models.topology import STREAM_ROTATION, describe

        spec = describe(checkpoint.config, checkpoint.folder / "config.json")
        self._refuse(checkpoint, spec)
        work = _Rotated(checkpoint, spec, self)
        family = spec.family
        head, embedding = f"{family.head}.weight", f"{family.embedding}.weight"
        files, config = dict(checkpoint.files), dict(checkpoint.config)
        shapes: dict[str, tuple[int, ...]] = {}
        if work.in_graph:
            config[STREAM_ROTATION] = self.seed
        if work.unties:
            files[head] = files[embedding]
            shapes[head] = checkpoint.shape(embedding)
            config["tie_word_embeddings"] = False
        elif spec.tied:
            # A copy of the embedding under the head's name would no longer be one.
            files.pop(head, None)
        rewritten = Rewritten(
            checkpoint.folder,
            checkpoint.name,
            config,
            files,
            checkpoint.parts,
            checkpoint.opened,
            computed=work.computed(),
            shapes=shapes,
        )
        return rewritten, work.summary()

    def _refuse(self, checkpoint: Checkpoint, spec: DecoderSpec) -> None:
        norms = spec.family.norms
        after = [norms[role] for role in ("attention_out", "feed_forward_out") if role in norms]
        if self.residual and after:
            raise InputError(
                f"rotate: the residual stream of '{spec.family.name}' cannot be turned: the gains of "
                f"{' and '.join(after)} multiply what is added to it, channel by channel",
                where=str(checkpoint.folder),
                fix="turn the value heads alone, rotate: {residual: false}, or leave rotate out",
            )


class _Rotated:
    """What each tensor of the rotated model is computed from. Rows are the paper's X: x becomes x R."""

    def __init__(self, source: Checkpoint, spec: DecoderSpec, how: Rotate) -> None:
        from compress.rotation import make_rotation

        self.source, self.spec = source, spec
        self.stream = make_rotation(spec.hidden_size, how.seed) if how.residual else None
        # Another draw than the stream's, should the widths be equal.
        self.value = make_rotation(spec.head_dim, how.seed + 1) if how.heads else None
        apart = self.stream is not None and spec.tied and not self._constant_final_gain()
        self.in_graph, self.unties = apart and how.keep_tied, apart and not how.keep_tied

    def summary(self) -> dict[str, Any]:
        """What was turned by which matrix, and whether the graph turns the final norm's gains."""
        kinds = {"residual": self.stream, "heads": self.value}
        named: dict[str, Any] = {part: found.kind for part, found in kinds.items() if found is not None}
        return {**named, "unties_head": self.unties, "in_graph": self.in_graph}

    def computed(self) -> dict[str, Compute]:
        """Tensor -> how it is computed, for every tensor that changes."""
        found: dict[str, Compute] = {}
        for index in range(self.spec.layers):
            found |= self._block(index)
        if self.stream is not None:
            found |= self._ends(self.stream)
        return found

    def _block(self, index: int) -> dict[str, Compute]:
        from compress.models.folding import norm_readers, residual_writers, value_rows

        spec = self.spec
        steps: dict[str, list[Turn]] = {}
        found: dict[str, Compute] = {}
        if self.stream is not None:
            for norm, readers in norm_readers(spec, index).items():
                found[f"{norm}.weight"] = self._unit_gain(f"{norm}.weight")
                for layer in readers:
                    steps[f"{layer}.weight"] = [self._reads(self.stream, f"{norm}.weight")]
        if self.value is not None:
            values = value_rows(spec, index)
            for name in (f"{values.layer}.weight", f"{values.layer}.bias"):
                steps.setdefault(name, []).append(_left_by_head(self.value, values.rows))
            steps[f"{spec.linear(index, 'o')}.weight"] = [_right_by_head(self.value)]
        if self.stream is not None:
            for layer in residual_writers(spec, index):
                for name in (f"{layer}.weight", f"{layer}.bias"):
                    steps.setdefault(name, []).append(self.stream.left)
        return found | {name: self._turned(name, turns) for name, turns in steps.items() if name in self.source.files}

    def _turned(self, name: str, turns: Sequence[Turn]) -> Compute:
        def compute() -> Tensor:
            tensor = self._read(name).double()
            # A bias [out] is turned as a matrix of one column.
            matrix = tensor.reshape(len(tensor), -1)
            for turn in turns:
                matrix = turn(matrix)
            return matrix.reshape(tensor.shape).float().contiguous()

        return compute

    def _reads(self, stream: Rotation, norm: str) -> Turn:
        return lambda weight: stream.right(weight, self._gain(norm))

    def _ends(self, stream: Rotation) -> dict[str, Compute]:
        family = self.spec.family
        embedding, head, norm = (f"{name}.weight" for name in (family.embedding, family.head, family.final_norm))
        found: dict[str, Compute] = {embedding: lambda: stream.right(self._read(embedding))}
        if self.unties or not self.spec.tied:
            origin = embedding if self.spec.tied else head
            found[head] = lambda: stream.right(self._read(origin), self._gain(norm))
            found[norm] = self._unit_gain(norm)
        return found

    def _read(self, name: str) -> Tensor:
        return self.source.tensor(name).float()

    def _gain(self, norm: str) -> Tensor:
        """What the norm multiplies by, float64."""
        return self._read(norm).double() + self.spec.family.norm_offset

    def _unit_gain(self, norm: str) -> Compute:
        import torch

        return lambda: torch.full(self.source.shape(norm), 1.0 - self.spec.family.norm_offset)

    def _constant_final_gain(self) -> bool:
        gain = self._gain(f"{self.spec.family.final_norm}.weight")
        return bool((gain == gain[0]).all())


def _right_by_head(rotation: Rotation) -> Turn:
    """For a matrix [rows, heads * width]: the columns of each head turned."""
    return lambda matrix: rotation.right(matrix.reshape(-1, rotation.width)).reshape(matrix.shape)


def _left_by_head(rotation: Rotation, rows: slice) -> Turn:
    """For a matrix whose ``rows`` are [heads * width, columns]: the rows of each head turned."""

    def turn(matrix: Tensor) -> Tensor:
        matrix = matrix.clone()
        matrix[rows] = _right_by_head(rotation)(matrix[rows].T).T
        return matrix

    return turn
