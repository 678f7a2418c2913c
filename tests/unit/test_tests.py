"""How the tests wait."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
# In scripts that stand in strings, too. `asyncio.sleep(0)` lets others run, and waits for nothing.
_SLEEP = re.compile(r"\b(?:time|asyncio)\.sleep\((?!0\))")
# How often a file sleeps, and why it may.
SLEEPS = {
    "waiting.py": (1, "asks again for what nobody tells: the one place that does"),
    "unit/test_agent_listener.py": (2, "strangers that send a byte at a time"),
}


def _files() -> dict[str, str]:
    here = Path(__file__)
    return {
        str(path.relative_to(TESTS)): path.read_text() for path in sorted(TESTS.rglob("*.py")) if path != here
    }


def test_no_test_sleeps() -> None:
    """Wait for the event, as tests/waiting.py does: a sleep is too short, or longer than needed."""
    found = {name: len(_SLEEP.findall(text)) for name, text in _files().items()}
    assert {name: count for name, count in found.items() if count} == {
        name: count for name, (count, _) in SLEEPS.items()
    }


def _spins(node: ast.AST) -> bool:
    """Return True for a loop that does nothing; one whose condition makes a call may wait in it."""
    return (
        isinstance(node, ast.While)
        and all(isinstance(one, ast.Pass | ast.Continue) for one in node.body)
        and not any(isinstance(one, ast.Call) for one in ast.walk(node.test))
    )


def test_no_loop_spins() -> None:
    found = [
        f"{name}, line {node.lineno}"
        for name, text in _files().items()
        for node in ast.walk(ast.parse(text))
        if _spins(node)
    ]
    assert found == []
