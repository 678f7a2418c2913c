"""The options of Megatron-LM that are refused because their effects cannot be protected.

To refuse an option, add a row to `ALLOWED_VALUES`, or a check to `checks`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

from adaptor import context, plug_ins
from adaptor.checkpoint import layer_wise, save_folder_claim
from adaptor.errors import ConfigError, UnsupportedError
from adaptor.frameworks import parallel_sizes

# (argument, the values that are protected, what to say of others)
Values = tuple[tuple[str, tuple[Any, ...], str], ...]

_MEGATRON_FSDP = "Megatron FSDP, whose weights are shards (DTensor),"

ALLOWED_VALUES: Values = (
    ("use_megatron_fsdp", (False,), _MEGATRON_FSDP),
    ("use_custom_fsdp", (False,), _MEGATRON_FSDP),  # its name up to 0.13
    ("use_torch_fsdp2", (False,), "torch FSDP2, which does not go on bitwise from its own checkpoints,"),
    ("fp4", (None,), "fp4"),
    ("optimizer", ("adam", "sgd", "muon", "dist_muon"), "an optimizer other than adam, sgd and muon"),
    ("non_persistent_save_interval", (None,), "non-persistent checkpoints"),
    ("inprocess_restart", (False, None), "a second start of training in the same process"),
    ("perform_rl_step", (False, None), "reinforcement learning, which moves weights between two steps,"),
    ("vision_pretraining_type", ("classify", "inpaint"), "DINO, whose teacher changes after the update,"),
    ("qk_clip", (False, None), "the clipping of weights after the update"),
    ("optimizer_cuda_graph", (False, None), "an update from a CUDA graph, which passes no hook,"),
    ("gtp_weight_remat_size", (1,), "weights in --tensor-parallel-num-weight-shards"),
    ("expert_gtp_weight_remat_size", (1,), "weights in --expert-tensor-parallel-num-weight-shards"),
    ("encoder_pipeline_model_parallel_size", (0, None), "an encoder with stages of its own"),
    ("enable_hetero", (False,), "a job whose pipeline stages have parallel sizes of their own"),  # FlagScale
    ("freeze_all_layers", (False,), "a job that trains nothing, whose saves have no weights,"),
    ("yaml_cfg", (None,), "a job whose arguments are in a file, which it reads later,"),
)


# Recipes of fp8 whose scales depend on the numbers of a step alone.
_STATELESS_RECIPES = ("tensorwise", "blockwise", "mxfp8")
# Types of Adam's moments that have no scale outside of the optimizer's state.
_MOMENTS = ("fp32", "float32", "bf16", "bfloat16")

# Switches of other systems that save a job when it fails.
_OTHERS = ("enable_high_availability", "ttp_enabled")
# Options whose defaults Megatron-LM's own layers cannot have on a CPU.
_NEEDS_KERNELS = (("transformer_impl", "transformer_engine"), ("gradient_accumulation_fusion", True))
# The last two are needed with rotary embeddings and with RMSNorm; none does harm without them.
_CPU_FLAGS = (
    "--transformer-impl local --no-masked-softmax-fusion --no-gradient-accumulation-fusion"
    " --no-rope-fusion --no-persist-layer-norm"
)


def accepts_local_copy(provider: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """The framework's parser accepts `--local-copy-os`, which is TTP_LOCAL_COPY to users of MindIO TTP."""

    def provide(parser: Any) -> Any:
        parser = parser if provider is None else provider(parser)
        parser.add_argument(
            "--local-copy-os",
            action="store_true",
            help="Copy the optimizer state before each update, in place of a barrier (TTP_LOCAL_COPY).",
        )
        return parser

    return provide


def take_local_copy(parsed: Any) -> None:
    """Take `--local-copy-os` out of the framework's own arguments, which the framework saves and loads again.

    Raises:
        UnsupportedError: the job has no shards, which MindIO TTP's option copies.
    """
    if not vars(parsed).pop("local_copy_os", False):
        return
    if not parsed.use_distributed_optimizer:
        raise UnsupportedError(
            "--local-copy-os is given without --use-distributed-optimizer: add --use-distributed-optimizer, "
            "or set TTP_LOCAL_COPY=True in its place, which copies a whole optimizer, too"
        )
    context.get().copy_locally()


def require_cpu_options(args: Any) -> None:
    """Refuse options that need an accelerator's kernels if TTP_DEVICE is cpu.

    Megatron-LM would raise later, for a single option at a time. MindSpeed has replacements for such kernels,
    and importable CPU versions of Transformer Engine have their own.

    Raises:
        ConfigError: names the option, and all flags for a job on a CPU.
    """
    if context.get().settings.device != "cpu" or "mindspeed" in sys.modules:
        return
    for name, value in _NEEDS_KERNELS:
        if importlib.util.find_spec(str(value)) is not None:
            continue
        if getattr(args, name, None) == value:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value}, which a CPU has no kernels for: a job with"
                f" --ttp-device cpu needs {_CPU_FLAGS}"
            )


def require_no_layout_only() -> None:
    """Refuse TTP_LAYOUT_ONLY in a loop that would train. Raises UnsupportedError."""
    if context.get().settings.layout_only:
        raise UnsupportedError(
            "TTP_LAYOUT_ONLY is set: only Megatron-LM's own training loop says its layout; leave it out"
        )


def require_no_host_copy() -> None:
    """Refuse TTP_HOST_COPY where Megatron-LM's own function does not load. Raises UnsupportedError."""
    if context.get().settings.host_copy:
        raise UnsupportedError(
            "TTP_HOST_COPY is set: only jobs that load with Megatron-LM's own load_checkpoint go on from"
            " copies in host memory; leave it out"
        )


def require_no_replay() -> None:
    """Refuse TTP_REPLAY_EVERY in a loop of a user. Raises UnsupportedError."""
    if every := context.get().settings.replay_every:
        raise UnsupportedError(
            f"TTP_REPLAY_EVERY is {every}: only scripts of Megatron-LM repeat micro-batches; leave it out"
        )


def require_no_comparison() -> None:
    """Refuse comparisons, replays and drills in a loop without them. Raises UnsupportedError."""
    settings = context.get().settings
    every_by_name = {
        "VERIFY": settings.verify_every,
        "DRILL": settings.drill_every,
        "REPLAY": settings.replay_every,
    }
    for variable, every in every_by_name.items():
        if every != 0:
            raise UnsupportedError(
                f"TTP_{variable}_EVERY is set: only jobs of Megatron-LM and MindSpeed-LLM, and loops with"
                " adaptor.protect, compare the holders of their state; leave it out"
            )


def require_alone(args: Any) -> None:
    """Refuse a job that a second system would save, too: both systems would hold the processes and write the
    files.

    Raises:
        UnsupportedError: names the switch of the other system.
    """
    for name in _OTHERS:
        if getattr(args, name, False):
            also = " (HIGH_AVAILABILITY sets it, too)" if name == "enable_high_availability" else ""
            raise UnsupportedError(
                f"--{name.replace('_', '-')} is given{also}: two systems cannot save the same job; "
                "leave it out, or set ENABLE_TTP=False"
            )


def require_protected(*configs: Any, format: str = "") -> None:
    """Refuse options with only partial protection.

    Args:
        configs: Megatron-LM's parsed arguments, or Megatron-core's configs, which use the same names.
        format: of last words, where the configs do not name it.

    Raises:
        UnsupportedError: names the argument, its value and the protected values.
    """
    for check in checks(*configs, format=format):
        check()


def checks(*configs: Any, format: str = "") -> Iterator[Callable[[], None]]:
    """The parts of `require_protected`: each raises UnsupportedError for one reason."""
    yield from checks_of_values(ALLOWED_VALUES, *configs)
    for config in configs:
        yield partial(_require_muon, config, format)
        yield partial(_require_loader_folder, config)
        yield partial(_require_whole_offload, config)
        yield partial(_require_loadable_student, config, format)
        yield partial(_require_fp8, config, format)
        yield partial(_require_precision_aware, config)
        yield partial(_require_formats, config)


def is_layer_wise(config: Any) -> bool:
    """Return whether each matrix, with its state, is on one data-parallel rank alone, as Muon has it."""
    kind = getattr(config, "optimizer", "adam")
    return kind == "dist_muon" or (
        kind == "muon"
        and (
            getattr(config, "use_distributed_optimizer", False)
            or getattr(config, "use_layer_wise_distributed_optimizer", False)
        )
    )


def is_sharded(args: Any) -> bool:
    """Return whether ranks share the state of a distributed optimizer, which may have second copies."""
    return bool(args.use_distributed_optimizer) and not is_layer_wise(args)


def _require_muon(config: Any, format: str) -> None:
    if getattr(config, "optimizer", "adam") not in ("muon", "dist_muon"):
        return
    if is_layer_wise(config) and (format or getattr(config, "ckpt_format", "")) == "torch":
        raise UnsupportedError(layer_wise.IN_TORCH)
    require_blockwise(getattr(config, "muon_tp_mode", ""), getattr(config, "tensor_model_parallel_size", 1))


def require_blockwise(mode: str, tensor: int) -> None:
    """Refuse Muon whose update gathers the parts of a matrix from other tensor-parallel ranks.

    Args:
        mode: of Muon (--muon-tp-mode).

    Raises:
        UnsupportedError: names the mode.
    """
    if tensor > 1 and mode != "blockwise":
        raise UnsupportedError(
            f"--muon-tp-mode is {mode}: an update that asks other tensor-parallel ranks cannot be protected;"
            " use blockwise, or set ENABLE_TTP=False"
        )


def _require_whole_offload(config: Any) -> None:
    if not getattr(config, "optimizer_cpu_offload", False):
        return
    require_restorable(
        config,
        "optimizer_cpu_offload",
        (config.optimizer != "adam", f"with --optimizer {config.optimizer}"),
        (config.optimizer_offload_fraction != 1, "with another --optimizer-offload-fraction than 1.0"),
        (
            not config.use_precision_aware_optimizer,
            "without --use-precision-aware-optimizer, with which alone the framework loads what it has saved",
        ),
    )


def require_restorable(config: Any, name: str, *obstacles: tuple[Any, str]) -> None:
    """Refuse an option with optimizer state outside of the optimizer's tensors (`optimizer_state.Storage`).

    Only a job whose restart could not restore the state is refused.

    Args:
        name: the argument, which is set.
        obstacles: conditions beside the common conditions of all such options, each in words.

    Raises:
        UnsupportedError: names the argument and the first condition that holds.
    """
    settings = context.get().settings
    for holds, beside in (
        (not config.use_distributed_optimizer, "without --use-distributed-optimizer"),
        *obstacles,
        (settings.local_copy, "with a local copy (TTP_LOCAL_COPY, --local-copy-os)"),
        (settings.parts.get("reshape") is not None, "with TTP_RESHAPE"),
    ):
        if holds:
            raise UnsupportedError(
                f"--{name.replace('_', '-')} is True: it cannot be protected {beside}; change that, or set"
                " ENABLE_TTP=False"
            )


def _require_loader_folder(config: Any) -> None:
    states = getattr(config, "dataloader_save", None)
    if isinstance(states, str) and save_folder_claim.is_same(states, config.save):
        raise UnsupportedError(
            f"--dataloader-save is {states}, which is the --save folder, where a checkpoint appears as a"
            " whole: use a folder of its own, which may be below --save, or set ENABLE_TTP=False"
        )


def _require_loadable_student(config: Any, format: str) -> None:
    if getattr(config, "export_kd_teacher_load", None) and not _is_torch_dist(config, format):
        raise UnsupportedError(
            f"--export-kd-teacher-load is {config.export_kd_teacher_load}: the framework cannot load its own"
            " checkpoints of a student in the format torch; use --ckpt-format torch_dist (Megatron-core 0.13"
            " or later), or set ENABLE_TTP=False"
        )


def _recipe(config: Any) -> str:
    recipe = getattr(config, "fp8_recipe", None) or "delayed"
    return str(getattr(recipe, "value", recipe))


def _recipes() -> str:
    return f"{', '.join(_STATELESS_RECIPES[:-1])} or {_STATELESS_RECIPES[-1]}"


def _require_fp8(config: Any, format: str) -> None:
    recipe = _recipe(config)
    if getattr(config, "fp8", None) and recipe not in _STATELESS_RECIPES:
        for holds, why in _obstacles_to_histories(config, recipe):
            if holds:
                raise UnsupportedError(
                    f"--fp8-recipe is {recipe}: {why}, so it cannot be protected; use {_recipes()}, or set"
                    " ENABLE_TTP=False"
                )
    if not getattr(config, "fp8_param_gather", False):
        return
    if not _is_torch_dist(config, format):
        raise UnsupportedError(
            "--fp8-param-gather is True: last words in the format torch would have other scales than the"
            " framework's own; use --ckpt-format torch_dist (Megatron-core 0.13 or later), or set"
            " ENABLE_TTP=False"
        )


def _obstacles_to_histories(config: Any, recipe: str) -> Iterator[tuple[Any, str]]:
    """Yield conditions under which the histories of largest elements are not protected, and why not."""
    yield recipe != "delayed", "the state of its quantizers is not known"
    yield "mindspeed" in sys.modules, "MindSpeed keeps its histories in modules of its own"
    yield (
        getattr(config, "tp_only_amax_red", False),
        "with --tp-only-amax-red each data-parallel rank has histories of its own, without a second copy",
    )
    yield (
        getattr(config, "fp8_param_gather", False),
        "with --fp8-param-gather the update uses scales that the next forward pass changes",
    )
    if "transformer_engine" in sys.modules:
        from megatron.core.utils import is_te_min_version

        yield not is_te_min_version("2.0.0"), "Transformer Engine before 2.0 saves it in another form"
        yield (
            getattr(config, "recompute_granularity", None) and not is_te_min_version("2.4.0"),
            "with recomputation Transformer Engine before 2.4 leaves each rank with histories of its own",
        )


def _require_precision_aware(config: Any) -> None:
    if not getattr(config, "use_precision_aware_optimizer", False):
        return
    if getattr(config, "optimizer_cpu_offload", False):  # which has main params and moments in float32
        return
    mains = _type_name(config, "main_params_dtype")
    if mains not in ("fp32", "float32"):
        raise UnsupportedError(
            f"--main-params-dtype is {mains}: main params of this type have scales outside of the optimizer's"
            " state, which cannot be protected yet; use fp32, or set ENABLE_TTP=False"
        )
    if _recipe(config) not in _STATELESS_RECIPES:  # else the framework keeps the main params
        require_restorable(config, "use_precision_aware_optimizer")
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if (kind := _type_name(config, name)) not in _MOMENTS:
            raise UnsupportedError(
                f"--{name.replace('_', '-')} is {kind}: moments of this type have scales outside of"
                " the optimizer's state, which cannot be protected yet; use fp32 or bf16, or set"
                " ENABLE_TTP=False"
            )


def _type_name(config: Any, name: str) -> str:
    """Return the name of a dtype, a text until the framework has checked its arguments."""
    return str(getattr(config, name, "fp32")).removeprefix("torch.")


def _require_formats(config: Any) -> None:
    kind = getattr(config, "ckpt_format", "torch_dist")
    known_formats = plug_ins.names(plug_ins.FORMATS)
    if kind not in known_formats:
        raise UnsupportedError(
            f"--ckpt-format is {kind}: no plug-in writes it ({plug_ins.FORMATS}); use "
            f"{' or '.join(known_formats)},"
            " or set ENABLE_TTP=False"
        )
    if getattr(config, "async_save", None) and kind != "torch_dist":
        raise UnsupportedError(
            f"--async-save is True with --ckpt-format {kind}: the framework itself cannot do that, "
            "and says so at its first save; use --ckpt-format torch_dist, or leave --async-save out"
        )
    # Later versions say in `ckpt_format` what this means, and can load both formats.
    if getattr(config, "use_dist_ckpt", False) and not hasattr(config, "ckpt_format"):
        raise UnsupportedError(
            "--use-dist-ckpt is True: this version would not load last words, which are in the format "
            "torch; leave it out, or set ENABLE_TTP=False"
        )


def require_values(protected: Values, *configs: Any) -> None:
    """Refuse arguments with an unprotected value. Raises UnsupportedError."""
    for check in checks_of_values(protected, *configs):
        check()


def checks_of_values(protected: Values, *configs: Any) -> Iterator[Callable[[], None]]:
    """The parts of `require_values`, one for each argument."""
    for row, config in product(protected, configs):
        yield partial(_require_value, config, *row)


def _require_value(config: Any, name: str, allowed: tuple[Any, ...], description: str) -> None:
    value = getattr(config, name, allowed[0])
    if value not in allowed:
        flag = "--" + name.replace("_", "-")
        use = f"use {' or '.join(map(str, allowed))}" if any(allowed) else "leave it out"
        raise UnsupportedError(
            f"{flag} is {value}: {description} cannot be protected yet; {use}, or set ENABLE_TTP=False"
        )


def require_folders(args: Any) -> None:
    """Refuse experts of which last words would lack a part. Raises UnsupportedError."""
    if getattr(args, "num_experts", None) is None or not lacks_folders(args):
        return
    if writes_torch_dist(args):
        return
    require_folders_for_experts(*_sizes_of_experts(args))


def writes_torch_dist(args: Any) -> bool:
    """Return whether last words are in the format `torch_dist`; before 0.13 they are in `torch`."""
    if getattr(args, "ckpt_format", "torch") != "torch_dist":
        return False
    checkpointing = importlib.import_module("megatron.training.checkpointing")
    return hasattr(checkpointing, "_build_sharded_state_dict_metadata")


def _is_torch_dist(config: Any, format: str) -> bool:
    return format == "torch_dist" if format else writes_torch_dist(config)


def lacks_folders(args: Any) -> bool:
    """Return whether the format `torch` has no folder for the experts of some ranks."""
    return _lacks_folders(*_sizes_of_experts(args))


def _sizes_of_experts(args: Any) -> tuple[int, int | None, int]:
    cut = getattr(args, "expert_tensor_parallel_size", None)
    return args.tensor_model_parallel_size, cut, args.expert_model_parallel_size


def _lacks_folders(tensor: int, experts_tensor: int | None, experts: int) -> bool:
    cut = tensor if experts_tensor is None else experts_tensor
    return bool(tensor % cut or cut * experts % tensor)


def require_folders_for_experts(tensor: int, experts_tensor: int | None, experts: int) -> None:
    """Megatron's `torch` format has a folder for each tensor and expert parallel rank, pipeline stages aside.

    Ranks of a folder must have the same experts, and one of the ranks must be the first with its experts,
    because the first writes them.

    Args:
        experts_tensor: the tensor parallel size of experts, None if equal.

    Raises:
        UnsupportedError: some ranks have no such folder.
    """
    if _lacks_folders(tensor, experts_tensor, experts):
        raise UnsupportedError(
            f"--expert-tensor-parallel-size is {experts_tensor}: with --tensor-model-parallel-size {tensor}"
            f" and --expert-model-parallel-size {experts} the framework's `torch` checkpoints lack a part of"
            f" the model; use a divisor of {tensor} that times {experts} is a multiple of {tensor}, "
            "--ckpt-format torch_dist, or set ENABLE_TTP=False"
        )


def expert_data_parallel_size(args: Any) -> int:
    """Return the number of ranks with the same experts; the data-parallel size without experts."""
    if getattr(args, "num_experts", None) is None:
        return data_parallel_size(args)
    return int(args.world_size // parallel_sizes.experts_size(args))


def data_parallel_size(args: Any) -> int:
    """Ranks that share the optimizer state: the data-parallel size, context parallel included."""
    return int(args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size))
