"""What a benchmark is called with in its test."""

from __future__ import annotations

from pathlib import Path

from tests.compress.runs import sentences


def command(name: str, model: Path, folder: Path, *more: str, words: int = 1500) -> list[str]:
    """A benchmark's arguments, and ``more``: its texts are written to ``folder``, its output is ``folder``/out."""
    texts = []
    for number, part in enumerate(("calibration", "evaluation")):
        (folder / part).write_text(sentences(number, words), encoding="utf-8")
        texts += [f"--{part}", str(folder / part)]
    return [name, "--model", str(model), "--out", str(folder / "out"), "--threads", "1", *texts, *more]
