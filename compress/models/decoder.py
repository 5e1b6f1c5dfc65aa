"""A decoder run block by block: transformers' own modules, one block's weights in memory at a time.

Everything family-specific (masks, rotary tables, scaled embeddings or logits) is left to transformers: its forward is
called with the blocks swapped for stand-ins that record what each block is given, or hand over what came out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto import AutoConfig

from compress.activations import Activations, Spool
from compress.errors import InputError
from compress.kv import KVScales
from compress.models.checkpoint import Checkpoint, check_tensors
from compress.models.layout import Place, fuse, places, unfused
from compress.models.topology import DecoderSpec, describe, explain_config
from compress.rotation import make_rotation

Read = Callable[[str], Tensor]
"""A parameter by its checkpoint name, any dtype."""
States = Tensor | Activations
"""Hidden states float32 [windows, length, hidden], wherever they are."""
Precision = Literal["float32", "bfloat16"]
TOKENS_PER_FORWARD = 2048
_CACHE = "cache"
"""The argument of transformers' blocks that their key/value cache comes in."""
PLAIN_OUTPUT = {
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
    "return_dict": True,
}
"""Settings of a checkpoint's configuration that ask its forward for more, or for something else, than the result."""


def pieces(windows: States) -> Iterator[slice]:
    """Slices of [windows, length, ...] that go through a block at once; the same in every run."""
    step = max(1, TOKENS_PER_FORWARD // windows.shape[1])
    for start in range(0, len(windows), step):
        yield slice(start, min(start + step, len(windows)))


class _Recorder(nn.Module):
    """Stands in for a block: notes the keyword arguments it is called with, and passes the hidden states on."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._block = [block]
        self.arguments: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._block[0], name)

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:
        self.arguments = arguments
        return hidden


class _Replay(nn.Module):
    """Stands in for all blocks: whatever comes in, the given hidden states go out."""

    def __init__(self, block: nn.Module, hidden: Tensor) -> None:
        super().__init__()
        self._block = [block]
        self._hidden = hidden

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._block[0], name)

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:
        return self._hidden


def _finite(values: Tensor, what: str) -> Tensor:
    """``values`` [samples, length, width]; InputError if a token has one that is not finite."""
    bad = int((~torch.isfinite(values)).any(-1).sum())
    if bad:
        raise InputError(
            f"{what} is not finite at {bad} of {values[..., 0].numel()} tokens: the model overflows float32",
            fix="check the weights of that part, or take a checkpoint that computes finite numbers",
        )
    return values


class _Rounding:
    """Stands in for a cache: what a block adds to it comes back as the quantised cache would hold it."""

    def __init__(self, scales: KVScales) -> None:
        self._scales = scales

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._scales.rounded(keys, values)


class _Keeping:
    """Stands in for a cache: keeps what a block adds to it."""

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.found.append((keys, values))
        return keys, values


class Decoder:
    """The model of a checkpoint, float32, without its weights until they are asked for.

    ``read`` gives parameters by checkpoint name: the checkpoint's own, or those of a compressed model. ``spool`` makes
    room for hidden states; without one they are in memory. In ``precision`` blocks multiply where many windows go
    through them without gradients; hidden states between them are float32. ``kv`` gives the scales of the cache by
    block name: every token then attends to keys and values as that cache holds them, its own included.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        read: Read | None = None,
        spool: Spool | None = None,
        precision: Precision = "float32",
        kv: Callable[[str], KVScales | None] = lambda _: None,
    ) -> None:
        self.checkpoint, self._precision, self._kv = checkpoint, precision, kv
        self._spool = spool or Spool()
        self.spec: DecoderSpec = describe(checkpoint.config, checkpoint.folder / "config.json")
        self._read = read or checkpoint.tensor
        config: PreTrainedConfig = AutoConfig.for_model(**{**checkpoint.config, **PLAIN_OUTPUT})
        # The fused kernel knows no cap on the scores.
        attention = "sdpa" if self.spec.scaling.attention_cap is None else "eager"
        with explain_config(checkpoint.folder / "config.json"), init_empty_weights(include_buffers=False):
            self._model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
        self._model.eval().requires_grad_(False)
        self._inner = self._model.get_decoder()
        self._blocks: list[nn.Module] = list(self._inner.layers)
        self._arguments: tuple[int, list[dict[str, Any]]] = (0, [])
        self._places = [self._places_in(index) for index in range(len(self._blocks))]
        self._turn_final_gains()
        tied_head = f"{self.spec.family.head}.weight" if self.spec.tied else None
        check_tensors(checkpoint, self._shapes(), tied_head, f"{self.spec.family.embedding}.weight")

    def _turn_final_gains(self) -> None:
        """Let the final norm's gains multiply the channels that they are meant for, where the stream is turned."""
        if self.spec.stream_rotation is None:
            return
        norm = self._model.get_submodule(self.spec.family.final_norm)
        norm.register_forward_pre_hook(lambda _, given: given[0] @ self._stream.T)
        norm.register_forward_hook(lambda _, given, out: out @ self._stream)

    @cached_property
    def _stream(self) -> Tensor:
        assert self.spec.stream_rotation is not None
        rotation = make_rotation(self.spec.hidden_size, self.spec.stream_rotation)
        return rotation.right(torch.eye(rotation.width, dtype=torch.float64)).float()

    def _places_in(self, index: int) -> dict[str, Place]:
        block = self.spec.family.block.format(index=index)
        return places(self.spec.family, block, self._parameter_shapes(index))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that the checkpoint must have."""
        shapes = {name: tuple(self._model.get_parameter(name).shape) for name in self._outside()}
        for block, where in zip(self._blocks, self._places, strict=True):
            parameters = dict(block.named_parameters())
            shapes |= {name: tuple(place.of(parameters[place.parameter]).shape) for name, place in where.items()}
        return shapes

    def _outside(self) -> list[str]:
        """Parameters outside the blocks; a tied head is none."""
        family = self.spec.family
        blocks, tied_head = family.block.partition("{")[0], f"{family.head}.weight" if self.spec.tied else None
        return [n for n, _ in self._model.named_parameters() if not n.startswith(blocks) and n != tied_head]

    def parameter(self, name: str) -> Tensor:
        """float32 parameter by checkpoint name."""
        return self._read(name).to(torch.float32)

    def block_tensors(self, index: int) -> dict[str, Tensor]:
        """Every tensor of block ``index``, float32, by checkpoint name; experts are views of a fused parameter."""
        return unfused(self._places[index], self.parameter, self._parameter_shapes(index))

    def _parameter_shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self._blocks[index].named_parameters()}

    def place(self, index: int, layer: str) -> Place:
        """Where the weight of ``layer`` lies in the parameters of block ``index``, as transformers names them."""
        return self._places[index][f"{layer}.weight"]

    @contextmanager
    def block(self, index: int, tensors: dict[str, Tensor] | None = None) -> Iterator[nn.Module]:
        """Block ``index`` with its weights (or ``tensors``, by checkpoint name) in memory while the context lasts."""
        module = self._blocks[index]
        values = self.block_tensors(index) if tensors is None else tensors
        fused = fuse(self._places[index], values, self._parameter_shapes(index))
        module.load_state_dict(fused, strict=True, assign=True)
        # The module holds them now, and the caller may let go of its own.
        del values, fused, tensors
        module.requires_grad_(False)
        try:
            yield module
        finally:
            module.to("meta")

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """The model of transformers with all of its weights in memory while the context lasts."""
        with ExitStack() as stack:
            stack.enter_context(self._ends())
            for index in range(self.spec.layers):
                stack.enter_context(self.block(index))
            yield self._model

    @contextmanager
    def _ends(self) -> Iterator[None]:
        """Embedding, final norm and head in memory while the context lasts."""
        outside = self._outside()
        self._assign({name: self.parameter(name) for name in outside})
        try:
            yield
        finally:
            self._assign({name: self._model.get_parameter(name).to("meta") for name in outside})

    def _assign(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            owner, _, leaf = name.rpartition(".")
            setattr(self._model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
        if self.spec.tied:
            self._model.get_submodule(self.spec.family.head).weight = self._model.get_input_embeddings().weight

    def room(self, tokens: Tensor) -> Activations:
        """Room for the hidden states of ``tokens`` [windows, length], in memory or in a file."""
        return self._spool.room((tokens.shape[0], tokens.shape[1], self.spec.hidden_size))

    @torch.no_grad()
    def embed_into(self, tokens: Tensor, hidden: States) -> None:
        """Write what enters the first block, for int64 tokens [windows, length], to ``hidden``, in pieces."""
        recorders = [_Recorder(block) for block in self._blocks]
        with self._ends(), self._swapped(recorders):
            # With no block in between, the inner model would apply its final norm: take what the recorder saw.
            kept: list[Tensor] = []
            handle = recorders[0].register_forward_pre_hook(lambda _, given: kept.append(given[0]))
            for here in pieces(tokens):
                self._inner(input_ids=tokens[here], use_cache=False)
                hidden[here] = kept.pop()
            handle.remove()
            self._inner(input_ids=tokens[:1], use_cache=False)
        self._arguments = (tokens.shape[1], [recorder.arguments for recorder in recorders])

    @contextmanager
    def _swapped(self, blocks: list[Any]) -> Iterator[None]:
        self._inner.layers = nn.ModuleList(blocks)
        try:
            yield
        finally:
            self._inner.layers = nn.ModuleList(self._blocks)

    def run_block_with(self, index: int, tensors: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """:meth:`run_block` with ``tensors`` by checkpoint name, differentiable by them and by ``hidden``."""
        module = self._blocks[index]
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        parameters = fuse(self._places[index], tensors, shapes)

        def block(hidden: Tensor, **arguments: Any) -> Any:
            return functional_call(module, parameters, (hidden,), arguments, strict=True)

        return self.run_block(index, block, hidden)

    def run_block(self, index: int, module: Callable[..., Any], hidden: Tensor, cache: Any = None) -> Tensor:
        """One block on hidden states [samples, length, hidden] of full windows; call :meth:`embed_into` first.

        ``cache``: what takes the place of a key/value cache.
        """
        length, arguments = self._arguments
        if length != hidden.shape[1]:
            raise ValueError(f"embed_into() was called for windows of {length} tokens, not {hidden.shape[1]}")
        # Masks and rotary tables have one row and broadcast over the batch: every window is full.
        scales = self._kv(self.spec.family.block.format(index=index)) if cache is None else None
        cache = _Rounding(scales) if scales is not None else cache
        given = arguments[index] if cache is None else {**arguments[index], _CACHE: cache}
        out = module(hidden, **given)
        leaving: Tensor = out[0] if isinstance(out, tuple) else out
        return leaving

    def in_precision(self) -> AbstractContextManager[Any]:
        """A context in which blocks multiply in the decoder's precision."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self._precision == "bfloat16")

    @torch.no_grad()
    def keys_and_values(self, index: int, module: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What block ``index`` adds to the cache: [samples, kv heads, length, head size] each, positions applied."""
        kept = _Keeping()
        self.run_block(index, module, hidden, kept)
        ((keys, values),) = kept.found
        return keys, values

    @torch.no_grad()
    def run_block_into(self, index: int, module: nn.Module, hidden: States, leaving: States | None) -> None:
        """:meth:`run_block` without gradients, a few windows at a time, to ``leaving``, which may be ``hidden`` itself.

        None: what leaves is not wanted, only what hooks on ``module`` see.
        """
        with self.in_precision():
            for here in pieces(hidden):
                left = _finite(self.run_block(index, module, hidden[here]), f"what leaves block {index}")
                if leaving is not None:
                    leaving[here] = left

    @torch.no_grad()
    def head_inputs(self, hidden: States) -> Iterator[Tensor]:
        """What the head is fed, window by window: the last block's [1, length, hidden] after the final norm."""
        with self._ends():
            for window in range(len(hidden)):
                out: Tensor = self._after_blocks(self._inner, hidden[window : window + 1]).last_hidden_state
                yield out

    def _after_blocks(self, model: nn.Module, hidden: Tensor) -> Any:
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int64)
        with self._swapped([_Replay(self._blocks[0], hidden)]), self._one_layer():
            return model(input_ids=ids, use_cache=False)

    @property
    def output(self) -> nn.Module:
        """The head's linear layer; its weight is in memory while :meth:`head` lasts. A tied one is the embedding's."""
        head: nn.Module = self._model.get_submodule(self.spec.family.head)
        return head

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """A function from hidden states [samples, length, hidden] to logits [samples, length, vocab]."""
        with self._ends():

            def logits(hidden: Tensor) -> Tensor:
                out: Tensor = self._after_blocks(self._model, hidden).logits
                return _finite(out, "what leaves the head")

            yield logits

    @contextmanager
    def _one_layer(self) -> Iterator[None]:
        config, layers = self._inner.config, self._inner.config.num_hidden_layers
        config.num_hidden_layers = 1
        try:
            yield
        finally:
            config.num_hidden_layers = layers

    @torch.no_grad()
    def logits(self, tokens: Tensor, advance: Callable[[int], None] = lambda _: None) -> Iterator[Tensor]:
        """Logits [length, vocab] of each window of int64 tokens [windows, length], one block in memory at a time."""
        hidden = self.room(tokens)
        self.embed_into(tokens, hidden)
        for index in range(self.spec.layers):
            with self.block(index) as module:
                self.run_block_into(index, module, hidden, hidden)
            advance(1)
        with self.head() as head:
            for window in range(len(hidden)):
                yield head(hidden[window : window + 1])[0]
        hidden.close()
