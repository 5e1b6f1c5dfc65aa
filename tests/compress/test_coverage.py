"""Tokens that reached each layer and each expert, against twice its columns: counted, shown once, warned of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compress import engine
from compress.coverage import coverage_warnings, token_coverage
from compress.markdown import render
from compress.passes.awq import Awq
from compress.passes.gptq import Gptq
from compress.passes.rtn import Rtn
from compress.report import LayerRecord, PassRecord, Report
from compress.scheme import QuantScheme
from tests.compress.families import compressed, saved, tokens_of
from tests.compress.runs import Bench
from tests.compress.test_experts import one_sided

BLOCK = "model.layers.*"
NARROW = [f"{BLOCK}.{role}_proj" for role in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o")]
NARROW += [f"{BLOCK}.mlp.gate_proj", f"{BLOCK}.mlp.up_proj"]


def test_layers_alike_stand_in_one_row(bench: Bench) -> None:
    run = bench.finished("gptq")
    narrow, wide = run.report.calibration["coverage"]["layers"]
    assert narrow == {
        "layers": [*NARROW, "lm_head"],
        "count": 13,
        "columns": 64,
        "tokens": 1024,
        "needed": 128,
        "enough": True,
    }
    assert (wide["layers"], wide["count"], wide["columns"]) == ([f"{BLOCK}.mlp.down_proj"], 2, 96)
    assert run.report.calibration["coverage"]["experts"] == []
    assert not [text for text in run.report.warnings if text.startswith("calibration")]
    assert Report.read(run.out / "report.json") == run.report
    text = (run.out / "report.md").read_text()
    assert f"| `{BLOCK}.mlp.down_proj` | 2 | 96 | 1024 | 192 | yes |" in text
    assert "Calibration: 1024 tokens of 1024 asked for; " in text


@pytest.mark.parametrize("passes", ["[gptq]", "[awq, {rtn: {scheme: int4-g32}}]"])
def test_too_few_tokens_are_warned_of_and_marked(bench: Bench, tmp_path: Path, passes: str) -> None:
    text = f"{{source: text, path: {bench.folder}/calibration.txt, samples: 2, sequence_length: 64}}"
    report = engine.run(bench.recipe(passes=passes, calibration=text), tmp_path / "out")
    rows = report.calibration["coverage"]["layers"]
    assert {row["columns"]: row["enough"] for row in rows} == {64: True, 96: False}
    warned = [text for text in report.warnings if text.startswith("calibration: ")]
    assert warned == [
        f"calibration: {BLOCK}.mlp.down_proj (2 layers) saw 128 tokens, fewer than 2 for each of 96 columns: "
        "give more or longer samples"
    ]
    assert f"| `{BLOCK}.mlp.down_proj` | 2 | 96 | 128 | 192 | **no** |" in (tmp_path / "out/report.md").read_text()


def test_a_run_whose_passes_look_at_no_inputs_has_no_coverage(bench: Bench) -> None:
    report = bench.finished("rtn").report
    assert "coverage" not in report.calibration
    assert list(coverage_warnings(None)) == []


@pytest.mark.parametrize("transform", [False, True])
def test_experts_are_counted_block_by_block_and_the_rare_ones_listed(
    bench: Bench, tmp_path: Path, transform: bool
) -> None:
    scheme = QuantScheme(4, 32)
    passes = [Awq(steps=3), Rtn(scheme)] if transform else [Gptq(scheme)]
    found = compressed(one_sided(tmp_path / "model"), tmp_path / "work", passes, tokens_of(4, 64))
    records = [PassRecord("some", {}, 0.0, tuple(done.layers)) for done in found.done]
    spec, shapes = found.session.decoder.spec, found.session.shapes
    coverage = token_coverage(spec, shapes, records)
    assert coverage is not None
    seen = {layer.layer: layer.tokens for layer in records[0].layers}
    for index, row in enumerate(coverage["experts"]):
        tokens = [seen[expert["up"]] for expert in spec.expert_linears(index)]
        assert sum(tokens) == 2 * 4 * 64
        assert (row["block"], row["experts"], row["needed"]) == (index, 6, 128)
        assert (row["min"], row["max"]) == (0, max(tokens))
        assert row["median"] == sum(sorted(tokens)[2:4]) / 2
        assert row["short"] == {str(expert): count for expert, count in enumerate(tokens) if count < 128}
        assert {"4", "5"} <= set(row["short"])
    assert not any(".experts." in name for row in coverage["layers"] for name in row["layers"])
    short = sum(len(row["short"]) for row in coverage["experts"])
    assert list(coverage_warnings(coverage)) == [
        f"calibration: {short} of 12 experts saw fewer than 2 tokens for each column (listed under Text): "
        "give more or longer samples"
    ]
    report = bench.finished("gptq").report
    text = render(replace(report, calibration={**report.calibration, "coverage": coverage}))
    assert "| 0 | 6 | 0 | " in text
    assert "4 (0), 5 (0)" in text


def test_many_rare_experts_do_not_fill_the_report(bench: Bench) -> None:
    report = bench.finished("gptq").report
    row = {"block": 0, "experts": 128, "min": 1, "median": 3.5, "max": 9, "needed": 64}
    experts = [{**row, "short": {str(expert): 128 - expert for expert in range(128)}}]
    coverage = {"layers": [], "experts": experts}
    text = render(replace(report, calibration={**report.calibration, "coverage": coverage}))
    assert "127 (1), 126 (2)" in text
    assert "and 112 more" in text
    assert "| 0 | 128 | 1 | 3.5 | 9 | 64 |" in text


def test_a_layer_that_two_passes_saw_counts_once_and_an_embedding_not_at_all(tmp_path: Path) -> None:
    found = compressed(saved("llama", tmp_path / "model"), tmp_path / "work", [Rtn()], tokens_of(1, 8))
    spec, shapes = found.session.decoder.spec, found.session.shapes
    up = spec.linear(0, "up")
    layers = (LayerRecord(spec.family.embedding, "int8-g32", 1), LayerRecord(up, "int4-g32", 1, tokens=8))
    coverage = token_coverage(spec, shapes, [PassRecord(name, {}, 0.0, layers) for name in ("one", "two")])
    assert coverage is not None
    assert [(row["layers"], row["count"]) for row in coverage["layers"]] == [([f"{BLOCK}.mlp.up_proj"], 1)]
