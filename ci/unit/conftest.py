"""How many threads compute, for tests that do not leave it to the run; how tests with random examples draw them; and
what a GPU machine does without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec

import pytest
import torch

collect_ignore = [] if find_spec("xgrammar") else ["runtime/test_grammar_packets.py", "runtime/test_grammars.py"]
"""`make test-gpu` collects whole folders, and a GPU machine need not have every package of the engine."""

with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # The time to draw examples depends on the machine, not on the code.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small networks gain nothing from more."""
    with _threads(1):
        yield


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """C++ divides its work among threads, which must be tried however many the run gives each process."""
    with _threads(2):
        yield


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)
