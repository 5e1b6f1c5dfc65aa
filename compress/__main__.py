"""``python -m compress``, and the ``compress`` command: runs one command line and turns its end into an exit code."""

from __future__ import annotations

import importlib
import sys
import tempfile
import traceback
from collections.abc import Sequence

import click

from compress import __compress__
from compress.cli import Options, cli
from compress.errors import CompressError, InputError

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; complaints go to stderr.

    0 done, 1 our bug, 2 the user's input, 3 a gate failed, 130 interrupted.
    """
    options = Options()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        check_installation()
        result = cli.main(list(arguments), prog_name="compress", standalone_mode=False, obj=options)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort as error:
        click.echo("interrupted", err=True)
        _say_notes(error.__cause__)
        return INTERRUPTED
    except CompressError as error:
        _complain(error)
        _say_notes(error)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the edge of the program: whatever gets here is our bug
        _apologise(error, options.debug)
        _say_notes(error)
        return 1
    return result if isinstance(result, int) else 0


def check_installation() -> None:
    """InputError if another distribution has overwritten, or shadows, one of the packages with a generic name."""
    wrong = []
    for name in ("calibration", "exporters"):
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            wrong.append(f"{name} cannot be imported: {error}")
            continue
        found = getattr(module, "__compress__", None)
        if found != __compress__:
            what = f"belongs to edgepress {found}" if found else "is not edgepress's"
            folder = next(iter(getattr(module, "__path__", [module.__file__])))
            wrong.append(f"{folder} {what}, but compress is of edgepress {__compress__}")
    if wrong:
        raise InputError("\n".join(wrong), fix="reinstall edgepress where no other package brings these folders")


def _complain(error: CompressError) -> None:
    gap = "\n" if "\n" in error.what else " "
    click.echo(f"{click.style(error.title, fg='red')}:{gap}{error}", err=True)


def _say_notes(error: BaseException | None) -> None:
    """What was kept, say."""
    for note in getattr(error, "__notes__", []):
        click.echo(f"  {note}", err=True)


def _apologise(error: Exception, debug: bool) -> None:
    text = "".join(traceback.format_exception(error))
    if debug:
        click.echo(text, err=True)
        return
    with tempfile.NamedTemporaryFile("w", prefix="compress-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write(text)
    click.echo(f"unexpected error: {type(error).__name__}: {error}", err=True)
    click.echo(f"  this is a bug of compress; its traceback is in {file.name} (or run compress --debug ...)", err=True)


if __name__ == "__main__":
    sys.exit(main())
