"""Run code as another user of this machine (`nobody`), for tests of permissions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.unit.threads import LONG_S

NOBODY = 65534
_BEGIN = f"import os, socket, sys\nos.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"


@contextmanager
def other_user(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run `code` as another user with pipes to its standard input and output; end the child at the end."""
    if os.getuid() != 0:
        pytest.skip("only root can play another user")
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-u", "-c", _BEGIN + code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=LONG_S)


def said_by_other_user(code: str, *arguments: str) -> str:
    """Return all output of `code`, run as another user until it ends."""
    with other_user(code, *arguments) as child:
        assert child.stdout is not None
        return child.stdout.read()
