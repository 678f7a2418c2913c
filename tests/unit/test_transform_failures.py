"""`python -m adaptor transform`: wrong data, refusing disks and signals are one line, and nothing goes on."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptor.__main__ import main
from adaptor.checkpoint import manifest
from adaptor.protocol import naming
from tests.unit import small_checkpoint
from tests.unit.small_checkpoint import STEP, Shape
from tests.waiting import LONG_S, captured

STEP_FOLDER = naming.final_name(STEP)
NOBODY = 65534


def _transform(source: Path, target: Path, *options: str) -> int:
    return main(["transform", str(source), str(target), "--workers", "1", *options])


def _line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("transform: ")]
    (line,) = lines
    assert line.startswith("python -m adaptor transform: ")
    return line


def _buffer(content: Any) -> dict[str, Any]:
    (buffer,) = content[0].values()
    return buffer  # type: ignore[no-any-return]


def _cut_short(content: Any) -> None:
    _buffer(content)["exp_avg"] = _buffer(content)["exp_avg"][:-1].clone()


def _of_two_axes(content: Any) -> None:
    _buffer(content)["exp_avg"] = _buffer(content)["exp_avg"][None].clone()


def _missing(content: Any) -> None:
    del _buffer(content)["exp_avg_sq"]


def _of_less_precision(content: Any) -> None:
    _buffer(content)["param"] = _buffer(content)["param"].bfloat16()


def _no_tensor(content: Any) -> None:
    _buffer(content)["exp_avg"] = [1.0]


def _other_size(content: Any) -> None:
    _buffer(content)["numel_unpadded"] -= 1


def _no_buffer(content: Any) -> None:
    del content[0]


def _other_dtypes(content: Any) -> None:
    content[0] = {(torch.float16, torch.float32): _buffer(content)}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_cut_short, "buffer 0: exp_avg has 6959 elements, not 6960"),
        (_of_two_axes, "buffer 0: exp_avg has"),
        (_missing, "buffer 0: has no exp_avg_sq"),
        (_of_less_precision, "buffer 0: param is bfloat16; only float32 is transformed"),
        (_no_tensor, "buffer 0: has no exp_avg"),
        (_other_size, "buffer 0 has 6959 elements; by the rules of"),
        (_no_buffer, "has no buffer 0 of bfloat16"),
        (_other_dtypes, "has no buffer 0 of bfloat16"),
    ],
)
def test_an_optimizer_that_is_not_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: Callable[[Any], None], message: str
) -> None:
    small_checkpoint.write(tmp_path / "a")
    file = tmp_path / "a" / STEP_FOLDER / "mp_rank_00" / naming.OPTIMIZER_FILE
    small_checkpoint.change(file, edit)
    assert _transform(tmp_path / "a", tmp_path / "b", "--tp", "2") == 2
    assert f"{file}: {message}" in _line(capsys)
    assert not (tmp_path / "b").exists()


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield every dict and key, or list and place, down to what describes tensors."""
    if isinstance(value, torch.Tensor) or depth > 6:
        return
    content = vars(value) if hasattr(value, "__dict__") and not isinstance(value, dict) else value
    if isinstance(content, dict):
        for key in content:
            yield content, key
            yield from _places(content[key], depth + 1)
    elif isinstance(content, list):
        for place, child in enumerate(content):
            yield content, place
            yield from _places(child, depth + 1)


@pytest.mark.parametrize("name", [naming.MODEL_FILE, naming.OPTIMIZER_FILE])
@pytest.mark.parametrize("wrong", [None, -1, 0, "x", [], {}, 1 << 40, torch.zeros(1)], ids=repr)
def test_any_value_that_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, wrong: Any
) -> None:
    """Each value of the file in turn: the transform is made, or refused in one line."""
    small_checkpoint.write(tmp_path / "a", rng_state=True)
    file = tmp_path / "a" / STEP_FOLDER / "mp_rank_00" / name
    state = torch.load(file, weights_only=False)
    (file.parent.parent / naming.MANIFEST).unlink()
    for place, key in list(_places(state)):
        if isinstance(key, str) and key.startswith("decoder.layers.") and ".0." not in key:
            continue
        right, place[key] = place[key], wrong
        torch.save(state, file)
        place[key] = right
        code = _transform(tmp_path / "a", tmp_path / "b", "--tp", "2", "--pp", "2", "--rank", "tp=1,pp=1")
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("transform: ")]
        assert (code, len(lines)) in ((0, 0), (2, 1)), f"{key}: {code} {lines}"
        shutil.rmtree(tmp_path / "b", ignore_errors=True)


@contextlib.contextmanager
def _as_nobody() -> Iterator[None]:
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that another user may write to."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.mark.parametrize(
    ("folder", "mode"),
    [
        ("a", 0),
        (f"a/{STEP_FOLDER}", 0),
        (f"a/{STEP_FOLDER}/mp_rank_00", 0),
        (f"a/{STEP_FOLDER}/mp_rank_00/{naming.MODEL_FILE}", 0),
        (f"a/{STEP_FOLDER}/{naming.MANIFEST}", 0),
        ("b", 0),
        ("b", 0o555),
    ],
)
def test_a_folder_without_permissions(
    place: Path, capsys: pytest.CaptureFixture[str], folder: str, mode: int
) -> None:
    small_checkpoint.write(place / "a")
    (place / "b").mkdir()
    (place / "b").chmod(0o777)
    for path in (place / "a", *(place / "a").rglob("*")):
        path.chmod(0o755)
    assert _transform(place / "a", place / "c", "--tp", "2") == 0  # imports what the other user may not
    capsys.readouterr()
    (place / folder).chmod(mode)
    with _as_nobody():
        assert _transform(place / "a", place / "b", "--tp", "2") == 2
    (place / folder).chmod(0o755)
    line = _line(capsys)
    assert str(place / folder) in line
    assert "ermission denied" in line


def _command(*arguments: object) -> list[str]:
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        " from adaptor.__main__ import main; sys.exit(main())"
    )
    return [sys.executable, "-u", "-c", code, "transform", *map(str, arguments)]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_takes_no_more(tmp_path: Path, workers: int) -> None:
    """Here a limit for the size of a file: each write beyond it fails, as on a full disk."""
    small_checkpoint.write(tmp_path / "a")
    completed = captured(
        _command(tmp_path / "a", tmp_path / "b", "--tp", "2", "--workers", workers),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)),
    )
    (line,) = (line for line in completed.stderr.splitlines() if not line.startswith("transform: "))
    assert line.endswith(f"/{naming.OPTIMIZER_FILE}: File too large")
    assert completed.returncode == 2
    assert not (tmp_path / "b" / STEP_FOLDER).exists()


def test_a_byte_that_the_disk_changes_gets_no_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--verify` reads the written files before the folder gets its final name; one rank was written
    earlier.
    """
    small_checkpoint.write(tmp_path / "a")
    assert _transform(tmp_path / "a", tmp_path / "b", "--tp", "2", "--rank", "tp=1") == 0
    (file,) = (tmp_path / "b").rglob(f"mp_rank_01/{naming.MODEL_FILE}")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    capsys.readouterr()
    assert _transform(tmp_path / "a", tmp_path / "b", "--tp", "2", "--resume", "--verify") == 2
    assert f"{file}: checksum differs from the manifest" in _line(capsys)
    assert not (tmp_path / "b" / STEP_FOLDER).exists()
    assert not (tmp_path / "b" / naming.TRACKER).exists()


# Ctrl-C comes while the main thread takes the locks of several futures; it has the first.
INTERRUPTED_BETWEEN_TWO_LOCKS = """
import signal
from concurrent.futures import _base
def interrupted(self):
    self.futures[0]._condition.acquire()
    signal.raise_signal(signal.SIGINT)
_base._AcquireFutures.__enter__ = interrupted
"""


def test_no_signal_finds_locks_half_taken(tmp_path: Path) -> None:
    """Threads that need such a lock would keep the process alive for ever."""
    small_checkpoint.write(tmp_path / "a")
    command = _command(tmp_path / "a", tmp_path / "b", "--tp", "2", "--workers", "2")
    command[3] = f"{INTERRUPTED_BETWEEN_TWO_LOCKS}\n{command[3]}"
    captured(command, timeout=LONG_S, code=0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_goes_on_after_the_command(tmp_path: Path, number: signal.Signals) -> None:
    small_checkpoint.write(tmp_path / "a", Shape(384, 6, 768, 4, 1020, 1024))
    with subprocess.Popen(
        _command(tmp_path / "a", tmp_path / "b", "--tp", "6", "--workers", "2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("step 7")
        running.send_signal(number)
        # Returns when nobody has the pipes any more: no other process was left.
        _, errors = running.communicate()
    if running.returncode == 0:
        pytest.skip("it was done before the signal came")
    assert running.returncode == (143 if number == signal.SIGTERM else -number)
    if number == signal.SIGTERM:
        assert errors.splitlines()[-1].endswith("interrupted; the same command with --resume goes on")
        assert "Traceback" not in errors
    assert not (tmp_path / "b" / STEP_FOLDER).exists()
    subprocess.run(
        _command(tmp_path / "a", tmp_path / "b", "--tp", "6", "--resume"), check=True, capture_output=True
    )
    assert manifest.defects(tmp_path / "b" / STEP_FOLDER) == []


def test_a_rank_that_fails_stops_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_checkpoint.write(tmp_path / "a")
    file = tmp_path / "a" / STEP_FOLDER / "mp_rank_00" / naming.MODEL_FILE

    def other_weight(content: Any) -> None:
        content["model"]["decoder.layers.0.mlp.linear_fc2.weight"] += 1

    small_checkpoint.change(file, other_weight)
    assert main(["transform", str(tmp_path / "a"), str(tmp_path / "b"), "--pp", "4", "--workers", "2"]) == 2
    assert "the main params of the optimizer do not round to the weights" in _line(capsys)
    assert not (tmp_path / "b" / STEP_FOLDER).exists()
