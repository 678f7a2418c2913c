"""Hooks on the framework and on the adaptor, at which faults strike."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

from tests.faults import flips
from tests.faults.fault import Injector

# Bytes after which a file counts as half written: archives of the tiny models have some megabytes.
_HALF_WRITTEN = 100_000


class _HalfFile:
    """A file during whose writing a fault strikes."""

    def __init__(self, path: Any, injector: Injector) -> None:
        self._file = Path(path).open("wb")  # noqa: SIM115  (closed below)
        self._injector = injector
        self._written = 0

    def write(self, data: Any) -> int:
        count = self._file.write(data)
        self._written += count
        if self._written > _HALF_WRITTEN:
            self._file.flush()
            self._injector.reach("save-write")
        return count

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


Wrapper = Callable[[Any, Any, Any, Any], Any]
# What saves of these steps write with `flips.LYING`, in place of the state in memory.
LIES = {2: "stale", 3: "nan", 4: "swapped", 5: "cut off", 6: "another step"}


def _wrap(module: str, name: str, wrapper: Wrapper, before_0_8: str = "") -> None:
    """Wrap a function once `module` is imported; earlier patches are inside the wrapper.

    Args:
        module: the module that defines the function.
        name: the function.
        wrapper: a wrapper for wrapt.
        before_0_8: the function's name in versions without `name`.
    """

    def wrap(imported: ModuleType) -> None:
        older = before_0_8 and not hasattr(imported, name)
        wrapt.wrap_function_wrapper(imported, before_0_8 if older else name, wrapper)

    wrapt.register_post_import_hook(wrap, module)


def install(injector: Injector) -> None:
    """Install the hooks that the job's faults need, before the framework is imported."""

    def before(phase: str, module: str, name: str, before_0_8: str = "") -> None:
        def strikes_before(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            injector.reach(phase)
            return wrapped(*args, **kwargs)

        # Only hooks that are needed: another version of the framework may lack the name.
        if injector.expects(phase):
            _wrap(module, name, strikes_before, before_0_8)

    def after(phase: str, module: str, name: str) -> None:
        def strikes_after(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            result = wrapped(*args, **kwargs)
            injector.reach(phase)
            return result

        if injector.expects(phase):
            _wrap(module, name, strikes_after)

    _follow_the_steps(injector)
    before("evaluation", "megatron.training.training", "evaluate")
    before("evaluation", "ascendspeed.training", "evaluate")
    after("between", "ascendspeed.training", "train_step")
    before("logger", "megatron.training.one_logger_utils", "finish")
    if injector.expects("evaluation-forward"):
        _wrap("megatron.training.training", "evaluate", _evaluation(injector))
    if injector.expects("logging"):
        _wrap("record", "Recorder.add", _logging(injector))
    for training in ("megatron.training.training", "ascendspeed.training"):
        before("start", training, "setup_model_and_optimizer")
    before("data", "megatron.training.utils", "get_batch_on_this_tp_rank")
    before("rollout", "swift.megatron.trainers.rollout_mixin", "MegatronRolloutMixin._generate")
    before("read", "torch.utils.data._utils.fetch", "_MapDatasetFetcher.fetch")
    _wrap("megatron.core.transformer.transformer_block", "TransformerBlock.forward", _layers(injector))
    buffers = "megatron.core.distributed.param_and_grad_buffer"
    before("reduction", buffers, "_ParamAndGradBucketGroup.start_grad_sync")
    before("gather", buffers, "_ParamAndGradBucketGroup.start_param_sync")
    ascendspeed = "ascendspeed.optimizer.distrib_optimizer", "DistributedOptimizer"
    before("reduction", ascendspeed[0], f"{ascendspeed[1]}.reduce_model_grads")
    before("gather", ascendspeed[0], f"{ascendspeed[1]}.gather_model_params")
    _wrap("ascendspeed.model.transformer", "ParallelTransformer.forward", _layers(injector))
    after("overflow", "megatron.core.optimizer.optimizer", "ChainedOptimizer.prepare_grads")
    before("line", "megatron.core.timers", "Timers.log")
    before("norm", "megatron.core.optimizer.clip_grads", "get_grad_norm_fp32", "clip_grad_norm_fp32")
    after("exchanged", "adaptor.checkpoint.trainee", "MegatronTrainee.exchange")
    before("updated", "adaptor.worker.session", "Session._close_window")
    if injector.flips:
        for check in ("twin_check", "replay_check"):
            wrapt.register_post_import_hook(_shorten_the_self_test, f"adaptor.verification.{check}")
    after("door-before", "adaptor.protocol.board", "Board.ready")
    _wrap("adaptor.worker.door", "Door.enter", _door(injector))
    before("freeze", "adaptor.worker.freezer", "Freezer.freeze")
    before("dump", "adaptor.checkpoint.trainee", "MegatronTrainee.dump")
    _wrap("adaptor.worker.freezer", "Freezer.bring_to", _let_through(injector))
    for act in ("send_shards", "gather"):
        before("dump-gather", "adaptor.checkpoint.shards", act)
    before("dump-gather", "adaptor.checkpoint.in_place_holder", "take_part")
    before("dump-gather", "adaptor.checkpoint.in_place", "InPlace.write")
    after("dump-write", "adaptor.checkpoint.hashing", "HashingFile.write")
    after("dump-write", "adaptor.checkpoint.file_parts", "write_all")
    after("dump-written", "adaptor.checkpoint.state_writer", "write_files")
    buffers_of_model = "megatron.core.distributed.distributed_data_parallel"
    before("build", buffers_of_model, "DistributedDataParallel.__init__")
    before("regroup", "adaptor.online.rejoin", "Rejoin.regroup")
    before("give", "adaptor.online.transfer", "TransferChannel.send_tensors")
    before("get", "adaptor.online.transfer", "TransferChannel.receive_tensors")
    before("exchange", "adaptor.online.groups", "Groups.exchange")
    after("joined", "adaptor.worker.session", "Session.begin_again")
    before("proceed", "adaptor.online.rejoin", "Rejoin.proceed")
    if injector.expects("update"):
        _watch_updates(injector)
    if injector.expects("copy"):
        _watch_copies(injector)
    before(
        "save-background",
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        "FileSystemWriterAsync.write_preloaded_data_multiproc",
    )
    _watch_saves(injector)
    if flips.INJECTIONS in os.environ:
        count, seed, file = os.environ[flips.INJECTIONS].split(":")
        changes = flips.at_doors(int(count), seed, Path(file))
        _wrap("adaptor.verification.twin_check", "TwinCheck.is_equal", changes)
        passes = flips.in_passes(int(count), seed, Path(file))
        _wrap("adaptor.verification.replay_check", "ReplayCheck.compare", passes)
        _wrap("adaptor.frameworks.megatron_replay", "_sum_of", _changes_before_the_sum)
    if flips.LYING in os.environ:
        liar, writer = _Liar(injector), "megatron.core.dist_checkpointing.strategies.filesystem_async"
        _wrap(writer, "FileSystemWriterAsync.prepare_write_data", liar.plan)
        _wrap(writer, "FileSystemWriterAsync.write_preloaded_data", liar.write)
        _wrap("torch", "save", liar.save)


class _Liar:
    """Lets a save of a step in `LIES` write something else; the others are as they should be."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector
        self._first: dict[Any, Any] = {}

    def _changed(self, tensors: dict[Any, Any]) -> dict[Any, Any]:
        """Return the tensors to write in place of the given tensors, by name."""
        lie = LIES.get(self._injector.step)
        for name, tensor in tensors.items():
            self._first.setdefault(name, tensor.detach().clone())
        name = max(tensors, key=lambda name: tensors[name].numel())
        largest = tensors[name].detach().clone()
        if lie == "stale":
            return {key: self._first[key] for key in tensors}
        if lie == "nan":
            largest.view(-1)[0] = float("nan")
        elif lie == "swapped":
            half = largest.numel() // 2
            largest = largest.view(-1).roll(half).view_as(largest)
        return {**tensors, name: largest}

    def plan(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Give a `torch_dist` writer other tensors than those of its plan."""
        planned = wrapped(*args, **kwargs)
        buckets = []
        for path, key, (data, tensors) in instance.write_buckets:
            items = {item.index: item for item, _ in tensors}
            changed = self._changed({item.index: tensor for item, tensor in tensors}) if tensors else {}
            buckets.append((path, key, (data, [(items[index], value) for index, value in changed.items()])))
        instance.write_buckets = buckets
        return planned

    def write(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Truncate a `torch_dist` file in the process that has written it."""
        result = wrapped(*args, **kwargs)
        self._cut(str(kwargs["write_bucket"][0]))
        return result

    def save(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        content, target, *further = args
        is_archive = isinstance(target, str) and isinstance(content, dict)
        if is_archive and "iteration" in content and LIES.get(self._injector.step) == "another step":
            content = {**content, "iteration": content["iteration"] - 1}
        if is_archive and "buckets_coalesced" in content:
            ((dtypes, tensors),) = content[0].items()
            of_rank = {key: value for key, value in tensors.items() if hasattr(value, "numel")}
            content = {**content, 0: {dtypes: {**tensors, **self._changed(of_rank)}}}
        result = wrapped(content, target, *further, **kwargs)
        if is_archive and "buckets_coalesced" in content:
            self._cut(target)
        return result

    def _cut(self, path: str) -> None:
        if LIES.get(self._injector.step) == "cut off":
            os.truncate(path, Path(path).stat().st_size // 2)


def _changes_before_the_sum(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    while flips.in_backward:
        flips.in_backward.pop()()
    return wrapped(*args, **kwargs)


def _shorten_the_self_test(check: ModuleType) -> None:
    """Shorten the self-test of a check: jobs of the tests have fewer steps than it takes."""
    check.SELF_TEST = 2  # type: ignore[attr-defined]


def _follow_the_steps(injector: Injector) -> None:
    def step_is_known(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        injector.step = get_args().curr_iteration + 1
        result = wrapped(*args, **kwargs)
        injector.reach("between")
        return result

    def step_is_told(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        injector.step = args[0] if args else kwargs["step"]
        return wrapped(*args, **kwargs)

    _wrap("megatron.training.training", "train_step", step_is_known)
    # A script that uses Megatron-core as a library has a loop of its own.
    _wrap("adaptor.worker.session", "Session.begin_step", step_is_told)


def _logging(injector: Injector) -> Wrapper:
    def strikes_before_figures_are_kept(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        injector.step = args[0]  # for scripts that report no steps to the adaptor
        injector.reach("logging")
        return wrapped(*args, **kwargs)

    return strikes_before_figures_are_kept


def _evaluation(injector: Injector) -> Wrapper:
    def strikes_inside(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        injector.evaluating = True
        try:
            return wrapped(*args, **kwargs)
        finally:
            injector.evaluating = False

    return strikes_inside


def _layers(injector: Injector) -> Wrapper:
    def strikes_at_the_layers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        injector.reach("evaluation-forward" if injector.evaluating else "forward")
        result = wrapped(*args, **kwargs)
        hidden, *_ = result if isinstance(result, tuple) else (result,)
        flips.activations[:] = [hidden]
        if not injector.evaluating:
            injector.reach("activation")
        while flips.in_forward:
            flips.in_forward.pop()()
        flips.activations.clear()
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: injector.reach("backward"))
        return result

    return strikes_at_the_layers


def _door(injector: Injector) -> Wrapper:
    def strikes_past_the_barrier(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if args[0] == injector.step:  # a regular save opens another window
            injector.reach("door-after")
        return wrapped(*args, **kwargs)

    return strikes_past_the_barrier


def _let_through(injector: Injector) -> Wrapper:
    def strikes_at_a_late_update(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if instance.board.finished < args[0]:
            injector.reach("let-through")
        return wrapped(*args, **kwargs)

    return strikes_at_a_late_update


def _watch_updates(injector: Injector) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    inside: tuple[str, ...] = ()

    def enters(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal inside
        # SGD adds to its momentum first, Adam updates its parameter last; MindSpeed's Adam is a single
        # operation.
        inside = (
            ("Tensor.add_",)
            if isinstance(optimizer, torch.optim.SGD)
            else ("Tensor.addcdiv_", "_fused_adamw_")
        )

    def leaves(*_: Any) -> None:
        nonlocal inside
        inside = ()

    def strikes_after(operation: str) -> Wrapper:
        def strikes_after_one_parameter(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            result = wrapped(*args, **kwargs)
            if operation in inside:
                injector.reach("update")
            return result

        return strikes_after_one_parameter

    register_optimizer_step_pre_hook(enters)
    register_optimizer_step_post_hook(leaves)
    for operation in ("Tensor.add_", "Tensor.addcdiv_", "_fused_adamw_"):
        wrapt.wrap_function_wrapper(torch, operation, strikes_after(operation))


def _watch_copies(injector: Injector) -> None:
    import torch

    inside = False

    def is_inside(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            return wrapped(*args, **kwargs)
        finally:
            inside = False

    def strikes_half_way(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if not inside:
            return wrapped(*args, **kwargs)
        targets, sources = args
        half = len(targets) // 2
        if half:  # a small shard may consist of one part of a parameter
            wrapped(targets[:half], sources[:half])
        injector.reach("copy")
        return wrapped(targets[half:], sources[half:])

    _wrap("adaptor.checkpoint.local_copy", "LocalCopy.take", is_inside)
    wrapt.wrap_function_wrapper(torch, "_foreach_copy_", strikes_half_way)


def _watch_saves(injector: Injector) -> None:
    def save_is_known(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        injector.saving = True
        try:
            return wrapped(*args, **kwargs)
        finally:
            injector.saving = False

    def strikes_in_a_save(phase: str, wrapped: Any, args: Any, kwargs: Any) -> Any:
        if injector.saving:
            injector.reach(phase)
        return wrapped(*args, **kwargs)

    def strikes_in_a_file(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if not injector.saving or len(args) < 2 or not isinstance(args[1], str):
            return wrapped(*args, **kwargs)
        file = _HalfFile(args[1], injector)
        try:
            return wrapped(args[0], file, *args[2:], **kwargs)
        finally:
            file.close()

    def strikes_around_the_tracker(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if not injector.saving:
            return wrapped(*args, **kwargs)
        injector.reach("save-tracker")
        name = wrapped(*args, **kwargs)
        injector.reach("save-named")
        return name

    for checkpointing in ("megatron.training.checkpointing", "ascendspeed.checkpointing"):
        _wrap(checkpointing, "save_checkpoint", save_is_known)
        _wrap(checkpointing, "get_checkpoint_name", lambda w, i, a, k: strikes_in_a_save("save", w, a, k))
        _wrap(checkpointing, "get_checkpoint_tracker_filename", strikes_around_the_tracker)

    def strikes_on_another_disk(phase: str) -> Wrapper:
        def strikes(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            injector.reach(phase)
            return wrapped(*args, **kwargs)

        return strikes

    for phase, module, name in (
        ("save-apart", "adaptor.checkpoint.regular_folder", "take_on_own_disk"),
        ("save-apart-named", "adaptor.checkpoint.tracker", "advance"),
    ):
        if injector.expects(phase):
            _wrap(module, name, strikes_on_another_disk(phase))
    _wrap("torch.distributed", "barrier", lambda w, i, a, k: strikes_in_a_save("save-barrier", w, a, k))
    if injector.expects("save-write"):
        _wrap("torch", "save", strikes_in_a_file)
