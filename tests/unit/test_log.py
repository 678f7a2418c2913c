"""The agent's log holds errors of ttprun, with times in UTC."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from adaptor import config, output
from adaptor.launchers.records.log import Log, tell_error
from tests.unit.threads import LONG_S


@pytest.fixture
def _far_from_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as context:
        context.setenv("TZ", "UTC-09:00")  # POSIX counts to the west: nine hours before UTC
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("_far_from_utc")
def test_an_error_is_logged_with_its_traceback_and_in_utc(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = Log(config.load({"TTP_LOG_PATH": str(tmp_path)}))
    start = datetime.now(timezone.utc)
    try:
        raise KeyError("of the test")
    except KeyError as error:
        tell_error("an error in the test", error)
    assert output.drain(LONG_S)
    log.close()
    (path,) = tmp_path.glob("ttp-agent-*.log")
    written = path.read_text()
    first = re.match(r"(\S+)Z ERROR an error in the test: Traceback", written)
    assert first is not None, written
    at = datetime.fromisoformat(f"{first[1]}000+00:00")
    assert abs((at - start).total_seconds()) < 3600, "local time is nine hours away"
    assert written.endswith("KeyError: 'of the test'\n")
    assert capfd.readouterr().err.endswith("KeyError: 'of the test'\n")
