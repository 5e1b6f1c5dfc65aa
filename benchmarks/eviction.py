"""What a model loses when its key/value cache keeps a share of the prompt: H2O, SnapKV, and first and last tokens.

    python -m benchmarks.eviction --model DIR --evaluation heldout.txt --prompt 768 --scored 256 --windows 4

The float32 model reads ``--prompt`` tokens with all of its cache, then ``--scored`` more, one after the other, with
what each method keeps of it. KLD in nats over those, from the model with its whole cache, and the share of them where
both rank the same token first. No runtime that artifacts are made for evicts so (docs/decisions/eviction.md).
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.eviction import METHODS, Eviction, evicting
from compress.models.decoder import Decoder
from compress.models.sources import open_model
from compress.recipe import Evaluate
from compress.runner.quality import compare
from compress.texts import token_windows

SHARES = (1.0, 0.5, 0.25, 0.1)
"""Of the prompt."""


def behind_prompt(model: Any, window: Tensor, prompt: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits float32 [scored, vocab] of the tokens behind the prompt."""
    with torch.no_grad():
        logits: Tensor = model(window[None], use_cache=False).logits
    found: np.ndarray[Any, np.dtype[np.float32]] = logits[0, prompt:].numpy()
    return found


def table(model: Any, windows: Tensor, prompt: int) -> str:
    """Markdown: a row for each share, a column for each method."""
    whole = [behind_prompt(model, window, prompt) for window in windows]
    lines = [f"| kept | {' | '.join(METHODS)} |", "|---|" + "---|" * len(METHODS)]
    for share in SHARES:
        cells = []
        for method in METHODS:
            started, kld, agree = time.perf_counter(), [], []
            for window, reference in zip(windows, whole, strict=True):
                with evicting(model, Eviction(method, prompt, round(share * prompt))):
                    found = behind_prompt(model, window, prompt)
                rows = compare(reference, found, window[prompt:].numpy())
                kld.append(rows.kld.mean())
                agree.append(rows.agree.mean())
            cells.append(f"{np.mean(kld):.4f} ({np.mean(agree):.1%})")
            print(f"{share:.0%} {method}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
        lines.append(f"| {share:.0%} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Read the arguments, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "evaluation"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name, default in (("prompt", 768), ("scored", 256), ("windows", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    checkpoint = open_model(str(options.model))
    length = options.prompt + options.scored
    settings = Evaluate("text", path=options.evaluation, windows=options.windows, sequence_length=length)
    windows = token_windows(checkpoint, settings, "evaluation").tokens
    print("$", *sys.argv)
    print(*(f"{name} {version(name)}" for name in ("edgepress", "torch", "transformers")), sep=", ")
    with Decoder(checkpoint).whole() as model:
        print(table(model, windows, options.prompt))


if __name__ == "__main__":
    main()
