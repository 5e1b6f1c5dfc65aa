"""Text to tokens and back, and where an answer ends: from what lies beside or inside an artifact."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from compress.errors import InputError
from compress.runner.llamacpp import LlamaCppRuntime

I64 = NDArray[np.int64]
_REPLACEMENT = "\ufffd"
_ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "</s>")
"""What chat templates close a turn with. Checkpoints that list only their end of text as eos are common."""


class Pieces(Protocol):
    """Turns one token after the other into whole characters."""

    def push(self, token: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        ...

    def end(self) -> str:
        """What was held back: U+FFFD for bytes that never became a character."""
        ...


class Text(Protocol):
    """A model's text side."""

    @property
    def template(self) -> str | None:
        """The Jinja chat template."""
        ...

    @property
    def markers(self) -> Mapping[str, str]:
        """bos_token, eos_token, ...: what templates refer to."""
        ...

    @property
    def context(self) -> int:
        """Tokens that the model was trained for."""
        ...

    def encode(self, text: str, add_special: bool) -> I64:
        """Token ids; control tokens written in ``text`` are recognised, ``add_special`` adds bos as the model does."""
        ...

    def ends(self, token: int) -> bool:
        """Whether an answer ends with this token."""
        ...

    def pieces(self) -> Pieces:
        """A fresh stream of text."""
        ...


class FolderText:
    """The tokenizer files that lie beside an ONNX graph: tokenizer.json and what configures it."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise InputError("there is no tokenizer.json beside the graph", where=str(folder), fix="export again")
        self._tokenizer = Tokenizer.from_file(str(file))
        settings = _read(folder / "tokenizer_config.json")
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        self.markers = {name: _token_text(settings[name]) for name in names if settings.get(name)}
        self.template = _template(folder, settings)
        configs = [_read(folder / name) for name in ("generation_config.json", "config.json")]
        genai = _read(folder / "genai_config.json").get("model", {})
        self.context = int(genai.get("context_length") or configs[1].get("max_position_embeddings") or 2048)
        self._ends = {token for config in (*configs, genai) for token in _ids(config.get("eos_token_id"))}
        special = {
            token.content: id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        }
        named = [*_ENDS_OF_TURN, self.markers.get("eos_token", "")]
        self._ends |= {special[name] for name in named if name in special}

    def encode(self, text: str, add_special: bool) -> I64:
        """See :class:`Text`."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=add_special).ids, dtype=np.int64)

    def ends(self, token: int) -> bool:
        """See :class:`Text`."""
        return token in self._ends

    def pieces(self) -> Pieces:
        """See :class:`Text`."""
        return _DecodedPieces(self._tokenizer)


class GgufText:
    """The tokenizer inside a GGUF file, through llama.cpp's own."""

    def __init__(self, runtime: LlamaCppRuntime) -> None:
        self._runtime = runtime
        self.template = runtime.chat_template()
        roles = ("bos", "eos", "unk", "pad")
        self.markers = {f"{role}_token": text for role in roles if (text := runtime.special_token(role))}
        architecture = runtime.metadata("general.architecture")
        self.context = int(runtime.metadata(f"{architecture}.context_length") or 2048)

    def encode(self, text: str, add_special: bool) -> I64:
        """See :class:`Text`."""
        return self._runtime.tokenize(text, parse_special=True, add_special=add_special)

    def ends(self, token: int) -> bool:
        """See :class:`Text`."""
        return self._runtime.ends_text(token)

    def pieces(self) -> Pieces:
        """See :class:`Text`."""
        return _BytePieces(self._runtime)


class _DecodedPieces:
    """For tokenizers whose decoder joins tokens (spaces, byte fallback): decode a short window, emit what is new."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer.decode
        self._held: list[int] = []
        self._context: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        text = self._new()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        # The last token whose text is out stays as context: decoders treat the first token of a text differently.
        self._context, self._held = self._held, []
        return text

    def end(self) -> str:
        text, self._held = self._new(), []
        return text

    def _new(self) -> str:
        known = self._decode(self._context, skip_special_tokens=False)
        whole: str = self._decode(self._context + self._held, skip_special_tokens=False)
        return whole[len(known) :]


class _BytePieces:
    """For tokens that are bytes."""

    def __init__(self, runtime: LlamaCppRuntime) -> None:
        self._piece = runtime.piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._piece(token))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    stored = settings.get("chat_template")
    if isinstance(stored, list):
        named = {entry["name"]: entry["template"] for entry in stored}
        stored = named.get("default")
    return stored if isinstance(stored, str) else None


def _token_text(value: Any) -> str:
    """Tokens are stored as text, or as an object with its properties."""
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _ids(value: Any) -> list[int]:
    return [] if value is None else [int(item) for item in value] if isinstance(value, list) else [int(value)]


def _read(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``, or nothing where there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"this is not JSON: {error}", where=str(file)) from error
    return value if isinstance(value, dict) else {}
