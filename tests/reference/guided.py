"""Token weights the long way: gradients of the whole model of transformers at once, by the outputs of its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def row_gram(model: Any, tokens: Tensor, head: str, tied: bool, seed: int) -> Tensor:
    """float64 [hidden, hidden]: g gT over tokens, for the gradient g by the embedding's row; of a tied head also x xT.

    These are its inputs x, times the squared norm of the gradient at its output. The loss is as in token_weights().
    """
    generator = torch.Generator().manual_seed(seed)
    embedding, kept = model.get_input_embeddings(), []
    model.get_submodule(head).register_forward_hook(lambda _, given, output: kept.append((given[0], output)))
    total = torch.zeros(embedding.weight.shape[1], embedding.weight.shape[1], dtype=torch.float64)
    for window in tokens:
        embedded = embedding(window[None]).detach().requires_grad_(True)
        log_p = torch.log_softmax(model(inputs_embeds=embedded).logits[0], -1)
        drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
        ((inputs, output),) = kept
        kept.clear()
        rows, leaving = torch.autograd.grad(-log_p.gather(1, drawn).sum(), [embedded, output])
        for row in rows[0].double() * float(getattr(embedding, "embed_scale", 1.0)):
            total += torch.outer(row, row)
        if tied:
            for vector, gradient in zip(inputs[0].detach().double(), leaving[0].double(), strict=True):
                total += gradient.square().sum() * torch.outer(vector, vector)
    return total


def token_weights(model: Any, tokens: Tensor, watched: Mapping[str, Sequence[str]], seed: int) -> dict[str, Tensor]:
    """name -> float64 [windows, length]: squared norms of the loss gradient at the modules' outputs, summed.

    ``watched``: name -> modules. The loss of a window is the sum of -log p of tokens drawn from the predictions.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.zeros(tokens.shape, dtype=torch.float64) for name in watched}
    outputs: dict[str, Tensor] = {}

    def keep(module: str) -> Any:
        return lambda _, given, output: outputs.__setitem__(module, output)

    for modules in watched.values():
        for module in modules:
            model.get_submodule(module).register_forward_hook(keep(module))
    for number, window in enumerate(tokens):
        embedded = model.get_input_embeddings()(window[None]).detach().requires_grad_(True)
        log_p = torch.log_softmax(model(inputs_embeds=embedded).logits[0], -1)
        drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
        loss = -log_p.gather(1, drawn).sum()
        gradients = torch.autograd.grad(loss, list(outputs.values()))
        squares = {
            module: part.double().square().sum(-1).flatten() for module, part in zip(outputs, gradients, strict=True)
        }
        for name, modules in watched.items():
            found[name][number] = torch.stack([squares[module] for module in modules]).sum(0)
    return found
