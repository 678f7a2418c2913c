"""`--local-copy-os`, the flag for which users of MindIO TTP know TTP_LOCAL_COPY, in a framework's parser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adaptor import context
from adaptor.errors import UnsupportedError


def accepts_local_copy(provider: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """The framework's parser accepts `--local-copy-os`, which is TTP_LOCAL_COPY to users of MindIO TTP."""

    def provide(parser: Any) -> Any:
        parser = parser if provider is None else provider(parser)
        parser.add_argument(
            "--local-copy-os",
            action="store_true",
            help="Copy the optimizer state before each update, in place of a barrier (TTP_LOCAL_COPY).",
        )
        return parser

    return provide


def take_local_copy(parsed: Any) -> None:
    """Take `--local-copy-os` out of the framework's own arguments, which the framework saves and loads again.

    Raises:
        UnsupportedError: the job has no shards, which MindIO TTP's option copies.
    """
    if not vars(parsed).pop("local_copy_os", False):
        return
    if not parsed.use_distributed_optimizer:
        raise UnsupportedError(
            "--local-copy-os is given without --use-distributed-optimizer: add --use-distributed-optimizer, "
            "or set TTP_LOCAL_COPY=True in its place, which copies a whole optimizer, too"
        )
    context.get().copy_locally()
