"""What the exporter refuses, and tells, before any work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import InputError
from compress.models.topology import describe
from compress.runner.ort import OrtRuntime
from compress.scheme import QuantScheme
from exporters.onnx import OnnxExporter
from tests.exporters.test_onnx_file import ODD, export
from tests.support import fake_quantized, rounded_model, tiny_llama


@pytest.mark.parametrize("value", [1, 3, "4", True, None, 4.5])
def test_accuracy_level_is_validated(value: Any) -> None:
    with pytest.raises(ValueError, match="accuracy_level must be 0"):
        OnnxExporter(value)


def test_float_type_is_validated() -> None:
    with pytest.raises(ValueError, match="float_type 'f61' is not known; did you mean 'f16'"):
        OnnxExporter(float_type="f61")


def check(plan: dict[str, str], level: int = 4, **overrides: Any) -> list[str]:
    config = {"model_type": "llama", "vocab_size": 320, "num_hidden_layers": 1, "num_attention_heads": 4} | ODD
    spec = describe(config | {"num_key_value_heads": 2} | overrides)
    shapes = dict.fromkeys(plan, (96, 200))
    return list(OnnxExporter(level).check(spec, {layer: QuantScheme.parse(s) for layer, s in plan.items()}, shapes))


def test_check_names_each_layer_that_cannot_be_stored() -> None:
    plan = {"a.q": "int4-g32", "a.down": "int4-g48", "a.up": "int3-g32", "a.k": "int4-g8", "a.o": "int8-channel"}
    power = "MatMulNBits needs a group that is a power of two >= 16; use g32"
    assert check(plan) == [
        f"a.down (96 x 200): int4-g48: {power}",
        "a.up (96 x 200): int3-g32: MatMulNBits stores 2, 4 or 8 bits, and 3 bits in cells of 4 would take as much "
        "as 4; use int4-g32, or int2",
        f"a.k (96 x 200): int4-g8: {power}",
    ]


def test_check_refuses_two_bits_where_activations_would_stay_in_fp32() -> None:
    assert "no 2-bit kernel with 8-bit activations" in check({"a.q": "int2-g16"})[0]
    assert check({"a.q": "int2-g16"}, level=0) == []


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ({"head_dim": 20}, "head size 20"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4, "head_dim": 16}, "6 heads share 4"),
        ({"hidden_act": "tanh"}, "activation 'tanh'"),
    ],
)
def test_check_refuses_models_that_the_operators_do_not_take(override: dict[str, Any], part: str) -> None:
    [complaint] = check({"a.q": "int4-g32"}, **override)
    assert part in complaint


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [2.0 + 0.1 * pair for pair in range(8)],
    "original_max_position_embeddings": 64,
    "factor": 4.0,
}


def test_a_file_ends_where_longrope_would_turn_what_is_in_the_cache(tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "m", rope_parameters=LONGROPE), tmp_path / "w")
    spec = describe(model.config)
    assert OnnxExporter().check(spec, {}, {}) == []
    [remark] = OnnxExporter().remarks(spec, {})
    assert "takes 64 tokens of the model's 256" in remark
    artifact = export(model, tmp_path / "out", 0)
    assert json.loads((artifact.path / "genai_config.json").read_text())["model"]["context_length"] == 64
    runtime = OrtRuntime(spin=False)
    with pytest.raises(InputError, match="a context of 65 tokens was asked for, and the model's positions end at 64"):
        runtime.load(artifact.path / artifact.entry, 1, 65)
    runtime.load(artifact.path / artifact.entry, 1, 64)
    tokens = torch.randint(0, 281, (1, 64), generator=torch.Generator().manual_seed(0))
    found = torch.from_numpy(runtime.prefill(tokens[0].numpy(), all_logits=True))
    with torch.no_grad():
        expected = fake_quantized(model)(tokens).logits[0]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_a_rotary_type_without_tables_is_refused() -> None:
    spec = describe({"model_type": "llama", "num_hidden_layers": 1})
    other = replace(spec, attentions=(replace(spec.attentions[0], rope={"rope_type": "mrope"}),))
    [complaint] = OnnxExporter().check(other, {}, {})
    assert complaint.startswith("rotary type 'mrope' is not supported; known: default, linear")


def test_tokenizer_remarks(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    assert OnnxExporter().check_tokenizer(folder, 320) == []
    assert "beyond the 270 rows" in OnnxExporter().check_tokenizer(folder, 270)[0]
    assert "no tokenizer.json" in OnnxExporter().check_tokenizer(tmp_path, 320)[0]
