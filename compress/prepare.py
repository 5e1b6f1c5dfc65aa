"""Everything that can be known before any work: passes and exporters against the model, texts, disk and memory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from calibration.builtin import Part
from calibration.errors import DataError
from calibration.text import load_texts
from calibration.windows import Windows, make_windows
from compress.errors import InputError
from compress.models.checkpoint import Checkpoint
from compress.models.decoder import Decoder
from compress.models.sources import open_model
from compress.models.topology import DecoderSpec, describe
from compress.recipe import Calibration, Evaluate, Recipe, Step
from compress.runner.threads import resolve_threads
from compress.scheme import INT8_G32, QuantScheme
from compress.session import CompressedModel, Progress, Session, no_progress
from compress.store import Store

PARITY_WINDOWS = 2
"""Evaluation windows on which each artifact's logits are compared with the fake-quantised model."""
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Prepared:
    """A recipe that has met its model, and nothing is known to stand in the way."""

    recipe: Recipe
    checkpoint: Checkpoint
    spec: DecoderSpec
    shapes: Mapping[str, tuple[int, int]]
    pinned: Mapping[str, QuantScheme | None]
    passes: tuple[Step, ...]
    """In the order in which they run."""
    threads: int

    def of_scope(self, scope: str) -> list[Step]:
        """The passes over the whole model, or those over one block at a time."""
        return [step for step in self.passes if step.value.scope == scope]

    @property
    def needs_tokens(self) -> bool:
        """Whether any pass looks at calibration data."""
        return any(step.value.scope == "model" or "inputs" in step.value.reads for step in self.passes)

    def compressed(self, store: Store) -> CompressedModel:
        """The model as far as ``store`` has it."""
        source, tied = self.checkpoint, self.spec.tied
        names = tuple(source.files)
        return CompressedModel(
            source.config, source.folder, source.name, tied, self.shapes, store, source.tensor, names
        )

    def session(self, workdir: Path, tokens: Tensor, progress: Progress) -> Session:
        """The state of a run with its blocks under ``workdir``; the passes have planned what they can so far."""
        store = Store(workdir / "blocks")
        decoder = Decoder(self.checkpoint, self.compressed(store).parameter)
        plan = {layer: scheme for layer, scheme in self.pinned.items() if scheme is not None}
        seed = self.recipe.calibration.seed
        session = Session(decoder, tokens, store, self.shapes, self.pinned, plan, seed, progress)
        complaints = [text for step in self.passes for text in step.value.check(session)]
        if complaints:
            raise InputError("\n".join(complaints))
        return session


def prepare(recipe: Recipe) -> tuple[Prepared, Session, list[str]]:
    """Meet the model, and refuse what cannot work: every complaint at once, in seconds.

    Returns also a session without tokens, which holds the first plan, and remarks for the report.
    """
    threads = resolve_threads(recipe.measure.threads if recipe.measure else "auto")
    checkpoint = open_model(recipe.model)
    spec = describe(checkpoint.config, checkpoint.folder / "config.json")
    shapes = layer_shapes(checkpoint, spec)
    pinned: dict[str, QuantScheme | None] = {**dict.fromkeys(spec.ends, INT8_G32), **recipe.pinned(list(shapes))}
    prepared = Prepared(recipe, checkpoint, spec, shapes, pinned, in_order(recipe.passes), threads)
    session = prepared.session(Path(), torch.zeros(0, 1, dtype=torch.int64), no_progress)
    complaints: list[str] = []
    remarks: list[str] = []
    for step in recipe.export:
        complaints += [f"{step.name}: {text}" for text in step.value.check(spec, session.plan, shapes)]
        remarks += [f"{step.name}: {text}" for text in step.value.check_tokenizer(checkpoint.folder, spec.vocab_size)]
    for name, section in (("calibration", recipe.calibration), ("evaluate", recipe.evaluate)):
        if section is not None and section.sequence_length > spec.max_positions:
            complaints.append(
                f"{name}.sequence_length: {section.sequence_length} tokens, and the model takes {spec.max_positions}"
            )
    if complaints:
        fix = "choose another scheme or exporter, or leave such layers in floating point with ignore: [...]"
        raise InputError("\n".join(complaints), fix=fix)
    return prepared, session, remarks


def in_order(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The passes so that each runs after those that write what it reads; otherwise as the recipe has them.

    InputError if two passes quantise, or passes wait for each other.
    """
    quantisers = [step for step in steps if "quantized" in step.value.writes]
    if len(quantisers) > 1:
        lines = [f"{step.where or step.name}: writes quantised layers" for step in quantisers]
        raise InputError("only one pass can quantise\n" + "\n".join(lines), fix="keep one of them")
    waiting, done = list(steps), []
    while waiting:
        ready = next((s for s in waiting if not any(_feeds(other, s) for other in waiting if other is not s)), None)
        if ready is None:
            names = ", ".join(step.name for step in waiting)
            raise InputError(f"passes wait for each other: {names}", fix="remove one of them")
        waiting.remove(ready)
        done.append(ready)
    return tuple(done)


def _feeds(first: Step, second: Step) -> bool:
    # Two transforms of the weights keep the recipe's order.
    return bool((first.value.writes - second.value.writes) & second.value.reads)


def layer_shapes(checkpoint: Checkpoint, spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """Every layer that can be quantised -> (outputs, inputs), embedding first; InputError lists missing tensors."""
    layers = [spec.ends[0], *spec.all_linears(), *spec.ends[1:]]
    missing = [f"{layer}.weight" for layer in layers if f"{layer}.weight" not in checkpoint.files]
    if missing:
        shown = "\n".join(missing[:20]) + (f"\n... and {len(missing) - 20} more" if len(missing) > 20 else "")
        raise InputError(
            f"the checkpoint lacks tensors that its config.json promises\n{shown}",
            where=str(checkpoint.folder),
            fix="save the model again (a tied head needs tie_word_embeddings: true)",
        )
    shapes = {layer: checkpoint.shape(f"{layer}.weight") for layer in layers}
    return {layer: (shape[0], shape[1]) for layer, shape in shapes.items()}


def token_windows(checkpoint: Checkpoint, section: Calibration | Evaluate, part: Part) -> Windows:
    """The windows that ``section`` asks for: a seeded choice for calibration, the first ones for evaluation."""
    encode, separator = _tokenizer(checkpoint)
    try:
        windows = make_windows(
            load_texts(section, part),
            encode,
            section.samples if isinstance(section, Calibration) else section.windows,
            section.sequence_length,
            seed=section.seed if isinstance(section, Calibration) else None,
            separator_id=separator,
            what=part,
        )
    except DataError as error:
        raise InputError(error.what, where=error.where, fix=error.fix) from error
    largest, known = int(windows.tokens.max()), checkpoint.config["vocab_size"]
    if largest >= known:
        raise InputError(
            f"the tokenizer gives id {largest}, and the model knows {known}",
            where=str(checkpoint.folder),
            fix="put the model's own tokenizer files into the folder",
        )
    return windows


def _tokenizer(checkpoint: Checkpoint) -> tuple[Any, int | None]:
    """(texts to token ids without special tokens, the id that separates documents)."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"the tokenizer cannot be read: {reason}",
            where=str(checkpoint.folder),
            fix="save the tokenizer beside the model with save_pretrained",
        ) from error
    tokenizer.model_max_length = 1 << 62
    return lambda texts: tokenizer(texts, add_special_tokens=False).input_ids, tokenizer.eos_token_id


def check_room(prepared: Prepared, folder: Path) -> dict[str, int]:
    """Disk and memory that the run will need, in bytes; InputError if there is clearly not enough of one."""
    recipe, spec = prepared.recipe, prepared.spec
    weights = sum(rows * columns for rows, columns in prepared.shapes.values())
    largest = max(rows * columns for rows, columns in prepared.shapes.values())
    logits = 0
    if recipe.evaluate is not None:
        window = recipe.evaluate.sequence_length * spec.vocab_size * FLOAT_BYTES
        logits = window * (recipe.evaluate.windows + PARITY_WINDOWS)
    disk = weights + logits + len(recipe.export) * weights
    block = sum(prepared.shapes[layer][0] * prepared.shapes[layer][1] for layer in spec.block_linears(0))
    activations = 0
    if prepared.needs_tokens:
        activations = recipe.calibration.samples * recipe.calibration.sequence_length * spec.hidden_size
    memory = FLOAT_BYTES * (4 * block + 2 * largest + 3 * activations)
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free_disk, free_memory = shutil.disk_usage(parent).free, psutil.virtual_memory().available
    problems = []
    if disk > free_disk:
        problems.append(f"disk: about {disk / 1e9:.1f} GB needed, {free_disk / 1e9:.1f} GB free at {parent}")
    if memory > free_memory:
        problems.append(f"memory: about {memory / 1e9:.1f} GB needed, {free_memory / 1e9:.1f} GB available")
    if problems:
        raise InputError(
            "not enough room for this run\n" + "\n".join(problems),
            fix="write elsewhere with --out, or ask for fewer or shorter calibration samples and evaluation windows",
        )
    return {"disk_bytes": disk, "memory_bytes": memory}
