"""A Hugging Face checkpoint on disk, read tensor by tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compress.errors import InputError
from compress.models.families import FAMILIES
from compress.models.layout import Place, apart

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of safetensors that a weight may have."""
SHOWN = 20
ROWS_AT_ONCE = 4096
UNMAP_BYTES = 1 << 28
"""Read this much of the files before they are closed and opened again."""


@dataclass(frozen=True)
class Part:
    """A tensor that lies in a larger one of the file; looks like safetensors' view of a tensor."""

    whole: Any
    place: Place

    def __getitem__(self, rows: Any) -> Tensor:
        whole: Tensor = self.whole[self.place.index] if self.place.index else self.whole[:]
        return whole[rows]

    def get_shape(self) -> list[int]:
        """The part's shape; no number is read."""
        return list(self.place.of(torch.empty(*self.whole.get_shape(), device="meta")).shape)

    def get_dtype(self) -> str:
        """In safetensors' words."""
        found: str = self.whole.get_dtype()
        return found


class TensorFiles(Protocol):
    """Gives the tensors of files: ``get_slice(name)`` and ``get_tensor(name)``, as safetensors has them."""

    def get(self, path: Path) -> Any:
        """The open file."""
        ...

    def count(self, nbytes: int) -> None:
        """Note that so many bytes were read."""
        ...


class OpenFiles:
    """safetensors files, opened when they are wanted.

    They are mapped, and pages that were read count as memory of this process until the file is closed: so all are
    closed after every ``UNMAP_BYTES``. A tensor that is still in use keeps its own pages.
    """

    def __init__(self) -> None:
        self._handles: dict[Path, Any] = {}
        self._bytes = 0

    def get(self, path: Path) -> Any:
        """The open file."""
        if path not in self._handles:
            self._handles[path] = safe_open(path, framework="pt")
        return self._handles[path]

    def count(self, nbytes: int) -> None:
        """Note that so many bytes were read."""
        self._bytes += nbytes
        if self._bytes > UNMAP_BYTES:
            self._handles.clear()
            self._bytes = 0


@dataclass(frozen=True)
class Checkpoint:
    """Config, tokenizer folder and lazily read tensors. ``files`` maps each tensor name to its file.

    ``parts`` has the tensors that lie in others: name -> (tensor of the file, place in it). ``opened`` reads them:
    safetensors, if nothing else is said.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    files: Mapping[str, Path]
    parts: Mapping[str, tuple[str, Place]] = field(default_factory=dict)
    opened: TensorFiles = field(default_factory=OpenFiles, repr=False, compare=False)
    remarks: tuple[str, ...] = ()
    """What a report on the model should say."""

    def _file(self, tensor: str) -> Any:
        return self.opened.get(self.files[tensor])

    def tensor(self, name: str) -> Tensor:
        """The tensor in its stored dtype; KeyError if the checkpoint has none of that name."""
        found: Tensor = self.slice(name)[:] if name in self.parts else self._file(name).get_tensor(name)
        self.opened.count(found.nbytes)
        return found

    def slice(self, name: str) -> Any:
        """safetensors' view of the tensor: rows of it can be read alone."""
        if name not in self.parts:
            return self._file(name).get_slice(name)
        stored, place = self.parts[name]
        return Part(self._file(name).get_slice(stored), place)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, without reading it."""
        return tuple(self.slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The tensor's type in safetensors' words (``BF16``), without reading it."""
        found: str = self.slice(name).get_dtype()
        return found

    @property
    def bytes(self) -> int:
        """Size of the weight files."""
        return sum(path.stat().st_size for path in set(self.files.values()))


def open_checkpoint(folder: Path, name: str | None = None) -> Checkpoint:
    """Open ``folder`` (config.json and safetensors, sharded or not); InputError says what is missing or damaged."""
    if not folder.is_dir():
        raise InputError(
            "no such model folder", where=str(folder), fix="give a folder with config.json and safetensors"
        )
    if not (folder / "config.json").is_file():
        raise InputError(
            "no config.json in the model folder", where=str(folder), fix="give the folder of a saved model"
        )
    config = _json_object(folder / "config.json")
    index = folder / INDEX
    files = _indexed_files(index) if index.is_file() else dict.fromkeys(_names(_single_file(folder)), folder / SINGLE)
    checkpoint = _taken_apart(Checkpoint(folder, name or folder.resolve().name, config, files))
    _refuse_quantised(checkpoint)
    return checkpoint


def _taken_apart(checkpoint: Checkpoint) -> Checkpoint:
    """Fused experts as one tensor for each of them, under the names that the family's checkpoints usually have."""
    family, files = FAMILIES.get(str(checkpoint.config.get("model_type"))), checkpoint.files
    if family is None or family.experts is None:
        return checkpoint
    names = {f".{name}" for name in (*family.experts.fused, *family.experts.renamed)}
    shapes = {name: checkpoint.shape(name) for name in files if any(map(name.endswith, names))}
    parts = apart(family, shapes)
    apart_files = {name: path for name, path in files.items() if name not in shapes}
    apart_files |= {name: files[stored] for name, (stored, _) in parts.items()}
    return replace(checkpoint, files=apart_files, parts=parts)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"not readable as JSON: {error}", where=str(path)) from error
    if not isinstance(found, dict):
        raise InputError("not a JSON object", where=str(path), fix="copy the file again from the saved model")
    return found


def _indexed_files(index: Path) -> dict[str, Path]:
    """Tensor -> shard, once every shard is there, whole, and holds what the index says."""
    weight_map = _json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError("the index has no weight_map", where=str(index), fix="copy the file again")
    problems = []
    for shard in sorted(set(weight_map.values())):
        path = index.parent / shard
        if not path.is_file():
            problems.append(f"{shard}: not there")
            continue
        try:
            held = set(_names(path))
        except InputError as error:
            problems.append(f"{shard}: {error.what}")
            continue
        absent = [tensor for tensor, place in weight_map.items() if place == shard and tensor not in held]
        if absent:
            problems.append(f"{shard}: lacks {absent[0]}" + (f" and {len(absent) - 1} more" if absent[1:] else ""))
    if problems:
        raise InputError(
            "the checkpoint is not complete\n" + "\n".join(problems), where=str(index), fix="copy these files again"
        )
    return {tensor: index.parent / shard for tensor, shard in weight_map.items()}


def _single_file(folder: Path) -> Path:
    single = folder / SINGLE
    if not single.is_file():
        others = sorted(path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pth"})
        found = f"; it has {', '.join(others)}" if others else ""
        raise InputError(
            f"no {SINGLE} or {INDEX} in the model folder{found}",
            where=str(folder),
            fix="save the model with save_pretrained (safetensors)",
        )
    return single


def _names(path: Path) -> list[str]:
    """Names of the tensors in a safetensors file, whose size has been checked against its header."""
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"damaged safetensors file: {error}", where=str(path), fix="download or copy it again"
        ) from error


def _refuse_quantised(checkpoint: Checkpoint) -> None:
    quantised = checkpoint.config.get("quantization_config")
    names = [name for name in checkpoint.files if checkpoint.dtype(name) not in FLOATS] if quantised else []
    if names:
        method = quantised.get("quant_method", "") if isinstance(quantised, dict) else ""
        raise InputError(
            f"the checkpoint is already quantised{f' ({method})' if method else ''}: {len(names)} tensors are "
            f"not floating point, {names[0]} for one",
            where=str(checkpoint.folder),
            fix="give the original checkpoint",
        )


def check_tensors(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], tied_head: str | None, embedding: str
) -> None:
    """Compare the files with the parameters that ``config.json`` promises (name -> shape).

    InputError lists every tensor that is missing, has another shape or no floating-point type, or that the model would
    ignore. ``tied_head`` may be there too, if it equals ``embedding``.
    """
    problems = []
    for name, shape in shapes.items():
        if name not in checkpoint.files:
            problems.append(f"{name}: missing")
        elif checkpoint.shape(name) != shape:
            problems.append(f"{name}: {list(checkpoint.shape(name))} in the file, {list(shape)} by config.json")
        elif checkpoint.dtype(name) not in FLOATS:
            problems.append(f"{name}: {checkpoint.dtype(name)} is not a floating-point type")
    known = {*shapes, tied_head}
    unknown = [name for name in checkpoint.files if name.endswith((".weight", ".bias")) and name not in known]
    problems += [f"{name}: config.json knows no such tensor" for name in unknown]
    twice = tied_head if tied_head in checkpoint.files else None
    if twice is not None and not problems and not _equal(checkpoint, twice, embedding):
        problems.append(f"{tied_head}: config.json says it is the embedding (tie_word_embeddings), and it differs")
    if problems:
        shown = problems[:SHOWN] + ([f"... and {len(problems) - SHOWN} more"] if problems[SHOWN:] else [])
        raise InputError(
            "config.json and the weights do not belong together\n" + "\n".join(shown),
            where=str(checkpoint.folder),
            fix="save the model and its config.json again, together",
        )


def _equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Whether two tensors are equal, read a few rows at a time."""
    shape = checkpoint.shape(one)
    if shape != checkpoint.shape(other):
        return False
    left, right = checkpoint.slice(one), checkpoint.slice(other)
    starts = range(0, shape[0], ROWS_AT_ONCE)
    return all(torch.equal(left[i : i + ROWS_AT_ONCE], right[i : i + ROWS_AT_ONCE]) for i in starts)


def scan_finite(checkpoint: Checkpoint, advance: Callable[[int], None]) -> str:
    """Read every tensor once: SHA-256 of all weights, with names, types and shapes, in whatever files they are.

    InputError lists each tensor that holds NaN or infinite values, with their count.
    """
    bad, digests = [], {}
    for name in checkpoint.files:
        tensor = checkpoint.tensor(name)
        content = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        content.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        digests[name] = content.hexdigest()
        # One sum over the tensor is much faster than isfinite, and is not finite if any element is not.
        if tensor.is_floating_point() and not torch.isfinite(tensor.sum(dtype=torch.float64)):
            count = int((~torch.isfinite(tensor)).sum())
            if count:
                bad.append(f"{name}: {count} of {tensor.numel()} values are NaN or infinite")
        advance(1)
    if bad:
        raise InputError(
            "the model has values that are not finite\n" + "\n".join(bad),
            where=str(checkpoint.folder),
            fix="repair or re-download the checkpoint: nothing useful can be computed from it",
        )
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
