"""The states of a script's own data loaders (--dataloader-save): a file for each data-parallel rank.

The framework writes these files into a folder of their own. All ranks of a data-parallel group exchange the
states at the door, so that no death loses a state.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adaptor.checkpoint import disk
from adaptor.errors import CheckpointError
from adaptor.replica.group import gather_values


class LoaderStates:
    """The states of the loaders of a data-parallel group; empty without arguments.

    Args:
        name: of this rank's file below the folder of a step.
        save_state: returns the state of this rank's loader.
        group: the data-parallel group; all its ranks make this object together.
    """

    def __init__(
        self,
        name: str = "",
        save_state: Callable[[], Any] = lambda: None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._name = name
        self._save_state = save_state
        self._group = group
        self._own: Any = None
        self._files: Mapping[str, bytes] = {}
        self.exchange()

    def take(self) -> Mapping[str, bytes]:
        """Return the files of the last exchange: loaders give no data between the door and the next step."""
        return self._files

    def exchange(self) -> Mapping[str, bytes]:
        """Exchange the states with the group: collective, on the main thread."""
        if self._group is not None:
            self._own = self._save_state()
            own_files = {} if self._own is None else {self._name: _encoded(self._own)}
            self._files = {
                name: file for files in gather_values(own_files, self._group) for name, file in files.items()
            }
        return self._files

    def own(self) -> Any:
        """Return the state of this rank's loader at the end of the step, also while data are replayed."""
        return self._own

    def put_back(self, files: Mapping[str, bytes]) -> None:
        """Put the states of a step in the place of the last exchange."""
        self._files = files
        if self._name in files:
            content = io.BytesIO(files[self._name])
            self._own = torch.load(content, weights_only=False)["dataloader_state_dict"]


def _encoded(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save({"dataloader_state_dict": state}, file)
    return file.getvalue()


def write(root: str, step: int, files: Mapping[str, bytes]) -> None:
    """Write the files of a step to the framework's folder.

    Args:
        root: the folder of --dataloader-save.
        step: of the checkpoint.
        files: by name.

    Raises:
        CheckpointError: a file cannot be written.
    """
    for name, content in files.items():
        path = Path(root) / f"iter_{step:07d}" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            disk.replace(path.parent, path.name, content)
        except OSError as error:
            raise CheckpointError(f"{path} (--dataloader-save): {error.strerror or error}") from error
