"""Decode time of ONNX artifacts that lie close together: token by token in turns.

    python -m benchmarks.turns --rounds 20 theirs/model.onnx ours/model.onnx

A machine's speed drifts by more than such files differ, so each token is timed with every file, there and back, in one
process whose sessions all are loaded. A session is faster or slower by a few per cent for as long as it lives, wherever
its memory came to lie: each round is a fresh process, which loads in another order. A file's time in a round is the
median over tokens, and is divided by the first file's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compress.runner.artifact import find_artifact
from compress.runner.ort import OrtRuntime

PROMPT, TOKENS = 128, 64


def turned(number: int, count: int) -> list[int]:
    """0 to ``count`` - 1, begun elsewhere every second time, and backwards in between."""
    order = [(number // 2 + place) % count for place in range(count)]
    return order if number % 2 == 0 else order[::-1]


def one_round(entries: Sequence[Path], threads: int, number: int) -> list[float]:
    """Median seconds that a token takes with each of ``entries``, loaded in the order of round ``number``."""
    runtimes = [OrtRuntime(alone=False) for _ in entries]
    tokens = np.random.default_rng(number).integers(0, 256, PROMPT + TOKENS)
    for place in turned(number, len(entries)):
        runtimes[place].load(entries[place], threads, len(tokens))
        runtimes[place].prefill(tokens[:PROMPT])
    seconds: list[list[float]] = [[] for _ in entries]
    for step, token in enumerate(tokens[PROMPT:].tolist()):
        for place in turned(step, len(entries)):
            started = time.perf_counter()
            runtimes[place].decode(token)
            seconds[place].append(time.perf_counter() - started)
    return [statistics.median(found) for found in seconds]


def in_turns(entries: Sequence[Path], threads: int, rounds: int) -> NDArray[np.float64]:
    """Seconds a token, [rounds, entries]."""
    found = []
    for number in range(rounds):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            found.append(fresh.submit(one_round, entries, threads, number).result())
    return np.array(found).reshape(rounds, len(entries))


def against(seconds: NDArray[np.float64], base: int, other: int) -> str:
    """Time of ``other`` as a share of ``base``'s: the mean over rounds, and its standard error."""
    shares = seconds[:, other] / seconds[:, base]
    error = shares.std(ddof=1) / len(shares) ** 0.5 if len(shares) > 1 else float("nan")
    return f"{shares.mean():.3f} ± {error:.3f}"


def main() -> None:
    """Time the files that the command names; print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", type=Path, nargs="+", metavar="ARTIFACT")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    entries = [found.path / found.entry for found in (find_artifact(path, "onnx") for path in options.artifacts)]
    seconds = in_turns(entries, options.threads, options.rounds)
    print("$", *sys.argv)
    print(*(f"{name} {version(name)}" for name in ("edgepress", "onnxruntime")), sep=", ")
    print("| artifact | ms a token, median | time against the first |\n|---|---|---|")
    for place, path in enumerate(options.artifacts):
        print(f"| {path} | {1e3 * np.median(seconds[:, place]):.2f} | {against(seconds, 0, place)} |")


if __name__ == "__main__":
    main()
