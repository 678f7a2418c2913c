"""Lists the modules imported by this process, for a process that imports or compares the same modules."""

from __future__ import annotations

import sys

from adaptor import context
from adaptor.protocol.messages import Modules
from adaptor.text import encodable
from adaptor.worker import imported_names
from adaptor.worker.script_imports import ScriptImports


def of_this_process(rank: int) -> Modules:
    """Return the modules of the worker of `rank`, in the order in which they were imported; called once."""
    path = tuple(folder for folder in list(sys.path) if isinstance(folder, str))
    imports = context.part(ScriptImports)
    origins = {encodable(name): origin(name) for name in list(sys.modules)}
    return Modules(rank, path, origins, imports.end(), imports.changed_variables())


def origin(name: str) -> str:
    """Return the file of the module, or the kind of its origin; '' without a spec."""
    spec = imported_names.names_of(name).get("__spec__")
    return encodable(str(getattr(spec, "origin", None) or ""))
