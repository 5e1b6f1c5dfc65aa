from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import compress
import exporters
from compress import registry
from compress.__main__ import main
from compress.errors import GateError, InputError, ParityError
from compress.kv import CacheTypes
from compress.recipe import BUNDLED, Evaluate, Measure, Recipe
from compress.report import GateRecord, Report
from tests.compress.exported import export

WRONG = "model: m\npasses:\n  - gptq: {damp_percnt: 0.1}\nexport: [onnx]\n"


def start(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    env = os.environ | environment
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def cpu_seconds(*arguments: str, cwd: Path) -> float:
    process = subprocess.Popen([sys.executable, *arguments], cwd=cwd, stderr=subprocess.DEVNULL)
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return usage.ru_utime + usage.ru_stime


def empty_report(*gates: GateRecord) -> Report:
    return Report({}, {}, {}, {}, {}, (), (), gates, {})


Install = Callable[..., list[Any]]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts functions in the engine's place and returns the list of their calls' arguments: only the mapping to exit
    codes and options is tested with it.
    """

    def install(**results: Any) -> list[Any]:
        calls: list[Any] = []

        def answer(result: Any) -> Callable[..., Any]:
            def function(*arguments: Any, **named: Any) -> Any:
                calls.append((arguments, named))
                if isinstance(result, BaseException):
                    raise result
                return result

            return function

        for place in ("engine", "artifacts"):
            module = ModuleType(f"compress.{place}")
            for name, result in results.items():
                setattr(module, name, answer(result))
            monkeypatch.setitem(sys.modules, f"compress.{place}", module)
            monkeypatch.setattr(compress, place, module, raising=False)
        return calls

    return install


def test_a_misspelt_key_ends_with_2_without_loading_a_model_library(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(WRONG)
    run = start("-X", "importtime", "-m", "compress", "run", "wrong.yaml", cwd=tmp_path)
    assert run.returncode == 2
    assert "wrong.yaml:3: passes[0].gptq.damp_percnt: unknown key; did you mean 'damping'?" in run.stderr
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}
    assert "compress.recipe" in imported
    heavy = {"torch", "transformers", "onnx", "onnxruntime", "gguf", "llama_cpp", "scipy", "datasets", "rich"}
    assert not imported & heavy
    assert "Traceback" not in run.stderr


def test_a_misspelt_key_is_found_in_less_time_than_torch_takes_to_import(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(WRONG)
    mine = cpu_seconds("-m", "compress", "run", "wrong.yaml", cwd=tmp_path)
    assert mine < 0.5 * cpu_seconds("-c", "import torch", cwd=tmp_path)


def test_help_needs_little_more_than_the_option_parser(tmp_path: Path) -> None:
    run = start("-X", "importtime", "-m", "compress", "--help", cwd=tmp_path)
    assert run.returncode == 0
    assert "yaml" not in {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    help_s = cpu_seconds("-m", "compress", "--help", cwd=tmp_path)
    assert help_s < 5 * cpu_seconds("-c", "import click", cwd=tmp_path)


@pytest.mark.parametrize("arguments", [["run", "no_such"], ["plan", "rtn_4", "--set", "x=1"], ["list", "x"], ["nope"]])
def test_what_the_user_got_wrong_ends_with_2_and_says_so_in_words(
    arguments: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err
    assert "Traceback" not in captured.err


def test_options_reach_the_recipe_and_the_engine(engine: Install, tmp_path: Path) -> None:
    calls = engine(run=empty_report())
    options = ["--model", "m", "--set", "passes.rtn.search=false", "--set", "measure=false", "--overwrite"]
    assert main(["run", "rtn_4", *options, "--out", str(tmp_path), "--quiet"]) == 0
    (((recipe, out), named),) = calls
    assert isinstance(recipe, Recipe)
    assert (recipe.model, recipe.passes[0].value.search, recipe.measure) == ("m", False, None)
    assert (out, named["overwrite"]) == (tmp_path, True)


def test_results_go_to_a_folder_named_after_the_recipe(engine: Install) -> None:
    calls = engine(run=empty_report())
    assert main(["run", str(BUNDLED / "int8.yaml"), "--quiet"]) == 0
    assert main(["run", "mixed_4_8", "--quiet"]) == 0
    assert [arguments[1] for arguments, _ in calls] == [Path("runs/int8"), Path("runs/mixed_4_8")]


def test_a_failed_gate_ends_with_3_after_the_report(engine: Install, capsys: pytest.CaptureFixture[str]) -> None:
    report = empty_report(GateRecord("max_kld", "onnx", 0.2, 0.3, False), GateRecord("max_kld", "gguf", 0.2, 0.1, True))
    engine(run=report)
    assert main(["run", "rtn_4", "--json", "--quiet"]) == 3
    captured = capsys.readouterr()
    assert Report.from_json(captured.out) == report
    assert captured.err == "gate failed: onnx: max_kld is 0.2, found 0.3\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [(InputError("x"), 2), (GateError("x"), 3), (ParityError("x"), 1), (KeyboardInterrupt(), 130)],
)
def test_errors_that_explain_themselves_have_their_exit_code(
    engine: Install, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    engine(run=error)
    assert main(["run", "rtn_4", "-q"]) == code
    assert "Traceback" not in capsys.readouterr().err


def test_an_unexpected_error_ends_with_1_and_keeps_its_traceback(
    engine: Install, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine(run=KeyError("surprise"))
    assert main(["run", "rtn_4", "-q"]) == 1
    message = capsys.readouterr().err
    (saved,) = tmp_path.iterdir()
    assert "KeyError: 'surprise'" in message
    assert str(saved) in message
    assert "Traceback" not in message
    assert "Traceback" in saved.read_text()
    assert main(["--debug", "run", "rtn_4", "-q"]) == 1
    assert "Traceback" in capsys.readouterr().err


class Planned:
    @staticmethod
    def to_dict() -> dict[str, Any]:
        return {
            "model": "m",
            "layers": [{"layer": "lm_head", "scheme": "int8-g32"}, {"layer": "norm", "shape": [1, 2]}],
        }


@pytest.mark.parametrize("command", [["plan", "rtn_4"], ["run", "rtn_4", "--dry-run"]])
def test_a_plan_is_shown_as_json_or_as_a_table(
    engine: Install, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    engine(plan=Planned())
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == Planned.to_dict()
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("model", "lm_head", "int8-g32", "1, 2"))


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    export(folder)
    return folder


def test_bench_and_eval_pass_their_options_on(engine: Install, artifacts: Path) -> None:
    calls = engine(bench=InputError("stop"), evaluate=InputError("stop"))
    assert main(["bench", str(artifacts / "gguf"), "--threads", "1", "--repeats", "5"]) == 2
    assert main(["eval", str(artifacts), "--format", "onnx", "--reference", "m", "--windows", "3"]) == 2
    assert calls == [
        ((artifacts / "gguf/model.gguf", Measure(threads=1, repeats=5)), {}),
        ((artifacts / "onnx/model.onnx", "m", Evaluate(windows=3)), {"cache": CacheTypes(), "bound": None}),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", ".", "--threads", "0", "--repeats", "-1"], "--threads: must be at least 1, got 0"),
        (["bench", ".", "--threads", "0", "--repeats", "-1"], "--repeats: must be at least 1, got -1"),
        (["bench", ".", "--threads", "two"], "--threads: expected a number or auto, got 'two'"),
        (["eval", ".", "--reference", "m", "--sequence-length", "1"], "--sequence-length: must be at least 2, got 1"),
        (["eval", ".", "--reference", "m", "--source", "hub"], "--name: source 'hub' needs it"),
        (["chat", ".", "--threads", "9999"], "9999 threads were asked for"),
    ],
)
def test_options_are_checked_like_the_recipes_keys(
    engine: Install, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    engine()
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_chat_answers_a_prompt_or_every_line_of_its_input(artifacts: Path) -> None:
    common = ["-m", "compress", "chat", str(artifacts / "onnx"), "--threads", "1", "--max-tokens", "4"]
    one = start(*common, "--prompt", "quick brown", cwd=artifacts)
    assert one.returncode == 0, one.stderr
    assert one.stdout.strip()
    command = [sys.executable, *common]
    two = subprocess.run(command, input="quick brown\n\nfox\n", capture_output=True, text=True, check=True)
    # The first answer is that of the prompt alone; the second is to the whole conversation.
    assert two.stdout.startswith(one.stdout)
    assert len(two.stdout) > len(one.stdout)
    assert two.stderr.count("the answer was cut") == 2 * one.stderr.count("the answer was cut")


@pytest.mark.parametrize("what", ["passes", "exporters"])
def test_everything_that_a_recipe_can_name_is_listed(what: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", what, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == registry.names(what)
    assert all(row["what"] for row in rows)
    assert main(["list", what]) == 0
    shown = capsys.readouterr().out
    assert all(row["name"] in shown for row in rows)


def test_defaults_and_required_arguments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "passes", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["rtn"]["arguments"] == {"scheme": "int4-g32", "search": True, "importance": None}
    assert rows["mixed"]["required"] == []
    assert rows["mixed"]["arguments"]["target_bits"] is None
    assert rows["mixed"]["arguments"]["choices"] == ["int4-g32", "int8-g32"]


def test_recipes_and_devices_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "recipes", "--json"]) == 0
    assert {"mixed_4_8", "rtn_4"} <= {row["name"] for row in json.loads(capsys.readouterr().out)}
    assert main(["list", "devices", "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)
    assert device["available_cpus"] >= 1
    assert device["runtimes"]["onnxruntime"].startswith("1.")


def test_a_folder_that_another_distribution_put_in_the_way_is_named(tmp_path: Path) -> None:
    foreign = tmp_path / "exporters"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("")
    run = start("-m", "compress", "list", "recipes", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert run.returncode == 2
    assert f"{foreign} is not edgepress's" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_package_of_another_version_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exporters, "__compress__", "0.0.1")
    assert main(["list", "recipes"]) == 2
    assert "exporters belongs to edgepress 0.0.1" in capsys.readouterr().err
