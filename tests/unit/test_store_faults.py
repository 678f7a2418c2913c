"""Pushes and pulls while the object store, or the client, fails at any request (`fault_proxy`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import pytest

from adaptor.checkpoint import tracker
from adaptor.errors import CheckpointError, StoreError
from adaptor.protocol import naming
from adaptor.store import catalog, pull, push
from adaptor.store.client import PIECE, Store, open_store
from tests.unit import object_store
from tests.unit.fault_proxy import Chooses, Fault, FaultProxy, faults, server, url
from tests.unit.launching import HEARS_CTRL_C
from tests.unit.object_store import SMALLEST_PART, contents, save
from tests.waiting import captured

__all__ = ["faults", "server", "url"]
# The process continues after this statement, with everything imported.
_PUSHER = (
    "import sys; from pathlib import Path; from adaptor.store import push; from adaptor.store.client import"
    " open_store\nwhile step := sys.stdin.readline():\n"
    "    store = open_store(sys.argv[1], sys.argv[2], piece=int(sys.argv[4]))\n"
    "    push.push(store, Path(sys.argv[3]), int(step))\n"
    "    print('done', flush=True)"
)


def _once(number: int, fault: Fault) -> Chooses:
    return lambda request, method, path: fault if request == number else ""


def _tell(out: IO[str], event: threading.Event) -> None:
    """Set an event when the pusher is done or has ended."""
    out.readline()
    event.set()


def _is_the_manifest(method: str, path: str) -> bool:
    return method == "PUT" and path.endswith(naming.MANIFEST)


def _all_are_intact(store: Store) -> list[int]:
    """Return the steps listed as complete checkpoints; read all their files."""
    problems: list[str] = []
    checkpoints = list(catalog.newest_first(store, None, problems))
    assert problems == []
    for checkpoint in checkpoints:
        assert list(catalog.wrong_files(store, checkpoint)) == []
    return sorted(checkpoint.saved_manifest.step for checkpoint in checkpoints)


@pytest.mark.integration
@pytest.mark.parametrize("fault", ["hold before", "hold after"])
def test_a_killed_push_never_counts_as_a_checkpoint(
    fault: Fault, faults: FaultProxy, url: str, server: str, tmp_path: Path
) -> None:
    """The push is killed at each request, before or after the store executes the request.

    The next push completes it.
    """
    root, step, number, killed = tmp_path / "one", 12, 0, 0
    save(root, 6)
    save(root, step, first=SMALLEST_PART + 1)
    while True:
        place = f"{url}-{fault[5:]}/{number}"
        direct = open_store(place, server, piece=SMALLEST_PART)
        push.push(direct, root, 6)
        faults.begin(_once(number, fault))
        command = [sys.executable, "-c", _PUSHER, place, faults.url, str(root), str(SMALLEST_PART)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as pusher:
            assert pusher.stdin is not None
            assert pusher.stdout is not None
            thread = threading.Thread(target=_tell, args=(pusher.stdout, faults.held))
            thread.start()
            pusher.stdin.write(f"{step}\n")
            pusher.stdin.flush()
            assert faults.held.wait(60)
            has_ended = len(faults.requests) <= number
            pusher.kill()
        thread.join()
        faults.release.set()
        if has_ended:
            break
        committed = fault == "hold after" and any(_is_the_manifest(*request) for request in faults.requests)
        assert _all_are_intact(direct) == ([6, step] if committed else [6]), (number, faults.requests)
        assert push.push(direct, root, step).there == committed
        assert _all_are_intact(direct) == [6, step], number
        killed += 1
        number += 1
    assert killed >= 8
    pull.pull(direct, tmp_path / "two", 12)
    folder = naming.final_name(12)
    assert contents(tmp_path / "two" / folder) == contents(root / folder)


def test_a_push_skips_the_files_already_sent(
    faults: FaultProxy, url: str, server: str, tmp_path: Path
) -> None:
    save(tmp_path / "one", 12)
    store = open_store(url, faults.url)
    faults.begin(lambda number, method, path: "403" if method == "PUT" and "mp_rank_02" in path else "")
    with pytest.raises(StoreError, match=r"does not allow these credentials to write .*\(403 Forbidden, Acc"):
        push.push(store, tmp_path / "one", 12)
    faults.begin()
    result = push.push(store, tmp_path / "one", 12)
    assert (result.files, result.sent) == (4, 1002 + 1003)
    assert _all_are_intact(open_store(url, server)) == [12]


@pytest.mark.parametrize("fault", ["503", "cut before", "cut after"])
def test_a_store_that_fails_for_a_moment_is_asked_again(
    fault: Fault, faults: FaultProxy, url: str, server: str, tmp_path: Path
) -> None:
    """Each request of a push and of a pull fails once."""
    store = open_store(f"{url}-{fault.replace(' ', '-')}", faults.url)
    save(tmp_path / "one", 12, first=PIECE + 1)
    failed_requests: set[tuple[str, str, int]] = set()

    def first_time(number: int, method: str, path: str) -> Fault:
        # The client numbers its uploads from 0 in each process.
        key = (method, path, 0)
        if key in failed_requests:
            return ""
        failed_requests.add(key)
        return fault

    faults.begin(first_time)
    push.push(store, tmp_path / "one", 12)
    failed_requests.clear()
    pull.pull(store, tmp_path / "two")
    folder = naming.final_name(12)
    assert contents(tmp_path / "two" / folder) == contents(tmp_path / "one" / folder)


def test_a_byte_changed_in_transit_is_fetched_again(
    faults: FaultProxy, url: str, server: str, tmp_path: Path
) -> None:
    save(tmp_path / "one", 12)
    store = open_store(url, faults.url)
    push.push(store, tmp_path / "one", 12)
    hit: list[str] = []

    def once(number: int, method: str, path: str) -> Fault:
        if method == "GET" and "mp_rank_02" in path and not hit:
            hit.append(path)
            return "corrupt"
        return ""

    faults.begin(once)
    assert pull.pull(store, tmp_path / "two").problems == []
    assert hit
    folder = naming.final_name(12)
    assert contents(tmp_path / "two" / folder) == contents(tmp_path / "one" / folder)


def test_refused_credentials_are_one_line(faults: FaultProxy, url: str, tmp_path: Path) -> None:
    save(tmp_path / "one", 12)
    faults.begin(lambda number, method, path: "403")
    command = [sys.executable, "-m", "adaptor.launchers.cli.ttp", "store"]
    environment = {**os.environ, "TTP_STORE_ENDPOINT": faults.url}
    for action in (["list", url], ["push", url, str(tmp_path / "one")], ["pull", url, str(tmp_path / "two")]):
        completed = captured([*command, *action], env=environment, code=2)
        assert completed.stderr.count("\n") == 1, completed.stderr
        assert "does not allow these credentials to" in completed.stderr
        assert "403 Forbidden" in completed.stderr
        assert object_store.CREDENTIALS["AWS_ACCESS_KEY_ID"] not in completed.stderr


def test_a_pull_onto_a_full_disk_leaves_nothing(
    url: str, faults: FaultProxy, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "one", 12)
    store = open_store(url, server)
    push.push(store, tmp_path / "one", 12)
    root = tmp_path / "two"
    root.mkdir()
    # A limit of this process stands in for the full disk: the kernel refuses to grow a file.
    script = (
        "import resource, signal, sys; from pathlib import Path; from adaptor.store import pull\n"
        "from adaptor.store.client import open_store; from adaptor.errors import CheckpointError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))\n"
        "try: pull.pull(open_store(sys.argv[1], sys.argv[2]), Path(sys.argv[3]))\n"
        "except CheckpointError as error: print(error)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", script, url, server, str(root)], capture_output=True, text=True, check=True
    )
    assert "File too large" in completed.stdout
    assert list(root.iterdir()) == []


_LISTED, _MANIFEST, _FILE = "list-type", naming.MANIFEST, "mp_rank_02"


def _refuse_one_and_stall_another(number: int, method: str, path: str) -> Fault:
    if "mp_rank_00" in path:
        return "403"
    return "hold before" if _FILE in path else ""


def test_a_pull_that_fails_waits_for_no_other_request(
    faults: FaultProxy, url: str, server: str, tmp_path: Path
) -> None:
    """One request is refused while an earlier request gets no answer."""
    save(tmp_path / "one", 12)
    push.push(open_store(url, server), tmp_path / "one", 12)
    faults.begin(_refuse_one_and_stall_another)
    with pytest.raises(StoreError, match="does not allow these credentials to read"):
        pull.pull(open_store(url, faults.url, patience_s=1), tmp_path / "two")
    assert not faults.release.is_set()
    assert list((tmp_path / "two").iterdir()) == []


@pytest.mark.parametrize(
    ("action", "stalled"),
    [
        ("list", _LISTED),
        ("list", _MANIFEST),
        ("verify", _FILE),
        ("pull", _LISTED),
        ("pull", _FILE),
        ("push", _MANIFEST),
    ],
)
def test_ctrl_c_waits_for_no_request(
    action: str, stalled: str, faults: FaultProxy, url: str, server: str, tmp_path: Path
) -> None:
    """Whichever thread makes the request; the client would give the request up after 120 s and repeat it."""
    save(tmp_path / "one", 12)
    url = f"{url}-{action}-{stalled}"
    if action != "push":
        push.push(open_store(url, server), tmp_path / "one", 12)
    faults.begin(lambda number, method, path: "hold before" if stalled in path else "")
    folder = {"pull": [str(tmp_path / "two")], "push": [str(tmp_path / "one")]}.get(action, [])
    program = f"{HEARS_CTRL_C}\nfrom adaptor.launchers.cli.ttp import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, "store", action, url, *folder]
    environment = {**os.environ, "TTP_STORE_ENDPOINT": faults.url}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert faults.held.wait(60)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert stderr == "ttp store: interrupted; the same command goes on\n"
    assert not (tmp_path / "two").exists() or list((tmp_path / "two").iterdir()) == []


def test_a_command_that_fails_waits_for_no_other_request(
    faults: FaultProxy, url: str, server: str, tmp_path: Path
) -> None:
    """The process ends although a thread still waits for an answer."""
    save(tmp_path / "one", 12)
    push.push(open_store(url, server), tmp_path / "one", 12)
    faults.begin(_refuse_one_and_stall_another)
    command = [sys.executable, "-m", "adaptor.launchers.cli.ttp", "store", "pull", url, str(tmp_path / "two")]
    environment = {**os.environ, "TTP_STORE_ENDPOINT": faults.url}
    completed = captured(command, env=environment, timeout=60, code=2)
    assert "does not allow these credentials to read" in completed.stderr


def _stall_push(url: str, faults: FaultProxy, root: Path) -> tuple[threading.Thread, list[Exception]]:
    """Start to push step 12; return when the store delays a request. The list receives the error."""
    faults.begin(lambda number, method, path: "hold before" if "mp_rank_01" in path else "")
    failed: list[Exception] = []

    def first() -> None:
        try:
            push.push(open_store(url, faults.url), root, 12)
        except (StoreError, CheckpointError) as error:
            failed.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    assert faults.held.wait(60)
    return thread, failed


def test_two_concurrent_pushes_of_a_checkpoint_agree(
    faults: FaultProxy, url: str, server: str, tmp_path: Path
) -> None:
    """The second push starts and ends while the first is delayed."""
    save(tmp_path / "one", 12)
    thread, failed = _stall_push(url, faults, tmp_path / "one")
    assert not push.push(open_store(url, server), tmp_path / "one", 12).there
    faults.fault = lambda number, method, path: ""
    faults.release.set()  # the delayed request fails and is repeated
    thread.join()
    assert failed == []
    assert _all_are_intact(open_store(url, server)) == [12]


def test_a_file_that_is_replaced_while_it_is_pushed_is_refused(
    faults: FaultProxy, url: str, server: str, tmp_path: Path
) -> None:
    folder = save(tmp_path / "one", 12)
    thread, failed = _stall_push(url, faults, tmp_path / "one")
    (folder / "mp_rank_02" / naming.MODEL_FILE).unlink()
    faults.fault = lambda number, method, path: ""
    faults.release.set()
    thread.join()
    (error,) = failed
    assert "mp_rank_02" in str(error)
    assert tracker.tracked_step(tmp_path / "one") == 12
    assert _all_are_intact(open_store(url, server)) == []
