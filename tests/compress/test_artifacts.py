from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compress import artifacts
from compress.__main__ import main
from compress.errors import InputError
from compress.report import Performance, Quality, Report, decode
from tests.compress.runs import Bench
from tests.support import tiny_llama

Captured = pytest.CaptureFixture[str]


def answer(capsys: Captured, *arguments: str | Path) -> str:
    """What a command that succeeds prints."""
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def answered(capsys: Captured, *arguments: str | Path) -> Any:
    return json.loads(answer(capsys, *arguments, "--json"))


@pytest.mark.parametrize("format", ["onnx", "gguf"])
@pytest.mark.parametrize("variant", ["asym", "mixed"])
def test_inspect_measures_the_bits_that_the_report_has(
    bench: Bench, capsys: Captured, variant: str, format: str
) -> None:
    run = bench.finished(variant)
    found = answered(capsys, "inspect", run.out, "--format", format)
    (record,) = [item for item in run.report.artifacts if item.format == format]
    assert found["linear_bits"] == pytest.approx(record.bits_per_weight)
    for tensor in found["tensors"]:
        assert tensor["bits"] == pytest.approx(8 * tensor["bytes"] / math.prod(tensor["shape"]))
    files = [path for path in (run.out / format).iterdir() if path.name.startswith("model.")]
    assert found["file_bytes"] == sum(path.stat().st_size for path in files)
    assert found["file_bits"] == pytest.approx(8 * found["file_bytes"] / 102400)
    assert sum(tensor["bytes"] for tensor in found["tensors"]) <= found["file_bytes"]


def test_inspect_prints_a_table_with_bits_and_ends_with_bits_per_weight(bench: Bench, capsys: Captured) -> None:
    shown = answer(capsys, "inspect", bench.finished("asym").out / "gguf")
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.strip()}
    assert rows["tensor"] == ["type", "shape", "bits", "size"]
    assert rows["blk.1.ffn_down.weight"] == ["Q4_1", "64x96", "5.00", "3.8", "kB"]
    assert rows["output_norm.weight"] == ["F32", "64", "32.00", "256", "B"]
    *_, linear, files = shown.splitlines()
    assert linear == "linear layers: 5.000 bits a weight, scales and zero points included"
    assert files.startswith("files: ")
    assert files.endswith(" bits for each weight of the model")


def test_inspect_takes_a_checkpoint_folder_a_shard_and_a_half_precision_model(
    bench: Bench, tmp_path: Path, capsys: Captured
) -> None:
    found = answered(capsys, "inspect", bench.model)
    assert found["format"] == "safetensors"
    assert (found["linear_bits"], len(found["tensors"])) == (32.0, 21)
    half = tiny_llama(tmp_path / "half", num_hidden_layers=11, dtype=torch.bfloat16)
    shown = answer(capsys, "inspect", half)
    rows = [line.split() for line in shown.splitlines()]
    assert ["model.layers.0.mlp.up_proj.weight", "BF16", "96x64", "16.00", "12.3", "kB"] in rows
    blocks = [int(row[0].split(".")[2]) for row in rows if row and row[0].startswith("model.layers.")]
    assert blocks == sorted(blocks)
    shard = {"a.weight": torch.zeros(4, 8, dtype=torch.float16), "b": torch.zeros((), dtype=torch.int64)}
    save_file(shard, tmp_path / "shard.safetensors", metadata={"format": "pt"})
    a, b = artifacts.inspect(tmp_path / "shard.safetensors").tensors
    assert (a.name, a.type, a.shape, a.bytes, a.layer) == ("a.weight", "F16", (4, 8), 64, "a")
    assert (b.name, b.type, b.shape, b.bytes, b.layer) == ("b", "I64", (), 8, None)


def test_inspect_agrees_with_the_safetensors_library(bench: Bench) -> None:
    from safetensors import safe_open

    found = {tensor.name: tensor for tensor in artifacts.inspect(bench.model).tensors}
    with safe_open(bench.model / "model.safetensors", framework="pt") as file:
        assert found.keys() == set(file.keys())
        for name, tensor in found.items():
            stored = file.get_tensor(name)
            assert (tensor.shape, tensor.bytes) == (tuple(stored.shape), stored.nbytes)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05",
        struct.pack("<Q", 1 << 60),
        struct.pack("<Q", 40) + b'{"a": {"dtype"',
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 11) + b'{"a": "F32"}'[:11],
        struct.pack("<Q", 12) + b'{"a": "F32"}',
    ],
)
def test_a_damaged_safetensors_file_is_named(tmp_path: Path, capsys: Captured, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert main(["inspect", str(tmp_path)]) == 2
    assert f"{path}: the header is damaged or cut short" in capsys.readouterr().err


def test_a_checkpoint_with_an_onnx_folder_is_a_checkpoint_unless_a_format_is_given(
    bench: Bench, tmp_path: Path
) -> None:
    for path in (bench.model / "model.safetensors", bench.finished("gptq").out / "onnx"):
        (tmp_path / path.name).symlink_to(path)
    assert artifacts.inspect(tmp_path).format == "safetensors"
    assert artifacts.inspect(tmp_path, "safetensors").format == "safetensors"
    assert artifacts.inspect(tmp_path, "onnx").format == "onnx"
    with pytest.raises(InputError, match=r"looked for \*\.gguf"):
        artifacts.inspect(tmp_path, "gguf")


def test_what_is_not_there_or_nothing_known_is_refused(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "notes.txt"):
        assert main(["inspect", str(path)]) == 2
    assert capsys.readouterr().err.count("input error:") == 3


@pytest.mark.parametrize("format", ["onnx", "gguf"])
def test_bench_measures_an_artifact_where_it_lies(bench: Bench, capsys: Captured, format: str) -> None:
    path = bench.finished("gptq").out / format
    options = ["--threads", "1", "--prompt-tokens", "8", "--generate-tokens", "4", "--repeats", "2"]
    measured = decode(Performance, answered(capsys, "bench", path, *options))
    assert (measured.threads, measured.decode_tps.runs) == (1, 2)
    assert measured.decode_tps.value > 0
    assert measured.peak_rss_bytes.value > 1e7


def test_bench_refuses_more_tokens_than_the_model_takes(bench: Bench, capsys: Captured) -> None:
    path = bench.finished("gptq").out / "onnx"
    assert main(["bench", str(path), "--threads", "1", "--prompt-tokens", "300"]) == 2
    assert "positions end at 256" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["onnx", "gguf"])
def test_eval_finds_what_the_run_found(bench: Bench, capsys: Captured, format: str) -> None:
    run = bench.finished("gptq")
    text = ["--source", "text", "--path", str(bench.folder / "evaluation.txt")]
    options = ["--windows", "4", "--sequence-length", "64", *text]
    found = answered(capsys, "eval", run.out, "--format", format, "--reference", bench.model, *options)
    (record,) = [item for item in run.report.artifacts if item.format == format]
    assert record.quality is not None
    quality = decode(Quality, found)
    assert quality.kld_mean == pytest.approx(record.quality.kld_mean, rel=1e-3)
    assert quality.top1_agreement == record.quality.top1_agreement


def test_eval_refuses_a_model_that_the_artifact_was_not_made_from(
    bench: Bench, tmp_path: Path, capsys: Captured
) -> None:
    other = tiny_llama(tmp_path / "other", vocab_size=300)
    path = bench.finished("gptq").out / "gguf"
    assert main(["eval", str(path), "--reference", str(other)]) == 2
    assert f"it has 320 tokens, and {other} has 300" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["onnx", "gguf"])
def test_chat_continues_a_text_with_the_same_tokens_each_time(bench: Bench, capsys: Captured, format: str) -> None:
    path = bench.finished("int8").out / format
    options = ["--raw", "--threads", "1", "--max-tokens", "5", "--prompt", "the quick brown"]
    first, second = (answer(capsys, "chat", path, *options) for _ in range(2))
    assert first.strip()
    assert first == second


def test_plan_and_list_answer_in_json_and_in_tables(bench: Bench, tmp_path: Path, capsys: Captured) -> None:
    recipe = bench.file(tmp_path / "recipe.yaml", ignore="[lm_head]")
    plan = answered(capsys, "plan", recipe, "-q")
    assert [rule["layers"] for rule in plan["rules"]] == [["lm_head"]]
    assert len(plan["layers"]) == 16
    shown = answer(capsys, "plan", recipe, "-q")
    assert "ignore  lm_head  float" in shown
    for what in ("passes", "exporters", "recipes", "devices"):
        rows = answered(capsys, "list", what)
        assert rows[0]["name"] in answer(capsys, "list", what)


def test_a_run_prints_its_report_as_json_or_as_tables(bench: Bench, tmp_path: Path, capsys: Captured) -> None:
    recipe = bench.file(tmp_path / "recipe.yaml")
    printed = answer(capsys, "run", recipe, "-q", "--out", tmp_path / "out", "--json")
    assert Report.from_json(printed) == Report.read(tmp_path / "out/report.json")
    shown = answer(capsys, "run", recipe, "-q", "--out", tmp_path / "out", "--overwrite")
    assert f"written to {tmp_path / 'out'}" in shown
    assert "4.500" in shown
