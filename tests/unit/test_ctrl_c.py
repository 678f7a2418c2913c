"""Ctrl-C to commands of `ttp` that run until interrupted or read for long; `ttp serve`: `test_serve.py`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from adaptor.checkpoint import hashing, manifest
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from tests.unit.launching import DROPPED, HEARS_CTRL_C, interrupted_in_import
from tests.unit.test_serve import job  # noqa: F401
from tests.waiting import LONG_S, captured

# Ctrl-C comes at the first look at the job's files, and Python drops it; a second look fails the test.
LOOKED_AT_ONCE = """
import os
from adaptor.operations import job_reader
LOOK = job_reader.{look}
looks = 0
def looked(*arguments):
    global looks
    looks += 1
    if looks > 1:
        os._exit(3)
    interrupt()
    return LOOK(*arguments)
job_reader.{look} = looked
"""


@pytest.mark.parametrize(
    ("command", "look"),
    [(("status", "--watch"), "status"), (("otel", "--follow"), "goes_on")],
    ids=["status", "otel"],
)
def test_ctrl_c_that_python_has_dropped(command: tuple[str, str], look: str, job: Path) -> None:  # noqa: F811
    program = (
        f"{HEARS_CTRL_C}\n{DROPPED}\n{LOOKED_AT_ONCE.format(look=look)}\n"
        "from adaptor.launchers.cli import ttp; raise SystemExit(ttp.main())"
    )
    line = [sys.executable, "-c", program, *command, str(job)]
    captured(line, code=130)


@pytest.mark.parametrize(
    ("program_of", "module"),
    [
        ("adaptor.launchers.cli.ttp", "adaptor.operations.cli"),
        ("adaptor.launchers.cli.ttp", "msgspec"),
        ("adaptor.launchers.cli.ttp", "adaptor.launchers.doctor.doctor_command"),
        ("adaptor.launchers.cli.ttp", "adaptor.store.command"),
        ("adaptor.__main__", "adaptor.commands"),
        ("adaptor.__main__", "argparse"),
        ("adaptor.__main__", "adaptor.transform.functions"),
    ],
)
def test_ctrl_c_while_a_command_is_imported(program_of: str, module: str) -> None:
    program = interrupted_in_import(program_of, module)
    line = [sys.executable, "-c", program, "verify", "nowhere"]
    completed = captured(line)
    assert (completed.returncode, completed.stdout, completed.stderr) == (130, "", "")


@pytest.mark.parametrize(
    "program_of", ["adaptor.launchers.cli.entry", "adaptor.launchers.cli.ttp", "adaptor.__main__"]
)
def test_nothing_is_imported_before_a_command_hears_ctrl_c(program_of: str) -> None:
    """Except Python's startup and the package itself, during which Ctrl-C gives Python's traceback."""
    program = (
        "import sys\n"
        "import adaptor.launchers.cli\n"
        "before = set(sys.modules)\n"
        f"import {program_of}\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    line = [sys.executable, "-c", program]
    completed = captured(line)
    assert (completed.stdout, completed.stderr) == (f"{program_of}\n", "")


# A file that takes very long, as one of many gigabytes does.
LONG_FILE = """
import threading
from adaptor.checkpoint import hashing
def long(path):
    print("begun", flush=True)
    threading.Event().wait()
hashing.hash_file = long
"""


def test_ctrl_c_does_not_wait_for_the_files_that_are_read(tmp_path: Path) -> None:
    folder = tmp_path / naming.final_name(3)
    folder.mkdir()
    (folder / "a").write_bytes(b"content")
    entry = FileEntry("a", 7, hashing.hash_file(folder / "a"))
    (folder / naming.MANIFEST).write_bytes(manifest.Manifest.now(3, [entry], {}, 1).encode())
    command = "from adaptor.launchers.cli import ttp; raise SystemExit(ttp.main())"
    program = f"{HEARS_CTRL_C}\n{LONG_FILE}\n{command}"
    line = [sys.executable, "-c", program, "verify", str(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "begun\n"
        command.send_signal(signal.SIGINT)
        try:
            assert command.wait(LONG_S) == 130
        finally:
            command.kill()
