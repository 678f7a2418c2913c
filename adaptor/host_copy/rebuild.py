"""Writes a checkpoint of the newest step with a whole host copy of every rank; collective.

At a start, model and optimizer are built and the framework is about to load. Each rank reads its copy into
its optimizer, and the ranks write last words of the step as in an incident: the same groups, formats and
files, a folder that gets its name when complete, then the tracker. The framework then loads an ordinary
checkpoint. The optimizers get their former state back.

Invariant: all ranks decide by the reports of all ranks, and each rank reports, even after a failure: all go
the same way.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import _get_default_store

from adaptor import context, output, text
from adaptor.checkpoint import publish, step_record, tracker
from adaptor.checkpoint.trainee import ProtectedState, device_of, write_group
from adaptor.checkpoint.training_state import CheckpointPlacement, TrainingState
from adaptor.controller.plan import Plan, groups_of, plan
from adaptor.devices.device import Device
from adaptor.errors import CheckpointError
from adaptor.host_copy import content
from adaptor.online.transfer import TransferChannel
from adaptor.protocol.copy_file import CopyFile, CopyHeader, digest_of
from adaptor.protocol.environment import Generation, HeldCopies
from adaptor.protocol.messages import BoardRecord, Phase
from adaptor.protocol.naming import FileEntry
from adaptor.protocol.state_provider import DumpRun
from adaptor.replica import optimizer_state, twin
from adaptor.replica.group import gather_values
from adaptor.worker import dump_store

T = TypeVar("T")
# The start of the workers in which copies were made, and their step.
_Key = tuple[str, int]
# And the rank whose copy it is.
_Copy = tuple[_Key, int]


def write_newest(protected: ProtectedState) -> int | None:
    """Write a checkpoint if all ranks have copies of a step newer than the saves; collective.

    Returns:
        The written step; None: no copies exist, or the write failed, as a line says.
    """
    rank, size, everyone = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    save = Path(protected.save).resolve()
    readable_copies = _held()
    holders = _holders(
        gather_values({key: header.world_size for key, (_, header) in readable_copies.items()})
    )
    (saved,) = _from_first(tracker.tracked_step(save) if rank == 0 else None)
    newer_copies = {key: of for key, of in holders.items() if key[1] > (saved or 0)}
    complete_keys = [key for key, of in newer_copies.items() if of.keys() == set(range(size))]
    if not complete_keys:
        if newer_copies:
            _say(_incomplete(newer_copies, size))
        return None
    assert everyone is not None
    state, place = protected.placed(everyone)
    device = device_of(protected.model, protected.optimizer)
    for key in sorted(complete_keys, key=_age, reverse=True):
        with _put_back(protected.optimizer):
            problem = _write(save, key, readable_copies, holders[key], state, place, device)
        if not problem:
            since = f"later than step {saved}, which was saved" if saved is not None else "nothing was saved"
            _say(f"step {key[1]} is written from the copies in host memory ({since})")
            return key[1]
        _say(f"step {key[1]} cannot be written from the copies in host memory: {problem}")
    return None


def _age(key: _Key) -> tuple[int, str]:
    return key[1], key[0]


def _held() -> dict[_Copy, tuple[CopyFile, CopyHeader]]:
    """Return the whole copies of any ranks that this rank's agent holds."""
    readable_copies: dict[_Copy, tuple[CopyFile, CopyHeader]] = {}
    for path in (path for paths in context.part(HeldCopies).paths.values() for path in paths):
        with contextlib.suppress(OSError):
            file = CopyFile(path)
            header = file.header
            if header is not None:
                readable_copies[header.key, header.rank] = file, header
    return readable_copies


def _holders(copies_by_rank: Sequence[dict[_Copy, int]]) -> dict[_Key, dict[int, int]]:
    """Return for each key of copies the rank that reads each rank's copy: the rank itself, or the lowest rank
    with the copy.

    Args:
        copies_by_rank: of each rank: the readable copies, and the number of ranks of their job.
    """
    holders_by_key: dict[_Key, dict[int, int]] = {}
    for reader, copies in enumerate(copies_by_rank):
        for (key, rank), world_size in copies.items():
            if world_size == len(copies_by_rank):
                of = holders_by_key.setdefault(key, {})
                if rank not in of or reader == rank:
                    of[rank] = reader
    return holders_by_key


def _incomplete(newer_copies: dict[_Key, dict[int, int]], size: int) -> str:
    newest = max(newer_copies, key=_age)
    without = [rank for rank in range(size) if rank not in newer_copies[newest]]
    ranks = ", ".join(map(str, without[:5])) + (" and others" if len(without) > 5 else "")
    return f"no step has copies in host memory of all ranks: of step {newest[1]} rank {ranks} has none"


def _bring(
    key: _Key, readable_copies: dict[_Copy, tuple[CopyFile, CopyHeader]], holders: dict[int, int]
) -> tuple[memoryview, CopyHeader]:
    """Return the copy of this rank, and send copies to the ranks that cannot read their own.

    All ranks send in the same order, so no two ranks wait for each other.

    Args:
        key: of the copies.
        holders: for each rank, the rank that can read its copy.
    """
    own_rank, copy_content = dist.get_rank(), None
    for rank, reader in sorted(holders.items()):
        if own_rank not in (rank, reader):
            continue
        if reader == rank:
            file, header = readable_copies[key, rank]
            copy_content = file.content[: header.size], header
            continue
        line = TransferChannel(
            _meet(f"{key[0]}/{key[1]}/{rank}", (reader, rank), own_rank), int(own_rank == reader)
        )
        if own_rank == reader:
            file, header = readable_copies[key, rank]
            line.send(msgspec.msgpack.encode(tuple(header)))
            copy_bytes = torch.frombuffer(file.content, dtype=torch.uint8, count=header.size)
            line.send_tensors([copy_bytes], lambda tensor: tensor)
            line.receive()  # a message counts as sent while it is still in a socket
        else:
            header = CopyHeader(*msgspec.msgpack.decode(line.receive()))
            copy_bytes = torch.empty(header.size, dtype=torch.uint8)
            line.receive_tensors([copy_bytes])
            line.send(b"")
            copy_content = memoryview(copy_bytes.numpy().data), header
    assert copy_content is not None
    return copy_content


def _write(
    save: Path,
    key: _Key,
    readable_copies: dict[_Copy, tuple[CopyFile, CopyHeader]],
    holders: dict[int, int],
    state: TrainingState,
    place: CheckpointPlacement,
    device: Device,
) -> str:
    """Write the checkpoint of `key`; return the error, the same on all ranks."""
    step = key[1]
    contents_read: list[content.CopyRecord] = []

    def read() -> None:
        memory, header = _bring(key, readable_copies, holders)
        if digest_of(memory) != header.digest:
            raise CheckpointError(f"the copy of rank {header.rank} is damaged")
        contents_read.append(content.read(memory, state.optimizer, state.model))

    problem = _first_of_all(read)
    if problem:
        return problem
    content_read = contents_read[0]
    if state.args is not None:
        args = copy.copy(state.args)
        vars(args).update(content_read.arguments)  # the framework adds some only when it begins to train
        state = replace(state, args=args)
    state = replace(state, extra={**state.extra, **content_read.extra})
    generation, rank = context.part(Generation).name, dist.get_rank()
    folder: list[str] = []

    def prepare() -> None:
        if rank == 0:
            folder.append(str(publish.prepare(save, step, generation=generation)))

    problem = _first_of_all(prepare)
    if problem:
        return problem
    (checkpoint_folder,) = _from_first(folder[0] if rank == 0 else "")
    shares = dict(enumerate(gather_values(place.shares)))
    board = BoardRecord(rank=0, phase=Phase.RUNNING, oldest=step, finished=step)
    chosen = plan(groups_of(shares), dict.fromkeys(shares, board), only=step)
    if not isinstance(chosen, Plan):
        return chosen.reason
    written: dict[str, tuple[FileEntry, ...]] = {}

    def write() -> None:
        for order in chosen.groups:
            if rank in order.ranks:
                run = DumpRun(
                    rank=rank,
                    folder=checkpoint_folder,
                    attempt=0,
                    connect=lambda ranks, group=order.group: _meet(f"{step}/{group}", ranks, rank),  # type: ignore[misc]
                    progress=lambda count: None,
                    cancelled=lambda: False,
                    past=False,
                )
                files = write_group(
                    state, (None,) * len(state.chained), device, content_read.record, order, run
                )
                if rank == order.writer:
                    written[order.group] = files

    problem = _first_of_all(write)
    if problem:
        return problem
    everything = [
        entry for files in gather_values(written) for entries in files.values() for entry in entries
    ]

    def name() -> None:
        if rank == 0:
            holders = {order.group: order.holders for order in chosen.groups}
            publish.publish(save, step, everything, holders, len(shares), generation)

    return _first_of_all(name)


def _meet(name: str, ranks: tuple[int, ...], rank: int) -> ProcessGroupGloo:
    """Return a gloo group of `ranks`; the framework's own store is alive, and all ranks call."""
    prefix = f"ttp/host-copy/{context.part(Generation).name}/{name}"
    timeout_s = context.get().settings.timeout_s
    return dump_store.meet(_get_default_store(), prefix, ranks.index(rank), len(ranks), timeout_s)


@contextlib.contextmanager
def _put_back(optimizer: Any) -> Iterator[None]:
    """Give the optimizers back what they had before the rebuild: params, state and scalars."""
    inner = step_record.inner(optimizer)
    before = [
        (twin.scalars(inner_optimizer), dict(inner_optimizer.state), _tensors(inner_optimizer))
        for inner_optimizer in inner
    ]
    try:
        yield
    finally:
        for inner_optimizer, (groups, state, tensors) in zip(inner, before, strict=True):
            _fill(inner_optimizer, tensors)
            inner_optimizer.state.clear()
            inner_optimizer.state.update(state)
            current_groups = twin.scalars(inner_optimizer)
            for group, current, scalars in zip(
                inner_optimizer.param_groups, current_groups, groups, strict=True
            ):
                for key in current.keys() - scalars.keys():
                    del group[key]
                group.update(scalars)


def _tensors(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Return copies of each param and of its state on the host, wherever the framework keeps the state."""

    def state_of(param: torch.Tensor) -> dict[str, torch.Tensor]:
        if optimizer_state.storage_of(optimizer) is None:
            return {}
        entries = optimizer_state.state_values(optimizer, param).items()
        return {key: entry.to("cpu", copy=True) for key, entry in entries if isinstance(entry, torch.Tensor)}

    values = (value.to("cpu", copy=True) for value in optimizer_state.values_of(optimizer))
    return list(zip(values, map(state_of, twin.params(optimizer)), strict=True))


def _fill(
    optimizer: torch.optim.Optimizer, tensors: Sequence[tuple[torch.Tensor, dict[str, torch.Tensor]]]
) -> None:
    filled = optimizer_state.to_be_filled(optimizer)
    for param, (value, state) in zip(twin.params(filled), tensors, strict=True):
        param.data.copy_(value.view(param.shape))
        if state:
            filled.state[param] = state
    optimizer_state.keep(optimizer, filled)


def _first_of_all(act: Callable[[], None]) -> str:
    """Call `act` on all ranks; return the first error of any rank, in words; empty: none."""
    problem = ""
    try:
        act()
    except Exception as error:  # the others wait for the answer, whatever it is
        problem = str(error) if isinstance(error, CheckpointError) else text.describe(error)
    return next(filter(None, gather_values(problem)), "")


def _from_first(value: T) -> list[T]:
    broadcast = [value]
    dist.broadcast_object_list(broadcast, src=0)
    return broadcast


def _say(line: str) -> None:
    """Tell `line` on rank 0; collective, as the first rank to go on may end all others."""
    if dist.get_rank() == 0:
        output.tell(f"[ttp] {line}", to="stdout")
    gather_values(None)
