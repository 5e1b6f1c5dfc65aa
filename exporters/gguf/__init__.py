"""GGUF: one file with weights, configuration and tokenizer, as llama.cpp loads it (spec: ggml/docs/gguf.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from compress.errors import InputError, nearest
from compress.protocols import Artifact, StoredTensor
from compress.scheme import QuantScheme
from exporters.gguf.pretokenizers import LLAMA_CPP_NAMES
from exporters.gguf.storage import FLOATS, TERNARY, TypeChoices

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from compress.kv import KVScheme
    from compress.models.topology import DecoderSpec
    from compress.session import CompressedModel

ENTRY = "model.gguf"

KV_COMPLAINT = "the file has no place for scales of a key/value cache: llama.cpp chooses the cache's type when it runs"

FLOAT_PARITY_KLD = 1e-4
"""Highest mean KLD (nats) of a file without quantised layers: nothing but the order of summation differs."""


@dataclass(frozen=True)
class GgufExporter:
    """Writes ``model.gguf``.

    ``float_type`` (f16, f32, bf16) stores the layers that stay in floating point, ``ternary`` (tq2_0, tq1_0) those of
    three values. ``pre_tokenizer`` is llama.cpp's name for how text is split, where it cannot be found out.
    """

    format: ClassVar[str] = "gguf"
    reader: ClassVar[str] = f"gguf-py {version('gguf')}"
    # llama.cpp rounds the inputs of quantised layers to 8 bits; identical weights differ by about a third of this.
    parity_kld: ClassVar[float] = 8e-3

    float_type: str = "f16"
    ternary: str = "tq2_0"
    pre_tokenizer: str | None = None

    def __post_init__(self) -> None:
        known: dict[str, Collection[str]] = {"float_type": FLOATS, "ternary": TERNARY}
        if self.pre_tokenizer is not None:
            known["pre_tokenizer"] = LLAMA_CPP_NAMES
        wrong = {name: getattr(self, name) for name, table in known.items() if getattr(self, name) not in table}
        if wrong:
            raise InputError(
                "\n".join(
                    f"{name} '{text}' is not known{nearest(str(text), known[name])}" for name, text in wrong.items()
                ),
                where="gguf",
                fix="; ".join(f"known for {name}: {', '.join(known[name])}" for name in wrong),
            )

    @property
    def _choices(self) -> TypeChoices:
        return TypeChoices(self.float_type, self.ternary)

    def check(
        self,
        spec: DecoderSpec,
        plan: Mapping[str, QuantScheme],
        shapes: Mapping[str, tuple[int, int]],
        kv: KVScheme | None = None,
        biased: Collection[str] = (),
    ) -> Sequence[str]:
        """Complaints (layer, shape, why, and what would do), one an offender, before any work."""
        from exporters.gguf.limits import complaints

        cache = [] if kv is None else [KV_COMPLAINT]
        return [*complaints(spec, plan, shapes, biased), *cache]

    def check_tokenizer(self, folder: Path, vocab_size: int) -> Sequence[str]:
        """Remarks about texts that llama.cpp splits otherwise; InputError if GGUF cannot hold the tokenizer."""
        from exporters.gguf.tokenizer import check_tokenizer

        return check_tokenizer(folder, vocab_size, self.pre_tokenizer)

    def remarks(self, spec: DecoderSpec, plan: Mapping[str, QuantScheme]) -> Sequence[str]:
        """A context that ends before the model's positions do, and where llama.cpp chooses otherwise."""
        from exporters.gguf.limits import remarks

        return remarks(spec)

    def context_length(self, spec: DecoderSpec) -> int:
        """Up to a window that llama.cpp ignores, or to the model's last position."""
        from exporters.gguf.limits import context_length

        return context_length(spec)

    def one_scheme(self, spec: DecoderSpec) -> Sequence[Sequence[str]]:
        """The experts of a block: llama.cpp reads one projection of all of them as one tensor."""
        from exporters.gguf.limits import one_scheme

        return one_scheme(spec)

    def stored_bits(self, scheme: QuantScheme | None, shape: tuple[int, int]) -> int:
        """Bits of a linear layer in the file: whole blocks, a scale in each."""
        return self._choices.stored_bits(scheme, shape)

    def write(self, model: CompressedModel, out: Path) -> Artifact:
        """Write ``model.gguf`` into the empty folder ``out``; OSError (disk full, ...) passes through."""
        from exporters.gguf.writer import write_gguf

        write_gguf(model, out / ENTRY, self._choices, self.pre_tokenizer)
        return Artifact(self.format, out, ENTRY)

    def read_back(self, artifact: Artifact, layers: Sequence[str]) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """(layer, float32 [out, in] in the checkpoint's row order) of each of ``layers``, by gguf-py alone."""
        from exporters.gguf.reader import read_layers

        return read_layers(artifact.path / artifact.entry, layers)

    def inspect(self, artifact: Artifact) -> Sequence[StoredTensor]:
        """Every tensor in the file. Reads the header only."""
        from exporters.gguf.reader import stored_tensors

        return stored_tensors(artifact.path / artifact.entry)
