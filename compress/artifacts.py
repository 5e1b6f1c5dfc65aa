"""What can be done with an artifact that is already there: look into it, measure it, compare it with its model."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from compress import registry
from compress.errors import InputError
from compress.models.decoder import Decoder
from compress.models.sources import open_model
from compress.prepare import token_windows
from compress.proof import write_logits
from compress.protocols import StoredTensor
from compress.recipe import Evaluate, Measure
from compress.report import Performance, Quality
from compress.runner import measure as runner_measure
from compress.runner import quality as runner_quality
from compress.runner.artifact import find_artifact
from compress.runner.process import PerformanceSettings
from compress.runner.threads import resolve_threads
from compress.session import Progress, no_progress
from compress.workspace import explain_full_disk


def inspect(path: Path) -> Sequence[StoredTensor]:
    """Every tensor that the artifact at ``path`` stores."""
    artifact = find_artifact(path)
    for name in registry.names("exporters"):
        exporter = registry.load("exporters", name)
        if exporter.format == artifact.format:
            found: Sequence[StoredTensor] = exporter().inspect(artifact)
            return found
    raise InputError(f"no exporter knows the format {artifact.format}", where=str(path))


def bench(path: Path, settings: Measure, progress: Progress = no_progress) -> Performance:
    """Measure speed and memory of the artifact at ``path`` in a fresh process."""
    wanted = PerformanceSettings(settings.prompt_tokens, settings.generate_tokens, settings.repeats)
    return runner_measure.bench(find_artifact(path), wanted, resolve_threads(settings.threads), progress)


def evaluate(path: Path, reference: str, settings: Evaluate, progress: Progress = no_progress) -> Quality:
    """Compare the artifact at ``path`` with the model ``reference`` on the windows that ``settings`` ask for."""
    artifact, checkpoint = find_artifact(path), open_model(reference)
    windows = token_windows(checkpoint, settings, "evaluation")
    with tempfile.TemporaryDirectory(prefix="compress-eval-") as folder, explain_full_disk(Path(folder), 0):
        tokens, logits = Path(folder, "tokens.npy"), Path(folder, "reference.npy")
        np.save(tokens, windows.tokens.numpy())
        write_logits(Decoder(checkpoint), windows.tokens, logits, "reference logits", progress)
        found = runner_quality.evaluate(
            artifact, tokens, threads=resolve_threads("auto"), reference=logits, progress=progress
        )
    assert found.quality is not None
    return found.quality
