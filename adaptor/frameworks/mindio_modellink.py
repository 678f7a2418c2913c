"""The optimizers of `mindio_ttp.modellink`, for a ModelLink (af1347) edited after the guide.

By the guide the framework uses these optimizers in the place of its own, and calls its own `save_checkpoint`
in a dump. `ascendspeed_shards` defines the shards, as for a patched ModelLink.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ascendspeed import get_args
from ascendspeed.core import parallel_state
from ascendspeed.optimizer.distrib_optimizer import DistributedOptimizer

from adaptor.checkpoint.local_copy import LocalCopy
from adaptor.checkpoint.shards import Exchange, acknowledge, gather, send_shards
from adaptor.checkpoint.trainee import apart, mirror_of
from adaptor.errors import UnsupportedError
from adaptor.frameworks import ascendspeed, supported_options
from adaptor.frameworks import ascendspeed_shards as shards
from adaptor.frameworks import mindio_modellink_groups as groups
from adaptor.mindio import job
from adaptor.mindio.job import ReplicaOptimizer
from adaptor.replica import optimizer_state
from adaptor.replica.mirror import Mirror


class _Replicated(ReplicaOptimizer, DistributedOptimizer):  # type: ignore[misc]
    """The framework's distributed optimizer, with a local copy and a dump from any holder of each shard.

    Names begin with `_ttp_`, so no name collides with the framework's.
    """

    def __init__(self, *args: Any) -> None:
        """Take the arguments of the framework's class; the last one (a local copy) is the engine's."""
        supported_options.require_values(ascendspeed.ALLOWED_VALUES, get_args())  # nobody else has seen them
        *own_args, _ = args
        super().__init__(*own_args)
        optimizer_state.require_protected(self.optimizer)
        shards.describe(self)
        self._ttp_copied: LocalCopy | None = None
        self._ttp_mirror: Mirror | None = None

    def need_write_file(self) -> bool:
        """Return whether this rank is the writer of its data-parallel group."""
        if self.error_dump:
            return bool(self.save_args["rank"] == dist.get_rank())
        return bool(parallel_state.get_data_parallel_rank() == 0)

    def copy_state(self) -> None:
        if self._ttp_copied is None:
            self._ttp_copied = LocalCopy(self, [self._ttp_mirror])
        self._ttp_copied.take()

    def save_parameter_state(self, filename: str) -> None:
        if self.error_dump:
            with torch.no_grad():
                self._ttp_dump(filename)
        else:
            super().save_parameter_state(filename)

    def _ttp_dump(self, filename: str) -> None:
        """Gather each shard from a rank of `rank_list`, and write the shards as the framework does.

        The writer's model gets its weights from the shards: the model's own weights may belong to an earlier
        step.
        """
        optimizer, mirror = self, self._ttp_mirror
        if self.current_step > self.save_args["step"]:
            assert self._ttp_copied is not None
            optimizer, (mirror,) = self._ttp_copied.optimizer, self._ttp_copied.mirrors
        ranks = sorted(self.save_args["rank_list"])
        group = None
        if len(ranks) > 1:
            group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        exchange = Exchange(
            group=group,
            rank=ranks.index(dist.get_rank()),
            sources=[[ranks.index(giver) for giver in self.givers()]],
            mirrors=(mirror,),
        )
        if not self.need_write_file():
            send_shards([optimizer], ranks.index(self.save_args["rank"]), exchange)
            return
        world = gather(optimizer, 0, exchange)
        acknowledge([optimizer], 0, exchange)
        state = ascendspeed.by_chunk(optimizer, world)
        for number, model in enumerate(self.models):
            for dtype, places in model._grad_buffer_param_index_map.items():
                for param, (start, end) in places.items():
                    param.view(-1).copy_(state[number][dtype]["param"][start:end])
        torch.save(state, filename)


class TTPReplicaOptimizer(_Replicated):
    """The optimizer for even data-parallel sizes: each half of the group has the whole optimizer state."""

    def __init__(self, *args: Any) -> None:
        groups.half()
        super().__init__(*args)

    @classmethod
    def build_model_gbuf_range(cls, model: Any, dtype: Any) -> dict[str, Any]:
        return shards.ranges(cls, model, dtype)

    def reduce_model_grads(self, args: Any, timers: Any) -> None:
        shards.halve(self)
        with shards.half_as_data_parallel_group():
            super().reduce_model_grads(args, timers)
            shards.add_twins(self)

    def gather_model_params(self, args: Any, timers: Any) -> None:
        """Gather the parameters as the framework does, in this half."""
        with shards.half_as_data_parallel_group():
            super().gather_model_params(args, timers)

    def count_zeros(self) -> Any:
        return super().count_zeros() / shards.HALVES

    def load_parameter_state(self, filename: str, iteration: int) -> None:
        with shards.half_as_data_parallel_group():
            super().load_parameter_state(filename, iteration)

    def save_parameter_state(self, filename: str) -> None:
        if self.error_dump:  # in which nobody may swap what the main thread uses
            super().save_parameter_state(filename)
        elif groups.half().first:
            with shards.half_as_data_parallel_group():
                super().save_parameter_state(filename)


class TTPOddReplicaOptimizer(_Replicated):
    """The optimizer for any data-parallel size from 2: each rank also updates a copy of another shard."""

    def __init__(self, *args: Any) -> None:
        if shards.half() is not None:
            raise UnsupportedError(
                "TTPOddReplicaOptimizer: build_optimizer_replica_group has cut the data-parallel group: "
                "leave that call out, or take TTPReplicaOptimizer"
            )
        if parallel_state.get_data_parallel_world_size() == 1:
            raise UnsupportedError(
                "TTPOddReplicaOptimizer: the data-parallel size is 1: there is no second rank for a copy; "
                "use 2 or more, or set ENABLE_TTP=False"
            )
        super().__init__(*args)
        job.get().apart = apart(self)

    def exchange(self) -> None:
        if self._ttp_mirror is None:  # now that the state is loaded
            self._ttp_mirror = mirror_of(self)
        self._ttp_mirror.exchange()

    def update_copies(self) -> None:
        assert self._ttp_mirror is not None
        self._ttp_mirror.update()
