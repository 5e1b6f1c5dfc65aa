from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from importlib.resources import files
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("calibration", "compress", "exporters")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {normal(name): version for name, version in (line.split("==") for line in lines)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the tree: building in place would leave folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy.mkdir()
    names = [*PACKAGES, "recipes", "tests", "pyproject.toml", "README.md", "LICENSE"]
    subprocess.run(["cp", "-a", *(str(ROOT / name) for name in names), str(copy)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-index", "--no-build-isolation", "--no-deps"]
    run = subprocess.run([*command, "-w", str(folder), str(copy)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    plugin = "compress/optimum_plugin/edgepress.py"
    recipes = {f"compress/bundled/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    assert "compress/bundled/mixed_4_8.yaml" in recipes
    expected = (modules - {plugin}) | {"optimum/commands/register/edgepress.py"} | recipes
    expected |= {f"{package}/py.typed" for package in PACKAGES}
    data = {name for name in held - expected if not name.endswith((".py", ".yaml")) and name.startswith(PACKAGES)}
    assert held - data == expected


def test_the_wheel_carries_its_licence_and_its_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entries = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "Apache License" in entries["LICENSE"]
    assert "compress = compress.__main__:main" in entries["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in entries["METADATA"]


def test_the_installed_wheel_finds_its_recipes_and_joins_optimum(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import compress, optimum.commands.register.edgepress as plugin; from importlib.resources import files;"
        "print(compress.__file__); print(plugin.__file__);"
        "print(files('compress.bundled').joinpath('mixed_4_8.yaml').is_file())"
    )
    env = os.environ | {"PYTHONPATH": str(site)}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, env=env
    )
    assert run.stdout.splitlines() == [
        str(site / "compress/__init__.py"),
        str(site / "optimum/commands/register/edgepress.py"),
        "True",
    ]


def test_recipes_are_found_as_a_resource() -> None:
    assert files("compress.bundled").joinpath("mixed_4_8.yaml").is_file()


def optimum(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "edgepress", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_optimum_lists_the_subcommand(tmp_path: Path) -> None:
    run = optimum("--help", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "--recipe" in run.stdout


def test_optimum_hands_over_to_compress_run(tmp_path: Path) -> None:
    run = optimum("--recipe", "no_such_recipe", "out", cwd=tmp_path)
    assert run.returncode == 2, run.stderr
    assert "no such recipe" in run.stdout + run.stderr
    assert "Traceback" not in run.stderr


def test_every_pin_is_what_is_installed() -> None:
    installed = {normal(item.name): item.version.split("+")[0] for item in distributions()}
    differing = {
        name: (version, installed.get(name)) for name, version in pins().items() if installed.get(name) != version
    }
    assert not differing


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    pinned = pins()
    for requirement in map(Requirement, texts):
        assert requirement.specifier.contains(pinned[normal(requirement.name)]), requirement


def test_the_three_packages_carry_one_version() -> None:
    import calibration
    import compress
    import exporters

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {package.__compress__ for package in (calibration, compress, exporters)} == {project["version"]}
