"""`torch.save`: what a framework writes with it in a regular save is hashed on its way to the disk.

Not `torch.save` itself is wrapped, of which `torch` and others have copies, but what it calls to open a file.
"""

from __future__ import annotations

from typing import Any

from adaptor import context, patching
from adaptor.frameworks.regular_save import RegularSaves

serialization = patching.Unit("serialization", framework="torch", tested=">=2.4,<3", group="worker")


@serialization.patch(
    "torch.serialization:_open_zipfile_writer",
    why="the files of a regular save get checksums without being read again",
    accepts="(name_or_buffer)",
    optional=True,  # without it, regular saves have no checksums
)
def files_of_a_regular_save_are_hashed(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return context.part(RegularSaves).written(wrapped, args[0] if args else kwargs["name_or_buffer"])
