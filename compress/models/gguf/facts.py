"""What a GGUF file says of its model, under the architecture's name."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compress.errors import InputError
from compress.models.gguf.header import F32, GgufFile


def decimal(value: float) -> float:
    """The shortest decimal that is the same float32: what was written before it was rounded to that."""
    return float(str(np.float32(value)))


@dataclass
class Facts:
    """A file's metadata under its architecture's name; notes what is missing."""

    file: GgufFile
    missing: list[str] = field(default_factory=list)

    @property
    def architecture(self) -> str:
        """llama.cpp's name."""
        return self.file.text("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """A value; InputError where it differs from block to block."""
        found = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(found, list):
            if len(set(found)) > 1:
                raise InputError(
                    f"{self.architecture}.{key} differs from block to block: {found}",
                    where=str(self.file.path),
                    fix="no family here has such blocks",
                )
            found = found[0] if found else default
        return decimal(found) if isinstance(found, float) else found

    def need(self, key: str) -> Any:
        """A value that must be there; 0 where it is missing, which is noted."""
        found = self.get(key)
        if found is None:
            self.missing.append(f"{self.architecture}.{key}")
            return 0
        return found

    def tensor(self, name: str) -> F32:
        """A small tensor, flat."""
        info = self.file.tensors[name]
        return info.rows(0, math.prod(info.shape[:-1])).reshape(-1)
