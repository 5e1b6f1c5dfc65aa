"""A rotated model is the same function with other weights, and those round better where channels stuck out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress import engine
from compress.errors import InputError
from compress.models.checkpoint import Checkpoint, open_checkpoint
from compress.models.decoder import Decoder
from compress.passes.mixed import fisher_information
from compress.passes.rotate import Rotate
from compress.prepare import in_order
from compress.recipe import Step
from compress.rotation import make_rotation
from compress.scheme import QuantScheme
from compress.session import Session
from compress.store import Store
from tests.compress.families import VARIANTS, blockwise, largest_difference, saved, tokens_of, whole_model
from tests.compress.runs import Bench
from tests.reference.rotate import dense, rotate_llama
from tests.support import naive_round, tiny_llama, tiny_tokenizer

BIASES = {"attention_bias": True, "mlp_bias": True}
WIDTHS: tuple[dict[str, Any], ...] = (
    {},
    {"hidden_size": 96, "head_dim": 24},
    {"num_key_value_heads": 1, "hidden_size": 60, "head_dim": 20},
)
"""One matrix of Sylvester, a product with one of Paley, and one of Paley alone."""
NORMS_AFTER = ("gemma2", "gemma3", "olmo2")
"""Families whose residual stream cannot be turned."""


def shake_vectors(parameters: dict[str, Tensor]) -> None:
    """Norms away from 1 and biases away from 0, so that a lost or misplaced one shows."""
    for parameter in parameters.values():
        if parameter.ndim == 1:
            parameter.add_(0.5 * torch.randn(parameter.shape))


def rotated(folder: Path, **arguments: Any) -> Checkpoint:
    checkpoint, _ = Rotate(**arguments).rewrite(open_checkpoint(folder))
    return checkpoint


def logits_of(checkpoint: Checkpoint, tokens: Tensor) -> Tensor:
    return torch.stack(list(Decoder(checkpoint).logits(tokens)))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "settings",
    [BIASES, *WIDTHS[1:]],
    ids=str,
)
def test_every_tensor_is_what_the_paper_says(tied: bool, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", shake_vectors, tie_word_embeddings=tied, **settings)
    found, spec = rotated(folder, seed=7), Decoder(open_checkpoint(folder)).spec
    stream, value = dense(make_rotation(spec.hidden_size, 7)), dense(make_rotation(spec.head_dim, 8))
    expected = rotate_llama(load_file(folder / "model.safetensors"), stream, value, spec.heads, spec.kv_heads)
    assert set(found.files) == set(expected)
    for name, tensor in expected.items():
        assert found.shape(name) == tuple(tensor.shape)
        torch.testing.assert_close(found.tensor(name), tensor.float(), atol=1e-6, rtol=0)
    assert not Decoder(found).spec.tied


@pytest.mark.parametrize("how", [{}, {"residual": False}, {"heads": False}], ids=["both", "heads", "residual"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_family_computes_anything_else(variant: str, how: dict[str, bool], tmp_path: Path) -> None:
    folder, tokens = saved(variant, tmp_path / "model"), tokens_of(3, 40)
    if variant in NORMS_AFTER and how.get("residual", True):
        with pytest.raises(InputError, match=r"post_attention_layernorm and post_feedforward_layernorm multiply"):
            rotated(folder, **how)
        return
    found = rotated(folder, **how)
    assert any(not torch.equal(found.tensor(n), open_checkpoint(folder).tensor(n).float()) for n in found.files)
    assert largest_difference(logits_of(found, tokens), blockwise(folder, tokens)) < 1e-4


def test_transformers_computes_the_same_from_the_rotated_tensors(tmp_path: Path) -> None:
    folder, tokens = tiny_llama(tmp_path / "a", shake_vectors, tie_word_embeddings=True, **BIASES), tokens_of(2, 40)
    found = rotated(folder)
    other = tmp_path / "b"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(dict(found.config)))
    save_file({name: found.tensor(name) for name in found.files}, other / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        logits = [whole_model(place)(tokens).logits for place in (folder, other)]
    assert largest_difference(*logits) < 1e-4


def test_nothing_of_the_original_is_changed(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama(tmp_path / "model", shake_vectors, **BIASES))
    before = {name: checkpoint.tensor(name).clone() for name in checkpoint.files}
    found, _ = Rotate().rewrite(checkpoint)
    first = {name: found.tensor(name) for name in found.files}
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in before.items())
    assert all(torch.equal(found.tensor(name), tensor) for name, tensor in first.items())


@pytest.mark.parametrize("copied", [True, False], ids=["head in the file too", "head not in the file"])
def test_a_head_stays_tied_where_the_last_gains_are_all_alike(copied: bool, tmp_path: Path) -> None:
    def gains(parameters: dict[str, Tensor]) -> None:
        shake_vectors(parameters)
        parameters["model.norm.weight"].fill_(1.7)

    folder, tokens = tiny_llama(tmp_path / "model", gains, tie_word_embeddings=True), tokens_of(2, 40)
    if copied:
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found, summary = Rotate().rewrite(open_checkpoint(folder))
    assert Decoder(found).spec.tied
    assert summary == {"residual": "hadamard 64", "heads": "hadamard 16", "unties_head": False, "in_graph": False}
    assert largest_difference(logits_of(found, tokens), blockwise(folder, tokens)) < 1e-4


@pytest.mark.parametrize("settings", WIDTHS, ids=str)
def test_a_tied_head_is_kept_where_the_graph_turns_the_stream(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", shake_vectors, tie_word_embeddings=True, **BIASES, **settings)
    checkpoint, tokens = open_checkpoint(folder), tokens_of(3, 40)
    found, summary = Rotate(keep_tied=True).rewrite(checkpoint)
    assert (summary["unties_head"], summary["in_graph"]) == (False, True)
    decoder = Decoder(found)
    assert decoder.spec.tied
    assert torch.equal(found.tensor("model.norm.weight"), checkpoint.tensor("model.norm.weight"))
    for turned in ("model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"):
        assert torch.equal(found.tensor(turned), rotated(folder).tensor(turned))
    assert largest_difference(logits_of(found, tokens), blockwise(folder, tokens)) < 1e-4
    with decoder.whole() as whole, torch.no_grad():
        assert largest_difference(whole(tokens).logits, blockwise(folder, tokens)) < 1e-4


def test_the_ends_matter_as_much_to_a_stream_that_is_turned(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", shake_vectors, tie_word_embeddings=True)
    (tmp_path / "work").mkdir()
    tokens, layer = tokens_of(3, 24), "model.embed_tokens"
    checkpoints = (open_checkpoint(folder), rotated(folder, keep_tied=True))
    found = []
    for number, checkpoint in enumerate(checkpoints):
        session = Session(Decoder(checkpoint), tokens, Store(tmp_path / f"work/{number}"), {}, {})
        found += [fisher for name, _, fisher in fisher_information(session, 3, {layer}) if name == layer]
    # Turned gradients are as long.
    lengths = [fisher.sum(-1) for fisher in found]
    torch.testing.assert_close(lengths[1], lengths[0], rtol=1e-3, atol=1e-3 * float(lengths[0].max()))


def test_keep_tied_has_nothing_to_do_with_a_head_of_its_own(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", shake_vectors, tie_word_embeddings=False)
    kept, plain = rotated(folder, keep_tied=True), rotated(folder)
    assert kept.config == plain.config
    assert all(torch.equal(kept.tensor(name), plain.tensor(name)) for name in plain.files)
    with pytest.raises(ValueError, match="keep_tied: without residual"):
        Rotate(residual=False, keep_tied=True)


@pytest.mark.parametrize(
    ("arguments", "limit"), [("{}", 1e-6), ("{dialect: standard}", 1e-6), ("{float_type: f16}", 1e-3)]
)
@pytest.mark.parametrize("settings", WIDTHS[:2], ids=str)
def test_a_file_turns_the_stream(
    settings: dict[str, Any], arguments: str, limit: float, bench: Bench, tmp_path: Path
) -> None:
    folder = tiny_llama(tmp_path / "model", shake_vectors, tie_word_embeddings=True, **settings)
    tiny_tokenizer(folder)
    passes = "[{rotate: {keep_tied: true}}, rtn]"
    recipe = bench.recipe(model=str(folder), passes=passes, export=f"[{{onnx: {arguments}}}]")
    (artifact,) = engine.run(recipe, tmp_path / "out").artifacts
    assert artifact.parity is not None
    assert artifact.parity.kld_mean < limit
    graph = onnx.load(tmp_path / "out" / "onnx" / "model.onnx", load_external_data=False).graph
    assert not [tensor.name for tensor in graph.initializer if tensor.name.startswith("lm_head")]


def test_gguf_cannot_turn_the_stream(bench: Bench, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", shake_vectors, tie_word_embeddings=True)
    tiny_tokenizer(folder)
    recipe = bench.recipe(model=str(folder), passes="[{rotate: {keep_tied: true}}, rtn]", export="[onnx, gguf]")
    with pytest.raises(InputError, match=r"gguf: rotate: .*cannot turn back for the final norm; leave keep_tied out"):
        engine.plan(recipe)


def loud(parameters: dict[str, Tensor]) -> None:
    """A few channels of the stream and of the values carry much more than others; a few others have large weights."""
    for name, parameter in parameters.items():
        if name.endswith("embed_tokens.weight"):
            parameter[:, [3, 40, 77, 101]] *= 25
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter[[3, 40, 77, 101]] *= 25
        if name.endswith("v_proj.weight"):
            parameter[[2, 21, 40]] *= 25
        if name.endswith(("q_proj.weight", "k_proj.weight", "gate_proj.weight", "up_proj.weight")):
            parameter[:, [10, 50, 90, 120]] *= 25
        if name.endswith("o_proj.weight"):
            parameter[:, [10, 50, 90, 120]] *= 25


def inputs_of(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """What each linear layer of the blocks is fed: name -> [tokens, in]."""
    found: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        return lambda _, given: found.update({name: given[0].flatten(0, -2)})

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in name:
            module.register_forward_pre_hook(watch(name))
    with torch.no_grad():
        model(tokens)
    return found


def kurtosis(values: Tensor) -> float:
    centred = values - values.mean()
    return float((centred**4).mean() / (centred**2).mean() ** 2)


def test_outliers_and_the_rounding_errors_that_they_cause_fall(tmp_path: Path) -> None:
    settings = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder, tokens = tiny_llama(tmp_path / "model", loud, **settings), tokens_of(4, 40)
    model, turned = whole_model(folder), whole_model(folder)
    found = rotated(folder)
    turned.load_state_dict({name: found.tensor(name) for name in found.files})
    before, after = inputs_of(model, tokens), inputs_of(turned, tokens)
    scheme = QuantScheme.parse("int4-g32")

    def error(of: Any, layer: str, inputs: Tensor) -> float:
        weight = of.get_submodule(layer).weight.detach()
        difference = naive_round(weight, scheme).dequantize() - weight
        return float((inputs @ difference.T).square().sum() / (inputs @ weight.T).square().sum())

    turned_layers = [layer for layer in before if not layer.endswith("down_proj")]
    assert len(turned_layers) == 12
    for layer in turned_layers:
        assert kurtosis(before[layer]) > 2 * kurtosis(after[layer])
    errors = [(error(model, layer, before[layer]), error(turned, layer, after[layer])) for layer in turned_layers]
    assert sum(after for _, after in errors) < 0.7 * sum(before for before, _ in errors)


@pytest.mark.parametrize("passes", ["[{rtn: {scheme: int8-g32}}, rotate]", "[rotate, {gptq: {scheme: int8-g32}}]"])
def test_files_of_a_rotated_model_compute_the_original(passes: str, bench: Bench, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", shake_vectors, tie_word_embeddings=True, **BIASES)
    recipe = bench.recipe(model=str(folder), passes=passes, export="[{onnx: {accuracy_level: 0}}, gguf]")
    report = engine.run(recipe, tmp_path / "out")
    assert report.passes[0].name == "rotate"
    assert report.passes[0].summary == {
        "residual": "hadamard 64",
        "heads": "hadamard 16",
        "unties_head": True,
        "in_graph": False,
    }
    assert not report.model["tied_head"]
    assert report.model["weights"] == 2 * 320 * 64 + report.model["linear_weights"]
    for artifact in report.artifacts:
        assert artifact.parity is not None
        assert artifact.quality is not None
        assert artifact.parity.tensors == 16
        # Compared with the original: a wrong rotation would cost nats, 8 bits do not.
        assert artifact.quality.kld_mean < 5e-3
    assert json.loads((tmp_path / "out/onnx/config.json").read_text())["tie_word_embeddings"] is False


def test_a_damaged_tied_head_is_refused_as_ever(bench: Bench, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", shake_vectors, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"config\.json says it is the embedding"):
        engine.plan(bench.recipe(model=str(folder), passes="[rotate, rtn]"))


def test_a_rotation_runs_first_wherever_the_recipe_has_it(bench: Bench) -> None:
    passes = "[gptq, awq, {mixed: {target_bits: 5}}, rotate]"
    steps = bench.recipe(passes=passes).passes
    assert [step.name for step in in_order(steps)] == ["rotate", "mixed", "awq", "gptq"]
    turned: Step = replace(steps[3], name="again")
    assert [step.name for step in in_order([*steps, turned])] == ["rotate", "again", "mixed", "awq", "gptq"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"residual": False, "heads": False}, "nothing to rotate"), ({"seed": -1}, "seed: -1 is negative")],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rotate(**arguments)
