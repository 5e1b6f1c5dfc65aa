"""Divergence, agreement and perplexity against naive float64 computations and answers known by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compress.errors import CompressError, InputError
from compress.runner import quality
from compress.runner.process import QualitySettings

F32 = NDArray[np.float32]


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """The definition, in float64."""
    shifted = logits.astype(np.float64) - logits.astype(np.float64).max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def naive_kld(reference: F32, other: F32) -> NDArray[np.float64]:
    p, q = log_softmax(reference), log_softmax(other)
    result: NDArray[np.float64] = (np.exp(p) * (p - q)).sum(-1)
    return result


def pair(vocab: int, count: int, sharpness: float, noise: float, seed: int = 0) -> tuple[F32, F32]:
    """Logits and a noisy copy; some positions are certain of one token, as real models often are."""
    rng = np.random.default_rng(seed)
    reference = rng.normal(0, sharpness, (count, vocab)).astype(np.float32)
    reference[::3, 1] += 12
    return reference + 30, reference + rng.normal(0, noise, (count, vocab)).astype(np.float32) - 5


class Replay:
    """A runtime whose logits are given: window after window."""

    def __init__(self, windows: F32) -> None:
        self.windows = iter(windows)

    def load(self, entry: Path, threads: int, context: int) -> None: ...

    def prefill(self, tokens: NDArray[np.int64], all_logits: bool = False) -> F32:
        assert all_logits
        logits: F32 = next(self.windows)
        assert len(tokens) == len(logits)
        return logits

    def decode(self, token: int) -> F32:
        raise AssertionError("scoring never decodes")

    def describe(self) -> dict[str, Any]:
        return {"threads": 1}

    def close(self) -> None: ...


@pytest.mark.parametrize("vocab", [2, 255, 256, 257, 5000])
@pytest.mark.parametrize(("sharpness", "noise"), [(0.5, 0.01), (3.0, 0.1), (8.0, 4.0)])
def test_divergence_matches_float64_within_1e_7(vocab: int, sharpness: float, noise: float) -> None:
    reference, other = pair(vocab, 70, sharpness, noise)
    rows = quality.compare(reference, other, np.zeros(70, dtype=np.int64))
    expected = naive_kld(reference, other)
    assert abs(rows.kld.mean() - expected.mean()) < 1e-7 * max(1.0, expected.mean())
    np.testing.assert_allclose(rows.kld, expected, atol=1e-6, rtol=1e-6)


def test_divergence_stays_exact_over_a_real_vocabulary() -> None:
    reference, other = pair(49152, 40, 2.5, 0.02)
    rows = quality.compare(reference, other, np.zeros(40, dtype=np.int64), threads=2)
    expected = naive_kld(reference, other)
    assert abs(rows.kld.mean() - expected.mean()) < 1e-7
    assert np.abs(rows.kld - expected).max() < 1e-6


def test_likelihoods_match_float64_and_leave_out_the_last_position() -> None:
    reference, other = pair(300, 33, 3.0, 0.5)
    tokens = np.random.default_rng(1).integers(0, 300, 33)
    rows = quality.compare(reference, other, tokens)
    positions = np.arange(32)
    np.testing.assert_allclose(rows.nll, -log_softmax(other)[positions, tokens[1:]], atol=1e-6)
    np.testing.assert_allclose(rows.nll_reference, -log_softmax(reference)[positions, tokens[1:]], atol=1e-6)


def test_known_answer() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    rows = quality.compare(
        np.log(p).astype(np.float32)[None].repeat(2, 0),
        np.log(q).astype(np.float32)[None].repeat(2, 0),
        np.array([0, 1]),
    )
    np.testing.assert_allclose(rows.kld, 0.25 * math.log(2), rtol=1e-6)
    np.testing.assert_allclose(rows.nll, [math.log(2)], rtol=1e-6)
    np.testing.assert_allclose(rows.nll_reference, [math.log(4)], rtol=1e-6)
    assert rows.agree.tolist() == [False, False]


def test_equal_logits_diverge_by_nothing_and_a_shift_changes_nothing() -> None:
    reference, _ = pair(1000, 10, 3.0, 0.0)
    zeros = np.zeros(10, dtype=np.int64)
    assert quality.compare(reference, reference.copy(), zeros).kld.max() == 0.0
    shifted = quality.compare(reference, reference - np.float32(16), zeros)
    assert shifted.kld.max() < 1e-6
    assert shifted.agree.all()


def test_chunks_and_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, other = pair(300, 65, 3.0, 0.5)
    tokens = np.arange(65)
    whole = quality.compare(reference, other, tokens)
    monkeypatch.setattr(quality, "_CHUNK_BYTES", 7 * 300 * 4)
    chunked = quality.compare(reference, other, tokens, threads=3)
    np.testing.assert_array_equal(whole.kld, chunked.kld)
    np.testing.assert_array_equal(whole.nll, chunked.nll)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("whose", ["artifact", "reference"])
def test_logits_that_are_not_numbers_are_an_error_that_says_whose(bad: float, whose: str) -> None:
    logits = dict(zip(("reference", "artifact"), pair(300, 20, 3.0, 0.5), strict=True))
    logits[whose][13, 299] = bad
    with pytest.raises(CompressError, match=f"the {whose}'s logits are not finite at 1 of 20 positions, first at 13"):
        quality.compare(logits["reference"], logits["artifact"], np.arange(20))


def test_another_vocabulary_or_a_token_outside_it_is_refused() -> None:
    reference, other = pair(300, 8, 3.0, 0.5)
    with pytest.raises(CompressError, match=r"\[8, 299\], the reference \[8, 300\]"):
        quality.compare(reference, other[:, :299], np.arange(8))
    with pytest.raises(InputError, match="token 300 is outside the vocabulary of 300"):
        quality.compare(reference, other, np.full(8, 300))


def write(folder: Path, windows: int = 3, length: int = 12, vocab: int = 40) -> tuple[QualitySettings, F32, F32]:
    rng = np.random.default_rng(3)
    reference = rng.normal(0, 3, (windows, length, vocab)).astype(np.float32)
    other = reference + rng.normal(0, 0.3, reference.shape).astype(np.float32)
    tokens = rng.integers(0, vocab, (windows, length))
    for name, array in (("tokens", tokens), ("reference", reference), ("parity", other[:2])):
        np.save(folder / f"{name}.npy", array)
    reference.tofile(folder / "reference.f32")
    paths = {name: str(folder / f"{name}.npy") for name in ("tokens", "reference", "parity")}
    return QualitySettings(**paths), reference, other


def test_score_joins_windows(tmp_path: Path) -> None:
    settings, reference, other = write(tmp_path)
    files = quality.open_files(settings)
    scored = quality.score(Replay(other), files, threads=2)
    assert scored.quality is not None
    kld = naive_kld(reference, other).reshape(-1)
    assert scored.quality.kld_mean == pytest.approx(kld.mean(), abs=1e-7)
    assert scored.quality.kld_p99 == pytest.approx(np.quantile(kld, 0.99), abs=1e-6)
    assert scored.quality.top1_agreement == np.mean(reference.argmax(-1) == other.argmax(-1))
    assert (scored.quality.windows, scored.quality.tokens) == (3, 36)
    for logits, perplexity in ((other, scored.quality.perplexity), (reference, scored.quality.perplexity_reference)):
        picked = np.take_along_axis(log_softmax(logits)[:, :-1], files.tokens[:, 1:, None], -1)
        assert perplexity == pytest.approx(math.exp(-picked.mean()), rel=1e-6)
    assert scored.parity_kld == 0.0
    assert scored.parity_tokens == 24


def test_parity_alone_runs_only_its_own_windows(tmp_path: Path) -> None:
    settings, _, other = write(tmp_path)
    files = quality.open_files(QualitySettings(settings.tokens, parity=settings.parity))
    scored = quality.score(Replay(other[:2]), files, threads=1)
    assert scored.quality is None
    assert (scored.parity_kld, scored.parity_tokens) == (0.0, 24)


def test_raw_logits_are_read_by_size(tmp_path: Path) -> None:
    settings, reference, _ = write(tmp_path)
    files = quality.open_files(QualitySettings(settings.tokens, str(tmp_path / "reference.f32")))
    assert files.reference is not None
    np.testing.assert_array_equal(files.reference, reference)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    settings, reference, _ = write(tmp_path)
    np.save(tmp_path / "short.npy", reference[:2])
    np.save(tmp_path / "double.npy", reference.astype(np.float64))
    np.save(tmp_path / "flat.npy", np.arange(12))
    (tmp_path / "odd.f32").write_bytes(b"\0" * 4 * 37)
    for name, message in (("short.npy", r"\[2, 12, 40\]"), ("double.npy", "float64"), ("odd.f32", "37 numbers")):
        with pytest.raises(InputError, match=message):
            quality.open_files(QualitySettings(settings.tokens, str(tmp_path / name)))
    with pytest.raises(InputError, match=r"int64 \[windows"):
        quality.open_files(QualitySettings(str(tmp_path / "flat.npy"), settings.reference))
    with pytest.raises(InputError, match=r"(?s)no file .*gone.npy.*no file .*lost.npy"):
        quality.open_files(QualitySettings(str(tmp_path / "gone.npy"), str(tmp_path / "lost.npy")))


def test_a_perplexity_that_overflows_is_an_error(tmp_path: Path) -> None:
    settings, reference, _ = write(tmp_path)
    hopeless = np.full_like(reference, 0)
    hopeless[:, :, 0] = 1e4
    np.save(tmp_path / "tokens.npy", np.ones((3, 12), dtype=np.int64))
    with pytest.raises(CompressError, match="overflows"):
        quality.score(Replay(hopeless), quality.open_files(settings), threads=1)
