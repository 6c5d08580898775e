"""No garbage is collected for a while, and afterwards it is as before.

Run: pytest ci/unit/test_garbage_pause.py
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from inflight.garbage_pause import no_collections


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collections_stop_and_go_on_as_before(is_enabled: bool) -> None:
    if not is_enabled:
        gc.disable()
    with pytest.raises(ImportError), no_collections():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() == is_enabled
