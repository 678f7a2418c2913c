"""Plug-ins by entry points: loaded by name; none, two or a broken one of a name give one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from adaptor import engines, plug_ins
from adaptor.errors import AdaptorError, ConfigError, StartError
from tests.waiting import captured

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution with one engine into a folder of its own on the path."""

    def installed(
        distribution: str,
        engine: str,
        code: str = "class Engine: pass",
        alone: bool = False,
        group: str = plug_ins.ENGINES,
    ) -> None:
        module = distribution.replace("-", "_")
        folder = tmp_path / distribution
        info = folder / f"{module}-1.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{engine} = {module}:Engine\n")
        monkeypatch.setattr(sys, "path", [str(folder), *([] if alone else sys.path)])
        monkeypatch.delitem(sys.modules, module, raising=False)

    return installed


def refused(name: str, kind: type[AdaptorError]) -> str:
    with pytest.raises(kind) as caught:
        engines.find(name)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_the_adaptors_own_are_found_in_the_same_way() -> None:
    assert plug_ins.names(plug_ins.DEVICES) == ("cpu", "cuda", "npu")
    assert plug_ins.names(plug_ins.ENGINES) == ("builtin", "mindio")
    assert plug_ins.names(plug_ins.FORMATS) == ("mcore_adapter", "torch", "torch_dist")
    assert isinstance(engines.find("builtin"), engines.Builtin)


def test_one_of_another_distribution_is_found(install: Install) -> None:
    install("other-engine", "other")
    assert type(engines.find("other")).__module__ == "other_engine"


def test_an_unknown_name_is_one_line_with_the_known_names(install: Install) -> None:
    install("other-engine", "other")
    assert refused("mindoi", ConfigError) == (
        "TTP_ENGINE is 'mindoi': it must be one of builtin, mindio, other, or left out;"
        " a plug-in could add it (ttp_adaptor.engines)"
    )


def test_two_of_a_name_are_refused(install: Install) -> None:
    install("other-engine", "builtin")
    line = refused("builtin", StartError)
    assert line.startswith("TTP_ENGINE is 'builtin': ")
    assert "ttp-adaptor" in line
    assert "other-engine" in line


def test_one_that_cannot_be_imported_is_named_with_its_owner(install: Install) -> None:
    install("other-engine", "other", "import lab_that_is_not_here")
    line = refused("other", StartError)
    assert line.startswith("the plug-in other of other-engine cannot be loaded (other_engine:Engine: ")
    assert "lab_that_is_not_here" in line


@pytest.mark.parametrize(
    ("group", "command"),
    [
        (plug_ins.SETTINGS, ("-c", "import adaptor; adaptor.enable()")),
        (plug_ins.MODULE_COMMANDS, ("-m", "adaptor", "report")),
        (plug_ins.WORKER_HOOKS, ("-m", "adaptor.launchers.cli.ttprun", "script.py")),
    ],
)
def test_one_that_cannot_be_imported_shows_no_traceback(
    install: Install, tmp_path: Path, group: str, command: tuple[str, ...]
) -> None:
    install("other-part", "other", "import lab_that_is_not_here", group=group)
    (tmp_path / "script.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "other-part")}
    completed = captured([sys.executable, *command], cwd=tmp_path, env=environment)
    assert completed.returncode != 0
    assert "the plug-in other of other-part cannot be loaded" in completed.stderr
    assert "Traceback" not in completed.stderr


def test_an_installation_that_is_older_than_its_sources_says_so(install: Install) -> None:
    install("other-engine", "other", alone=True)
    assert refused("builtin", StartError).startswith("ttp-adaptor is installed without its own entry points")
