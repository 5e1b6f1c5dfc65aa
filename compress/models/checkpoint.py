"""A Hugging Face checkpoint on disk, read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compress.errors import InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """Config, tokenizer folder and lazily read tensors. ``files`` maps each tensor name to its safetensors file."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    files: Mapping[str, Path]
    _handles: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)

    def _file(self, tensor: str) -> Any:
        path = self.files[tensor]
        if path not in self._handles:
            self._handles[path] = safe_open(path, framework="pt")
        return self._handles[path]

    def tensor(self, name: str) -> Tensor:
        """The tensor in its stored dtype; KeyError if the checkpoint has none of that name."""
        found: Tensor = self._file(name).get_tensor(name)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, without reading it."""
        return tuple(self._file(name).get_slice(name).get_shape())

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
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise InputError(
            "no config.json in the model folder", where=str(folder), fix="give the folder of a saved model"
        )
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"not readable as JSON: {error}", where=str(config_path)) from error
    files = _tensor_files(folder)
    return Checkpoint(folder, name or folder.resolve().name, config, files)


def _tensor_files(folder: Path) -> dict[str, Path]:
    index = folder / INDEX
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        missing = sorted({shard for shard in weight_map.values() if not (folder / shard).is_file()})
        if missing:
            raise InputError(f"the index names files that are not there: {', '.join(missing)}", where=str(index))
        return {tensor: folder / shard for tensor, shard in weight_map.items()}
    single = folder / SINGLE
    if not single.is_file():
        others = sorted(path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pth"})
        found = f"; it has {', '.join(others)}" if others else ""
        raise InputError(
            f"no {SINGLE} or {INDEX} in the model folder{found}",
            where=str(folder),
            fix="save the model with save_pretrained (safetensors)",
        )
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except SafetensorError as error:
        raise InputError(f"damaged safetensors file: {error}", where=str(single)) from error


def scan_finite(checkpoint: Checkpoint, advance: Callable[[int], None]) -> None:
    """Read every tensor once; InputError lists each that holds NaN or infinite values, with their count."""
    bad = []
    for name in checkpoint.files:
        tensor = checkpoint.tensor(name)
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
