"""The optimizers that can be protected, by their ways to keep state.

The optimizers of torch, apex and Transformer Engine agree in three points: each param has a state of tensors
in float32, or moments in bfloat16, beside the param, and param groups have numbers; a twin can therefore be
created. Moments of other types have a scale outside of the state, which changes in each update. The count of
updates is a number of the param groups (apex, Transformer Engine), a tensor there (MindSpeed), or a tensor in
the state of each param (torch). Options can change the three points; options are recognised by their names,
so none of these packages has to be installed.
"""

from __future__ import annotations

import torch

from adaptor.errors import UnsupportedError

_MOMENTS = (torch.float32, torch.bfloat16)
# (attribute, the values with which state is kept as above, what another one means)
_OPTIONS: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("capturable", (False,), "rates and counts are tensors, which change while a dump reads them"),
    ("use_master", (False,), "the optimizer has main params of its own"),
    ("master_weights", (False,), "the optimizer has main params of its own"),
    ("store_param_remainders", (False,), "main params are split in two"),
    ("use_decoupled_grad", (False,), "gradients are not where torch has them"),
    ("exp_avg_dtype", _MOMENTS, "moments have scales outside of the state"),
    ("exp_avg_sq_dtype", _MOMENTS, "moments have scales outside of the state"),
)


def require_protected(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an inner optimizer whose state would be saved wrongly.

    Raises:
        UnsupportedError: names the class, the option and its value.
    """
    kind = f"{type(optimizer).__module__.partition('.')[0]}'s {type(optimizer).__name__}"
    _require_muon_alone(optimizer, kind)
    for name, known_values, meaning in _OPTIONS:
        values = [getattr(optimizer, name, None), *(group.get(name) for group in optimizer.param_groups)]
        for value in values:
            if value is not None and value not in known_values:
                raise UnsupportedError(
                    f"{kind} has {name}={value}: {meaning}, which cannot be protected yet; "
                    f"use {name}={known_values[0]}, or set ENABLE_TTP=False"
                )
    for group in optimizer.param_groups:
        for name, value in group.items():
            if isinstance(value, torch.Tensor) and name != "step":  # which is read with the tensors
                raise UnsupportedError(
                    f"{kind} has a tensor as {name} of a param group, which changes while a dump reads it: "
                    "use a number, or set ENABLE_TTP=False"
                )


def _require_muon_alone(optimizer: torch.optim.Optimizer, kind: str) -> None:
    """Refuse an update of Megatron-core's Muon that other tensor-parallel ranks take part in."""
    mode = getattr(optimizer, "tp_mode", getattr(optimizer, "mode", None))  # its name up to 0.16
    groups = getattr(optimizer, "pg_collection", None)
    if mode in (None, "blockwise") or groups is None:
        return
    if max(group.size() for group in (groups.tp, getattr(groups, "expt_tp", groups.tp))) > 1:
        raise UnsupportedError(
            f"{kind} has muon_tp_mode={mode}: an update that asks other tensor-parallel ranks cannot be"
            " protected; use blockwise, or set ENABLE_TTP=False"
        )
