"""`ttprun` in a hostile environment: the job runs, or ttprun ends with one line."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from adaptor.launchers.cli import ttprun
from tests.unit.launching import ONE, Launcher, launcher, run_here, zygote
from tests.unit.nodes import ROOT
from tests.unit.other_user import NOBODY
from tests.unit.threads import LONG_S

__all__ = ["launcher", "zygote"]


@pytest.mark.robustness(
    "B6", "the script is a folder, a FIFO, a device, '-' or empty", "refused in one line, which names it"
)
@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("folder", "the script folder is a folder without a __main__.py: Python cannot run it"),
        ("fifo", "the script fifo is not a regular file: each worker reads it, and again at a restart"),
        ("/dev/null", "the script /dev/null is not a regular file: "),
        ("-", "the script - cannot be run (No such file or directory)"),
        ("", "the script is '': give ttprun the path of a Python file"),
        ("x" * 5000, f"the script {'x' * 5000} cannot be run (File name too long)"),
    ],
    ids=["folder", "fifo", "device", "dash", "empty", "long"],
)
def test_a_path_that_is_no_script(
    script: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    assert ttprun.main([script]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ttprun: error: {line}")
    assert len(error.splitlines()) == 1


@pytest.mark.robustness("B6", "the script may not be read", "refused in one line, which names it")
def test_a_script_that_may_not_be_read(launcher: Launcher) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can play another user")
    script = launcher.script("print('started')")
    (launcher.folder / script).chmod(0o600)
    # Its working directory is that folder, so the parents' permissions do not matter.
    setup = f"import os; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})"
    result = launcher.run(*ONE, script, prelude=setup)
    assert (result.code, result.log) == (
        2,
        f"ttprun: error: the script {script} cannot be run (Permission denied)\n",
    )


@pytest.mark.robustness("B6", "the working directory has been removed", "refused in one line")
def test_the_working_directory_is_gone(launcher: Launcher) -> None:
    setup = "import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir(os.getcwd())"
    line = (
        "ttprun: error: the working directory is not there any more (No such file or directory): start ttprun"
        " in another one\n"
    )
    result = launcher.run(*ONE, "/nowhere.py", prelude=setup)
    assert (result.code, result.log) == (2, line)


@pytest.mark.robustness(
    "B6",
    "no stdin, stdout, stderr; no HOME; umask 077; LC_ALL=C; PYTHONPATH of things that are not there",
    "the job runs to its end, exit code 0",
)
def test_a_bare_environment(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    kept = {name: value for name, value in os.environ.items() if "TTP" not in name and name != "HOME"}
    environ = {
        **kept,
        "LC_ALL": "C",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"/nowhere:/dev/null:{ROOT}",
        "TTP_LOG_PATH": str(tmp_path / "logs"),
    }
    command = shlex.join([sys.executable, "-m", "adaptor.launchers.cli.ttprun", *ONE, "script.py"])
    completed = subprocess.run(
        ["sh", "-c", f"umask 077; exec {command} <&- >&- 2>&-"],
        cwd=tmp_path,
        env=environ,
        timeout=3 * LONG_S,
        check=False,
    )
    assert completed.returncode == 0
    assert (tmp_path / "ran").exists()


def test_a_locale_that_is_not_utf8(tmp_path: Path) -> None:
    """Restarted workers report an error with a character outside of the locale."""
    (tmp_path / "script.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    raise OSError('caf\\u00e9')\n"
        "Path('told').write_text(os.environ['TTP_LAST_INCIDENT'])\n"
    )
    command = [sys.executable, "-m", "adaptor.launchers.cli.ttprun", *ONE, "--max-restarts", "1", "script.py"]
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run_here(tmp_path, *command, PYTHONPATH=str(ROOT), TTP_LOG_PATH=str(tmp_path / "logs"), **locale, code=0)
    assert "rank 0 raised OSError: caf\\xe9; " in (tmp_path / "told").read_text()


@pytest.mark.robustness("B6", "ttprun under nohup, and the terminal goes away (SIGHUP)", "the job goes on")
@pytest.mark.parametrize("ignored", [True, False], ids=["nohup", "as ever"])
def test_nohup(ignored: bool, launcher: Launcher) -> None:
    """nohup ignores SIGHUP from the start; otherwise SIGHUP ends the job, as under torchrun."""
    script = launcher.script(
        "import os, re\n"
        "from pathlib import Path\n"
        "status = Path(f'/proc/{os.getppid()}/status').read_text()\n"
        "print(*(int(re.search(f'{n}:\\s*(.*)', status)[1], 16) & 1 for n in ('SigIgn', 'SigCgt')))\n"
    )
    setup = f"import signal; signal.signal(signal.SIGHUP, signal.{'SIG_IGN' if ignored else 'SIG_DFL'})"
    result = launcher.run(*ONE, script, prelude=setup)
    assert (result.code, result.last_line) == (0, "1 0" if ignored else "0 1"), result.log
