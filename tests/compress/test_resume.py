"""A run that was killed goes on as if nothing had happened, or says why it cannot (ModelCloud/GPTQModel #3057)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import engine, registry, terminal, workspace
from compress.__main__ import main
from compress.errors import InputError
from compress.journal import entries, steps_done
from compress.recipe import Recipe, load, loads
from compress.session import Progress
from compress.store import Store
from tests.compress.runs import Bench, at_step, digests, names, sentences
from tests.support import tiny_llama

PASSES = "[{mixed: {target_bits: 6, samples: 4}}, {awq: {steps: 4}}, gptq]"
KILLED_RUN = """
import os, signal, sys
from contextlib import contextmanager
from pathlib import Path
from compress import engine, journal, registry, store, workspace
from compress.recipe import load

recipe, out, label, count = sys.argv[1:]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

@contextmanager
def progress(step, total):
    left = [int(count)]
    def advance(_):
        left[0] -= 1
        if step == label and left[0] <= 0:
            die()
    if step == label and left[0] == 0:
        die()
    yield advance

def in_the_middle_of(module, name, act):
    real, left = getattr(module, name), [int(count)]
    def function(*arguments):
        left[0] -= 1
        if left[0] == 0:
            act(real, *arguments)
            die()
        return real(*arguments)
    setattr(module, name, function)

def write_half(real, tensors, path):
    real(tensors, path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])

def leave_old_name(real, result, place):
    place.rename(workspace._replaced(place))

if label == "save":
    in_the_middle_of(store, "save_file", write_half)
elif label == "note":
    in_the_middle_of(journal, "put_in_place", lambda *_: None)
elif label == "rename":
    in_the_middle_of(workspace, "_replace", leave_old_name)
engine.run(load(recipe, registry.load), Path(out), overwrite=True, progress=progress)
"""


def killed(recipe: Path, out: Path, step: str, count: int) -> None:
    """A run in a process of its own that gets SIGKILL when ``step`` has advanced ``count`` times."""
    command = [sys.executable, "-c", KILLED_RUN, str(recipe), str(out), step, str(count)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == -signal.SIGKILL, run.stderr


@dataclass(frozen=True)
class Case:
    """A recipe for a model of six blocks, as a file; what an unbroken run of it left; what a killed one left."""

    bench: Bench
    folder: Path
    recipe: Path
    unbroken: Path
    stopped: Path

    def read(self, *overrides: str) -> Recipe:
        return load(self.recipe, registry.load, overrides)

    def copy(self, folder: Path) -> Path:
        """Another output of a run that was killed after block 3."""
        shutil.copytree(workspace.partial_of(self.stopped), folder / ".out.partial")
        return folder / "out"


@pytest.fixture(scope="module")
def case(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("resume")
    model = tiny_llama(folder / "model", num_hidden_layers=6, dtype=torch.bfloat16)
    recipe = bench.file(
        folder / "recipe.yaml", model=str(model), passes=PASSES, export="[gguf]", measure="false", evaluate="false"
    )
    found = Case(bench, folder, recipe, folder / "unbroken", folder / "stopped")
    engine.run(found.read(), found.unbroken)
    killed(recipe, found.stopped, "compressing blocks", 4)
    return found


def told(out: Path) -> Any:
    """report.json without times."""

    def without_times(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_times(item) for key, item in value.items() if key not in ("seconds", "timings")}
        return [without_times(item) for item in value] if isinstance(value, list) else value

    return without_times(json.loads((out / "report.json").read_text()))


def is_the_unbroken_run(out: Path, case: Case) -> None:
    mine, other = digests(out), digests(case.unbroken)
    assert mine["gguf/model.gguf"] == other["gguf/model.gguf"]
    assert told(out) == told(case.unbroken)
    assert names(out) == names(case.unbroken)
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".out")] == []


# --- killed at some moment, and resumed

MOMENTS = {
    "in the pass over the whole model": ("sensitivity", 5, 0),
    "while the plan is written": ("save", 1, 0),
    "in the middle of writing block 3": ("save", 6, 5),
    "before the note on block 2 has its name": ("note", 6, 4),
    "while an artifact is written": ("writing gguf", 0, 9),
}
"""Moment -> (step, how far it gets, how many steps the journal then has: the plan, the embedding, blocks, the head)."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_ends_like_an_unbroken_one(case: Case, tmp_path: Path, moment: str) -> None:
    step, count, steps = MOMENTS[moment]
    out = tmp_path / "out"
    killed(case.recipe, out, step, count)
    partial = workspace.partial_of(out)
    assert steps_done(partial / "state") == steps
    assert not out.exists()
    if step == "save":
        assert list((partial / "state").rglob("*.partial"))
    engine.run(case.read(), out, resume=True)
    is_the_unbroken_run(out, case)


def test_finished_blocks_are_not_done_again(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, done = case.copy(tmp_path), []
    put = Store.put

    def note(store: Store, block: str, *rest: Any) -> None:
        done.append(block)
        put(store, block, *rest)

    monkeypatch.setattr(Store, "put", note)
    engine.run(case.read(), out, resume=True)
    assert done == ["model.layers.3", "model.layers.4", "model.layers.5", "lm_head"]
    is_the_unbroken_run(out, case)


def test_a_run_may_be_killed_twice(case: Case, tmp_path: Path) -> None:
    out = case.copy(tmp_path)
    again = KILLED_RUN.replace("overwrite=True", "resume=True")
    command = [sys.executable, "-c", again, str(case.recipe), str(out), "compressing blocks", "6"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert steps_done(workspace.partial_of(out) / "state") == 7
    engine.run(case.read(), out, resume=True)
    is_the_unbroken_run(out, case)


def test_a_kill_while_names_change_loses_neither_run(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(case.unbroken, out)
    killed(case.recipe, out, "rename", 1)
    assert not out.exists()
    engine.run(case.read(), out, overwrite=True, resume=True)
    is_the_unbroken_run(out, case)
    shutil.copytree(case.unbroken, tmp_path / ".new.replaced")
    with pytest.raises(InputError, match="holds an earlier run"), workspace.workspace(tmp_path / "new", False, 1):
        pass
    assert names(tmp_path / "new") == names(case.unbroken)


def test_what_is_made_after_the_passes_may_change(case: Case, tmp_path: Path) -> None:
    out = case.copy(tmp_path)
    text = f"evaluate={{source: text, path: {case.bench.folder}/evaluation.txt, windows: 2, sequence_length: 64}}"
    report = engine.run(case.read("export=[onnx, gguf]", text, "gates={max_size: 1GB}"), out, resume=True)
    assert [artifact.format for artifact in report.artifacts] == ["onnx", "gguf"]
    assert digests(out)["gguf/model.gguf"] == digests(case.unbroken)["gguf/model.gguf"]


# --- another run than the one that was interrupted


def other_weights(case: Case, folder: Path) -> str:
    return str(tiny_llama(folder / "model", num_hidden_layers=6, dtype=torch.bfloat16, seed=1))


def other_text(case: Case, folder: Path) -> str:
    (folder / "text.txt").write_text(sentences(9, 1500))
    return str(folder / "text.txt")


OTHERS: dict[str, tuple[Callable[[Case, Path], str], list[str]]] = {
    "pin={'*.k_proj': int8-g32}": (lambda *_: "", ['recipe.pin.*.k_proj: was not there, is "int8-g32"']),
    "passes.mixed.choices=[int4-g64, int8-g32]": (
        lambda *_: "",
        ['passes.mixed.choices: was ["int4-g32", "int8-g32"], is ["int4-g64", "int8-g32"]'],
    ),
    "passes.gptq.damping=0.1": (lambda *_: "", ["passes.gptq.damping: was 0.05, is 0.1"]),
    "calibration.seed=1": (lambda *_: "", ["calibration.seed: was 0, is 1", "calibration tokens (SHA-256): was "]),
    "calibration.path={}": (other_text, ["calibration tokens (SHA-256): was "]),
    "model={}": (other_weights, ["weights (SHA-256): was "]),
}


@pytest.mark.parametrize("override", OTHERS)
def test_another_run_is_refused_with_all_that_differs(case: Case, tmp_path: Path, override: str) -> None:
    make, lines = OTHERS[override]
    out = case.copy(tmp_path)
    before = names(workspace.partial_of(out))
    with pytest.raises(InputError, match="the interrupted run was another one") as caught:
        engine.run(case.read(override.format(make(case, tmp_path)) if "{}" in override else override), out, resume=True)
    for line in lines:
        assert line in caught.value.what
    assert ", is " in caught.value.what
    assert "--overwrite" in caught.value.fix
    assert names(workspace.partial_of(out)) == before


def test_other_bits_and_group_and_threads_are_all_named(case: Case, tmp_path: Path) -> None:
    rtn = "model: {}\npasses: [{{rtn: {{scheme: {}}}}}]\nexport: [gguf]\nevaluate: false\n"
    rtn += "calibration: {{sequence_length: 64}}\nmeasure: {{threads: {}, prompt_tokens: 8, generate_tokens: 4}}\n"
    out, cpus = tmp_path / "out", min(len(os.sched_getaffinity(0)), 2)
    first = loads(rtn.format(case.folder / "model", "int4-g32", 1), registry.load)
    with pytest.raises(KeyboardInterrupt):
        engine.run(first, out, progress=at_step("logits to compare with", interrupt), resume=True)
    other = loads(rtn.format(case.folder / "model", "int8-g64", cpus), registry.load)
    with pytest.raises(InputError) as caught:
        engine.run(other, out, resume=True)
    assert 'passes.rtn.scheme: was "int4-g32", is "int8-g64"' in caught.value.what
    assert ("threads: was 1, is 2" in caught.value.what) == (cpus == 2)


def interrupt() -> None:
    raise KeyboardInterrupt


# --- files that are damaged


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "file", ["blocks/model.layers.1.safetensors", "pass-0-mixed.safetensors", "journal/000003.step"]
)
def test_a_damaged_file_is_named_and_nothing_is_made_of_it(
    case: Case, tmp_path: Path, file: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = case.copy(tmp_path)
    spoilt = workspace.partial_of(out) / "state" / file
    DAMAGES[damage](spoilt)
    assert main(["run", str(case.recipe), "--out", str(out), "--resume", "-q"]) == 2
    said = capsys.readouterr().err
    assert f"{spoilt}: {'missing' if damage == 'gone' else 'not what was written'}" in said
    assert "--overwrite" in said
    assert not out.exists()


def test_every_damaged_file_is_named_at_once(case: Case, tmp_path: Path) -> None:
    out = case.copy(tmp_path)
    state = workspace.partial_of(out) / "state"
    spoilt = [state / "blocks/model.layers.0.safetensors", state / "blocks/model.layers.2.safetensors"]
    for path in spoilt:
        flip(path)
    with pytest.raises(InputError) as caught:
        engine.run(case.read(), out, resume=True)
    assert all(str(path) in caught.value.what for path in spoilt)


# --- the command line


def test_an_interrupted_run_is_neither_lost_nor_taken_up_unasked(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = case.copy(tmp_path)
    command = ["run", str(case.recipe), "--out", str(out), "-q"]
    for more in ([], ["--dry-run"]):
        assert main([*command, *more]) == 2
        said = capsys.readouterr().err
        assert f"{workspace.partial_of(out)}: an interrupted run has left 5 finished steps" in said
        assert "--resume" in said
    assert main([*command, "--overwrite"]) == 0
    assert "5 finished steps of an interrupted run are removed" in capsys.readouterr().err
    is_the_unbroken_run(out, case)


def test_an_interrupt_keeps_what_is_done_and_says_how_to_go_on(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    command = ["run", str(case.recipe), "--out", str(out), "--resume"]
    progress: Progress = at_step("logits to compare with", interrupt)
    with monkeypatch.context() as patched:
        patched.setattr(terminal, "progress", lambda quiet: progress)
        assert main(command) == 130
    said = capsys.readouterr().err
    assert f"{workspace.partial_of(out)}: nothing to resume: a new run" in said
    assert f"9 finished steps are kept in {workspace.partial_of(out)}: go on with --resume" in said
    assert main([*command, "-q"]) == 0
    assert "going on after 9 finished steps" in capsys.readouterr().err
    is_the_unbroken_run(out, case)


def test_a_run_that_had_finished_nothing_leaves_nothing_to_resume(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        engine.run(case.read(), out, progress=at_step("sensitivity", interrupt))
    assert list(tmp_path.iterdir()) == []


def test_two_runs_at_once_do_not_share_an_output(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with workspace.workspace(out, False, 1), pytest.raises(InputError, match=rf"another run \(process {os.getpid()}\)"):
        workspace.check_free(out, overwrite=True, resume=True)
    # Its lock went with it.
    workspace.check_free(tmp_path / "other", overwrite=False)


def test_a_folder_of_that_name_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/thesis.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(InputError, match=r"no run of compress wrote: thesis\.txt"):
            workspace.check_free(tmp_path / "out", overwrite=True, resume=resume)
    assert entries(tmp_path) == []
