"""Random numbers: the "CUDA" generator is the CPU generator, because CPU operators draw from the CPU
generator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from adaptor.devices.cpu.placement import replace


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(new_state)


def _set_rng_state_all(new_states: Any) -> None:
    for state in new_states:
        torch.default_generator.set_state(state)


def _manual_seed(seed: int) -> None:
    # Not torch.manual_seed: that one calls this one.
    torch.default_generator.manual_seed(int(seed))


def _fork_is_expected(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def install(device_count: int) -> None:
    """Replace the random generators of `device_count` devices."""
    stand_ins: dict[str, Callable[..., Any]] = {
        "get_rng_state": _get_rng_state,
        "get_rng_state_all": lambda: [_get_rng_state()],
        "set_rng_state": _set_rng_state,
        "set_rng_state_all": _set_rng_state_all,
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed,
        "seed": torch.default_generator.seed,
        "seed_all": torch.default_generator.seed,
        "initial_seed": torch.default_generator.initial_seed,
    }
    replace((torch.cuda, torch.cuda.random), stand_ins)
    torch.cuda.default_generators = (torch.default_generator,) * device_count  # type: ignore[assignment]
    # Megatron warns at every fork of its generator that the other one has moved too.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_fork_is_expected)
