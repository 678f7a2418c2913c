"""Compare the common state of several ranks of a checkpoint: counters, groups of params, whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adaptor.checkpoint.layout_file import Piece
from adaptor.errors import CheckpointError
from adaptor.protocol.naming import MODEL_FILE
from adaptor.transform.contents import STATES
from adaptor.transform.copying import Files
from adaptor.transform.records import StoredTensor
from adaptor.transform.source import WEIGHT, SourceCheckpoint, StoredPart

# The entries that are the same on all ranks.
_COMMON = ("iteration", "opt_param_scheduler", "checkpoint_version")
# Larger replicas are compared on request alone: the comparison reads as much again. In bytes.
_SMALL = 1 << 20


def require_common(source: SourceCheckpoint, files: Files) -> None:
    """Refuse ranks that disagree in counters, schedule, scale of the loss, groups of params or their step.

    Raises:
        CheckpointError: names the value and the ranks.
    """
    first, *other_ranks = source.sizes.ranks
    for rank in other_ranks:
        own_value, other_value = source.bodies[first], source.bodies[rank]
        for key in _COMMON:
            if _plain(own_value.get(key), files) != _plain(other_value.get(key), files):
                raise CheckpointError(f"{key}: differs on rank {first} and rank {rank} of {source.folder}")
        if _plain(_optimizers(own_value), files) != _plain(_optimizers(other_value), files):
            raise CheckpointError(
                f"optimizer: the groups of params, their step or the loss scale differ on rank {first} and"
                f" rank {rank} of {source.folder}"
            )
    for rank in source.sizes.ranks:
        body = source.bodies[rank]
        steps = {group.get("step") for _, groups in _optimizers(body) for group in groups.values()}
        if len(steps) > 1:
            raise CheckpointError(
                f"{source.file(rank, MODEL_FILE)}: groups of params have the steps {sorted(steps, key=str)}"
            )


def _plain(value: Any, files: Files) -> Any:
    """Return a value for a comparison, with the bytes of tensors in the place of the tensors."""
    if isinstance(value, StoredTensor):
        return value.dtype, value.shape, files.whole(value)
    if isinstance(value, dict):
        return {key: _plain(item, files) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, files) for item in value]
    return value


def _optimizers(body: Any) -> list[tuple[Any, dict[Any, Any]]]:
    """Return for each optimizer its saved state without the groups of params, and the groups by their key."""
    saved = body.get("optimizer", [])
    return [
        (
            {key: value for key, value in inner_state.items() if key != "optimizer"},
            {
                (
                    group["wd_mult"],
                    group["lr_mult"],
                    group.get("is_expert_parallel"),
                    group.get("is_decoupled_lr"),
                ): group
                for group in inner_state["optimizer"]["param_groups"]
            },
        )
        for inner_state in (saved if isinstance(saved, list) else [saved])
    ]


def require_replicas(source: SourceCheckpoint, files: Files, everything: bool) -> None:
    """Refuse ranks of the `source` whose replicas of a tensor differ.

    Args:
        source: the checkpoint.
        files: of the source.
        everything: compare large tensors, too (weights of other expert ranks, the embedding on the last
            stage).

    Raises:
        CheckpointError: names the tensor and the ranks.
    """
    for item in source.model.items():
        if not item.dtype:
            continue
        for kind in (WEIGHT, *STATES):
            for replica_parts in _replicas(source.parts(item.name, kind)):
                if replica_parts[0].stored.bytes <= _SMALL or everything:
                    _require_equal(item.name, kind, replica_parts, files)


def _replicas(parts: Sequence[StoredPart]) -> list[list[StoredPart]]:
    by_place: dict[tuple[Piece, ...], list[StoredPart]] = {}
    for part in parts:
        by_place.setdefault(part.pieces, []).append(part)
    return [replica_parts for replica_parts in by_place.values() if len(replica_parts) > 1]


def _require_equal(name: str, kind: str, replica_parts: Sequence[StoredPart], files: Files) -> None:
    for part in replica_parts[1:]:
        if part.stored == replica_parts[0].stored:
            continue
        pieces = zip(files.pieces(replica_parts[0].stored), files.pieces(part.stored), strict=True)
        if not all(own_piece == other_piece for own_piece, other_piece in pieces):
            description = kind if kind == WEIGHT else f"state {kind}"
            raise CheckpointError(
                f"{name}: its {description} differs on rank {replica_parts[0].rank} and rank {part.rank}"
            )
