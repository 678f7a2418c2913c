"""Makes the target of a transform: by rules for parallel sizes, or as a layout file describes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from adaptor.checkpoint import layout_file
from adaptor.errors import AdaptorError, UnsupportedError
from adaptor.protocol import naming
from adaptor.transform import described
from adaptor.transform.sizes import Sizes
from adaptor.transform.source import SourceCheckpoint
from adaptor.transform.target import TargetCheckpoint, rows_for

# The first version of Megatron-core that loads the format `torch_dist` as it is written.
_NUMBERED = (0, 14)


def by_rules(
    source: SourceCheckpoint, sizes: Sizes, format: str, vocabulary: int | None = None
) -> TargetCheckpoint:
    """Return the target of these sizes.

    Args:
        source: the checkpoint that is transformed.
        sizes: of the target.
        format: of the target, torch or torch_dist.
        vocabulary: the rows of the vocabulary without padding, where the user says it.

    Raises:
        UnsupportedError: a size does not divide the model, or is not supported.
    """
    source.model.require_divisible(sizes)
    if source.model.experts and sizes.ep == 1 and source.layout is None:
        raise UnsupportedError(
            "--ep 1: a model with experts is transformed with --ep from 2 on only where SRC has no"
            f" {naming.LAYOUT}"
        )
    if source.model.experts and sizes.tp > 1 and source.layout is None:
        raise UnsupportedError(
            f"--tp {sizes.tp}: a model with experts is transformed with --tp 1 only where SRC has no"
            f" {naming.LAYOUT}"
        )
    return TargetCheckpoint(source, sizes, rows_for(source, sizes, vocabulary), format=format)


def described_by(
    source: SourceCheckpoint, path: Path, requested_sizes: Mapping[str, int | None], format: str
) -> TargetCheckpoint:
    """Return the target that a layout file describes.

    Args:
        source: the checkpoint that is transformed.
        path: of the layout file.
        requested_sizes: the sizes that the user has given, None where there is none; they have to be those of
        the file.
        format: of the target, torch or torch_dist.

    Raises:
        UnsupportedError: the file is of another model, other sizes or an older version of the framework.
    """
    layout = layout_file.read(path)
    try:
        sizes = described.sizes_of(layout)
    except AdaptorError as error:
        raise type(error)(f"--layout {path}: {error}") from error
    for name, value in requested_sizes.items():
        if value is not None and value != (sizes.expert_tensor if name == "etp" else getattr(sizes, name)):
            raise UnsupportedError(f"--{name} {value}: --layout {path} is of {sizes} DP{sizes.dp}")
    require_loaded_by(layout.ranks[0].core, format, f"--format {format}: --layout {path}")
    rows = layout.ranks[0].args.get("padded_vocab_size")
    least = getattr(source.args, "vocab_size", None) or 1
    if type(rows) is not int or rows < least:
        raise UnsupportedError(
            f"--layout {path}: is of a vocabulary of {rows} rows with padding; the checkpoint has"
            f" {least} without"
        )
    return TargetCheckpoint(source, sizes, rows, layout, format)


def require_loaded_by(core: str, format: str, subject: str) -> None:
    """Refuse a format that a version of Megatron-core does not load in the form that is written.

    Args:
        core: the version.
        format: torch or torch_dist.
        subject: the beginning of the message.

    Raises:
        UnsupportedError: it does not.
    """
    if format != "torch" and _version(core) < _NUMBERED:
        raise UnsupportedError(
            f"{subject} is of Megatron-core {core}, which does not"
            " load it in the form that is written, that of 0.14; give --format torch"
        )


def _version(text: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version; the form of a newer one where there are none."""
    match = re.match(r"(\d{1,6})\.(\d{1,6})", text)
    return tuple(map(int, match.groups())) if match else _NUMBERED
