"""The child process: answers, errors, crashes, and its end when the parent is gone.

A runtime that crashes on purpose comes in as a third party's would: an entry point of an installed distribution.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from compress.errors import CompressError, CrashError, InputError
from compress.runner.process import Job, JobResult, PerformanceSettings, QualitySettings, run_job
from compress.session import Advance

TABLE_RUNTIME = '''
import ctypes, os, signal, sys, time
from pathlib import Path
import numpy as np
from compress.errors import InputError

NAMES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_WAIT_POLICY", "EDGEPRESS_NO_SPIN")
AT_IMPORT = {name: os.environ[name] for name in NAMES if name in os.environ}

class TableRuntime:
    """Logits of the next token are a row of a table; the file's name says how to misbehave."""

    @classmethod
    def exact(cls):
        return None

    def load(self, entry, threads, context):
        what = entry.stem
        print("chatter on standard output", flush=True)
        print("about to", what, file=sys.stderr, flush=True)
        if what == "segv":
            ctypes.string_at(0)
        elif what in ("SIGILL", "SIGKILL"):
            os.kill(os.getpid(), getattr(signal, what))
        elif what == "exit":
            os._exit(7)
        elif what == "raise":
            raise ZeroDivisionError("no such opset")
        elif what == "missing":
            raise InputError("llama_cpp is not installed", where="gguf", fix="pip install it")
        elif what == "hang":
            Path(entry.parent, "pid").write_text(str(os.getpid()))
            time.sleep(300)
        self.table = np.load(entry)
        self.threads = threads

    def prefill(self, tokens, all_logits=False):
        return self.table[tokens] if all_logits else self.table[tokens[-1]]

    def decode(self, token):
        return self.table[token]

    def describe(self):
        return {"threads": self.threads, "environment": AT_IMPORT, "torch": "torch" in sys.modules}

    def close(self):
        self.table = None
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the child's path with an installed distribution that brings the format "table"."""
    (tmp_path / "table_runtime.py").write_text(TABLE_RUNTIME)
    info = tmp_path / "table_runtime-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: table-runtime\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[edgepress.runtimes]\ntable = table_runtime:TableRuntime\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def job(folder: Path, name: str = "good", **settings: int) -> Job:
    entry = folder / f"{name}.npy"
    np.save(entry, np.random.default_rng(0).normal(size=(50, 50)).astype(np.float32))
    chosen = {"prompt_tokens": 4, "generate_tokens": 3, "repeats": 2} | settings
    return Job("table", str(entry), 1, PerformanceSettings(weight_bytes=10_000, **chosen))


def crash(folder: Path, name: str) -> CrashError:
    with pytest.raises(CrashError) as caught:
        run_job(job(folder, name))
    assert caught.value.where == str(folder / f"{name}.npy")
    assert "the table runtime" in caught.value.what
    return caught.value


def test_a_job_survives_json() -> None:
    for quality in (None, QualitySettings("t.npy", None, "p.npy")):
        whole = Job("onnx", "/a/model.onnx", 2, PerformanceSettings(7, 5, 3, None, 11), quality)
        assert Job.from_json(json.dumps(json.loads(whole.to_json()))) == whole


def test_every_nonsense_number_is_named_at_once() -> None:
    with pytest.raises(InputError) as caught:
        Job("onnx", "m.onnx", 0, PerformanceSettings(-1, 0, 0, None, 0), QualitySettings("t.npy"))
    for name in ("threads is 0", "prompt_tokens is -1", "generate_tokens is 0", "repeats is 0", "weight_bytes is 0"):
        assert name in caught.value.what
    assert "reference or parity" in caught.value.what


def test_the_child_answers_with_everything(folder: Path) -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 50, (2, 6))
    base = job(folder)
    table = np.load(base.entry)
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "reference.npy", table[tokens])
    seen: list[tuple[str, int, int]] = []

    @contextmanager
    def progress(label: str, total: int) -> Iterator[Advance]:
        counts: list[int] = []
        yield counts.append
        seen.append((label, total, sum(counts)))

    files = QualitySettings(str(folder / "tokens.npy"), str(folder / "reference.npy"))
    result = run_job(Job("table", base.entry, 1, base.performance, files), progress)
    assert isinstance(result, JobResult)
    assert result.performance is not None
    assert result.performance.decode_tps.runs == 2
    assert result.quality is not None
    assert (result.quality.kld_mean, result.quality.top1_agreement) == (0.0, 1.0)
    assert seen == [("measure", 2, 2), ("evaluate", 2, 2)]


def test_thread_counts_are_set_before_any_import_and_torch_stays_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("EDGEPRESS_NO_SPIN", raising=False)
    described = run_job(Job("table", job(folder).entry, 3, PerformanceSettings(2, 2, 1))).runtime
    assert described["environment"] == {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "3"}
    assert described["torch"] is False


def test_threads_sleep_while_they_wait_unless_speed_is_measured(folder: Path) -> None:
    entry = job(folder).entry
    tokens = np.zeros((1, 4), dtype=np.int64)
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "parity.npy", np.load(entry)[tokens])
    files = QualitySettings(str(folder / "tokens.npy"), parity=str(folder / "parity.npy"))
    result = run_job(Job("table", entry, 1, quality=files))
    assert result.runtime["environment"].items() >= {"OMP_WAIT_POLICY": "passive", "EDGEPRESS_NO_SPIN": "1"}.items()
    assert (result.parity_kld, result.quality) == (0.0, None)


def test_a_segmentation_fault_becomes_a_message(folder: Path) -> None:
    error = crash(folder, "segv")
    assert "crashed (SIGSEGV) with 1 threads" in error.what
    assert "about to segv" in error.what


def test_an_illegal_instruction_points_at_the_build(folder: Path) -> None:
    error = crash(folder, "SIGILL")
    assert "illegal instruction" in error.what
    assert "another CPU" in error.fix


def test_a_kill_is_guessed_to_be_for_memory(folder: Path) -> None:
    error = crash(folder, "SIGKILL")
    assert "out-of-memory" in error.what
    assert "fewer bits" in error.fix


def test_an_exit_without_an_answer_is_a_crash(folder: Path) -> None:
    assert "exit code 7" in crash(folder, "exit").what


@pytest.mark.parametrize("answer", ["", 'printf \'{"result": {"run\''])
def test_a_child_that_dies_before_or_while_it_answers_is_a_crash(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    python = folder / "python"
    python.write_text(f"#!/bin/sh\nexec <&-\n{answer}\necho no interpreter >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(CrashError, match=r"(?s)exit code 3.*no interpreter"):
        run_job(job(folder))


def test_an_exception_of_the_runtime_is_named(folder: Path) -> None:
    assert "raised ZeroDivisionError: no such opset" in crash(folder, "raise").what


def test_an_input_error_crosses_over(folder: Path) -> None:
    with pytest.raises(InputError) as caught:
        run_job(job(folder, "missing"))
    assert (caught.value.what, caught.value.where) == ("llama_cpp is not installed", "gguf")
    assert caught.value.fix == "pip install it"


def test_logits_that_are_not_numbers_stop_the_measurement(folder: Path) -> None:
    broken = job(folder)
    np.save(broken.entry, np.full((50, 50), np.nan, dtype=np.float32))
    with pytest.raises(CompressError, match="not finite after the prompt"):
        run_job(broken)


def test_a_format_without_a_runtime_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="no runtimes named 'tabel'; did you mean 'table'"):
        run_job(Job("tabel", job(folder).entry, 1, PerformanceSettings()))


def _ends(pid: int, seconds: float = 30) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_the_child_ends_when_the_parent_is_killed(folder: Path) -> None:
    text = job(folder, "hang").to_json()
    code = "import sys; from compress.runner.process import *; run_job(Job.from_json(sys.argv[1]))"
    parent = subprocess.Popen([sys.executable, "-c", code, text], cwd=Path(__file__).parents[2])
    file = folder / "pid"
    limit = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < limit
        time.sleep(0.02)
    child = int(file.read_text())
    parent.kill()
    parent.wait()
    assert _ends(child)


def test_the_child_ends_when_the_caller_is_interrupted(folder: Path) -> None:
    text = job(folder, "hang").to_json()
    # What a shell starts in the background ignores the signal, and a suite hands that down.
    listen = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{listen}; from compress.runner.process import *; run_job(Job.from_json(sys.argv[1]))"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, text], cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL
    )
    file = folder / "pid"
    limit = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < limit
        time.sleep(0.02)
    os.kill(parent.pid, signal.SIGINT)
    parent.wait(30)
    assert _ends(int(file.read_text()))


def test_the_runner_imports_neither_torch_nor_a_runtime() -> None:
    code = (
        "import sys, compress.runner.worker, compress.runner.measure, compress.runner.quality, compress.runner.chat;"
        "print([name for name in ('torch', 'transformers', 'onnxruntime', 'llama_cpp') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "[]"
