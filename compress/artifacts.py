"""What can be done with an artifact that is already there: look into it, measure it, compare it with its model."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compress import registry
from compress.errors import InputError
from compress.kv import FLOAT_CACHE, CacheTypes
from compress.models.decoder import Decoder
from compress.models.headers import CHECKPOINT, read_headers, weight_files_of_checkpoint
from compress.models.sources import open_model
from compress.models.topology import FAMILIES, DecoderSpec, describe
from compress.prepare import FLOAT_BYTES
from compress.proof import write_logits
from compress.protocols import StoredTensor
from compress.recipe import Evaluate, Measure
from compress.report import Performance, Quality
from compress.runner import measure as runner_measure
from compress.runner import providers as runner_providers
from compress.runner import quality as runner_quality
from compress.runner.artifact import find_artifact, weight_files
from compress.runner.process import PerformanceSettings, cache_complaints
from compress.runner.providers import Provider
from compress.runner.streaming import Stream, require_streaming, stream
from compress.runner.threads import resolve_threads
from compress.session import Progress, no_progress
from compress.texts import token_windows
from compress.workspace import explain_full_disk

ENDS = frozenset(name for family in FAMILIES.values() for name in (family.embedding, family.head))
"""Layers outside the blocks."""


@dataclass(frozen=True)
class Inspection:
    """What lies in an artifact's or a checkpoint's files; ``file_bytes`` is the size of all of them."""

    format: str
    path: str
    tensors: tuple[StoredTensor, ...]
    file_bytes: int

    @property
    def linear_bits(self) -> float | None:
        """Bits a weight that the linear layers of the blocks are stored with; None where no tensor is known as one."""
        return _bits([tensor for tensor in self.tensors if tensor.layer is not None and tensor.layer not in ENDS])

    @property
    def file_bits(self) -> float | None:
        """Bits of the whole files for each weight of linear layers, embedding and head."""
        weights = sum(math.prod(tensor.shape) for tensor in self.tensors if tensor.layer is not None)
        return 8 * self.file_bytes / weights if weights else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        tensors = [{**asdict(tensor), "bits": _bits([tensor])} for tensor in self.tensors]
        return {**asdict(self), "tensors": tensors, "linear_bits": self.linear_bits, "file_bits": self.file_bits}


def _bits(tensors: Sequence[StoredTensor]) -> float | None:
    elements = sum(math.prod(tensor.shape) for tensor in tensors)
    return 8 * sum(tensor.bytes for tensor in tensors) / elements if elements else None


def inspect(path: Path, format: str | None = None) -> Inspection:
    """Every tensor stored at ``path``: an artifact, a checkpoint's folder, or a .safetensors file. Reads headers only.

    ``format`` chooses where a folder has more than one; a checkpoint's is ``safetensors``. InputError as
    :func:`~compress.runner.artifact.find_artifact` says.
    """
    if format in (None, CHECKPOINT) and (files := weight_files_of_checkpoint(path)):
        return Inspection(CHECKPOINT, str(path), read_headers(files), sum(file.stat().st_size for file in files))
    artifact = find_artifact(path, format)
    entry = artifact.path / artifact.entry
    size = sum(file.stat().st_size for file in weight_files(entry))
    for name in registry.names("exporters"):
        exporter = registry.load("exporters", name)
        if exporter.format == artifact.format:
            return Inspection(artifact.format, str(entry), tuple(exporter().inspect(artifact)), size)
    raise InputError(f"no exporter knows the format {artifact.format}", where=str(path))


def providers(path: Path, format: str | None = None) -> tuple[Provider, ...]:
    """What each execution provider of ONNX Runtime would do with the nodes of the ONNX artifact at ``path``.

    InputError for an artifact of another format.
    """
    artifact = find_artifact(path, format)
    if artifact.format != "onnx":
        raise InputError(
            f"execution providers are ONNX Runtime's, and this is {artifact.format}",
            where=str(artifact.path / artifact.entry),
            fix="give an .onnx file",
        )
    return runner_providers.providers(artifact.path / artifact.entry)


def bench(path: Path, settings: Measure, progress: Progress = no_progress) -> Performance:
    """Measure speed and memory of the artifact at ``path`` in a fresh process."""
    bound = stream(settings.window, settings.sinks)
    wanted = PerformanceSettings(settings.prompt_tokens, settings.generate_tokens, settings.repeats, stream=bound)
    threads = resolve_threads(settings.threads)
    return runner_measure.bench(find_artifact(path), wanted, threads, progress, settings.cache)


def evaluate(
    path: Path,
    reference: str,
    settings: Evaluate,
    progress: Progress = no_progress,
    cache: CacheTypes = FLOAT_CACHE,
    bound: Stream | None = None,
) -> Quality:
    """Compare the artifact at ``path`` with the model ``reference`` on the windows that ``settings`` ask for.

    ``cache``: what llama.cpp keeps keys and values in; ``bound``: how much of its cache an ONNX artifact keeps.
    InputError if they do not have the same vocabulary: one was not made from the other.
    """
    artifact, checkpoint = find_artifact(path), open_model(reference)
    spec = describe(checkpoint.config, checkpoint.folder / "config.json")
    if bound is not None:
        require_streaming(registry.load("runtimes", artifact.format), str(artifact.path / artifact.entry))
    _require_same_vocabulary(inspect(path), spec, reference)
    unfit = [*cache_complaints(artifact.format, cache), *cache.complaints(spec.head_dim, spec.head_dim)]
    if unfit:
        raise InputError("\n".join(unfit), where=str(path), fix="leave --kv-keys and --kv-values at f16")
    windows = token_windows(checkpoint, settings, "evaluation")
    needed = windows.tokens.numel() * spec.vocab_size * FLOAT_BYTES
    with tempfile.TemporaryDirectory(prefix="compress-eval-") as folder, explain_full_disk(Path(folder), needed):
        tokens, logits = Path(folder, "tokens.npy"), Path(folder, "reference.npy")
        np.save(tokens, windows.tokens.numpy())
        write_logits(Decoder(checkpoint), windows.tokens, logits, "reference logits", progress)
        found = runner_quality.evaluate(
            artifact,
            tokens,
            threads=resolve_threads("auto"),
            reference=logits,
            stream=bound,
            progress=progress,
            cache=cache,
        )
    assert found.quality is not None
    return found.quality


def _require_same_vocabulary(found: Inspection, spec: DecoderSpec, reference: str) -> None:
    for tensor in found.tensors:
        if tensor.layer == spec.family.embedding and tensor.shape[0] != spec.vocab_size:
            raise InputError(
                f"it has {tensor.shape[0]} tokens, and {reference} has {spec.vocab_size}",
                where=found.path,
                fix="give as --reference the model that the artifact was made from",
            )
