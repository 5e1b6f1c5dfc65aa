"""QERA's theorem 1, written down as it stands; and the plain SVD of the weight error that it must beat."""

from __future__ import annotations

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def qera(error: F64, gram: F64, rank: int) -> F64:
    """``SVD_k(E R^(1/2)) R^(-1/2)`` for E [out, in] and R [in, in] of full rank."""
    root = scipy.linalg.sqrtm(gram).real
    return truncated(error @ root, rank) @ np.linalg.inv(root)


def truncated(matrix: F64, rank: int) -> F64:
    """The nearest matrix of ``rank``."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    return sum((values[k] * np.outer(left[:, k], right[k]) for k in range(rank)), np.zeros_like(matrix))


def output_error(rest: F64, inputs: F64) -> float:
    """Sum of squares that ``rest`` [out, in] puts out for ``inputs`` [tokens, in]."""
    return float(sum(np.sum((rest @ x) ** 2) for x in inputs))
