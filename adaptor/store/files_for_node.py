"""Says which files of a checkpoint in a store the ranks of a node load, where that can be known.

In the format `torch` a rank loads the folder of its model-parallel rank; the layout file says which that is,
for the parallel sizes of the job that has saved. In the format `torch_dist` what a rank reads depends on how
the framework divides the reading.
"""

from __future__ import annotations

import msgspec
import xxhash

from adaptor.checkpoint import layout_file
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.store.catalog import Checkpoint
from adaptor.store.client import DamagedError, Store

_MODEL_PARALLEL = "mp_rank_"


class NodeRanks(msgspec.Struct, frozen=True):
    """The ranks of a node, and the sizes of the job.

    Attributes:
        ranks: of this node
        world_size: how many the job has
        tp, pp: its tensor and pipeline parallel sizes
    """

    ranks: tuple[int, ...]
    world_size: int
    tp: int
    pp: int


def needed(store: Store, checkpoint: Checkpoint, node: NodeRanks) -> set[str] | None:
    """Return the files that the ranks of a node load, None where nobody can tell.

    Args:
        store: where the checkpoint is.
        checkpoint: the checkpoint.
        node: whose ranks are meant; they are numbered as the framework does by default.

    Raises:
        DamagedError: the layout file is not what was written.
        StoreError: the store refuses, or does not answer.
    """
    files = {file.path: file for file in checkpoint.known.files}
    folders = {path.partition("/")[0] for path in files if path.startswith(_MODEL_PARALLEL)}
    if naming.LAYOUT not in files or not folders:
        return None
    name = f"{checkpoint.where}/{naming.LAYOUT}"
    content = store.get(name, layout_file.LARGEST)
    if xxhash.xxh3_128_hexdigest(content) != files[naming.LAYOUT].xxh3_128:
        raise DamagedError(f"{store}/{name}: checksum differs from the manifest")
    try:
        places = layout_file.places(content, f"{store}/{name}")
    except CheckpointError:
        return None
    names = {(place.tp, place.pp): place.folder for place in places}
    stages, remainder = node.pp, node.world_size % (node.tp * node.pp)
    alike = all(
        (place_of_rank.sizes.get("tp"), place_of_rank.sizes.get("pp")) == (node.tp, node.pp)
        for place_of_rank in places
    )
    # Experts are numbered across the ranks of data.
    if remainder or not alike or any(place_of_rank.sizes.get("ep", 1) > 1 for place_of_rank in places):
        return None
    own_folders = {names.get((rank % node.tp, rank // (node.world_size // stages))) for rank in node.ranks}
    if not own_folders <= folders:
        return None
    return {path for path in files if path.partition("/")[0] not in folders - own_folders}
