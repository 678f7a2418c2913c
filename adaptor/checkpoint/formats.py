"""The formats that last words can have, by name: entry points of `ttp_adaptor.formats`."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from adaptor import plug_ins
from adaptor.checkpoint.training_state import FormatFactory, TrainingState


def in_format(name: str, state: TrainingState, first: int, setting: str) -> TrainingState:
    """Return `state` with the format that is chosen for last words; on every rank at the same time.

    Args:
        name: of the format.
        state: of this rank.
        first: the lowest rank of this rank's group, which is the one that the framework lets write.
        setting: where the user has chosen it, for messages.

    Raises:
        ConfigError: no format of this name is installed.
        UnsupportedError: the format cannot hold this state.
    """
    make = cast(FormatFactory, plug_ins.choose(plug_ins.FORMATS, name, setting, "or set ENABLE_TTP=False"))
    return replace(state, format=make(state, first))
