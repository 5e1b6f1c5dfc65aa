"""Which artifact a path means."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress.errors import InputError
from compress.runner.artifact import find_artifact, list_artifacts, weight_files


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """What a run leaves: two artifacts and its report."""
    for name in ("onnx/model.onnx", "onnx/model.onnx.data", "onnx/tokenizer.json", "gguf/model.gguf", "report.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


@pytest.mark.parametrize("given", ["onnx", "onnx/model.onnx"])
def test_a_file_and_its_folder_mean_the_same(run_folder: Path, given: str) -> None:
    found = find_artifact(run_folder / given)
    assert (found.format, found.path, found.entry) == ("onnx", run_folder / "onnx", "model.onnx")


def test_a_relative_path_becomes_absolute(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_folder / "gguf")
    assert find_artifact("model.gguf").path == run_folder / "gguf"


def test_a_run_folder_offers_its_artifacts_and_a_format_chooses(run_folder: Path) -> None:
    with pytest.raises(InputError, match=r"(?s)2 artifacts here.*model\.gguf.*model\.onnx") as caught:
        find_artifact(run_folder)
    assert "--format" in caught.value.fix
    assert find_artifact(run_folder, "gguf").entry == "model.gguf"
    assert [artifact.format for artifact in list_artifacts(run_folder)] == ["gguf", "onnx"]


def test_the_main_graph_of_several_is_taken_and_others_are_offered(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    (tmp_path / "encoder.onnx").touch()
    assert find_artifact(tmp_path).entry == "model.onnx"
    (tmp_path / "model.onnx").rename(tmp_path / "decoder.ONNX")
    with pytest.raises(InputError, match="2 artifacts"):
        find_artifact(tmp_path)


def test_a_missing_path_suggests_its_neighbour(run_folder: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'onnx'"):
        find_artifact(run_folder / "onxx")
    with pytest.raises(InputError, match="no such file"):
        find_artifact(run_folder / "nowhere" / "at" / "all")


@pytest.mark.parametrize("given", ["report.json", "empty"])
def test_what_was_looked_for_is_said(run_folder: Path, given: str) -> None:
    (run_folder / "empty").mkdir()
    with pytest.raises(InputError, match=r"looked for \*\.onnx or \*\.gguf"):
        find_artifact(run_folder / given)


def test_weight_files_are_the_entry_and_its_data(run_folder: Path) -> None:
    found = weight_files(run_folder / "onnx" / "model.onnx")
    assert [file.name for file in found] == ["model.onnx", "model.onnx.data"]
