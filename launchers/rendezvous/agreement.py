"""Compares versions and job-wide settings, which must be the same on all nodes of a job.

Nodes with different settings would make different process groups, and wait for each other forever. So before
workers start each node writes its facts into the rendezvous store, node 0 compares the facts of all nodes,
and every node reads the result. Facts are JSON, so that nodes with different versions can read them. A fact
unknown to a node is not compared.

A node that joins a training job (c10d) compares itself with the job before joining: no running job ends
because of a node with other settings.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from adaptor import config
from adaptor.config import Config
from adaptor.errors import ConfigError
from adaptor.launchers.control import credentials

if TYPE_CHECKING:
    from torch.distributed import Store

    from adaptor.launchers.rendezvous.rendezvous_handler import Rendezvous

# All nodes have just met, and each only writes its facts. A node with plain torchrun, or an older ttprun,
# writes no facts.
ANSWER_S = 60.0
# The most nodes and the most facts that are named in a line.
_NAMED = 4
_FACTS, _RESULT = "ttp/facts/{}", "ttp/agreement"
_VERSION = re.compile(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) *= *['\"]?([\w.]*)", re.MULTILINE)


class NodeFacts(msgspec.Struct, frozen=True):
    """The facts of one node: names for users, and values."""

    host: str
    facts: dict[str, str]


def facts_of_this_node(parsed: argparse.Namespace, settings: Config) -> dict[str, str]:
    """Return the facts of the node, from torchrun's arguments before ttprun changes them."""
    facts = {
        "the version of ttp-adaptor": metadata.version("ttp-adaptor"),
        "the version of torch": metadata.version("torch"),
        "--max-restarts": str(parsed.max_restarts),
        "the connection between nodes (TTP_TLS, TTP_TLS_CERT)": credentials.kind_of(settings),
    }
    if version := _megatron_core_version(parsed):
        facts["the version of Megatron-core"] = version
    for setting in config.settings():
        if setting.same_on_all_nodes:
            value = settings.value(setting)
            facts[f"{setting.variable} ({setting.flag})"] = (
                f"{value:g}" if isinstance(value, float) else str(value)
            )
    return facts


def _megatron_core_version(parsed: argparse.Namespace) -> str:
    """Return the version of Megatron-core that the script imports; '' without its source."""
    script_folder = Path.cwd() if parsed.module else Path(parsed.training_script).resolve().parent
    for folder in (script_folder, *map(Path, sys.path)):
        try:
            source = (folder / "megatron/core/package_info.py").read_text()
        except (OSError, ValueError):
            continue
        parts = dict(_VERSION.findall(source))
        numbers = [parts.get(name, "") for name in ("MAJOR", "MINOR", "PATCH")]
        return ".".join(numbers) + parts.get("PRE_RELEASE", "") if all(numbers) else ""
    return ""


def compare(store: Store, node: int, nodes: int, facts: Mapping[str, str], has_agreed: bool = False) -> str:
    """Exchange facts with all other nodes; return the difference in words, the same on every node.

    A node that has agreed with the job before waits for no other node: the loss of a node at a restart is no
    difference of settings.

    Args:
        store: has keys of this generation alone.
        has_agreed: whether the node had the facts of the job in an earlier generation.

    Returns:
        '' if all nodes have the same facts. A node without facts counts as a difference.
    """
    own_facts = NodeFacts(socket.gethostname(), dict(facts))
    store.set(_FACTS.format(node), msgspec.json.encode(own_facts).decode())
    if node == 0:
        result = "" if has_agreed else _compare_all(store, nodes)
        store.set(_RESULT, result)
        return result
    if has_agreed:
        return ""
    try:
        store.wait([_RESULT], timedelta(seconds=2 * ANSWER_S))  # node 0 waits for others as long as that
        return store.get(_RESULT).decode("utf-8", "replace")
    except RuntimeError:
        return _silent(0)


def _compare_all(store: Store, nodes: int) -> str:
    keys = [_FACTS.format(node) for node in range(nodes)]
    with contextlib.suppress(RuntimeError):  # some facts are late
        store.wait(keys, timedelta(seconds=ANSWER_S))
    facts = []
    for node, key in enumerate(keys):
        try:
            facts.append(msgspec.json.decode(store.get(key) if store.check([key]) else b"", type=NodeFacts))
        except msgspec.DecodeError:
            return _silent(node)
    return difference(facts)


def _silent(node: int) -> str:
    return (
        f"node {node} has not said its version and settings: it was lost, or does not run ttprun of the same"
        " version of ttp-adaptor with ENABLE_TTP=True"
    )


def difference(nodes: Sequence[NodeFacts]) -> str:
    """Return the facts that differ, with values and nodes, as a line for the user; '' without a
    difference.

    Args:
        nodes: the facts of each node, in the order of nodes.
    """
    differences = []
    for name in dict.fromkeys(name for node in nodes for name in node.facts):
        values: dict[str, list[str]] = {}
        for number, node in enumerate(nodes):
            if name in node.facts:
                values.setdefault(node.facts[name], []).append(f"{number} ({node.host})")
        if len(values) > 1:
            differences.append(f"{name} is {' and '.join(_on(value, on) for value, on in values.items())}")
    return _refusal("the nodes of this job differ", differences)


def _on(value: str, nodes: Sequence[str]) -> str:
    rest_text = f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
    return f"{value!r} on node{'s' if len(nodes) > 1 else ''} {', '.join(nodes[:_NAMED])}{rest_text}"


def _refusal(what: str, differences: Sequence[str]) -> str:
    if not differences:
        return ""
    rest_text = f"; and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
    return f"{what}: {'; '.join(differences[:_NAMED])}{rest_text}; give all nodes the same"


def difference_from_job(job: NodeFacts, facts: Mapping[str, str]) -> str:
    """Return how the node differs from a training job, in words; '' without a difference.

    Args:
        job: the facts of node 0.
    """
    differences = [
        f"{name} is {value!r} there ({job.host}) and {facts[name]!r} here"
        for name, value in job.facts.items()
        if name in facts and facts[name] != value
    ]
    return _refusal("the job that trains and this node differ", differences)


class Agreement:
    """The comparison of the node with the other nodes, before workers start."""

    def __init__(self, meeting: Rendezvous, facts: Mapping[str, str]) -> None:
        self._meeting = meeting
        self._facts = facts
        self._key = f"{meeting.get_run_id()}/ttp/facts of the job"
        self._has_agreed = False

    def require_as_job(self) -> None:
        """Refuse a node that joins a training job with other facts.

        Raises:
            ConfigError: names the facts that differ.
            SilentStoreError: the store does not answer.
        """
        from adaptor.launchers.rendezvous.waiting import ask

        store = self._meeting.store_of_all_rounds
        if store is None:
            return

        def read() -> bytes | None:
            return bytes(store.get(self._key)) if store.check([self._key]) else None

        facts_of_job = ask(store, read, lambda: "the facts of the job, in the rendezvous store")
        if facts_of_job is None:
            return
        try:
            job = msgspec.json.decode(facts_of_job, type=NodeFacts)
        except msgspec.DecodeError:
            raise ConfigError(
                "the facts of the job in the rendezvous store were not written by ttprun of this version"
            ) from None
        if refusal := difference_from_job(job, self._facts):
            raise ConfigError(refusal)
        self._has_agreed = True

    def require(self, node: int, nodes: int, store: Any) -> None:
        """Refuse the job, on every node, if its nodes have different facts.

        Args:
            store: has keys of this generation alone.

        Raises:
            ConfigError: names the facts that differ.
        """
        from adaptor.launchers.rendezvous.waiting import wait_for

        if nodes > 1:
            refusal = wait_for(
                lambda: compare(store, node, nodes, self._facts, self._has_agreed),
                lambda: "the versions and settings of the other nodes",
                limit_s=2 * ANSWER_S,
            )
            if refusal:
                self._meeting.stay_for_others(store, nodes)
                raise ConfigError(refusal)
        if node == 0 and self._meeting.store_of_all_rounds is not None:
            own_facts = NodeFacts(socket.gethostname(), dict(self._facts))
            self._meeting.store_of_all_rounds.set(self._key, msgspec.json.encode(own_facts).decode())
        self._has_agreed = True
