"""Runs an artifact in a fresh process, so that its memory is its own and its crash is only a message here.

The parent writes one :class:`Job` as a line of JSON to the child's standard input and keeps that pipe open: when it
closes, because the parent is gone, the child ends itself. The child answers with one JSON object a line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from compress import errors
from compress.kv import CACHE_TYPES, FLOAT_CACHE, CacheTypes
from compress.report import Performance, Quality, decode
from compress.runner.ort import NO_SPIN_VARIABLE
from compress.runner.streaming import Stream
from compress.session import Progress, no_progress

CHOOSES_CACHE = frozenset({"gguf"})
"""Formats whose runtime takes the types of its key/value cache when it runs."""
_STDERR_LINES = 12
_TRACE_LINES = 4
_SOURCES = Path(errors.__file__).resolve().parents[1]
_VMSTAT = Path("/proc/vmstat")
_ILLEGAL_INSTRUCTION = "the runtime was built for another CPU, or by a compiler that mishandles this one"


@dataclass(frozen=True)
class PerformanceSettings:
    """What to measure: ``repeats`` times a prompt of ``prompt_tokens``, then ``generate_tokens`` decoding steps.

    ``tokens`` is an .npy file of int64 ids to take the prompt from; without it the prompt is random ids of the
    model's vocabulary, from a fixed seed. ``weight_bytes`` is what one decoding step reads of the weights (quantised
    linears, head, norms); without it every byte of the artifact's files counts as read. ``stream`` bounds the cache.
    """

    prompt_tokens: int = 128
    generate_tokens: int = 64
    repeats: int = 3
    tokens: str | None = None
    weight_bytes: int | None = None
    stream: Stream | None = None


@dataclass(frozen=True)
class QualitySettings:
    """What to compare: ``tokens`` is an .npy file of int64 [windows, T]; ``reference`` holds float32
    [windows, T, vocab] logits of the unquantised model, ``parity`` those of the fake-quantised one for the first
    windows (as many as the file has). Logits are .npy files, or raw little-endian float32 under any other suffix.
    ``stream`` bounds the cache.
    """

    tokens: str
    reference: str | None = None
    parity: str | None = None
    stream: Stream | None = None


@dataclass(frozen=True)
class Job:
    """One artifact and what to find out about it. ``entry`` is the file that the runtime of ``format`` opens.

    ``cache`` is for runtimes that take the types of their key/value cache when they run; parity is always compared with
    the usual ones.
    """

    format: str
    entry: str
    threads: int
    performance: PerformanceSettings | None = None
    quality: QualitySettings | None = None
    cache: CacheTypes = FLOAT_CACHE

    def __post_init__(self) -> None:
        counts = {"threads": self.threads}
        if self.performance is not None:
            settings = self.performance
            counts |= {
                "prompt_tokens": settings.prompt_tokens,
                "generate_tokens": settings.generate_tokens,
                "repeats": settings.repeats,
                "weight_bytes": 1 if settings.weight_bytes is None else settings.weight_bytes,
            }
        wrong = [f"{name} is {value}, but must be at least 1" for name, value in counts.items() if value < 1]
        if self.quality is not None and self.quality.reference is None and self.quality.parity is None:
            wrong.append("quality needs reference or parity logits")
        kinds = {"keys": self.cache.keys, "values": self.cache.values}
        wrong += [f"{what} of the cache: no type '{kind}'" for what, kind in kinds.items() if kind not in CACHE_TYPES]
        wrong += cache_complaints(self.format, self.cache)
        if wrong:
            raise errors.InputError("\n".join(wrong))

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read what :meth:`to_json` wrote."""
        return decode(cls, json.loads(text))


@dataclass(frozen=True)
class JobResult:
    """What the child found. ``runtime`` is what the runtime says of itself (library, version, threads)."""

    runtime: dict[str, Any]
    performance: Performance | None = None
    quality: Quality | None = None
    parity_kld: float | None = None
    parity_tokens: int = 0
    exact_kld: float | None = None
    """As ``parity_kld``, without rounded activations, over the first of its windows; None where that cannot be had."""
    exact_tokens: int = 0


def cache_complaints(format: str, cache: CacheTypes) -> list[str]:
    """Why artifacts of ``format`` cannot be run with a cache of such types."""
    if cache == FLOAT_CACHE or format in CHOOSES_CACHE:
        return []
    return [f"a cache of {cache} was asked for: what runs {format} files takes the cache's type from the file"]


def run_job(job: Job, progress: Progress = no_progress) -> JobResult:
    """Do ``job`` in a fresh Python process and return what it found.

    Raises CrashError when the process dies or ends without an answer, and what the child itself explained:
    InputError (a missing library, say) or CompressError (logits that are not numbers, say).
    """
    kills_before = _oom_kills()
    with tempfile.TemporaryFile() as stderr:
        child = subprocess.Popen(
            # -P: the user's working directory must not shadow a library.
            [sys.executable, "-P", "-X", "faulthandler", "-m", "compress.runner.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=_environment(job),
        )
        with child, _Reader(progress) as reader:
            try:
                _send(child, job)
                assert child.stdout is not None
                for line in child.stdout:
                    # Half a line is what a child leaves that dies while it writes.
                    if line.endswith(b"\n"):
                        reader.take(json.loads(line))
                child.wait()
            finally:
                child.kill()
        if reader.error is not None and child.returncode == 0:
            raise reader.error
        if reader.result is not None and child.returncode == 0:
            return reader.result
        raise _crash(job, child.returncode, stderr, reader.failure, _oom_kills() > kills_before)


def _environment(job: Job) -> dict[str, str]:
    """This process's environment with the thread settings that libraries read once, when they are loaded.

    Threads that spin while they wait are what a device does, so speed is measured with them. On a machine with other
    work they slow everything down many times, so where no speed is measured they sleep.
    """
    search = [str(_SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
    counts = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(job.threads))
    waiting = {} if job.performance is not None else {"OMP_WAIT_POLICY": "passive", NO_SPIN_VARIABLE: "1"}
    return os.environ | counts | waiting | {"PYTHONPATH": os.pathsep.join(search)}


def _send(child: subprocess.Popen[bytes], job: Job) -> None:
    assert child.stdin is not None
    # A child that died at once is told from its exit status, not from the broken pipe. Past the buffer: what stays in
    # there would be written, and fail, again when it is closed.
    with contextlib.suppress(BrokenPipeError):
        os.write(child.stdin.fileno(), job.to_json().encode() + b"\n")


@dataclass
class _Reader:
    """Takes the child's messages: progress goes on to the terminal, the rest is kept."""

    progress: Progress
    result: JobResult | None = None
    error: errors.CompressError | None = None
    failure: str = ""
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _advance: Any = None

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()

    def take(self, message: dict[str, Any]) -> None:
        match message:
            case {"begin": label, "total": total}:
                self._open.close()
                self._advance = self._open.enter_context(self.progress(label, total))
            case {"advance": count}:
                self._advance(count)
            case {"result": result}:
                self.result = decode(JobResult, result)
            case {"error": kind, "what": what, "where": where, "fix": fix}:
                known = {"InputError": errors.InputError, "ParityError": errors.ParityError}
                self.error = known.get(kind, errors.CompressError)(what, where=where, fix=fix)
            case {"failure": text}:
                self.failure = text
            case _:
                raise errors.CrashError(f"the runner's process sent an unknown message: {message}")


def _crash(job: Job, code: int, stderr: IO[bytes], failure: str, oom: bool) -> errors.CrashError:
    how, fix = _explain(code, failure, oom)
    stderr.seek(0)
    said = _last_words(stderr.read().decode("utf-8", "replace"))
    return errors.CrashError(
        f"the {job.format} runtime {how} with {job.threads} threads; its last words:\n{said}", where=job.entry, fix=fix
    )


def _last_words(text: str) -> str:
    """The end of what the child wrote, and the innermost Python calls where the crash handler listed them."""
    before, mark, trace = text.partition("Fatal Python error")
    words = [line for line in before.splitlines() if line.strip()][-_STDERR_LINES:]
    words += [line for line in (mark + trace).splitlines() if line.strip()][:_TRACE_LINES]
    return "\n".join(f"    {line}" for line in words) or "    (nothing)"


def _explain(code: int, failure: str, oom: bool) -> tuple[str, str]:
    """(what happened, what to try) from the exit code; negative codes are signals."""
    if failure:
        return f"raised {failure}", "the file may be damaged or need a newer runtime: check it with `compress inspect`"
    if code >= 0:
        return f"ended with exit code {code} and no answer", "run again; if it repeats, report it with the lines above"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code == signal.SIGKILL:
        sure = "by the kernel's out-of-memory killer" if oom else "perhaps by the kernel's out-of-memory killer"
        return f"was killed ({name}), {sure},", "free memory, or use a smaller model, fewer bits or a shorter context"
    if -code == signal.SIGILL:
        return f"crashed ({name}: illegal instruction)", f"{_ILLEGAL_INSTRUCTION}: build it on this machine"
    return f"crashed ({name})", "reinstall the runtime as the README says; another runtime may open the same model"


def _oom_kills() -> int:
    """Processes that the kernel has killed for memory since boot; 0 where it does not count them."""
    try:
        lines = _VMSTAT.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
