"""What the pages say is so: links lead somewhere, tables agree with the code, and code in them runs."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import compress
from compress import registry
from compress.cli import cli
from compress.errors import CompressError, GateError, InputError
from compress.fields import expected, field_types, plain, required_fields
from compress.models.topology import FAMILIES, describe
from compress.reading import ROOT_KEYS, SECTIONS
from compress.recipe import bundled
from compress.scheme import QuantScheme
from tests.support import rounded_model, tiny_llama

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?:<!-- file: (\S+) -->\n)?^```(\w*)\n(.*?)^```$", re.M | re.S)
DECISIONS = ROOT / "docs" / "decisions"


def blocks(page: Path, language: str) -> dict[str, str]:
    """File name (or a number) -> text of each code block of one language."""
    found = FENCE.findall(page.read_text())
    return {name or str(index): text for index, (name, kind, text) in enumerate(found) if kind == language}


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def tables(text: str) -> Iterator[list[list[str]]]:
    """Each table as rows of cells, without its head."""
    for lines in re.findall(r"(?:^\|.*\|\n)+", text, re.M):
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines.splitlines()]
        yield rows[2:]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_the_index_of_decisions_lists_every_page() -> None:
    pages = {path.name for path in DECISIONS.glob("*.md")} - {"README.md"}
    listed = re.findall(r"^\| \[[\w-]+\]\((.*?)\)", (DECISIONS / "README.md").read_text(), re.M)
    assert sorted(listed) == sorted(pages)


def sections(page: Path) -> dict[str, str]:
    """Title -> text up to the next title of any level."""
    parts = re.split(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def described(cls: type[Any]) -> list[list[str]]:
    """Key, type and default of each field of a dataclass, as a row of the reference."""
    kinds, rows = field_types(cls), []
    for item in dataclasses.fields(cls):
        default = "required"
        if item.name not in required_fields(cls):
            factory = item.default_factory
            value = item.default if factory is dataclasses.MISSING else factory()
            text = yaml.safe_dump(plain(value), default_flow_style=True, width=1000).splitlines()[0]
            default = "none" if value is None else f"`{text}`"
        rows.append([f"`{item.name}`", expected(kinds[item.name]), default])
    return rows


KINDS: tuple[registry.Kind, ...] = ("passes", "exporters")
STEPS: list[tuple[registry.Kind, str]] = [(kind, name) for kind in KINDS for name in registry.BUILTIN[kind]]


@pytest.mark.parametrize("title", [*SECTIONS, *(name for _, name in STEPS)])
def test_the_reference_has_every_key_with_its_type_and_default(title: str) -> None:
    kinds = {name: kind for kind, name in STEPS}
    cls = SECTIONS[title] if title in SECTIONS else registry.load(kinds[title], title)
    found = list(tables(sections(ROOT / "docs" / "recipes.md")[title]))
    # Where there is no key, there is no table.
    assert bool(found) == bool(described(cls))
    assert [row[:3] for table in found for row in table] == described(cls)
    assert all(meaning for table in found for *_, meaning in table)


def test_the_reference_has_every_key_of_the_file_and_no_pass_that_is_not_there() -> None:
    page = ROOT / "docs" / "recipes.md"
    (table,) = tables(sections(page)["The file"])
    assert sorted(row[0] for row in table) == sorted(f"`{key}`" for key in ROOT_KEYS)
    steps = re.findall(r"^### (\w+)$", page.read_text(), re.M)
    assert steps == [name for _, name in STEPS]


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "recipes.md"], ids=lambda page: page.stem)
def test_recipes_in_the_pages_are_recipes(page: Path, tmp_path: Path) -> None:
    found = blocks(page, "yaml")
    assert found
    for number, text in found.items():
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        compress.load_recipe(path)


def command_lines() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for text in blocks(page, "sh").values():
            for line in text.splitlines():
                if line.startswith("compress "):
                    yield page.name, line


@pytest.mark.parametrize(("page", "line"), list(command_lines()))
def test_commands_in_the_pages_are_commands(page: str, line: str) -> None:
    words = shlex.split(line.split(" > ", maxsplit=1)[0], comments=True)[1:]
    name, command, rest = cli.resolve_command(click.Context(cli), words)
    assert command is not None
    context = command.make_context(name, list(rest))
    recipe = context.params.get("recipe")
    if recipe is not None and not recipe.endswith(".yaml"):
        compress.load_recipe(recipe, context.params["overrides"])


def test_targets_in_the_pages_are_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {name for page in PAGES for name in re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.M)}
    assert {"demo", "test"} <= named <= targets


def test_the_readme_names_every_family_and_every_recipe() -> None:
    text = (ROOT / "README.md").read_text()
    (families,) = re.findall(r"^Model families: (.*?) \(", text, re.M | re.S)
    assert " ".join(families.split()) == ", ".join(f"`{name}`" for name in FAMILIES)
    (table,) = tables(sections(ROOT / "README.md")["A recipe"])
    assert {name for row in table for name in row[0].split(", ")} == {f"`{path.stem}`" for path in bundled()}


def test_exit_codes_are_those_of_the_errors() -> None:
    table = next(tables(sections(ROOT / "README.md")["In a pipeline"]))
    codes = [0, CompressError.exit_code, InputError.exit_code, GateError.exit_code]
    assert [row[0] for row in table] == [str(code) for code in codes]


def test_the_table_of_schemes_is_what_the_exporters_store(tmp_path: Path) -> None:
    table, _ = tables(sections(ROOT / "README.md")["Formats and schemes"])
    rows = {row[0].strip("`"): dict(zip(("onnx", "gguf"), row[1:], strict=True)) for row in table}
    checkpoint = tiny_llama(tmp_path / "model", hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    spec = describe(json.loads((checkpoint / "config.json").read_text()))
    layers = dict(zip(rows, spec.all_linears(), strict=False))
    assert len(layers) == len(rows)
    shapes = dict.fromkeys(layers.values(), (64, 256))
    for format in ("onnx", "gguf"):
        exporter = registry.load("exporters", format)()
        stored = {scheme: layer for scheme, layer in layers.items() if rows[scheme][format] != "-"}
        refused = {layers[scheme]: QuantScheme.parse(scheme) for scheme in layers.keys() - stored.keys()}
        complaints = exporter.check(spec, refused, shapes)
        assert all(any(layer in line for line in complaints) for layer in refused)
        assert len(complaints) == len(refused)
        plan = {layer: None if scheme == "float" else scheme for scheme, layer in stored.items()}
        model = rounded_model(checkpoint, tmp_path / f"{format}.work", "int8-g32", plan)
        out = tmp_path / format
        out.mkdir()
        found = {item.layer: item for item in exporter.inspect(exporter.write(model, out))}
        for scheme, layer in stored.items():
            item = found[layer]
            bits = f"{8 * item.bytes / (item.shape[0] * item.shape[1]):g}"
            told = bits if format == "onnx" else f"{bits} ({item.type})"
            assert told == rows[scheme][format], (format, scheme)


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


def tree(text: str) -> set[str]:
    """The files that a drawing of a folder names."""
    files, folder = set(), ""
    for line in text.splitlines()[1:]:
        indent = len(line) - len(line.lstrip())
        folder = folder if indent > 2 else ""
        names = re.split(r" {2,}", line.strip())[0].split(", ")
        if names == [f"{names[0].rstrip('/')}/"]:
            folder = names[0]
        else:
            files |= {folder + name for name in names}
    return files


def test_python_in_the_readme_runs_and_writes_the_files_that_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = tiny_llama(tmp_path / "model", chat_template="{{ messages[0]['content'] }}")
    (code,) = blocks(ROOT / "README.md", "python").values()
    short = ", ".join(f'"{section}.sequence_length=64"' for section in ("calibration", "evaluate"))
    small = f'model="{checkpoint}", overrides=["measure=false", {short}, '
    exec(compile(replaced(code, ("overrides=[", small)), "README.md", "exec"), {})
    needed, onnx, *_, passed = capsys.readouterr().out.splitlines()
    assert "disk_bytes" in needed
    assert onnx.startswith("onnx ")
    assert passed == "True"
    written = {str(path.relative_to("runs/from_python")) for path in Path("runs/from_python").rglob("*.*")}
    drawing = next(text for text in blocks(ROOT / "README.md", "").values() if text.startswith("runs/"))
    assert tree(drawing) == written


def test_importing_compress_imports_nothing_heavy_and_offers_nothing_unknown() -> None:
    code = (
        "import sys, compress; compress.load_recipe('rtn_4');"
        "print(sorted({'torch', 'transformers', 'onnx', 'onnxruntime', 'gguf', 'llama_cpp', 'numpy'} & {*sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
    assert all(hasattr(compress, name) for name in compress.__all__)
    assert not hasattr(compress, "ran")


@pytest.fixture
def plugin(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of one of CONTRIBUTING's plug-ins, installed for this test."""
    folder, site = tmp_path / "plugin", tmp_path / "site"
    folder.mkdir()
    for language in ("python", "toml", "yaml"):
        for name, text in blocks(ROOT / "CONTRIBUTING.md", language).items():
            if name.startswith(f"{request.param}/"):
                (folder / Path(name).name).write_text(text)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-build-isolation", "--no-deps"]
    run = subprocess.run([*pip, "--target", str(site), str(folder)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    monkeypatch.syspath_prepend(site)
    # The process that runs an artifact must find the runtime as well.
    monkeypatch.setenv("PYTHONPATH", str(site))
    return folder


SMALL = ["calibration={samples: 4, sequence_length: 64}", "evaluate={windows: 2, sequence_length: 64}", "measure=false"]


@pytest.mark.parametrize("plugin", ["weighted", "codes"], indirect=True)
def test_plug_ins_are_clean(plugin: Path) -> None:
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check"], ["format", "--check"]):
        run = subprocess.run(
            [*ruff, *command, "--config", str(ROOT / "pyproject.toml"), "--no-cache", "."],
            cwd=plugin,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("plugin", ["weighted"], indirect=True)
def test_the_pass_of_contributing_runs_in_a_recipe(plugin: Path, tmp_path: Path) -> None:
    checkpoint = tiny_llama(tmp_path / "model")
    recipe = compress.load_recipe(plugin / "recipe.yaml", [*SMALL, "passes.mixed.samples=1"], str(checkpoint))
    report = compress.run(recipe, tmp_path / "out")
    mixed, weighted = report.passes
    assert (mixed.name, weighted.name, weighted.arguments["power"]) == ("mixed", "weighted", 0.5)
    planned = {layer.layer: layer.scheme for layer in mixed.layers}
    assert {layer.layer: layer.scheme for layer in weighted.layers if layer.layer in planned} == planned
    assert set(planned.values()) == {"int4-g32", "int8-g32"}
    judged = [layer for layer in weighted.layers if layer.output_error is not None]
    assert all((layer.output_error or 1) <= (layer.rounding_error or 0) for layer in judged)
    better = [layer for layer in judged if (layer.output_error or 1) < (layer.rounding_error or 0)]
    assert len(better) > len(judged) / 2
    assert [artifact.parity is not None and artifact.parity.passed for artifact in report.artifacts] == [True, True]
    with pytest.raises(InputError, match=r"power: 3\.0 is not between 0 and 2"):
        compress.load_recipe(plugin / "recipe.yaml", ["passes.weighted.power=3"])


CASES: Sequence[tuple[str, dict[str, Any]]] = [
    ("int4-g32-asym", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("int8-channel", {"hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 3, "num_key_value_heads": 1}),
    ("int2-g64-asym", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
]


@pytest.mark.parametrize("plugin", ["codes"], indirect=True)
def test_the_exporter_of_contributing_stores_and_runs_what_the_passes_chose(plugin: Path, tmp_path: Path) -> None:
    for number, (scheme, settings) in enumerate(CASES):
        checkpoint = tiny_llama(tmp_path / f"model{number}", edit=shift_biases, **settings)
        overrides = [*SMALL, f"passes.rtn.scheme={scheme}", "pin={'model.layers.1.*.o_proj': float}"]
        recipe = compress.load_recipe(plugin / "recipe.yaml", overrides, str(checkpoint))
        (artifact,) = compress.run(recipe, tmp_path / f"out{number}").artifacts
        assert artifact.parity is not None
        assert artifact.parity.passed
        assert artifact.quality is not None
        assert artifact.quality.kld_mean > 10 * artifact.parity.kld_mean


@pytest.mark.parametrize("plugin", ["codes"], indirect=True)
def test_the_exporter_of_contributing_refuses_what_it_cannot_store(plugin: Path, tmp_path: Path) -> None:
    checkpoint = tiny_llama(tmp_path / "model")
    recipe = compress.load_recipe(plugin / "recipe.yaml", ["passes.rtn.scheme=int3-g32"], str(checkpoint))
    with pytest.raises(InputError, match=r"up_proj \[96, 64\]: int3-g32 cannot be stored") as refusal:
        compress.run(recipe, tmp_path / "out")
    assert len(re.findall("cannot be stored", refusal.value.what)) == 14


def shift_biases(parameters: dict[str, Any]) -> None:
    for name, parameter in parameters.items():
        if name.endswith("bias"):
            parameter.add_(0.3)
