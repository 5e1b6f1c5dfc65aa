"""Whole runs of the engine on tiny models: the recipe, the texts, and runs that many tests look at."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress import engine, registry
from compress.recipe import Recipe, loads
from compress.report import Report
from compress.session import Advance, Progress
from tests.support import tiny_llama

WORDS = (
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven"),
    *("wizards", "quietly", "mix", "jars", "of", "potion", "and", "read", "books", "about", "ships"),
)
VARIANTS = {
    "gptq": ("{gptq: {}}", "onnx, gguf"),
    "rtn": ("{rtn: {}}", "{onnx: {accuracy_level: 0}}, gguf"),
    "int8": ("{rtn: {scheme: int8-g32}}", "onnx, gguf"),
    "asym": ("{gptq: {scheme: int4-g32-asym}}", "onnx, gguf"),
    "mixed": ("{gptq: {}}, {mixed: {target_bits: 6, samples: 4}}", "onnx, gguf"),
}
"""Name -> (passes, exporters)."""


def sentences(seed: int, words: int) -> str:
    """Made-up text in which some words follow others more often."""
    generator = random.Random(seed)
    chosen = [generator.choice(WORDS)]
    while len(chosen) < words:
        follower = (WORDS.index(chosen[-1]) + 1) % len(WORDS)
        chosen.append(WORDS[follower] if generator.random() < 0.7 else generator.choice(WORDS))
    return " ".join(chosen)


@dataclass
class Bench:
    """A folder with a tiny model and its texts, and the runs made there."""

    folder: Path
    model: Path = field(init=False)

    def __post_init__(self) -> None:
        self.model = tiny_llama(self.folder / "tiny")
        (self.folder / "calibration.txt").write_text(sentences(1, 1500))
        (self.folder / "evaluation.txt").write_text(sentences(2, 500))
        self._runs: dict[str, Finished] = {}

    def yaml(self, **parts: str) -> str:
        """A recipe's text; ``parts`` replace or add top-level values, in flow style."""
        values = {
            "model": str(self.model),
            "calibration": f"{{source: text, path: {self.folder}/calibration.txt, samples: 16, sequence_length: 64}}",
            "passes": "[rtn]",
            "export": "[onnx]",
            "measure": "{threads: 1, prompt_tokens: 8, generate_tokens: 4, repeats: 1}",
            "evaluate": f"{{source: text, path: {self.folder}/evaluation.txt, windows: 4, sequence_length: 64}}",
        } | parts
        return "".join(f"{key}: {value}\n" for key, value in values.items())

    def recipe(self, **parts: str) -> Recipe:
        return loads(self.yaml(**parts), registry.load)

    def file(self, path: Path, **parts: str) -> Path:
        """The recipe as a file, for the command line."""
        path.write_text(self.yaml(**parts))
        return path

    def finished(self, variant: str) -> Finished:
        """One of VARIANTS, run at its first use."""
        if variant not in self._runs:
            passes, export = VARIANTS[variant]
            recipe = self.recipe(passes=f"[{passes}]", export=f"[{export}]")
            out = self.folder / "runs" / variant
            self._runs[variant] = Finished(recipe, out, engine.run(recipe, out))
        return self._runs[variant]


@dataclass(frozen=True)
class Finished:
    """A run that is done."""

    recipe: Recipe
    out: Path
    report: Report


def progress_that(act: Callable[[str], None]) -> Progress:
    """Progress that calls ``act`` with the name of each step before it starts."""

    @contextmanager
    def progress(label: str, total: int) -> Iterator[Advance]:
        act(label)
        yield lambda _: None

    return progress


def at_step(wanted: str, act: Callable[[], Any]) -> Progress:
    """Progress that calls ``act`` before the step ``wanted`` starts."""
    return progress_that(lambda label: act() if label == wanted else None)


def names(folder: Path) -> set[str]:
    """Every file under ``folder``."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def digests(out: Path) -> dict[str, str]:
    """File -> SHA-256, as the run's own manifest says."""
    files = json.loads((out / "manifest.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items()}
