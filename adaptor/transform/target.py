"""The files of one rank of the target: their content, the parts of the source for them, their sizes.

The target is laid out by rules for parallel sizes (`by_rules`), or as a layout file describes it
(`described_by`).
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptor.checkpoint import dcp
from adaptor.checkpoint.layout_file import JobLayout
from adaptor.errors import CheckpointError, UnsupportedError
from adaptor.protocol.framework_options import UNEVEN
from adaptor.transform import described, rules, sharded_index
from adaptor.transform.described import STATES
from adaptor.transform.model import Buffer, Group, Slot, View, resized
from adaptor.transform.records import SIZES, NewTensor
from adaptor.transform.sizes import Rank, Sizes
from adaptor.transform.source import WEIGHT, SourceCheckpoint, needed, one_of_each

if TYPE_CHECKING:
    from adaptor.transform.copying import Files
import re

from adaptor.checkpoint import layout_file
from adaptor.errors import AdaptorError
from adaptor.protocol import naming

# Bytes of a file beside its tensors: its structure, random states, the arguments.
_REST = 256 << 10


@dataclass(frozen=True)
class TargetCheckpoint:
    """A checkpoint in other sizes.

    Attributes:
        rows: of its vocabulary, with padding
        layout: the framework's description of its ranks; None: by the rules
        format: torch or torch_dist
    """

    source: SourceCheckpoint
    sizes: Sizes
    rows: int
    layout: JobLayout | None = None
    format: str = "torch"

    @cached_property
    def views(self) -> Mapping[Rank, View]:
        """Return the part of each rank."""
        model = self.source.model
        if self.layout is None:
            return {rank: model.view(rank, self.sizes, self.rows) for rank in self.sizes.ranks}
        items = {item.name: item for item in model.items()}
        ranks = described.by_rank(self.layout)
        return {rank: described.view_of(ranks[rank], rank, items) for rank in self.sizes.ranks}

    def bytes(self, rank: Rank) -> int:
        """Return the approximate size of a rank's files."""
        if self.format != "torch":
            numels = [(prod(slot.shape), slot) for slot in self.own(rank) if slot.item.dtype]
            state = 0 if self.source.weights_only else len(STATES) * SIZES["float32"]
            return _REST + sum(
                count * (SIZES[slot.item.dtype] + (state if slot.is_param else 0)) for count, slot in numels
            )
        view = self.views[rank]
        model = sum(
            prod(s.shape) * SIZES[s.item.dtype]
            for own_slots in view.chunks.values()
            for s in own_slots
            if s.item.dtype
        )
        buffers = [buffer for stored in self._optimizers_of(rank) for buffer in stored or ()]
        states = sum(len(STATES) * SIZES["float32"] * buffer.numel for buffer in buffers)
        return model + states + 2 * _REST

    def _optimizers_of(self, rank: Rank) -> list[Sequence[Buffer] | None]:
        """Return the buffers of each optimizer of a rank; None where another rank has the state."""
        if self.source.weights_only:
            return []
        view = self.views[rank]
        return [
            buffers if stored else None for buffers, stored in zip(view.optimizers, view.stored, strict=True)
        ]

    @property
    def has_integrity(self) -> bool:
        """Return whether the target gets an `integrity.json`: if the source's job asks for one or has one."""
        is_requested = getattr(self.source.args, "verify_integrity", False)
        return self.format != "torch" and bool(is_requested or (self.source.folder / dcp.INTEGRITY).exists())

    def own(self, rank: Rank) -> Iterator[Slot]:
        """Yield the entries of a rank that no rank before it has: the entries it writes in the format
        `torch_dist`.
        """
        for slots in self.views[rank].chunks.values():
            for slot in slots:
                item = slot.item
                is_copy = slot.name == rules.OUTPUT and item.name == rules.EMBEDDING
                of_expert = rules.expert_of(item.name) is not None
                is_shared = (
                    item.cut.axis is None and (self.sizes.expert_rank(rank) if of_expert else rank.tp) > 0
                )
                if not (is_copy or is_shared or (self.sizes.replica(rank) > 0 and not of_expert)):
                    yield slot

    def needs(self, rank: Rank) -> dict[Rank, set[Path]]:
        """Return the ranks of the source from which a rank is made, and the files with their parts."""
        needed_paths: dict[Rank, set[Path]] = {}
        for slot, kind in self._needed_tensors(rank):
            parts = one_of_each(slot, self.source.parts(slot.item.name, kind))
            for part, *_ in needed(slot, parts):
                needed_paths.setdefault(part.rank, set()).update(part.stored.paths)
        return needed_paths

    def _needed_tensors(self, rank: Rank) -> Iterator[tuple[Slot, str]]:
        view = self.views[rank]
        for own_slots in view.chunks.values():
            for slot in own_slots:
                if slot.item.dtype:
                    yield slot, WEIGHT
        for buffers in self._optimizers_of(rank):
            for buffer in buffers or ():
                for slot, _ in buffer.slots:
                    yield from ((slot, kind) for kind in STATES)

    def require_parts(self) -> None:
        """Refuse a source without a part. Raises CheckpointError."""
        for rank in self.sizes.ranks:
            for slot, kind in self._needed_tensors(rank):
                parts = self.source.parts(slot.item.name, kind)
                if not parts:
                    raise CheckpointError(f"{self.source.folder}: no rank has {kind} of {slot.item.name}")

    def optimizer_state(self, rank: Rank, files: Files) -> Any:
        """Return the content of a rank's OPTIMIZER_FILE."""
        saved: list[Any] = []
        for buffers in self._optimizers_of(rank):
            if buffers is None:
                saved.append(None)
                continue
            state: dict[Any, Any] = {"buckets_coalesced": True}
            for index, buffer in enumerate(buffers):
                tensors: dict[str, Any] = {
                    kind: NewTensor("float32", (buffer.numel,), partial(self._buffer, buffer, kind, files))
                    for kind in STATES
                }
                tensors["numel_unpadded"] = buffer.numel
                state[index] = {buffer.dtypes: tensors}
            saved.append(state)
        return saved if len(saved) > 1 else saved[0]

    def _buffer(self, buffer: Buffer, kind: str, files: Files) -> Iterator[Any]:
        at = 0
        for slot, placed in sorted(buffer.slots, key=lambda placed_slot: placed_slot[1].begin):
            yield bytes((placed.begin - at) * SIZES["float32"])
            yield from self._pieces(slot, kind, files)
            at = placed.end
        yield bytes((buffer.numel - at) * SIZES["float32"])

    def key(self, name: str) -> str:
        """Return the name in the format `torch_dist` of a tensor of the whole model."""
        is_local = getattr(self.source.args, "transformer_impl", None) == "local"
        return sharded_index.key_of(self._keys.get(name, name), is_local=is_local)

    @cached_property
    def _keys(self) -> Mapping[str, str]:
        """Return the framework's names, from the layout file."""
        layout = self.layout or self.source.layout
        return {
            described.name_of(entry): entry.key
            for rank_layout in (layout.ranks if layout else ())
            for entries in rank_layout.chunks.values()
            for entry in entries
            if entry.dtype
        }

    def stored_as(self, slot: Slot, kind: str, files: Files) -> Iterator[memoryview]:
        """Yield the bytes of a rank's tensor.

        Args:
            slot: the tensor, or a piece of it.
            kind: WEIGHT, or a state of the optimizer (STATES).
            files: of the source.

        Raises:
            CheckpointError: the main params do not round to the weight, or a file is damaged.
        """
        return self._weight(slot, files) if kind == WEIGHT else self._pieces(slot, kind, files)

    def _pieces(self, slot: Slot, kind: str, files: Files) -> Iterator[memoryview]:
        parts = self.source.parts(slot.item.name, kind)
        moments = kind not in (WEIGHT, "param")
        return files.part(slot, parts, moments=moments)

    def _weight(self, slot: Slot, files: Files) -> Iterator[memoryview]:
        """Yield the pieces of a weight. Raises CheckpointError where the main params do not round to the
        weight.
        """
        # Imported here, as below: numpy takes half of the time of a command without it.
        from adaptor.transform.copying import rounds_to

        pieces = self._pieces(slot, WEIGHT, files)
        if not slot.is_param or self.source.weights_only:
            yield from pieces
            return
        mains = self._pieces(slot, "param", files)
        for weight, main in zip(pieces, mains, strict=True):
            if not rounds_to(main, weight, slot.item.dtype):
                raise CheckpointError(
                    f"{slot.item.name}: the main params of the optimizer do not round to the weights, so the"
                    f" optimizer of {self.source.folder} is not laid out by {self.source.authority}"
                )
            yield weight

    def model_state(self, rank: Rank, files: Files) -> dict[str, Any]:
        """Return the content of a rank's MODEL_FILE."""
        from adaptor.transform.copying import states_of

        chunks: dict[str, Any] = {}
        for key, own_slots in self.views[rank].chunks.items():
            chunks[key] = OrderedDict()  # the type that the framework saves
            for slot in own_slots:
                value = slot.item.value
                if slot.item.dtype:
                    pieces = partial(self._weight, slot, files)
                    value = NewTensor(slot.item.dtype, slot.shape, pieces)
                chunks[key][slot.name] = value
        first = self.source.sizes.ranks[0]
        body: dict[str, Any] = {}
        for key, value in self.source.bodies[first].items():
            if key == "args":
                body[key] = self.arguments(rank)
            elif key == "optimizer":
                body[key] = self._optimizers(rank)
            elif key == "rng_state":
                body[key] = states_of(self.source, rank, files)
            elif key in self.source.views[first].chunks:
                body.update(chunks)
            else:
                body[key] = value
        return body

    def arguments(self, rank: Rank) -> Any:
        """Return the framework's arguments, as a job of these sizes would save them."""
        args = Namespace(**vars(self.source.args))
        is_said = getattr(args, "expert_tensor_parallel_size", None) is not None
        etp = self.sizes.expert_tensor if is_said or self.sizes.etp is not None else None
        new_arguments: dict[str, Any] = resized(args, self.sizes, self.rows, etp)
        new_arguments |= {name: False if getattr(args, name, None) is False else None for name in UNEVEN}
        new_arguments |= {} if self.layout is None else self.layout.ranks[0].args
        new_arguments |= {"ckpt_format": self.format, "use_dist_ckpt": self.format != "torch"}
        new_arguments |= {"no_save_optim": True} if self.source.weights_only else {}
        for name, value in new_arguments.items():
            if hasattr(args, name):
                setattr(args, name, value)
        context = getattr(args, "context_parallel_size", None) or 1
        number = rank.tp + self.sizes.tp * context * (self.sizes.replica(rank) + self.sizes.dp * rank.pp)
        for name in ("rank", "local_rank"):
            if hasattr(args, name):
                setattr(args, name, number)
        return args

    def _optimizers(self, rank: Rank) -> Any:
        saved = self.source.bodies[self.source.sizes.ranks[0]]["optimizer"]
        own_states = saved if isinstance(saved, list) else [saved]
        groups = {_key(group): group for body in own_states for group in body["optimizer"]["param_groups"]}
        optimizer_states = []
        used: set[Group] = set()
        for number in range(len(self.views[rank].optimizers)):
            order = dict.fromkeys(self.views[rank].groups[number])
            for other_rank in self.sizes.ranks:  # the framework has the same groups on all ranks
                order.update(dict.fromkeys(self.views[other_rank].groups[number]))
            body = own_states[min(number, len(own_states) - 1)]
            chosen = [(key, key if key in groups else _of_other_kind(key)) for key in order]
            if any(group_key not in groups for _, group_key in chosen):
                raise self._other_groups(groups, order)
            used.update(group_key for _, group_key in chosen)
            of_kind = [
                {**groups[group_key], **_expert_flag(key, groups[group_key])} for key, group_key in chosen
            ]
            optimizer_states.append({**body, "optimizer": {**body["optimizer"], "param_groups": of_kind}})
        if len(optimizer_states) == len(own_states) and used != set(groups):
            raise self._other_groups(groups, used)
        return optimizer_states if len(optimizer_states) > 1 else optimizer_states[0]

    def _other_groups(self, group_keys: Iterable[Group], expected: Iterable[Group]) -> UnsupportedError:
        return UnsupportedError(
            f"{self.source.folder}: the groups of the optimizer are {sorted(group_keys)}, by"
            f" {self.source.authority} they would be {sorted(expected)}"
        )


def _of_other_kind(key: Group) -> Group:
    """Return the key of the same group for the other kind of params: experts or all other params."""
    decays, rate, expert, decoupled = key
    return decays, rate, not expert, decoupled


def _expert_flag(key: Group, group: Mapping[str, Any]) -> dict[str, bool]:
    return {"is_expert_parallel": key[2]} if bool(group.get("is_expert_parallel")) != key[2] else {}


def _key(group: Mapping[str, Any]) -> Group:
    return (
        group["wd_mult"],
        group["lr_mult"],
        bool(group.get("is_expert_parallel", False)),
        bool(group.get("is_decoupled_lr", False)),
    )


def rows_for(source: SourceCheckpoint, sizes: Sizes, vocabulary: int | None) -> int:
    """Return the rows of the target's vocabulary, with padding.

    Args:
        source: the checkpoint to transform.
        sizes: of the target.
        vocabulary: without padding, where the user says it.

    Raises:
        UnsupportedError: the number of rows is unknown and makes a difference.
    """
    args = source.args
    if sizes.tp == source.sizes.tp:
        return source.model.rows
    multiple = args.make_vocab_size_divisible_by
    stored = source.model.rows
    if vocabulary is not None:
        padded = rules.padded_rows(vocabulary, multiple, source.sizes.tp)
        if padded != stored:
            raise UnsupportedError(
                f"--vocab-size {vocabulary}: padded for TP{source.sizes.tp} it would have {padded} rows;"
                f" the checkpoint has {stored}"
            )
        return rules.padded_rows(vocabulary, multiple, sizes.tp)
    stored_rows = getattr(args, "vocab_size", None)
    if stored_rows is not None:
        # Some tokenizers have one more token than the argument says: the end of a document.
        possible = [
            n
            for n in (stored_rows, stored_rows + 1)
            if rules.padded_rows(n, multiple, source.sizes.tp) == stored
        ]
        rows = {rules.padded_rows(n, multiple, sizes.tp) for n in possible}
        if len(rows) != 1:
            raise UnsupportedError(
                f"{source.folder}: has {stored} rows of the vocabulary with padding, and its arguments say"
                f" {stored_rows} without, or one more for the end of a document; give the tokenizer's"
                " size as --vocab-size"
            )
        return rows.pop()
    least = rules.padded_rows(stored - multiple * source.sizes.tp + 1, multiple, sizes.tp)
    most_rows = rules.padded_rows(stored, multiple, sizes.tp)
    if least != most_rows:
        raise UnsupportedError(
            f"--vocab-size: the checkpoint has {stored} rows with padding and does not say how many without;"
            f" for --tp {sizes.tp} it makes a difference, so give the tokenizer's size"
        )
    return most_rows


# The first version of Megatron-core that loads the format `torch_dist` as it is written.
_NUMBERED = (0, 14)


def by_rules(
    source: SourceCheckpoint, sizes: Sizes, format: str, vocabulary: int | None = None
) -> TargetCheckpoint:
    """Return the target of these sizes.

    Args:
        source: the checkpoint to transform.
        sizes: of the target.
        format: of the target, torch or torch_dist.
        vocabulary: the rows of the vocabulary without padding, where the user says it.

    Raises:
        UnsupportedError: a size does not divide the model, or is not supported.
    """
    source.model.require_divisible(sizes)
    if source.model.experts and sizes.ep == 1 and source.layout is None:
        raise UnsupportedError(
            "--ep 1: a model with experts is transformed with --ep from 2 on only where SRC has no"
            f" {naming.LAYOUT}"
        )
    if source.model.experts and sizes.tp > 1 and source.layout is None:
        raise UnsupportedError(
            f"--tp {sizes.tp}: a model with experts is transformed with --tp 1 only where SRC has no"
            f" {naming.LAYOUT}"
        )
    return TargetCheckpoint(source, sizes, rows_for(source, sizes, vocabulary), format=format)


def described_by(
    source: SourceCheckpoint, path: Path, requested_sizes: Mapping[str, int | None], format: str
) -> TargetCheckpoint:
    """Return the target that a layout file describes.

    Args:
        source: the checkpoint to transform.
        path: of the layout file.
        requested_sizes: the user's sizes, which have to be equal to the sizes of the file; None: not
            requested.
        format: of the target, torch or torch_dist.

    Raises:
        UnsupportedError: the file is of another model, other sizes or an older version of the framework.
    """
    layout = layout_file.read(path)
    try:
        sizes = described.sizes_of(layout)
    except AdaptorError as error:
        raise type(error)(f"--layout {path}: {error}") from error
    for name, value in requested_sizes.items():
        if value is not None and value != (sizes.expert_tensor if name == "etp" else getattr(sizes, name)):
            raise UnsupportedError(f"--{name} {value}: --layout {path} is of {sizes} DP{sizes.dp}")
    require_loaded_by(layout.ranks[0].core, format, f"--format {format}: --layout {path}")
    rows = layout.ranks[0].args.get("padded_vocab_size")
    least = getattr(source.args, "vocab_size", None) or 1
    if type(rows) is not int or rows < least:
        raise UnsupportedError(
            f"--layout {path}: is of a vocabulary of {rows} rows with padding; the checkpoint has"
            f" {least} without"
        )
    return TargetCheckpoint(source, sizes, rows, layout, format)


def require_loaded_by(core: str, format: str, subject: str) -> None:
    """Refuse a format that a version of Megatron-core does not load in the written form.

    Args:
        core: the version.
        format: torch or torch_dist.
        subject: the beginning of the message.

    Raises:
        UnsupportedError: the version does not load the format.
    """
    if format != "torch" and _version(core) < _NUMBERED:
        raise UnsupportedError(
            f"{subject} is of Megatron-core {core}, which does not"
            " load it in the form that is written, that of 0.14; give --format torch"
        )


def _version(text: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version; without numbers the version of the newest form."""
    match = re.match(r"(\d{1,6})\.(\d{1,6})", text)
    return tuple(map(int, match.groups())) if match else _NUMBERED
