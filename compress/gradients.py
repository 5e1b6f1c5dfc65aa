"""Gradients of the model's own loss, block by block from the last: one sweep forward, one back, a block in memory.

The loss is -log p of tokens drawn from the model's predictions, so that squared gradients are the Fisher information
(Kunstner et al. 2019, "Limitations of the empirical Fisher approximation", sec. 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from compress.models.decoder import Decoder, States
    from compress.session import Session

Back = Callable[[], None]


HEAD, EMBEDDING = -1, -2
"""What stands for the number of a block where :func:`sweep_back` hands over the head or the embedding."""


def sweep_back(session: Session, samples: int, label: str) -> Iterator[tuple[int, nn.Module, Back]]:
    """(index, block, what takes the loss gradient back through it), last block first, on the first ``samples`` windows.

    Call the third before going on: it runs the block forward and back, window by window, so gradients reach whatever
    was set to require them, or hooked, in the block. Padding has no loss, and no token before it looks at it: its
    gradients are zero. ``label`` is what the progress bar says. The head comes before the blocks and the embedding
    after them, under the numbers HEAD and EMBEDDING; behind the embedding there is nothing to go back to.
    """
    decoder, tokens = session.decoder, session.tokens[:samples]
    layers = decoder.spec.layers
    with session.progress(label, 2 * layers) as advance:
        entering = [decoder.room(tokens)]
        decoder.embed_into(tokens, entering[0])
        for index in range(layers):
            entering.append(decoder.room(tokens))
            with decoder.block(index) as module:
                decoder.run_block_into(index, module, entering[-2], entering[-1])
            advance(1)
        gradient = entering.pop()
        with decoder.head() as head:
            yield HEAD, decoder.output, partial(_head_gradient, session, head, gradient)
        for index in reversed(range(layers)):
            inputs = entering.pop()
            with decoder.block(index) as module:
                yield index, module, partial(_back, decoder, index, module, inputs, gradient)
            inputs.close()
            advance(1)
        weight = decoder.parameter(f"{decoder.spec.family.embedding}.weight")
        module = nn.Embedding(weight.shape[0], weight.shape[1], _weight=weight)
        yield EMBEDDING, module, partial(_embedding_gradient, decoder, module, tokens, gradient)
        gradient.close()


@contextmanager
def watched(module: nn.Module, take: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Call ``take`` with the input, and the loss gradient at the output, each time ``module`` is gone back through."""

    def hook(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        entered = given[0].detach()
        if not output.requires_grad:
            output.requires_grad_(True)
        output.register_hook(lambda gradient: take(entered, gradient))  # type: ignore[no-untyped-call]

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _back(decoder: Decoder, index: int, module: nn.Module, inputs: States, gradient: States) -> None:
    """``gradient`` [windows, length, hidden], by the block's outputs, becomes that by its ``inputs``."""
    for window in range(len(inputs)):
        here = slice(window, window + 1)
        entered = inputs[here].requires_grad_(True)
        with decoder.in_precision():
            leaving = decoder.run_block(index, module, entered)
        torch.autograd.backward(leaving, gradient[here])
        assert entered.grad is not None
        gradient[here] = entered.grad


def _embedding_gradient(decoder: Decoder, module: nn.Module, tokens: Tensor, gradient: States) -> None:
    """Take ``gradient`` by what enters the first block back to the embedding's rows."""
    for window in range(len(tokens)):
        here = slice(window, window + 1)
        embedded = module(tokens[here]) * decoder.spec.scaling.embedding
        torch.autograd.backward(embedded, gradient[here])


def _head_gradient(session: Session, head: Callable[[Tensor], Tensor], hidden: States) -> None:
    """The last block's outputs ``hidden`` [windows, length, hidden] become the loss gradient by them.

    Tokens are drawn with the seed.
    """
    generator = torch.Generator().manual_seed(session.seed)
    for window in range(len(hidden)):
        here = slice(window, window + 1)
        leaving = hidden[here].detach().requires_grad_(True)
        log_p = torch.log_softmax(head(leaving)[0], -1)
        if session.real is not None:
            log_p = log_p[session.real[window]]
        drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
        torch.autograd.backward(-log_p.gather(1, drawn).sum())
        assert leaving.grad is not None
        hidden[here] = leaving.grad
