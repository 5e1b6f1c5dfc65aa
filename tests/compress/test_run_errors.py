"""Reports of other tools' users, each tried on a whole run: the right end, said before the work where that can be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress import engine, registry
from compress.__main__ import main
from compress.errors import InputError
from compress.prepare import BFLOAT16
from compress.recipe import loads
from compress.report import Report
from tests.compress.runs import Bench, sentences
from tests.support import tiny_llama

Captured = pytest.CaptureFixture[str]


def refused(capsys: Captured, command: str, recipe: Path, *options: str) -> str:
    """What is said when a command ends with 2; it must have written nothing."""
    before = sorted(recipe.parent.iterdir())
    out = ["--out", str(recipe.parent / "out")] if command == "run" else []
    assert main([command, str(recipe), "-q", *out, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert sorted(recipe.parent.iterdir()) == before
    return captured.err


# --- too little calibration text (Olive #2609, nncf #2230)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes 1024 tokens."""
    return tiny_llama(tmp_path_factory.mktemp("long") / "model", max_position_embeddings=1024)


def tokens_of_text(model: Path, count: int) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return str(tokenizer.decode(tokenizer(sentences(3, 2 * count)).input_ids[:count]))


def test_a_shortfall_of_calibration_text_is_in_the_report_and_said(
    bench: Bench, long: Path, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "short.txt").write_text(tokens_of_text(long, 600))
    text = f"{{source: text, path: {tmp_path}/short.txt, samples: 128, sequence_length: 512}}"
    recipe = bench.file(tmp_path / "recipe.yaml", model=str(long), passes="[gptq]", calibration=text)
    assert main(["run", str(recipe), "--out", str(tmp_path / "out"), "-q"]) == 0
    said = "calibration: asked for 128 samples of 512 tokens, the text has 1"
    assert f"warning: {said}" in capsys.readouterr().out
    report = Report.read(tmp_path / "out/report.json")
    assert said in report.warnings
    assert said in (tmp_path / "out/report.md").read_text()
    audit = report.calibration
    assert (audit["requested_samples"], audit["obtained_samples"]) == (128, 1)
    assert (audit["requested_tokens"], audit["obtained_tokens"]) == (65536, 512)
    tokens = {layer.tokens for layer in report.passes[0].layers if ".layers." in layer.layer}
    assert tokens == {512}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "tokens, not one window of 512"),
        ("", "holds no text (1 empty files)"),
        ("\n\n   \n\n", "holds no text (1 blank files)"),
    ],
)
def test_no_calibration_sample_at_all_is_refused_before_any_work(
    bench: Bench, long: Path, tmp_path: Path, capsys: Captured, text: str | None, complaint: str
) -> None:
    path = tmp_path / "text.txt"
    path.write_text(tokens_of_text(long, 100) if text is None else text)
    source = f"{{source: text, path: {path}, samples: 128, sequence_length: 512}}"
    recipe = bench.file(tmp_path / "recipe.yaml", model=str(long), passes="[gptq]", calibration=source)
    said = refused(capsys, "run", recipe)
    assert str(path) in said
    assert complaint in said


# --- calibration files that are not what they seem (LLaMA-Factory #7016)

TEXT = sentences(4, 400)
QUOTED = f"{TEXT}\n\x93{TEXT}\x94"


def calibrated(bench: Bench, path: Path, **options: str) -> dict[str, Any]:
    """What the plan says of the calibration text in ``path``."""
    source = path.suffix.removeprefix(".").replace("txt", "text")
    more = "".join(f", {key}: {value}" for key, value in options.items())
    text = f"{{source: {source}, path: {path}, samples: 2, sequence_length: 64{more}}}"
    return engine.plan(bench.recipe(passes="[gptq]", calibration=text)).calibration


@pytest.mark.parametrize(
    ("raw", "complaint", "encoding"),
    [
        (QUOTED.encode("latin-1"), f"byte 0x93 at offset {len(TEXT) + 1} (line 2) is not utf-8", "cp1252"),
        (TEXT.encode("utf-16"), "byte order mark of UTF-16", "utf-16"),
    ],
)
def test_another_encoding_is_named_with_its_place_and_can_be_given(
    bench: Bench, tmp_path: Path, raw: bytes, complaint: str, encoding: str
) -> None:
    path = tmp_path / "calibration.txt"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=re.escape(complaint)) as caught:
        calibrated(bench, path)
    assert caught.value.where == str(path)
    assert f"calibration.encoding: {encoding}" in caught.value.fix
    assert calibrated(bench, path, encoding=encoding)["obtained_samples"] == 2


def test_a_byte_order_mark_of_utf_8_is_no_text(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text(TEXT)
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    plain, marked = (calibrated(bench, tmp_path / name) for name in ("plain.txt", "marked.txt"))
    assert plain["tokens_sha256"] == marked["tokens_sha256"]


def test_nul_bytes_are_refused_with_their_place(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "nul.txt").write_bytes(TEXT.encode() + b"\n\0\0")
    with pytest.raises(InputError, match=rf"NUL byte at offset {len(TEXT) + 1} \(line 2\), 2 in the file"):
        calibrated(bench, tmp_path / "nul.txt")


def test_null_and_empty_rows_are_counted_and_a_missing_column_shows_those_there_are(
    bench: Bench, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    rows: list[dict[str, str | None]] = [{"text": None}, {"text": ""}, {"text": TEXT}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    audit = calibrated(bench, path)
    assert audit["dropped"] == {"null_rows": 1, "empty_rows": 1}
    assert audit["documents"] == 1
    path.write_text(path.read_text() + json.dumps({"txt": TEXT}) + "\n")
    with pytest.raises(InputError, match=r"1 rows have no column 'text' \(line 4\); columns: text, txt"):
        calibrated(bench, path)


# --- patterns (llm-compressor #3145, #1642)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve blocks: there are layers 1 and layers 10 and 11."""
    return tiny_llama(tmp_path_factory.mktemp("deep") / "model", num_hidden_layers=12)


@pytest.mark.parametrize(
    ("ignore", "complaint"),
    [
        ("[lm_haed]", "ignore[0]: 'lm_haed' matches no layer; did you mean 'lm_head'?"),
        ("['*.mlp.router', lm_head]", "ignore[0]: '*.mlp.router' matches no layer"),
        ("[model.layers.1]", "a pattern is a whole name: 'model.layers.1.*' would match 7"),
        ("['re:layers']", "it must match the whole name: '.*' before and after would match 84"),
        ("lm_head", "ignore: expected a list"),
    ],
)
def test_a_pattern_that_names_nothing_is_an_error(
    bench: Bench, deep: Path, tmp_path: Path, capsys: Captured, ignore: str, complaint: str
) -> None:
    recipe = bench.file(tmp_path / "recipe.yaml", model=str(deep), ignore=ignore)
    said = refused(capsys, "plan", recipe)
    assert complaint in said
    assert f"{recipe}:7" in said


@pytest.mark.parametrize(
    ("pattern", "blocks", "count"),
    [
        ("model.layers.1.*", {"1"}, 7),
        (r"re:model\.layers\.1\..*", {"1"}, 7),
        (r"re:^model\.layers\.1\.self_attn\..*$", {"1"}, 4),
        (r"re:model\.layers\.1.*", {"1", "10", "11"}, 21),
    ],
)
def test_a_dry_run_shows_what_each_rule_hits(
    bench: Bench, deep: Path, tmp_path: Path, capsys: Captured, pattern: str, blocks: set[str], count: int
) -> None:
    rules = {"ignore": f"['{pattern}']", "pin": "{lm_head: int4-g32}"}
    recipe = bench.file(tmp_path / "recipe.yaml", model=str(deep), **rules)
    assert main(["run", str(recipe), "--dry-run", "--json", "-q", "--out", str(tmp_path / "out")]) == 0
    plan = json.loads(capsys.readouterr().out)
    ignored, pinned = plan["rules"]
    assert (ignored["rule"], ignored["pattern"], ignored["scheme"]) == ("ignore", pattern, "float")
    assert (ignored["count"], len(ignored["layers"])) == (count, count)
    assert {layer.split(".")[2] for layer in ignored["layers"]} == blocks
    assert (pinned["rule"], pinned["scheme"], pinned["layers"]) == ("pin", "int4-g32", ["lm_head"])
    layers = {row["layer"]: (row["scheme"], row["set_by"]) for row in plan["layers"]}
    assert {name for name, (scheme, _) in layers.items() if scheme == "float"} == set(ignored["layers"])
    assert layers[ignored["layers"][0]] == ("float", f"ignore {pattern}")
    assert layers["lm_head"] == ("int4-g32", "pin lm_head")
    assert layers["model.embed_tokens"] == ("int8-g32", "default")
    assert layers["model.layers.2.mlp.up_proj"] == ("int4-g32", "passes")
    assert plan["model"]["float_layers"] == ignored["layers"]
    assert not (tmp_path / "out").exists()


# --- misspelt and misplaced keys (orq-arena #24, SUEWS #1647)

HEAD = "model: no/such/model/here\nexport: [onnx]\n"
GPTQ, RTN = f"{HEAD}passes:\n  - gptq: ", f"{HEAD}passes:\n  - rtn: "


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (f"{RTN}{{grp_size: 32}}\n", "passes[0].rtn.grp_size: unknown key; bits, group and symmetry are one text"),
        (f"{GPTQ}{{damp_percnt: 0.1}}\n", "passes[0].gptq.damp_percnt: unknown key; did you mean 'damping'?"),
        (f'{RTN}{{bits: "4"}}\n', "passes[0].rtn.bits: unknown key"),
        (f"{RTN}{{scheme: 4.0}}\n", "passes[0].rtn.scheme"),
        (f"{RTN}{{scheme: int7-g32}}\n", "7 bits are not supported"),
        (f"{RTN}{{scheme: int0-g32}}\n", "0 bits are not supported"),
        (f"{RTN}{{scheme: true}}\n", "passes[0].rtn.scheme"),
        (f"{RTN}{{sym: no}}\n", "passes[0].rtn.sym: unknown key"),
        (f"{RTN}{{scheme: int4-g1e2}}\n", "'int4-g1e2' is not a scheme"),
        (f"{GPTQ}{{order: 1}}\n", "passes[0].gptq.order"),
        (f"{HEAD}passes: [rtn]\npasses: [gptq]\n", "passes"),
        (f"{HEAD}passes:\n\t- rtn\n", "tab"),
        ("", "an empty recipe"),
        ("- rtn\n", "expected a mapping"),
        (f"{HEAD}passes: [rtn]\ndamping: 0.1\n", "damping: unknown key"),
        (f"{HEAD}passes: [rtn]\nsamples: 3\n", "samples: unknown key here; it belongs under calibration"),
    ],
)
def test_a_wrong_recipe_is_refused_before_the_model_is_looked_at(
    tmp_path: Path, capsys: Captured, text: str, complaint: str
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    said = refused(capsys, "run", recipe)
    assert str(recipe) in said
    assert complaint in said
    assert "no such model" not in said


# --- a prompt or a text that the model cannot take


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        (
            {"measure": "{threads: 1, prompt_tokens: 250, generate_tokens: 7}"},
            "measure.prompt_tokens + generate_tokens: 257 tokens, and the model takes 256",
        ),
        (
            {
                "measure": "{threads: 1, prompt_tokens: 200, generate_tokens: 7}",
                "evaluate": "{windows: 1, sequence_length: 64}",
            },
            "200 tokens were asked for, and its windows have 64",
        ),
        ({"evaluate": "{sequence_length: 257}"}, "evaluate.sequence_length: 257 tokens, and the model takes 256"),
        ({"calibration": "{sequence_length: 999}"}, "calibration.sequence_length: 999 tokens"),
    ],
)
def test_lengths_beyond_the_model_are_refused_before_any_work(
    bench: Bench, tmp_path: Path, capsys: Captured, parts: dict[str, str], complaint: str
) -> None:
    assert complaint in refused(capsys, "run", bench.file(tmp_path / "recipe.yaml", **parts))


# --- accuracy level (onnxruntime-genai #879)


def test_every_matmul_of_a_w4a8_file_has_level_4_and_rounds_its_activations(bench: Bench, tmp_path: Path) -> None:
    import onnx
    import onnxruntime

    path = bench.finished("gptq").out / "onnx/model.onnx"
    model = onnx.load(path)
    nodes = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    levels = {node.name: {item.name: item.i for item in node.attribute}["accuracy_level"] for node in nodes}
    assert len(levels) == 2 * 4 + 1
    assert set(levels.values()) == {4}
    assert not [node.name for node in model.graph.node if node.op_type == "MatMul"]
    for node in nodes:
        for item in node.attribute:
            if item.name == "accuracy_level":
                item.i = 0
    onnx.save(model, tmp_path / "exact.onnx")
    ids = np.arange(1, 17)[None]
    past = np.zeros((1, 2, 0, 16), dtype=np.float32)
    feeds: dict[str, Any] = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    feeds |= {f"past_key_values.{layer}.{part}": past for layer in range(2) for part in ("key", "value")}
    eight, full = (
        onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(["logits"], feeds)[0]
        for file in (path, tmp_path / "exact.onnx")
    )
    difference = np.abs(eight - full).mean() / np.abs(full).mean()
    assert 1e-4 < difference < 0.05


# --- threads (llama.cpp #19110)


@pytest.mark.parametrize("threads", ["0", "-1", "9999", "many"])
def test_a_senseless_number_of_threads_is_refused(bench: Bench, tmp_path: Path, capsys: Captured, threads: str) -> None:
    recipe = bench.file(tmp_path / "recipe.yaml")
    said = refused(capsys, "run", recipe, "--set", f"measure.threads={threads}")
    assert "threads" in said
    assert threads in said


PROGRESS = re.compile(r"[a-z ]+: (\d+ to do|\d+ of \d+ done in [\d.]+ (ms|s))")


def test_a_pinned_process_uses_one_thread_everywhere_and_prints_nothing_but_its_own_progress(
    bench: Bench, tmp_path: Path
) -> None:
    measure = "{threads: auto, prompt_tokens: 8, generate_tokens: 4, repeats: 1}"
    recipe = bench.file(tmp_path / "recipe.yaml", passes="[gptq]", export="[onnx, gguf]", measure=measure)
    cpu = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "-c", cpu, sys.executable, "-W", "error", "-m", "compress", "run", str(recipe)]
    environment = os.environ | {"PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out"), "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not PROGRESS.fullmatch(line)] == []
    report = Report.from_json(done.stdout)
    assert report == Report.read(tmp_path / "out/report.json")
    assert (report.environment["threads"], report.environment["torch_threads"]) == (1, 1)
    for artifact in report.artifacts:
        assert artifact.performance is not None
        assert artifact.performance.threads == 1
        assert artifact.performance.decode_tps.device.endswith(", 1 threads")


def test_every_choice_of_a_planner_is_shown_to_the_exporters_before_any_work(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    recipe = loads(
        f"model: {model}\npasses: [mixed: {{target_bits: 9, choices: [int4-g32, int8-g48]}}, gptq]\nexport: [onnx]\n",
        registry.load,
    )
    with pytest.raises(InputError) as caught:
        engine.plan(recipe)
    assert caught.value.what.count("int8-g48") == 14


# --- bfloat16 asked of a processor that emulates it


@pytest.mark.parametrize(
    ("precision", "found", "told"),
    [
        ("bfloat16", {"architecture": "x86_64"}, True),
        ("bfloat16", {"architecture": "x86_64", "amx_bf16": True}, False),
        ("bfloat16", {"architecture": "aarch64"}, False),
        ("float32", {"architecture": "x86_64"}, False),
    ],
)
def test_a_precision_that_would_be_slow_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, precision: str, found: dict[str, Any], told: bool
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: dict.fromkeys(BFLOAT16, False) | found)
    text = f"source: text, path: {bench.folder}/calibration.txt, samples: 2, sequence_length: 16"
    calibration = f"{{{text}, precision: {precision}}}"
    warnings = engine.plan(bench.recipe(calibration=calibration)).warnings
    assert any("no bfloat16 instructions" in warning for warning in warnings) == told
