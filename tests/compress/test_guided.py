"""Token weights are the whole model's gradients; statistics, and what passes make of them, follow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from calibration.stats import InputStats, TokenFeed, collect_expert_inputs
from compress.errors import InputError
from compress.models.checkpoint import open_checkpoint
from compress.models.decoder import Decoder
from compress.passes.gptq import Gptq
from compress.passes.guided import Guided
from compress.passes.mixed import Mixed
from compress.passes.rtn import Rtn
from compress.prepare import in_order
from compress.recipe import Step
from compress.scheme import QuantScheme
from compress.session import Session
from compress.store import Store
from tests.compress.families import ROUTED, VARIANTS, Watch, compressed, saved, tokens_of, whole_model
from tests.reference.guided import row_gram
from tests.reference.guided import token_weights as of_the_whole_model
from tests.support import mean_kld


def session_of(folder: Path, tokens: torch.Tensor, real: torch.Tensor | None = None) -> Session:
    return Session(Decoder(open_checkpoint(folder)), tokens, Store(folder), {}, {}, seed=3, real=real)


def watched(session: Session) -> dict[str, list[str]]:
    """What each weight comes from: the head, layers that read one input, and the modules that hold experts."""
    spec = session.decoder.spec
    found = {spec.family.head: [spec.family.head]}
    found |= {layers[0]: layers for index in range(spec.layers) for layers in spec.shared_inputs(index)}
    for index in range(spec.layers):
        if spec.expert_linears(index):
            assert spec.family.experts is not None
            module = f"{spec.family.block.format(index=index)}.{spec.family.experts.module}"
            found[module] = [module]
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_the_gradients_of_the_whole_model(variant: str, tmp_path: Path) -> None:
    folder, tokens = saved(variant, tmp_path / "model"), tokens_of(3, 20)
    session = session_of(folder, tokens)
    record = Guided().apply(session)
    expected = of_the_whole_model(whole_model(folder), tokens, watched(session), session.seed)
    assert session.token_weights.keys() == expected.keys()
    assert record.summary["inputs"] == len(expected)
    for name, weights in expected.items():
        found = session.token_weights[name].double()
        torch.testing.assert_close(found, weights, rtol=2e-3, atol=1e-6 * float(weights.max()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_curvature_by_the_embeddings_rows_is_that_of_the_whole_model(variant: str, tmp_path: Path) -> None:
    folder, tokens = saved(variant, tmp_path / "model"), tokens_of(3, 20)
    session = session_of(folder, tokens)
    Guided().apply(session)
    spec = session.decoder.spec
    expected = row_gram(whole_model(folder), tokens, spec.family.head, spec.tied, session.seed)
    assert list(session.row_gram) == [spec.family.embedding]
    found = session.row_gram[spec.family.embedding].double()
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-5 * float(expected.abs().max()))


def test_gradients_go_back_in_the_decoders_precision(tmp_path: Path) -> None:
    folder, tokens = saved("llama", tmp_path / "model"), tokens_of(3, 20)
    exact, lower = session_of(folder, tokens), session_of(folder, tokens)
    lower.decoder = Decoder(open_checkpoint(folder), precision="bfloat16")
    for session in (exact, lower):
        Guided().apply(session)
    for name, weights in exact.token_weights.items():
        found = lower.token_weights[name]
        assert found.dtype == torch.float32
        assert float((found - weights).norm() / weights.norm()) < 5e-2
    blocks = [name for name in exact.token_weights if name.startswith("model.layers.")]
    assert all(not torch.equal(exact.token_weights[name], lower.token_weights[name]) for name in blocks)


@pytest.mark.parametrize("tied", [True, False])
def test_gptq_makes_up_for_errors_in_the_embedding(tied: bool, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model", hidden_size=64, tie_word_embeddings=tied)
    tokens, unseen = tokens_of(24, 48), torch.randint(0, 320, (16, 48), generator=torch.Generator().manual_seed(1))
    reference = whole_model(folder)(unseen).logits.detach()
    klds = []
    for name, passes in (("plain", [Gptq()]), ("guided", [Guided(), Gptq()])):
        made = compressed(folder, tmp_path / name, passes, tokens, ends=QuantScheme(4, 32), blocks=False)
        klds.append(mean_kld(reference, made.replaced(tmp_path / f"{name} model")(unseen).logits.detach()))
    assert klds[1] < klds[0]


def test_padding_weighs_nothing(tmp_path: Path) -> None:
    folder, tokens = saved("llama", tmp_path / "model"), tokens_of(2, 20)
    real = torch.ones(2, 20, dtype=torch.bool)
    real[1, 12:] = False
    session = session_of(folder, tokens, real)
    Guided().apply(session)
    for weights in session.token_weights.values():
        assert (weights[real] > 0).all()
        assert (weights[~real] == 0).all()


def test_weighted_statistics_are_weighted_sums() -> None:
    inputs, weights = torch.randn(3, 5, 8), torch.rand(3, 5)
    stats = InputStats(8)
    feed = TokenFeed(None, weights)
    for part in torch.split(inputs, 2):
        (rows,), counts = feed.take(part)
        stats.update(rows, counts)
    flat = inputs.reshape(-1, 8)
    expected = (flat * weights.reshape(-1, 1)).T @ flat
    torch.testing.assert_close(stats.gram, expected)
    assert stats.tokens == 15
    assert stats.mass == pytest.approx(float(weights.sum()), rel=1e-6)
    torch.testing.assert_close(stats.hessian, 2 * expected / weights.sum())
    torch.testing.assert_close(stats.importance, expected.diagonal() / weights.sum())


@pytest.mark.parametrize("variant", ["llama", *ROUTED])
def test_every_weight_reaches_its_statistics(variant: str, tmp_path: Path) -> None:
    folder, tokens = saved(variant, tmp_path / "model"), tokens_of(3, 20)
    plain, guided = Watch(), Watch()
    compressed(folder, tmp_path / "plain", [plain], tokens)
    after = compressed(folder, tmp_path / "guided", [Guided(), guided], tokens).session
    spec = after.decoder.spec
    embedding = spec.family.embedding
    assert guided.seen.pop(embedding).gram is after.row_gram[embedding]
    assert plain.seen.keys() == guided.seen.keys()
    for name, stats in plain.seen.items():
        assert guided.seen[name].tokens == stats.tokens
        if stats.tokens:
            assert not torch.allclose(guided.seen[name].importance, stats.importance, rtol=1e-4)
    for index in range(spec.layers):
        for layers in spec.shared_inputs(index):
            mass = float(after.token_weights[layers[0]].sum())
            assert all(guided.seen[layer].mass == pytest.approx(mass, rel=1e-5) for layer in layers)


def test_an_experts_tokens_count_with_the_squared_share_of_the_router() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(2, 6, 4))
            self.act_fn = nn.SiLU()

        def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
            return hidden

    experts, hidden = Experts(), torch.randn(4, 4)
    chosen, shares = torch.tensor([[0], [1], [0], [0]]), torch.tensor([[0.5], [1.0], [0.2], [1.0]])
    names = [{"gate": f"{e}.gate", "up": f"{e}.up", "down": f"{e}.down"} for e in range(2)]
    weights = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    with collect_expert_inputs(experts, names, None, weights) as found:
        experts(hidden, chosen, shares)
    counts = torch.tensor([1.0 * 0.25, 3.0 * 0.04, 4.0])
    routed = hidden[[0, 2, 3]]
    torch.testing.assert_close(found["0.gate"].gram, (routed * counts[:, None]).T @ routed)
    assert found["0.down"].mass == pytest.approx(float(counts.sum()))
    assert found["1.up"].mass == pytest.approx(2.0)
    assert found["0.up"].tokens == 3


def test_guided_gptq_keeps_more_of_the_predictions(tmp_path: Path) -> None:
    # Large weights in the head: predictions are sharp, and tokens differ in what errors cost.
    folder, tokens = saved("llama", tmp_path / "model", hidden_size=64), tokens_of(24, 48)
    unseen = torch.randint(0, 320, (16, 48), generator=torch.Generator().manual_seed(1))
    reference = whole_model(folder)(unseen).logits.detach()
    klds = []
    for name, passes in (("plain", [Gptq()]), ("guided", [Guided(), Gptq()])):
        made = compressed(folder, tmp_path / name, passes, tokens)
        klds.append(mean_kld(reference, made.replaced(tmp_path / f"{name} model")(unseen).logits.detach()))
    assert klds[1] < klds[0]


def test_the_weights_survive_a_resume(tmp_path: Path) -> None:
    from compress.store import preserve, restore

    session = session_of(saved("llama", tmp_path / "model"), tokens_of(2, 16))
    Guided().apply(session)
    state = preserve(session, tmp_path / "state.safetensors")
    other = session_of(tmp_path / "model", tokens_of(2, 16))
    restore(other, state, tmp_path / "state.safetensors")
    assert other.token_weights.keys() == session.token_weights.keys()
    assert all(torch.equal(other.token_weights[name], found) for name, found in session.token_weights.items())
    assert other.row_gram.keys() == session.row_gram.keys()
    assert all(torch.equal(other.row_gram[name], found) for name, found in session.row_gram.items())


def test_a_pass_whose_work_nobody_reads_is_refused() -> None:
    with pytest.raises(InputError, match="guided: no other pass reads what it writes"):
        in_order([Step("guided", Guided()), Step("rtn", Rtn())])
    with pytest.raises(InputError, match="no other pass reads"):
        in_order([Step("guided", Guided()), Step("mixed", Mixed(5.0)), Step("rtn", Rtn())])
    assert [step.name for step in in_order([Step("gptq", Gptq()), Step("guided", Guided())])] == ["guided", "gptq"]
