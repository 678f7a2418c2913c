"""Compares a regular save with the state in memory, before the save gets its name; and the loaded state.

At the begin of a save all ranks take the sums of the state in memory, and agree (`agreed_state`). Then each
file is compared when the framework hands the file over to be written:

- An archive of the format `torch`: the content with the agreed sums (`require_archive`).
- The tensors of `torch_dist`: the written tensors with the planned tensors (`plan`, `handed_over`,
  `require_written`); and planned tensors must be the live state if they were at an earlier save. So a writer
  or a plan that keeps tensors of an earlier save is refused.

After a load the state of all ranks is compared with the agreed state of the checkpoint (`compare`). The
comparison notices a loader that leaves state out, or loads the state of another rank or step, also with
intact files. State is not compared if the user has chosen not to load the state. Other random states alone
are only reported: a script may draw numbers in a save.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import xxhash

from adaptor.checkpoint import format_torch, manifest, regular_folder, shards, step_record, tracker
from adaptor.checkpoint.training_state import TrainingState
from adaptor.context import Context
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.messages import Share
from adaptor.replica import group, optimizer_state, twin
from adaptor.replica.group import gather_values
from adaptor.verification import state_sums
from adaptor.verification.agreed_state import (
    MASK,
    PARAM,
    WEIGHT,
    AgreedState,
    agree,
    differences,
    in_words,
    other_layouts,
    ranks_with_other_random_states,
)
from adaptor.verification.placed_sums import name_factor, placed_sum


@dataclass(frozen=True)
class _PlannedBits:
    """A sum of a planned tensor: placed for a tensor on a device, because a device computes no other sum."""

    is_placed: bool
    text: str


@dataclass
class SaveCheck:
    """The check of one regular save.

    Attributes:
        step: of the save
        state: of the rank
        agreed: the sums on which all holders agree
        not_compared: the written parts that this rank could not compare
        planned: the tensors of `torch_dist` that this rank has planned to write, by file
    """

    step: int
    state: TrainingState
    agreed: AgreedState
    not_compared: set[str] = field(default_factory=set)
    planned: dict[str, dict[str, _PlannedBits]] = field(default_factory=dict)

    @property
    def manifest_state(self) -> AgreedState:
        """The agreed state for the manifest, with the parts that were not compared."""
        return AgreedState(self.step, self.agreed.groups, tuple(sorted(self.not_compared)))

    def require_archive(self, content: Any) -> None:
        """Compare an archive of the format `torch` before its write; ignore other values.

        Raises:
            CheckpointError: the archive has another step, or other bits than the state in memory.
        """
        with torch.no_grad():
            if isinstance(content, dict) and "iteration" in content:
                if content["iteration"] != self.step:
                    raise CheckpointError(
                        f"the archive of step {content['iteration']} was to be written for step {self.step}"
                    )
                self._require_weights(content)
                self._require_whole(content.get("optimizer"))
            elif parts := _parameter_states(content):
                self._require_shards(parts)

    def _require(self, key: str, total: int | None, position: int | None = None) -> None:
        expected = self.agreed.groups[self.state.folder].total(key, *self._extent(position))
        if None not in (total, expected) and total != expected:
            raise CheckpointError(
                f"step {self.step}: {key} of {self.state.folder} was to be written with other bits than"
                " those in the memory of the ranks that hold it (stale, damaged or misplaced)"
            )

    def _extent(self, position: int | None) -> tuple[int, int | None]:
        counts = [shards.shard_of(optimizer)[1] for optimizer, _, _ in self.state.chained]
        return (0, None) if position is None else (sum(counts[:position]), counts[position])

    def _require_weights(self, content: Mapping[str, Any]) -> None:
        saved = {
            f"{key}.{name}": tensor
            for key in self.state.chunks
            for name, tensor, _ in format_torch.places_in(content.get(key) or {})
        }
        if not saved:  # the common state of `torch_dist`
            return
        trained = state_sums.trained_params(self.state)
        if not saved.keys() >= trained.keys():
            self.not_compared.add("weights under other names than in the model")
        else:
            total = sum(name_factor(name) * placed_sum(saved[name]) for name in trained)
            self._require(WEIGHT, total & MASK)

    def _require_whole(self, content: Any) -> None:
        """Compare the saved state of optimizers without shards."""
        chained = self.state.chained
        parts = content if isinstance(content, list) else [content]
        if len(parts) != len(chained):
            return
        names = state_sums.names_of(self.state)
        for position, ((optimizer, live, _), part) in enumerate(zip(chained, parts, strict=True)):
            if shards.is_sharded(optimizer) or shards.is_stub(optimizer) or not isinstance(part, dict):
                continue
            order = [names[id(param)] for _, param, _ in state_sums.whole_params(optimizer, live)]
            saved_mains = part.get("fp32_from_fp16_params", [])
            if len(saved_mains) == len(weight_groups := getattr(live, "float16_groups", [])) > 0:
                mains = sum(
                    name_factor(names[id(weight)]) * placed_sum(main)
                    for weights, group in zip(weight_groups, saved_mains, strict=True)
                    for weight, main in zip(weights, group, strict=True)
                )
                self._require(PARAM, mains & MASK, position)
            saved = part.get("optimizer", part).get("state", {})
            for key in self.agreed.groups[self.state.folder].keys - {WEIGHT, PARAM}:
                if saved.keys() == set(range(len(order))) and all(key in saved[n] for n in saved):
                    total = sum(
                        name_factor(name) * placed_sum(saved[number][key].float())
                        for number, name in enumerate(order)
                    )
                    self._require(key, total & MASK, position)

    def _require_shards(self, parts: list[Any]) -> None:
        names = state_sums.names_of(self.state)
        for position, ((optimizer, _, _), part) in enumerate(zip(self.state.chained, parts, strict=False)):
            if part is None or not shards.is_sharded(optimizer):
                continue
            if not _is_coalesced(part):
                self.not_compared.add("optimizer state in the form of this framework")
                continue
            for key, total in state_sums.sums_of_world(optimizer, part, names).items():
                self._require(key, total, position)

    def require_written(self, folder: Path) -> None:
        """Compare the tensors that this rank's writers have written below `folder` with the plan.

        Raises:
            CheckpointError: a tensor has other bits than the planned tensor had.
        """
        for path in [path for path in self.planned if Path(path).parent == folder]:
            sums, written = self.planned.pop(path), regular_folder.tensors_of(Path(path))
            wrong = [name for name, bits in sums.items() if written.get(name) != bits.text]
            if not written:
                self.not_compared.add("files of writers that the adaptor does not see")
            elif wrong:
                raise CheckpointError(
                    f"{path}: {wrong[0]} was written with other bits than the state in memory had"
                    f" ({len(wrong)} of {len(sums)} tensors)"
                )

    def live_storages(self) -> set[int]:
        """Return the addresses of the memory of this rank's training state."""
        tensors = [
            tensor
            for chunk in self.state.model
            for tensor in (*chunk.parameters(), *chunk.buffers())
        ]  # fmt: skip
        for torchs in step_record.inner(self.state.optimizer):
            tensors += [*twin.params(torchs), *optimizer_state.tensors_of(torchs)]
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _parameter_states(content: Any) -> list[Any]:
    """Return the parameter states of distributed optimizers, by their place in the chain; empty for other
    values.
    """
    parts = content if isinstance(content, list) else [content]
    is_state = any(isinstance(part, dict) and "buckets_coalesced" in part for part in parts)
    return parts if is_state else []


def _is_coalesced(part: Mapping[Any, Any]) -> bool:
    return all(
        isinstance(tensors.get(key), torch.Tensor)
        for number, by_dtype in part.items()
        if isinstance(number, int)
        for tensors in by_dtype.values()
        for key in shards.KEYS
    )


def begin(
    step: int, trainee: Any, everyone: torch.distributed.ProcessGroup, *, has_random: bool
) -> SaveCheck | None:
    """Agree with all ranks on the state to save; None if no sums can be taken. Collective.

    Args:
        step: of the save.
        trainee: of the rank (`MegatronTrainee`).
        everyone: all ranks.
        has_random: whether random states are saved.

    Raises:
        CheckpointError: holders of a shard differ; on all ranks.
    """
    own_state = state_sums.held_by(trainee.state, trainee.mirrors, trainee.shares)
    if has_random:
        own_random = state_sums.random_key(trainee.random.own(), trainee.random.place)
        own_state = replace(own_state, random=own_random)
    gathered = group.gather_all(own_state, everyone)
    if any(state.problem for state in gathered):
        return None
    return SaveCheck(step, trainee.state, agree(step, gathered))


def _bits(tensor: torch.Tensor, *, is_placed: bool) -> str:
    if is_placed:
        return f"{placed_sum(tensor):016x}"
    numbers: Any = tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy()
    return str(xxhash.xxh3_64_hexdigest(memoryview(numbers)))


class PlannedWrites:
    """The plans of the pending saves of this process; a part of the context.

    Writers are forked after `plan`, and know the plan. Files of a persistent writer, forked before, are not
    compared. A plan belongs to the check of its save, and ends with the check: the next save may be planned
    before an asynchronous save has ended, and a save that is abandoned or fails leaves no plan behind.
    """

    def __init__(self, context: Context) -> None:
        self._checks: WeakValueDictionary[str, SaveCheck] = WeakValueDictionary()  # by file
        self._were_live: set[str] = set()

    def plan(self, check: SaveCheck, buckets: Iterable[Any], planner: Any) -> None:
        """Note the tensors of the framework's plan.

        Args:
            check: of the save.
            buckets: the framework's write buckets: path, key, and items with bytes and with tensors.
            planner: of the framework; `resolve_data` returns the planned tensor of an item.

        Raises:
            CheckpointError: a tensor was the live state in an earlier save, and is another tensor now.
        """
        live = check.live_storages()
        sums: dict[str, dict[str, _PlannedBits]] = {}
        stale_names, copies = [], 0
        for path, _, (_, tensors) in buckets:
            for item, _ in tensors:
                planned, name = planner.resolve_data(item), name_of(item)
                is_placed = planned.device.type != "cpu"
                bits = _PlannedBits(is_placed, _bits(planned, is_placed=is_placed))
                sums.setdefault(str(path), {})[name] = bits
                if planned.untyped_storage().data_ptr() in live:
                    self._were_live.add(name)
                    continue
                copies += 1
                if name in self._were_live:
                    stale_names.append(name)
        if stale_names:
            raise CheckpointError(
                f"step {check.step}: {stale_names[0]} was to be written from a copy, not from the state in"
                f" memory as in the save before ({len(stale_names)} tensors)"
            )
        if copies:
            check.not_compared.add(f"{copies} tensors that the framework copies before it plans to write")
        check.planned.update(sums)
        self._checks.update(dict.fromkeys(sums, check))

    def handed_over(self, path: str | os.PathLike[str], tensors: Iterable[Any]) -> dict[str, str]:
        """Return the sums of the tensors that a writer writes to `path`, by name, for the note of the file.

        Args:
            path: of the file.
            tensors: items, each with its tensor.
        """
        check = self._checks.get(str(path))
        planned = {} if check is None else check.planned.get(str(path), {})
        named = ((name_of(item), tensor) for item, tensor in tensors)
        return {
            name: _bits(tensor, is_placed=planned[name].is_placed)
            for name, tensor in named
            if name in planned
        }


def name_of(item: Any) -> str:
    """Return a name for an item of a write plan of torch."""
    offset = item.index.offset
    return item.index.fqn if offset is None else f"{item.index.fqn} at {list(offset)}"


@dataclass(frozen=True)
class LoadResult:
    """The result of a comparison, equal on all ranks.

    Attributes:
        problem: the differences, in a line; "": none
        not_compared: the groups that could not be compared, with the reason
        other_random_states: the ranks with other random states than those at the begin of the save
    """

    problem: str = ""
    not_compared: tuple[str, ...] = ()
    other_random_states: tuple[int, ...] = ()


def chosen_checkpoint(root: Path, step: int | None, loaded: int) -> tuple[int, AgreedState | None]:
    """Return the step of the checkpoint that was to be loaded from `root`, and its agreed state, as rank 0
    reads tracker and manifest; None: no agreed state. Collective.

    Args:
        root: the folder of checkpoints.
        step: the step chosen by the user; None: the step of the tracker.
        loaded: the loaded step, for a folder without a tracker.
    """
    chosen: list[Any] = [None]
    if dist.get_rank() == 0:
        number, agreed = step or tracker.tracked_step(root) or loaded, None
        with contextlib.suppress(CheckpointError):  # the check before the load has reported the problem
            agreed = manifest.read(root / naming.final_name(number)).state
        chosen = [(number, agreed)]
    dist.broadcast_object_list(chosen, src=0)
    number, agreed = chosen[0]
    return number, agreed


def compare(
    folder: Path,
    agreed: AgreedState,
    state: TrainingState,
    shares: Sequence[Share],
    *,
    has_optimizer: bool,
    random: str = "",
    peers: Sequence[int] = (),
) -> LoadResult:
    """Compare the memory of all ranks with the agreed state of a checkpoint. Collective.

    Args:
        folder: of the checkpoint.
        agreed: the agreed state of the checkpoint.
        state: of the rank, loaded.
        shares: of the rank.
        has_optimizer: whether the state of the optimizer was to be loaded, too.
        random, peers: of the rank, as in `HeldState`.
    """
    held_state = state_sums.held_by(state, (), shares, whole_weights=True)
    gathered = gather_values(replace(held_state, random=random, peers=tuple(peers)))
    omitted = other_layouts(agreed, gathered)
    different = [] if omitted else differences(agreed, gathered, has_optimizer=has_optimizer)
    problem = (
        f"{folder}: the ranks have loaded another state than that on which the holders of step {agreed.step}"
        f" agreed: {in_words(different)}"
        if different
        else ""
    )
    differing_ranks = [] if omitted else ranks_with_other_random_states(agreed, gathered)
    return LoadResult(problem, tuple(omitted), tuple(differing_ranks))
