"""The Ascend operator of MindCluster (AscendJob for PyTorch): one `ttprun` in each pod.

It sets RANK to the number of the pod and WORLD_SIZE to the number of cards of all pods. PyTorchJob and
Volcano's plug-in set WORLD_SIZE to the number of pods, so it is read only beside LOCAL_WORLD_SIZE, which they
do not set.
"""

from __future__ import annotations

from collections.abc import Mapping

from adaptor.launchers.platforms.machine import Machine
from adaptor.launchers.platforms.reading import PlatformError, Reading, Value, host, number, port, rank

NAME = "ascend"
TITLE = "the Ascend operator"
_CARDS = "LOCAL_WORLD_SIZE"
_ALL = "WORLD_SIZE"
_ADDRESS = "MASTER_ADDR"
_PORT = "MASTER_PORT"


def is_here(environ: Mapping[str, str]) -> bool:
    """Return whether the Ascend operator has made this environment, for PyTorch."""
    return "MINDX_TASK_ID" in environ and _CARDS in environ


def read(environ: Mapping[str, str], machine: Machine) -> Reading:
    """Return what the operator tells. Raises PlatformError for values that are wrong or disagree."""
    per_node = number(environ, _CARDS, least=1)
    everything = number(environ, _ALL, least=1)
    if everything.value % per_node.value:
        raise PlatformError(
            f"{_ALL} is {everything.value} and {_CARDS} {per_node.value}: all nodes must have as many cards"
        )
    nodes = Value(everything.value // per_node.value, f"{_ALL} / {_CARDS}")
    node_rank = rank(environ, "RANK", nodes)
    if nodes.value == 1:
        return Reading(NAME, nodes, node_rank, per_node)
    if _ADDRESS not in environ:
        raise PlatformError(f"{_ADDRESS} is not set")
    return Reading(
        NAME,
        nodes,
        node_rank,
        per_node,
        Value(host(environ[_ADDRESS], _ADDRESS), _ADDRESS),
        port(environ, _PORT) if _PORT in environ else None,
        may_come=True,
    )
