"""Puts the frameworks that the tests train with into a cache: `python tests/frameworks/prepare.py`.

- Megatron-LM 0.15.0rc5 as NVIDIA published it. PyPI has only its core, but the wheel of flag-scale contains
  the whole tree with FlagScale's changes, and these changes as patches: undoing them restores the original.
- megatron-core 0.16.1, from PyPI.

Existing parts are kept. Each part is made in a temporary directory and renamed, so an interrupted run leaves
nothing half made. The last two lines of the output are the two paths; the lines before show the progress.
Needs `patch`, `make` and g++.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "frameworks"
FLAG_SCALE = "0.8.0"
MEGATRON_CORE = "0.16.1"
# Inside of the wheel.
TREE = "flag_scale/third_party/Megatron-LM/"
PATCHES = "flag_scale/flagscale/backends/Megatron-LM/"


class NotPreparedError(Exception):
    """A part that is missing or failed; the message is one line with its name."""


def megatron_lm(cache: Path = CACHE) -> Path:
    """Return the root of the Megatron-LM tree with `pretrain_gpt.py`. Raises NotPreparedError."""
    return _existing(cache / "megatron-lm")


def megatron_core(cache: Path = CACHE) -> Path:
    """Return the directory of megatron-core for PYTHONPATH. Raises NotPreparedError."""
    return _existing(cache / f"megatron-core-{sys.implementation.cache_tag}")


def _existing(path: Path) -> Path:
    if not path.is_dir():
        raise NotPreparedError(f"{path} is missing: run python tests/frameworks/prepare.py")
    return path


def _say(line: str) -> None:
    print(f"frameworks: {line}", flush=True)


def _run(command: Sequence[str | Path]) -> None:
    """Run a command without output; if it fails, print its output and raise NotPreparedError."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    completed = subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        check=False,
    )
    if completed.returncode:
        print(completed.stdout, file=sys.stderr)
        raise NotPreparedError(
            f"{' '.join(map(str, command[:4]))} ... ended with exit code {completed.returncode}"
        )


def _pip(*arguments: str | Path) -> None:
    _run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments])


def _make(path: Path, title: str, fill: Callable[[Path], None]) -> Path:
    """Let `fill` make the directory `path` atomically."""
    if path.is_dir():
        _say(f"{title}: kept")
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as temporary:
        target = Path(temporary) / path.name
        target.mkdir()
        _say(title)
        fill(target)
        target.rename(path)
    return path


def _unpack_megatron_lm(target_folder: Path) -> None:
    work = target_folder.parent
    _say(f"downloading flag-scale {FLAG_SCALE} (15 MB)")
    _pip("download", "--no-deps", "--dest", work, f"flag-scale=={FLAG_SCALE}")
    (wheel,) = work.glob("*.whl")
    patches = work / "patches"
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            for prefix, target in ((TREE, target_folder), (PATCHES, patches)):
                # A shared object in there was built for one interpreter only, with FlagScale's tools.
                if name.startswith(prefix) and not name.endswith(("/", ".so")):
                    file = target / name.removeprefix(prefix)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(archive.read(name))
    changes = sorted(patches.rglob("*.patch"))
    _say(f"undoing {len(changes)} changes of FlagScale")
    for change in changes:
        _run(["patch", "-R", "-p1", "-s", "-f", "--no-backup-if-mismatch", "-d", target_folder, "-i", change])
    for file in [
        *target_folder.glob("*.py"),
        *(target_folder / "megatron").rglob("*.py"),
        *(target_folder / "tools").rglob("*.py"),
    ]:
        if "flagscale" in file.read_text():
            raise NotPreparedError(
                f"{file.relative_to(target_folder)} still names flagscale after its changes were undone"
            )


def build_helpers(tree: Path) -> None:
    """Compile the data helpers of a Megatron-LM tree for this interpreter. Raises NotPreparedError."""
    datasets = tree / "megatron" / "core" / "datasets"
    named = re.search(r"^LIBNAME = (\w+)$", (datasets / "Makefile").read_text(), re.MULTILINE)
    if named is None:
        raise NotPreparedError(f"{datasets / 'Makefile'} has no LIBNAME, the name of the data helpers")
    extension = datasets / f"{named[1]}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if extension.exists():
        _say("data helpers: kept")
        return
    _say("compiling the data helpers")
    import pybind11

    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
    unfinished = extension.with_name(f".{extension.name}")
    flags = ["-O3", "-Wall", "-shared", "-std=c++17", "-fPIC"]
    _run(["g++", *flags, *includes, datasets / "helpers.cpp", "-o", unfinished])
    unfinished.rename(extension)
    # Rank 0 runs this at every start. It looks for a file named by whatever python3-config is first on PATH,
    # often another interpreter's: let it have that file now, instead of compiling during the first test.
    _run(["make", "-C", datasets])


def prepare(cache: Path) -> tuple[Path, Path]:
    """Make the missing parts below `cache`; return the paths of Megatron-LM and of megatron-core.

    Raises:
        NotPreparedError: a part could not be made.
    """
    for program, package in {"patch": "patch", "make": "make", "g++": "g++"}.items():
        if shutil.which(program) is None:
            raise NotPreparedError(f"the program {program} is missing: install the package {package}")
    tree = _make(cache / "megatron-lm", "Megatron-LM 0.15.0rc5", _unpack_megatron_lm)
    build_helpers(tree)
    core = _make(
        cache / f"megatron-core-{sys.implementation.cache_tag}",
        f"megatron-core {MEGATRON_CORE}",
        lambda target: _pip("install", "--no-deps", "--target", target, f"megatron-core=={MEGATRON_CORE}"),
    )
    return tree, core


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where to put them (default: %(default)s)")
    try:
        tree, core = prepare(parser.parse_args().cache.resolve())
    except NotPreparedError as error:
        sys.exit(f"frameworks: {error}")
    print(tree, core, sep="\n")


if __name__ == "__main__":
    main()
