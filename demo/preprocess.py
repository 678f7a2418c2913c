"""Runs Megatron's own tools/preprocess_data.py: `preprocess.py TOOL arguments of the tool...`

The tool of 0.15.0rc5 builds the tokenizer of a vocabulary file in every worker, but does not store it (its
`Encoder.initializer` binds a local name), so no worker can encode. This script only adds the store.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load(tool: Path) -> ModuleType:
    """Import the tool under its file's name, which its worker processes also import."""
    spec = importlib.util.spec_from_file_location(tool.stem, tool)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[tool.stem] = module
    spec.loader.exec_module(module)
    return module


def keep_tokenizer(module: Any) -> None:
    build = module.build_tokenizer

    def build_and_keep(args: Any) -> Any:
        module.Encoder.tokenizer = build(args)
        return module.Encoder.tokenizer

    module.build_tokenizer = build_and_keep


if __name__ == "__main__":
    sys.argv.pop(0)
    tool = load(Path(sys.argv[0]))
    keep_tokenizer(tool)
    tool.main()
