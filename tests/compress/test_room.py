"""Room is asked for where it is used: hidden states in memory up to a limit, then on disk, those of mixed included."""

from __future__ import annotations

import pytest

from compress import engine, room
from compress.activations import FLOAT_BYTES
from compress.recipe import Recipe
from tests.compress.runs import Bench

HIDDEN, LAYERS = 64, 2
MIXED = "[{mixed: {target_bits: 6, samples: 4}}, gptq]"


def recipe(bench: Bench, passes: str, samples: int = 8) -> Recipe:
    source = f"source: text, path: {bench.folder}/calibration.txt"
    text = f"{{{source}, samples: {samples}, sequence_length: 64}}"
    return bench.recipe(passes=passes, calibration=text, evaluate="false", measure="false")


def needed(recipe: Recipe) -> tuple[int, int]:
    found = engine.plan(recipe).needed
    return found["memory_bytes"], found["disk_bytes"]


def test_hidden_states_move_to_disk_at_the_limit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = 8 * 64 * HIDDEN * FLOAT_BYTES
    memory, disk = needed(recipe(bench, "[gptq]"))
    monkeypatch.setattr(room, "IN_MEMORY_BYTES", kept - 1)
    assert needed(recipe(bench, "[gptq]")) == (memory - 1, disk + kept)


def test_a_pass_over_the_whole_model_keeps_a_blocks_inputs_for_every_block(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "IN_MEMORY_BYTES", 0)
    disk = {}
    for name, passes in (("gptq", "[gptq]"), ("mixed", MIXED)):
        disk[name] = [needed(recipe(bench, passes, samples))[1] for samples in (9, 10)]
    window = 64 * HIDDEN * FLOAT_BYTES
    assert disk["gptq"][1] - disk["gptq"][0] == window
    # Four windows, in front of both blocks and behind them: more than all windows of the walk.
    assert disk["mixed"][0] == disk["mixed"][1]
    assert disk["mixed"][0] - disk["gptq"][0] >= ((LAYERS + 1) * 4 - 9) * window


def test_memory_does_not_grow_with_calibration_windows_beyond_the_limit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "IN_MEMORY_BYTES", 1000)
    assert needed(recipe(bench, MIXED, 4))[0] == needed(recipe(bench, MIXED, 12))[0]
    assert needed(recipe(bench, "[rtn]"))[0] < needed(recipe(bench, "[gptq]"))[0] <= needed(recipe(bench, MIXED))[0]
