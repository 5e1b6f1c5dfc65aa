"""AutoRound against the paper's own words, against plain rounding, and where it has nothing to learn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.grid import fit_groups, split_groups
from compress.levels import codes_of
from compress.passes.autoround import Autoround, distance
from compress.passes.awq import Awq
from compress.passes.rtn import Rtn
from compress.rounding import LearnedRounding
from compress.scheme import QuantScheme
from tests.compress.families import VARIANTS, blockwise, compressed, logits, saved, tokens_of
from tests.compress.test_blockgrid import check_parts
from tests.reference import autoround as paper
from tests.support import mean_kld, tiny_llama

SCHEMES = ("int4-g32", "int2-g16", "int4-g32-asym", "int2-g32-asym", "int3-channel", "int8-g32", "nf4-g32")


def correlated(tokens: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    sizes = torch.logspace(-1, 0.5, columns)
    return torch.randn(tokens, columns, generator=generator) @ (torch.eye(columns) + 2 * mixing) * sizes


def two_layers() -> tuple[list[Tensor], Callable[[Sequence[Tensor], Tensor], Tensor]]:
    """Two weights with a nonlinearity between them, and what they make of inputs; 80 columns: a tail group."""
    generator = torch.Generator().manual_seed(5)
    first, second = torch.randn(48, 80, generator=generator), torch.randn(24, 48, generator=generator)

    def outputs(weights: Sequence[Tensor], inputs: Tensor) -> Tensor:
        one, other = (weight.to(inputs.dtype) for weight in weights)
        return torch.nn.functional.silu(inputs @ one.T) @ other.T

    return [first, second], outputs


@pytest.mark.parametrize("text", SCHEMES)
def test_every_step_goes_where_the_papers_goes_and_all_of_them_beat_plain_rounding(text: str) -> None:
    scheme, iterations = QuantScheme.parse(text), 60
    weights, outputs = two_layers()
    inputs = correlated(256, 80, 1)
    target = outputs(weights, inputs)
    starts = [fit_groups(split_groups(weight, scheme), scheme) for weight in weights]

    def loss(values: Sequence[Tensor], batch: Tensor) -> Tensor:
        return distance(outputs(values, batch), target.to(batch.dtype))

    ours = [LearnedRounding(weight, scheme, start) for weight, start in zip(weights, starts, strict=True)]
    equal: list[float] = []
    plain = least = float(loss([rounding.values() for rounding in ours], inputs))
    for iteration in range(iterations):
        rate = 1 / iterations * (1 - iteration / iterations)
        theirs = [paper.Learned.of(rounding, weight) for rounding, weight in zip(ours, weights, strict=True)]
        paper.step(theirs, lambda values: loss(values, inputs.double()), rate)
        leaves = [rounding.values().requires_grad_() for rounding in ours]
        for rounding, gradient in zip(ours, torch.autograd.grad(loss(leaves, inputs), leaves), strict=True):
            rounding.step(gradient, rate)
        for rounding, other in zip(ours, theirs, strict=True):
            for mine, its in zip(parameters_of(rounding), other.parameters(), strict=True):
                # A gradient near 0 may take either sign, and a scale between two that can be stored go either way.
                equal.append(float(torch.isclose(mine.double(), its.detach(), atol=1e-5).double().mean()))
        least = min(least, float(loss([rounding.values() for rounding in ours], inputs)))
    assert min(equal) > 0.8
    assert sum(equal) / len(equal) > 0.985
    # At 8 bits searched scales leave nothing to learn in so few steps.
    assert least < (1.01 if scheme.bits == 8 else 0.99 if scheme.codebook else 0.87) * plain
    for rounding in ours:
        stored = rounding.stored()
        assert torch.equal(stored.dequantize(), rounding.values())
        assert torch.equal(stored.scale.half().float(), stored.scale)
        if stored.zero is not None and scheme.bits <= 4:
            minima = stored.zero * stored.scale
            assert torch.equal(minima.half().float(), minima)


def parameters_of(rounding: LearnedRounding) -> list[Tensor]:
    rows, columns = rounding.shape
    return [rounding.offset.reshape(rows, -1)[:, :columns], rounding.gain, rounding.shift]


@pytest.mark.parametrize("text", SCHEMES)
def test_clipped_weights_move_the_grid_and_not_themselves(text: str) -> None:
    scheme = QuantScheme.parse(text)
    weight = torch.randn(12, 80, generator=torch.Generator().manual_seed(2))
    start = fit_groups(split_groups(weight, scheme), scheme, search=False)
    start.scale.mul_(0.75)
    slope = torch.randn(12, 80, generator=torch.Generator().manual_seed(3))
    ours = LearnedRounding(weight, scheme, start)
    theirs = paper.Learned.of(ours, weight)
    paper.step([theirs], lambda values: (values[0] * slope.double()).sum(), 0.01)
    ours.step(slope, 0.01)
    for mine, its in zip(parameters_of(ours), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.double(), its.detach(), rtol=1e-5, atol=1e-7)
    offset, gain, shift = parameters_of(ours)
    assert 0 < int((offset == 0).sum()) < offset.numel() / 4
    assert (gain.abs() > 0).all()
    assert bool((shift != 0).any()) != scheme.symmetric


@pytest.mark.parametrize("text", SCHEMES)
def test_before_the_first_step_it_is_plain_rounding(text: str) -> None:
    scheme = QuantScheme.parse(text)
    weight = torch.randn(16, 80)
    start = fit_groups(split_groups(weight, scheme), scheme)
    codes = codes_of(split_groups(weight, scheme), start, scheme).view(16, -1)[:, :80]
    rounding = LearnedRounding(weight, scheme, start)
    assert torch.equal(rounding.stored().codes, codes.to(torch.uint8))
    assert torch.equal(rounding.stored().scale, start.scale)


# --- the pass


def few_directions(parameters: dict[str, Tensor]) -> None:
    """Hidden states that lie near a few directions, as those of trained models do."""
    embedding = parameters["model.embed_tokens.weight"]
    embedding.copy_(0.1 * embedding + torch.randn(320, 6) @ torch.randn(6, 64) / 6)


@pytest.mark.parametrize("text", ["int4-g32", "int2-g32-asym", "nf4-g32"])
def test_the_model_is_nearer_than_with_plain_rounding(text: str, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", edit=few_directions)
    tokens, unseen = tokens_of(16, 48), tokens_of(4, 40)
    step = Autoround(QuantScheme.parse(text), iterations=60, samples=4)
    learned = compressed(folder, tmp_path / "learned", [step], tokens)
    rounded = compressed(folder, tmp_path / "rounded", [Rtn(step.scheme)], tokens)
    reference = blockwise(folder, unseen)
    losses = [
        mean_kld(reference, logits(item.replaced(tmp_path / name), unseen))
        for name, item in (("a", learned), ("b", rounded))
    ]
    assert losses[0] < 0.8 * losses[1]
    records = {record.layer: record for record in learned.done[0].layers}
    assert records.keys() == learned.session.shapes.keys()
    for layer in learned.session.decoder.spec.all_linears():
        record = records[layer]
        assert record.tokens == tokens.numel()
        assert record.output_error is not None
        assert record.rounding_error is not None
        assert record.output_error < 0.8 * record.rounding_error
        assert record.fallback is None


def test_runs_are_equal_for_a_seed_and_differ_for_another(tmp_path: Path) -> None:
    folder, tokens = tiny_llama(tmp_path / "model"), tokens_of(6, 32)
    layer = "model.layers.1.mlp.up_proj"
    found = []
    for number, seed in enumerate((0, 0, 1)):
        step = Autoround(iterations=12, samples=2)
        run = compressed(folder, tmp_path / str(number), [Seeded(seed), step], tokens)
        found.append(run.model.quantized(layer).codes)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


class Seeded(Awq):
    """Sets the session's seed, and changes nothing."""

    def __init__(self, seed: int) -> None:
        object.__setattr__(self, "seed", seed)

    def check(self, session):  # type: ignore[no-untyped-def]
        session.seed = self.seed  # type: ignore[attr-defined]
        return []

    def apply(self, session, block):  # type: ignore[no-untyped-def]
        return []


def test_where_no_step_helps_plain_rounding_is_kept_and_said(tmp_path: Path) -> None:
    folder, tokens = tiny_llama(tmp_path / "model"), tokens_of(4, 32)
    # One step as large as it gets ruins every weight.
    run = compressed(folder, tmp_path / "w", [Autoround(iterations=1, samples=1, learning_rate=1.0)], tokens)
    plain = compressed(folder, tmp_path / "r", [Rtn()], tokens)
    records = [record for record in run.done[0].layers if "layers" in record.layer]
    assert all((record.fallback or "").startswith("plain rounding: no step lowered") for record in records)
    assert all(record.output_error == record.rounding_error for record in records)
    assert set(run.model.schemes) == set(plain.model.schemes)


def test_layers_left_in_floating_point_are_part_of_the_block(tmp_path: Path) -> None:
    folder, tokens = tiny_llama(tmp_path / "model", edit=few_directions), tokens_of(8, 32)
    only = "model.layers.0.mlp.up_proj"

    class Only(Autoround):
        def check(self, session):  # type: ignore[no-untyped-def]
            session.plan[only] = QuantScheme.parse("int2-g32")
            return []

    run = compressed(folder, tmp_path / "w", [Only(iterations=40, samples=4)], tokens)
    assert set(run.model.schemes) == {only, "model.embed_tokens", "lm_head"}
    (record,) = [record for record in run.done[0].layers if record.layer == only]
    assert (record.output_error or 1) < (record.rounding_error or 0)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_family_learns_after_awq(variant: str, tmp_path: Path) -> None:
    folder, tokens = saved(variant, tmp_path / "model"), tokens_of(4, 24)
    run = compressed(folder, tmp_path / "w", [Awq(4), Autoround(iterations=8, samples=4)], tokens)
    blocks: dict[float, float] = {}
    for record in run.done[1].layers:
        if record.rounding_error is not None:
            blocks[record.rounding_error] = record.output_error or 0.0
    assert len(blocks) == run.session.decoder.spec.layers
    assert all(after <= before for before, after in blocks.items())
    assert sum(blocks.values()) < sum(blocks)


def test_an_expert_without_tokens_is_rounded_and_named(tmp_path: Path) -> None:
    from tests.compress.test_experts import one_sided

    run = compressed(one_sided(tmp_path / "model"), tmp_path / "w", [Autoround(iterations=4)], tokens_of(4, 24))
    named = {record.layer for record in run.done[0].layers if record.fallback == "plain rounding: 0 tokens"}
    spec = run.session.decoder.spec
    assert named == {
        layer
        for index in range(spec.layers)
        for expert in (4, 5)
        for layer in spec.expert_linears(index)[expert].values()
    }


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"iterations": 0}, "iterations: 0"),
        ({"samples": 0}, "samples: 0"),
        ({"learning_rate": 0.0}, "learning_rate: 0"),
    ],
)
def test_nonsense_arguments_are_refused(arguments: dict[str, float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Autoround(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["q4_k", "q3_k", "q5_1"])
def test_ggmls_block_types_keep_their_grid_and_learn_their_codes(text: str) -> None:
    scheme = QuantScheme.parse(text)
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(1))
    inputs = correlated(512, 256, 2)
    start = fit_groups(split_groups(weight, scheme), scheme)
    rounding = LearnedRounding(weight, scheme, start)

    def loss(values: Tensor) -> Tensor:
        return distance(inputs @ values.T, inputs @ weight.T)

    plain = least = float(loss(rounding.values()))
    for iteration in range(200):
        leaf = rounding.values().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(leaf), [leaf])
        rounding.step(gradient, 1 / 200 * (1 - iteration / 200))
        least = min(least, float(loss(rounding.values())))
    # Codes alone gain little where no layer follows.
    assert least < 0.99 * plain
    stored = rounding.stored()
    assert torch.equal(stored.dequantize(), rounding.values())
    assert torch.equal(stored.scale, start.scale)
    check_parts(stored)
