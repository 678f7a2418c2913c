"""An object store, and those who write to it, that fail at any request (`fault_proxy`)."""

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
# The statement after which the process is told to go on; it has imported all that it needs by then.
_PUSHER = (
    "import sys; from pathlib import Path; from adaptor.store import push; from adaptor.store.client import"
    " open_store\nwhile step := sys.stdin.readline():\n"
    "    store = open_store(sys.argv[1], sys.argv[2], piece=int(sys.argv[4]))\n"
    "    push.push(store, Path(sys.argv[3]), int(step))\n"
    "    print('done', flush=True)"
)


def _once(number: int, fault: Fault) -> Chooses:
    return lambda which, method, path: fault if which == number else ""


def _tell(out: IO[str], event: threading.Event) -> None:
    """Set an event when the pusher is done, or has ended."""
    out.readline()
    event.set()


def _is_the_manifest(method: str, path: str) -> bool:
    return method == "PUT" and path.endswith(naming.MANIFEST)


def _all_are_intact(store: Store) -> list[int]:
    """Return the steps that anybody would take for complete checkpoints, after all of them were read."""
    problems: list[str] = []
    found = list(catalog.newest_first(store, None, problems))
    assert problems == []
    for one in found:
        assert list(catalog.wrong_files(store, one)) == []
    return sorted(one.saved_manifest.step for one in found)


@pytest.mark.integration
@pytest.mark.parametrize("fault", ["hold before", "hold after"])
def test_a_push_that_is_killed_is_never_taken_for_a_checkpoint(
    fault: Fault, faults: FaultProxy, url: str, server: str, tmp_path: Path
) -> None:
    """At each of its requests: before the store has it, and when the store has done it.

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
            ended = len(faults.requests) <= number
            pusher.kill()
        thread.join()
        faults.release.set()
        if ended:
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


def test_a_push_goes_on_after_what_was_sent(
    faults: FaultProxy, url: str, server: str, tmp_path: Path
) -> None:
    save(tmp_path / "one", 12)
    store = open_store(url, faults.url)
    faults.begin(lambda number, method, path: "403" if method == "PUT" and "mp_rank_02" in path else "")
    with pytest.raises(StoreError, match=r"does not allow these credentials to write .*\(403 Forbidden, Acc"):
        push.push(store, tmp_path / "one", 12)
    faults.begin()
    done = push.push(store, tmp_path / "one", 12)
    assert (done.files, done.sent) == (4, 1002 + 1003)
    assert _all_are_intact(open_store(url, server)) == [12]


@pytest.mark.parametrize("fault", ["503", "cut before", "cut after"])
def test_a_store_that_fails_for_a_moment_is_asked_again(
    fault: Fault, faults: FaultProxy, url: str, server: str, tmp_path: Path
) -> None:
    """Each request fails once, of a push and of a pull."""
    store = open_store(f"{url}-{fault.replace(' ', '-')}", faults.url)
    save(tmp_path / "one", 12, first=PIECE + 1)
    seen: set[tuple[str, str, int]] = set()

    def first_time(number: int, method: str, path: str) -> Fault:
        # The client itself marks an upload by its number, which begins anew.
        key = (method, path, 0)
        if key in seen:
            return ""
        seen.add(key)
        return fault

    faults.begin(first_time)
    push.push(store, tmp_path / "one", 12)
    seen.clear()
    pull.pull(store, tmp_path / "two")
    folder = naming.final_name(12)
    assert contents(tmp_path / "two" / folder) == contents(tmp_path / "one" / folder)


def test_a_byte_that_changes_on_its_way_is_asked_for_again(
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


def test_credentials_that_are_refused_are_one_line(faults: FaultProxy, url: str, tmp_path: Path) -> None:
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
    # A limit of this process stands for the disk: the kernel refuses to let a file grow.
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


def _one_is_refused_and_another_held(number: int, method: str, path: str) -> Fault:
    if "mp_rank_00" in path:
        return "403"
    return "hold before" if _FILE in path else ""


def test_a_pull_that_fails_waits_for_no_other_request(
    faults: FaultProxy, url: str, server: str, tmp_path: Path
) -> None:
    """One request is refused, and another one, which runs ahead of it, is not answered at all."""
    save(tmp_path / "one", 12)
    push.push(open_store(url, server), tmp_path / "one", 12)
    faults.begin(_one_is_refused_and_another_held)
    with pytest.raises(StoreError, match="does not allow these credentials to read"):
        pull.pull(open_store(url, faults.url, patience_s=1), tmp_path / "two")
    assert not faults.release.is_set()
    assert list((tmp_path / "two").iterdir()) == []


@pytest.mark.parametrize(
    ("action", "held"),
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
    action: str, held: str, faults: FaultProxy, url: str, server: str, tmp_path: Path
) -> None:
    """Whichever thread makes it; the client gives up such a request after 120 s, and makes it again then."""
    save(tmp_path / "one", 12)
    url = f"{url}-{action}-{held}"
    if action != "push":
        push.push(open_store(url, server), tmp_path / "one", 12)
    faults.begin(lambda number, method, path: "hold before" if held in path else "")
    folder = {"pull": [str(tmp_path / "two")], "push": [str(tmp_path / "one")]}.get(action, [])
    program = f"{HEARS_CTRL_C}\nfrom adaptor.launchers.cli.ttp import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, "store", action, url, *folder]
    environment = {**os.environ, "TTP_STORE_ENDPOINT": faults.url}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert faults.held.wait(60)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert told == "ttp store: interrupted; the same command goes on\n"
    assert not (tmp_path / "two").exists() or list((tmp_path / "two").iterdir()) == []


def test_a_command_that_fails_waits_for_no_other_request(
    faults: FaultProxy, url: str, server: str, tmp_path: Path
) -> None:
    """Its process ends, too, while a thread of it waits for an answer."""
    save(tmp_path / "one", 12)
    push.push(open_store(url, server), tmp_path / "one", 12)
    faults.begin(_one_is_refused_and_another_held)
    command = [sys.executable, "-m", "adaptor.launchers.cli.ttp", "store", "pull", url, str(tmp_path / "two")]
    environment = {**os.environ, "TTP_STORE_ENDPOINT": faults.url}
    completed = captured(command, env=environment, timeout=60, code=2)
    assert "does not allow these credentials to read" in completed.stderr


def _held_in_the_middle(url: str, faults: FaultProxy, root: Path) -> tuple[threading.Thread, list[Exception]]:
    """Begin to push step 12; return when the store holds back a request of it. The list gets the error."""
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


def test_two_who_push_the_same_write_the_same(
    faults: FaultProxy, url: str, server: str, tmp_path: Path
) -> None:
    """The second begins while the first is held in the middle, and ends first."""
    save(tmp_path / "one", 12)
    thread, failed = _held_in_the_middle(url, faults, tmp_path / "one")
    assert not push.push(open_store(url, server), tmp_path / "one", 12).there
    faults.fault = lambda number, method, path: ""
    faults.release.set()  # its request ends, and comes again
    thread.join()
    assert failed == []
    assert _all_are_intact(open_store(url, server)) == [12]


def test_a_file_that_is_replaced_while_it_is_pushed_is_refused(
    faults: FaultProxy, url: str, server: str, tmp_path: Path
) -> None:
    folder = save(tmp_path / "one", 12)
    thread, failed = _held_in_the_middle(url, faults, tmp_path / "one")
    (folder / "mp_rank_02" / naming.MODEL_FILE).unlink()
    faults.fault = lambda number, method, path: ""
    faults.release.set()
    thread.join()
    (error,) = failed
    assert "mp_rank_02" in str(error)
    assert tracker.tracked_step(tmp_path / "one") == 12
    assert _all_are_intact(open_store(url, server)) == []
