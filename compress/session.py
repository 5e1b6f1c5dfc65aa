"""The state of a run (:class:`Session`, mutable) and its result (:class:`CompressedModel`, frozen)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.scheme import QuantScheme, compact_bits, lowrank_bits

if TYPE_CHECKING:
    from torch import Tensor

    from calibration.stats import InputStats
    from compress.activations import Activations
    from compress.kv import KVScales, KVScheme
    from compress.models.decoder import Decoder
    from compress.store import Store
    from compress.tensor import LowRank, QuantizedTensor

StoredBits = Callable[[QuantScheme | None, tuple[int, int]], int]
"""(scheme or None for floating point, shape of a weight) -> bits that a file holds for it."""
Advance = Callable[[int], None]
Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""``with progress("gptq", total) as advance: ... advance(1)``; the terminal draws it, a library call ignores it."""


def no_progress(label: str, total: int) -> AbstractContextManager[Advance]:
    """Progress that nobody watches."""
    return nullcontext(lambda _: None)


@dataclass
class Block:
    """What a pass sees of the model at one moment: a decoder block, the embedding, or the head, in memory.

    ``weights``: layer name -> float32 [out, in], every linear (or embedding) that may be quantised; a transform
    may replace entries. ``inputs``: layer name -> statistics of that layer's input, where some pass reads them;
    layers that read the same input share one object. ``dense``: other tensors of the block by checkpoint name
    (norms, biases); a transform may replace entries and lists the names in ``changed``.
    ``quantized``: what the quantiser of the run writes; ``kv``: the scales of its cache, likewise. For passes that
    read activations: ``entering``, the
    hidden states [windows, length, hidden] that the quantised blocks before put out, and ``forward``, what
    this block makes of some windows with given tensors (all of the block's, by checkpoint name), differentiable.
    Both are None for the embedding and the head.
    """

    name: str
    weights: dict[str, Tensor]
    inputs: Mapping[str, InputStats]
    dense: dict[str, Tensor] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    quantized: dict[str, QuantizedTensor] = field(default_factory=dict)
    kv: KVScales | None = None
    entering: Activations | None = None
    forward: Callable[[Mapping[str, Tensor], Tensor], Tensor] | None = None


@dataclass
class Session:
    """Everything that changes while a recipe runs.

    ``plan`` maps each layer to its scheme; a layer that is absent stays in floating point. ``shapes`` has every
    layer that could be quantised, with (outputs, inputs). ``pinned`` are the layers whose scheme the recipe fixes
    (None: stays in floating point): planners leave them alone.
    """

    decoder: Decoder
    tokens: Tensor
    """int64 [samples, sequence_length]: the calibration windows."""
    store: Store
    shapes: Mapping[str, tuple[int, int]]
    pinned: Mapping[str, QuantScheme | None]
    plan: dict[str, QuantScheme] = field(default_factory=dict)
    seed: int = 0
    progress: Progress = no_progress
    real: Tensor | None = None
    """bool [samples, sequence_length]: False where a window is padded (on the right). None: every token is real."""
    stored_bits: StoredBits = compact_bits
    """Of a layer in the recipe's artifacts: the most that one of them takes."""
    one_scheme: Sequence[Sequence[str]] = ()
    """Layers that an artifact can only store with the same scheme: a planner chooses for them together."""

    kv: KVScheme | None = None
    """How the key/value cache will be stored; None: in floating point."""
    token_weights: dict[str, Tensor] = field(default_factory=dict)
    """float32 [samples, sequence_length]: what each token counts in the statistics of an input. Names are those of the
    first of the layers that read it, or of the module with a block's experts; without an entry all count the same."""
    row_gram: dict[str, Tensor] = field(default_factory=dict)
    """float32 [hidden, hidden] of the embedding: how fast the loss rises with an error in one of its rows, summed over
    tokens. The embedding multiplies nothing, so there are no inputs that could say so."""

    float_activations: dict[str, Tensor] = field(default_factory=dict)
    """Layers whose inputs an artifact should not round -> what rounding them would cost (KLD, nats a token)."""
    residual_rank: int = 0
    """Rank of what a pass will put beside each quantised linear layer of a block; 0: nothing."""

    def residual_bits(self, layer: str) -> int:
        """Bits that a file will hold beside ``layer`` if it is quantised."""
        if not self.residual_rank or layer in self.decoder.spec.ends:
            return 0
        return lowrank_bits(self.shapes[layer], self.residual_rank)

    def count_tokens(self, windows: int | None = None) -> int:
        """Real tokens of the first ``windows`` calibration windows, or of all."""
        return self.tokens[:windows].numel() if self.real is None else int(self.real[:windows].sum())

    def free_layers(self) -> Sequence[str]:
        """The layers whose scheme the passes may choose, in model order."""
        return [name for name in self.shapes if name not in self.pinned]

    def plan_rest(self, scheme: QuantScheme) -> None:
        """Plan ``scheme`` for the free layers that have none yet: what a quantiser does where no planner ran."""
        for name in self.free_layers():
            self.plan.setdefault(name, scheme)


@dataclass(frozen=True)
class CompressedModel:
    """The result of the passes: read lazily, layer by layer, so that exporting needs little memory."""

    config: Mapping[str, Any]
    """The checkpoint's config.json."""
    folder: Path
    """Where the checkpoint's tokenizer files lie."""
    name: str
    tied: bool
    """Whether the output head is the embedding."""
    shapes: Mapping[str, tuple[int, int]]
    _store: Store
    _dense: Callable[[str], Tensor]
    _dense_names: Sequence[str]
    float_activations: frozenset[str] = frozenset()
    """Layers whose inputs an artifact should not round, where its format has a say."""

    @property
    def schemes(self) -> Mapping[str, QuantScheme]:
        """Scheme of each quantised layer; the others are dense."""
        return self._store.schemes

    def quantized(self, layer: str) -> QuantizedTensor:
        """Codes and scales of a quantised layer (``model.layers.0.mlp.up_proj``)."""
        return self._store.quantized(layer)

    def residual(self, layer: str) -> LowRank | None:
        """What lies beside a quantised layer; None where nothing does, and for a layer in floating point."""
        return self._store.residual(layer) if layer in self.schemes else None

    def dense(self, tensor: str) -> Tensor:
        """A tensor by its checkpoint name (``model.norm.weight``), in the checkpoint's dtype; KeyError if none."""
        changed = self._store.dense(tensor)
        return self._dense(tensor) if changed is None else changed

    def kv(self, block: str) -> KVScales | None:
        """Scales of the key/value cache of ``block`` (``model.layers.0``); None: it stays in floating point."""
        return self._store.kv(block)

    def has_dense(self, tensor: str) -> bool:
        """Whether the checkpoint has this tensor (a bias, say)."""
        return tensor in self._dense_names

    def weight(self, layer: str) -> Tensor:
        """float32 [out, in] of a layer as the artifact must compute it: dequantised, or dense."""
        return self.parameter(f"{layer}.weight").float()

    def parameter(self, tensor: str) -> Tensor:
        """Any tensor by its checkpoint name, as the artifact must compute with it."""
        layer = tensor.removesuffix(".weight")
        return self.quantized(layer).dequantize() if layer in self.schemes else self.dense(tensor)

    def layers(self) -> Iterator[str]:
        """Every layer with a weight matrix, in model order; a tied head is not one."""
        return iter(self.shapes)
