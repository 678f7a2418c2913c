"""The answers of `ttp` on a terminal, in a pipe, and without rich."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from adaptor import terminal
from tests.faults import warm

LINES = [
    "FAIL lock         flock does not work [Errno 5] " + "x" * 200,
    "protection   NOT PROTECTED: [bold]a markup of rich[/bold]",
    "checkpoint   intact",
]


def _shown(capsys: pytest.CaptureFixture[str]) -> str:
    terminal.show(LINES)
    return capsys.readouterr().out


def test_a_pipe_has_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert _shown(capsys) == "\n".join(LINES) + "\n"


def test_a_terminal_has_the_same_text_in_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = _shown(capsys)
    assert "\x1b[31mFAIL" in shown
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == "\n".join(LINES) + "\n"


def test_an_answer_in_the_place_of_the_last_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal `ttp status --watch` redraws its answer; in a pipe the answers follow each other."""
    terminal.show(["one"], is_repeated=True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    terminal.show(["two"], is_repeated=True)
    assert re.fullmatch("one\n(\x1b\\[[0-9]*[HJ])+two\n", capsys.readouterr().out)


def test_a_terminal_without_rich(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert _shown(capsys) == "\n".join(LINES) + "\n"


@pytest.mark.parametrize(
    "command_words",
    [("ttp", "schema", "incident"), ("ttprun", "--help"), ("ttprun", "--help-all")],
    ids=" ".join,
)
def test_a_reader_that_has_enough(command_words: tuple[str, ...]) -> None:
    """`ttp schema incident | head -1` gives no traceback."""
    command = [sys.executable, "-m", f"adaptor.launchers.cli.{command_words[0]}", *command_words[1:]]
    read, write = os.pipe()
    os.close(read)
    if command_words[0] == "ttp":
        completed = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    else:  # the others import torch
        completed = warm.run(command, stdout=write)
    os.close(write)
    assert (completed.returncode, completed.stderr) == (141, "")


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
def test_a_disk_that_is_full(flags: tuple[str, ...], tmp_path: Path) -> None:
    """`ttp verify SAVE > file` on a full disk does not exit with 1, the code of a finding."""
    command = [sys.executable, "-m", "adaptor.launchers.cli.ttp", "verify", str(tmp_path), *flags]
    with Path("/dev/full").open("w") as full:
        completed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (completed.returncode, completed.stderr) == (2, "ttp: error: [Errno 28] No space left on device\n")


def test_a_disk_that_is_full_for_a_list_of_a_store(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "adaptor.launchers.cli.ttp",
        "store",
        "list",
        f"file://{tmp_path}",
        "--json",
    ]
    with Path("/dev/full").open("w") as full:
        completed = warm.run(command, stdout=full)
    line = "ttp: error: [Errno 28] No space left on device\n"
    assert (completed.returncode, completed.stderr) == (2, line)
