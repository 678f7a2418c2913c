"""Makes the layout file of a transformed checkpoint, from which that can be transformed again."""

from __future__ import annotations

from adaptor.checkpoint import layout_file
from adaptor.checkpoint.layout_file import BufferLayout, Entry, OptimizerLayout, Place, RankLayout
from adaptor.transform import rules
from adaptor.transform.model import Slot, View
from adaptor.transform.sizes import Rank
from adaptor.transform.target import TargetCheckpoint

# The version of Megatron-core whose rules say what the source's layout file does not.
_CORE = "0.15"


def content(target: TargetCheckpoint) -> bytes | None:
    """Return the content of the file; None where the source has none, and rules have said all.

    The format `torch_dist` always gets one: without it is not read.
    """
    if target.layout is not None:
        return layout_file.join(map(layout_file.encode, target.layout.ranks))
    source = target.source.layout
    if source is None and target.format == "torch":
        return None
    core = _CORE if source is None else source.ranks[0].core
    return layout_file.join(
        layout_file.encode(_of_rank(target, rank, view, core)) for rank, view in target.views.items()
    )


def _of_rank(target: TargetCheckpoint, rank: Rank, view: View, core: str) -> RankLayout:
    sizes, args = target.sizes, target.arguments(rank)
    job_sizes = {
        "tp": sizes.tp,
        "pp": sizes.pp,
        "vpp": sizes.vpp,
        "ep": sizes.ep,
        "etp": sizes.expert_tensor,
        "dp": sizes.dp,
    }
    return RankLayout(
        format=layout_file.FORMAT,
        folder=sizes.folder(rank),
        tp=rank.tp,
        pp=rank.pp,
        ep=rank.ep,
        sizes={**job_sizes, "cp": getattr(args, "context_parallel_size", None) or 1},
        core=core,
        args={name: getattr(args, name, None) for name in layout_file.ARGUMENTS},
        chunks={key: tuple(_entry(target, slot) for slot in slots) for key, slots in view.chunks.items()},
        optimizers=_optimizers(view),
    )


def _entry(target: TargetCheckpoint, slot: Slot) -> Entry:
    item, cut = slot.item, slot.item.cut
    whole_shape = list(item.shape)
    if cut.rows:
        whole_shape[cut.axis or 0] = target.rows
    return Entry(
        slot.name,
        dtype=item.dtype,
        shape=slot.shape,
        key=target.key(item.name),
        whole=tuple(whole_shape),
        axis=cut.axis,
        pieces=slot.pieces,
        layer=rules.layer_of(item.name),
        expert=rules.expert_of(item.name),
        padded=cut.rows,
        tied=slot.name == rules.OUTPUT and item.name == rules.EMBEDDING,
        param=slot.is_param,
    )


def _optimizers(view: View) -> tuple[OptimizerLayout, ...]:
    chunk_of = {id(slot): key for key, slots in view.chunks.items() for slot in slots}
    return tuple(
        OptimizerLayout(
            stored,
            groups,
            tuple(
                BufferLayout(
                    (buffer.dtypes[0].name, buffer.dtypes[1].name),
                    buffer.numel,
                    tuple(
                        Place(chunk_of[id(slot)], slot.name, at.begin, at.end) for slot, at in buffer.slots
                    ),
                )
                for buffer in buffers
            ),
        )
        for stored, groups, buffers in zip(view.stored, view.groups, view.optimizers, strict=True)
    )
