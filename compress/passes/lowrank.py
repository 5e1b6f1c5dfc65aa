"""Zhang, Wong et al. 2025, "QERA: an Analytical Framework for Quantization Error Reconstruction".

Theorem 1. A layer's quantisation error E = W - Q is made up for by the product of rank k with the least
mean squared output error: with R = E[x xT], that is SVD_k(E R^(1/2)) R^(-1/2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from compress.protocols import Resource
from compress.report import LayerRecord

if TYPE_CHECKING:
    from torch import Tensor

    from compress.session import Block, Session
    from compress.tensor import LowRank

LEAST_SHARE = 1e-7
"""Directions of the inputs with less than this share of the largest one's power count as never used."""
RIDGE = 1e-9


@dataclass(frozen=True)
class Lowrank:
    """Put a product of two fp16 matrices of ``rank`` beside every quantised linear layer of the blocks.

    It takes 16 * rank * (inputs + outputs) bits, and time at every token. Goes after the quantiser. Only artifacts that
    have a place for it can be written.
    """

    rank: int = 16

    scope: ClassVar[Literal["block"]] = "block"
    reads: ClassVar[frozenset[Resource]] = frozenset({"weights", "inputs", "quantized"})
    writes: ClassVar[frozenset[Resource]] = frozenset({"residual"})

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank: {self.rank} is not at least 1")

    def check(self, session: Session) -> Sequence[str]:
        """Refuse a rank that some layer does not have."""
        layers = [layer for layer in session.shapes if layer not in session.decoder.spec.ends]
        small = [layer for layer in layers if min(session.shapes[layer]) <= self.rank]
        return [f"lowrank: {layer} {list(session.shapes[layer])} has no more than rank {self.rank}" for layer in small]

    def apply(self, session: Session, block: Block) -> list[LayerRecord]:
        """Find the product for each quantised layer; one that saw no token, or gains nothing, has none."""
        from compress.grid import output_error

        if block.name in session.decoder.spec.ends:
            return []
        records = []
        for layer, chosen in block.quantized.items():
            weight, stats = block.weights[layer], block.inputs[layer]
            bits = session.stored_bits(chosen.scheme, session.shapes[layer])
            if not stats.tokens:
                reason = "no low-rank product: 0 tokens"
                records.append(LayerRecord(layer, str(chosen.scheme), bits // 8, fallback=reason))
                continue
            before = output_error(weight, chosen.dequantize(), stats.gram)
            found = replace(chosen, residual=side_path(weight - chosen.base(), stats.gram, self.rank))
            after, kept = output_error(weight, found.dequantize(), stats.gram), None
            if after < before and found.residual is not None:
                block.quantized[layer], bits = found, bits + found.residual.bits
            else:
                kept, after = f"no low-rank product: its error {after:.3g} was not below {before:.3g}", before
            scheme = str(chosen.scheme)
            records.append(LayerRecord(layer, scheme, bits // 8, stats.tokens, None, after, before, kept))
        return records


def side_path(error: Tensor, gram: Tensor, rank: int) -> LowRank:
    """The product of ``rank`` nearest to ``error`` float32 [out, in] for inputs of ``gram`` float32 [in, in], in fp16.

    ``v`` is rounded first, and ``u`` then the best for what became of it.
    """
    import torch

    from compress.tensor import LowRank

    _, exact = best_product(error, gram, rank)
    v = _half(exact).double()
    power = gram.double()
    inner = v @ power @ v.T
    inner.diagonal().add_(RIDGE * inner.diagonal().mean())
    u = torch.linalg.solve(inner, v @ power @ error.double().T).T
    return LowRank(_half(u), v.float())


def best_product(error: Tensor, gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """float64 (u [out, rank], v [rank, in]) with the least ``|(error - u v) R^(1/2)|`` for R = ``gram`` [in, in].

    ``v`` scaled so that the rows of ``v`` are of the size of ``u``'s columns.
    """
    import torch

    values, vectors = torch.linalg.eigh(gram.double())
    used = values > LEAST_SHARE * values[-1]
    root = values[used].sqrt()
    basis = vectors[:, used]
    # E R^(1/2) in the basis of R: what the error does to inputs of power 1 in each direction.
    weighed = (error.double() @ basis) * root
    left, singular, right = torch.linalg.svd(weighed, full_matrices=False)
    u, v = left[:, :rank] * singular[:rank], (right[:rank] / root) @ basis.T
    size = (u.norm(dim=0) / v.norm(dim=1).clamp_min(torch.finfo(v.dtype).tiny)).sqrt().clamp_min(1e-12)
    return u / size, v * size[:, None]


def _half(matrix: Tensor) -> Tensor:
    """float32 numbers that fp16 holds."""
    import torch

    return matrix.to(torch.float16).float()
