"""Serves the modules of apex without which a framework on CPU takes a broken path.

- `apex.optimizers`: torch's AdamW counts its steps per parameter, and then the framework's load of `torch`
  checkpoints and its save of `torch_dist` checkpoints break (KeyError 'step'). Apex's FusedAdam keeps `step`
  in `param_groups`.
- `apex.normalization.fused_layer_norm`: a framework that finds apex uses apex's layer norm (also for sequence
  parallel).

Everything else of apex keeps raising ImportError. An installed apex is left alone.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_FILES = {
    "apex": "apex.py",
    "apex.optimizers": "fused_adam.py",
    "apex.normalization": "apex.py",
    "apex.normalization.fused_layer_norm": "fused_layer_norm.py",
}
_PACKAGES = ("apex", "apex.normalization")


class ApexFinder:
    """A finder of `sys.meta_path` for the modules of the table above."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return where the stand-in for `name` is, None for other modules; not by `path` or `target`."""
        if name not in _FILES:
            return None
        return importlib.util.spec_from_file_location(
            name,
            Path(__file__).with_name(_FILES[name]),
            submodule_search_locations=[] if name in _PACKAGES else None,
        )


def install() -> None:
    """Let `import apex` find the stand-in, where apex is not installed."""
    if importlib.util.find_spec("apex") is None:
        sys.meta_path.append(ApexFinder)
