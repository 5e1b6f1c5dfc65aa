"""Everything that can be known before any work: passes and exporters against the model, and texts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compress import registry
from compress.activations import Spool
from compress.errors import InputError
from compress.fields import plain
from compress.kv import FLOAT_CACHE
from compress.models.checkpoint import Checkpoint
from compress.models.decoder import Decoder
from compress.models.sources import open_model
from compress.models.topology import DecoderSpec, describe
from compress.protocols import SCOPES, Resource
from compress.recipe import Recipe, Step
from compress.report import PassRecord
from compress.runner.observe import LIBRARIES
from compress.runner.process import CHOOSES_CACHE
from compress.runner.streaming import Streaming
from compress.runner.threads import resolve_threads
from compress.scheme import INT8_G32, QuantScheme
from compress.session import CompressedModel, Progress, Session, no_progress
from compress.store import Store

PARITY_WINDOWS = 2
"""Evaluation windows on which each artifact's logits are compared with the fake-quantised model."""
FLOAT_BYTES = 4
FROM_TOKENS: frozenset[Resource] = frozenset({"inputs", "activations"})
"""What is made of calibration tokens."""

BFLOAT16 = ("avx512_bf16", "amx_bf16")
"""What torch calls the instructions of x86 processors that multiply in bfloat16."""


@dataclass(frozen=True)
class Prepared:
    """A recipe that has met its model, and nothing is known to stand in the way."""

    recipe: Recipe
    original: Checkpoint
    checkpoint: Checkpoint
    """What is compressed: the original, or what the passes of scope "source" made of it."""
    rewrites: tuple[PassRecord, ...]
    """What those passes did."""
    spec: DecoderSpec
    shapes: Mapping[str, tuple[int, int]]
    pinned: Mapping[str, QuantScheme | None]
    passes: tuple[Step, ...]
    """In the order in which they run."""
    threads: int

    @property
    def writes_text(self) -> bool:
        """Whether the model writes its own calibration text."""
        return self.needs_tokens and self.recipe.calibration.source == "self"

    def of_scope(self, scope: str) -> list[Step]:
        """The passes over the checkpoint ("source"), over the whole model, or over one block at a time."""
        return [step for step in self.passes if step.value.scope == scope]

    @property
    def needs_tokens(self) -> bool:
        """Whether any pass looks at calibration data."""
        return any(step.value.scope == "model" or step.value.reads & FROM_TOKENS for step in self.passes)

    @property
    def residual_rank(self) -> int:
        """Rank of what lies beside each quantised linear layer of a block; 0: nothing."""
        return max((step.value.rank for step in self.passes if "residual" in step.value.writes), default=0)

    def stored_bits(self, scheme: QuantScheme | None, shape: tuple[int, int]) -> int:
        """Bits of a weight ``shape`` (None: in floating point) in the artifact that takes most for it."""
        bits: int = max(step.value.stored_bits(scheme, shape) for step in self.recipe.export)
        return bits

    @property
    def context_length(self) -> int:
        """Tokens of the longest sequence that the model and every artifact compute."""
        taken: list[int] = [step.value.context_length(self.spec) for step in self.recipe.export]
        return min([self.spec.max_positions, *taken])

    def compressed(self, store: Store, float_activations: Iterable[str] = ()) -> CompressedModel:
        """The model as far as ``store`` has it; ``float_activations`` as :class:`CompressedModel` has them."""
        source, tied = self.checkpoint, self.spec.tied
        names = tuple(source.files)
        return CompressedModel(
            source.config,
            source.folder,
            source.name,
            tied,
            self.shapes,
            store,
            source.tensor,
            names,
            frozenset(float_activations),
        )

    def session(
        self,
        workdir: Path,
        tokens: Tensor,
        progress: Progress,
        real: Tensor | None = None,
        scratch: Path | None = None,
    ) -> Session:
        """The state of a run with its blocks under ``workdir``; the passes have planned what they can so far.

        ``real`` as in :class:`Session`. Large hidden states go to files under ``scratch``.
        """
        store = Store(workdir / "blocks")
        spool, precision = Spool(scratch and scratch / "hidden"), self.recipe.calibration.precision
        model = self.compressed(store)
        decoder = Decoder(self.checkpoint, model.parameter, spool, precision, model.kv)
        plan = {layer: scheme for layer, scheme in self.pinned.items() if scheme is not None}
        seed = self.recipe.calibration.seed
        together = _disjoint(layers for step in self.recipe.export for layers in step.value.one_scheme(self.spec))
        session = Session(
            decoder, tokens, store, self.shapes, self.pinned, plan, seed, progress, real, self.stored_bits, together
        )
        session.residual_rank = self.residual_rank
        complaints = [text for step in self.passes for text in step.value.check(session)]
        if complaints:
            raise InputError("\n".join(complaints))
        return session


def prepare(recipe: Recipe) -> tuple[Prepared, Session, list[str]]:
    """Meet the model, and refuse what cannot work: every complaint at once, in seconds.

    Returns also a session without tokens, which holds the first plan, and remarks for the report.
    """
    threads = resolve_threads(recipe.measure.threads if recipe.measure else "auto")
    original, steps = open_model(recipe.model), in_order(recipe.passes)
    checkpoint, rewrites = rewrite(original, steps)
    spec = describe(checkpoint.config, checkpoint.folder / "config.json")
    shapes = layer_shapes(checkpoint, spec)
    planned = any(step.value.scope == "model" and step.value.plans_ends for step in steps)
    ends: dict[str, QuantScheme | None] = {} if planned else dict.fromkeys(spec.ends, INT8_G32)
    pinned = {**ends, **recipe.pinned(list(shapes))}
    prepared = Prepared(recipe, original, checkpoint, rewrites, spec, shapes, pinned, steps, threads)
    session = prepared.session(Path(), torch.zeros(0, 1, dtype=torch.int64), no_progress)
    complaints = [*_missing_runtimes(recipe), *_too_long(recipe, spec), *_unfit_caches(recipe, spec)]
    unfit: list[str] = []
    remarks = [*original.remarks, *_slow_precision(recipe)]
    plans = [session.plan, *(plan for step in prepared.of_scope("model") for plan in step.value.candidates(session))]
    biased = {layer for layer in shapes if f"{layer}.bias" in checkpoint.files}
    for step in recipe.export:
        found = [text for plan in plans for text in step.value.check(spec, plan, shapes, session.kv, biased)]
        unfit += [f"{step.name}: {text}" for text in dict.fromkeys(found)]
        if session.residual_rank and not getattr(step.value, "holds_residual", False):
            unfit.append(
                f"{step.name}: the file has no place for a low-rank product beside a layer: an adapter file would have "
                "to go with it; leave that pass out, or this exporter"
            )
        if any("levels" in other.value.writes for other in steps) and not getattr(step.value, "has_levels", False):
            remarks.append(
                f"{step.name}: its runtime decides itself where activations are rounded: no pass changes that"
            )
        told = [text for plan in plans for text in step.value.remarks(spec, plan)]
        told += step.value.check_tokenizer(checkpoint.folder, spec.vocab_size)
        remarks += [f"{step.name}: {text}" for text in dict.fromkeys(told)]
    if complaints or unfit:
        fix = "choose another scheme or exporter, or leave such layers in floating point with ignore: [...]"
        raise InputError("\n".join(complaints + unfit), fix=fix if unfit else "")
    return prepared, session, remarks


def _disjoint(groups: Iterable[Sequence[str]]) -> list[list[str]]:
    """``groups`` of layers; those that share a layer become one: two formats may each want some of them together."""
    found: dict[str, list[str]] = {}
    for group in groups:
        whole = list(dict.fromkeys(layer for member in group for layer in found.get(member, [member])))
        found |= dict.fromkeys(whole, whole)
    return list({id(whole): whole for whole in found.values()}.values())


def rewrite(checkpoint: Checkpoint, steps: Sequence[Step]) -> tuple[Checkpoint, tuple[PassRecord, ...]]:
    """The checkpoint as the passes of scope "source" leave it, and what they did; nothing is computed yet."""
    records = []
    for step in steps:
        if step.value.scope == "source":
            # Its tensors are checked here: what is computed from them always has the right shapes.
            Decoder(checkpoint)
            checkpoint, summary = step.value.rewrite(checkpoint)
            records.append(PassRecord(step.name, plain(step.value), 0.0, summary=summary))
    return checkpoint, tuple(records)


def _missing_runtimes(recipe: Recipe) -> Iterator[str]:
    """Artifacts that nothing here could run, which every run does."""
    for step in recipe.export:
        format_ = step.value.format
        if format_ not in registry.names("runtimes"):
            yield f"{step.name}: no runtime is known for the format {format_}, and each artifact is run"
        elif (library := LIBRARIES.get(format_)) is not None and importlib.util.find_spec(library) is None:
            yield f"{step.name}: {library}, which runs the artifact, is not installed: install it as the README says"
        elif recipe.measure is not None and recipe.measure.window is not None:
            yield from _no_window(step.name, format_)


def _no_window(name: str, format_: str) -> Iterator[str]:
    """An artifact whose runtime keeps all of its cache."""
    if not issubclass(registry.load("runtimes", format_), Streaming):
        yield f"{name}: measure.window: this format's runtime has no window over its cache; leave it out"


def _slow_precision(recipe: Recipe) -> Iterator[str]:
    """Where bfloat16 would be emulated. Of processors that are not x86 torch does not say enough."""
    found = torch.cpu.get_capabilities()
    if recipe.calibration.precision != "bfloat16" or found["architecture"] != "x86_64":
        return
    if not any(found[name] for name in BFLOAT16):
        yield "precision: this CPU has no bfloat16 instructions: float32 is faster here, by far"


def _too_long(recipe: Recipe, spec: DecoderSpec) -> Iterator[str]:
    """Sequences beyond the model's positions, and those beyond what a file computes."""
    lengths = {"calibration.sequence_length": recipe.calibration.sequence_length}
    if recipe.evaluate is not None:
        lengths["evaluate.sequence_length"] = recipe.evaluate.sequence_length
    if (measure := recipe.measure) is not None and measure.window is None:
        lengths["measure.prompt_tokens + generate_tokens"] = measure.prompt_tokens + measure.generate_tokens
    for name, length in lengths.items():
        if length > spec.max_positions:
            yield f"{name}: {length} tokens, and the model takes {spec.max_positions}"
    del lengths["calibration.sequence_length"]
    for step in recipe.export:
        taken = step.value.context_length(spec)
        for name, length in lengths.items():
            if taken < length <= spec.max_positions:
                yield f"{name}: {length} tokens, and the file of {step.name} takes {taken}"


def _unfit_caches(recipe: Recipe, spec: DecoderSpec) -> Iterator[str]:
    """Types of a cache that no artifact's runtime would be given, or that this model's heads do not fit."""
    cache = recipe.measure.cache if recipe.measure else FLOAT_CACHE
    if cache == FLOAT_CACHE:
        return
    if not any(step.value.format in CHOOSES_CACHE for step in recipe.export):
        formats = ", ".join(sorted(CHOOSES_CACHE))
        yield f"measure: a cache of {cache} is for {formats} artifacts, and none is exported; ONNX has the pass kv"
    yield from (f"measure: {text}" for text in cache.complaints(spec.head_dim, spec.head_dim))


def in_order(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The passes by scope, and in a scope so that each runs after those that write what it reads.

    Otherwise they keep the recipe's order.
    InputError if no pass or more than one quantises, or passes wait for each other.
    """
    quantisers = [step for step in steps if "quantized" in step.value.writes]
    if not quantisers:
        named = ", ".join(step.name for step in steps)
        raise InputError(
            f"no pass quantises, so every weight would stay in floating point; passes: {named}",
            where="passes",
            fix="add one that does: gptq, or rtn",
        )
    if len(quantisers) > 1:
        lines = [f"{step.where or step.name}: writes quantised layers" for step in quantisers]
        raise InputError("only one pass can quantise\n" + "\n".join(lines), fix="keep one of them")
    idle = [step for step in steps if step.value.writes and not step.value.writes & _wanted(steps, step)]
    if idle:
        lines = [f"{step.where or step.name}: no other pass reads what it writes" for step in idle]
        raise InputError("\n".join(lines), fix="remove it, or add gptq after it, which reads what any pass writes")
    waiting, done = sorted(steps, key=lambda step: SCOPES.index(step.value.scope)), []
    while waiting:
        ready = next((s for s in waiting if not any(_feeds(other, s) for other in waiting if other is not s)), None)
        if ready is None:
            names = ", ".join(step.name for step in waiting)
            raise InputError(f"passes wait for each other: {names}", fix="remove one of them")
        waiting.remove(ready)
        done.append(ready)
    return tuple(done)


def _wanted(steps: Sequence[Step], writer: Step) -> frozenset[Resource]:
    """What some other pass reads, or every run needs."""
    every: frozenset[Resource] = frozenset({"quantized", "residual", "kv", "levels"})
    return every.union(*(step.value.reads for step in steps if step is not writer))


def _feeds(first: Step, second: Step) -> bool:
    # Scopes run one after another anyway. Two transforms of the weights keep the recipe's order.
    handed_on = (first.value.writes - second.value.writes) & second.value.reads
    return first.value.scope == second.value.scope and bool(handed_on)


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
