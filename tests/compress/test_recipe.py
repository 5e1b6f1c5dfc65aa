from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import recipe, registry
from compress.errors import InputError
from compress.fields import ByteSize
from compress.recipe import Calibration, Evaluate, Gates, Measure, Recipe, Step
from compress.scheme import QuantScheme
from tests.compress.recipes import MINIMAL, Plan, Round, Solve, Write, lookup, read


def test_defaults_are_those_of_the_records() -> None:
    expected = Recipe("somewhere", (Step("round", Round()),), (Step("write", Write()),))
    assert read(MINIMAL) == expected
    assert expected.calibration == Calibration("builtin", samples=32, sequence_length=512, seed=0)
    assert expected.measure == Measure(128, 64, "auto", 3)
    assert expected.evaluate == Evaluate("builtin", windows=16, sequence_length=512)


def test_every_part_of_a_recipe_is_read(tmp_path: Path) -> None:
    held_out = tmp_path / "held out.txt"
    held_out.write_text("text")
    found = read(
        f"""
        model: builtin:x
        calibration: {{source: hub, name: a/b, split: dev, column: body, samples: 3, sequence_length: 7, seed: 5}}
        passes:
          - plan: {{target_bits: 5, choices: [int2-g64-asym, int8-channel]}}
          - round
          - solve: {{damping: 0.5, columns: 1_000, limit: 2.5, mode: exact, notes: [a, "4"], file: x.bin}}
        export: [keep, write: {{level: 0}}]
        measure: {{prompt_tokens: 1, generate_tokens: 2, threads: 3, repeats: 4}}
        evaluate: {{source: text, path: {held_out}, encoding: latin-1, windows: 2, sequence_length: 9}}
        gates: {{max_kld: 0.25, min_top1: 1, max_size: 1.5GiB, max_bits_per_weight: 4.5, max_peak_rss: 300 MB}}
        ignore: [lm_head, "*.mlp.*"]
        pin: {{"re:.*[qk]_proj": int8-g32, model.norm: float}}
        """
    )
    solve = Solve(0.5, 1000, 2.5, "exact", ("a", "4"), Path("x.bin"))
    choices = (QuantScheme(2, 64, symmetric=False), QuantScheme(8, None))
    assert found == Recipe(
        model="builtin:x",
        calibration=Calibration("hub", None, "a/b", "dev", "body", samples=3, sequence_length=7, seed=5),
        passes=(Step("plan", Plan(5.0, choices)), Step("round", Round()), Step("solve", solve)),
        export=(Step("keep", Write()), Step("write", Write(0))),
        measure=Measure(1, 2, 3, 4),
        evaluate=Evaluate("text", held_out, encoding="latin-1", windows=2, sequence_length=9),
        gates=Gates(0.25, 1.0, ByteSize(3 << 29), 4.5, None, ByteSize(300_000_000)),
        ignore=("lm_head", "*.mlp.*"),
        pin={"re:.*[qk]_proj": QuantScheme(8, 32), "model.norm": None},
    )


def test_false_switches_a_step_off_and_the_rest_keeps_its_defaults() -> None:
    found = read(MINIMAL + "measure: false\nevaluate: no\ncalibration:\ngates:\nignore:\npin:\n")
    assert found.measure is None
    assert found.evaluate is None
    assert (found.calibration, found.gates, found.ignore, found.pin) == (Calibration(), Gates(), (), {})


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("120MB", 120_000_000),
        ("1.5GiB", 3 << 29),
        ("64 kb", 64_000),
        ("7B", 7),
        ("12345", 12345),
        ("0.1GB", 100_000_000),
    ],
)
def test_sizes_have_units(written: str, size: int) -> None:
    assert read(f"{MINIMAL}gates: {{max_size: {written}}}").gates.max_size == size


def test_steps_know_where_they_are_written() -> None:
    found = read("model: m\nexport: [write]\npasses:\n- round\n- solve:\n    damping: 0.1\n")
    assert [step.where for step in found.passes] == ["r.yaml:4: passes[0].round", "r.yaml:5: passes[1].solve"]


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
filled = text.filter(lambda value: bool(value.strip()))
floats = st.floats(0, 1, allow_nan=False)
positive = st.floats(1e-6, 1e12)
counts = st.integers(1, 10**6)
schemes = st.builds(QuantScheme, st.sampled_from([2, 3, 4, 8]), st.none() | st.integers(1, 999), st.booleans())
patterns = filled.filter(lambda value: not value.startswith("re:"))
paths = text.filter(lambda value: "\0" not in value).map(Path)
steps = st.one_of(
    st.builds(Step, st.just("round"), st.builds(Round, schemes, st.booleans())),
    st.builds(Step, st.just("plan"), st.builds(Plan, positive, st.lists(schemes).map(tuple))),
    st.builds(
        Step,
        st.just("solve"),
        st.builds(
            Solve, floats, st.integers(), st.none() | positive, st.sampled_from(["fast", "exact"]),
            st.lists(text).map(tuple), st.none() | paths,
        ),
    ),
)  # fmt: skip
hub = {"source": st.just("hub"), "name": filled, "split": text, "column": text}
limits = st.none() | positive
sizes = st.none() | st.integers(1, 10**12)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    ignore = draw(st.lists(patterns, unique=True, max_size=3))
    pin = draw(st.dictionaries(patterns.filter(lambda value: value not in ignore), st.none() | schemes, max_size=3))
    calibration = st.builds(Calibration, **hub, samples=counts, sequence_length=counts, seed=st.integers(0, 2**60))
    threads = st.just("auto") | counts
    return Recipe(
        model=draw(filled),
        passes=tuple(draw(st.lists(steps, min_size=1, max_size=4))),
        export=draw(st.sampled_from([(Step("write", Write(0)),), (Step("keep", Write()), Step("write", Write()))])),
        calibration=draw(st.just(Calibration()) | calibration),
        measure=draw(st.none() | st.builds(Measure, counts, counts, threads, counts)),
        evaluate=draw(st.builds(Evaluate, **hub, windows=counts, sequence_length=st.integers(2, 99))),
        gates=draw(st.builds(Gates, limits, max_size=sizes, max_bits_per_weight=limits)),
        ignore=tuple(ignore),
        pin=pin,
    )


@settings(deadline=None)
@given(recipes())
def test_a_dumped_recipe_is_read_back_to_an_equal_one(original: Recipe) -> None:
    dumped = recipe.dump_yaml(original)
    assert read(dumped) == original
    assert yaml.safe_load(dumped) == recipe.to_dict(original)


@pytest.mark.parametrize(
    "awkward", ["\x85", "a\x85b", "\u2028", "\ufeff", " a ", "no", "1e2", "010", "~", "a: b", "# c", "*a", "\n"]
)
def test_awkward_text_survives_a_dump(awkward: str) -> None:
    original = Recipe(f"m{awkward}", (Step("solve", Solve(notes=(awkward,))),), (Step("write", Write()),))
    assert read(recipe.dump_yaml(original)) == original


def test_a_dump_holds_every_default() -> None:
    filled_in = recipe.to_dict(read(MINIMAL))
    assert filled_in["passes"] == [{"round": {"scheme": "int4-g32", "search": True}}]
    usual = {"prompt_tokens": 128, "generate_tokens": 64, "threads": "auto", "repeats": 3}
    cache = {"kv_keys": "f16", "kv_values": "f16", "window": None, "sinks": 4}
    assert filled_in["measure"] == usual | cache
    assert set(filled_in) == {
        "model", "calibration", "passes", "export", "measure", "evaluate", "gates", "ignore", "pin",
    }  # fmt: skip


def test_a_switched_off_step_stays_off_in_a_dump() -> None:
    off = read(MINIMAL + "measure: false\nevaluate: false\n")
    assert read(recipe.dump_yaml(off)) == off


@pytest.mark.parametrize("path", recipe.bundled(), ids=lambda path: path.stem)
def test_bundled_recipes_are_valid_commented_and_found_by_name(path: Path) -> None:
    by_name = recipe.load(path.stem, registry.load)
    assert by_name == recipe.load(path.name, registry.load) == recipe.load(path, registry.load)
    assert path.read_text().startswith("# ")


def test_the_bundled_recipes_are_those_at_the_top_of_the_project() -> None:
    top = Path(__file__).parents[2] / "recipes"
    names = {path.name for path in recipe.bundled()}
    assert names == {path.name for path in top.iterdir()}
    assert {"mixed_4_8.yaml", "rtn_4.yaml", "gptq_4.yaml", "gptq_4_asym.yaml", "int8.yaml"} <= names


def test_a_file_goes_before_a_bundled_name_and_a_folder_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rtn_4").mkdir()
    assert recipe.find("rtn_4").parent == recipe.BUNDLED
    (tmp_path / "int8.yaml").write_text(MINIMAL)
    assert recipe.load("int8.yaml", lookup).model == "somewhere"


def test_missing_recipe_suggests_bundled_ones() -> None:
    with pytest.raises(InputError, match=r"did you mean 'mixed_4_8'\?(.|\n)*bundled recipe: autoround_4, awq_4,"):
        recipe.load("recipes/mixed48.yaml", lookup)


def test_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    file = tmp_path / "bom.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert recipe.load(file, lookup) == read(MINIMAL)
