"""Unit tests: no training, real sockets and processes where they are cheap."""

from __future__ import annotations

from hypothesis import settings

# A loaded machine is no failure of the code.
settings.register_profile("unit", deadline=None)
settings.load_profile("unit")
