from __future__ import annotations

from pathlib import Path

import pytest
import torch

from calibration import windows
from calibration.errors import DataError
from calibration.text import Texts, TextSource, load_texts
from calibration.windows import make_windows, overlap
from tests.support import tiny_tokenizer

SEPARATOR = 999


def letters(texts: list[str]) -> list[list[int]]:
    return [[ord(character) for character in text] for text in texts]


def texts_of(*texts: str) -> Texts:
    return Texts(texts, "test", "0" * 64, {"null_rows": 2}, ("read with care",))


def test_documents_are_joined_by_the_separator_and_cut_in_order() -> None:
    made = make_windows(
        texts_of("abcd", "ef", "ghi"), letters, 4, 3, seed=None, separator_id=SEPARATOR, what="evaluation"
    )
    stream = [*map(ord, "abcd"), SEPARATOR, *map(ord, "ef"), SEPARATOR, *map(ord, "ghi")]
    assert made.tokens.dtype == torch.int64
    assert made.tokens.tolist() == [stream[0:3], stream[3:6], stream[6:9]]
    assert made.audit["tokens_available"] == 11
    assert made.audit["tokens_dropped"] == 2
    assert made.audit["documents"] == 3
    assert made.audit["dropped"] == {"null_rows": 2}


def test_a_shortfall_is_counted_and_warned_of() -> None:
    made = make_windows(texts_of("x" * 600), letters, 128, 512, seed=0, separator_id=None, what="calibration")
    assert made.tokens.shape == (1, 512)
    assert made.warnings == (
        "read with care",
        "calibration: asked for 128 samples of 512 tokens, the text has 1",
    )
    wanted = {"requested_samples": 128, "obtained_samples": 1, "requested_tokens": 128 * 512, "obtained_tokens": 512}
    assert wanted.items() <= made.audit.items()


def test_no_full_window_is_an_error_that_says_how_long_one_may_be() -> None:
    with pytest.raises(DataError, match="100 tokens, not one window of 512") as caught:
        make_windows(texts_of("x" * 100), letters, 4, 512, seed=0, separator_id=None, what="evaluation")
    assert "evaluate.sequence_length to 100 or less" in caught.value.fix
    assert "more text" in caught.value.fix


def test_a_seed_chooses_without_replacement_in_text_order() -> None:
    text = texts_of("".join(chr(100 + number) for number in range(60)))

    def chosen(seed: int | None) -> list[int]:
        made = make_windows(text, letters, 7, 3, seed=seed, separator_id=None, what="calibration")
        assert torch.equal(made.tokens, made.tokens[:, :1] + torch.arange(3))
        return made.tokens[:, 0].tolist()

    for seed in range(4):
        starts = chosen(seed)
        assert starts == sorted(set(starts))
        assert all((start - 100) % 3 == 0 for start in starts)
    assert chosen(1) == chosen(1) != chosen(2)
    assert chosen(None) == [100 + 3 * number for number in range(7)]


@pytest.mark.parametrize("seed", [None, 3])
def test_the_choice_does_not_depend_on_the_batches(monkeypatch: pytest.MonkeyPatch, seed: int | None) -> None:
    lines = texts_of(*("line of text\n" * count for count in (5, 1, 40, 2, 300)))
    hashes = set()
    for size in (20, 77, 10**6):
        monkeypatch.setattr(windows, "BATCH_CHARACTERS", size)
        made = make_windows(lines, letters, 3, 11, seed=seed, separator_id=SEPARATOR, what="calibration")
        hashes.add(made.audit["tokens_sha256"])
    assert len(hashes) == 1


def test_text_beyond_what_is_needed_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "BATCH_CHARACTERS", 50)
    seen: list[str] = []

    def encode(texts: list[str]) -> list[list[int]]:
        seen.extend(texts)
        return letters(texts)

    made = make_windows(texts_of(*["x" * 30] * 100), encode, 4, 25, seed=None, separator_id=None, what="evaluation")
    assert len(seen) == 4
    assert made.audit["text_exhausted"] is False
    assert made.audit["documents"] == 4
    assert made.audit["documents_available"] == 100
    assert make_windows(texts_of("x" * 50), letters, 2, 25, seed=None, separator_id=None, what="e").audit[
        "text_exhausted"
    ]


def test_a_long_document_is_cut_after_a_newline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "BATCH_CHARACTERS", 10)
    pieces: list[str] = []

    def encode(texts: list[str]) -> list[list[int]]:
        pieces.extend(texts)
        return letters(texts)

    text = "first\nsecond\nno newline in this one\nend"
    made = make_windows(texts_of(text), encode, 1, len(text), seed=None, separator_id=SEPARATOR, what="evaluation")
    assert "".join(map(chr, made.tokens[0].tolist())) == text == "".join(pieces)
    assert pieces[0] == "first\n"
    assert max(map(len, pieces)) <= 10


def test_equal_tokens_have_equal_hashes_and_others_do_not() -> None:
    def digest(text: str) -> str:
        made = make_windows(texts_of(text), letters, 1, 3, seed=0, separator_id=None, what="calibration")
        return str(made.audit["tokens_sha256"])

    assert digest("abc") == digest("abcd") != digest("abd")


def test_overlap_is_the_share_of_runs_that_occur_anywhere() -> None:
    generator = torch.Generator().manual_seed(0)
    calibration = torch.randint(0, 50_000, (5, 64), generator=generator)
    fresh = torch.randint(0, 50_000, (3, 64), generator=generator)
    assert overlap(calibration, fresh) == 0
    assert overlap(calibration, calibration[1:3]) == 1
    half = fresh.clone()
    half[0, 10:50] = calibration[4, 3:43]
    # 40 equal tokens hold 9 runs of 32, of the 33 in each of the three windows.
    assert overlap(calibration, half) == pytest.approx(9 / 99)


def test_overlap_tells_the_order_of_tokens_and_takes_short_windows() -> None:
    line = torch.arange(20)[None]
    assert overlap(line, line.flip(1)) == 0
    assert overlap(line, line[:, 3:12]) == 1


def test_the_builtin_parts_do_not_overlap(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)

    def encode(texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return ids

    calibration = make_windows(
        load_texts(TextSource(), "calibration"), encode, 64, 512, seed=0, separator_id=0, what="c"
    )
    evaluation = make_windows(
        load_texts(TextSource(), "evaluation"), encode, 40, 512, seed=None, separator_id=0, what="e"
    )
    assert calibration.warnings == evaluation.warnings == ()
    # A byte-level tokenizer of 281 tokens: 128 tokens are about as many characters.
    assert overlap(calibration.tokens, evaluation.tokens, gram=128) < 0.01
