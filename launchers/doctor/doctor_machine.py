"""The checks of `ttp doctor` for the machine, the installation, and the folder of checkpoints."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import os
import platform
import resource
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from itertools import pairwise
from pathlib import Path

from packaging.version import Version

from adaptor import devices, host_memory, plug_ins
from adaptor.checkpoint import disk
from adaptor.checkpoint.hashing import HashingFile
from adaptor.config import Config
from adaptor.errors import AdaptorError
from adaptor.launchers.agent.processes import find_py_spy
from adaptor.launchers.cli.start_checks import INTERFACES, require_interfaces
from adaptor.launchers.control import credentials
from adaptor.launchers.doctor import doctor_job
from adaptor.launchers.doctor.doctor_job import CheckResult, PlannedJob, Speed

_TORCH = (Version("2.4"), Version("3"))
# Each worker takes some tens of descriptors, and a data loader some more.
_DESCRIPTORS = 4096
_SHM = 64 << 20
# A Unix socket's path has 108 bytes; `ttp-`, a unique suffix and the socket's name take the rest.
_LONGEST_TEMPORARY = 64
_RENEW_S = 7 * 86400.0
_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
_TIMEX_BYTES = 512  # more than struct timex has


def software(settings: Config) -> Iterator[CheckResult]:
    """Check the versions."""
    versions = f"Python {platform.python_version()}, ttp-adaptor {metadata.version('ttp-adaptor')}"
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield CheckResult(
            "software", "FAIL", f"{versions}; torch is not installed", "install torch 2.4 or later"
        )
        return
    fits = _TORCH[0] <= Version(torch) < _TORCH[1]
    remedy = "" if fits else "install torch 2.4 or later, below 3"
    yield CheckResult("software", "OK" if fits else "FAIL", f"{versions}, torch {torch}", remedy)
    try:
        warning = plug_ins.conflict()
    except AdaptorError as error:
        yield CheckResult("software", "FAIL", str(error))
    else:
        if warning:
            yield CheckResult("software", "WARN", warning)


def kernel(settings: Config) -> Iterator[CheckResult]:
    """Check whether the kernel reports the death of a process at once."""
    name = f"Linux {platform.release()}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        yield CheckResult("kernel", "FAIL", f"{name} has no pidfd_open ({error})", "use Linux 5.3 or later")
    else:
        yield CheckResult("kernel", "OK", name)


def device(settings: Config) -> Iterator[CheckResult]:
    """Check for the accelerator."""
    if settings.device:
        devices.require(settings.device)
        yield CheckResult("device", "OK", f"TTP_DEVICE is {settings.device}")
        return
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        yield CheckResult("device", "OK", f"{torch.cuda.device_count()} × {', '.join(sorted(names))}")
    elif importlib.util.find_spec("torch_npu") is not None:
        yield CheckResult("device", "OK", f"torch_npu {metadata.version('torch_npu')}")
    else:
        yield CheckResult(
            "device", "WARN", "there is no accelerator", "set TTP_DEVICE=cpu if the job is to run on the CPU"
        )


def network(settings: Config) -> Iterator[CheckResult]:
    """Check whether other nodes reach the address where gloo listens, and the port of the controller."""
    named = os.environ.get(INTERFACES, "")
    own_interfaces = ", ".join(name for _, name in socket.if_nameindex())
    try:
        require_interfaces(named)
    except AdaptorError as error:
        yield CheckResult("network", "FAIL", str(error))
    else:
        yield from (
            [CheckResult("network", "OK", f"{INTERFACES} is {named}")]
            if named
            else _host_name(own_interfaces)
        )
    with socket.socket() as listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", settings.port))
        except OSError as error:
            description = f"TTP_PORT {settings.port} cannot be had ({error.strerror})"
            yield CheckResult(
                "port", "WARN", description, "the next free one will be taken; firewalls must allow it"
            )
        else:
            yield CheckResult("port", "OK", f"TTP_PORT {settings.port} is free")


def _host_name(interface_names: str) -> Iterator[CheckResult]:
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        address, description = "", f"the host name {host} does not resolve ({error.strerror})"
    else:
        description = f"the host name {host} is {address}"
    if address and not address.startswith("127."):
        yield CheckResult("network", "OK", description)
    else:
        remedy = (
            f"for several nodes set {INTERFACES} to the interface that other nodes reach, one of "
            f"{interface_names}"
        )
        yield CheckResult("network", "WARN", description, remedy)


def certificates(settings: Config) -> Iterator[CheckResult]:
    """Check whether other nodes would accept the certificate, and until when."""
    if not settings.tls_cert:
        description = "plain connections" if settings.tls == "plain" else "no certificates: one machine only"
        yield CheckResult("certificates", "OK", description)
        return
    try:
        remaining_s = credentials.ends(settings) - time.time()
    except AdaptorError as error:
        yield CheckResult("certificates", "FAIL", str(error))
        return
    description = f"TTP_TLS_CERT {settings.tls_cert} ends in {remaining_s / 86400:.1f} days"
    remedy = "renew the file in place: it is read again at each connection" if remaining_s < _RENEW_S else ""
    yield CheckResult("certificates", "WARN" if remedy else "OK", description, remedy)


def limits(settings: Config) -> Iterator[CheckResult]:
    """Check the resource limits of a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = f"ulimit -n {_DESCRIPTORS} (the hard limit is {hard})" if soft < _DESCRIPTORS else ""
    yield CheckResult("descriptors", "WARN" if remedy else "OK", f"{soft} for each process", remedy)
    shm = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    remedy = "data loaders need it: docker run --shm-size, or a memory volume there" if shm < _SHM else ""
    yield CheckResult("/dev/shm", "WARN" if remedy else "OK", f"{_binary_size(shm)} free", remedy)
    description = (
        f"{_binary_size(host_memory.available())} free on the host, limits of control groups included"
    )
    yield CheckResult("memory", "OK", description)


def folders(settings: Config) -> Iterator[CheckResult]:
    """Check the folders for logs and for sockets."""
    logs, temporary = Path(settings.log_path), Path(tempfile.gettempdir())
    is_missing = not logs.exists()
    try:
        logs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=logs):
            pass
        if is_missing:
            logs.rmdir()
    except OSError as error:
        yield CheckResult("logs", "FAIL", f"{logs} cannot be written ({error.strerror})", "set TTP_LOG_PATH")
    else:
        yield CheckResult("logs", "OK", str(logs))
    try:
        with tempfile.TemporaryFile(dir=temporary):
            pass
    except OSError as error:
        yield CheckResult(
            "temporary", "FAIL", f"{temporary} cannot be written ({error.strerror})", "set TMPDIR"
        )
        return
    is_long = len(os.fsencode(temporary)) > _LONGEST_TEMPORARY
    remedy = "sockets are in it, whose paths are short: set TMPDIR to a shorter one" if is_long else ""
    yield CheckResult("temporary", "FAIL" if is_long else "OK", str(temporary), remedy)


def stacks(settings: Config) -> Iterator[CheckResult]:
    """Check whether a hang can be explained with native stacks."""
    spy = find_py_spy()
    scope = host_memory.text_of(Path("/proc/sys/kernel/yama/ptrace_scope"))
    if spy is None:
        yield CheckResult(
            "stacks", "WARN", "py-spy is not installed", "pip install py-spy for native stacks of a hang"
        )
    elif scope in ("2", "3") and os.geteuid() != 0:
        description = f"kernel.yama.ptrace_scope is {scope}: py-spy may not look into workers"
        yield CheckResult(
            "stacks", "WARN", description, "allow it (1, or CAP_SYS_PTRACE) for native stacks of a hang"
        )
    else:
        yield CheckResult("stacks", "OK", f"py-spy is {spy}")


def clock(settings: Config) -> Iterator[CheckResult]:
    """Ask the kernel whether the clock is synchronised."""
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    if state == _UNSYNCHRONISED:
        remedy = "on several nodes run chronyd or ntpd: reports order events by the nodes' clocks"
        yield CheckResult("clock", "WARN", "the kernel says that nothing keeps its clock right", remedy)
    else:
        yield CheckResult("clock", "OK", "it is kept right")


def scheduler(settings: Config) -> Iterator[CheckResult]:
    """Compare the scheduler's kill time with TTP_GRACE."""
    if "SLURM_JOB_ID" not in os.environ or shutil.which("scontrol") is None:
        return
    shown = subprocess.run(
        ["scontrol", "show", "config"], capture_output=True, text=True, timeout=10, check=True
    )
    for line in shown.stdout.splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "KillWait":
            seconds = float(value.split()[0])
            short = seconds < settings.grace_s
            remedy = "raise KillWait, or lower TTP_GRACE" if short else ""
            description = f"Slurm's KillWait is {seconds:.0f} s, TTP_GRACE {settings.grace_s:.0f} s"
            yield CheckResult("scheduler", "FAIL" if short else "OK", description, remedy)


CHECKS: Sequence[Callable[[Config], Iterator[CheckResult]]] = (
    *(software, kernel, device, network, certificates),
    *(limits, folders, stacks, clock, scheduler),
)


def _binary_size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"


_BLOCK = 8 << 20


def save_folder(folder: Path, size: int, job: PlannedJob, settings: Config) -> Iterator[CheckResult]:
    """Try the operations of a save: write, rename, exchange two names, lock, sync to disk.

    All files are made in a new subfolder, removed afterwards, as is a folder that did not exist before.

    Args:
        size: the bytes to write in the speed test.
        job: the job to save in the folder.
        settings: with the time limits of a save.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield from _tried(folder, size, job, settings)
    except OSError as error:
        description = f"{folder}: a save would fail there ({error.strerror})"
        yield CheckResult(
            "save", "FAIL", description, "give this user the right and room, or name another --save"
        )
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def _tried(folder: Path, size: int, job: PlannedJob, settings: Config) -> Iterator[CheckResult]:
    status = disk.probe_rights(folder)
    room = shutil.disk_usage(folder).free
    owner = disk.name_user(status.st_uid)
    yield CheckResult("save", "OK", f"{folder}: files are of {owner}; {room / 2**30:.1f} GiB free")
    place = folder / f"{disk.PROBE}doctor_{secrets.token_hex(4)}"
    disk.make_private(place)
    try:
        yield _rename(place)
        yield _exchange(place)
        yield _lock(place)
        speed, finding = _speed(place, min(size, room // 2))
        yield finding
        yield from doctor_job.times(speed, job.save(folder), room, settings)
    finally:
        disk.remove(place)


def _rename(place: Path) -> CheckResult:
    first_path, second_path = place / "iter_tmp", place / "iter_0000001"
    first_path.mkdir()
    try:
        first_path.rename(second_path)
        disk.sync(place)
    except OSError as error:
        description = f"a folder cannot get its name, or not reach the disk ({error.strerror})"
        return CheckResult(
            "rename", "FAIL", description, "use a file system that renames folders and syncs them"
        )
    return CheckResult("rename", "OK", "a folder gets its name, and that is on disk")


def _exchange(place: Path) -> CheckResult:
    first_path, second_path = place / "a", place / "b"
    first_path.mkdir()
    second_path.mkdir()
    if disk.exchange(first_path, second_path):
        return CheckResult("exchange", "OK", "two folders can exchange their names at once")
    description = "two folders cannot exchange their names at once (NFS cannot)"
    remedy = "a checkpoint of a step that was saved before is replaced in two steps: docs/promises.md"
    return CheckResult("exchange", "WARN", description, remedy)


def _lock(place: Path) -> CheckResult:
    path = place / "lock"
    with path.open("w") as first_file, path.open("w") as second_file:
        try:
            fcntl.flock(first_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            description = f"flock does not work ({error.strerror})"
            return CheckResult(
                "lock", "FAIL", description, "mount the file system with locks (Lustre: -o flock)"
            )
        try:
            fcntl.flock(second_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return CheckResult("lock", "OK", "flock keeps others out, on this node")
    return CheckResult(
        "lock", "FAIL", "two locks on one file are held at once", "mount it with working locks"
    )


def _speed(place: Path, size: int) -> tuple[Speed, CheckResult]:
    """Write as a save does (syncing while writing), and measure the speed."""
    block = os.urandom(min(_BLOCK, max(size, 1)))
    moved = [time.monotonic()]
    with HashingFile(place / "data", lambda count: moved.append(time.monotonic())) as file:
        for _ in range(max(1, size // len(block))):
            file.write(block)
    moved.append(time.monotonic())
    speed = Speed(
        file.bytes / max(moved[-1] - moved[0], 1e-9),
        max(moved_after - moved_before for moved_before, moved_after in pairwise(moved)),
    )
    description = f"{file.bytes / 2**20:.0f} MiB were written and synced at {speed.rate / 1e6:.0f} MB/s"
    return speed, CheckResult("speed", "OK", description)
