"""Unit tests: no training, real sockets and processes where they are cheap."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A loaded machine is no failure of the code.
settings.register_profile("unit", deadline=None)
settings.load_profile("unit")


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)
