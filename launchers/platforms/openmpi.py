"""Open MPI (mpirun, the MPI operator of Kubeflow): one `ttprun` on each node.

Its documented variables tell sizes and ranks, and no address.
"""

from __future__ import annotations

from collections.abc import Mapping

from adaptor.launchers.platforms.machine import Machine
from adaptor.launchers.platforms.reading import PlatformError, Reading, Value, host, number, rank

NAME = "openmpi"
TITLE = "Open MPI"
_SIZE = "OMPI_COMM_WORLD_SIZE"
_LOCAL = "OMPI_COMM_WORLD_LOCAL_SIZE"
_ADDRESS = "MASTER_ADDR"


def is_here(environ: Mapping[str, str]) -> bool:
    """Return whether mpirun of Open MPI has started this process."""
    return _SIZE in environ


def read(environ: Mapping[str, str], machine: Machine) -> Reading:
    """Return what Open MPI tells. Raises PlatformError for values that are wrong or disagree."""
    nodes = number(environ, _SIZE, least=1)
    local_size = number(environ, _LOCAL, least=1)
    if local_size.value != 1:
        raise PlatformError(
            f"mpirun starts {local_size.value} processes on this node ({_LOCAL}): start ttprun once on "
            "each node,"
            " as with mpirun --map-by ppr:1:node"
        )
    address = None
    if _ADDRESS in environ:
        address = Value(host(environ[_ADDRESS], _ADDRESS), _ADDRESS)
    return Reading(NAME, nodes, rank(environ, "OMPI_COMM_WORLD_RANK", nodes), address=address)
