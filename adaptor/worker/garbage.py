"""Puts Python's garbage collection off while a process starts that is to take the place of a failed rank.

While modules are imported Python looks through all its objects again and again for cycles that nobody needs,
and finds next to none: a fifth of the CPU time that torch and Megatron-LM take to be imported
(`benchmarks/newcomer_start.py`). Only a threshold is changed: a script that disables the collection, or
collects by itself, does so as ever.
"""

from __future__ import annotations

import gc

from adaptor.context import Context

# So many new objects, which a start never makes.
_NEVER = 1 << 30


class GarbageCollection:
    """The garbage collection of this process."""

    def __init__(self, _context: Context) -> None:
        self._before: tuple[int, int, int] | None = None  # the thresholds, while it is put off

    def put_off(self) -> None:
        """Look for no garbage until `resume`; called again it changes nothing."""
        if self._before is None:
            self._before = gc.get_threshold()
            gc.set_threshold(_NEVER)

    def resume(self) -> None:
        """Look for garbage as before, unless the script has set other thresholds meanwhile.

        What there is now counts as old, without a look at it: a look would take as long as what was saved.
        """
        thresholds, self._before = self._before, None
        if thresholds is None or gc.get_threshold()[0] != _NEVER:
            return
        if gc.get_freeze_count() == 0:  # else the script has frozen what it wants to be left alone
            gc.freeze()
            gc.unfreeze()
        gc.set_threshold(*thresholds)
