"""docs/devices.md says what a file takes and gives; a real file says whether that is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from compress import engine
from exporters.onnx import OnnxExporter
from tests.compress.runs import Bench
from tests.support import rounded_model, tiny_llama
from tests.test_docs import ROOT, blocks, sections, tables

PAGE = ROOT / "docs" / "devices.md"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("devices")
    model = rounded_model(tiny_llama(folder / "model"), folder / "work")
    (folder / "out").mkdir()
    artifact = OnnxExporter().write(model, folder / "out")
    return onnxruntime.InferenceSession(artifact.path / artifact.entry)


def rows(values: Any) -> list[list[str]]:
    return [[f"`{item.name}`", item.type, f"[{', '.join(map(str, item.shape))}]"] for item in values]


def test_inputs_and_outputs_are_those_of_a_file(session: Any) -> None:
    inputs, outputs, _ = tables(sections(PAGE)["The file's inputs and outputs"])
    assert inputs == rows(session.get_inputs())
    assert outputs == rows(session.get_outputs())


def test_the_cache_has_the_types_and_sizes_that_the_page_says(bench: Bench, tmp_path: Path) -> None:
    *_, said = tables(sections(PAGE)["The file's inputs and outputs"])
    quiet = {"measure": "false", "evaluate": "false"}
    found = []
    for number, (recipe, _, _) in enumerate(said):
        step = recipe.strip("`")
        passes = f"[rtn, {{{step}}}]" if step.startswith("kv") else "[rtn]"
        export = f"[{{{step}}}]" if step.startswith("onnx") else "[onnx]"
        out = tmp_path / str(number)
        engine.run(bench.recipe(passes=passes, export=export, **quiet), out)
        opened = onnxruntime.InferenceSession(out / "onnx" / "model.onnx")
        cache = next(item for item in opened.get_inputs() if item.name == "past_key_values.1.value")
        found.append([recipe, cache.type, str(cache.shape[-1])])
    assert found == said


@pytest.mark.parametrize(
    ("language", "prefixes", "constants"),
    [
        (
            "cpp",
            ('"past_key_values." + name', '"present." + name'),
            r"kBlocks = 2, kHeads = 2, kHeadSize = 16, kVocabulary = 320",
        ),
        ("kotlin", ("past_key_values.${it.key}", "present.$it"), r"blocks = 2\s+val heads = 2L\s+val headSize = 16L"),
    ],
)
def test_programs_name_what_the_file_has(
    session: Any, language: str, prefixes: tuple[str, str], constants: str
) -> None:
    (code,) = blocks(PAGE, language).values()
    names = [item.name for item in (*session.get_inputs(), *session.get_outputs())]
    plain = {name for name in names if "." not in name}
    assert plain == {name for name in re.findall(r'"(\w+)"', code) if "_" in name or name == "logits"}
    assert all(prefix in code for prefix in prefixes)
    assert {name.rpartition(".")[0].rpartition(".")[0] for name in names if "." in name} == {
        "past_key_values",
        "present",
    }
    assert {name.rpartition(".")[2] for name in names if "." in name} == {
        part for part in ("key", "value") if f".{part}" in code
    }
    assert re.search(constants, code)
    blocks_, heads, size = len([n for n in names if n.startswith("present.") and n.endswith("key")]), 2, 16
    cache = next(item for item in session.get_inputs() if item.name == "past_key_values.0.key")
    assert (blocks_, cache.shape[1], cache.shape[3]) == (2, heads, size)
