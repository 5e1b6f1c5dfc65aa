"""Folders that are made once and kept."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """``$EDGEPRESS_CACHE``, or ``edgepress`` in the user's cache folder."""
    if own := os.environ.get("EDGEPRESS_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "edgepress"


def make_once(folder: Path, write: Callable[[Path], None]) -> None:
    """``write`` fills a temporary folder that takes the name ``folder`` when it is complete; nothing if that is there.

    Several processes may do it at the same time. OSError passes through.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(partial)
        try:
            partial.rename(folder)
        except OSError:
            # Another process finished the same first.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
