"""The walk through the model: embedding, blocks, head; one in memory, each quantised before the next is fed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from calibration.stats import InputStats, collect_expert_inputs, collect_inputs
from compress.models.topology import DecoderSpec
from compress.protocols import BlockPass
from compress.report import LayerRecord
from compress.session import Block, Session


@dataclass
class Done:
    """What one pass did to each layer, and the seconds it took."""

    layers: list[LayerRecord] = field(default_factory=list)
    seconds: float = 0.0


def compress_blocks(session: Session, passes: Sequence[BlockPass]) -> list[Done]:
    """Run ``passes`` over every block of the model; what each of them did.

    Inputs are captured, and hidden states carried on, only if a pass reads them. Each block is fed what the quantised
    blocks before it put out (Frantar et al. 2023, sec. 3.3).
    """
    decoder, family = session.decoder, session.decoder.spec.family
    wants_inputs = any("inputs" in step.reads or "activations" in step.reads for step in passes)
    records = [Done() for _ in passes]
    with session.progress("compressing blocks", decoder.spec.layers + 2) as advance:
        _apply(session, passes, _end_block(session, family.embedding, {}), records)
        advance(1)
        hidden = decoder.embed(session.tokens) if wants_inputs else None
        for index in range(decoder.spec.layers):
            hidden = _one_block(session, passes, index, hidden, records)
            advance(1)
        if not decoder.spec.tied:
            inputs = {} if hidden is None else _head_inputs(session, hidden)
            _apply(session, passes, _end_block(session, family.head, inputs), records)
        advance(1)
    return records


def _one_block(
    session: Session, passes: Sequence[BlockPass], index: int, hidden: Tensor | None, records: list[Done]
) -> Tensor | None:
    """Quantise block ``index``; the hidden states that leave it, if any entered."""
    decoder, family = session.decoder, session.decoder.spec.family
    tensors = decoder.block_tensors(index)
    layers = decoder.spec.block_linears(index)
    inputs: dict[str, InputStats] = {}
    if hidden is not None:
        with decoder.block(index, tensors) as module, _collected(decoder.spec, index, module) as inputs:
            decoder.run_block_on_all(index, module, hidden)
    weights = {layer: tensors[f"{layer}.weight"] for layer in layers}
    dense = {name: tensor for name, tensor in tensors.items() if name.removesuffix(".weight") not in weights}
    block = Block(family.block.format(index=index), weights, inputs, dense)
    if hidden is not None:
        block.entering = torch.split(hidden, 1)
        block.forward = partial(decoder.run_block_with, index)
    _apply(session, passes, block, records)
    if hidden is None:
        return None
    tensors = {name: block.dense.get(name, tensor) for name, tensor in tensors.items()}
    for layer in layers:
        quantized = block.quantized.get(layer)
        tensors[f"{layer}.weight"] = block.weights[layer] if quantized is None else quantized.dequantize()
    with decoder.block(index, tensors) as module:
        return decoder.run_block_on_all(index, module, hidden)


@contextmanager
def _collected(spec: DecoderSpec, index: int, module: nn.Module) -> Iterator[dict[str, InputStats]]:
    """Statistics of what every linear layer of block ``index`` is fed while the context lasts."""
    prefix, shared = spec.family.block.format(index=index) + ".", spec.shared_inputs(index)
    modules = {layer: _linear(module, layer.removeprefix(prefix)) for layers in shared for layer in layers}
    with collect_inputs(modules, shared) as inputs:
        experts = spec.expert_linears(index)
        if not experts:
            yield inputs
            return
        assert spec.family.experts is not None
        fused = module.get_submodule(spec.family.experts.module)
        with collect_expert_inputs(fused, experts) as routed:
            yield inputs | routed


def _apply(session: Session, passes: Sequence[BlockPass], block: Block, records: list[Done]) -> None:
    for step, mine in zip(passes, records, strict=True):
        started = time.perf_counter()
        mine.layers.extend(step.apply(session, block))
        mine.seconds += time.perf_counter() - started
    changed = {name: block.dense[name] for name in block.changed if name in block.dense}
    # A transformed weight that nothing quantised is dense, and changed.
    for layer, weight in block.weights.items():
        if f"{layer}.weight" in block.changed and layer not in block.quantized:
            changed[f"{layer}.weight"] = weight
    session.store.put(block.name, block.quantized, changed)


def _end_block(session: Session, layer: str, inputs: dict[str, InputStats]) -> Block:
    """The embedding or the head as a block of one layer."""
    return Block(layer, {layer: session.decoder.parameter(f"{layer}.weight")}, inputs)


def _linear(module: nn.Module, name: str) -> nn.Linear:
    found = module.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found


def _head_inputs(session: Session, hidden: Tensor) -> dict[str, InputStats]:
    stats = InputStats(hidden.shape[-1])
    stats.update(session.decoder.head_inputs(hidden))
    return {session.decoder.spec.family.head: stats}
