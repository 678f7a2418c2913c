"""The content of the wheel and the sdist, and the first actions of the installed package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import captured

pytestmark = pytest.mark.integration  # builds and installs the package

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"adaptor": "adaptor", "adaptor.launchers": "launchers", "adaptor.patches": "patches"}
SOURCES = {package: ROOT / folder for package, folder in FOLDERS.items()}
NEEDED_TO_BUILD = ["pyproject.toml", "LICENSE", "README.md", *FOLDERS.values()]


def modules() -> Iterator[tuple[str, Path]]:
    """Every Python file of the package, as (path inside of the package, file)."""
    for package, folder in SOURCES.items():
        for file in sorted(folder.rglob("*.py")):
            yield f"{package.replace('.', '/')}/{file.relative_to(folder).as_posix()}", file


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files for a build, so that no build leaves files in the tree."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in NEEDED_TO_BUILD:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, copy / name)
    return copy


def build(source: Path, out: Path, *kinds: str) -> list[Path]:
    command = [sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", str(out), str(source)]
    captured(command, code=0)
    return sorted(out.iterdir())


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (built,) = build(checkout, tmp_path_factory.mktemp("wheel"), "--wheel")
    return built


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (built,) = build(checkout, tmp_path_factory.mktemp("sdist"), "--sdist")
    return built


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    inside = {name for name in names_in(wheel) if ".dist-info/" not in name}
    page = {f"adaptor/operations/{name}.html.j2" for name in ("incident", "job", "page", "parts")}
    page |= {f"adaptor/operations/{name}" for name in ("page.css", "page.js", "runbook.txt")}
    assert inside == {name for name, _ in modules()} | {"adaptor/py.typed"} | page


def test_every_package_has_an_init_file() -> None:
    folders = {file.parent for _, file in modules()}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_the_wheel_made_from_the_sdist_is_the_same(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    (built,) = build(source, tmp_path / "wheel", "--wheel")
    assert names_in(built) == names_in(wheel)


def test_the_metadata_keep_the_promises(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        (entries,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        text = archive.read(metadata).decode()
        scripts = archive.read(entries).decode()
    assert "Name: ttp-adaptor" in text
    assert "License-Expression: Apache-2.0" in text
    assert "ttprun = adaptor.launchers.cli.entry:main" in scripts
    (torch,) = re.findall(r"^Requires-Dist: torch\b(.*)$", text, flags=re.MULTILINE)
    assert "==" not in torch
    assert "+" not in torch
    assert "nvidia" not in text.lower()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a folder of its own, without its dependencies; return the folder."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, capture_output=True)
    return target


def in_fresh_process(installed: Path, code: str) -> str:
    """Return the output of code in a process that finds the installed wheel before any checkout."""
    program = f"import sys; sys.path.insert(0, {str(installed)!r})\n{code}"
    completed = captured([sys.executable, "-I", "-c", program], cwd=installed, code=0)
    return completed.stdout.strip()


def test_import_adaptor_brings_no_torch_and_no_numpy(installed: Path) -> None:
    heavy = ["torch", "numpy", "megatron"]
    code = (
        f"import adaptor; print(adaptor.__file__)\nprint([name for name in {heavy} if name in sys.modules])"
    )
    file, imported = in_fresh_process(installed, code).splitlines()
    assert Path(file).is_relative_to(installed)
    assert imported == "[]"


def test_the_console_script_answers(installed: Path) -> None:
    code = "sys.argv = ['ttprun', '--help']; from adaptor.launchers.cli.ttprun import main; main()"
    text = in_fresh_process(installed, code)
    assert "--max-restarts" in text  # torchrun's own
    assert "--ttp-device" in text


def test_the_installed_script_is_on_the_path_of_the_environment() -> None:
    script = Path(sys.executable).with_name("ttprun")
    completed = captured([str(script), "--help"], code=0)
    assert "--ttp-" in completed.stdout


def test_patches_cannot_be_imported_under_another_name() -> None:
    completed = captured([sys.executable, "-c", "import patches"], cwd=ROOT)
    assert completed.returncode != 0
    assert "adaptor.patches" in completed.stderr
