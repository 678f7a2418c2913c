"""Shell completion for `ttp` and `ttprun`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from adaptor import config
from adaptor.errors import ConfigError
from adaptor.launchers.cli import flags, ttp
from tests.waiting import captured

OFFERS = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
"_shtab_$1" "$1" "${COMP_WORDS[-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("shtab", reason="it is in the extra ops")
    path = tmp_path_factory.mktemp("completion") / "bash"
    path.write_text(ttp.completion("bash", ttp.parser()))
    return path


def offered(script: Path, *typed: str, folder: Path) -> set[str]:
    completed = captured(["bash", "-c", OFFERS, "bash", str(script), *typed], cwd=folder)
    assert (completed.returncode, completed.stderr) == (0, "")
    return set(completed.stdout.split())


def test_commands_and_their_flags(script: Path, tmp_path: Path) -> None:
    assert offered(script, "ttp", "do", folder=tmp_path) == {"doctor"}
    assert {"plan", "completion", "status", "serve"} <= offered(script, "ttp", "", folder=tmp_path)
    assert offered(script, "ttp", "serve", "--to", folder=tmp_path) == {"--token-file"}
    assert offered(script, "ttp", "schema", "n", folder=tmp_path) == {"notice"}


def test_flags_of_ours_and_of_torchrun(script: Path, tmp_path: Path) -> None:
    options = {setting.flag for setting in config.settings()} | {flags.SPARE}
    assert offered(script, "ttprun", "--ttp-", folder=tmp_path) == options
    assert offered(script, "ttprun", "--max-r", folder=tmp_path) == {"--max-restarts"}
    assert offered(script, "ttprun", "--dry", folder=tmp_path) == {flags.DRY_RUN}


def test_files_and_folders(script: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "node.pem").touch()
    assert offered(script, "ttprun", "--ttp-tls-cert", "no", folder=tmp_path) == {"node.pem"}
    assert offered(script, "ttprun", "--ttp-log-path", "", folder=tmp_path) == {"logs"}
    assert offered(script, "ttp", "status", "", folder=tmp_path) == {"logs"}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_takes_it(tmp_path: Path) -> None:
    pytest.importorskip("shtab", reason="it is in the extra ops")
    path = tmp_path / "zsh"
    path.write_text(ttp.completion("zsh", ttp.parser()))
    subprocess.run(["zsh", "-n", str(path)], check=True)


def test_shtab_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[ops\]'"):
        ttp.completion("bash", ttp.parser())
