"""ModelArts (and AICC): one `ttprun` in each container.

The variables are those of "Managing Environment Variables of a Training Container" in its documentation.
"""

from __future__ import annotations

from collections.abc import Mapping

from adaptor.launchers.platforms.machine import Machine
from adaptor.launchers.platforms.reading import PlatformError, Reading, Value, hosts, number, rank

NAME = "modelarts"
TITLE = "ModelArts"
_NODES = "MA_NUM_HOSTS"
_HOSTS = "VC_WORKER_HOSTS"
_CARDS = "MA_NUM_GPUS"


def is_here(environ: Mapping[str, str]) -> bool:
    """Return whether ModelArts has made this environment."""
    return _NODES in environ


def read(environ: Mapping[str, str], machine: Machine) -> Reading:
    """Return what ModelArts tells. Raises PlatformError for values that are wrong or disagree."""
    nodes = number(environ, _NODES, least=1)
    cards = number(environ, _CARDS) if _CARDS in environ else None
    # 0 is what containers without accelerators have.
    per_node = cards if cards is not None and cards.value > 0 else None
    if nodes.value == 1:  # there the documentation gives VC_TASK_INDEX no meaning
        return Reading(NAME, nodes, Value(0, _NODES), per_node)
    host_names = hosts(environ, _HOSTS)
    if len(host_names) != nodes.value:
        raise PlatformError(f"{_NODES} is {nodes.value}, but {_HOSTS} has {len(host_names)} hosts")
    return Reading(
        NAME,
        nodes,
        rank(environ, "VC_TASK_INDEX", nodes),
        per_node,
        Value(host_names[0], f"the first of {_HOSTS}"),
        may_come=True,
    )
