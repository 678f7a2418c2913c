"""The timeline of an incident: what of it is a line of the log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from adaptor.control.messages import BoardRecord, Died, Exit, Freeze, Frozen, Phase, Prepare
from adaptor.launchers.chronicle import Chronicle


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_what_every_rank_does_is_for_debugging(
    level: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are thousands of ranks, a line for each would keep orders back."""
    monkeypatch.setattr(logging.getLogger("adaptor"), "propagate", True)
    caplog.set_level(level, "adaptor")
    board = BoardRecord(1, 1, Phase.RUNNING, 5, 5, 5)
    chronicle = Chronicle(str(tmp_path))
    chronicle.heard(0, Died(0, -9, 0.0, board))
    chronicle.ordered(0, 1, Freeze(1))
    chronicle.heard(0, Frozen(1, 1, board))
    chronicle.ordered(0, None, Prepare(1, "/save", 5))
    chronicle.ordered(0, 1, Exit(1))
    said = ["rank 0: fault-noticed status -9, RUNNING after step 5", "node 0: prepare step 5"]
    if level == logging.DEBUG:
        said[1:1] = ["rank 1: freeze ", "rank 1: frozen RUNNING after step 5"]
        said.append("rank 1: exit ")
    assert caplog.messages == said
