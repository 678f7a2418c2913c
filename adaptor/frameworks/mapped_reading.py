"""Reads tensors from just-checked files: mapped from the memory of the node, not read once more.

The check before a resume has read each byte of a checkpoint, so the files are in the page cache. `torch.load`
would copy the data into new memory, and the framework would copy them once more to their place. Mapped
storages are the pages themselves, and the framework's copy is the only copy.

The pages are private: a write to a mapped tensor never reaches the file. Small storages are read normally,
because a framework may keep small storages (random states) for as long as it runs, and with them the file.
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
        """Open the archive.

        Args:
            whole_storage: the mapped file around the archive.
            begin: the offset of the archive's first byte in the mapped file.
        """
        super().__init__(file)
        self._whole, self._begin = whole_storage, begin

    def get_storage_from_record(self, name: str, size: int, kind: Any) -> torch.Tensor:
        """Return the storage of a record, in a tensor, as the archive of torch does.

        In the format `torch_dist` a storage begins at any byte of the file. The alignment does no harm: the
        tensor is only copied from, and torch copies from any address (as for safetensors, always mapped
        without alignment).
        """
        first = self._begin + self.get_record_offset(name)  # type: ignore[attr-defined]
        if size < _SMALL or first + size > self._whole.nbytes():
            return super().get_storage_from_record(name, size, kind)
        return torch.empty(0, dtype=torch.uint8).set_(self._whole[first : first + size])


def archive(file: Any) -> torch._C.PyTorchFileReader | None:
    """Return an archive of torch with mapped storages; None if `file` was not checked.

    Args:
        file: the input of `torch.load`: an open file, or a part of a file (`torch.distributed.checkpoint`).
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
