"""The handlers that a script registers, and their arguments, in both forms of the interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from adaptor import output, text
from adaptor.protocol.messages import GroupOrder


@dataclass(frozen=True)
class Handler:
    """A function of the script, and the context for its calls."""

    func: Callable[..., Any]
    ctx: Any = None


@dataclass
class Handlers:
    """The script's callbacks. The main thread rebinds attributes; dump threads only read them.

    Attributes:
        older: the save handler has the older form, `f(save_rank, step, rank_list, args)`
        args: the last value of ttp_set_ckpt_args or tft_set_step_args
    """

    save: Handler | None = None
    rename: Handler | None = None
    exit: Handler | None = None
    stop: Handler | None = None
    clean: Handler | None = None
    older: bool = False
    args: Any = None

    def save_at(self, step: int, orders: Sequence[tuple[int, GroupOrder]]) -> None:
        """Let the script save its part of `step`.

        Args:
            step: the step.
            orders: for each optimizer with a shard of this rank: its kind, and the holders.
        """
        assert self.save is not None
        chosen = [(kind, list(dict.fromkeys(order.holders))) for kind, order in sorted(orders, key=_kind)]
        if self.older:
            ((_, ranks),) = chosen
            self.save.func(ranks[0], step, ranks, self._args_of(step))
        else:
            infos = [{"type": kind, "ranks": ranks} for kind, ranks in chosen]
            self.save.func(step, infos, self.args, self.save.ctx)

    def name(self, step: int) -> None:
        """Let the script name the checkpoint. Raises the handler's exception, or for its failure code."""
        if self.rename is None:
            return
        if not self.older:
            self.rename.func(step, self.args)
            return
        code = self.rename.func(self._args_of(step))
        if code not in (0, None):
            raise RuntimeError(f"the rename handler has returned {code!r}")

    def stop_device(self) -> None:
        """Let the script stop its device, if it has registered a stop handler."""
        if self.stop is not None:
            self.stop.func(self.args, self.stop.ctx)

    def restart_device(self) -> None:
        """Let the script clean and restart its device, if it has registered a clean handler."""
        if self.clean is not None:
            self.clean.func(False, self.args, self.clean.ctx)

    def leave(self) -> None:
        """Call the exit handler before the process ends. An exception does not stop the end."""
        if self.exit is None:
            return
        try:
            self.exit.func(self.exit.ctx)
        except (Exception, SystemExit) as error:
            output.tell(f"[ttp] the exit handler has raised {text.describe(error)}", to="stdout")

    def _args_of(self, step: int) -> Any:
        """Return the arguments for a handler of `step`.

        In the older form the first argument is the iteration, from which alone the rename handler knows the
        step. After a passed update the iteration is the step before.
        """
        if isinstance(self.args, tuple | list) and self.args and type(self.args[0]) is int:
            return type(self.args)((step, *self.args[1:]))
        return self.args


def _kind(item: tuple[int, GroupOrder]) -> int:
    return item[0]
