"""Names that some versions of the framework use without a definition where Transformer Engine is missing, and
a name dropped by numpy 2. Existing names are kept.
"""

from __future__ import annotations

import warnings
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
