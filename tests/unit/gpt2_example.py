"""The modules of examples/gpt2_from_scratch, which import each other as scripts in one folder do."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "examples" / "gpt2_from_scratch"


def module(name: str) -> ModuleType:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    found = importlib.import_module(name)
    assert Path(found.__file__ or "").parent == FOLDER, f"another module is called {name}"
    return found
