"""`torch.save` and `torch.load`: data written in a regular save is hashed on its way to the disk; data read
for a check before a load is not read again. And the barriers of a regular save.

`torch` and other modules have copies of the two functions, so the wrappers are around the functions that open
a file.
"""

from __future__ import annotations

from typing import Any

from adaptor import context, patching
from adaptor.frameworks import compared_save
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


@serialization.patch(
    "torch.serialization:_save",
    why="an archive of a regular save is compared with the state in memory before it is written",
    accepts="(obj, zip_file, ...)",
    optional=True,  # without it, archives are not compared
)
def archives_of_a_regular_save_are_compared(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    compared_save.compare(args[0] if args else kwargs["obj"])
    return wrapped(*args, **kwargs)


@serialization.patch(
    "torch.distributed.distributed_c10d:barrier",
    why="at the barriers of a regular save its ranks learn whether it has failed on one of them",
    accepts="(group=, async_op=, ...)",
)
def barriers_of_a_save_compare(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if args or kwargs:  # of some of the ranks, or none that waits
        return wrapped(*args, **kwargs)
    return context.part(RegularSaves).barrier(wrapped)


@serialization.patch(
    "torch.serialization:_open_zipfile_reader.__init__",
    why="what was checked before a load is in memory, and is not read a second time",
    accepts="(name_or_buffer)",
    optional=True,  # without it, it is
)
def what_was_checked_is_mapped(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.frameworks import mapped_reading

    archive = mapped_reading.archive(args[0] if args else kwargs["name_or_buffer"])
    if archive is None:
        wrapped(*args, **kwargs)
    else:
        instance.file_like = archive
