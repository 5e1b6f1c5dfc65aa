"""Calibration text that the model writes itself: Liu et al., "LLM-QAT: Data-Free Quantization Aware Training for Large
Language Models", 2023, sec. 3.1.

A window starts with a token drawn from the whole vocabulary, goes on with the few most likely ones, so that it makes
sense, and is then drawn token by token from the model's own predictions, so that windows differ. Where the model ends
its text it goes on as it will, with what follows a text in its training; the paper stops there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calibration.errors import DataError

if TYPE_CHECKING:
    from torch import Generator, Tensor

LIKELIEST = 4
"""Tokens after the first that are not drawn: the most likely one each time. The paper takes 3 to 5."""
SHORTEST_TEXT = 16
"""A text ends after this many tokens at the earliest: some models, once at an end, write nothing but ends."""
WINDOWS_AT_ONCE = 32
"""Windows written side by side, whatever the machine: another number would be other text."""


@dataclass(frozen=True)
class Writing:
    """How a model writes.

    ``prefix``: ids that stand before every text the model is used on (a begin token, or none). ``starts`` int64 [n]:
    ids that a window may start with. ``ends``: ids that end a text.
    """

    prefix: Sequence[int]
    starts: Tensor
    ends: Sequence[int]
    seed: int = 0
    temperature: float = 1.0


def write_windows(
    model: Any, writing: Writing, samples: int, length: int, advance: Callable[[int], None] = lambda _: None
) -> tuple[Tensor, int]:
    """(tokens int64 [samples, length] that ``model`` wrote, how many texts they are); ``advance`` counts tokens.

    ``model`` is one of transformers' causal models, called with ``input_ids`` and its own key/value cache.

    Raises:
        DataError: the model's predictions are not finite.
    """
    import torch

    generator = torch.Generator().manual_seed(writing.seed)
    parts = []
    with torch.no_grad():
        for first in range(0, samples, WINDOWS_AT_ONCE):
            count = min(WINDOWS_AT_ONCE, samples - first)
            parts.append(_write(model, writing, count, length, generator, advance))
    tokens = torch.cat(parts)
    # What comes after the last end of a window is a text too, unless nothing does.
    return tokens, samples + int(torch.isin(tokens[:, :-1], torch.tensor(writing.ends, dtype=torch.int64)).sum())


def _write(
    model: Any, writing: Writing, count: int, length: int, generator: Generator, advance: Callable[[int], None]
) -> Tensor:
    import torch

    # Empty lists would be of another type.
    prefix, ends = (torch.tensor(ids, dtype=torch.int64) for ids in (writing.prefix[:length], writing.ends))
    tokens = torch.empty(count, length, dtype=torch.int64)
    tokens[:, : len(prefix)] = prefix
    tokens[:, len(prefix) : len(prefix) + 1] = writing.starts[
        torch.randint(len(writing.starts), (count, 1), generator=generator)
    ]
    # Tokens of the text that each window is in.
    age = torch.ones(count, dtype=torch.int64)
    cache, fed = None, 0
    for place in range(len(prefix) + 1, length):
        found = model(input_ids=tokens[:, fed:place], cache=cache, use_cache=True)
        cache, fed = found.cache, place
        logits = _finite(found.logits[:, -1].float() / writing.temperature)
        logits[:, ends] = logits[:, ends].masked_fill(age[:, None] < SHORTEST_TEXT, -torch.inf)
        chosen = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)[:, 0]
        if place <= len(prefix) + LIKELIEST:
            chosen = logits.argmax(-1)
        tokens[:, place] = chosen
        age = torch.where(torch.isin(chosen, ends), 0, age + 1)
        advance(count)
    return tokens


def _finite(logits: Tensor) -> Tensor:
    import torch

    if not torch.isfinite(logits).all():
        raise DataError(
            "the model's predictions are NaN or infinite: it cannot write its own calibration text",
            fix="check the checkpoint, or calibrate on text: {source: builtin}",
        )
    return logits
