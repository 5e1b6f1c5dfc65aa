"""Runs an ONNX artifact with ONNX Runtime, sequence by sequence, on buffers that are allocated once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import InputError
from compress.runner.streaming import Stream, Turn, drop, turns

NO_SPIN_VARIABLE = "EDGEPRESS_NO_SPIN"
"""Set (to anything) it makes worker threads sleep while they wait: slower alone, faster on a busy machine."""
PREFILL_CHUNK = 64
"""Tokens of one step of a prefill. The graph computes every token's logits: the step bounds their memory."""

_CACHE_TYPES: Mapping[str, type[np.generic]] = MappingProxyType(
    {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8}
)
"""ONNX Runtime's word for the type of a cache -> numpy's; uint8 holds two numbers of 4 bits."""
_PAST, _PRESENT = "past_key_values.", "present."


@dataclass(frozen=True)
class _Past:
    """A graph input that holds keys or values, [batch, heads, tokens, size] of ONNX Runtime's ``type``."""

    name: str
    type: str
    heads: int
    size: int

    def empty(self, tokens: int) -> NDArray[Any]:
        """Zeros, written: the memory is taken now and not little by little while tokens are timed."""
        return np.full((1, self.heads, tokens, self.size), 0, dtype=_CACHE_TYPES[self.type])


class OrtRuntime:
    """One session and one key/value cache of ``context`` tokens, of the file's type, that every step writes in place.

    The graph's past and present share a buffer, so that a token costs no copy of the cache.

    ``spin``: whether idle worker threads spin; ``alone``: whether they go on between steps, as nothing else computes in
    this process. ``chunk``: tokens of one step of a prefill. ``exact``: run the file
    with activations left in fp32 (MatMulNBits' accuracy_level 0, whatever it says): slow, and what is left of a
    difference from the quantised weights' own logits is then no rounding of activations. Needs the onnx package.
    """

    def __init__(self, spin: bool = True, chunk: int = PREFILL_CHUNK, exact: bool = False, alone: bool = True) -> None:
        self._spin = spin and NO_SPIN_VARIABLE not in os.environ
        self._alone = alone
        self._exact = exact
        self._chunk = chunk
        self._session: Any = None
        self._binding: Any = None
        self._past: list[_Past] = []
        self._cache: list[Any] = []
        self._threads = 0
        self._length = 0
        self._growing: dict[str, Any] | None = None
        """Cache of a file that makes a new one at each step; None: the file writes ``_cache`` in place."""
        self._stream: Stream | None = None
        self._turns: Mapping[str, Turn | None] = {}
        self._written: dict[str, NDArray[Any]] = {}
        """The memory of ``_cache``, by the names of the graph's inputs."""
        self._mask = np.ones((1, 0), dtype=np.int64)
        self._vocab_size = 0
        self._logits_at = 0

    @classmethod
    def exact(cls) -> OrtRuntime:
        """A runtime that runs the same file with fp32 activations."""
        return cls(exact=True)

    def keep(self, stream: Stream) -> None:
        """Bound the cache of what is loaded next: sequences of any length then go through it."""
        self._stream = stream
        self._chunk = min(self._chunk, stream.step)

    def load(self, entry: Path, threads: int, context: int) -> None:
        """Open ``entry`` (model.onnx) for at most ``context`` tokens.

        InputError if ONNX Runtime cannot read the file, if it is no decoder with a cache, if its positions end
        before ``context``, or if ``threads`` or ``context`` is below 1.
        """
        import onnxruntime

        if threads < 1 or context < 1:
            raise InputError(f"threads={threads} and context={context} must both be at least 1", where=str(entry))
        self._session = _open(entry, threads, self._spin, self._exact, self._alone)
        self._past = past = _past_inputs(entry, self._session)
        vocabulary = [item.shape[2] for item in self._session.get_outputs() if item.name == "logits"]
        if not past or not vocabulary:
            raise InputError(
                f"not a decoder with a cache: it lacks inputs {_PAST}* or the output logits", where=str(entry)
            )
        if self._stream is not None:
            context = min(context, self._stream.room)
            self._turns = self._find_turns(entry, self._stream, past)
        self._check_context(entry, context)
        self._threads, self._length, self._vocab_size, self._logits_at = threads, 0, vocabulary[0], len(past)
        self._mask = np.ones((1, context), dtype=np.int64)
        self._binding, self._cache, self._written = self._session.io_binding(), [], {}
        self._growing = {} if self._properties().get("cache") == "growing" else None
        for item in past if self._growing is None else ():
            empty = item.empty(context)
            buffer = onnxruntime.OrtValue.ortvalue_from_numpy(empty)
            # The value wraps the array's memory and must outlive the binding.
            self._cache.append(buffer)
            self._written[item.name] = empty
            self._binding.bind_ortvalue_input(item.name, buffer)
            self._binding.bind_ortvalue_output(item.name.replace(_PAST, _PRESENT, 1), buffer)

    def prefill(self, tokens: NDArray[np.int64], all_logits: bool = False) -> NDArray[np.float32]:
        """Start a new sequence of at least one token; logits [vocab] after the last, or [tokens, vocab]."""
        count = len(tokens)
        if count == 0:
            raise InputError("there is nothing to prefill: the sequence has no tokens")
        self._length = 0
        kept = np.empty((count if all_logits else 1, self._vocab_size), dtype=np.float32)
        for start in range(0, count, self._chunk):
            logits = self._advance(tokens[start : start + self._chunk])
            if all_logits:
                kept[start : start + len(logits)] = logits
            elif start + self._chunk >= count:
                kept[0] = logits[-1]
        return kept if all_logits else kept[0]

    def decode(self, token: int) -> NDArray[np.float32]:
        """Append one token; logits [vocab]."""
        logits: NDArray[np.float32] = self._advance(np.array([token]))[0]
        return logits

    def describe(self) -> dict[str, Any]:
        """Library, its version, threads, providers, and how it was told to run."""
        import onnxruntime

        stream = self._stream
        kept = {} if stream is None else {"stream": str(stream), "context": self._mask.shape[1]}
        return {
            "library": "onnxruntime",
            "version": onnxruntime.__version__,
            "threads": self._threads,
            "providers": self._session.get_providers(),
            "spinning": self._spin,
            "exact": self._exact,
            **kept,
        }

    def kv_bytes(self, context: int) -> int:
        """Bytes of the key/value cache for ``context`` tokens."""
        return sum(np.dtype(_CACHE_TYPES[x.type]).itemsize * x.heads * x.size * context for x in self._past)

    def close(self) -> None:
        """Free the session and the cache."""
        self._binding = self._session = None
        self._cache, self._written = [], {}
        self._growing = None

    def _find_turns(self, entry: Path, stream: Stream, past: Sequence[_Past]) -> Mapping[str, Turn | None]:
        quantised = sorted({item.type for item in past if np.dtype(_CACHE_TYPES[item.type]).kind != "f"})
        if quantised:
            raise InputError(
                f"keys in a cache of {', '.join(quantised)} cannot be turned to other positions without rounding again",
                where=str(entry),
                fix="leave out the window, or export without the pass kv",
            )
        return turns(entry, stream.step)

    def _make_room(self, count: int) -> None:
        """Drop tokens from a bounded cache that has no room for ``count`` more."""
        stream, context = self._stream, self._mask.shape[1]
        if stream is None or context < stream.room:
            return
        while self._length + count > context:
            for name, cache in (self._written if self._growing is None else self._growing).items():
                drop(cache, stream, self._length, self._turns.get(name))
            self._length -= stream.step
        if self._growing is not None:
            self._growing = {name: cache[:, :, : self._length] for name, cache in self._growing.items()}

    def _check_context(self, entry: Path, context: int) -> None:
        limit = self._properties().get("context_length")
        if limit is not None and context > int(limit):
            raise InputError(
                f"a context of {context} tokens was asked for, and the model's positions end at {limit}",
                where=str(entry),
                fix=f"use {limit} tokens or fewer",
            )

    def _properties(self) -> dict[str, str]:
        found: dict[str, str] = self._session.get_modelmeta().custom_metadata_map
        return found

    def _advance(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Append ``tokens`` to the sequence; their logits [tokens, vocab]."""
        self._make_room(len(tokens))
        total, context = self._length + len(tokens), self._mask.shape[1]
        if total > context:
            raise InputError(f"{total} tokens do not fit the context of {context} that was opened")
        if self._growing is not None:
            return self._advance_growing(tokens, total)
        self._binding.bind_cpu_input("input_ids", np.ascontiguousarray(tokens, dtype=np.int64)[None])
        self._binding.bind_cpu_input("attention_mask", self._mask[:, :total])
        # Bound anew: the binding would hold the last step's tensor to its shape.
        self._binding.bind_output("logits")
        self._session.run_with_iobinding(self._binding)
        self._length = total
        logits: NDArray[np.float32] = self._binding.get_outputs()[self._logits_at].numpy()[0]
        return logits

    def _advance_growing(self, tokens: NDArray[np.int64], total: int) -> NDArray[np.float32]:
        past = self._growing
        if past is None or self._length == 0:
            past = {item.name: item.empty(0) for item in self._past}
        given = {"input_ids": tokens[None].astype(np.int64), "attention_mask": self._mask[:, :total]}
        names = ["logits", *(name.replace(_PAST, _PRESENT, 1) for name in past)]
        logits, *present = self._session.run(names, given | past)
        self._growing, self._length = dict(zip(past, present, strict=True)), total
        found: NDArray[np.float32] = logits[0]
        return found


def _past_inputs(entry: Path, session: Any) -> list[_Past]:
    """The inputs of the cache. onnxruntime-genai's builder names its sizes in a file beside the graph alone."""
    found = [item for item in session.get_inputs() if item.name.startswith(_PAST)]
    sizes = {item.name: item.shape[3] for item in found}
    if not all(isinstance(size, int) for size in sizes.values()):
        config = entry.with_name("genai_config.json")
        try:
            named = int(json.loads(config.read_text(encoding="utf-8"))["model"]["decoder"]["head_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                "the graph does not say how wide a head of its cache is, and no genai_config.json beside it does"
                f" ({error!r})",
                where=str(entry),
                fix="keep the file beside the genai_config.json that was made with it",
            ) from error
        sizes = dict.fromkeys(sizes, named)
    return [_Past(item.name, item.type, item.shape[1], sizes[item.name]) for item in found]


def _open(entry: Path, threads: int, spin: bool, exact: bool, alone: bool) -> Any:
    options = session_options(entry, threads, spin)
    options.add_session_config_entry("session.force_spinning_stop", "0" if alone else "1")
    # What the runtime makes of DequantizeLinear and MatMul, where a file has no MatMulNBits with a level of its own.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0" if exact else "4")
    return open_session(entry, options, _exact_model(entry) if exact else None)


def session_options(entry: Path, threads: int, spin: bool) -> Any:
    """ONNX Runtime's SessionOptions for the file ``entry``; ``spin``: whether idle threads do."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # A plan of memory serves one shape, and every token has a new one: its mask is a token longer.
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(entry.parent))
    return options


def open_session(
    entry: Path, options: Any, model: bytes | None = None, providers: Sequence[str] = ("CPUExecutionProvider",)
) -> Any:
    """A session of the file ``entry``, or of ``model`` in its place; InputError if ONNX Runtime cannot open it."""
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as errors

    try:
        return onnxruntime.InferenceSession(str(entry) if model is None else model, options, providers=list(providers))
    except (
        errors.Fail,
        errors.InvalidArgument,
        errors.InvalidGraph,
        errors.InvalidProtobuf,
        errors.NoSuchFile,
        errors.NotImplemented,
        errors.RuntimeException,
    ) as error:
        raise InputError(f"ONNX Runtime cannot open this file: {error}", where=str(entry)) from error


def _exact_model(entry: Path) -> bytes:
    """The model file with accuracy_level 0 on every MatMulNBits; its weights stay where they are."""
    import onnx

    model = onnx.load(entry, load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            for attribute in node.attribute:
                if attribute.name == "accuracy_level":
                    attribute.i = 0
    serialised: bytes = model.SerializeToString()
    return serialised
