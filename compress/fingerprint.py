"""What the results of a run depend on, name by name: only with all of it equal may another process go on with it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from calibration.windows import Windows
from compress import __version__
from compress.journal import sha256_of
from compress.prepare import Prepared
from compress.recipe import to_dict
from compress.runner.measure import cpu_model

PASSING = frozenset({"_name_or_path", "transformers_version"})
"""Keys of config.json that say where a model came from."""


def fingerprint(prepared: Prepared, calibration: Windows, weights: str) -> dict[str, str]:
    """Name -> value, as text; ``weights`` is the checksum of the model's own.

    Artifacts, measurements, evaluation and gates may change: they are made from what the passes leave. Versions, CPU
    and threads may not: they change the order of sums, and with it the last bits.
    """
    recipe = to_dict(prepared.recipe)
    found = {
        "edgepress": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "cpu": f"{cpu_model()} ({torch.backends.cpu.get_cpu_capability()})",
        "threads": str(torch.get_num_threads()),
        "weights (SHA-256)": weights,
    }
    config = {key: value for key, value in prepared.original.config.items() if key not in PASSING}
    found |= dict(_flat("config.json", config))
    for number, step in enumerate(recipe["passes"], 1):
        ((name, arguments),) = step.items()
        found |= {f"pass {number}": name, **dict(_flat(f"passes.{name}", arguments))}
    for step in prepared.passes:
        files = {key: value for key, value in vars(step.value).items() if isinstance(value, Path)}
        found |= {f"passes.{step.name}.{key} (SHA-256)": sha256_of(path) for key, path in files.items()}
    found |= dict(_flat("recipe", {key: recipe[key] for key in ("ignore", "pin")}))
    if prepared.needs_tokens:
        found |= dict(_flat("calibration", recipe["calibration"]))
        found["calibration tokens (SHA-256)"] = str(calibration.audit["tokens_sha256"])
    return found


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Keys of nested mappings joined by dots, values as JSON."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(f"{name}.{key}", item)
    else:
        yield name, json.dumps(value, sort_keys=True)
