from __future__ import annotations

import gc
import os
import resource
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compress import engine, terminal, workspace
from compress.__main__ import main
from compress.errors import InputError
from compress.lock import LOCK
from compress.report import Report
from compress.session import Progress
from compress.units import size
from tests.compress.runs import Bench, at_step, digests, names, progress_that
from tests.support import tiny_llama

EVERY_STEP = ["preparing", "compressing blocks", "reference logits", "writing onnx", "evaluate", "writing gguf"]


def refused(bench: Bench, folder: Path, out: Path | str, *options: str) -> int:
    """Exit code of a run into ``out`` that should stop before any work."""
    recipe = bench.file(folder / "recipe.yaml")
    return main(["run", str(recipe), "--out", str(out), "-q", *options])


def finish(out: Path, content: str = "new", overwrite: bool = False) -> None:
    """What a run does, as far as the folder is concerned."""
    with workspace.workspace(out, overwrite, 1000) as work:
        (work.result / "onnx").mkdir()
        (work.result / "onnx/model").write_text(content)
        workspace.write_manifest(work.result)


def stop_half_way(out: Path, kind: type[BaseException], act: Callable[[], object] = lambda: None) -> None:
    """A run that ends in the middle."""
    with workspace.workspace(out, True, 1000) as work:
        (work.result / "half").write_text("written")
        act()
        raise kind("stop")


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_finished_folder_takes_its_name_with_the_rights_of_any_new_folder(tmp_path: Path) -> None:
    out = tmp_path / "deep/er/out"
    finish(out)
    assert names(tmp_path) == {"deep/er/out/onnx/model", "deep/er/out/manifest.json"}
    (tmp_path / "plain").mkdir()
    assert stat.S_IMODE(out.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_whatever_stops_a_run_leaves_nothing_not_even_folders_above_it(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    with pytest.raises(kind):
        stop_half_way(tmp_path / "deep/er/out", kind)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_somebody_else_uses_meanwhile_stay(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stop"):
        stop_half_way(tmp_path / "deep/out", ValueError, lambda: (tmp_path / "deep/other").write_text("mine"))
    assert names(tmp_path) == {"deep/other"}


def test_an_empty_folder_is_filled_and_an_earlier_run_replaced_only_with_overwrite(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    finish(out, "first")
    with pytest.raises(InputError, match="holds an earlier run"):
        finish(out, "second")
    assert (out / "onnx/model").read_text() == "first"
    finish(out, "third", overwrite=True)
    assert (out / "onnx/model").read_text() == "third"
    assert hidden(tmp_path) == []


def test_the_older_run_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    finish(out, "first")
    seen = []
    with pytest.raises(KeyboardInterrupt):
        stop_half_way(out, KeyboardInterrupt, lambda: seen.append((out / "onnx/model").read_text()))
    assert seen == ["first"]
    assert names(tmp_path) == {"out/onnx/model", "out/manifest.json"}


@pytest.mark.parametrize("error", [OSError(5, "stop"), KeyboardInterrupt("stop")])
def test_the_older_run_comes_back_if_the_new_one_cannot_take_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    out = tmp_path / "out"
    finish(out, "first")
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == workspace.RESULT:
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(type(error), match="stop"):
        finish(out, "second", overwrite=True)
    assert (out / "onnx/model").read_text() == "first"
    assert hidden(tmp_path) == []


def test_a_run_that_took_the_name_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    finish(tmp_path / "other", "faster")
    with pytest.raises(InputError, match="holds an earlier run"), workspace.workspace(out, False, 1000):
        (tmp_path / "other").rename(out)
    assert (out / "onnx/model").read_text() == "faster"
    assert hidden(tmp_path) == []


def test_finished_steps_outlive_a_name_that_was_taken_and_no_input_that_would_fail_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    finish(tmp_path / "other", "faster")

    def end_with(act: Callable[[], object], resume: bool = False) -> None:
        with workspace.workspace(out, resume, 1, resume=resume) as work:
            if not resume:
                work.journal.add("block 0", {})
            act()

    with pytest.raises(InputError, match="holds an earlier run") as caught:
        end_with(lambda: (tmp_path / "other").rename(out))
    assert caught.value.__notes__ == [f"1 finished steps are kept in {workspace.partial_of(out)}: go on with --resume"]
    assert workspace.interrupted(out) == 1
    with pytest.raises(InputError, match="cannot write"):
        end_with(lambda: fail("cannot write"), resume=True)
    assert hidden(tmp_path) == []


def fail(what: str) -> None:
    raise InputError(what)


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk/run")
    finish(tmp_path / "out", "first")
    finish(tmp_path / "out", "second", overwrite=True)
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk/run/onnx/model").read_text() == "second"
    assert hidden(tmp_path) + hidden(tmp_path / "disk") == []


def test_the_working_directory_may_be_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    finish(Path())
    assert names(tmp_path) == {"here/onnx/model", "here/manifest.json"}


def test_an_output_that_cannot_be_is_refused_before_any_work(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/thesis.txt").write_text("mine")
    finish(tmp_path / "earlier", "old")
    before = names(tmp_path) | {"recipe.yaml"}
    complaints = {
        "file": "this is a file; the output is a folder",
        "file/below": "this is a file, not a folder to write into",
        "foreign": "the folder holds something that no run of compress wrote",
        "earlier": "the folder holds an earlier run",
    }
    for out, complaint in complaints.items():
        assert refused(bench, tmp_path, tmp_path / out) == 2
        assert f"{tmp_path / out.removesuffix('/below')}: {complaint}" in capsys.readouterr().err
    assert refused(bench, tmp_path, tmp_path / "foreign", "--overwrite") == 2
    assert refused(bench, tmp_path, tmp_path / "earlier", "--dry-run") == 2
    assert "replace it with --overwrite" in capsys.readouterr().err
    assert names(tmp_path) == before


def test_a_parent_that_takes_no_folder_is_refused(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=r"cannot write here|may not be written to"):
        finish(Path("/proc/nowhere/out"))
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    if not os.access(locked, os.W_OK):
        assert refused(bench, tmp_path, locked / "out") == 2
        assert f"{locked}: this folder may not be written to" in capsys.readouterr().err


@pytest.mark.parametrize("step", EVERY_STEP)
def test_an_interrupt_at_any_step_leaves_the_older_run_alone(bench: Bench, tmp_path: Path, step: str) -> None:
    out = tmp_path / "out"
    finish(out, "first")

    def interrupt() -> None:
        raise KeyboardInterrupt

    recipe = bench.recipe(export="[onnx, gguf]")
    with pytest.raises(KeyboardInterrupt):
        engine.run(recipe, out, overwrite=True, progress=at_step(step, interrupt))
    assert names(out) == {"onnx/model", "manifest.json"}
    only_finished_steps_are_left(out, step)


def only_finished_steps_are_left(out: Path, step: str) -> None:
    """Of a run that ended at ``step``; nothing but the older run where it had finished none."""
    partial = workspace.partial_of(out)
    if step in ("preparing", "compressing blocks"):
        assert hidden(out.parent) == []
    else:
        assert hidden(out.parent) == [partial.name]
        assert {path.name for path in partial.iterdir()} == {workspace.STATE, LOCK}
        assert {path.name for path in (partial / workspace.STATE).iterdir()} == {"journal", "blocks"}


@contextmanager
def file_size_limit() -> Iterator[Callable[[int], None]]:
    """A function that sets the largest size of a file this process may write, until the context ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "step", ["compressing blocks", "reference logits", "writing onnx", "writing gguf", "reading gguf back"]
)
def test_a_file_size_limit_ends_with_2_says_what_is_needed_and_keeps_the_older_run(
    bench: Bench,
    tmp_path: Path,
    step: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, recipe = tmp_path / "out", bench.file(tmp_path / "recipe.yaml", export="[onnx, gguf]")
    finish(out, "first")
    with file_size_limit() as set_limit:
        # The last step writes small files only: the report is larger than this.
        progress: Progress = at_step(step, lambda: set_limit(2000))
        monkeypatch.setattr(terminal, "progress", lambda quiet: progress)
        assert main(["run", str(recipe), "--out", str(out), "--overwrite"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"input error: {out}: the file size limit is reached: about ")
    needed = engine.plan(bench.recipe(export="[onnx, gguf]")).needed["disk_bytes"]
    assert f"about {size(needed)} needed" in message
    assert names(out) == {"onnx/model", "manifest.json"}
    only_finished_steps_are_left(out, step)
    assert ("finished steps are kept in" in message) == (step != "compressing blocks")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("a file system can be mounted by root only")
    yield place
    # The frames of an error that was caught may still map files there.
    gc.collect()
    subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path) -> None:
    """Leave nothing free."""
    with (disk / "filler").open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return


@pytest.mark.parametrize("step", ["compressing blocks", "reference logits", "writing onnx", "writing gguf"])
def test_a_disk_that_fills_up_is_the_users_to_mend(bench: Bench, small_disk: Path, step: str) -> None:
    out = small_disk / "out"
    finish(out, "first")
    recipe = bench.recipe(export="[onnx, gguf]")
    with pytest.raises(
        InputError, match=r"the disk is full: about .* needed, .* were free; it is as it was before"
    ) as caught:
        engine.run(recipe, out, overwrite=True, progress=at_step(step, lambda: fill(small_disk)))
    assert caught.value.where == str(out)
    assert names(out) == {"onnx/model", "manifest.json"}
    only_finished_steps_are_left(out, step)


def test_too_little_room_is_known_before_any_work(bench: Bench, small_disk: Path) -> None:
    needed = engine.plan(bench.recipe()).needed["disk_bytes"]
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - needed // 2))
    with pytest.raises(InputError, match=rf"disk: about {size(needed)} needed, .* free at {small_disk}"):
        engine.run(bench.recipe(), small_disk / "out")
    assert names(small_disk) == {"filler"}


def test_the_room_asked_for_is_about_what_is_used(bench: Bench, tmp_path: Path) -> None:
    most = 0

    def look(_: str) -> None:
        nonlocal most
        most = max(most, sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()))

    recipe = bench.recipe(export="[onnx, gguf]", ignore='["*.q_proj"]')
    engine.run(recipe, tmp_path / "out", progress=progress_that(look))
    needed = engine.plan(recipe).needed["disk_bytes"]
    assert most <= needed <= 2 * most


def test_a_mount_point_is_refused_since_nothing_can_be_renamed_onto_it(bench: Bench, small_disk: Path) -> None:
    with pytest.raises(InputError, match="this is a mount point") as caught:
        engine.run(bench.recipe(), small_disk)
    assert str(small_disk / "run") in caught.value.fix


def referenced_bytes(folder: Path) -> int:
    """Bytes of the data file that some tensor of the model refers to."""
    import onnx

    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    fields = [{entry.key: entry.value for entry in tensor.external_data} for tensor in graph.initializer]
    return sum(int(field["length"]) for field in fields if field)


def test_writing_again_or_a_smaller_model_over_it_leaves_nothing_of_the_old_file(bench: Bench, tmp_path: Path) -> None:
    """onnx/onnx #6655: the library appends to a data file that is there."""
    larger = tiny_llama(tmp_path / "larger", hidden_size=128, intermediate_size=192)
    recipe = str(bench.file(tmp_path / "recipe.yaml", export="[onnx, gguf]", model=str(larger)))
    out = tmp_path / "out"
    command = ["run", recipe, "--out", str(out), "-q"]
    assert main(command) == 0
    first, sizes = digests(out), {name: (out / name).stat().st_size for name in names(out)}
    assert main(command) == 2
    assert digests(out) == first
    for model in (larger, bench.model):
        assert main([*command, "--overwrite", "--model", str(model)]) == 0
        data = (out / "onnx/model.onnx.data").stat().st_size
        assert 0 <= data - referenced_bytes(out / "onnx") < 64 * 20
        recorded = {item.format: item.bytes for item in Report.read(out / "report.json").artifacts}
        assert recorded["gguf"] == (out / "gguf/model.gguf").stat().st_size
        if model == larger:
            now = {name: (out / name).stat().st_size for name in sizes if "/" in name}
            assert now == {name: size for name, size in sizes.items() if "/" in name}
    assert data < 0.6 * sizes["onnx/model.onnx.data"]
    assert names(out) == set(sizes)
