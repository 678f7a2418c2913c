"""Reads tensors from files that were just checked: mapped from the memory of the node, not read once more.

The check before a resume has read each byte of a checkpoint, so the files are in the page cache. `torch.load`
would copy them from there into new memory, and the framework copies them from that to where they belong. Here
the storages are the pages themselves, and the framework's copy is the only one.

The pages are private: what is written to such a tensor never comes to the file. Small storages are read as
ever, for a framework may keep those (random states) for as long as it runs, and with them the file.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from adaptor import context
from adaptor.checkpoint.divided_reading import CheckedFiles

_SMALL = 1 << 20  # of a storage that is not mapped, in bytes


class _MappedArchive(torch._C.PyTorchFileReader):
    """An archive of torch whose large storages are mapped."""

    def __init__(self, file: Any, whole_storage: torch.UntypedStorage, begin: int) -> None:
        """Open it.

        Args:
            file: where it is read.
            whole_storage: the file in which it stands, mapped.
            begin: the place of its first byte there.
        """
        super().__init__(file)
        self._whole, self._begin = whole_storage, begin

    def get_storage_from_record(self, name: str, size: int, kind: Any) -> torch.Tensor:
        """Return the storage of a record, in a tensor, as the archive of torch does.

        In the format `torch_dist` it begins at any byte of its file. That does no harm: the tensor is only
        copied from, which torch does from anywhere (it has always mapped safetensors so).
        """
        first = self._begin + self.get_record_offset(name)  # type: ignore[attr-defined]
        if size < _SMALL or first + size > self._whole.nbytes():
            return super().get_storage_from_record(name, size, kind)
        return torch.empty(0, dtype=torch.uint8).set_(self._whole[first : first + size])


def archive(file: Any) -> torch._C.PyTorchFileReader | None:
    """Return an archive of torch with mapped storages; None where `file` is not one that was checked.

    Args:
        file: what `torch.load` reads from: an open file, or a part of one (`torch.distributed.checkpoint`).
    """
    whole_file, begin = getattr(file, "base_stream", file), getattr(file, "offset", 0)
    name = getattr(whole_file, "name", None)
    if not isinstance(name, str) or name not in context.part(CheckedFiles):
        return None
    descriptor = whole_file.fileno()
    try:
        # By the descriptor: it is the file that is open, whatever its name means by now.
        path, size = f"/proc/self/fd/{descriptor}", os.fstat(descriptor).st_size
        whole_storage: Any = torch.UntypedStorage.from_file(path, False, size)
    except RuntimeError:  # a file system that maps nothing
        return None
    return _MappedArchive(file, whole_storage, begin)
