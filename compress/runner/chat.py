"""A conversation with an artifact, in the runtime that the device will use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from compress import registry
from compress.errors import CompressError, InputError
from compress.protocols import Runtime
from compress.runner.artifact import find_artifact
from compress.runner.streaming import Stream, bounded
from compress.runner.template import Message, render
from compress.runner.text import FolderText, GgufText, Text

F32 = NDArray[np.float32]

_DEFAULT_CONTEXT = 4096
"""A cache for all that a model could take would cost gigabytes for models of long contexts."""

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: the most likely one at temperature 0, else drawn from the smallest set of tokens whose
    probability reaches ``top_p``, by a generator of its own with this seed.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = []
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            wrong.append(f"temperature is {self.temperature}, but must be 0 or more")
        if not 0 < self.top_p <= 1:
            wrong.append(f"top_p is {self.top_p}, but must be above 0 and at most 1")
        if wrong:
            raise InputError("\n".join(wrong))


def choose(logits: F32, sampling: Sampling, rng: np.random.Generator) -> int:
    """The next token from logits [vocab]; CompressError where they are not finite."""
    if not np.isfinite(logits).all():
        raise CompressError("the artifact's logits are not finite")
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = (logits.astype(np.float64) - logits.max()) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    share = np.exp(scaled[order])
    share /= share.sum()
    # A token belongs to the set as long as those before it have not reached top_p: the first always does.
    kept = int(np.searchsorted(np.cumsum(share) - share, sampling.top_p))
    share = share[: max(kept, 1)]
    return int(order[rng.choice(len(share), p=share / share.sum())])


class ChatSession:
    """An opened artifact that answers. ``finish_reason`` says why the last answer ended."""

    def __init__(
        self,
        path: Path,
        threads: int,
        *,
        context: int | None = None,
        raw: bool = False,
        format: str | None = None,
        stream: Stream | None = None,
    ) -> None:
        """Load the artifact at ``path``; ``raw`` continues text without a chat template.

        With a ``stream`` the cache is bounded by it, and a conversation by nothing.

        Raises InputError where there is no artifact, or no chat template and not ``raw``.
        """
        self.artifact = find_artifact(path, format)
        self.finish_reason: FinishReason | None = None
        self._raw = raw
        entry = self.artifact.path / self.artifact.entry
        kind: type[Runtime] = registry.load("runtimes", self.artifact.format)
        self._runtime = bounded(kind(), stream, str(entry))
        self._endless = stream is not None
        self._text, self.context = _open(self._runtime, entry, threads, context if stream is None else stream.room)
        if self._text.template is None and not raw:
            self.close()
            raise InputError(
                "this model has no chat template, so it is not known how it was taught to converse",
                where=str(entry),
                fix="continue plain text instead, with --raw",
            )

    def reply(
        self, messages: Sequence[Message], max_tokens: int = 256, sampling: Sampling | None = None
    ) -> Iterator[str]:
        """Text of the answer to ``messages`` as it comes, in whole characters.

        With ``raw`` the contents, one a line, are continued as they stand. Raises InputError when the messages
        leave no room for an answer in the context.
        """
        if max_tokens < 1:
            raise InputError(f"max_tokens is {max_tokens}, but must be at least 1")
        prompt = self._prompt(messages)
        room = max_tokens if self._endless else self.context - len(prompt)
        if room < 1 or len(prompt) == 0:
            what = f"has {len(prompt)} tokens, but the context {self.context}" if room < 1 else "is empty"
            raise InputError(f"the conversation {what}", where=str(self.artifact.path), fix="shorten it or start anew")
        return self._generate(prompt, min(max_tokens, room), room < max_tokens, sampling or Sampling())

    def _prompt(self, messages: Sequence[Message]) -> NDArray[np.int64]:
        if self._raw or self._text.template is None:
            return self._text.encode("\n".join(message["content"] for message in messages), add_special=True)
        rendered = render(self._text.template, messages, self._text.markers)
        # Templates write bos themselves where the model wants it.
        return self._text.encode(rendered, add_special=False)

    def _generate(self, prompt: NDArray[np.int64], limit: int, cramped: bool, sampling: Sampling) -> Iterator[str]:
        rng = np.random.default_rng(sampling.seed)
        pieces = self._text.pieces()
        self.finish_reason = "context" if cramped else "length"
        logits = self._runtime.prefill(prompt)
        for index in range(limit):
            token = choose(logits, sampling, rng)
            if self._text.ends(token):
                self.finish_reason = "stop"
                break
            piece = pieces.push(token)
            if piece:
                yield piece
            if index + 1 < limit:
                logits = self._runtime.decode(token)
        rest = pieces.end()
        if rest:
            yield rest

    def close(self) -> None:
        """Free the runtime."""
        self._runtime.close()

    def __enter__(self) -> ChatSession:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _open(runtime: Runtime, entry: Path, threads: int, asked: int | None) -> tuple[Text, int]:
    """Load for as many tokens as asked, or else as the model was trained for, up to 4096."""
    from compress.runner.llamacpp import LlamaCppRuntime

    if not isinstance(runtime, LlamaCppRuntime):
        text: Text = FolderText(entry.parent)
        chosen = _context(asked, text, entry)
        runtime.load(entry, threads, chosen)
        return text, chosen
    # The file's own limit is known only once it is open; a cache larger than that does no harm.
    runtime.load(entry, threads, asked or _DEFAULT_CONTEXT)
    try:
        inside = GgufText(runtime)
        return inside, _context(asked, inside, entry)
    except InputError:
        runtime.close()
        raise


def _context(asked: int | None, text: Text, entry: Path) -> int:
    if asked is not None and not 2 <= asked <= text.context:
        raise InputError(f"context is {asked}, but must be 2 to {text.context} for this model", where=str(entry))
    return min(text.context, _DEFAULT_CONTEXT) if asked is None else asked
