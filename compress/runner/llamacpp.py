"""GGUF files in llama.cpp, through the low-level functions of ``llama-cpp-python``: no torch, no text pipeline."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import CompressError, InputError
from compress.kv import CACHE_TYPES, FLOAT_CACHE, CacheTypes
from compress.models.gguf.header import read_metadata
from compress.runner.llama_library import library as _library
from compress.runner.llama_library import thread as _thread

PREFILL_BATCH = 512
"""Tokens that llama.cpp computes at once."""
LOGITS_BATCH = 128
"""Tokens at once when all their logits are wanted: llama.cpp keeps float32 [batch, vocab] of them."""

_MIB = 1 << 20


class LlamaCppRuntime:
    """One GGUF file, one sequence at a time, on the CPU, with a key/value cache of the types ``cache``."""

    def __init__(self, cache: CacheTypes = FLOAT_CACHE) -> None:
        self._cache = cache
        self._cache_mib: list[float] = []
        self._model: Any = None
        self._context: Any = None
        self._vocabulary: Any = None
        self._vocab_size = 0
        self._limit = 0
        self._position = 0

    @classmethod
    def exact(cls) -> None:
        """llama.cpp always rounds the inputs of quantised layers."""

    def load(self, entry: Path, threads: int, context: int) -> None:
        """Open ``entry`` for at most ``context`` tokens, on ``threads`` threads; InputError if llama.cpp refuses it."""
        if threads < 1 or context < 1:
            raise InputError(f"threads={threads} and context={context} must both be at least 1", where=str(entry))
        if not entry.is_file():
            raise InputError("there is no such file", where=str(entry), fix="give the .gguf file of an artifact")
        self.close()
        self._check_cache(entry)
        library, log = _library()
        log.take()
        options = library.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = library.llama_model_load_from_file(str(entry).encode(), options)
        if not self._model:
            raise InputError(f"llama.cpp cannot load this file: {log.take()}", where=str(entry))
        settings = library.llama_context_default_params()
        settings.n_ctx = context
        settings.n_batch = settings.n_ubatch = min(PREFILL_BATCH, context)
        settings.n_threads = settings.n_threads_batch = threads
        settings.type_k, settings.type_v = (CACHE_TYPES[kind].number for kind in (self._cache.keys, self._cache.values))
        flash = {None: "AUTO", True: "ENABLED", False: "DISABLED"}[self._cache.flash]
        settings.flash_attn_type = getattr(library, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
        # Blocks with a window get a cache of its size, as in llama.cpp's own programs.
        settings.swa_full = False
        log.cache_mib.clear()
        self._context = library.llama_init_from_model(self._model, settings)
        if not self._context:
            self.close()
            raise InputError(
                f"llama.cpp cannot make a context of {context} tokens with a cache of {self._cache}: {log.take()}",
                where=str(entry),
            )
        self._cache_mib = list(log.cache_mib)
        self._vocabulary = library.llama_model_get_vocab(self._model)
        self._vocab_size = library.llama_vocab_n_tokens(self._vocabulary)
        self._limit = min(context, library.llama_model_n_ctx_train(self._model))

    def _check_cache(self, entry: Path) -> None:
        """InputError where the heads of the file don't fit the blocks of the cache, before anything is loaded."""
        if all(CACHE_TYPES[kind].block == 1 for kind in (self._cache.keys, self._cache.values)):
            return
        found = read_metadata(entry)
        prefix = f"{found.get('general.architecture')}."
        heads, hidden = (int(found.get(prefix + key, 0)) for key in ("attention.head_count", "embedding_length"))
        usual = hidden // heads if heads else 0
        widths = (int(found.get(f"{prefix}attention.{part}_length", usual)) for part in ("key", "value"))
        complaints = self._cache.complaints(*widths)
        if complaints:
            raise InputError("\n".join(complaints), where=str(entry), fix="leave them in f16")

    def prefill(self, tokens: NDArray[np.int64], all_logits: bool = False) -> NDArray[np.float32]:
        """Start a new sequence; float32 logits [vocab] after the last token, or [tokens, vocab]."""
        if tokens.size == 0:
            raise InputError("there is nothing to prefill: the sequence has no tokens")
        library, _ = _library()
        library.llama_memory_clear(library.llama_get_memory(self._ready()), True)
        self._position = 0
        if not all_logits:
            last = (tokens.size - 1) // PREFILL_BATCH * PREFILL_BATCH
            for start in range(0, last, PREFILL_BATCH):
                self._compute(tokens[start : start + PREFILL_BATCH], outputs=0)
            return self._compute(tokens[last:], outputs=1).reshape(-1)
        found = np.empty((tokens.size, self._vocab_size), dtype=np.float32)
        for start in range(0, tokens.size, LOGITS_BATCH):
            part = tokens[start : start + LOGITS_BATCH]
            found[start : start + part.size] = self._compute(part, outputs=part.size)
        return found

    def decode(self, token: int) -> NDArray[np.float32]:
        """Append one token; float32 logits [vocab]."""
        return self._compute(np.array([token]), outputs=1).reshape(-1)

    def _compute(self, tokens: NDArray[np.int64], outputs: int) -> NDArray[np.float32]:
        """Append ``tokens``; float32 logits [outputs, vocab] of the last ``outputs`` of them."""
        library, log = _library()
        context = self._ready()
        room = self._limit - self._position
        if tokens.size > room:
            positions = library.llama_model_n_ctx_train(self._model)
            raise InputError(
                f"{tokens.size} more tokens do not fit: {room} of {self._limit} are left",
                fix=f"load a larger context; the model's positions end at {positions}",
            )
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise InputError(f"a token is outside 0 ... {self._vocab_size - 1}", where="llama.cpp")
        ids = np.ascontiguousarray(tokens, dtype=np.int32)
        wanted = np.zeros(ids.size, dtype=np.int8)
        wanted[ids.size - outputs :] = 1
        # Without positions and sequences llama.cpp appends to sequence 0.
        batch = library.llama_batch(
            n_tokens=ids.size,
            token=ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            logits=wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        status = _thread().submit(library.llama_decode, context, batch).result()
        if status != 0:
            raise CompressError(f"llama.cpp could not compute {ids.size} tokens (status {status}): {log.take()}")
        self._position += ids.size
        if outputs == 0:
            return np.empty((0, self._vocab_size), dtype=np.float32)
        found = np.ctypeslib.as_array(library.llama_get_logits(context), shape=(outputs, self._vocab_size))
        return found.copy()

    def kv_bytes(self, context: int) -> int:
        """Bytes of the keys and values of ``context`` tokens in every block, from the file's own dimensions."""
        library, _ = _library()
        self._ready()
        rows = int(library.llama_model_n_layer(self._model) * library.llama_model_n_head_kv(self._model))
        usual = library.llama_model_n_embd(self._model) // library.llama_model_n_head(self._model)
        prefix = f"{self.metadata('general.architecture')}.attention"
        widths = (self.metadata(f"{prefix}.{part}_length") or usual for part in ("key", "value"))
        return context * rows * self._cache.bytes_per_token(*map(int, widths))

    def _reserved(self) -> tuple[int, str]:
        """(bytes of the cache that llama.cpp has made, how that is known).

        It says so in MiB with two digits: where the computed number rounds to that, it is the exact one. Blocks that
        see a window only have smaller caches, which no formula here knows.
        """
        library, _ = _library()
        computed, said = self.kv_bytes(library.llama_n_ctx(self._ready())), sum(self._cache_mib)
        what = f"the cache ({self._cache}) that llama.cpp made when it loaded"
        if not self._cache_mib:
            return computed, f"computed: by its shape, {what}; its log did not say"
        if abs(computed / _MIB - said) <= 0.005 * len(self._cache_mib) + 1e-9:
            return computed, f"measured: {what}, {said:.2f} MiB by its log, exact by its shape"
        return round(said * _MIB), f"measured: {what}, {said:.2f} MiB by its log"

    def describe(self) -> dict[str, Any]:
        """Library version, the CPU features it uses, and the threads and context that are really in force."""
        library, _ = _library()
        context = self._ready()
        reserved, how = self._reserved()
        return {
            "library": "llama-cpp-python",
            "version": version("llama-cpp-python"),
            "system": library.llama_print_system_info().decode().strip(" |"),
            "model": self.metadata("general.name") or "",
            "threads": library.llama_n_threads(context),
            "threads_prefill": library.llama_n_threads_batch(context),
            # "passive" lets idle threads sleep; otherwise they spin, which collapses beside other load.
            "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
            "context": library.llama_n_ctx(context),
            "kv_type": str(self._cache),
            "kv_bytes": reserved,
            "kv_how": how,
        }

    def metadata(self, key: str) -> str | None:
        """A single value of the file's metadata as text; None if the file has no such key."""
        library, _ = _library()
        self._ready()
        length = library.llama_model_meta_val_str(self._model, key.encode(), None, 0)
        if length < 0:
            return None
        buffer = ctypes.create_string_buffer(length + 1)
        library.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer))
        return buffer.value.decode()

    def chat_template(self) -> str | None:
        """The file's Jinja chat template, if it has one."""
        library, _ = _library()
        self._ready()
        found = library.llama_model_chat_template(self._model, None)
        return None if found is None else found.decode()

    def special_token(self, role: str) -> str:
        """Text of the bos, eos, unk or pad token as the file names it; empty if it names none."""
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        found = self.metadata(f"tokenizer.ggml.{names[role]}_token_id")
        return "" if found is None else self.piece(int(found)).decode(errors="replace")

    def ends_text(self, token: int) -> bool:
        """Whether llama.cpp stops generating at this token (eos, end of turn, and what it takes for them)."""
        library, _ = _library()
        self._ready()
        return bool(library.llama_vocab_is_eog(self._vocabulary, token))

    def tokenize(self, text: str, parse_special: bool = True, add_special: bool = False) -> NDArray[np.int64]:
        """Token ids of ``text``; ``parse_special`` reads control tokens in it, ``add_special`` adds bos and eos."""
        library, _ = _library()
        self._ready()
        data = text.encode()
        # A token covers at least one byte; bos and eos may come on top.
        buffer = np.empty(len(data) + 2, dtype=np.int32)
        pointer = buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        count = library.llama_tokenize(
            self._vocabulary, data, len(data), pointer, buffer.size, add_special, parse_special
        )
        if count < 0:
            raise CompressError(f"llama.cpp needs {-count} tokens for {len(data)} bytes of text")
        return buffer[:count].astype(np.int64)

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; not always whole characters."""
        library, _ = _library()
        self._ready()
        length = -library.llama_token_to_piece(self._vocabulary, token, None, 0, 0, True)
        buffer = ctypes.create_string_buffer(max(length, 1))
        count = library.llama_token_to_piece(self._vocabulary, token, buffer, len(buffer), 0, True)
        return buffer.raw[: max(count, 0)]

    def detokenize(self, tokens: Sequence[int] | NDArray[np.int64]) -> str:
        """The text of ``tokens``, control tokens included; bytes that are no character become U+FFFD."""
        return b"".join(self.piece(int(token)) for token in tokens).decode(errors="replace")

    def close(self) -> None:
        """Free the context and the model; may be called again."""
        if self._model is None and self._context is None:
            return
        library, _ = _library()
        if self._context:
            # After a step that an interrupt did not wait for.
            _thread().submit(library.llama_free, self._context).result()
        if self._model:
            library.llama_model_free(self._model)
        self._model = self._context = self._vocabulary = None

    def _ready(self) -> Any:
        if not self._context:
            raise CompressError("no file is loaded", where="llama.cpp")
        return self._context
