"""What execution providers would run: installed ones are asked, documents speak for the others, and each says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from compress.__main__ import main
from compress.runner.provider_table import KNOWN, TABLE
from compress.runner.providers import Operator, Provider, providers
from compress.session import CompressedModel
from exporters.onnx import OnnxExporter
from tests.compress.families import saved
from tests.compress.runs import Bench
from tests.support import rounded_model, tiny_llama

GROUPED = "com.microsoft:GroupQueryAttention"
PRODUCT = "com.microsoft:MatMulNBits"


def exported(model: CompressedModel, folder: Path, **arguments: Any) -> Path:
    folder.mkdir()
    artifact = OnnxExporter(**arguments).write(model, folder)
    return artifact.path / artifact.entry


def asked(entry: Path) -> dict[str, Provider]:
    return {found.name: found for found in providers(entry)}


def verdicts(found: Provider) -> dict[str, list[Operator]]:
    rows: dict[str, list[Operator]] = {}
    for row in found.operators:
        rows.setdefault(row.operator, []).append(row)
    return rows


def operators_of(entry: Path) -> list[str]:
    nodes = onnx.load(entry, load_external_data=False).graph.node
    return [f"{node.domain}:{node.op_type}" if node.domain else node.op_type for node in nodes]


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("entry")
    return exported(rounded_model(tiny_llama(folder / "model"), folder / "work"), folder / "out")


@pytest.mark.parametrize(
    ("variant", "arguments"),
    [
        ("llama", {}),
        ("gemma2", {}),
        ("gemma3", {"dialect": "standard"}),
        ("smollm3", {"float_type": "f16"}),
        ("phi3, heads rotated in part", {}),
        ("qwen2 with a window", {"dialect": "standard"}),
        ("qwen2_moe", {}),
        ("olmo2", {"dialect": "standard"}),
    ],
)
def test_the_table_covers_what_the_exporter_writes(variant: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    model = rounded_model(saved(variant, tmp_path / "model"), tmp_path / "work")
    assert set(operators_of(exported(model, tmp_path / "out", **arguments))) <= KNOWN


def test_the_table_names_its_sources_and_only_operators_that_it_covers() -> None:
    for document in TABLE.values():
        assert any(character.isdigit() for character in document.source)
        assert document.takes <= KNOWN
        assert document.takes >= document.limits.keys() | document.conditions.keys()


def test_an_installed_provider_is_asked_about_every_node(entry: Path) -> None:
    found = asked(entry)["CPU"]
    assert found.how.startswith("measured: onnxruntime ")
    assert {row.operator: row.nodes for row in found.operators} == {
        name: operators_of(entry).count(name) for name in operators_of(entry)
    }
    assert {row.verdict for row in found.operators} == {"taken"}


def test_documents_speak_of_every_node_and_are_named(entry: Path) -> None:
    found = asked(entry)
    assert list(found) == ["CPU", "OpenVINO", *TABLE]
    for name in TABLE:
        assert found[name].how == f"documented: {TABLE[name].source}"
        assert sum(row.nodes for row in found[name].operators) == len(operators_of(entry))
        assert all(row.why for row in found[name].operators if row.verdict != "taken")
    assert [row.verdict for row in verdicts(found["CoreML"])[PRODUCT]] == ["left"]
    assert [row.verdict for row in verdicts(found["QNN"])[PRODUCT]] == ["taken"]


def test_types_bits_and_caches_matter(entry: Path, tmp_path: Path) -> None:
    plan = {"model.layers.0.mlp.up_proj": "int2-g32"}
    model = rounded_model(tiny_llama(tmp_path / "model"), tmp_path / "work", plan=plan)
    half = asked(exported(model, tmp_path / "half", float_type="f16"))
    (alone,) = verdicts(asked(entry)["CUDA"])[GROUPED]
    assert (alone.verdict, alone.why) == ("left", "hidden states in float32, it takes float16")
    assert [row.verdict for row in verdicts(half["CUDA"])[GROUPED]] == ["taken"]
    left, taken = verdicts(half["CUDA"])[PRODUCT]
    assert (left.nodes, left.why, taken.verdict) == (1, "bits 2, it takes 4, 8", "taken")


def test_what_follows_from_constants_is_constant(entry: Path) -> None:
    found = verdicts(asked(entry)["WebNN"])
    assert [row.verdict for row in found["ReduceSum"]] == ["taken"]
    assert [(row.verdict, row.why) for row in found["Slice"]] == [
        ("left", "inputs that are computed, it takes constants")
    ]


def test_free_dimensions_are_refused_where_the_document_says_so(entry: Path) -> None:
    found = asked(entry)
    assert found["QNN"].refuses
    assert "free: fix those of the 6 inputs" in found["QNN"].remark
    assert not found["CoreML"].refuses


def test_openvino_takes_the_standard_dialect_whole_and_refuses_the_other(entry: Path, tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "model"), tmp_path / "work")
    whole = asked(exported(model, tmp_path / "out", dialect="standard"))["OpenVINO"]
    assert whole.how.startswith("measured: openvino ")
    assert {row.verdict for row in whole.operators} == {"taken"}
    refused = asked(entry)["OpenVINO"]
    assert refused.refuses
    assert "GroupQueryAttention" in {row.operator for row in refused.operators}


def test_operators_that_nobody_knows_are_named(tmp_path: Path) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    nodes = [helper.make_node("Sin", ["x"], ["s"]), helper.make_node("Add", ["s", "x"], ["y"])]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]), tmp_path / "a.onnx")
    found = asked(tmp_path / "a.onnx")
    assert [row.verdict for row in found["CPU"].operators] == ["taken", "taken"]
    assert [(row.operator, row.verdict) for row in found["NNAPI"].operators] == [("Add", "taken"), ("Sin", "unknown")]


def test_the_command_prints_tables_and_json(entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(entry), "--providers", "--json"]) == 0
    shown = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(shown) == {"CPU", "OpenVINO", *TABLE}
    assert shown["CUDA"]["operators"][0].keys() == {"operator", "nodes", "verdict", "why"}
    assert main(["inspect", str(entry), "--providers"]) == 0
    table = capsys.readouterr().out
    assert "documented: onnxruntime-web 1.30.0" in table
    assert f"{PRODUCT} {operators_of(entry).count(PRODUCT)}" in table


def test_what_is_no_onnx_file_is_refused(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    for path, said in (
        (bench.finished("asym").out / "gguf", "execution providers are ONNX Runtime's, and this is gguf"),
        (tmp_path / "model.onnx", "ONNX Runtime cannot open this file"),
    ):
        assert main(["inspect", str(path), "--providers"]) == 2
        assert said in capsys.readouterr().err
