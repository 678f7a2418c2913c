"""Debian's Chromium, driven by playwright: for tests of pages. Nothing but loopback is asked for."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
# By their names in a test's id.
SCHEMES = ("light", "dark")
WIDTHS = (1280, 390)
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


def why_absent() -> str:
    """Return what is missing for tests in a browser, '' if nothing is."""
    if shutil.which("chromium") is None:
        return "there is no chromium (Debian: chromium)"
    missing = [name for name in ("playwright", "axe_playwright_python") if not importlib.util.find_spec(name)]
    return f"{', '.join(missing)}: not installed (the extra browser)" if missing else ""


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """Run Chromium with a profile of its own.

    Args:
        profile: an empty folder.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            str(profile), executable_path=shutil.which("chromium"), args=FLAGS, headless=True
        )
        try:
            yield context
        finally:
            context.close()


def violations(page: Any) -> list[str]:
    """Return what axe-core finds against WCAG 2.2 AA, a line for each element."""
    from axe_playwright_python.sync_playwright import Axe

    # The policy of the page lets no other script run, and this is no part of the page.
    violations = Axe().run(page, options={"runOnly": {"type": "tag", "values": RULES}}).response["violations"]
    return [
        f"{violation['id']}: {node['target']} {node['failureSummary']}"
        for violation in violations
        for node in violation["nodes"]
    ]
