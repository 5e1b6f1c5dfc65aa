"""The token windows of a run: calibration and evaluation, read from text or written by the model itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from calibration.builtin import Part
from calibration.chat import Render
from calibration.errors import DataError
from calibration.text import RECIPE_KEYS, TextSource, load_texts
from calibration.windows import Windows, make_windows, overlap, pad_documents
from calibration.writing import Writing, write_windows
from compress.errors import InputError
from compress.models.checkpoint import Checkpoint
from compress.models.decoder import Decoder
from compress.prepare import PARITY_WINDOWS, Prepared
from compress.recipe import Calibration, Evaluate
from compress.session import Progress

OVERLAP_WARNING = 0.01
"""Share of the evaluation text found in the calibration text from which the report warns."""


def text_windows(prepared: Prepared) -> tuple[Windows, Windows]:
    """Calibration and evaluation windows; the audit says how much of the second occurs in the first.

    What the model writes itself is not there yet: :func:`written_windows` takes time, and memory for the whole model.
    """
    import torch

    recipe, checkpoint = prepared.recipe, prepared.checkpoint
    evaluate = recipe.evaluate
    if evaluate is None:
        # Parity is checked in every run, so a little text is needed all the same.
        length = min(Evaluate().sequence_length, prepared.context_length)
        evaluate = Evaluate(windows=PARITY_WINDOWS, sequence_length=length)
    evaluation = token_windows(checkpoint, evaluate, "evaluation")
    if recipe.measure is not None and evaluation.tokens.numel() < recipe.measure.prompt_tokens:
        raise InputError(
            f"the prompt is taken from the evaluation text: {recipe.measure.prompt_tokens} tokens were asked for, "
            f"and its windows have {evaluation.tokens.numel()}",
            where="measure.prompt_tokens",
            fix="ask for a shorter prompt, or for more or longer evaluation windows",
        )
    if not prepared.needs_tokens:
        return Windows(evaluation.tokens[:0], {"used": False}), evaluation
    if prepared.writes_text:
        audit = {**_asked_for(recipe.calibration), "used": True, "written": False}
        _writing(prepared)
        return Windows(torch.zeros(0, 1, dtype=torch.int64), audit), evaluation
    return _compared(token_windows(checkpoint, recipe.calibration, "calibration"), evaluation), evaluation


def written_windows(prepared: Prepared, evaluation: Windows, progress: Progress) -> Windows:
    """Calibration windows that the unquantised model writes; InputError if its predictions are not finite."""
    section = prepared.recipe.calibration
    samples, length = section.samples, section.sequence_length
    decoder, writing = Decoder(prepared.original), _writing(prepared)
    with (
        _explained(prepared.original),
        progress("writing calibration text", samples * length) as advance,
        decoder.whole() as model,
    ):
        tokens, texts = write_windows(model, writing, samples, length, advance)
    audit = {
        **_asked_for(section),
        "obtained_samples": len(tokens),
        "obtained_tokens": tokens.numel(),
        "documents": texts,
        "dropped": {},
        "tokens_sha256": hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest(),
        "written": True,
    }
    return _compared(Windows(tokens, audit), evaluation)


def token_windows(checkpoint: Checkpoint, section: Calibration | Evaluate, part: Part) -> Windows:
    """The windows that ``section`` asks for: a seeded choice for calibration, the first ones for evaluation."""
    tokenizer = _tokenizer(checkpoint)
    samples = section.samples if isinstance(section, Calibration) else section.windows
    seed = section.seed if isinstance(section, Calibration) else None
    length = section.sequence_length

    def encode(texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False).input_ids
        return ids

    with _explained(checkpoint):
        texts = load_texts(section, part, _chat_template(tokenizer, section, checkpoint, part))
        if isinstance(section, Calibration) and not section.packing:
            windows = pad_documents(texts, encode, samples, length, seed=seed, what=part)
        else:
            end = tokenizer.eos_token_id
            windows = make_windows(texts, encode, samples, length, seed=seed, separator_id=end, what=part)
    largest, known = int(windows.tokens.max()), checkpoint.config["vocab_size"]
    if largest >= known:
        raise InputError(
            f"the tokenizer gives id {largest}, and the model knows {known}",
            where=str(checkpoint.folder),
            fix="put the model's own tokenizer files into the folder",
        )
    return windows


@contextmanager
def _explained(checkpoint: Checkpoint) -> Iterator[None]:
    """What is wrong with the data, as the user's error."""
    try:
        yield
    except DataError as error:
        raise InputError(error.what, where=error.where or str(checkpoint.folder), fix=error.fix) from error


def _compared(calibration: Windows, evaluation: Windows) -> Windows:
    """``calibration`` with its overlap with the evaluation text in the audit, and a warning if there is much."""
    shared = overlap(calibration.tokens, evaluation.tokens, real=calibration.real)
    warnings = calibration.warnings
    if shared > OVERLAP_WARNING:
        warnings = (
            *warnings,
            f"{shared:.0%} of the evaluation text is in the calibration text: quality looks too good",
        )
    audit = {**calibration.audit, "used": True, "overlap_with_evaluation": shared}
    return replace(calibration, audit=audit, warnings=warnings)


def _asked_for(section: Calibration) -> dict[str, Any]:
    """The audit of text that the model writes, as far as it is known beforehand."""
    return {
        "origin": f"the model itself, seed {section.seed}, temperature {section.temperature:g}",
        "packing": True,
        "requested_samples": section.samples,
        "requested_tokens": section.samples * section.sequence_length,
        "sequence_length": section.sequence_length,
        "seed": section.seed,
    }


def _writing(prepared: Prepared) -> Writing:
    """How this model writes: from any token that is plain text, after whatever its tokenizer puts before a text."""
    import torch

    spec, section = prepared.spec, prepared.recipe.calibration
    tokenizer = _tokenizer(prepared.checkpoint)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    starts = sorted(
        token for token in set(tokenizer.get_vocab().values()) - special if token < prepared.spec.vocab_size
    )
    plain, whole = (tokenizer("a", add_special_tokens=added).input_ids for added in (False, True))
    prefix = whole[: next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)]
    ends = {*spec.eos_token_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
    return Writing(prefix, torch.tensor(starts), sorted(ends), section.seed, section.temperature)


def _chat_template(tokenizer: Any, section: TextSource, checkpoint: Checkpoint, part: Part) -> Render | None:
    """The model's chat template as a function, if ``section`` asks for it; InputError if the model has none."""
    from jinja2 import TemplateError

    if not section.chat_template:
        return None
    try:
        tokenizer.get_chat_template()
    except ValueError as error:
        raise InputError(
            "the tokenizer has no chat template",
            where=str(checkpoint.folder),
            fix=f"remove {RECIPE_KEYS[part]}.chat_template, or put the model's chat_template.jinja into the folder",
        ) from error

    def render(messages: list[dict[str, Any]]) -> str:
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False))
        except (TemplateError, TypeError) as error:
            raise ValueError(f"is refused by the chat template: {error}") from error

    return render


def _tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's own, which says nothing of long texts."""
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
    return tokenizer
