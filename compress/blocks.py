"""The walk through the model: embedding, blocks, head; one in memory, each quantised before the next is fed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial

from torch import Tensor, nn

from calibration.stats import InputStats, TokenFeed, collect_expert_inputs, collect_inputs
from compress.activations import Activations
from compress.journal import Journal
from compress.kv import KVScheme
from compress.models.decoder import Decoder
from compress.protocols import BlockPass
from compress.report import LayerRecord, decode
from compress.scheme import QuantScheme
from compress.session import Block, Session


@dataclass
class Done:
    """What one pass did to each layer, and the seconds it took."""

    layers: list[LayerRecord] = field(default_factory=list)
    seconds: float = 0.0


def compress_blocks(session: Session, passes: Sequence[BlockPass], journal: Journal | None = None) -> list[Done]:
    """Run ``passes`` over every block of the model; what each of them did.

    Inputs are captured, and hidden states carried on, only if a pass reads them. Each block is fed what the quantised
    blocks before it put out (Frantar et al. 2023, sec. 3.3). Blocks that ``journal`` knows are not done again: the
    hidden states behind them are computed from what is stored.
    """
    family, layers = session.decoder.spec.family, session.decoder.spec.layers
    walk = _Walk(session, passes, journal or Journal(), [Done() for _ in passes])
    names = [family.embedding, *(family.block.format(index=index) for index in range(layers))]
    names += [] if session.decoder.spec.tied else [family.head]
    hidden: Activations | None = None
    with session.progress("compressing blocks", layers + 2) as advance:
        if not walk.restore(family.embedding):
            walk.apply(_end_block(session, family.embedding, _row_stats(session)))
        advance(1)
        if any(step.reads & {"inputs", "activations"} for step in passes) and not all(map(walk.knows, names)):
            hidden = session.decoder.room(session.tokens)
            session.decoder.embed_into(session.tokens, hidden)
        for index in range(layers):
            if not walk.restore(family.block.format(index=index)):
                _one_block(walk, index, hidden)
            if hidden is not None:
                # As it was stored, so that a run that goes on here computes the same.
                with session.decoder.block(index) as module:
                    session.decoder.run_block_into(index, module, hidden, hidden)
            advance(1)
        if family.head in names and not walk.restore(family.head):
            inputs = {} if hidden is None else head_inputs(session.decoder, hidden, session.real, session.token_weights)
            walk.apply(_end_block(session, family.head, inputs))
        if hidden is not None:
            hidden.close()
        advance(1)
    return walk.records


@dataclass
class _Walk:
    """The passes on their way through the model, and what they did so far."""

    session: Session
    passes: Sequence[BlockPass]
    journal: Journal
    records: list[Done]

    def knows(self, block: str) -> bool:
        """Whether an earlier process has finished ``block``."""
        return self.journal.get(_step(block)) is not None

    def restore(self, block: str) -> bool:
        """Take ``block`` as an earlier process has stored it, if it did."""
        found = self.journal.get(_step(block))
        if found is None:
            return False
        schemes = {layer: QuantScheme.parse(text) for layer, text in found["schemes"].items()}
        kv = found.get("kv")
        self.session.store.take(block, schemes, found["dense"], kv and KVScheme.parse(kv))
        for mine, entry in zip(self.records, found["passes"], strict=True):
            mine.layers += [decode(LayerRecord, layer) for layer in entry["layers"]]
            mine.seconds += entry["seconds"]
        return True

    def apply(self, block: Block) -> None:
        """Run the passes on ``block`` and store what it became."""
        done = []
        for step, mine in zip(self.passes, self.records, strict=True):
            started = time.perf_counter()
            here = Done(list(step.apply(self.session, block)))
            here.seconds = time.perf_counter() - started
            mine.layers += here.layers
            mine.seconds += here.seconds
            done.append(here)
        changed = {name: block.dense[name] for name in block.changed if name in block.dense}
        # A transformed weight that nothing quantised is dense, and changed.
        for layer, weight in block.weights.items():
            if f"{layer}.weight" in block.changed and layer not in block.quantized:
                changed[f"{layer}.weight"] = weight
        self.session.store.put(block.name, block.quantized, changed, block.kv)
        found = {
            "schemes": {layer: str(item.scheme) for layer, item in block.quantized.items()},
            "dense": sorted(changed),
            "kv": None if block.kv is None else str(block.kv.scheme),
            "passes": [asdict(here) for here in done],
        }
        file = self.session.store.file(block.name)
        self.journal.add(_step(block.name), found, [file] if file.exists() else [])


def _step(block: str) -> str:
    return f"block {block}"


def _one_block(walk: _Walk, index: int, hidden: Activations | None) -> None:
    """Quantise block ``index``, which ``hidden`` enters."""
    decoder, family = walk.session.decoder, walk.session.decoder.spec.family
    tensors = decoder.block_tensors(index)
    layers = decoder.spec.block_linears(index)
    inputs: dict[str, InputStats] = {}
    if hidden is not None:
        session = walk.session
        counts = session.token_weights
        with (
            decoder.block(index, tensors) as module,
            collected(decoder, index, module, session.real, counts) as inputs,
        ):
            decoder.run_block_into(index, module, hidden, None)
    weights = {layer: tensors.pop(f"{layer}.weight") for layer in layers}
    block = Block(family.block.format(index=index), weights, inputs, tensors)
    if hidden is not None:
        block.entering = hidden
        block.forward = partial(decoder.run_block_with, index)
    walk.apply(block)


@contextmanager
def collected(
    decoder: Decoder, index: int, module: nn.Module, real: Tensor | None, counts: Mapping[str, Tensor]
) -> Iterator[dict[str, InputStats]]:
    """Statistics of what every linear layer of block ``index`` is fed while the context lasts.

    ``real`` and ``counts`` are as the session's ``real`` and ``token_weights``.
    """
    spec = decoder.spec
    prefix, shared = spec.family.block.format(index=index) + ".", spec.shared_inputs(index)
    modules = {layer: _linear(module, layer.removeprefix(prefix)) for layers in shared for layer in layers}
    with collect_inputs(modules, shared, real, counts) as inputs:
        experts = spec.expert_linears(index)
        if not experts:
            yield inputs
            return
        assert spec.family.experts is not None
        fused = module.get_submodule(spec.family.experts.module)
        weights = counts.get(prefix + spec.family.experts.module)
        with collect_expert_inputs(fused, experts, real, weights) as routed:
            yield inputs | routed


def _end_block(session: Session, layer: str, inputs: dict[str, InputStats]) -> Block:
    """The embedding or the head as a block of one layer."""
    return Block(layer, {layer: session.decoder.parameter(f"{layer}.weight")}, inputs)


def _linear(module: nn.Module, name: str) -> nn.Linear:
    found = module.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found


def head_inputs(
    decoder: Decoder, hidden: Activations, real: Tensor | None, counts: Mapping[str, Tensor]
) -> dict[str, InputStats]:
    """Statistics of what the head is fed; ``hidden`` has left the last block. Arguments as for :func:`collected`."""
    spec = decoder.spec
    stats, feed = InputStats(spec.hidden_size), TokenFeed(real, counts.get(spec.family.head))
    for window in decoder.head_inputs(hidden):
        (rows,), weights = feed.take(window)
        stats.update(rows, weights)
    return {spec.family.head: stats}


def _row_stats(session: Session) -> dict[str, InputStats]:
    """What a pass over the whole model found of the embedding's rows, in the place of statistics of inputs."""
    embedding = session.decoder.spec.family.embedding
    if (gram := session.row_gram.get(embedding)) is None:
        return {}
    return {embedding: InputStats.of(gram, session.count_tokens())}
