"""Hidden states give back what was put in, and results do not depend on where they lie."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from compress.activations import Activations, Spool
from compress.passes.awq import Awq
from compress.passes.gptq import Gptq
from compress.passes.mixed import Mixed
from tests.compress.families import compressed, saved, tokens_of


@pytest.fixture(params=["memory", "file"])
def states(request: pytest.FixtureRequest, tmp_path: Path) -> Activations:
    return Activations((5, 3, 8), tmp_path / "hidden.bin" if request.param == "file" else None)


def test_gives_back_what_was_put_in_piece_by_piece_and_in_any_order(states: Activations) -> None:
    whole = torch.randn(5, 3, 8)
    for start, stop in ((3, 5), (0, 2), (2, 3)):
        states[start:stop] = whole[start:stop]
    assert torch.equal(states[0:5], whole)
    assert torch.equal(states[1:4], whole[1:4])
    assert torch.equal(states[4:9], whole[4:])
    states[1:2] = 2 * whole[1:2]
    assert torch.equal(states[0:3], torch.cat([whole[:1], 2 * whole[1:2], whole[2:3]]))
    assert (len(states), states.nbytes) == (5, 480)


def test_what_is_read_is_a_copy(states: Activations) -> None:
    states[0:5] = torch.zeros(5, 3, 8)
    states[0:1].add_(1)
    assert not states[0:5].any()


def test_values_that_do_not_fit_and_windows_never_written_are_refused(tmp_path: Path) -> None:
    states = Activations((5, 3, 8), tmp_path / "hidden.bin")
    with pytest.raises(ValueError, match="does not fit 2 windows"):
        states[0:2] = torch.zeros(1, 3, 8)
    with pytest.raises(ValueError, match="windows 1 to 2 were never written"):
        states[1:2]


def test_files_are_used_beyond_the_limit_and_vanish_when_closed(tmp_path: Path) -> None:
    spool = Spool(tmp_path, limit_bytes=1000)
    first, second = spool.room((5, 3, 8)), spool.room((5, 3, 8))
    third = spool.room((5, 3, 8))
    assert (first.file, second.file) == (None, None)
    assert third.file is not None
    first.close()
    assert spool.room((5, 3, 8)).file is None
    third[0:5] = torch.zeros(5, 3, 8)
    assert len(list(tmp_path.iterdir())) == 1
    third.close()
    assert list(tmp_path.iterdir()) == []


def test_reading_and_writing_files_takes_no_memory_of_their_size(tmp_path: Path) -> None:
    states = Activations((64, 64, 4096), tmp_path / "hidden.bin")
    before = psutil.Process().memory_info().rss
    for window in range(64):
        states[window : window + 1] = torch.full((1, 64, 4096), float(window))
    assert sum(float(states[window : window + 1].mean()) for window in range(64)) == sum(range(64))
    assert psutil.Process().memory_info().rss - before < states.nbytes / 4


@pytest.mark.parametrize("variant", ["llama", "gemma2", "mixtral"])
def test_hidden_states_in_files_change_no_bit(variant: str, tmp_path: Path) -> None:
    folder, tokens = saved(variant, tmp_path / "model"), tokens_of(70, 40)
    passes = [Mixed(target_bits=6.0, samples=5), Awq(steps=4), Gptq()]
    spool = Spool(tmp_path / "spool", limit_bytes=0)
    memory = compressed(folder, tmp_path / "memory", passes, tokens)
    files = compressed(folder, tmp_path / "files", passes, tokens, spool=spool)
    assert len(spool._made) > 3
    assert all(one.file is not None for one in spool._made)
    assert list((tmp_path / "spool").iterdir()) == []
    assert files.session.plan == memory.session.plan
    assert [done.layers for done in files.done] == [done.layers for done in memory.done]
    written = sorted((tmp_path / "memory").iterdir())
    assert len(written) == 4 - memory.checkpoint.config.get("tie_word_embeddings", False)
    for path in written:
        assert path.read_bytes() == (tmp_path / "files" / path.name).read_bytes()
