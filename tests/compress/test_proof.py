from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress import engine, proof, registry
from compress.__main__ import main
from compress.errors import ParityError
from compress.models.decoder import Decoder
from compress.models.sources import open_model
from compress.protocols import Artifact
from compress.recipe import Step
from compress.session import CompressedModel, no_progress
from exporters.gguf import GgufExporter
from exporters.onnx import OnnxExporter
from tests.compress.runs import Bench
from tests.support import rounded_model

LAYER = "model.layers.1.mlp.gate_proj"


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def onnx_offset(artifact: Artifact, tensor: str) -> int:
    """Where a tensor lies in the data file."""
    import onnx

    graph = onnx.load(artifact.path / artifact.entry, load_external_data=False).graph
    (found,) = [item for item in graph.initializer if item.name == tensor]
    return int({entry.key: entry.value for entry in found.external_data}["offset"])


def gguf_offset(artifact: Artifact, tensor: str) -> int:
    from gguf import GGUFReader

    (found,) = [item for item in GGUFReader(artifact.path / artifact.entry).tensors if item.name == tensor]
    return int(found.data_offset)


def one_code_onnx(artifact: Artifact) -> None:
    flip(artifact.path / "model.onnx.data", onnx_offset(artifact, f"{LAYER}.codes") + 5)


def one_scale_bit_onnx(artifact: Artifact) -> None:
    flip(artifact.path / "model.onnx.data", onnx_offset(artifact, "lm_head.scales") + 6)


def one_float_bit_onnx(artifact: Artifact) -> None:
    flip(artifact.path / "model.onnx.data", onnx_offset(artifact, f"{LAYER}.weight") + 40)


def one_code_gguf(artifact: Artifact) -> None:
    flip(artifact.path / artifact.entry, gguf_offset(artifact, "blk.1.ffn_gate.weight") + 2, bit=7)


def one_scale_bit_gguf(artifact: Artifact) -> None:
    flip(artifact.path / artifact.entry, gguf_offset(artifact, "blk.1.ffn_gate.weight"))


def one_float_bit_gguf(artifact: Artifact) -> None:
    flip(artifact.path / artifact.entry, gguf_offset(artifact, "blk.1.ffn_gate.weight") + 6)


def a_norm_onnx(artifact: Artifact) -> None:
    """No weight matrix: only the logits can tell."""
    import onnx

    model = onnx.load(artifact.path / artifact.entry, load_external_data=False)
    (norm,) = [item for item in model.graph.initializer if item.name == "model.norm.weight"]
    scaled = onnx.numpy_helper.to_array(norm) * np.float32(1.01)
    norm.CopyFrom(onnx.numpy_helper.from_array(scaled, norm.name))
    (artifact.path / artifact.entry).write_bytes(model.SerializeToString())


def a_norm_gguf(artifact: Artifact) -> None:
    start = gguf_offset(artifact, "output_norm.weight")
    for element in range(64):
        # 1.0 becomes 1.5.
        flip(artifact.path / artifact.entry, start + 4 * element + 2, bit=6)


@dataclasses.dataclass(frozen=True)
class BrokenOnnx(OnnxExporter):
    """Writes what it should, and then damages it."""

    damage: Callable[[Artifact], None] = one_code_onnx

    def write(self, model: CompressedModel, out: Path) -> Artifact:
        artifact = super().write(model, out)
        self.damage(artifact)
        return artifact


@dataclasses.dataclass(frozen=True)
class BrokenGguf(GgufExporter):
    damage: Callable[[Artifact], None] = one_code_gguf

    def write(self, model: CompressedModel, out: Path) -> Artifact:
        artifact = super().write(model, out)
        self.damage(artifact)
        return artifact


@pytest.mark.parametrize(
    ("exporter", "ignore", "message"),
    [
        (BrokenOnnx(damage=one_code_onnx), "[]", f"1 of 16 tensors read back by onnx .* differ: {LAYER}"),
        (BrokenOnnx(damage=one_scale_bit_onnx), "[]", "1 of 16 tensors read back by onnx .* differ: lm_head"),
        (BrokenOnnx(damage=one_float_bit_onnx), f"[{LAYER}]", f"1 of 16 tensors read back by onnx .* differ: {LAYER}"),
        (BrokenOnnx(damage=a_norm_onnx), "[]", "logits differ from the quantised torch model by .* limit is 1e-05"),
        (BrokenGguf(damage=one_code_gguf), "[]", f"1 of 16 tensors read back by gguf-py .* differ: {LAYER}"),
        (BrokenGguf(damage=one_scale_bit_gguf), "[]", f"1 of 16 tensors read back by gguf-py .* differ: {LAYER}"),
        (BrokenGguf(damage=one_float_bit_gguf), f"[{LAYER}]", f"1 of 16 tensors .*gguf-py .* differ: {LAYER}"),
        (BrokenGguf(damage=a_norm_gguf), "[]", "logits differ from the quantised torch model by .* limit is 0.008"),
    ],
)
def test_one_wrong_bit_stops_the_run_and_leaves_nothing(
    bench: Bench, tmp_path: Path, exporter: Any, ignore: str, message: str
) -> None:
    recipe = bench.recipe(ignore=ignore)
    broken = dataclasses.replace(recipe, export=(Step(exporter.format, exporter),))
    with pytest.raises(ParityError, match=message) as caught:
        engine.run(broken, tmp_path / "out")
    assert caught.value.where == exporter.format
    assert list(tmp_path.iterdir()) == []


def test_the_command_ends_with_1_and_keeps_the_older_run(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = bench.file(tmp_path / "recipe.yaml")
    command = ["run", str(recipe), "--out", str(tmp_path / "out"), "--overwrite", "-q"]
    assert main(command) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    real = registry.load
    monkeypatch.setattr(
        registry, "load", lambda kind, name: BrokenOnnx if (kind, name) == ("exporters", "onnx") else real(kind, name)
    )
    capsys.readouterr()
    assert main(command) == 1
    message = capsys.readouterr().err
    assert message.startswith("parity failed: onnx: 1 of 16 tensors")
    assert "our bug" in message
    assert "Traceback" not in message
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "recipe.yaml"]


def test_an_artifact_that_lacks_a_layer_is_no_success(bench: Bench, tmp_path: Path) -> None:
    alone = "model.layers.1.mlp.down_proj"

    @dataclasses.dataclass(frozen=True)
    class Lacking(OnnxExporter):
        def write(self, model: CompressedModel, out: Path) -> Artifact:
            import onnx

            artifact = super().write(model, out)
            path = out / artifact.entry
            stored = onnx.load(path, load_external_data=False)
            (node,) = [node for node in stored.graph.node if node.name == alone]
            node.name = "renamed"
            path.write_bytes(stored.SerializeToString())
            return artifact

    recipe = bench.recipe()
    lacking = dataclasses.replace(recipe, export=(Step("onnx", Lacking()),))
    with pytest.raises(ParityError, match=f"stores no weight of {alone}"):
        engine.run(lacking, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


class Rereads:
    """An exporter as far as reading back goes: gives what it was made with."""

    def __init__(self, weights: dict[str, np.ndarray[Any, Any]]) -> None:
        self.weights = weights

    def read_back(self, artifact: Artifact, layers: list[str]) -> Any:
        return ((layer, self.weights[layer]) for layer in layers if layer in self.weights)


@pytest.fixture
def model(bench: Bench, tmp_path: Path) -> CompressedModel:
    return rounded_model(bench.model, tmp_path / "work", plan={LAYER: None})


def read_back(model: CompressedModel, weights: dict[str, np.ndarray[Any, Any]]) -> list[str]:
    return proof.read_back(model, Rereads(weights), Artifact("f", Path(), "e"), no_progress)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_a_float_layer_may_be_stored_in_any_float_type_but_only_rounded_to_nearest(
    model: CompressedModel, kind: torch.dtype
) -> None:
    weights = {layer: model.weight(layer).numpy() for layer in model.layers()}
    assert read_back(model, weights) == []
    weights[LAYER] = model.weight(LAYER).to(kind).float().numpy().copy()
    assert read_back(model, weights) == []
    weights[LAYER][3, 5] = np.nextafter(weights[LAYER][3, 5], np.float32(10))
    assert read_back(model, weights) == [LAYER]


def test_a_quantised_layer_must_be_equal_and_every_layer_there(model: CompressedModel) -> None:
    weights = {layer: model.weight(layer).numpy() for layer in model.layers()}
    rounded, transposed, missing = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj", "lm_head"
    weights[rounded] = model.weight(rounded).to(torch.bfloat16).float().numpy()
    weights[transposed] = weights[transposed].T
    del weights[missing]
    assert read_back(model, weights) == [transposed, rounded, f"{missing} (not in the file)"]


def test_logits_are_written_as_numpy_reads_them(bench: Bench, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(3 * 20).view(3, 20)
    path = tmp_path / "logits.npy"
    proof.write_logits(Decoder(open_model(str(bench.model))), tokens, path, "logits", no_progress)
    stored = np.load(path, mmap_mode="r")
    assert stored.dtype == np.float32
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(bench.model)(tokens).logits.numpy()
    np.testing.assert_allclose(stored, expected, atol=1e-4)
