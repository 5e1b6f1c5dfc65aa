"""The tensors of safetensors files by their headers alone: no weight is read, and no library is needed.

Layout: 8 bytes of little-endian length, then as many bytes of JSON, then the data (huggingface/safetensors, README).
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from compress.errors import InputError
from compress.protocols import StoredTensor

CHECKPOINT = "safetensors"
"""What a checkpoint's format is called."""
_LONGEST_HEADER = 100_000_000
_DAMAGED = "the header is damaged or cut short"


def weight_files_of_checkpoint(path: Path) -> list[Path]:
    """The safetensors file at ``path``, or those right in the folder; empty where there are none."""
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    return [path] if path.is_file() and path.suffix == ".safetensors" else []


def read_headers(files: Sequence[Path]) -> tuple[StoredTensor, ...]:
    """Every tensor of ``files`` in the model's order; a matrix named ``NAME.weight`` is the layer NAME.

    InputError for a file that is none.
    """
    return tuple(
        sorted((tensor for file in files for tensor in _tensors(file)), key=lambda tensor: _order(tensor.name))
    )


def _order(name: str) -> list[tuple[bool, int, str]]:
    """Sorts layer 10 behind layer 9."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def _tensors(file: Path) -> Iterator[StoredTensor]:
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _LONGEST_HEADER + 1
        if length > _LONGEST_HEADER:
            raise InputError(_DAMAGED, where=str(file), fix="download or save the file again")
        text = opened.read(length)
    try:
        header = json.loads(text)
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                shape = tuple(entry["shape"])
                layer = name.removesuffix(".weight") if len(shape) == 2 and name.endswith(".weight") else None
                yield StoredTensor(name, entry["dtype"], shape, last - first, layer)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{_DAMAGED} ({error!r})", where=str(file), fix="download or save the file again") from error
