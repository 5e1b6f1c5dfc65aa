"""Hidden states of all calibration windows: in memory while they are small, else in a file, read piece by piece.

The file is read and written with plain calls: pages of a memory map would count as memory of the process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

IN_MEMORY_BYTES = 1 << 28
"""What all hidden states of a run together may hold in memory, before further ones go to a file."""
FLOAT_BYTES = 4


class Activations:
    """float32 [windows, length, hidden], in memory, or in ``file``. Indexed by a slice of windows.

    What is read is a copy: its numbers, and how it lies in memory, are the same wherever it came from.
    """

    def __init__(self, shape: tuple[int, int, int], file: Path | None = None) -> None:
        import torch

        self.shape, self.file = shape, file
        self._memory = torch.empty(shape) if file is None else None
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Size of all of them, wherever they are."""
        return FLOAT_BYTES * math.prod(self.shape)

    def __getitem__(self, windows: slice) -> Tensor:
        import torch

        if self._memory is not None:
            return self._memory[windows].clone()
        start, count = self._range(windows)
        found = torch.empty(count, *self.shape[1:])
        with self._path().open("rb") as file:
            file.seek(start * self._window_bytes)
            if file.readinto(found.numpy().data.cast("B")) != found.nbytes:
                raise ValueError(f"windows {start} to {start + count} were never written to {self.file}")
        return found

    def __setitem__(self, windows: slice, values: Tensor) -> None:
        import torch

        if self._memory is not None:
            self._memory[windows] = values
            return
        start, count = self._range(windows)
        if tuple(values.shape) != (count, *self.shape[1:]):
            raise ValueError(f"{list(values.shape)} does not fit {count} windows of {list(self.shape[1:])}")
        with self._path().open("r+b") as file:
            file.seek(start * self._window_bytes)
            file.write(values.detach().to(torch.float32).contiguous().numpy().data.cast("B"))

    def close(self) -> None:
        """Give memory or disk back; nothing can be read any more."""
        self._memory = None
        if self.file is not None:
            self.file.unlink(missing_ok=True)

    @property
    def _window_bytes(self) -> int:
        return FLOAT_BYTES * self.shape[1] * self.shape[2]

    def _range(self, windows: slice) -> tuple[int, int]:
        start, stop, step = windows.indices(len(self))
        if step != 1:
            raise ValueError("windows are read one after another")
        return start, max(stop - start, 0)

    def _path(self) -> Path:
        if self.file is None:
            raise ValueError("these hidden states were closed")
        return self.file


@dataclass
class Spool:
    """Makes room for hidden states: in memory up to ``limit_bytes`` together, then in files under ``folder``.

    Without a folder everything is in memory.
    """

    folder: Path | None = None
    limit_bytes: int = IN_MEMORY_BYTES
    _made: list[Activations] = field(default_factory=list, repr=False)

    def room(self, shape: tuple[int, int, int]) -> Activations:
        """Room for float32 ``shape`` [windows, length, hidden]; :meth:`Activations.close` gives it back."""
        held = sum(one.nbytes for one in self._made if one._memory is not None)
        wanted = FLOAT_BYTES * math.prod(shape)
        file = None
        if self.folder is not None and held + wanted > self.limit_bytes:
            file = self.folder / f"{len(self._made)}.bin"
        made = Activations(shape, file)
        self._made.append(made)
        return made
