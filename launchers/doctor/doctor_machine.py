"""The checks of `ttp doctor` that look at the machine and what is installed on it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from packaging.version import Version

from adaptor import devices, distributions, host_memory
from adaptor.config import Config
from adaptor.errors import AdaptorError
from adaptor.launchers.agent.stack_collector import find_py_spy
from adaptor.launchers.cli.start_checks import INTERFACES, require_interfaces
from adaptor.launchers.control import tls
from adaptor.launchers.doctor.finding import Finding

_TORCH = (Version("2.4"), Version("3"))
# Each worker takes some tens, and a data loader some more.
_DESCRIPTORS = 4096
_SHM = 64 << 20
# A Unix socket's path has 108 bytes; `ttp-` and what makes it unique, and the socket's name, take the rest.
_LONGEST_TEMPORARY = 64
_RENEW_S = 7 * 86400.0
_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
_TIMEX_BYTES = 512  # more than struct timex has


def software(settings: Config) -> Iterator[Finding]:
    """Look at the versions."""
    versions = f"Python {platform.python_version()}, ttp-adaptor {metadata.version('ttp-adaptor')}"
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield Finding("software", "FAIL", f"{versions}; torch is not installed", "install torch 2.4 or later")
        return
    fits = _TORCH[0] <= Version(torch) < _TORCH[1]
    remedy = "" if fits else "install torch 2.4 or later, below 3"
    yield Finding("software", "OK" if fits else "FAIL", f"{versions}, torch {torch}", remedy)
    try:
        warning = distributions.conflict()
    except AdaptorError as error:
        yield Finding("software", "FAIL", str(error))
    else:
        if warning:
            yield Finding("software", "WARN", warning)


def kernel(settings: Config) -> Iterator[Finding]:
    """Look whether the kernel tells at once that a process has died."""
    name = f"Linux {platform.release()}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        yield Finding("kernel", "FAIL", f"{name} has no pidfd_open ({error})", "use Linux 5.3 or later")
    else:
        yield Finding("kernel", "OK", name)


def device(settings: Config) -> Iterator[Finding]:
    """Look for the accelerator."""
    if settings.device:
        devices.require(settings.device)
        yield Finding("device", "OK", f"TTP_DEVICE is {settings.device}")
        return
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        yield Finding("device", "OK", f"{torch.cuda.device_count()} × {', '.join(sorted(names))}")
    elif importlib.util.find_spec("torch_npu") is not None:
        yield Finding("device", "OK", f"torch_npu {metadata.version('torch_npu')}")
    else:
        yield Finding(
            "device", "WARN", "there is no accelerator", "set TTP_DEVICE=cpu if the job is to run on the CPU"
        )


def network(settings: Config) -> Iterator[Finding]:
    """Look whether other nodes reach this one where gloo listens, and at the port of the controller."""
    named = os.environ.get(INTERFACES, "")
    own_interfaces = ", ".join(name for _, name in socket.if_nameindex())
    try:
        require_interfaces(named)
    except AdaptorError as error:
        yield Finding("network", "FAIL", str(error))
    else:
        yield from (
            [Finding("network", "OK", f"{INTERFACES} is {named}")] if named else _host_name(own_interfaces)
        )
    with socket.socket() as listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", settings.port))
        except OSError as error:
            description = f"TTP_PORT {settings.port} cannot be had ({error.strerror})"
            yield Finding(
                "port", "WARN", description, "the next free one will be taken; firewalls must allow it"
            )
        else:
            yield Finding("port", "OK", f"TTP_PORT {settings.port} is free")


def _host_name(interface_names: str) -> Iterator[Finding]:
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        address, description = "", f"the host name {host} does not resolve ({error.strerror})"
    else:
        description = f"the host name {host} is {address}"
    if address and not address.startswith("127."):
        yield Finding("network", "OK", description)
    else:
        remedy = (
            f"for several nodes set {INTERFACES} to the interface that other nodes reach, one of "
            f"{interface_names}"
        )
        yield Finding("network", "WARN", description, remedy)


def certificates(settings: Config) -> Iterator[Finding]:
    """Look whether other nodes would accept the certificate, and for how long."""
    if not settings.tls_cert:
        description = "plain connections" if settings.tls == "plain" else "no certificates: one machine only"
        yield Finding("certificates", "OK", description)
        return
    try:
        remaining_s = tls.ends(settings) - time.time()
    except AdaptorError as error:
        yield Finding("certificates", "FAIL", str(error))
        return
    description = f"TTP_TLS_CERT {settings.tls_cert} ends in {remaining_s / 86400:.1f} days"
    remedy = "renew the file in place: it is read again at each connection" if remaining_s < _RENEW_S else ""
    yield Finding("certificates", "WARN" if remedy else "OK", description, remedy)


def limits(settings: Config) -> Iterator[Finding]:
    """Look at what a process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = f"ulimit -n {_DESCRIPTORS} (the hard limit is {hard})" if soft < _DESCRIPTORS else ""
    yield Finding("descriptors", "WARN" if remedy else "OK", f"{soft} for each process", remedy)
    shm = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    remedy = "data loaders need it: docker run --shm-size, or a memory volume there" if shm < _SHM else ""
    yield Finding("/dev/shm", "WARN" if remedy else "OK", f"{_bytes(shm)} free", remedy)
    description = f"{_bytes(host_memory.available())} free on the host, limits of control groups included"
    yield Finding("memory", "OK", description)


def folders(settings: Config) -> Iterator[Finding]:
    """Look at the folder for logs and the one for sockets."""
    logs, temporary = Path(settings.log_path), Path(tempfile.gettempdir())
    is_missing = not logs.exists()
    try:
        logs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=logs):
            pass
        if is_missing:
            logs.rmdir()
    except OSError as error:
        yield Finding("logs", "FAIL", f"{logs} cannot be written ({error.strerror})", "set TTP_LOG_PATH")
    else:
        yield Finding("logs", "OK", str(logs))
    try:
        with tempfile.TemporaryFile(dir=temporary):
            pass
    except OSError as error:
        yield Finding("temporary", "FAIL", f"{temporary} cannot be written ({error.strerror})", "set TMPDIR")
        return
    is_long = len(os.fsencode(temporary)) > _LONGEST_TEMPORARY
    remedy = "sockets are in it, whose paths are short: set TMPDIR to a shorter one" if is_long else ""
    yield Finding("temporary", "FAIL" if is_long else "OK", str(temporary), remedy)


def stacks(settings: Config) -> Iterator[Finding]:
    """Look whether a hang is explained with native stacks."""
    spy = find_py_spy()
    scope = _text(Path("/proc/sys/kernel/yama/ptrace_scope"))
    if spy is None:
        yield Finding(
            "stacks", "WARN", "py-spy is not installed", "pip install py-spy for native stacks of a hang"
        )
    elif scope in ("2", "3") and os.geteuid() != 0:
        description = f"kernel.yama.ptrace_scope is {scope}: py-spy may not look into workers"
        yield Finding(
            "stacks", "WARN", description, "allow it (1, or CAP_SYS_PTRACE) for native stacks of a hang"
        )
    else:
        yield Finding("stacks", "OK", f"py-spy is {spy}")


def clock(settings: Config) -> Iterator[Finding]:
    """Ask the kernel whether something keeps its clock right."""
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    if state == _UNSYNCHRONISED:
        remedy = "on several nodes run chronyd or ntpd: reports order events by the nodes' clocks"
        yield Finding("clock", "WARN", "the kernel says that nothing keeps its clock right", remedy)
    else:
        yield Finding("clock", "OK", "it is kept right")


def scheduler(settings: Config) -> Iterator[Finding]:
    """Compare the time that the scheduler gives with TTP_GRACE."""
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
            yield Finding("scheduler", "FAIL" if short else "OK", description, remedy)


CHECKS: Sequence[Callable[[Config], Iterator[Finding]]] = (
    software,
    kernel,
    device,
    network,
    certificates,
    limits,
    folders,
    stacks,
    clock,
    scheduler,
)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"
