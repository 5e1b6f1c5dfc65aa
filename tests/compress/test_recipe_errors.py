# ruff: noqa: E501 - messages are written whole, as the user reads them
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from compress import recipe
from compress.errors import InputError
from tests.compress.recipes import MINIMAL, complaints, lookup


@dataclass(frozen=True)
class Unwritable:
    table: dict[str, int] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        # Misspelt and misplaced keys, at every level.
        ("expotr: []", "expotr: unknown key; did you mean 'export'?"),
        ("calibration: {sampels: 8}", "calibration.sampels: unknown key; did you mean 'samples'?"),
        ("evaluate: {windos: 8}", "evaluate.windos: unknown key; did you mean 'windows'?"),
        ("gates: {max_kdl: 0.1}", "gates.max_kdl: unknown key; did you mean 'max_kld'?"),
        (
            "measure: {zzz: 1}",
            "measure.zzz: unknown key; known: prompt_tokens, generate_tokens, threads, repeats, kv_keys, kv_values, "
            "window, sinks",
        ),
        ("samples: 8", "samples: unknown key here; it belongs under calibration"),
        ("calibration: {threads: 2}", "calibration.threads: unknown key here; it belongs under measure"),
        ("measure: {sequence_length: 2}", "measure.sequence_length: unknown key here; it belongs under calibration or evaluate"),
        ("gates: {pin: {}}", "gates.pin: unknown key here; it belongs under the top level"),
        ("search: true", "search: unknown key here; it belongs under 'round'"),
        ("solve: {damping: 0.1}", "solve: unknown key; 'solve' is an entry of the list 'passes'"),
        ("write: {}", "write: unknown key; 'write' is an entry of the list 'export'"),
        ("grp_size: 32", "grp_size: unknown key; bits, group and symmetry are one text of a pass, as in rtn: {scheme: int4-g32-asym}"),
        ("<<: {seed: 1}", "<<: merge keys are not supported; write the keys out"),
        ("4: x", "a key must be text, got the number 4; put it in quotes if it is meant so"),
        ("model: other", "model: written twice, first in line 1; remove one"),
        ("gates: {max_kld: 1, max_kld: 1}", "gates.max_kld: written twice, first in line 4; remove one"),
        # Numbers, texts and switches that are not what they look like.
        ('calibration: {samples: "4"}', "calibration.samples: expected a whole number, got the text '4': write 4 without quotes"),
        ("calibration: {samples: 4.0}", "calibration.samples: expected a whole number, got the number 4.0: write 4"),
        ("calibration: {samples: 4.5}", "calibration.samples: expected a whole number, got the number 4.5"),
        ("calibration: {samples: true}", "calibration.samples: expected a whole number, got true"),
        ("calibration: {samples: no}", "calibration.samples: expected a whole number, got false (YAML reads an unquoted no so)"),
        ("calibration: {samples: 1e2}", "calibration.samples: expected a whole number, got the text '1e2': YAML reads 1e2 as text, write 100"),
        ("calibration: {samples: }", "calibration.samples: expected a whole number, got nothing"),
        ("calibration: {samples: [4]}", "calibration.samples: expected a whole number, got a list"),
        ("calibration: {samples: 010}", "calibration.samples: expected a whole number, got 010: write decimal digits without a leading zero"),
        ("calibration: {samples: 1:30}", "calibration.samples: expected a whole number, got 1:30: write decimal digits without a leading zero"),
        ("calibration: {samples: 0}", "calibration.samples: must be at least 1, got 0"),
        ("calibration: {seed: -1}", "calibration.seed: must be at least 0, got -1"),
        ("evaluate: {sequence_length: 1}", "evaluate.sequence_length: must be at least 2, got 1"),
        ("measure: {threads: 0}", "measure.threads: must be at least 1, got 0"),
        ("measure: {threads: all}", "measure.threads: expected a whole number or auto, got the text 'all'"),
        ("measure: {repeats: 0}", "measure.repeats: must be at least 1, got 0"),
        ("measure:", "measure: got nothing: write {} for the defaults, or false to switch it off"),
        ("calibration: builtin", "calibration: expected a mapping of source, path, name, split, column, encoding, config, chat_template, samples, sequence_length, seed, packing, temperature, precision, got the text 'builtin'"),
        ("gates: {max_kld: .nan}", "gates.max_kld: expected a finite number in decimal digits, got .nan"),
        ("gates: {max_kld: -0.1}", "gates.max_kld: must be above 0, got -0.1"),
        ("gates: {max_kld: 1e-2}", "gates.max_kld: expected a number, got the text '1e-2': YAML reads 1e-2 as text, write 0.01"),
        ("gates: {min_top1: 90}", "gates.min_top1: a share from 0 to 1, got 90.0"),
        ("gates: {max_size: 0}", "gates.max_size: must be above 0, got 0"),
        ("gates: {max_size: 120 meg}", "gates.max_size: expected a size such as 120MB or 1.5GiB, got '120 meg'"),
        ("gates: {max_size: 1.5}", "gates.max_size: expected a size such as 120MB or 1.5GiB, got the number 1.5"),
        # Sections that contradict each other or what is on disk.
        ("calibration: {source: txt}", "calibration.source: expected one of builtin, text, jsonl, hub, self, got the text 'txt'; did you mean 'text'?"),
        ("calibration: {source: text}", "calibration.path: source 'text' needs it"),
        ("calibration: {source: hub}", "calibration.name: source 'hub' needs it"),
        ("calibration: {source: self, packing: false}", "calibration.packing: what the model writes itself always fills its windows"),
        ("calibration: {source: self, path: /}", "calibration.path: source 'self' does not read it; sources that do: text, jsonl"),
        ("calibration: {source: self, temperature: 0}", "calibration.temperature: must be above 0, got 0"),
        ("calibration: {temperature: 0.7}", "calibration.temperature: source 'builtin' does not read it; sources that do: self"),
        ("calibration: {source: text, path: /, chat_template: true}", "calibration.chat_template: source 'text' does not read it; sources that do: jsonl, hub"),
        ("evaluate: {packing: false}", "evaluate.packing: unknown key here; it belongs under calibration"),
        ("evaluate: {source: self}", "evaluate.source: a model is judged on text that it did not write; builtin, text, jsonl or hub"),
        ("calibration: {path: r.yaml}", "calibration.path: source 'builtin' does not read it; sources that do: text, jsonl"),
        ("evaluate: {source: jsonl, path: /, split: x}", "evaluate.split: source 'jsonl' does not read it; sources that do: hub"),
        ("evaluate: {source: text, path: /x, encoding: utf9}", "evaluate.encoding: 'utf9' is no encoding that Python knows; write utf-8 or latin-1, say"),
        # Patterns.
        ("ignore: lm_head", "ignore: expected a list, each text, got the text 'lm_head': write [lm_head]"),
        ("ignore: [lm_head, 3]", "ignore[1]: expected text, got the number 3: put it in quotes, '3'"),
        ("ignore: ['re:(']", "ignore[0]: 're:(' is not a regular expression: missing ), unterminated subpattern at position 0"),
        ("ignore: ['']", "ignore[0]: an empty pattern matches no layer"),
        ("ignore: [a, a]", "ignore[1]: 'a' is already in r.yaml:4: ignore[0]; remove one"),
        ("pin: [lm_head]", "pin: expected 'pattern: scheme' lines, got a list"),
        ("pin: {lm_head: 8}", "pin.lm_head: expected a scheme such as int4-g32 or float, got the number 8"),
        ("pin: {lm_head: int7-g32}", "pin.lm_head: 'int7-g32': 7 bits are not supported, only 2, 3, 4, 5, 8, or float"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_refused_with_its_place_and_a_remedy(line: str, complaint: str) -> None:
    assert complaints(f"{MINIMAL}{line}\n") == [f"r.yaml:4: {complaint}"]


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("solve: {dampign: 0.1}", ".solve.dampign: unknown key; did you mean 'damping'?"),
        ("solve: {damping: 2}", ".solve.damping: 2.0 is not between 0 and 1"),
        ("solve: {damping: '0.1'}", ".solve.damping: expected a number, got the text '0.1': write 0.1 without quotes"),
        ("solve: {mode: quick}", ".solve.mode: expected one of fast, exact, got the text 'quick'"),
        ("solve: {notes: [a, 1]}", ".solve.notes[1]: expected text, got the number 1: put it in quotes, '1'"),
        ("solve: {notes: 2024-01-01}", ".solve.notes: expected a list, each text, got the date 2024-01-01: write [2024-01-01]"),
        ("solve: {file: ''}", ".solve.file: expected a path, got the text ''"),
        ("solve: {search: true}", ".solve.search: unknown key here; it belongs under 'round'"),
        ("solve: 0.1", ".solve: expected a mapping of damping, columns, limit, mode, notes, file, got the number 0.1"),
        ("round: {bits: 4}", ".round.bits: unknown key; bits, group and symmetry are one text, as in scheme: int4-g32-asym"),
        ("round: {sym: no}", ".round.sym: unknown key; bits, group and symmetry are one text, as in scheme: int4-g32-asym"),
        ("round: {scheme: 4}", ".round.scheme: expected a scheme such as int4-g32, got the number 4"),
        ("round: {scheme: int7-g32}", ".round.scheme: 'int7-g32': 7 bits are not supported, only 2, 3, 4, 5, 8"),
        ("round: {scheme: int0-g32}", ".round.scheme: 'int0-g32': 0 bits are not supported, only 2, 3, 4, 5, 8"),
        ("round: {search: 1}", ".round.search: expected true or false, got the number 1"),
        ("plan", ".plan.target_bits: missing; write target_bits: a number"),
        ("plan: {target_bits: 5, choices: int4-g32}", ".plan.choices: expected a list, each a scheme such as int4-g32, got the text 'int4-g32': write [int4-g32]"),
        ("sovle", ": no passes named 'sovle'; did you mean 'solve'? (known: round, solve, plan)"),
        ("write", ": 'write' belongs in the list 'export'"),
        ("3", ": expected a name, or a name with arguments, got the number 3"),
        ("[solve]", ": expected a name, or a name with arguments, got a list"),
        ("{}", ": expected a name, or a name with arguments, got a mapping"),
    ],
)  # fmt: skip
def test_a_wrong_pass_is_refused_with_its_place_and_a_remedy(entry: str, complaint: str) -> None:
    text = f"model: m\nexport: [write]\npasses:\n  - round: {{search: false}}\n  - {entry}\n"
    assert complaints(text) == [f"r.yaml:5: passes[1]{complaint}"]


def test_an_exporters_own_refusal_is_placed_too() -> None:
    assert complaints("model: m\npasses: [round]\nexport:\n- write: {level: 3}\n") == [
        "r.yaml:4: export[0].write: level 3 is not known (known: 0, 4)"
    ]


def test_arguments_that_are_not_indented_are_told_from_a_second_pass() -> None:
    text = "model: m\nexport: [write]\npasses:\n  - solve:\n    damping: 0.1\n    round:\n"
    assert complaints(text) == [
        "r.yaml:5: passes[0]: the text 'damping' stands beside 'solve': indent it to stand below 'solve'",
        "r.yaml:6: passes[0]: the text 'round' stands beside 'solve': start a new entry with '- '",
    ]


def test_one_format_is_exported_once() -> None:
    assert complaints("model: m\npasses: [round]\nexport:\n- write\n- keep\n- write\n") == [
        "r.yaml:6: export[2].write: already in line 4; one artifact a format"
    ]


def test_gates_need_the_step_that_finds_their_number() -> None:
    text = MINIMAL + "measure: false\nevaluate: false\ngates:\n  max_kld: 1\n  min_decode_tps: 1\n  max_size: 1MB\n"
    assert complaints(text) == [
        "r.yaml:7: gates.max_kld: needs evaluate, which is switched off",
        "r.yaml:8: gates.min_decode_tps: needs measure, which is switched off",
    ]


def test_a_pattern_cannot_be_ignored_and_pinned() -> None:
    assert complaints(MINIMAL + "ignore: [a]\npin: {a: int8-g32}\n") == [
        "r.yaml:5: pin.a: 'a' is already in r.yaml:4: ignore[0]; remove one"
    ]


def test_all_complaints_come_at_once_in_the_order_of_the_file() -> None:
    text = "modle: m\npasses:\n  - round: {serch: 1}\n  - solve: {damping: x, columns: 0x10}\nmeasure: {threads: -1, repeat: 2}\n"
    assert complaints(text) == [
        "r.yaml:1: export: missing; write export: [onnx]",
        "r.yaml:1: model: missing; write model: builtin:smollm2-135m, a folder or a hub id",
        "r.yaml:1: modle: unknown key; did you mean 'model'?",
        "r.yaml:3: passes[0].round.serch: unknown key; did you mean 'search'?",
        "r.yaml:4: passes[1].solve.columns: expected a whole number, got 0x10: write decimal digits without a leading zero",
        "r.yaml:4: passes[1].solve.damping: expected a number, got the text 'x'",
        "r.yaml:5: measure.repeat: unknown key; did you mean 'repeats'?",
        "r.yaml:5: measure.threads: must be at least 1, got -1",
    ]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", ["r.yaml: an empty recipe", "  fix: write at least model, passes and export"]),
        ("# only a comment\n", ["r.yaml: an empty recipe", "  fix: write at least model, passes and export"]),
        ("\n- model: x\n", ["r.yaml:2: expected a mapping of model, calibration, measure, evaluate, gates, passes, export, ignore, pin, got a list"]),
        ("model: x\npasses:\n\t- round\n", ["r.yaml:3: not YAML: found character '\\t' that cannot start any token", "  fix: YAML does not allow tabs for indentation; use spaces"]),
        ("model: x\npasses: [round\nexport: [write]\n", ["r.yaml:3: not YAML: expected ',' or ']', but got ':'"]),
        ("model: a: b\n", ["r.yaml:1: not YAML: mapping values are not allowed here", "  fix: check the indentation, and put text that contains ': ' in quotes"]),
        ("ignore:\n- *.mlp\n", ["r.yaml:2: not YAML: expected alphabetic or numeric character, but found '.'", "  fix: put text that starts with * in quotes"]),
        ("model: x\nignore: [*a]\n", ["r.yaml:2: not YAML: found undefined alias 'a'", "  fix: put text that starts with * in quotes"]),
        ("model: x\n--- \nmodel: y\n", ["r.yaml:2: not YAML: but found another document"]),
        ("model: x\nname: \x07\n", ["r.yaml:2: the character U+0007 is not allowed in YAML"]),
        ("a: " + "[" * 5000, ["r.yaml: nested too deeply"]),
        ("model: x\npasses: round\nexport: {write: {}}\n", ["r.yaml:2: passes: expected a list, got the text 'round'; write passes: [rtn]", "r.yaml:3: export: expected a list, got a mapping; write export: [onnx]"]),
        ("model: ' '\npasses: []\nexport: []\n", ["r.yaml:1: model: empty; write builtin:smollm2-135m, a folder or a hub id", "r.yaml:2: passes: an empty list; write passes: [rtn]", "r.yaml:3: export: an empty list; write export: [onnx]"]),
        ("model: !!python/object:os.system x\npasses: [round]\nexport: [write]\n", ["r.yaml:1: model: expected text, got 'x' with the tag tag:yaml.org,2002:python/object:os.system"]),
        ("model: x\npasses: &a [*a]\nexport: [write]\n", ["r.yaml:2: passes[0]: expected a name, or a name with arguments, got a list"]),
    ],
)  # fmt: skip
def test_what_is_no_recipe_at_all_is_refused_with_its_line(text: str, lines: list[str]) -> None:
    assert complaints(text) == lines


def test_a_file_that_does_not_exist_is_named_with_where_it_was_looked_for(tmp_path: Path) -> None:
    assert complaints(f"{MINIMAL}calibration: {{source: text, path: nowhere.txt}}\n") == [
        f"r.yaml:4: calibration.path: 'nowhere.txt' does not exist; paths start at {Path.cwd()}"
    ]


def test_unreadable_recipes_are_refused(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(MINIMAL.encode() + "# für\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"latin\.yaml:4: not UTF-8: byte 0xfc at offset 52\n  fix: save the file"):
        recipe.load(latin, lookup)
    with pytest.raises(InputError, match="a folder, not a recipe"):
        recipe.load(tmp_path, lookup)


def test_a_pass_with_arguments_that_no_recipe_can_write_is_a_fault_of_the_pass() -> None:
    with pytest.raises(TypeError, match="a recipe cannot write a"):
        recipe.loads("model: m\npasses: [x: {table: {}}]\nexport: [write]\n", lambda kind, name: Unwritable)
