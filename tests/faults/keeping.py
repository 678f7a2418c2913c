"""What is costly to make, always the same, and kept between runs: made once, whoever asks for it first."""

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
# What makes the runs of the unmodified framework, besides the framework: the stand-ins for a device, the
# arguments of the script, the recorder, and what starts all this.
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
)
# Variables with these prefixes choose how numbers are computed.
_PREFIXES = ("ATEN_", "DNNL_", "KMP_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "TORCH")
# But these choose none, and are set in the middle of a run of tests: where torch keeps what it has
# compiled (set at the first update of a process), watchdogs (by the adaptor), and what a launcher tells
# its workers. The same baseline would be trained before and after.
_NO_NUMBERS = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_HCCL_", "TORCH_NCCL_", "TORCHELASTIC_")
_UNUSED_S = 7 * 24 * 3600.0


def root() -> Path:
    """Return the folder for runs: .cache/baselines, or TTP_TEST_BASELINES."""
    return Path(os.environ.get("TTP_TEST_BASELINES", KEPT))


def once(place: Path, make: Callable[[Path], None]) -> Path:
    """Have `make` fill a folder that gets the name `place` when it is complete.

    Of several processes that ask at the same time one makes it, and the others wait.

    Returns:
        `place`.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f".{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.is_dir():
            os.utime(place)
            return place
        for left in place.parent.glob(f".{place.name}.draft-*"):  # by a process that was killed
            shutil.rmtree(left)
        _forget_the_unused(place.parent)
        draft = place.with_name(f".{place.name}.draft-{uuid.uuid4().hex}")
        try:
            make(draft)
            draft.rename(place)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return place


def key(framework: Path, *more: object) -> str:
    """Return a digest of all that the bits of a training run depend on.

    Args:
        framework: the tree of the framework.
        more: what else the caller knows of; it is told apart by its `repr`.
    """
    variables = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(_PREFIXES) and not name.startswith(_NO_NUMBERS)
    )
    versions = (sys.version, torch.__version__, numpy.__version__, torch.__config__.show(), _processor())
    return _digest(repr((versions, variables, _tree(framework), _tree(ROOT, CODE), more)).encode())


@functools.cache
def _processor() -> str:
    """Its model and what it can do: by that the mathematical libraries choose their kernels."""
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features")))


@functools.cache
def _tree(root: Path, parts: Iterable[str] = (".",)) -> str:
    found = hashlib.sha256()
    for part in parts:
        place = root / part
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            found.update(f"{file.relative_to(root)} {_digest(file.read_bytes())}\n".encode())
    return found.hexdigest()


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _forget_the_unused(folder: Path) -> None:
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):  # another process does the same
            if entry.is_dir() and time.time() - entry.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(entry)
