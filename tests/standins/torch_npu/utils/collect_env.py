"""What is installed on an Ascend machine."""

from __future__ import annotations


def get_cann_version() -> str:
    """Of the toolkit; one that the frameworks take for recent enough."""
    return "8.0.RC3"
