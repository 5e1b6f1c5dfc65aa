"""What each artifact really is: read back bit for bit, run in its own runtime, compared, measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from compress.errors import ParityError
from compress.models.decoder import Decoder
from compress.prepare import PARITY_WINDOWS, Prepared
from compress.protocols import Artifact, Exporter
from compress.report import ArtifactRecord, Parity
from compress.runner.process import Job, PerformanceSettings, QualitySettings, run_job
from compress.session import CompressedModel, Progress
from compress.workspace import folder_bytes

MISMATCHES_SHOWN = 10


@dataclass(frozen=True)
class Evidence:
    """Files that every artifact is compared with: token windows, and logits of the two torch models."""

    tokens: Path
    reference: Path | None
    parity: Path


def write_logits(decoder: Decoder, tokens: Tensor, path: Path, label: str, progress: Progress) -> None:
    """Logits float32 [windows, length, vocab] of int64 ``tokens`` [windows, length] as an .npy file."""
    shape = (*tokens.shape, decoder.spec.vocab_size)
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    with progress(label, decoder.spec.layers + len(tokens)) as advance:
        for index, logits in enumerate(decoder.logits(tokens, advance)):
            out[index] = logits.numpy()
            advance(1)
    out.flush()


def gather_evidence(
    prepared: Prepared, model: CompressedModel, tokens: Tensor, folder: Path, progress: Progress
) -> Evidence:
    """Run the original and the fake-quantised torch model over the evaluation windows."""
    folder.mkdir(parents=True, exist_ok=True)
    evidence = Evidence(folder / "tokens.npy", folder / "reference.npy", folder / "parity.npy")
    np.save(evidence.tokens, tokens.numpy())
    if prepared.recipe.evaluate is None:
        evidence = Evidence(evidence.tokens, None, evidence.parity)
    else:
        original = Decoder(prepared.checkpoint)
        write_logits(original, tokens, evidence.reference or folder, "reference logits", progress)
    fake_quantised = Decoder(prepared.checkpoint, model.parameter)
    write_logits(fake_quantised, tokens[:PARITY_WINDOWS], evidence.parity, "logits to compare with", progress)
    return evidence


def read_back(model: CompressedModel, exporter: Exporter, artifact: Artifact, progress: Progress) -> list[str]:
    """Layers whose weights in the file differ, in any bit, from what the passes chose."""
    layers, wrong, seen = list(model.layers()), [], set()
    quantised = model.schemes
    with progress(f"reading {artifact.format} back", len(layers)) as advance:
        for layer, stored in exporter.read_back(artifact, layers):
            seen.add(layer)
            if layer in quantised:
                chosen = model.quantized(layer).dequantize().numpy()
                if stored.shape != chosen.shape or not np.array_equal(stored, chosen):
                    wrong.append(layer)
            advance(1)
    return wrong + [f"{layer} (not in the file)" for layer in layers if layer not in seen]


def prove(
    prepared: Prepared,
    model: CompressedModel,
    exporter: Exporter,
    artifact: Artifact,
    evidence: Evidence,
    progress: Progress,
) -> ArtifactRecord:
    """Check and measure one artifact; ParityError if it is not what the passes chose."""
    recipe = prepared.recipe
    wrong = read_back(model, exporter, artifact, progress)
    linears = set(prepared.spec.all_linears())
    stored = exporter.inspect(artifact)
    weights = sum(rows * columns for layer, (rows, columns) in prepared.shapes.items() if layer in linears)
    bits = 8 * sum(item.bytes for item in stored if item.layer in linears) / weights
    performance = None
    if recipe.measure is not None:
        performance = PerformanceSettings(
            recipe.measure.prompt_tokens,
            recipe.measure.generate_tokens,
            recipe.measure.repeats,
            str(evidence.tokens),
            _weight_bytes_per_token(prepared, exporter, artifact),
        )
    reference = None if evidence.reference is None else str(evidence.reference)
    quality = QualitySettings(str(evidence.tokens), reference, str(evidence.parity))
    entry = str(artifact.path / artifact.entry)
    found = run_job(Job(artifact.format, entry, prepared.threads, performance, quality), progress)
    assert found.parity_kld is not None
    exact = found.exact_kld is not None
    parity = Parity(
        tensors=len(prepared.shapes),
        mismatched=tuple(wrong),
        reader=exporter.reader,
        kld_mean=found.parity_kld if found.exact_kld is None else found.exact_kld,
        kld_limit=exporter.parity_kld,
        tokens=found.exact_tokens if exact else found.parity_tokens,
        exact=exact,
        kld_as_run=found.parity_kld,
    )
    if not parity.passed:
        raise ParityError(
            _explain(parity), where=artifact.format, fix="please report this with the recipe: it is our bug"
        )
    return ArtifactRecord(
        artifact.format,
        artifact.path.name,
        folder_bytes(artifact.path),
        bits,
        parity,
        found.quality,
        found.performance,
    )


def _weight_bytes_per_token(prepared: Prepared, exporter: Exporter, artifact: Artifact) -> int:
    """Bytes of weights that one decoding step reads: all but an embedding that is not also the head."""
    skipped = None if prepared.spec.tied else prepared.spec.family.embedding
    return sum(item.bytes for item in exporter.inspect(artifact) if item.layer is None or item.layer != skipped)


def _explain(parity: Parity) -> str:
    lines = []
    if parity.mismatched:
        shown = ", ".join(parity.mismatched[:MISMATCHES_SHOWN])
        lines.append(
            f"{len(parity.mismatched)} of {parity.tensors} tensors read back by {parity.reader} differ: {shown}"
        )
    if not parity.kld_mean <= parity.kld_limit:
        lines.append(
            f"logits differ from the quantised torch model by {parity.kld_mean:.3g} nats over {parity.tokens} tokens; "
            f"the limit is {parity.kld_limit:g}"
        )
    return "\n".join(lines)
