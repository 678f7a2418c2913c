"""Checks the input of ttprun before anything starts: script, folders, connections, interfaces."""

from __future__ import annotations

import argparse
import ast
import errno
import ipaddress
import os
import socket
import stat
import tempfile
from pathlib import Path

from adaptor import config, devices
from adaptor.errors import ConfigError
from adaptor.launchers.control import credentials

# Frameworks on Megatron-LM that need torch_npu, and report a missing torch_npu themselves.
_NEED_TORCH_NPU = {"ascendspeed", "mindspeed", "mindspeed_llm", "modellink"}
# torch's own variable: the network interfaces over which survivors bring their shards together.
INTERFACES = "GLOO_SOCKET_IFNAME"


def require_working_directory() -> None:
    """Refuse a deleted working directory, in which torch does not find its own libraries.

    Raises:
        ConfigError: the directory is gone.
    """
    try:
        Path.cwd()
    except OSError as error:
        raise ConfigError(
            f"the working directory is not there any more ({error.strerror}): start ttprun in another one"
        ) from None


def needs_own_agent(settings: config.Config) -> str:
    """Return a setting that needs the adaptor's own agent and controller; '' if none is set."""
    needing = (setting for setting in config.settings() if setting.needs_agent and settings.value(setting))
    return next((setting.variable for setting in needing), "")


def require_script(parsed: argparse.Namespace, settings: config.Config) -> None:
    """Refuse a script that is missing, cannot be read or is not Python: ttprun itself starts the script.

    Raises:
        ConfigError: names the script and the problem.
    """
    if parsed.no_python:
        raise ConfigError(
            "--no-python: only a Python script that ttprun starts itself can be protected:"
            " give ttprun the script without --no-python, or set ENABLE_TTP=False"
            if settings.enabled
            else f"--no-python: TTP_DEVICE={settings.device} only reaches a Python script that ttprun starts"
            " itself: give ttprun the script without --no-python, or leave TTP_DEVICE empty"
        )
    if parsed.module:
        return  # only the worker's path tells where the module is
    path = Path(parsed.training_script)
    if not parsed.training_script:
        raise ConfigError("the script is '': give ttprun the path of a Python file")
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            if not any(path.glob("__main__*")):
                raise ConfigError(
                    f"the script {path} is a folder without a __main__.py: Python cannot run it"
                )
        elif not stat.S_ISREG(mode):
            raise ConfigError(
                f"the script {path} is not a regular file: each worker reads it, and again at a restart;"
                " give ttprun the path of a Python file"
            )
        elif not os.access(path, os.R_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(f"the script {path} cannot be run ({error.strerror})") from None


def require_accelerator(parsed: argparse.Namespace, settings: config.Config) -> None:
    """Refuse a script of Megatron-LM on a machine without an accelerator, where each start would raise.

    Args:
        parsed: torchrun's arguments; the script is readable.

    Raises:
        ConfigError: names the script and the flag.
    """
    path = Path(parsed.training_script)
    if settings.device or parsed.module or not path.is_file() or not _imports_megatron_lm(path):
        return
    if not devices.has_accelerator():
        raise ConfigError(
            f"torch finds no accelerator on this machine, and {path} is a script of Megatron-LM, which needs"
            " one: give --ttp-device cpu to train on the CPU (docs/quickstart.md), or install a torch for the"
            " accelerator"
        )


def _imports_megatron_lm(script: Path) -> bool:
    """Return whether `script` imports megatron.training, and nothing of MindSpeed."""
    try:
        tree = ast.parse(script.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # compiled, or a worker will report it
        return False
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.add(node.module)
    packages = {name.partition(".")[0] for name in imported}
    is_megatron = any(f"{name}.".startswith("megatron.training.") for name in imported)
    return is_megatron and not packages & _NEED_TORCH_NPU


def require_safe_connections(parsed: argparse.Namespace, settings: config.Config) -> None:
    """Refuse several machines without certificates, unless TTP_TLS is plain; check the certificates.

    Raises:
        ConfigError: certificates are missing, or one cannot be used.
    """
    if credentials.load(settings) is not None or settings.tls == "plain" or _on_one_machine(parsed):
        return
    raise ConfigError(
        f"--nnodes {parsed.nnodes} and no certificates: agents of several machines speak TLS, so give"
        " --ttp-tls-cert, --ttp-tls-key and --ttp-tls-ca; or, inside a trusted network, --ttp-tls plain"
    )


def takes_fixed_nodes(parsed: argparse.Namespace) -> str:
    """Return the line about MIN:MAX nodes with node ranks, where torch uses MAX alone; '' for other jobs."""
    fewest, _, most_nodes = parsed.nnodes.partition(":")
    if (
        parsed.standalone
        or parsed.rdzv_backend != "static"
        or not most_nodes
        or fewest.strip() == most_nodes.strip()
    ):
        return ""
    return (
        f"[ttp] --nnodes {parsed.nnodes} with --node-rank: all {most_nodes.strip()} nodes have to come, "
        "and the job"
        " ends when one is lost; with --rdzv-backend c10d in place of --node-rank it goes on with fewer"
    )


def shortens_online(settings: config.Config) -> str:
    """Return the line about a TTP_ONLINE that TTP_OT shortens; '' where it does not, or is the default."""
    longest_s = settings.timeout_s / 2
    if "TTP_ONLINE" not in os.environ or settings.online_s <= longest_s:
        return ""
    return (
        f"[ttp] TTP_ONLINE is {settings.online_s:g}, and TTP_OT is {settings.timeout_s:g}: an online recovery"
        f" has half of TTP_OT, {longest_s:g} s; set a larger TTP_OT or a smaller TTP_ONLINE"
    )


def trusts_the_network(parsed: argparse.Namespace, settings: config.Config) -> bool:
    """Return True if agents of several nodes connect without certificates."""
    several = parsed.nnodes.rpartition(":")[2].strip() != "1" and not parsed.standalone
    return several and credentials.kind_of(settings) == credentials.PLAIN


def _on_one_machine(parsed: argparse.Namespace) -> bool:
    """Return True if all agents run on this machine: one agent, or a meeting on the loopback address."""
    if parsed.standalone or parsed.nnodes.rpartition(":")[2].strip() == "1":
        return True
    host = parsed.rdzv_endpoint.rpartition(":")[0] or parsed.rdzv_endpoint
    if not host:  # torch's own defaults
        host = parsed.master_addr if parsed.rdzv_backend == "static" else "localhost"
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def require_interfaces(named: str) -> None:
    """Refuse a network interface that the node lacks: each worker would raise during its start.

    Raises:
        ConfigError: names the interface, and the existing interfaces.
    """
    own_interfaces = [name for _, name in socket.if_nameindex()]
    for name in named.split(",") if named else []:
        if name.partition(":")[0] not in own_interfaces:  # the label of an address follows a colon (eth0:1)
            raise ConfigError(
                f"{INTERFACES} is {named!r}: this node has no network interface {name!r}, it has"
                f" {', '.join(own_interfaces)}; name the one with the address at which other nodes reach it"
            )


def require_folder(path: str) -> None:
    """Refuse a log folder that cannot be written. Raises ConfigError."""
    problem = "the folder cannot be made"
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        problem = "the folder cannot be written"
        tempfile.TemporaryFile(dir=path).close()  # permissions do not cover file systems and quotas
    except OSError as error:
        raise ConfigError(f"TTP_LOG_PATH is {path!r}: {problem} ({error.strerror})") from None
