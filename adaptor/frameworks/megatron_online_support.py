"""Checks if a job of Megatron-LM can be recovered online."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from packaging.specifiers import SpecifierSet

from adaptor import context
from adaptor.online import groups
from adaptor.online.groups import Groups

# Versions with which failed ranks were replaced: docs/compatibility.md.
TESTED = SpecifierSet(">=0.15.0rc5,<0.17", prereleases=True)
# Packages that put loops of their own in the place of Megatron-LM's, or change what it does.
_OTHERS = ("mindspeed_llm", "mindspeed", "modellink")


def why_not(args: Any, call: Mapping[str, Any]) -> str:
    """Return why a job is not recovered online; empty: it is.

    Args:
        args: of the framework.
        call: the arguments of its training loop, by their names.
    """
    backend = str(dist.get_backend())
    if backend != "gloo":
        return f"process groups over {backend} have not been exchanged on a device yet"
    for name in _OTHERS:
        if name in sys.modules:
            return f"it has not been tested with {name}"
    from megatron.core.package_info import __version__ as version

    if reason := of_version(version) or of_data(call):
        return reason
    for name, meaning in (
        ("tp_comm_overlap", "--tp-comm-overlap has buffers of its own between ranks"),
        ("enable_cuda_graph", "CUDA graphs hold the groups of the start"),
        ("external_cuda_graph", "CUDA graphs hold the groups of the start"),
        ("use_nccl_ub", "NCCL's user buffers are registered with the groups of the start"),
        ("nccl_ub", "NCCL's user buffers are registered with the groups of the start"),
        ("use_sharp", "SHARP is bound to the groups of the start"),
        ("async_save", "an asynchronous save holds groups of the start"),
        ("perform_rl_step", "reinforcement learning has loops of its own"),
    ):
        if getattr(args, name, False):
            return meaning
    if not context.part(Groups).known:
        return "this torch makes process groups in a way that is not known"
    return groups.why_not()


def of_version(version: str) -> str:
    """Return why a version of Megatron-LM is not recovered online; empty: it is."""
    return (
        "" if TESTED.contains(version) else f"Megatron-LM {version} has not been tested with it: {TESTED} has"
    )


def of_data(call: Mapping[str, Any]) -> str:
    """Return why the data of a call of the training loop cannot be read once more; empty: they can."""
    for name in ("train_data_iterator", "valid_data_iterator"):
        given = call.get(name)
        for one in given if isinstance(given, list) else [given]:
            if one is not None and not hasattr(one, "iterable"):
                return f"{name} is a {type(one).__name__}, which cannot be read once more"
    return ""
