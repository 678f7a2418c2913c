"""What is installed on an Ascend machine."""

from __future__ import annotations


def get_cann_version() -> str:
    """Return a version of the toolkit that is recent enough for the frameworks."""
    return "8.0.RC3"
