"""``optimum-cli export edgepress``: the ``run`` command from within optimum's command line.

Installed as ``optimum/commands/register/edgepress.py``: optimum imports every module of that namespace folder at its
start, so nothing heavy is imported here, and the folder has no ``__init__.py``.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import ClassVar

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand


class EdgepressExportCommand(BaseOptimumCLICommand):  # type: ignore[misc]
    """Run a recipe; the process exits with the code of ``compress run``."""

    COMMAND: ClassVar = CommandInfo(name="edgepress", help="Compress a model by a recipe to ONNX and GGUF files.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Declare the options of ``compress run`` that exporting needs."""
        parser.add_argument("output", metavar="OUT", help="Folder for the artifacts and the report.")
        parser.add_argument("-r", "--recipe", required=True, help="A recipe file, or the name of a bundled one.")
        parser.add_argument("-m", "--model", help="A directory or a hub id, instead of the recipe's model.")
        parser.add_argument(
            "--set",
            metavar="KEY=VALUE",
            action="append",
            default=[],
            dest="overrides",
            help="Change one value of the recipe; may be repeated.",
        )
        parser.add_argument("--overwrite", action="store_true", help="Replace what OUT holds.")

    def run(self) -> None:
        """Hand over to ``compress run``, and exit with its code."""
        from compress.__main__ import main

        arguments = ["run", self.args.recipe, "--out", self.args.output]
        if self.args.model is not None:
            arguments += ["--model", self.args.model]
        for override in self.args.overrides:
            arguments += ["--set", override]
        if self.args.overwrite:
            arguments.append("--overwrite")
        raise SystemExit(main(arguments))


REGISTER_COMMANDS = [(EdgepressExportCommand, ExportCommand)]
