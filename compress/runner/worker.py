"""The child's side of :mod:`compress.runner.process`: ``python -m compress.runner.worker``, job in, answers out."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from compress import registry
from compress.errors import CompressError
from compress.kv import FLOAT_CACHE
from compress.protocols import Runtime
from compress.runner.process import Job, JobResult
from compress.runner.streaming import bounded
from compress.session import Advance

if TYPE_CHECKING:
    from compress.runner.quality import Files, Scored


class Channel:
    """Where the answers go: one JSON object a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def send(self, **message: Any) -> None:
        """Write one message at once; NaN is an error."""
        self._stream.write(json.dumps(message, allow_nan=False) + "\n")
        self._stream.flush()

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Advance]:
        """Progress that the parent draws."""
        self.send(begin=label, total=total)
        yield lambda count: self.send(advance=count)


def main() -> int:
    """Do the job on standard input. Exit code 0 means that the answer says it all."""
    # Standard output belongs to the answers alone: whatever a library prints goes to standard error.
    channel = Channel(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    job = Job.from_json(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        result = do(job, channel)
    except CompressError as error:
        channel.send(error=type(error).__name__, what=error.what, where=error.where, fix=error.fix)
        return 0
    except Exception as error:
        channel.send(failure=f"{type(error).__name__}: {error}")
        raise
    channel.send(result=dataclasses.asdict(result))
    return 0


def do(job: Job, channel: Channel) -> JobResult:
    """Measure first, in the untouched process; then compare logits."""
    from compress.runner import measure, quality

    kind = registry.load("runtimes", job.format)

    def asked() -> Runtime:
        # Only runtimes that choose their cache are given one: a job for others refuses it.
        runtime: Runtime = kind() if job.cache == FLOAT_CACHE else kind(job.cache)
        return runtime

    performance = None
    described: Mapping[str, Any] = {}
    if job.performance is not None:
        performance, described = measure.measure(asked, job, job.performance, channel.progress)
    if job.quality is None:
        return JobResult(dict(described), performance)
    files = quality.open_files(job.quality)
    if job.cache == FLOAT_CACHE:
        scored, described = _score(bounded(kind(), job.quality.stream, job.entry), files, job, channel)
    else:
        # The torch model that parity compares with attends to unrounded keys and values.
        whole = dataclasses.replace(files, parity=None)
        scored, described = _score(bounded(asked(), job.quality.stream, job.entry), whole, job, channel)
        if files.parity is not None:
            plain, _ = _score(kind(), dataclasses.replace(files, reference=None), job, channel)
            scored = dataclasses.replace(plain, quality=scored.quality)
    exact, exact_kld, exact_tokens = kind.exact(), None, 0
    if exact is not None and files.parity is not None:
        # One window: without integer kernels this is many times slower.
        first = dataclasses.replace(files, reference=None, parity=files.parity[:1])
        alone, _ = _score(exact, first, job, channel)
        exact_kld, exact_tokens = alone.parity_kld, alone.parity_tokens
    return JobResult(
        dict(described),
        performance,
        scored.quality,
        scored.parity_kld,
        scored.parity_tokens,
        exact_kld,
        exact_tokens,
    )


def _score(runtime: Runtime, files: Files, job: Job, channel: Channel) -> tuple[Scored, dict[str, Any]]:
    """What ``runtime`` scores on ``files``, and what it says of itself."""
    from compress.runner.quality import score

    runtime.load(Path(job.entry), job.threads, files.tokens.shape[1])
    try:
        return score(runtime, files, job.threads, channel.progress), runtime.describe()
    finally:
        runtime.close()


def _end_with_parent() -> None:
    # The parent never writes again: the pipe closes when it is gone, and nobody waits for an answer any more. Not
    # sys.stdin: a thread that sits in its lock makes the interpreter abort at exit.
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
