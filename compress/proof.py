"""What each artifact really is: read back bit for bit, run in its own runtime, compared, measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from compress.activations import Spool
from compress.errors import ParityError
from compress.kv import FLOAT_CACHE
from compress.models.decoder import Decoder
from compress.prepare import PARITY_WINDOWS, Prepared
from compress.protocols import Artifact, Exporter
from compress.report import ArtifactRecord, Parity
from compress.runner.process import CHOOSES_CACHE, Job, PerformanceSettings, QualitySettings, run_job
from compress.runner.quality import compare
from compress.runner.streaming import stream
from compress.session import CompressedModel, Progress
from compress.workspace import folder_bytes

MISMATCHES_SHOWN = 10
NOISES = 4
"""How many times a quantised cache's own noise an artifact may differ from torch, above what a float cache may."""
REPORT_IT = "please report this with the recipe: it is our bug"
STORED_EXACTLY = (torch.float32,)
STORED_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Types that a layer in floating point may be stored in."""


@dataclass(frozen=True)
class Evidence:
    """Files that every artifact is compared with: token windows, and logits of the two torch models."""

    tokens: Path
    reference: Path | None
    parity: Path
    noise: float = 0.0
    """KLD in nats that a quantised cache makes of the last bits of sums; 0 for a float one."""


def write_logits(decoder: Decoder, tokens: Tensor, path: Path, label: str, progress: Progress) -> None:
    """Logits float32 [windows, length, vocab] of int64 ``tokens`` [windows, length] as an .npy file. OSError passes."""
    shape = (*tokens.shape, decoder.spec.vocab_size)
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    # Not a memory map: on a full disk the first touch of its pages kills the process.
    with path.open("wb") as file, progress(label, decoder.spec.layers + len(tokens)) as advance:
        np.lib.format.write_array_header_2_0(file, header)
        for logits in decoder.logits(tokens, advance):
            file.write(logits.numpy().astype("<f4", order="C", copy=False).data)
            advance(1)


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
        original = Decoder(prepared.original, spool=Spool(folder / "hidden"))
        write_logits(original, tokens, evidence.reference or folder, "reference logits", progress)
    fake_quantised = Decoder(prepared.checkpoint, model.parameter, Spool(folder / "hidden"), kv=model.kv)
    write_logits(fake_quantised, tokens[:PARITY_WINDOWS], evidence.parity, "logits to compare with", progress)
    if any(model.kv(prepared.spec.family.block.format(index=index)) for index in range(prepared.spec.layers)):
        evidence = replace(evidence, noise=_rounding_noise(prepared, model, tokens[:1], evidence.parity))
    return evidence


def read_back(model: CompressedModel, exporter: Exporter, artifact: Artifact, progress: Progress) -> list[str]:
    """Layers whose weights in the file differ, in any bit, from what the passes chose.

    A layer in floating point must be what the model has, or that rounded to the nearest fp16 or bf16 numbers. The two
    matrices beside a quantised layer are read back under names of their own.
    """
    layers, wrong, seen = list(stored_parts(model)), [], set()
    with progress(f"reading {artifact.format} back", len(layers)) as advance:
        for layer, stored in exporter.read_back(artifact, layers):
            seen.add(layer)
            owner, _, part = layer.partition(BESIDE)
            types = STORED_EXACTLY if owner in model.schemes else STORED_FLOATS
            chosen = _chosen(model, owner, part)
            if not any(np.array_equal(stored, chosen.to(kind).float().numpy()) for kind in types):
                wrong.append(layer)
            advance(1)
    return wrong + [f"{layer} (not in the file)" for layer in layers if layer not in seen]


BESIDE = ".lowrank."
"""Between a layer's name and ``u`` or ``v``, the names of the matrices beside it."""


def stored_parts(model: CompressedModel) -> Iterator[str]:
    """Every layer, and the matrices beside those that have some."""
    for layer in model.layers():
        yield layer
        if model.residual(layer) is not None:
            yield from (f"{layer}{BESIDE}{part}" for part in ("u", "v"))


def _chosen(model: CompressedModel, layer: str, part: str) -> Tensor:
    """float32: a layer's weight as a file stores it, without what lies beside it; or that ``part``."""
    if part:
        beside: Tensor = getattr(model.residual(layer), part)
        return beside
    return model.quantized(layer).base() if layer in model.schemes else model.weight(layer)


def _rounding_noise(prepared: Prepared, model: CompressedModel, tokens: Tensor, known: Path) -> float:
    """KLD in nats of the fake-quantised model from itself with every norm a last bit larger, over ``tokens``.

    A quantised cache rounds what the order of a sum changes: two right programs differ by whole steps of a few numbers.
    """

    def nudged(name: str) -> Tensor:
        weight = model.parameter(name)
        return weight * (1 + 2**-23) if weight.dim() == 1 else weight

    logits = next(Decoder(prepared.checkpoint, nudged, kv=model.kv).logits(tokens)).numpy()
    found = compare(np.load(known, mmap_mode="r")[0], logits, tokens[0].numpy(), prepared.threads)
    return max(0.0, float(found.kld.mean()))


def prove(
    prepared: Prepared,
    model: CompressedModel,
    exporter: Exporter,
    artifact: Artifact,
    evidence: Evidence,
    progress: Progress,
) -> ArtifactRecord:
    """Check and measure one artifact; ParityError if it is not what the passes chose."""
    try:
        wrong = read_back(model, exporter, artifact, progress)
    except KeyError as error:
        raise ParityError(str(error.args[0]), where=artifact.format, fix=REPORT_IT) from error
    if wrong:
        shown = ", ".join(wrong[:MISMATCHES_SHOWN]) + (", ..." if len(wrong) > MISMATCHES_SHOWN else "")
        raise ParityError(
            f"{len(wrong)} of {len(prepared.shapes)} tensors read back by {exporter.reader} differ: {shown}",
            where=artifact.format,
            fix=REPORT_IT,
        )
    found = run_job(_job(prepared, exporter, artifact, evidence), progress)
    assert found.parity_kld is not None
    exact = found.exact_kld is not None
    parity = Parity(
        tensors=len(prepared.shapes),
        mismatched=(),
        reader=exporter.reader,
        kld_mean=found.parity_kld if found.exact_kld is None else found.exact_kld,
        kld_limit=exporter.parity_kld + NOISES * evidence.noise,
        tokens=found.exact_tokens if exact else found.parity_tokens,
        exact=exact,
        kld_as_run=found.parity_kld,
    )
    if not parity.passed:
        raise ParityError(
            f"logits differ from the quantised torch model by {parity.kld_mean:.3g} nats over {parity.tokens} tokens; "
            f"the limit is {parity.kld_limit:g}",
            where=artifact.format,
            fix=REPORT_IT,
        )
    return ArtifactRecord(
        artifact.format,
        artifact.path.name,
        folder_bytes(artifact.path),
        _bits_per_weight(prepared, exporter, artifact),
        parity,
        found.quality,
        found.performance,
    )


def _job(prepared: Prepared, exporter: Exporter, artifact: Artifact, evidence: Evidence) -> Job:
    """What to find out about ``artifact`` in its own process."""
    wanted = prepared.recipe.measure
    performance = None
    if wanted is not None:
        performance = PerformanceSettings(
            wanted.prompt_tokens,
            wanted.generate_tokens,
            wanted.repeats,
            str(evidence.tokens),
            _weight_bytes_per_token(prepared, exporter, artifact),
            stream(wanted.window, wanted.sinks),
        )
    reference = None if evidence.reference is None else str(evidence.reference)
    quality = QualitySettings(str(evidence.tokens), reference, str(evidence.parity))
    cache = wanted.cache if wanted is not None and artifact.format in CHOOSES_CACHE else FLOAT_CACHE
    return Job(artifact.format, str(artifact.path / artifact.entry), prepared.threads, performance, quality, cache)


def _bits_per_weight(prepared: Prepared, exporter: Exporter, artifact: Artifact) -> float:
    """Bits that the file stores for the linear layers of the blocks, over the number of their weights."""
    linears = set(prepared.spec.all_linears())
    weights = sum(rows * columns for layer, (rows, columns) in prepared.shapes.items() if layer in linears)
    return 8 * sum(item.bytes for item in exporter.inspect(artifact) if item.layer in linears) / weights


def _weight_bytes_per_token(prepared: Prepared, exporter: Exporter, artifact: Artifact) -> int:
    """Bytes of weights that one decoding step reads: all but an embedding that is not also the head."""
    skipped = None if prepared.spec.tied else prepared.spec.family.embedding
    return sum(item.bytes for item in exporter.inspect(artifact) if item.layer is None or item.layer != skipped)
