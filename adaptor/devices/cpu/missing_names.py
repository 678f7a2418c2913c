"""Names that some versions of the framework use without a definition where Transformer Engine is missing, and
a name dropped by numpy 2. Existing names are kept.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import wrapt

_MISSING: dict[str, dict[str, Any]] = {
    "megatron.core.model_parallel_config": {"warnings": warnings},
    "megatron.core.transformer.moe.moe_utils": {"te_general_gemm": None},
    "megatron.core.transformer.multi_token_prediction": {"warnings": warnings},
}


def _supply(module: ModuleType) -> None:
    for name, value in _MISSING[module.__name__].items():
        vars(module).setdefault(name, value)


def install() -> None:
    """Supply names missing in newer versions of packages."""
    vars(numpy).setdefault("product", numpy.prod)
    for module in _MISSING:
        wrapt.register_post_import_hook(_supply, module)


_APEX = ("apex", "apex.optimizers", "apex.normalization", "apex.normalization.fused_layer_norm")


class ApexFinder:
    """A finder of `sys.meta_path` for the modules of apex without which a framework on CPU takes a broken
    path; `apex.py` has their content.

    - `apex.optimizers`: torch's AdamW counts its steps per parameter, and then the framework's load of
      `torch` checkpoints and its save of `torch_dist` checkpoints break (KeyError 'step'). Apex's FusedAdam
      keeps `step` in `param_groups`.
    - `apex.normalization.fused_layer_norm`: a framework that finds apex uses apex's layer norm (also for
      sequence parallel).

    Everything else of apex keeps raising ImportError. An installed apex is left alone.
    """

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return where the stand-in for `name` is, None for other modules; not by `path` or `target`."""
        if name not in _APEX:
            return None
        is_package = name in ("apex", "apex.normalization")
        return importlib.util.spec_from_file_location(
            name, Path(__file__).with_name("apex.py"), submodule_search_locations=[] if is_package else None
        )


def install_apex() -> None:
    """Let `import apex` find the stand-in, where apex is not installed."""
    if importlib.util.find_spec("apex") is None:
        sys.meta_path.append(ApexFinder)
