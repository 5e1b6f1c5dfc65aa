"""GGUF files: what their headers say, and their tensors as float32. Imports no torch.

Layout: GGUF specification (ggml-org/ggml, docs/gguf.md). Numbers are decoded by gguf-py.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import InputError

F32 = NDArray[np.float32]

VERSIONS = (2, 3)
READABLE = frozenset(
    {
        *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "TQ1_0", "TQ2_0"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS"),
        *("IQ1_S", "IQ1_M"),
    }
)
"""Types that gguf-py decodes."""
UNQUANTISED = frozenset({"F32", "F16", "BF16"})
SHOWN = 20
CHUNK_BYTES = 1 << 24
"""Float32 bytes that are decoded at a time."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Number of a value's type -> struct's letter for it."""
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
_AGAIN = "download or copy the file again"
_SPLIT = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: ``shape`` outputs first, ``type`` as ggml calls it; ``bytes`` lie at ``offset``."""

    path: Path
    shape: tuple[int, ...]
    type: str
    offset: int
    bytes: int

    def rows(self, start: int, stop: int) -> F32:
        """Rows of the tensor seen as [product of the outer sizes, last size], float32, decoded a few at a time."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        columns = self.shape[-1]
        row_bytes = self.bytes // max(1, math.prod(self.shape[:-1]))
        found = np.empty((stop - start, columns), dtype=np.float32)
        step = max(1, CHUNK_BYTES // (4 * columns))
        with self.path.open("rb") as file:
            for first in range(start, stop, step):
                count = min(step, stop - first)
                file.seek(self.offset + first * row_bytes)
                raw = np.frombuffer(_exactly(file.read(count * row_bytes), count * row_bytes, self.path), np.uint8)
                decoded: F32 = dequantize(raw.reshape(count, row_bytes), GGMLQuantizationType[self.type])
                found[first - start : first - start + count] = decoded
        return found


@dataclass(frozen=True)
class GgufFile:
    """What the header of a file (or of all parts of a split one) says. ``digest``: SHA-256 of the headers."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    digest: str

    def text(self, key: str, default: str = "") -> str:
        """A value of the metadata that is text."""
        return str(self.metadata.get(key, default))


def read_gguf(path: Path, arrays: bool = True) -> GgufFile:
    """Read the header of ``path``, and of the other parts where it is one of several; no tensor is read.

    Without ``arrays`` the metadata has single values only: the vocabulary of a large model is left where it is.

    InputError for a file that is none, is damaged or cut short, or misses parts, and for tensors of unknown types.
    """
    paths = _parts(path)
    headers = [_read_one(part, arrays) for part in paths]
    count = headers[0].metadata.get("split.count", len(paths))
    if count not in (0, len(paths)):
        raise InputError(
            f"the file is one of {count}, and its name does not say which",
            where=str(path),
            fix=f"name all of them as llama.cpp does: NAME-00001-of-{count:05d}.gguf",
        )
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        twice = sorted(header.tensors.keys() & tensors.keys())
        if twice:
            raise InputError(f"a tensor is there twice: {', '.join(twice)}", where=str(header.path), fix=_AGAIN)
        tensors |= header.tensors
    digest = hashlib.sha256("".join(header.digest for header in headers).encode()).hexdigest()
    return GgufFile(paths[0], headers[0].metadata, tensors, digest)


def read_metadata(path: Path) -> Mapping[str, Any]:
    """The single values of a file's metadata; arrays are left out. InputError as :func:`read_gguf`."""
    with _opened(path) as data:
        found, _ = _metadata(_Cursor(data, path), arrays=False)
    return found


def _parts(path: Path) -> list[Path]:
    """Every file of a model that is split by llama.cpp's naming, in order; else ``path`` alone."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    paths = [path.with_name(f"{match['stem']}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise InputError(
            f"the model is split into {count} files, and these are not there: {', '.join(missing)}",
            where=str(path),
            fix="put all of them into one folder",
        )
    return paths


def _read_one(path: Path, arrays: bool) -> GgufFile:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    with _opened(path) as data:
        cursor = _Cursor(data, path)
        metadata, tensors = _metadata(cursor, arrays)
        listed = [_listed(cursor) for _ in range(tensors)]
        end = cursor.position
        digest = hashlib.sha256(data[:end]).hexdigest()
        size = len(data)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise InputError(f"the header is damaged: tensors aligned to {alignment}", where=str(path), fix=_AGAIN)
    start = -(-end // alignment) * alignment
    known = {int(kind): kind for kind in GGMLQuantizationType}
    found: dict[str, TensorInfo] = {}
    problems, cut = [], []
    for name, shape, number, offset in listed:
        kind = known[number].name if number in known else f"number {number}"
        if kind not in READABLE:
            problems.append(f"{name}: type {kind} is not known; known: {', '.join(sorted(READABLE))}")
            continue
        block, block_bytes = GGML_QUANT_SIZES[known[number]]
        count = math.prod(shape)
        if not count or shape[-1] % block or name in found:
            problems.append(f"{name}: {list(shape)} of {kind} is no tensor of whole blocks, or is there twice")
            continue
        found[name] = TensorInfo(path, shape, kind, start + offset, count // block * block_bytes)
        if found[name].offset + found[name].bytes > size:
            cut.append(name)
    if problems:
        raise InputError("\n".join(_shown(problems)), where=str(path), fix="give a file of other types, or " + _AGAIN)
    if cut:
        raise InputError(
            f"the file is cut short at {size} bytes: {len(cut)} of {len(found)} tensors end beyond, as {cut[0]} does",
            where=str(path),
            fix=_AGAIN,
        )
    return GgufFile(path, metadata, found, digest)


def _shown(problems: Sequence[str]) -> list[str]:
    return [*problems[:SHOWN], *([f"... and {len(problems) - SHOWN} more"] if problems[SHOWN:] else [])]


@contextmanager
def _opened(path: Path) -> Iterator[mmap.mmap]:
    """The bytes of a file, mapped while the context lasts; InputError where there is no such file."""
    if not path.is_file():
        raise InputError("there is no such file", where=str(path))
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise InputError("the file is empty", where=str(path), fix=_AGAIN)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise InputError(f"the file cannot be read: {error}", where=str(path)) from error
    try:
        yield data
    finally:
        data.close()


class _Cursor:
    """Reads a header value by value; InputError where it ends early."""

    def __init__(self, data: Any, path: Path) -> None:
        self._data, self._path, self.position = data, path, 0

    def take(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        return _exactly(self._data[start : start + count], count, self._path)

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", self.take(struct.calcsize(f"<{layout}")))

    def text(self) -> str:
        (length,) = self.unpack("Q")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise InputError(f"the header is damaged: {error}", where=str(self._path), fix=_AGAIN) from error

    def value(self, kind: int, arrays: bool) -> Any:
        """A value of a type; None for an array where those are not wanted."""
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])[0]
        if kind != _ARRAY:
            raise InputError(f"the header is damaged: a value of type {kind}", where=str(self._path), fix=_AGAIN)
        inner, count = self.unpack("IQ")
        if inner in _SCALARS:
            numbers = np.frombuffer(self.take(count * struct.calcsize(f"<{_SCALARS[inner]}")), f"<{_SCALARS[inner]}")
            return numbers.tolist() if arrays else None
        if arrays:
            return [self.value(inner, arrays) for _ in range(count)]
        for _ in range(count):
            self.value(inner, arrays)
        return None


def _exactly(data: bytes, count: int, path: Path) -> bytes:
    if len(data) != count:
        raise InputError("the file is cut short", where=str(path), fix=_AGAIN)
    return data


def _metadata(cursor: _Cursor, arrays: bool) -> tuple[dict[str, Any], int]:
    """(values by key, how many tensors are listed behind them)."""
    path = str(cursor._path)
    if cursor.take(4) != b"GGUF":
        raise InputError("this is no GGUF file: it does not begin with GGUF", where=path, fix="give a .gguf file")
    (version,) = cursor.unpack("I")
    if version not in VERSIONS:
        ends = " (its bytes are in the other order)" if version.to_bytes(4, "big") in map(_little, VERSIONS) else ""
        raise InputError(
            f"a GGUF file of version {version}{ends}; versions {' and '.join(map(str, VERSIONS))} are read",
            where=path,
            fix="convert the model again with a recent llama.cpp",
        )
    tensors, keys = cursor.unpack("QQ")
    found = {}
    for _ in range(keys):
        key = cursor.text()
        (kind,) = cursor.unpack("I")
        value = cursor.value(kind, arrays)
        if value is not None:
            found[key] = value
    return found, tensors


def _little(version: int) -> bytes:
    return version.to_bytes(4, "little")


def _listed(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape with the outputs first, number of the type, offset) of the next tensor."""
    name, (dimensions,) = cursor.text(), cursor.unpack("I")
    shape = cursor.unpack(f"{dimensions}Q")[::-1]
    number, offset = cursor.unpack("IQ")
    return name, shape or (1,), number, offset


def stored_types(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, int]]:
    """(type, how many tensors have it), most first."""
    kinds = [info.type for info in tensors.values()]
    yield from sorted(((kind, kinds.count(kind)) for kind in set(kinds)), key=lambda pair: -pair[1])
