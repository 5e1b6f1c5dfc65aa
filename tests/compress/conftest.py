from __future__ import annotations

import pytest

from tests.compress.runs import Bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A tiny model with texts, and runs that are made once for all tests."""
    return Bench(tmp_path_factory.mktemp("bench"))
