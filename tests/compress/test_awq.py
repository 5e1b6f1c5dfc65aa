"""AWQ against its paper's own words, as an identity, and where it has nothing to gain or nothing to divide by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from compress import engine
from compress.blocks import compress_blocks
from compress.grid import round_to_nearest
from compress.models.checkpoint import open_checkpoint
from compress.models.decoder import Decoder
from compress.models.folding import ScaleGroup
from compress.passes import awq
from compress.passes.awq import Awq, scale_of
from compress.passes.gptq import Gptq
from compress.passes.rtn import Rtn
from compress.protocols import Resource
from compress.report import LayerRecord
from compress.scheme import QuantScheme
from compress.session import Block, Session
from tests.compress.families import (
    VARIANTS,
    Compressed,
    Watch,
    blockwise,
    compressed,
    largest_difference,
    saved,
    tokens_of,
    whole_model,
)
from tests.compress.runs import Bench
from tests.compress.test_rotate import BIASES, inputs_of, shake_vectors
from tests.reference import awq as paper
from tests.support import tiny_llama

INT4 = QuantScheme(4, 32)
READERS = {
    "self_attn.q_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


@dataclass(frozen=True)
class Plan:
    """Plans a scheme for every linear layer, and quantises nothing."""

    scheme: QuantScheme = INT4

    scope: ClassVar[Literal["block"]] = "block"
    reads: ClassVar[frozenset[Resource]] = frozenset()
    writes: ClassVar[frozenset[Resource]] = frozenset({"plan"})

    def check(self, session: Session) -> list[str]:
        session.plan_rest(self.scheme)
        return []

    def apply(self, session: Session, block: Block) -> list[LayerRecord]:
        return []


def scaled(
    folder: Path, workdir: Path, scheme: str = "int4-g32", *more: Any, tokens: Tensor | None = None
) -> Compressed:
    """The model after AWQ for ``scheme``, and whatever ``more`` does."""
    passes = [Plan(QuantScheme.parse(scheme)), Awq(steps=5), *more]
    return compressed(folder, workdir, passes, tokens_of(4, 40) if tokens is None else tokens)


def records_of(found: Compressed) -> dict[str, LayerRecord]:
    return {record.layer: record for record in found.done[1].layers}


def loud(parameters: dict[str, Tensor]) -> None:
    """Norms, biases and weights that differ much from channel to channel."""
    shake_vectors(parameters)
    for name, parameter in parameters.items():
        if parameter.ndim == 2 and "layers" in name:
            parameter.mul_(torch.exp(0.7 * torch.randn(parameter.shape[1])))
        if name.endswith(("up_proj.weight", "v_proj.weight")):
            parameter.mul_(torch.exp(torch.randn(len(parameter), 1)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_quantisation_no_family_computes_anything_else(variant: str, tmp_path: Path) -> None:
    folder, tokens = saved(variant, tmp_path / "model"), tokens_of(3, 40)
    found = scaled(folder, tmp_path / "work", tokens=tokens)
    assert any(record.alpha is not None for record in found.done[1].layers)
    logits = torch.stack(list(Decoder(found.checkpoint, found.model.dense).logits(tokens)))
    assert largest_difference(logits, blockwise(folder, tokens)) < 1e-4


@pytest.mark.parametrize("scheme", ["int4-g32", "int2-g16-asym", "int3-g48", "int4-channel"])
@pytest.mark.parametrize("steps", [20, 5])
def test_chooses_what_the_paper_would(scheme: str, steps: int, tmp_path: Path) -> None:
    folder, tokens = tiny_llama(tmp_path / "model", loud, **BIASES), tokens_of(4, 40)
    parsed = QuantScheme.parse(scheme)
    records = records_of(compressed(folder, tmp_path / "work", [Plan(parsed), Awq(steps)], tokens))
    original, inputs = open_checkpoint(folder), inputs_of(whole_model(folder), tokens)
    heads = [head // 2 * 16 + channel for head in range(4) for channel in range(16)]
    channels = {"self_attn.o_proj": heads, "mlp.down_proj": [*range(96)]} | {first: [*range(64)] for first in READERS}
    for first, channel_of in channels.items():
        layers = [f"model.layers.0.{layer}" for layer in READERS.get(first, (first,))]
        weights = [original.tensor(f"{layer}.weight") for layer in layers]
        fed = inputs[f"model.layers.0.{first}"]
        # What o and down are fed is not yet scaled when their turn comes: the division is folded into v and up later.
        errors = paper.search(fed, weights, [parsed] * len(layers), channel_of, steps)
        (alpha,) = {records[layer].alpha for layer in layers}
        chosen = errors[0 if alpha is None else 1 + round(alpha * (steps - 1))]
        # Neighbouring exponents may be as good as the best, to float32.
        assert chosen == pytest.approx(min(errors), rel=1e-2)
        assert total(records, layers, "output_error") == pytest.approx(chosen, rel=1e-2)
        assert total(records, layers, "rounding_error") == pytest.approx(errors[0], rel=1e-3)


def total(records: Mapping[str, LayerRecord], layers: Sequence[str], error: str) -> float:
    return sum(getattr(records[layer], error) for layer in layers)


def test_scales_are_the_papers() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, weights = torch.rand(12, generator=generator) + 0.1, torch.rand(12, generator=generator) + 0.1
    for alpha in (0.0, 0.3, 1.0):
        expected = inputs**alpha / weights ** (1 - alpha)
        expected /= expected.log().mean().exp()
        torch.testing.assert_close(scale_of(inputs, weights, alpha), expected)


def test_channels_that_carry_nothing_keep_a_finite_positive_scale() -> None:
    inputs, weights = torch.tensor([0.0, 1e-30, 1.0, 1e30, 2.0]), torch.tensor([1.0, 1.0, 0.0, 1.0, 1e-30])
    for alpha in (0.0, 0.5, 1.0):
        scale = scale_of(inputs, weights, alpha)
        assert torch.isfinite(scale).all()
        assert (scale >= 2.0**-10).all()
        assert (scale <= 2.0**10).all()
        assert scale[0] == scale[2] == 1
    assert torch.equal(scale_of(torch.zeros(3), torch.ones(3), 0.5), torch.ones(3))


@pytest.mark.parametrize("scheme", ["int4-g32", "int4-g32-asym"])
def test_dead_channels_break_nothing(scheme: str, tmp_path: Path) -> None:
    def dead(parameters: dict[str, Tensor]) -> None:
        loud(parameters)
        for name, parameter in parameters.items():
            if name.endswith("input_layernorm.weight"):
                parameter[7] = 0
            if name.endswith("post_attention_layernorm.weight"):
                parameter[11] = 0
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                parameter[:, 7] = 0
            if name.endswith("up_proj.weight"):
                parameter[5] = 0

    folder, tokens = tiny_llama(tmp_path / "model", dead), tokens_of(4, 40)
    found = scaled(folder, tmp_path / "work", scheme, Rtn(QuantScheme.parse(scheme)))
    for layers in groups_of(found):
        records = records_of(found)
        assert all(records[layer].alpha is not None for layer in layers)
        assert total(records, layers, "output_error") < total(records, layers, "rounding_error")
    for norm, channel in (("input_layernorm", 7), ("post_attention_layernorm", 11)):
        gain = found.model.dense(f"model.layers.0.{norm}.weight")
        assert torch.isfinite(gain).all()
        assert gain[channel] == 0
    logits = torch.stack(list(Decoder(found.checkpoint, found.model.parameter).logits(tokens)))
    assert torch.isfinite(logits).all()


def groups_of(found: Compressed) -> list[Sequence[str]]:
    """The layers of each group, by the names of llama."""
    names: list[Sequence[str]] = [*READERS.values(), ("self_attn.o_proj",), ("mlp.down_proj",)]
    return [[f"model.layers.{index}.{name}" for name in group] for index in range(2) for group in names]


@pytest.mark.parametrize("quantiser", [Rtn, Gptq])
def test_later_passes_see_the_inputs_of_the_scaled_layers(quantiser: type[Any], tmp_path: Path) -> None:
    folder, tokens = tiny_llama(tmp_path / "model", loud, **BIASES), tokens_of(4, 40)
    seen, fresh = Watch(), Watch()
    found = scaled(folder, tmp_path / "a", "int4-g32", seen, tokens=tokens)
    session = found.session
    again = Session(Decoder(found.checkpoint, found.model.dense), tokens, session.store, session.shapes, {})
    compress_blocks(again, [fresh])
    assert len(seen.seen) == 15
    for layer, stats in seen.seen.items():
        gram = fresh.seen[layer].gram
        torch.testing.assert_close(stats.gram, gram, atol=1e-4 * float(gram.diagonal().max()), rtol=1e-3)
        assert stats.tokens == tokens.numel()


def test_query_heads_share_the_scales_of_their_value_head(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", loud, num_attention_heads=4, num_key_value_heads=2, **BIASES)
    found = scaled(folder, tmp_path / "work")
    original = open_checkpoint(folder)
    for index in range(2):
        attention = f"model.layers.{index}.self_attn"
        assert records_of(found)[f"{attention}.o_proj"].alpha is not None
        ratio = found.model.dense(f"{attention}.o_proj.weight") / original.tensor(f"{attention}.o_proj.weight")
        factor = ratio[0].view(2, 2, 16)
        torch.testing.assert_close(factor[:, 0], factor[:, 1])
        assert float(factor.std()) > 0.05
        bias = original.tensor(f"{attention}.v_proj.bias") / found.model.dense(f"{attention}.v_proj.bias")
        torch.testing.assert_close(bias.view(2, 16), factor[:, 0], rtol=1e-4, atol=0)


def test_nothing_is_scaled_where_rounding_loses_nothing(tmp_path: Path) -> None:
    def on_grid(parameters: dict[str, Tensor]) -> None:
        shake_vectors(parameters)
        for name, parameter in parameters.items():
            if parameter.ndim == 2 and "layers" in name:
                parameter.copy_(round_to_nearest(parameter, INT4).dequantize())
                parameter.copy_(round_to_nearest(parameter, INT4).dequantize())

    folder = tiny_llama(tmp_path / "model", on_grid)
    found = scaled(folder, tmp_path / "work")
    unscaled = [record for record in found.done[1].layers if record.alpha is None]
    assert len(unscaled) >= 12
    for record in unscaled:
        assert record.output_error == record.rounding_error
    if len(unscaled) == 14:
        assert all(torch.equal(found.model.dense(n), found.checkpoint.tensor(n)) for n in found.checkpoint.files)


def test_what_looked_good_on_some_rows_must_be_good_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_llama(tmp_path / "model", loud)
    monkeypatch.setattr(awq, "ROWS", 1)
    found = scaled(folder, tmp_path / "work", "int2-g16")
    records = records_of(found)
    for layers in groups_of(found):
        after, before = (total(records, layers, error) for error in ("output_error", "rounding_error"))
        assert after < before if records[layers[0]].alpha is not None else after == before


def test_layers_that_stay_in_floating_point_are_scaled_with_the_others(tmp_path: Path) -> None:
    folder, tokens = tiny_llama(tmp_path / "model", loud, **BIASES), tokens_of(4, 40)

    @dataclass(frozen=True)
    class Partly(Plan):
        def check(self, session: Session) -> list[str]:
            chosen = ("k_proj", "down_proj")
            session.plan.update({layer: INT4 for layer in session.shapes if layer.endswith(chosen)})
            return []

    found = compressed(folder, tmp_path / "work", [Partly(), Awq(steps=5)], tokens)
    assert {record.layer.split(".")[-1] for record in found.done[1].layers} == {"k_proj", "down_proj"}
    assert all(record.alpha is not None for record in found.done[1].layers)
    logits = torch.stack(list(Decoder(found.checkpoint, found.model.dense).logits(tokens)))
    assert largest_difference(logits, blockwise(folder, tokens)) < 1e-4


@pytest.mark.parametrize("quantiser", [Rtn, Gptq])
def test_the_quantised_model_is_nearer_with_it_than_without(quantiser: type[Any], tmp_path: Path) -> None:
    folder, tokens = tiny_llama(tmp_path / "model", loud), tokens_of(8, 64)
    reference = torch.log_softmax(blockwise(folder, tokens), -1)

    def divergence(name: str, passes: list[Any]) -> float:
        found = compressed(folder, tmp_path / name, passes, tokens)
        logits = torch.stack(list(Decoder(found.checkpoint, found.model.parameter).logits(tokens)))
        return float((reference.exp() * (reference - torch.log_softmax(logits, -1))).sum(-1).mean())

    with_it, without = (divergence(n, p) for n, p in (("a", [Awq(), quantiser()]), ("b", [quantiser()])))
    assert with_it < 0.8 * without


def test_files_of_a_scaled_model_compute_the_original(bench: Bench, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", loud, tie_word_embeddings=True, **BIASES)
    recipe = bench.recipe(
        model=str(folder), passes="[{rtn: {scheme: int8-g32}}, awq]", export="[{onnx: {accuracy_level: 0}}, gguf]"
    )
    report = engine.run(recipe, tmp_path / "out")
    assert [record.name for record in report.passes] == ["awq", "rtn"]
    assert any(layer.alpha is not None for layer in report.passes[0].layers)
    for artifact in report.artifacts:
        assert artifact.quality is not None
        assert artifact.quality.kld_mean < 5e-3


def test_scales_of_shared_channels_are_means() -> None:
    group = ScaleGroup(("o",), repeats=2, head_size=3)
    inputs = torch.arange(12.0)
    assert group.to_channels(inputs).tolist() == [1.5, 2.5, 3.5, 7.5, 8.5, 9.5]
    assert group.to_inputs(torch.arange(6.0)).tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]


def test_one_step_is_no_grid() -> None:
    with pytest.raises(ValueError, match="steps: 1 is not at least 2"):
        Awq(steps=1)
