"""What the tests of fronts share."""

from __future__ import annotations

import pytest
from list_front import ListFront


@pytest.fixture
def front() -> ListFront:
    front = ListFront()
    front.start()
    return front
