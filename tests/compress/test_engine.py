from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from compress import engine, registry
from compress.__main__ import main
from compress.errors import CompressError, InputError
from compress.passes.rtn import Rtn
from compress.protocols import BlockPass
from compress.recipe import Step, load
from compress.report import LayerRecord, Report
from compress.scheme import QuantScheme
from compress.session import Block, Session
from exporters.onnx import OnnxExporter
from tests.compress.runs import VARIANTS, Bench, digests, names

every_variant = pytest.mark.parametrize("variant", list(VARIANTS))
COMPANIONS = {"config.json", "genai_config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
MEMORY = {"runtime", "weights", "kv", "activations", "load_peak", "steady", "generation_peak"}


def layer_bytes(out: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that the ONNX and the GGUF file store for each linear layer of a block, by the libraries of the formats."""
    import onnx
    from gguf import GGUFReader

    graph = onnx.load(out / "onnx/model.onnx").graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor).nbytes for tensor in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}

    def behind(value: str) -> list[str]:
        if value in stored:
            return [value]
        follow = value in producers and producers[value].op_type in ("Cast", "Identity", "Concat")
        return [name for given in producers[value].input for name in behind(given)] if follow else []

    in_onnx = {}
    for node in graph.node:
        if node.op_type in ("MatMulNBits", "MatMul") and ".layers." in node.name:
            # Several layers where a Concat joins them: then the tensors' names say which.
            layers = list(zip(*filter(None, map(behind, node.input[1:])), strict=True))
            for names in layers:
                layer = node.name if len(layers) == 1 else names[0].removesuffix(".codes")
                in_onnx[layer] = sum(stored[name] for name in names)
    in_gguf = {
        tensor.name: int(tensor.n_bytes)
        for tensor in GGUFReader(out / "gguf/model.gguf").tensors
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2
    }
    return in_onnx, in_gguf


@every_variant
def test_a_run_leaves_artifacts_report_recipe_and_manifest_and_nothing_else(bench: Bench, variant: str) -> None:
    run = bench.finished(variant)
    onnx = {f"onnx/{name}" for name in COMPANIONS | {"model.onnx", "model.onnx.data"}}
    own = {"report.json", "report.md", "recipe.yaml", "manifest.json"}
    assert names(run.out) == onnx | own | {"gguf/model.gguf"}
    assert not [path for path in run.out.parent.iterdir() if path.name.startswith(".")]


@every_variant
def test_the_manifest_has_the_true_digest_and_size_of_every_file(bench: Bench, variant: str) -> None:
    run = bench.finished(variant)
    files = json.loads((run.out / "manifest.json").read_text())["files"]
    for name, entry in files.items():
        content = (run.out / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    assert set(files) == names(run.out) - {"manifest.json"}


@every_variant
def test_the_recipe_beside_the_artifacts_is_the_recipe_that_ran(bench: Bench, variant: str) -> None:
    run = bench.finished(variant)
    assert load(run.out / "recipe.yaml", registry.load) == run.recipe


@every_variant
def test_the_report_has_every_field_for_every_artifact(bench: Bench, variant: str) -> None:
    run = bench.finished(variant)
    assert Report.read(run.out / "report.json") == run.report
    report: dict[str, Any] = json.loads((run.out / "report.json").read_text())
    assert report["schema"] == 1
    assert [artifact["format"] for artifact in report["artifacts"]] == ["onnx", "gguf"]
    for artifact in report["artifacts"]:
        files = [path for path in (run.out / artifact["path"]).rglob("*") if path.is_file()]
        assert artifact["bytes"] == sum(path.stat().st_size for path in files)
        assert artifact["parity"]["tensors"] == 16
        assert artifact["parity"]["mismatched"] == []
        assert set(artifact["quality"]) >= {"kld_mean", "kld_p99", "top1_agreement", "perplexity"}
        assert (artifact["quality"]["tokens"], artifact["quality"]["windows"]) == (256, 4)
        performance = artifact["performance"]
        assert set(performance.pop("memory")) == MEMORY
        numbers = [value for value in performance.values() if isinstance(value, dict)]
        assert len(numbers) == 8
        for number in numbers:
            assert number["value"] > 0
            assert number["how"].startswith(("measured", "computed"))
    assert set(report["timings"]) >= {"prepare", "scan weights", "blocks", "write onnx", "prove and measure gguf"}
    assert report["environment"]["onnxruntime"].startswith("1.")
    assert report["model"]["weights"] == 102400
    assert report["model"]["quantized_share"] == 1.0


@every_variant
def test_bits_per_weight_are_what_the_files_hold(bench: Bench, variant: str) -> None:
    run = bench.finished(variant)
    for artifact, stored in zip(run.report.artifacts, layer_bytes(run.out), strict=True):
        assert len(stored) == 14
        measured = 8 * sum(stored.values()) / run.report.model["linear_weights"]
        assert artifact.bits_per_weight == pytest.approx(measured, rel=1e-3)


def in_gguf(layer: str) -> str:
    """The name of a llama's linear layer in a GGUF file."""
    _, _, index, _, role = layer.removesuffix("_proj").split(".")
    part = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
    return f"blk.{index}.{part.get(role, f'ffn_{role}')}.weight"


@every_variant
def test_each_layers_bytes_in_the_pass_record_are_those_of_the_files(bench: Bench, variant: str) -> None:
    run = bench.finished(variant)
    onnx, gguf = layer_bytes(run.out)
    recorded = {layer.layer: layer.bytes for layer in run.report.passes[-1].layers if layer.layer in onnx}
    # The larger of the two files counts.
    assert recorded == {layer: max(stored, gguf[in_gguf(layer)]) for layer, stored in onnx.items()}


@every_variant
def test_each_artifact_computes_what_the_passes_chose(bench: Bench, variant: str) -> None:
    onnx, gguf = (artifact.parity for artifact in bench.finished(variant).report.artifacts)
    assert onnx is not None
    assert gguf is not None
    assert onnx.kld_mean <= 1e-5
    assert onnx.kld_as_run <= (1e-5 if variant == "rtn" else 8e-3)
    assert gguf.kld_mean <= 8e-3


def test_8_bit_activations_are_really_used_and_cost_little(bench: Bench) -> None:
    as_run = {name: bench.finished(name).report.artifacts[0].parity for name in ("gptq", "rtn")}
    assert as_run["gptq"] is not None
    assert as_run["rtn"] is not None
    assert as_run["gptq"].kld_as_run > 100 * as_run["rtn"].kld_as_run


def test_the_same_seed_gives_the_same_bytes(bench: Bench, tmp_path: Path) -> None:
    run = bench.finished("mixed")
    engine.run(run.recipe, tmp_path / "again")
    first, second = digests(run.out), digests(tmp_path / "again")
    artifacts = [name for name in first if name.startswith(("onnx/", "gguf/"))]
    assert len(artifacts) == 8
    assert {name: first[name] for name in artifacts} == {name: second[name] for name in artifacts}


def test_another_seed_calibrates_on_other_windows(bench: Bench, tmp_path: Path) -> None:
    text = f"{{source: text, path: {bench.folder}/calibration.txt, samples: 16, sequence_length: 64, seed: 1}}"
    recipe = bench.recipe(passes="[gptq]", calibration=text)
    report = engine.run(recipe, tmp_path / "other")
    run = bench.finished("gptq")
    assert report.calibration["tokens_sha256"] != run.report.calibration["tokens_sha256"]
    assert digests(tmp_path / "other")["onnx/model.onnx.data"] != digests(run.out)["onnx/model.onnx.data"]


@pytest.mark.parametrize("place", [0, 1])
def test_gptq_is_clearly_better_than_rounding_at_the_same_size(bench: Bench, place: int) -> None:
    gptq, rtn = (bench.finished(name).report.artifacts[place] for name in ("gptq", "rtn"))
    assert gptq.bits_per_weight == rtn.bits_per_weight
    assert gptq.quality is not None
    assert rtn.quality is not None
    assert gptq.quality.kld_mean < 0.6 * rtn.quality.kld_mean


def test_more_bits_are_better_and_cost_what_they_should(bench: Bench) -> None:
    found = {name: bench.finished(name).report.artifacts[0] for name in ("rtn", "mixed", "int8")}
    bits = [found[name].bits_per_weight for name in ("rtn", "mixed", "int8")]
    kld = [found[name].quality.kld_mean for name in ("rtn", "mixed", "int8")]  # type: ignore[union-attr]
    assert bits[0] == 4.5 < bits[1] <= 6.0 < bits[2] == 8.5
    assert kld[0] > kld[1] > 5 * kld[2]


def test_a_planner_runs_before_the_quantiser_that_stands_above_it(bench: Bench) -> None:
    mixed, gptq = bench.finished("mixed").report.passes
    assert (mixed.name, gptq.name) == ("mixed", "gptq")
    planned = {layer.layer: layer.scheme for layer in mixed.layers}
    became = {layer.layer: layer.scheme for layer in gptq.layers if layer.layer in planned}
    assert became == planned
    assert set(planned.values()) == {"int4-g32", "int8-g32"}


def test_the_markdown_report_says_what_the_json_says(bench: Bench) -> None:
    run = bench.finished("gptq")
    text = (run.out / "report.md").read_text()
    for artifact in run.report.artifacts:
        assert artifact.quality is not None
        assert f"| {artifact.bits_per_weight:.3f} | {artifact.quality.kld_mean:.4f} |" in text
    assert "100.0% of them are quantised." in text


def test_layers_left_in_floating_point_are_named_with_the_share_that_is_not(bench: Bench, tmp_path: Path) -> None:
    recipe = bench.recipe(ignore='["*.v_proj", lm_head]', export="[onnx, gguf]", evaluate="false")
    report = engine.run(recipe, tmp_path / "out")
    assert report.model["float_layers"] == [
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.self_attn.v_proj",
        "lm_head",
    ]
    assert report.model["quantized_share"] == pytest.approx(1 - (2 * 32 * 64 + 320 * 64) / 102400)
    assert "left in floating point: `model.layers.0.self_attn.v_proj`, " in (tmp_path / "out/report.md").read_text()
    onnx, gguf = layer_bytes(tmp_path / "out")
    assert onnx["model.layers.0.self_attn.v_proj"] == 32 * 64 * 4
    assert gguf["blk.0.attn_v.weight"] == 32 * 64 * 2
    for artifact, stored in zip(report.artifacts, (onnx, gguf), strict=True):
        assert artifact.bits_per_weight == pytest.approx(8 * sum(stored.values()) / 61440, rel=1e-3)
        assert artifact.quality is None
        assert artifact.parity is not None
        assert artifact.parity.passed


def test_a_failed_gate_ends_with_3_and_the_artifacts_in_place(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gates = "{max_kld: 0.00001, max_size: 1MB, max_bits_per_weight: 4.5, min_top1: 1.0}"
    recipe = bench.file(tmp_path / "strict.yaml", gates=gates)
    assert main(["run", str(recipe), "--out", str(tmp_path / "out"), "-q"]) == 3
    message = capsys.readouterr().err
    report = Report.read(tmp_path / "out/report.json")
    assert {gate.gate: gate.passed for gate in report.gates} == {
        "max_kld": False,
        "min_top1": False,
        "max_size": True,
        "max_bits_per_weight": True,
    }
    assert "onnx: max_kld is 1e-05, found 0.0" in message
    assert "max_size" not in message
    assert (tmp_path / "out/onnx/model.onnx.data").is_file()
    assert set(digests(tmp_path / "out")) == names(tmp_path / "out") - {"manifest.json"}


def test_passes_that_quantise_nothing_are_refused(bench: Bench) -> None:
    with pytest.raises(InputError, match=r"no pass quantises.*passes: mixed"):
        engine.plan(bench.recipe(passes="[{mixed: {target_bits: 5}}]"))


def test_two_quantisers_are_refused(bench: Bench) -> None:
    with pytest.raises(InputError, match="only one pass can quantise"):
        engine.plan(bench.recipe(passes="[rtn, gptq]"))


def test_a_runtime_that_is_not_installed_is_known_before_any_work(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llama_cpp" else found(name))
    engine.plan(bench.recipe())
    with pytest.raises(InputError, match="gguf: llama_cpp, which runs the artifact, is not installed"):
        engine.run(bench.recipe(export="[onnx, gguf]"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_format_that_nothing_runs_is_refused(bench: Bench) -> None:
    @dataclasses.dataclass(frozen=True)
    class Unknown(OnnxExporter):
        format: ClassVar[str] = "tape"

    recipe = dataclasses.replace(bench.recipe(), export=(Step("tape", Unknown()),))
    with pytest.raises(InputError, match="tape: no runtime is known for the format tape"):
        engine.plan(recipe)


@dataclasses.dataclass(frozen=True)
class Forgetful(Rtn):
    """Leaves one planned layer in floating point and tells nobody."""

    def apply(self, session: Session, block: Block) -> list[LayerRecord]:
        records = super().apply(session, block)
        block.quantized.pop("model.layers.1.mlp.up_proj", None)
        return records


def test_a_layer_that_does_not_become_what_was_planned_is_our_bug(bench: Bench, tmp_path: Path) -> None:
    forgetful: BlockPass = Forgetful(QuantScheme(4, 32))
    recipe = dataclasses.replace(bench.recipe(), passes=(Step("rtn", forgetful),))
    with pytest.raises(CompressError, match=r"layers\.1\.mlp\.up_proj: planned int4-g32, became float") as caught:
        engine.run(recipe, tmp_path / "out")
    assert caught.value.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
