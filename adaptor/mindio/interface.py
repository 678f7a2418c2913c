"""The interface of MindIO TTP: newer form (`tft_*`, MindSpeed-LLM) and older form (`ttp_*`, ModelLink)."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from adaptor.errors import ConfigError
from adaptor.mindio import job, replicas
from adaptor.mindio.trainee import Handler


class OptimizerType(Enum):
    ATTENTION = 0
    MOE = 1


class Action(Enum):
    """The results of the original's `tft_wait_next_action`."""

    RETRY = 0
    EXIT = 1


class ReportState(Enum):
    RS_NORMAL = 0
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_INIT_FINISH = 5
    RS_PREREPAIR_FINISH = 6
    RS_STEP_FINISH = 7
    RS_UNKNOWN = 8


class RepairType(Enum):
    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1
    RT_UCE_LOWLEVEL = 2
    RT_RECV_REPAIR = 3
    RT_ROLLBACK = 4
    RT_LOAD_CKPT = 5
    RT_LOAD_REBUILD = 6


# Frameworks whose handlers take the arguments of the training function, not arguments that are set.
_EXPORTED = ("MindSpeed", "MindSpeed-LLM")


_DAMAGED = (ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED)
_REPAIRING = (ReportState.RS_INIT_FINISH, ReportState.RS_PREREPAIR_FINISH, ReportState.RS_STEP_FINISH)


# controller and processor


def tft_init_controller(
    rank: int, world_size: int, enable_local_copy: bool, enable_arf: bool = False, enable_zit: bool = False
) -> None:
    """Check the arguments; the controller is in ttprun's agent.

    The arguments are those of MindIO TTP: `world_size`, `enable_local_copy`; `enable_arf` and `enable_zit`
    are refused.
    """
    _require_no_repair("tft_init_controller", enable_arf, enable_zit)
    job.get().join("tft_init_controller", rank, world_size, enable_local_copy)


def tft_start_controller(bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = "") -> None:
    """Do nothing: the controller runs already. TTP_PORT and TTP_TLS set its port and encryption.

    So `bind_ip`, `port`, `enable_tls` and `tls_info` are not used.
    """


def tft_init_processor(
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_tls: bool = True,
    tls_info: str = "",
    enable_uce: bool = True,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    """Set rank and world size. Damaged memory (UCE) ends the process, and others save its part.

    Of MindIO TTP's arguments `world_size` and `enable_local_copy` are checked, `enable_arf` and `enable_zit`
    refused, `enable_tls`, `tls_info` and `enable_uce` not used.
    """
    _require_no_repair("tft_init_processor", enable_arf, enable_zit)
    job.get().join("tft_init_processor", rank, world_size, enable_local_copy)


def tft_start_processor(master_ip: str, port: int, local_ip: str = "") -> None:
    """Do nothing: the process has been connected to its agent from the start.

    So `master_ip`, `port` and `local_ip` are not used.
    """


def tft_destroy_controller() -> None:
    """Do nothing: the controller ends with ttprun."""


def tft_destroy_processor() -> None:
    """Do nothing: the processor ends with the process, and saves until then."""


def tft_set_optimizer_replica(rank: int, replica_info: list[dict[str, Any]]) -> None:
    """Set the ranks that hold copies of this rank's optimizer states.

    Raises:
        ConfigError: `rank` is another process's, or `replica_info` has not the form of MindIO TTP.
    """
    call = "tft_set_optimizer_replica"
    if rank != job.get().rank(call):
        raise ConfigError(f"{call}: rank is {rank!r}, but this process is rank {job.get().rank(call)}")
    job.get().replicas = replicas.of_newer(rank, replica_info)


def tft_set_dp_group_info(rank: int, dp_rank_list: list[int]) -> None:
    """Do nothing: the original, too, uses the ranks for elastic training (ZIT) alone."""


# a step


def tft_start_copy_os() -> None:
    """Begin a copy of the optimizer state."""
    job.get().start_copy()


def tft_start_updating_os(backup_step: int = -1) -> None:
    """Begin an update of the optimizer state; return when the update may begin.

    Args:
        backup_step: the step of the script's copy of the state, -1 without a copy
    """
    job.get().start_update(backup_step)


def tft_end_updating_os(step: int) -> None:
    """End the update: the optimizer state is the state of `step`. Does not return while the job saves.

    Raises:
        ConfigError: `step` is no step, or the step before has not ended.
    """
    if type(step) is not int or step < 1:
        raise ConfigError(f"tft_end_updating_os: step is {step!r}: it must be an integer from 1")
    job.get().end_update(step)


def tft_report_load_ckpt_step(step: int) -> None:
    """Report the step of the loaded state, so that the first update is protected, too."""
    job.get().loaded(step)


def tft_set_step_args(args: Any) -> None:
    """Set the arguments of the handlers."""
    if args is not None and not job.get().exported:
        job.get().handlers.args = args


def tft_pause_train(cur_step: int) -> None:
    """Report the end of step `cur_step`, with or without an update. Nothing pauses here."""
    job.get().reached(cur_step)


def tft_exception_handler(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return `func` with protection: an exception does not end the process before others have saved."""
    return job.get().guard(
        _callable("tft_exception_handler", func), sets_args=lambda: bool(job.get().exported)
    )


def tft_report_error(error_type: ReportState | int, error_code: str = "") -> None:
    """Report a fault of this rank. Returns only for RS_NORMAL, which is no fault."""
    state = ReportState(error_type)
    if state in _REPAIRING:
        raise _unsupported(f"tft_report_error({state.name})")
    state_text = f"{state.name} {error_code}".strip()
    if state in _DAMAGED:
        job.give_up(job.get().rank("tft_report_error"), state_text)
    if state is not ReportState.RS_NORMAL:
        job.get().fail(state_text)


def tft_wait_next_action() -> int:
    """Wait: the job saves, and this process ends."""
    job.get().wait()
    return Action.EXIT.value


def set_mindio_export_version(framework_type: str) -> None:
    """Declare handlers of MindSpeed, whose device is stopped and cleaned before a dump."""
    if framework_type not in _EXPORTED:
        raise ConfigError(
            f"set_mindio_export_version: {framework_type!r} is not known: use {' or '.join(_EXPORTED)}, "
            "or do not call it"
        )
    job.get().exported = framework_type


def get_mindio_export_version() -> str | None:
    return job.get().exported or None


# handlers


def tft_register_save_ckpt_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Register `func(step, [{"type": kind, "ranks": ranks}], args, ctx)`, which saves this rank's part.

    An exception of `func` is a failure.
    """
    job.get().handlers.save = Handler(_callable("tft_register_save_ckpt_handler", func), ctx)
    job.get().handlers.older = False


def tft_register_rename_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Register `func(step, args)`, which names the checkpoint, on one rank. An exception is a failure."""
    job.get().handlers.rename = Handler(_callable("tft_register_rename_handler", func), ctx)


def tft_register_exit_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Register `func(ctx)`, called before the process is ended after an incident."""
    job.get().handlers.exit = Handler(_callable("tft_register_exit_handler", func), ctx)


def tft_register_stop_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Register `func(args, ctx)`, which stops the device before a dump with TTP_STOP_CLEAN_BEFORE_DUMP=1."""
    job.get().handlers.stop = Handler(_callable("tft_register_stop_handler", func), ctx)


def tft_register_clean_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Register `func(is_uce_error, args, ctx)`, which restarts the device after the stop handler."""
    job.get().handlers.clean = Handler(_callable("tft_register_clean_handler", func), ctx)


def _never_called(name: str) -> Callable[..., None]:
    def register(func: Callable[..., Any] | str, *_: Any) -> None:
        job.get().never_called.append(name)

    register.__name__ = register.__qualname__ = name
    register.__doc__ = (
        "Note a handler of repair in place, which this engine never does; a line at the start says so."
    )
    return register


for _name in (
    *("tft_register_repair_handler", "tft_register_rollback_handler", "tft_register_rebuild_group_handler"),
    *("tft_register_stream_sync_handler", "tft_register_exception_handler", "tft_register_decrypt_handler"),
    *("tft_register_zit_upgrade_rollback_handler", "tft_register_zit_upgrade_repair_handler"),
    *("tft_register_zit_upgrade_rebuild_handler", "tft_register_zit_downgrade_rebuild_handler"),
):
    globals()[_name] = _never_called(_name)


# repair


def tft_is_reboot_node() -> bool:
    """Return False: jobs start again as a whole, so no process replaces another in a running job."""
    return False


def tft_can_do_uce_repair(hbm_error_time: int, start_time: Any = None, end_time: Any = None) -> bool:
    """Return False: damaged memory is never repaired in place here."""
    return False


def tft_get_repair_type() -> str:
    """Return the reason for which the clean handler is called."""
    return "dump"


def tft_set_update_start_time(start_time: Any = None) -> None:
    """Do nothing: `tft_can_do_uce_repair` needs no times here."""


def tft_set_update_end_time(end_time: Any = None) -> None:
    """Do nothing: `tft_can_do_uce_repair` needs no times here."""


def get_device() -> int | None:
    """Return the index of the device of this process; None without a device."""
    return job.current_device()


def _refuses(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise _unsupported(name)

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = "Raise ConfigError: not supported."
    return refuse


for _name in (
    *("tft_get_repair_step", "tft_get_reboot_type", "tft_reset_limit_step", "tft_register_mindx_callback"),
    *(
        "tft_notify_controller_dump",
        "tft_notify_controller_stop_train",
        "tft_notify_controller_on_global_rank",
    ),
    *("tft_notify_controller_prepare_action", "tft_notify_controller_change_strategy"),
    "tft_query_high_availability_switch",
):
    globals()[_name] = _refuses(_name)


def _unsupported(call: str) -> ConfigError:
    return ConfigError(
        f"{call}: the adaptor saves and starts the job again, it repairs nothing in place and follows no "
        "MindX; leave out what calls this (see docs/mindio.md)"
    )


def _require_no_repair(call: str, arf: bool, zit: bool) -> None:
    for name, value in (("enable_arf", arf), ("enable_zit", zit)):
        if value:
            raise _unsupported(f"{call}({name}=True)")


def _callable(call: str, func: Any) -> Callable[..., Any]:
    if not callable(func):
        raise TypeError(f"{call}: func is {func!r}, it must be callable")
    return func  # type: ignore[no-any-return]


# the older form


def ttp_init_controller(
    rank: int, world_size: int, replica: int = 2, enable_local_copy: bool = False
) -> None:
    """Check the arguments; the controller is in ttprun's agent."""
    job.get().join("ttp_init_controller", rank, world_size, enable_local_copy)


def ttp_start_controller(ip: str, port: int) -> None:
    """Do nothing: the controller runs already, and listens at TTP_PORT if needed."""


def ttp_init_processor(
    rank: int, dp_ranks: Any, dp_size: int, world_size: int, replica: int = 2, enable_local_copy: bool = False
) -> None:
    """Set rank, world size and the ranks with copies: `replica` is the distance between two copies.

    With TTPOddReplicaOptimizer `replica` is the number of copies of a shard; the optimizer has reported their
    places.
    """
    job.get().join("ttp_init_processor", rank, world_size, enable_local_copy)
    job.get().replicas = replicas.of_older(rank, dp_ranks, dp_size, replica, job.get().apart)


def ttp_start_processor(ip: str, port: int) -> None:
    """Do nothing: the process has been connected to its agent from the start."""


def ttp_register_save_ckpt_handler(func: Callable[[int, int, list[int], Any], Any]) -> None:
    """Register `func(save_rank, step, rank_list, args)`, which saves this rank's part, or raises."""
    job.get().handlers.save = Handler(_callable("ttp_register_save_ckpt_handler", func))
    job.get().handlers.older = True


def ttp_register_rename_handler(func: Callable[[Any], Any]) -> None:
    """Register `func(args)`, which names the checkpoint, once, on one rank, and returns 0 after a success."""
    job.get().handlers.rename = Handler(_callable("ttp_register_rename_handler", func))


def ttp_set_ckpt_args(args: Any) -> None:
    """Set the arguments of the handlers; the first argument is the iteration that has ended."""
    job.get().handlers.args = args
    if isinstance(args, tuple | list) and args and type(args[0]) is int:
        job.get().reached(args[0])


def ttp_to_persist(train: Callable[..., Any]) -> Callable[..., Any]:
    """Return `train` with protection: an exception does not end the process before others have saved."""
    return job.get().guard(train)


# What the modules of the interface offer to scripts.
__all__ = [
    *("Action", "OptimizerType", "RepairType", "ReportState"),
    *("get_device", "get_mindio_export_version", "set_mindio_export_version"),
    *(name for name in dir() if name.startswith(("tft_", "ttp_"))),
]
