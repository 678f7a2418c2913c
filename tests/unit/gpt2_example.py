"""The modules of examples/gpt2_from_scratch, imported as scripts of one folder import each other."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "examples" / "gpt2_from_scratch"


def module(name: str) -> ModuleType:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    module = importlib.import_module(name)
    assert Path(module.__file__ or "").parent == FOLDER, f"another module is called {name}"
    return module
