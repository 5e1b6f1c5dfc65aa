"""A cache of bounded size: the first tokens and the last ones (Xiao et al. 2024, "StreamingLLM", sec. 3.2).

Positions are those in the cache: when tokens between the first and the last are dropped, those behind them move up, and
their keys turn back by as many positions. A rotation by the sum of two angles is one after the other, so that a turned
key is the key of its new position, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from compress.errors import InputError
from compress.protocols import Runtime

F32 = NDArray[np.float32]

SHARE_DROPPED = 4
"""A window drops this part of itself at a time: turning all keys at every token would cost more than the token."""


@dataclass(frozen=True)
class Stream:
    """Keep the first ``sinks`` tokens and at most ``window`` of the last ones, the newest included.

    When they are full, the ``step`` oldest of the window go: a token sees between ``window - step + 1`` and ``window``
    of the last tokens.
    """

    window: int
    sinks: int

    def __post_init__(self) -> None:
        wrong = [f"window: must be at least 1, got {self.window}"] if self.window < 1 else []
        wrong += [f"sinks: must be at least 0, got {self.sinks}"] if self.sinks < 0 else []
        if wrong:
            raise ValueError("\n".join(wrong))

    @property
    def room(self) -> int:
        """Tokens that the cache holds."""
        return self.window + self.sinks

    @property
    def step(self) -> int:
        """Tokens that are dropped at a time."""
        return max(1, self.window // SHARE_DROPPED)

    def __str__(self) -> str:
        return f"{self.sinks} first and {self.window} last tokens kept"


def stream(window: int | None, sinks: int) -> Stream | None:
    """A bounded cache where ``window`` asks for one; ValueError as :class:`Stream` says."""
    return None if window is None else Stream(window, sinks)


@runtime_checkable
class Streaming(Protocol):
    """A runtime whose cache can be bounded."""

    def keep(self, stream: Stream) -> None:
        """Bound the cache of what is loaded next."""
        ...


def bounded(runtime: Runtime, stream: Stream | None, where: str) -> Runtime:
    """``runtime`` itself, told to keep ``stream`` if there is one; InputError if it cannot."""
    if stream is None:
        return runtime
    require_streaming(type(runtime), where)
    assert isinstance(runtime, Streaming)
    runtime.keep(stream)
    return runtime


def require_streaming(kind: type[Any], where: str) -> None:
    """InputError for a runtime that keeps all of its cache."""
    if not issubclass(kind, Streaming):
        raise InputError(
            "this format's runtime has no window over its cache", where=where, fix="measure the ONNX artifact instead"
        )


@dataclass(frozen=True)
class Turn:
    """A rotation back by a number of positions; ``cos`` and ``sin`` float32 [pairs]."""

    cos: F32
    sin: F32

    def apply(self, keys: NDArray[Any]) -> NDArray[Any]:
        """Keys [..., size] turned in float32, in their own type: of each pair the halves lie ``pairs`` apart."""
        pairs = len(self.cos)
        first, second = (keys[..., at : at + pairs].astype(np.float32) for at in (0, pairs))
        turned = [first * self.cos + second * self.sin, second * self.cos - first * self.sin]
        return np.concatenate([*(part.astype(keys.dtype) for part in turned), keys[..., 2 * pairs :]], axis=-1)


def drop(cache: NDArray[Any], stream: Stream, length: int, turn: Turn | None) -> None:
    """Take the ``step`` oldest of the window out of ``cache`` [1, heads, room, size], of which ``length`` are in use.

    ``turn``: what becomes of the keys behind them; None for values, and for keys without positions.
    """
    kept = cache[:, :, stream.sinks + stream.step : length]
    moved = kept.copy() if turn is None else turn.apply(kept)
    cache[:, :, stream.sinks : length - stream.step] = moved


def turns(entry: Path, positions: int) -> Mapping[str, Turn | None]:
    """Name of each block's cache of keys -> the rotation back by ``positions``; None where a block has no positions.

    Read from the tables in the ONNX file ``entry``, which may be scaled (yarn): cos 0 is 1. InputError if they are
    shorter.
    """
    import onnx

    graph = onnx.load(entry, load_external_data=False).graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}
    found: dict[str, Turn | None] = {}
    for node in graph.node:
        for name in (name for name in node.input if _is_key_cache(name)):
            tables = list(_tables(node, producers, stored))
            if not tables:
                found[name] = None
                continue
            cos, sin = (_array(table, entry.parent).astype(np.float32) for table in tables)
            if positions >= len(cos):
                raise InputError(
                    f"the model has {len(cos)} positions: {positions} tokens cannot be dropped at a time",
                    where=str(entry),
                    fix="use a smaller window",
                )
            found[name] = Turn(cos[positions] / cos[0, 0], sin[positions] / cos[0, 0])
    return found


def _is_key_cache(name: str) -> bool:
    return name.startswith("past_key_values.") and name.endswith(".key")


_TABLES: Mapping[tuple[str, str], tuple[int, int]] = {
    ("com.microsoft", "GroupQueryAttention"): (7, 8),
    ("com.microsoft", "RotaryEmbedding"): (2, 3),
    ("", "RotaryEmbedding"): (1, 2),
}
"""Domain and operator -> inputs with the cosines and sines of each position."""


def _tables(node: Any, producers: Mapping[str, Any], stored: Mapping[str, Any]) -> Iterator[Any]:
    """The two tables that turn the keys of an attention: its own, or those of the node that makes its keys."""
    for candidate in filter(None, (node, producers.get(node.input[1]))):
        places = _TABLES.get((candidate.domain, candidate.op_type), ())
        names = [candidate.input[at] for at in places if at < len(candidate.input) and candidate.input[at]]
        if names:
            yield from (stored[name] for name in names)
            return


def _array(tensor: Any, folder: Path) -> NDArray[Any]:
    from onnx import external_data_helper, numpy_helper

    if external_data_helper.uses_external_data(tensor):
        external_data_helper.load_external_data_for_tensor(tensor, str(folder))
    array: NDArray[Any] = numpy_helper.to_array(tensor)
    return array
