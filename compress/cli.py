"""The command line: arguments in, exit codes out. The work is done by :mod:`compress.engine` and the runner.

Heavy modules are imported inside the commands, so that help and complaints come at once.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from compress import __version__
from compress.errors import GateError, InputError
from compress.kv import CacheTypes
from compress.options import ARTIFACT, FORMAT, JSON, cache_options, recipe_options, text_options, window_options

if TYPE_CHECKING:
    from compress.kv import CacheType
    from compress.recipe import Recipe


@dataclass
class Options:
    """Options of the whole command."""

    debug: bool = False


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="compress")
@click.option("--debug", is_flag=True, help="Show the traceback of an unexpected error.")
@click.pass_obj
def cli(options: Options, debug: bool) -> None:
    """Compress a language model by a recipe to ONNX and GGUF files, and measure those very files.

    Exit codes: 0 done, 1 a bug of compress, 2 something in your input, 3 a gate of the recipe failed.
    """
    options.debug = debug


@cli.command()
@recipe_options
@click.option("--out", type=click.Path(path_type=Path), help="Folder for artifacts and report; else runs/RECIPE.")
@click.option("--dry-run", is_flag=True, help="Check everything and show the plan; write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace what the folder holds, or an interrupted run has left.")
@click.option("--resume", is_flag=True, help="Go on with a run into this folder that was interrupted.")
def run(
    *,
    recipe: str,
    model: str | None,
    overrides: Sequence[str],
    as_json: bool,
    quiet: bool,
    out: Path | None,
    dry_run: bool,
    overwrite: bool,
    resume: bool,
) -> None:
    """Compress a model by RECIPE: a .yaml file, or the name of a bundled recipe."""
    from compress.recipe import find

    loaded = _load(recipe, model, overrides)
    folder = out or Path("runs") / find(recipe).stem
    if dry_run:
        _show_plan(loaded, as_json, quiet, folder, overwrite, resume)
        return
    _load_torch()
    from compress import engine, terminal

    _say_what_was_left(folder, overwrite, resume)
    report = engine.run(loaded, folder, overwrite=overwrite, resume=resume, progress=terminal.progress(quiet))
    if as_json:
        click.echo(report.to_json())
    else:
        terminal.show_report(report)
        click.echo(f"written to {folder}")
    failed = [gate for gate in report.gates if not gate.passed]
    if failed:
        lines = [f"{gate.artifact}: {gate.gate} is {gate.limit:g}, found {gate.value:g}" for gate in failed]
        raise GateError("\n".join(lines))


@cli.command()
@recipe_options
def plan(*, recipe: str, model: str | None, overrides: Sequence[str], as_json: bool, quiet: bool) -> None:
    """Check RECIPE against its model and show what would be done; write nothing."""
    _show_plan(_load(recipe, model, overrides), as_json, quiet)


@cli.command()
@ARTIFACT
@FORMAT
@click.option("--providers", is_flag=True, help="Of an .onnx file: what each execution provider would run.")
@JSON
def inspect(*, artifact: Path, format_: str | None, providers: bool, as_json: bool) -> None:
    """List the tensors of ARTIFACT: a .onnx, .gguf or .safetensors file, or a folder that holds one."""
    from compress import artifacts, terminal

    if providers:
        rows = artifacts.providers(artifact, format_)
        if as_json:
            _print_json([dataclasses.asdict(row) for row in rows])
        else:
            terminal.show_providers(rows)
        return
    found = artifacts.inspect(artifact, format_)
    if as_json:
        _print_json(found.to_dict())
    else:
        terminal.show_tensors(found)


@cli.command()
@ARTIFACT
@FORMAT
@click.option("--prompt-tokens", type=int, default=128, show_default=True)
@click.option("--generate-tokens", type=int, default=64, show_default=True)
@click.option("--threads", default="auto", show_default=True, help="A number, or auto: the CPUs available here.")
@click.option("--repeats", type=int, default=3, show_default=True)
@cache_options
@window_options
@JSON
def bench(
    *,
    artifact: Path,
    format_: str | None,
    prompt_tokens: int,
    generate_tokens: int,
    threads: str,
    repeats: int,
    kv_keys: CacheType,
    kv_values: CacheType,
    window: int | None,
    sinks: int,
    as_json: bool,
) -> None:
    """Measure speed and memory of ARTIFACT in a fresh process."""
    from compress.recipe import Measure

    with _option_errors():
        measure = Measure(prompt_tokens, generate_tokens, _threads(threads), repeats, kv_keys, kv_values, window, sinks)
    entry = _entry(artifact, format_)
    from compress import artifacts, terminal

    performance = artifacts.bench(entry, measure)
    if as_json:
        _print_json(dataclasses.asdict(performance))
    else:
        terminal.show_performance(performance)


@cli.command("eval")
@ARTIFACT
@FORMAT
@click.option(
    "--reference", required=True, help="The model it was made from: a folder, .gguf file, hub id or builtin:NAME."
)
@text_options("test")
@click.option("--windows", type=int, default=16, show_default=True)
@click.option("--sequence-length", type=int, default=512, show_default=True)
@cache_options
@window_options
@JSON
def evaluate(
    *,
    artifact: Path,
    format_: str | None,
    reference: str,
    source: Literal["builtin", "text", "jsonl", "hub"],
    path: Path | None,
    name: str | None,
    split: str,
    column: str | None,
    chat_template: bool,
    encoding: str,
    windows: int,
    sequence_length: int,
    kv_keys: CacheType,
    kv_values: CacheType,
    window: int | None,
    sinks: int,
    as_json: bool,
) -> None:
    """Compare the output of ARTIFACT with the model it was made from, on held-out text."""
    from compress.recipe import Evaluate
    from compress.runner.streaming import stream

    _load_torch()
    with _option_errors():
        settings = Evaluate(
            source=source,
            path=path,
            name=name,
            split=split,
            column=column,
            chat_template=chat_template,
            encoding=encoding,
            windows=windows,
            sequence_length=sequence_length,
        )
        bound = stream(window, sinks)
    entry = _entry(artifact, format_)
    from compress import artifacts, terminal

    cache = CacheTypes(kv_keys, kv_values)
    quality = artifacts.evaluate(entry, reference, settings, cache=cache, bound=bound)
    if as_json:
        _print_json(dataclasses.asdict(quality))
    else:
        terminal.show_quality(quality)


@cli.command()
@click.argument("model")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The file to write.")
@text_options("train")
@click.option("--samples", type=int, default=32, show_default=True)
@click.option("--sequence-length", type=int, default=512, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--overwrite", is_flag=True, help="Replace the file.")
@click.option("--quiet", "-q", is_flag=True, help="Show no progress.")
@JSON
def imatrix(*, model: str, out: Path, overwrite: bool, quiet: bool, as_json: bool, **text: Any) -> None:
    """Write an importance matrix of MODEL, as llama.cpp's tools and rtn read it: what its layers are fed."""
    from compress.recipe import Calibration

    _load_torch()
    with _option_errors():
        section = Calibration(**text)
    from compress import importance, terminal

    found = importance.collect(model, section, out, overwrite, terminal.progress(quiet))
    if as_json:
        _print_json(dataclasses.asdict(found))
    else:
        terminal.show_record("Importance matrix", dataclasses.asdict(found))


@cli.command()
@ARTIFACT
@FORMAT
@click.option("--prompt", help="Answer this and end; without it, one message a line from stdin.")
@click.option("--system", help="The system message.")
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Longest answer.")
@click.option("--threads", default="auto", show_default=True, help="A number, or auto: the CPUs available here.")
@click.option("--raw", is_flag=True, help="Continue the text as it stands, without a chat template.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: always the most likely token.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@window_options
def chat(
    *,
    artifact: Path,
    format_: str | None,
    prompt: str | None,
    system: str | None,
    max_tokens: int,
    threads: str,
    raw: bool,
    temperature: float,
    top_p: float,
    seed: int,
    window: int | None,
    sinks: int,
) -> None:
    """Talk with ARTIFACT in the runtime that the device will use; end with Ctrl-D."""
    from compress.runner.chat import ChatSession, Sampling
    from compress.runner.streaming import stream
    from compress.runner.threads import resolve_threads

    with _option_errors():
        bound = stream(window, sinks)
    sampling = Sampling(temperature, top_p, seed)
    messages = [{"role": "system", "content": system}] if system else []
    session_threads = resolve_threads(_threads(threads))
    with ChatSession(artifact, session_threads, raw=raw, format=format_, stream=bound) as session:
        for text in _messages(prompt):
            messages.append({"role": "user", "content": text})
            answer = []
            for piece in session.reply(messages, max_tokens, sampling):
                click.echo(piece, nl=False)
                answer.append(piece)
            click.echo()
            if session.finish_reason != "stop":
                click.echo(f"(the answer was cut: {session.finish_reason})", err=True)
            messages.append({"role": "assistant", "content": "".join(answer)})


@cli.command("list")
@click.argument("what", type=click.Choice(["passes", "exporters", "recipes", "devices"]))
@JSON
def list_(*, what: str, as_json: bool) -> None:
    """List what recipes can name, or what this machine offers."""
    from compress import listing, terminal

    rows = listing.TABLES[what]()
    if as_json:
        _print_json(rows)
    else:
        terminal.show_record(what, {what: rows})


def _load_torch() -> None:
    """Load torch so that its idle threads sleep: spinning, they make a machine that others use many times slower.

    The policy is read once, when the library is loaded; a runtime that is measured keeps its own.
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return
    os.environ["OMP_WAIT_POLICY"] = "passive"
    try:
        importlib.import_module("torch")
    finally:
        del os.environ["OMP_WAIT_POLICY"]


def _load(recipe: str, model: str | None, overrides: Sequence[str]) -> Recipe:
    from compress import registry
    from compress.recipe import load

    return load(recipe, registry.load, overrides, model)


def _say_what_was_left(out: Path, overwrite: bool, resume: bool) -> None:
    """Say what becomes of a run into ``out`` that was interrupted."""
    from compress.workspace import interrupted, partial_of

    steps = interrupted(out)
    if resume:
        left = f"going on after {steps} finished steps" if steps else "nothing to resume: a new run"
        click.echo(f"{partial_of(out)}: {left}", err=True)
    elif steps and overwrite:
        click.echo(f"{partial_of(out)}: {steps} finished steps of an interrupted run are removed", err=True)


def _show_plan(
    recipe: Recipe, as_json: bool, quiet: bool, out: Path | None = None, overwrite: bool = False, resume: bool = False
) -> None:
    from compress import engine, terminal

    shown = terminal.progress(quiet)
    planned = engine.plan(recipe, out, overwrite=overwrite, resume=resume, progress=shown).to_dict()
    if as_json:
        _print_json(planned)
    else:
        terminal.show_record("Plan", planned)


def _entry(path: Path, format_: str | None) -> Path:
    from compress.runner.artifact import find_artifact

    artifact = find_artifact(path, format_)
    return artifact.path / artifact.entry


def _threads(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError as error:
        raise InputError(f"--threads: expected a number or auto, got '{text}'") from error


def _messages(prompt: str | None) -> Iterator[str]:
    """The one prompt, or a message for each line that is typed or piped in, until the end of input."""
    if prompt is not None:
        yield prompt
        return
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line:
            yield line


@contextmanager
def _option_errors() -> Iterator[None]:
    """Turn a section's ``field: message`` lines into complaints about the options of the same names."""
    try:
        yield
    except ValueError as error:
        pairs = [line.partition(":") for line in str(error).splitlines()]
        raise InputError("\n".join(f"--{name.replace('_', '-')}:{text}" for name, _, text in pairs)) from error


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, allow_nan=False))
