"""An S3 server on this machine, and small checkpoints for it."""

from __future__ import annotations

import fcntl
import functools
import http.client
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import wrapt

from adaptor.checkpoint import publish, regular_folder, tracker
from adaptor.checkpoint.hashing import HashingFile
from adaptor.protocol import naming
from tests import timing

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "AKIAOFTHETESTS", "AWS_SECRET_ACCESS_KEY": "keep-this-secret"}
FILES = 4
# So many names are in an answer; S3 gives 1,000.
NAMES = 50
# Bytes of a part of an upload, but the last; S3 asks for 5 MiB.
SMALLEST_PART = 1 << 16


@wrapt.when_imported("botocore.session")
def _read_tables_once(session: ModuleType) -> None:
    """Let all clients of a process share botocore's tables of services, normally read for each client."""
    vars(session)["create_loader"] = functools.cache(session.create_loader)


@contextmanager
def server() -> Iterator[str]:
    with _connected() as connection:
        port = connection.recv(16).decode()
        assert port, "the process that forks servers has ended"
        yield f"http://127.0.0.1:{port}"
        connection.shutdown(socket.SHUT_WR)
        timing.charge(float(connection.recv(64)))


def _connected() -> socket.socket:
    """Connect to the process that forks S3 servers (`s3_servers.py`), shared by all pytest workers."""
    tests = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    name = f"\0ttp-test-s3-{tests}"
    connection = socket.socket(socket.AF_UNIX)
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(name)
        except ConnectionRefusedError:  # nobody has started it
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(name)
                listener.listen(64)
                _start(listener, tests)
            connection.connect(name)
    return connection


def _start(listener: socket.socket, tests: int) -> None:
    """Start the server process; it ends with the test session, not with the first test."""
    command = [sys.executable, str(Path(__file__).with_name("s3_servers.py")), str(tests)]
    environment = {
        **os.environ,
        "MOTO_S3_DEFAULT_MAX_KEYS": str(NAMES),
        "S3_UPLOAD_PART_MIN_SIZE": str(SMALLEST_PART),
        "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(5 << 20),  # it would be made of the size above
    }
    streams = [
        (os.POSIX_SPAWN_DUP2, listener.fileno(), 0),
        *((os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)),
    ]
    os.posix_spawn(sys.executable, command, environment, file_actions=streams)


def request(server: str, method: str, path: str, body: bytes = b"") -> bytes:
    """Send a request without credentials, which moto does not ask for; return the body of the answer."""
    connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=60)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status in (200, 204), (method, path, answer.status, content)
        return content
    finally:
        connection.close()


def save(
    root: Path, step: int, generation: str = "0f3a5c21", first: int = 1000, *, last_words: bool = False
) -> Path:
    """Save a checkpoint of FILES random files, as a regular save or as last words; return its folder.

    Args:
        first: bytes of the first file; the others are small.
    """
    if last_words:
        folder = publish.prepare(root, step, generation=generation)
        entries = []
        for number in range(FILES):
            with HashingFile(
                folder / f"mp_rank_{number:02d}" / naming.MODEL_FILE, base_folder=folder
            ) as file:
                file.write(os.urandom(1000 + number if number else first))
            entries.append(file.entry(file.path.relative_to(folder).as_posix()))
        publish.publish(root, step, entries, {"g": {"writer": 0}}, 1, generation)
        return root / naming.final_name(step)
    saving = root / naming.regular_name(step, generation)
    for number in range(FILES):
        file = saving / f"mp_rank_{number:02d}" / naming.MODEL_FILE
        file.parent.mkdir(parents=True)
        file.write_bytes(os.urandom(1000 + number if number else first))
    regular_folder.publish_regular(root, step, generation)
    tracker.advance(root, step)
    return root / naming.final_name(step)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint's folder, by name, without its manifest."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*.pt")
        if path.is_file()
    }
