"""One document in each window: what is cut and padded, what is counted, and that padding enters no statistic."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import nn

from calibration.errors import DataError
from calibration.stats import TokenFeed, collect_inputs
from calibration.text import Texts
from calibration.windows import Windows, overlap, pad_documents


def letters(texts: list[str]) -> list[list[int]]:
    return [[ord(character) for character in text if character != "_"] for text in texts]


def padded(*texts: str, samples: int = 8, length: int = 5, seed: int | None = None) -> Windows:
    found = Texts(texts, "test", "0" * 64, {"null_rows": 2}, ("read with care",))
    return pad_documents(found, letters, samples, length, seed=seed, what="calibration")


def test_a_document_is_cut_or_padded_on_the_right_and_counted() -> None:
    made = padded("abcdefg", "x", "hij")
    assert made.tokens.dtype == torch.int64
    assert made.tokens.tolist() == [[*map(ord, "abcde")], [ord("x"), 0, 0, 0, 0], [*map(ord, "hij"), 0, 0]]
    assert made.lengths is not None
    assert made.lengths.tolist() == [5, 1, 3]
    assert made.real is not None
    assert made.real.sum(1).tolist() == [5, 1, 3]
    assert made.real.tolist()[2] == [True, True, True, False, False]
    counted = {
        "packing": False,
        "requested_samples": 8,
        "obtained_samples": 3,
        "requested_tokens": 40,
        "obtained_tokens": 9,
        "tokens_dropped": 2,
        "documents_truncated": 1,
        "documents": 3,
        "longest": 5,
        "shortest": 1,
        "dropped": {"null_rows": 2},
    }
    assert counted.items() <= made.audit.items()
    assert made.warnings == ("read with care", "calibration: asked for 8 samples, got 3 documents with tokens")


def test_windows_are_no_longer_than_the_longest_document() -> None:
    assert padded("ab", "abc", length=512).tokens.shape == (2, 3)


def test_a_document_without_a_token_is_dropped_and_counted() -> None:
    made = padded("ab", "_", "c")
    assert made.tokens.tolist() == [[*map(ord, "ab")], [ord("c"), 0]]
    assert made.audit["dropped"] == {"null_rows": 2, "documents_without_tokens": 1}
    with pytest.raises(DataError, match="no document of the calibration text has a token"):
        padded("_", "__")


def test_a_seed_chooses_documents_without_replacement_in_order() -> None:
    texts = [chr(100 + number) for number in range(60)]

    def chosen(seed: int | None) -> list[int]:
        found: list[int] = padded(*texts, samples=7, seed=seed).tokens[:, 0].tolist()
        return found

    assert chosen(None) == [*range(100, 107)]
    assert chosen(1) == sorted(set(chosen(1)))
    assert chosen(1) == chosen(1) != chosen(2)
    assert padded(*texts, samples=60).warnings == ("read with care",)


def test_equal_tokens_of_other_lengths_have_other_hashes() -> None:
    plain = padded("a", "ab")
    zero = padded("a\0", "ab")
    assert plain.tokens.tolist() == zero.tokens.tolist()
    assert plain.audit["tokens_sha256"] != zero.audit["tokens_sha256"]
    assert len(plain.audit["tokens_sha256"]) == len(hashlib.sha256().hexdigest())


def test_padding_overlaps_with_nothing() -> None:
    calibration = torch.zeros(1, 80, dtype=torch.int64)
    calibration[0, :40] = torch.arange(1, 41)
    real = torch.arange(80)[None] < 40
    evaluation = torch.zeros(1, 64, dtype=torch.int64)
    assert overlap(calibration, evaluation) == 1
    assert overlap(calibration, evaluation, real=real) == 0
    assert overlap(calibration, calibration[:, :40], real=real) == 1


def test_real_tokens_and_their_weights_come_in_batches_of_any_size() -> None:
    real = torch.tensor([[True, True, False], [True, False, False], [True, True, True], [True, True, False]])
    tokens = torch.arange(12.0).view(4, 3, 1)
    for size in (1, 2, 3, 4):
        feed = TokenFeed(real, torch.arange(12.0).view(4, 3))
        batches = [feed.take(part, -part) for part in torch.split(tokens, size)]
        found = [rows for rows, _ in batches]
        assert torch.cat([part for _, part in batches if part is not None]).tolist() == [0, 1, 3, 6, 7, 8, 9, 10]
        assert torch.cat([one for one, _ in found]).flatten().tolist() == [0, 1, 3, 6, 7, 8, 9, 10]
        assert torch.equal(torch.cat([other for _, other in found]), -torch.cat([one for one, _ in found]))
    (everything,), none = TokenFeed(None).take(tokens)
    assert none is None
    assert everything.flatten().tolist() == [*range(12)]


def test_a_second_pass_over_the_data_is_an_error_and_not_the_wrong_mask() -> None:
    tell = TokenFeed(torch.ones(2, 3, dtype=torch.bool))
    tell.take(torch.zeros(2, 3, 1))
    with pytest.raises(ValueError, match="9 tokens came, and the calibration set has 6"):
        tell.take(torch.zeros(1, 3, 1))


@pytest.mark.parametrize("flat", [False, True])
def test_padding_enters_no_statistic(flat: bool) -> None:
    layer = nn.Linear(4, 2)
    inputs = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    real = torch.arange(5) < torch.tensor([5, 1, 3])[:, None]
    inputs[~real] = torch.nan
    with torch.no_grad(), collect_inputs({"one": layer}, [["one"]], real) as found:
        for part in torch.split(inputs, 2):
            layer(part.flatten(0, 1) if flat else part)
    kept = inputs[real]
    assert found["one"].tokens == 9
    torch.testing.assert_close(found["one"].gram, kept.T @ kept)
