"""The plug-in that protects `lab`: loaded by its entry point, `ttp_adaptor.patches`."""

from __future__ import annotations

from typing import Any

import adaptor
from adaptor import patching

lab = patching.Unit("lab", framework="lab", tested=">=1.0,<2")
protection: Any = None


@lab.patch(
    "lab:train",
    why="the training state is complete here: from now on it can be saved",
    accepts="(model, optimizer, *, save, step, ...)",
)
def training_can_be_saved(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    global protection
    model, optimizer = args
    protection = adaptor.protect(
        model=[model], optimizer=optimizer, save=kwargs["save"], step=kwargs["step"], format="lab"
    )
    return wrapped(*args, **kwargs)


@lab.patch("lab:train_step", why="a step begins, and ends", accepts="(number, model, optimizer, batch)")
def steps_are_counted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    with protection.step(args[0]):
        return wrapped(*args, **kwargs)
