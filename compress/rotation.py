"""Orthogonal matrices that spread outliers: Hadamard matrices where the width allows, applied without forming them.

Sylvester's construction gives the powers of two. Paley's two (1933) give q + 1 for primes q = 3 mod 4 and 2 (q + 1)
for primes q = 1 mod 4. A Kronecker product of Hadamard matrices is one again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_FACTOR = 64
"""Sylvester factors are split at this order: applying a product of small factors is cheap."""
ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Rotation:
    """The orthogonal matrix R = diag(signs) (F1 x F2 x ...), x being Kronecker's product.

    ``factors`` float64 orthogonal [n_i, n_i]; ``signs`` float64 [width] of 1 and -1; ``kind`` says in words what the
    factors are.
    """

    factors: tuple[Tensor, ...]
    signs: Tensor
    kind: str

    @property
    def width(self) -> int:
        """Rows and columns of the matrix."""
        return len(self.signs)

    def right(self, matrix: Tensor, gain: Tensor | None = None) -> Tensor:
        """``matrix diag(gain) R`` for ``matrix [rows, width]``, computed in float64, in the matrix's own dtype."""
        scale = self.signs if gain is None else self.signs * gain
        return torch.cat([self._apply(rows, scale) for rows in torch.split(matrix, ROWS_AT_ONCE)])

    def left(self, matrix: Tensor) -> Tensor:
        """``R^T matrix`` for ``matrix [width, columns]``, computed in float64, in the matrix's own dtype."""
        return self.right(matrix.T).T.contiguous()

    def _apply(self, rows: Tensor, scale: Tensor) -> Tensor:
        orders = [len(factor) for factor in self.factors]
        turned = (rows.to(torch.float64) * scale).reshape(-1, *orders)
        for axis, factor in enumerate(self.factors, start=1):
            turned = torch.tensordot(turned, factor, dims=([axis], [0])).movedim(-1, axis)
        return turned.reshape(rows.shape).to(rows.dtype)


def make_rotation(width: int, seed: int) -> Rotation:
    """A Hadamard matrix of order ``width`` with random signs; where none is known, part of it is random orthogonal.

    Deterministic in ``seed``.
    """
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (width,), generator=generator).to(torch.float64) * 2 - 1
    power = width & -width
    odd = width // power
    if odd == 1:
        first, kinds = None, []
    elif (order := _paley_order(odd, power)) is not None:
        first, kinds = paley(order) / order**0.5, [f"hadamard {order}"]
        power = width // order
    else:
        first, kinds = _random_orthogonal(odd, generator), [f"random orthogonal {odd}"]
    factors = [] if first is None else [first]
    if power > 1:
        kinds.append(f"hadamard {power}")
    while power > 1:
        order = min(power, LARGEST_FACTOR)
        factors.append(sylvester(order) / order**0.5)
        power //= order
    return Rotation(tuple(factors), signs, " x ".join(kinds) or "signs")


def sylvester(order: int) -> Tensor:
    """The Hadamard matrix of 1 and -1, float64 [order, order], for a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.kron(matrix, step)
    return matrix


def paley(order: int) -> Tensor:
    """The Hadamard matrix of 1 and -1, float64 [order, order]; ValueError if neither construction gives this order."""
    if _is_prime(order - 1) and (order - 1) % 4 == 3:
        return torch.eye(order, dtype=torch.float64) + _bordered(order - 1, -1.0)
    half = order // 2
    if order % 2 == 0 and _is_prime(half - 1) and (half - 1) % 4 == 1:
        conference = _bordered(half - 1, 1.0)
        cross = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        diagonal = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(conference, cross) + torch.kron(torch.eye(half, dtype=torch.float64), diagonal)
    raise ValueError(f"no Paley matrix of order {order}")


def _bordered(prime: int, corner_sign: float) -> Tensor:
    """Which differences of residues are squares (1), are not (-1) or are zero, with a border of ones."""
    residues = torch.arange(prime)
    symbol = torch.full((prime,), -1.0, dtype=torch.float64)
    symbol[residues * residues % prime] = 1.0
    symbol[0] = 0.0
    matrix = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    matrix[0, 1:] = 1.0
    matrix[1:, 0] = corner_sign
    matrix[1:, 1:] = symbol[(residues[:, None] - residues[None, :]) % prime]
    return matrix


def _paley_order(odd: int, power: int) -> int | None:
    """The least ``odd * 2**k``, with ``2**k`` dividing ``power``, that has a Paley matrix."""
    order = 4 * odd
    while order <= odd * power:
        if (_is_prime(order - 1) and (order - 1) % 4 == 3) or (_is_prime(order // 2 - 1) and (order // 2 - 1) % 4 == 1):
            return order
        order *= 2
    return None


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _random_orthogonal(width: int, generator: torch.Generator) -> Tensor:
    """Haar-distributed, by the QR factors of Gaussian numbers."""
    normal = torch.randn(width, width, generator=generator, dtype=torch.float64)
    factors = torch.linalg.qr(normal)
    orthogonal: Tensor = factors.Q * torch.sign(factors.R.diagonal())
    return orthogonal
