"""Which artifact a path means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from compress.errors import InputError, nearest
from compress.protocols import Artifact

SUFFIXES: Mapping[str, str] = {".onnx": "onnx", ".gguf": "gguf"}
"""The format that a file's suffix means."""

_PREFERRED_STEM = "model"


def find_artifact(path: Path | str, format: str | None = None) -> Artifact:
    """The artifact at ``path``: its file, its folder, or a run's folder that holds artifacts in subfolders.

    ``format`` chooses where a folder has more than one. InputError says what was looked for, or what there is
    to choose from.
    """
    path = Path(path)
    if not path.exists():
        near = nearest(path.name, [entry.name for entry in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise InputError(f"there is no such file or folder{near}", where=str(path))
    found = [artifact for artifact in list_artifacts(path) if format in (None, artifact.format)]
    if not found:
        wanted = f"*.{format}" if format else " or ".join(f"*{suffix}" for suffix in SUFFIXES)
        places = "this file" if path.is_file() else "this folder and the folders in it"
        raise InputError(
            f"no artifact here: looked for {wanted} in {places}",
            where=str(path),
            fix="give a .onnx or .gguf file, an artifact's folder, or the folder that `compress run` wrote",
        )
    if len(found) > 1:
        listed = "\n".join(f"  {artifact.format}: {artifact.path / artifact.entry}" for artifact in found)
        raise InputError(
            f"{len(found)} artifacts here:\n{listed}",
            where=str(path),
            fix="give one of these paths, or choose with --format",
        )
    return found[0]


def list_artifacts(path: Path | str) -> Sequence[Artifact]:
    """Every artifact at ``path`` itself, or else in the folders right under it, by name. May be empty."""
    path = Path(path).absolute()
    if path.is_file():
        format = SUFFIXES.get(path.suffix.lower())
        return [Artifact(format, path.parent, path.name)] if format else []
    here = _in_folder(path)
    return here or [artifact for folder in sorted(path.iterdir()) if folder.is_dir() for artifact in _in_folder(folder)]


def _in_folder(folder: Path) -> list[Artifact]:
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.suffix.lower() in SUFFIXES)
    found = []
    for suffix, format in SUFFIXES.items():
        alike = [file for file in files if file.suffix.lower() == suffix]
        # A folder of several graphs names its main one "model"; without that name each of them is offered.
        main = [file for file in alike if file.stem == _PREFERRED_STEM]
        found += [Artifact(format, folder, file.name) for file in main or alike]
    return found


def weight_files(entry: Path) -> list[Path]:
    """The file that a runtime opens and the data files named after it (``model.onnx.data``)."""
    return sorted(file for file in entry.parent.iterdir() if file.name.startswith(entry.name) and file.is_file())
