"""The resource tracker of a worker runs in a session of its own: ttprun ends the session of a dead worker."""

from __future__ import annotations

import os
import sys
from multiprocessing import util
from pathlib import Path

import pytest

from adaptor.patches.torch_worker import resource_trackers_outlive_the_worker
from tests import waiting

_MAIN = "import os, pathlib, sys\ndef main(folder): pathlib.Path(folder, str(os.getsid(0))).touch()\n"


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    ("package", "is_of_tracker"), [("multiprocessing", True), ("joblib", True), ("forkserver", False)]
)
def test_a_resource_tracker_leaves_the_session(
    package: str, is_of_tracker: bool, by_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / ("resource_tracker.py" if is_of_tracker else "forkserver.py")
    module.write_text(_MAIN)
    sessions = tmp_path / "sessions"
    sessions.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = f"from {module.stem} import main; main({str(sessions)!r})"
    encode = os.fsencode if package == "joblib" else str
    call = {"path": os.fsencode(sys.executable), "args": [*map(encode, (sys.executable, "-c", command))]}
    call["passfds"] = []
    args, kwargs = ((), call) if by_name else (tuple(call.values()), {})
    pid = resource_trackers_outlive_the_worker(util.spawnv_passfds, None, args, kwargs)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    waiting.until(lambda: any(sessions.iterdir()), "the tracker has its session")
    (session,) = sessions.iterdir()
    assert (session.name == str(os.getsid(0))) is not is_of_tracker
