"""What GGUF or llama.cpp cannot hold is refused before any work, or is an error that names the tensor."""

from __future__ import annotations

import errno
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compress.errors import CompressError, InputError
from compress.models.topology import describe
from compress.scheme import QuantScheme
from compress.session import CompressedModel
from compress.tensor import QuantizedTensor
from exporters.gguf import GgufExporter
from exporters.gguf.limits import complaints
from tests.exporters.test_gguf import YARN_ROPE, all_float, export
from tests.support import rounded_model, tiny_llama

ODD: dict[str, Any] = {"vocab_size": 997, "hidden_size": 96, "intermediate_size": 200}


def check(folder: Path, scheme: str) -> list[str]:
    model = rounded_model(folder, folder.parent / "check")
    plan = dict.fromkeys(model.shapes, QuantScheme.parse(scheme))
    return list(GgufExporter().check(describe(model.config), plan, model.shapes))


def test_every_layer_whose_width_is_no_multiple_of_32_is_named(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", **ODD)
    for scheme in ("int4-g128", "int4-g64", "int4-g32", "int8-g32", "int4-channel"):
        complaints = check(folder, scheme)
        assert len(complaints) == 2, scheme
        for index, text in enumerate(complaints):
            assert text.startswith(f"model.layers.{index}.mlp.down_proj [96, 200]: GGUF cannot store {scheme}")
            assert "use float for this layer" in text


@pytest.mark.parametrize("scheme", ["int4-g48", "int4-g16", "int2-g32", "int3-g64", "int8-g32-asym"])
def test_schemes_without_a_type_are_refused_for_every_layer(scheme: str, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", hidden_size=96, intermediate_size=96)
    complaints = check(folder, scheme)
    assert len(complaints) == 16
    assert all("int4-g32" in text for text in complaints)


WIDER = {"q2_k": "iq4_nl", "q3_k": "iq4_nl", "q4_k": "iq4_nl", "q5_k": "int5-g32", "q6_k": "int8-g32"}


@pytest.mark.parametrize(("scheme", "instead"), [*WIDER.items(), ("ternary-g256", "int4-g32")])
def test_blocks_of_256_that_do_not_divide_a_width_are_refused_for_every_layer(
    scheme: str, instead: str, tmp_path: Path
) -> None:
    folder = tiny_llama(tmp_path / "model", hidden_size=96, intermediate_size=256)
    model = rounded_model(folder, tmp_path / "work")
    plan = dict.fromkeys(model.shapes, QuantScheme.parse(scheme))
    complaints = GgufExporter().check(describe(model.config), plan, model.shapes)
    # The embedding, the head and all linears but down_proj.
    assert len(complaints) == 2 + 2 * 6
    assert not any("down_proj" in text for text in complaints)
    for text in complaints:
        assert f"GGUF cannot store {scheme}: its blocks hold 256 inputs and 96 is no multiple of 256" in text
        assert text.endswith(f"use {instead} for this layer")
        layer = text.split(" ")[0]
        assert GgufExporter().check(describe(model.config), {layer: QuantScheme.parse(instead)}, model.shapes) == []


@pytest.mark.parametrize(("field", "reason"), [("scale", "scales are no multiples"), ("minimum", "minima are no")])
def test_two_levels_that_are_no_multiples_are_errors_that_name_the_layer(
    field: str, reason: str, tmp_path: Path
) -> None:
    layer = "model.layers.0.mlp.down_proj"
    model = rounded_model(
        tiny_llama(tmp_path / "model", intermediate_size=256), tmp_path / "work", plan={layer: "q4_k"}
    )
    item = model.quantized(layer)
    model._store.put("broken", {layer: replace(item, **{field: getattr(item, field) * 1.001})}, {})
    with pytest.raises(CompressError, match=reason) as caught:
        export(model, tmp_path / "out")
    assert caught.value.where == layer


def test_group_that_covers_the_whole_row_needs_no_multiple_of_32(tmp_path: Path) -> None:
    assert check(tiny_llama(tmp_path / "model", intermediate_size=64), "int4-g100") == []


def test_writing_what_check_refuses_is_an_error(tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "model", **ODD), tmp_path / "work")
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.down_proj"):
        export(model, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"hidden_act": "gelu"}, "silu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": YARN_ROPE | {"attention_factor": 1.5}}, "attention_factor=1.5"),
        ({"rope_parameters": YARN_ROPE | {"beta_fast": 8.0}}, "beta_fast=8.0"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused(settings: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "model", **settings), tmp_path / "work")
    [text] = complaints(describe(model.config), {}, model.shapes, ())
    assert complaint in text


def broken(tmp_path: Path, layer: str, change: dict[str, Any], scheme: str = "int4-g32") -> CompressedModel:
    model = rounded_model(tiny_llama(tmp_path / "model"), tmp_path / "work", scheme)
    item = model.quantized(layer)
    model._store.put("broken", {layer: replace(item, **{key: make(item) for key, make in change.items()})}, {})
    return model


def test_scale_that_is_no_fp16_number_is_an_error_that_names_the_layer(tmp_path: Path) -> None:
    layer = "model.layers.1.mlp.up_proj"
    model = broken(tmp_path, layer, {"scale": lambda item: item.scale * 1.0001})
    with pytest.raises(CompressError, match="scales are not fp16") as caught:
        export(model, tmp_path / "out")
    assert caught.value.where == layer


def test_minimum_that_is_no_fp16_number_is_an_error_that_names_the_layer(tmp_path: Path) -> None:
    layer = "model.layers.0.mlp.up_proj"

    def fine_scale(item: QuantizedTensor) -> Tensor:
        # Eleven significant bits: an fp16 number, but 13 times it needs fifteen.
        return torch.full_like(item.scale, 2047 / 2048)

    change = {"scale": fine_scale, "zero": lambda item: torch.full_like(item.zero, 13)}
    with pytest.raises(CompressError, match="minima") as caught:
        export(broken(tmp_path, layer, change, "int4-g32-asym"), tmp_path / "out")
    assert caught.value.where == layer


def test_asymmetric_rounding_of_any_size_is_exact(tmp_path: Path) -> None:
    """Scales of seven significant bits that are multiples of 2**-24 need no luck, down to the subnormal range."""
    layer = "model.layers.0.mlp.down_proj"

    def spread(item: QuantizedTensor) -> Tensor:
        exponents = torch.linspace(-16, 3, item.scale.numel()).round().view_as(item.scale)
        return torch.round(64 * (1 + torch.rand(item.scale.shape))) / 64 * 2.0**exponents

    model = broken(tmp_path, layer, {"scale": spread}, "int4-g32-asym")
    [(_, weight)] = GgufExporter().read_back(export(model, tmp_path / "out"), [layer])
    np.testing.assert_array_equal(weight, model.quantized(layer).dequantize().numpy())


def test_non_finite_and_too_large_weights_are_errors_that_name_the_tensor(tmp_path: Path) -> None:
    def spoil(parameters: dict[str, Tensor]) -> None:
        parameters["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6
        parameters["model.layers.1.input_layernorm.weight"][2:4] = float("nan")

    model = all_float(tiny_llama(tmp_path / "model", edit=spoil), tmp_path)
    with pytest.raises(CompressError, match=r"up_proj\.weight: 1 values are too large for F16"):
        export(model, tmp_path / "half")
    with pytest.raises(CompressError, match=r"1\.input_layernorm\.weight: 2 values are not finite"):
        export(model, tmp_path / "full", "f32")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_a_file_that_cannot_be_written_whole_is_an_error(share: float, tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "model"), tmp_path / "work")
    whole = export(model, tmp_path / "whole")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "out").mkdir()
    try:
        size = int(share * (whole.path / whole.entry).stat().st_size)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        with pytest.raises(OSError, match="too large") as caught:
            GgufExporter().write(model, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG


def test_unknown_float_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="did you mean 'bf16'"):
        GgufExporter("bf61")
    with pytest.raises(InputError, match=r"(?s)float_type 'f8'.*ternary 'tq3_0' is not known; did you mean"):
        GgufExporter("f8", "tq3_0")


def test_missing_layer_is_an_error(tmp_path: Path) -> None:
    model = rounded_model(tiny_llama(tmp_path / "model", tie_word_embeddings=True), tmp_path / "work")
    artifact = export(model, tmp_path / "out")
    with pytest.raises(CompressError, match="lm_head"):
        list(GgufExporter().read_back(artifact, ["lm_head"]))
