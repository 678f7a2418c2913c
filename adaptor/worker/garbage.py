"""Suspends Python's garbage collection while the replacement of a failed rank starts.

During imports Python searches all objects repeatedly for unused cycles, and finds next to none: a fifth of
the CPU time that the imports of torch and Megatron-LM take. Only a threshold is changed: a script that
disables the collection, or collects by itself, is not affected.
"""

from __future__ import annotations

import gc

from adaptor.context import Context

# More new objects than a start ever makes.
_NEVER = 1 << 30


class GarbageCollection:
    """The garbage collection of this process."""

    def __init__(self, _context: Context) -> None:
        self._before: tuple[int, int, int] | None = None  # the thresholds, while the collection is suspended

    def put_off(self) -> None:
        """Look for no garbage until `resume`; called again it changes nothing."""
        if self._before is None:
            self._before = gc.get_threshold()
            gc.set_threshold(_NEVER)

    def resume(self) -> None:
        """Look for garbage as before, unless the script has set other thresholds meanwhile.

        Objects that exist now count as old, without a scan: a scan would cost the time that was saved.
        """
        thresholds, self._before = self._before, None
        if thresholds is None or gc.get_threshold()[0] != _NEVER:
            return
        if gc.get_freeze_count() == 0:  # else the script has frozen objects of its own
            gc.freeze()
            gc.unfreeze()
        gc.set_threshold(*thresholds)
