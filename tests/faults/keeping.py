"""Keeps results that are expensive and always the same, across runs; the first user makes each."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy
import torch

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / ".cache" / "baselines"
# The code that makes a baseline, besides the framework: stand-ins for devices, arguments of the script, the
# recorder, and the starters of processes.
CODE = (
    "adaptor/__init__.py",
    "adaptor/_script.py",
    "adaptor/devices",
    "adaptor/errors.py",
    "tests/faults/harness.py",
    "tests/faults/kept_code.py",
    "tests/faults/scenario.py",
    "tests/faults/warm.py",
    "tests/frameworks/args.py",
    "tests/frameworks/record.py",
    "tests/standins",
)
# Variables with these prefixes select how numbers are computed,
_PREFIXES = ("ATEN_", "DNNL_", "KMP_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "TORCH")
# except these, which are set in the middle of a run of tests: torch's folder for compiled code (set at the
# first update of a process), watchdogs (set by the adaptor), and a launcher's variables for its workers. If
# they counted, the same baseline would be trained twice.
_NO_NUMBERS = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_HCCL_", "TORCH_NCCL_", "TORCHELASTIC_")
_UNUSED_S = 7 * 24 * 3600.0


def root() -> Path:
    """Return the folder of kept runs: .cache/baselines, or TTP_TEST_BASELINES."""
    return Path(os.environ.get("TTP_TEST_BASELINES", KEPT))


def once(place: Path, make: Callable[[Path], None]) -> Path:
    """Let `make` fill a folder, and rename the complete folder to `place`.

    If several processes call the function at the same time, one makes the folder and the others wait.

    Returns:
        `place`.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f".{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.is_dir():
            os.utime(place)
            return place
        for abandoned_draft in place.parent.glob(f".{place.name}.draft-*"):  # by a process that was killed
            shutil.rmtree(abandoned_draft)
        _forget_the_unused(place.parent)
        draft = place.with_name(f".{place.name}.draft-{uuid.uuid4().hex}")
        try:
            make(draft)
            draft.rename(place)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return place


def key(framework: Path, *inputs: object) -> str:
    """Return a digest of everything that determines the bits of a training run.

    Args:
        framework: the source tree of the framework.
        inputs: further inputs, compared by their `repr`.
    """
    variables = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(_PREFIXES) and not name.startswith(_NO_NUMBERS)
    )
    versions = (sys.version, torch.__version__, numpy.__version__, torch.__config__.show(), _processor())
    return _digest(repr((versions, variables, _tree(framework), _tree(ROOT, CODE), inputs)).encode())


@functools.cache
def _processor() -> str:
    """Return the processor's model and features: mathematical libraries choose their kernels by them."""
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features")))


@functools.cache
def _tree(root: Path, parts: Iterable[str] = (".",)) -> str:
    digest = hashlib.sha256()
    for part in parts:
        path = root / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.relative_to(root)} {_digest(file.read_bytes())}\n".encode())
    return digest.hexdigest()


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _forget_the_unused(folder: Path) -> None:
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):  # another process does the same
            if entry.is_dir() and time.time() - entry.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(entry)
