"""A checkpoint whose tensors are computed from another's at the moment they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from compress.models.checkpoint import Checkpoint


@dataclass(frozen=True)
class Rewritten(Checkpoint):
    """Like the checkpoint that it was made from, but for the tensors named in ``computed``.

    ``computed`` gives float32 tensors. One may be new (a head that is no longer the embedding): ``shapes`` has its
    shape, and ``files`` the file it comes from. The others keep their shapes.
    """

    computed: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict, repr=False, compare=False)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def tensor(self, name: str) -> Tensor:
        """The tensor, float32 where it is computed, else in its stored dtype; KeyError if there is none."""
        compute = self.computed.get(name)
        return super().tensor(name) if compute is None else compute()

    def slice(self, name: str) -> Any:
        """Something whose rows can be read by slicing; a computed tensor is computed whole."""
        compute = self.computed.get(name)
        return super().slice(name) if compute is None else compute()

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, without reading it."""
        return self.shapes[name] if name in self.shapes else tuple(super().slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The tensor's type in safetensors' words (``BF16``), without reading it."""
        return "F32" if name in self.computed else str(super().slice(name).get_dtype())
