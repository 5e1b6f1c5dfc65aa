from __future__ import annotations

import pytest

from compress.errors import InputError
from compress.scheme import QuantScheme
from compress.settings import Calibration, Gates
from tests.compress.recipes import MINIMAL, Round, Solve, complaints, read

TWO = "model: m\nexport: [write]\npasses:\n  - round\n  - solve: {damping: 0.5, columns: 7}\n"


@pytest.mark.parametrize("path", ["passes.1.solve.damping", "passes.solve.damping"])
def test_an_argument_is_set_by_number_or_by_name(path: str) -> None:
    found = read(TWO, f"{path}=0.25")
    assert [step.value for step in found.passes] == [Round(), Solve(0.25, columns=7)]


@pytest.mark.parametrize("path", ["passes.0.round.scheme", "passes.round.scheme"])
def test_a_bare_name_gets_arguments(path: str) -> None:
    assert read(TWO, f"{path}=int8-channel").passes[0].value == Round(QuantScheme(8, None))


def test_values_are_yaml_and_whole_parts_can_be_replaced() -> None:
    found = read(
        TWO,
        "passes=[solve: {notes: [x]}]",
        "measure=false",
        "calibration.samples=3",
        "calibration.seed=4",
        "gates={max_size: 1kB}",
        "model='7'",
        "ignore=[a]",
    )
    assert [step.value for step in found.passes] == [Solve(notes=("x",))]
    assert found.measure is None
    assert found.calibration == Calibration(samples=3, seed=4)
    assert (found.gates.max_size, found.model, found.ignore) == (1000, "7", ("a",))


def test_a_whole_entry_can_be_replaced() -> None:
    assert [step.name for step in read(TWO, "passes.0=solve").passes] == ["solve", "solve"]
    assert read(TWO, "passes.solve={columns: 1}").passes[1].value == Solve(columns=1)


def test_later_overrides_win_and_see_earlier_ones() -> None:
    found = read(MINIMAL, "passes=[solve]", "passes.solve.damping=0.1", "passes.solve.damping=0.2")
    assert found.passes[0].value == Solve(0.2)


def test_below_pin_everything_is_one_pattern() -> None:
    found = read(MINIMAL, "pin.model.layers.0.mlp.*=int8-g32", "pin.lm_head=float")
    assert found.pin == {"model.layers.0.mlp.*": QuantScheme(8, 32), "lm_head": None}


def test_a_key_that_an_alias_shares_is_changed_alone() -> None:
    text = MINIMAL + "calibration: &shared {sequence_length: 64}\nevaluate: *shared\n"
    found = read(text, "evaluate.sequence_length=32")
    assert found.evaluate is not None
    assert (found.calibration.sequence_length, found.evaluate.sequence_length) == (64, 32)


def test_the_model_option_is_text_and_not_yaml() -> None:
    assert read(MINIMAL, model="123").model == "123"
    assert read("passes: [round]\nexport: [write]\n", model="a: b").model == "a: b"


def test_an_override_can_add_what_the_file_lacks() -> None:
    found = read("model: m\n", "passes=[round]", "export=[write]", "gates.max_kld=0.5")
    assert found.gates == Gates(max_kld=0.5)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("passes.solve.dampign=1", "passes[1].solve.dampign: unknown key; did you mean 'damping'?"),
        ("passes.solve.damping=2", "passes[1].solve.damping: 2.0 is not between 0 and 1"),
        ("calibration.samples=4.5", "calibration.samples: expected a whole number, got the number 4.5"),
        ("calibration.samples=", "calibration.samples: expected a whole number, got nothing"),
        ("calibration.samples.x=1", "calibration.samples: expected a whole number, got a mapping"),
        ("mesure.threads=1", "mesure: unknown key; did you mean 'measure'?"),
        ("model.x=1", "model is the text 'm', which has no 'x' below it"),
        ("passes.2=round", "passes has 2 entries, so no passes.2; they count from 0"),
        ("passes.0.solve.damping=1", "passes.0 is 'round', not 'solve'"),
        ("passes.plan.target_bits=1", "passes has 0 (round), 1 (solve): 'plan' is not there"),
        ("measure", "not an override"),
        ("=1", "not an override"),
        ("measure..threads=1", "not an override"),
        ("gates={", "not YAML: expected the node content, but found '<stream end>'"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_named_as_it_was_written(override: str, complaint: str) -> None:
    first, *rest = complaints(TWO, override)
    assert first == f"--set {override}: {complaint}"
    assert all(line.startswith("  fix: ") for line in rest)


def test_complaints_about_overrides_and_file_come_together() -> None:
    assert complaints(TWO + "gates: {max_kdl: 1}\n", "passes.round.serch=1", "calibration.sample=3") == [
        "--set calibration.sample=3: calibration.sample: unknown key; did you mean 'samples'?",
        "--set passes.round.serch=1: passes[0].round.serch: unknown key; did you mean 'search'?",
        "r.yaml:6: gates.max_kdl: unknown key; did you mean 'max_kld'?",
    ]


def test_every_override_that_leads_nowhere_is_named() -> None:
    with pytest.raises(InputError) as caught:
        read(TWO, "model.x=1", "passes.9=round")
    assert [line.split(":")[0] for line in caught.value.what.splitlines()] == [
        "--set model.x=1",
        "--set passes.9=round",
    ]


def test_a_name_that_two_passes_have_needs_a_number() -> None:
    assert complaints("model: m\nexport: [write]\npasses: [round, round]\n", "passes.round.search=false") == [
        "--set passes.round.search=false: passes has 0 (round), 1 (round): 'round' stands there more than once",
        "  fix: give the entry's number",
    ]
