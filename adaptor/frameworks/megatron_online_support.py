"""Checks if a job of Megatron-LM, or of a loop of one's own on Megatron-core, can be recovered online."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Set
from typing import Any

from packaging.specifiers import SpecifierSet

from adaptor import context
from adaptor.context import Context
from adaptor.devices.cuda import is_detailed
from adaptor.frameworks import tested_versions
from adaptor.online import group_books
from adaptor.online.groups import Groups
from adaptor.worker.framework_watchdogs import Watchdogs

# Versions with which failed ranks were replaced.
TESTED = SpecifierSet(tested_versions.specifier(tested_versions.ONLINE), prereleases=True)
# Backends of process groups that are exchanged. Over NCCL one version of Megatron-LM has gone on bitwise, on
# one GPU (docs/accelerators.md); over HCCL nobody has tried it (docs/ascend.md).
EXCHANGED = frozenset({"gloo", "nccl", "hccl"})
# DeepEP connects so many ranks by NVLink, and more of them by NVSHMEM, too (`NUM_MAX_NVL_PEERS`).
NVLINK_RANKS = 8
_WATCHED = frozenset({"nccl", "hccl"})
# Packages that put loops of their own in the place of Megatron-LM's, or change what it does.
_OTHERS = ("mindspeed_mm", "mindspeed_llm", "mindspeed", "modellink")
# Of these the loop of MindSpeed-LLM was tested.
_LLM = "mindspeed_llm"


class ParamGroups:
    """The param groups of the optimizers made by this process.

    Attributes:
        are_aligned: some are empty; the framework has added empty groups, because other ranks have these
            groups
    """

    def __init__(self, _context: Context) -> None:
        self.are_aligned = False


def why_not(args: Any, call: Mapping[str, Any]) -> str:
    """Return why a job of Megatron-LM is not recovered online; empty: the job is."""
    option_reason = of_data(call) or of_options(args) or of_param_groups()
    return of_process_groups() or of_framework() or option_reason or of_torch()


def why_not_on_core(*configs: Any) -> str:
    """Return why a custom training loop is not recovered online; empty: the loop is.

    Args:
        configs: the configs of the model, of the reduction of gradients, of the optimizer.
    """
    option_reason = next(filter(None, map(of_options, configs)), "") or of_param_groups()
    return of_process_groups() or of_framework() or option_reason or of_torch()


def of_process_groups() -> str:
    """Return why the backends of this worker's groups are not exchanged; empty: the backends are."""
    groups = context.part(Groups)
    if reason := of_backends(groups.backends):
        return reason
    if is_detailed():
        return "TORCH_DISTRIBUTED_DEBUG=DETAIL puts a group around each process group"
    if groups.backends & _WATCHED and not context.part(Watchdogs).are_off:
        return "the watchdog of NCCL or HCCL is on, and would end the survivors"
    if groups.is_bound:
        return "process groups that are bound to a device (`device_id`) are split from each other"
    return ""


def of_backends(backends: Set[str]) -> str:
    """Return why groups of these backends are not exchanged; empty: the groups are."""
    other_backends = ", ".join(sorted(backends - EXCHANGED))
    return other_backends and f"process groups of {other_backends} were never exchanged in a test"


def reasons(args: Any) -> Iterator[str]:
    """Return the reasons, known before a process group is made, why a job is not recovered online."""
    on_npu = context.get().settings.device != "cpu" and importlib.util.find_spec("torch_npu") is not None
    yield from filter(None, (of_backends({"hccl" if on_npu else args.distributed_backend}), of_framework()))
    yield from reasons_in_options(args)


def of_framework() -> str:
    """Return why the imported framework has no online recovery; empty: the framework has."""
    for name in _OTHERS if _LLM not in sys.modules else ():
        if name in sys.modules:
            return f"it has not been tested with {name}"
    from megatron.core.package_info import __version__ as version

    return of_version(version)


def of_options(options: Any) -> str:
    """Return the first option in `options` with state that a recovery does not restore; empty: none."""
    return next(reasons_in_options(options), "")


def reasons_in_options(options: Any) -> Iterator[str]:
    """Return a line for each option in `options` with state that a recovery does not restore."""
    for name, meaning in (
        ("enable_cuda_graph", "CUDA graphs hold the groups of the start"),
        ("external_cuda_graph", "CUDA graphs hold the groups of the start"),
        ("cuda_graph_impl", "CUDA graphs hold the groups of the start"),
        ("use_nccl_ub", "NCCL's user buffers are registered with the groups of the start"),
        ("nccl_ub", "NCCL's user buffers are registered with the groups of the start"),
        ("use_sharp", "SHARP is bound to the groups of the start"),
        ("iterations_to_skip", "--iterations-to-skip reads data outside of steps"),
        ("delay_wgrad_compute", "--delay-wgrad-compute keeps work of a step in queues of its own"),
        (
            "overlap_dispatch_backward_with_experts_wgrad",
            "--overlap-dispatch-backward-with-experts-wgrad keeps work of a step in queues of its own",
        ),
        ("moe_paged_stash", "--moe-paged-stash keeps tensors of a step in queues of its own"),
        (
            "fine_grained_activation_offloading",
            "--fine-grained-activation-offloading keeps tensors of a step in queues of its own",
        ),
        ("cpu_offloading", "--cpu-offloading-num-layers keeps tensors of a step in queues of its own"),
        ("moe_router_force_biased", "--moe-router-force-biased draws numbers once for each process"),
        (
            "moe_enable_routing_replay",
            "--moe-enable-routing-replay keeps the routes of a step in lists of its own",
        ),
        ("logits_load_dir", "--logits-load-dir reads a teacher's data outside of the data loader"),
        ("export_kd_teacher_load", "--export-kd-teacher-load has all ranks load the teacher together"),
        ("perform_rl_step", "reinforcement learning has loops of its own"),
        # Of FlagScale.
        ("skip_iters_range", "--skip-iters-range reads data outside of steps"),
        ("skip_samples_range", "--skip-samples-range reads data outside of steps"),
        ("extra_eval_interval", "--extra-eval-interval evaluates after a step, and not once more"),
        ("auto_skip_spiky_loss", "--auto-skip-spiky-loss keeps the losses of earlier steps in each process"),
        ("use_dualpipev", "--use-dualpipev keeps work of a step in queues of its own"),
        # Of MindSpeed, and of MindSpeed-LLM.
        ("coc_fused_kernel", "--coc-fused-kernel has communicators of its own (LCAL), one for each process"),
        ("schedules_method", "--schedules-method keeps work of a step in schedules of its own"),
        ("moe_fb_overlap", "--moe-fb-overlap keeps work of a step in schedules of its own"),
        ("recompute_in_bubble", "--recompute-in-bubble keeps work of a step in queues of its own"),
        ("recompute_in_advance", "--recompute-in-advance keeps work of a step in queues of its own"),
        ("enable_share_memory", "--enable-share-memory has all ranks meet once in each process"),
    ):
        if getattr(options, name, False) not in (False, None, "none", []):
            yield meaning
    overlaps = getattr(options, "tp_comm_overlap", False)
    if overlaps and getattr(options, "tp_comm_bootstrap_backend", None) == "mpi":
        yield "--tp-comm-bootstrap-backend mpi makes process groups of MPI, which are not exchanged"
    if getattr(options, "reuse_grad_buf_for_mxfp8_param_ag", False) and options.overlap_param_gather:
        yield (
            "--reuse-grad-buf-for-mxfp8-param-ag with --overlap-param-gather has weights in the memory of"
            " gradients when a step begins"
        )
    if getattr(options, "dataloader_type", None) == "external":
        yield from filter(None, (_of_own_loader(options),))
    if getattr(options, "moe_token_dispatcher_type", None) == "flex":
        yield from filter(None, (_of_expert_buffers(options),))


def _of_expert_buffers(options: Any) -> str:
    """Return why the buffers of the flex dispatcher cannot be made anew in a process; empty: they can."""
    backend = getattr(options, "moe_flex_dispatcher_backend", None) or "deepep"
    if backend not in ("deepep", "hybridep"):
        return f"--moe-flex-dispatcher-backend {backend} has buffers of its own between ranks"
    experts_tensor_size = getattr(options, "expert_tensor_parallel_size", None)
    ranks = options.expert_model_parallel_size * (experts_tensor_size or options.tensor_model_parallel_size)
    if backend == "deepep" and ranks > NVLINK_RANKS:
        return (
            f"DeepEP over {ranks} ranks, more than {NVLINK_RANKS}, uses NVSHMEM, "
            "which a process initializes once"
        )
    return ""


def of_param_groups() -> str:
    """Return why a new process would make other param groups than this rank has; empty: the same."""
    if not context.part(ParamGroups).are_aligned:
        return ""
    return "a rank has param groups of other ranks, empty ones, and a new process would have its own alone"


def of_torch() -> str:
    """Return why this torch does not exchange the backends of groups; empty: torch does."""
    groups_of_job = context.part(Groups)
    if groups_of_job.lone:  # a new process among survivors, whose torch is this one: they have found out
        return ""
    if not groups_of_job.known:
        return "this torch makes process groups in a way that is not known"
    return group_books.why_not()


def of_version(version: str) -> str:
    """Return why a version of Megatron-LM is not recovered online; empty: it is."""
    if TESTED.contains(version):
        return ""
    tested = tested_versions.words(tested_versions.ONLINE)
    return f"Megatron-LM {version} has not been tested with it; {tested} have been"


def _of_own_loader(options: Any) -> str:
    """Return why a data loader of the script may begin anew in a new process; empty: its state is saved."""
    own = "a data loader of the script's own (--dataloader-type external)"
    if not getattr(options, "dataloader_save", None):
        return f"{own} may begin anew in a new process"
    return f"{own} may begin its evaluation anew in a new process" if options.eval_iters else ""


def of_data(call: Mapping[str, Any]) -> str:
    """Return why the data of a call of the training loop cannot be read once more; empty: they can."""
    for name in ("train_data_iterator", "valid_data_iterator"):
        iterator_argument = call.get(name)
        for iterator in iterator_argument if isinstance(iterator_argument, list) else [iterator_argument]:
            if iterator is not None and not hasattr(iterator, "iterable"):
                return f"{name} is a {type(iterator).__name__}, which cannot be read once more"
    return ""
