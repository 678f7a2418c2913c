"""The hooks of optional parts and plug-ins in a job: base classes whose methods do nothing.

The core calls the hooks of all parts, one after the other, in the order of `adaptor.plug_ins.OPTIONAL_PARTS`;
plug-ins come last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from adaptor import context, plug_ins
from adaptor.config import Config
from adaptor.context import Context

if TYPE_CHECKING:
    import argparse

    from torch.distributed import Store

    from adaptor.protocol.records import Notice


class AgentHooks:
    """The hooks of a part in one `ttprun`.

    The methods are called in the order below. A ConfigError or StartError of `require`, `check` or `prepare`
    refuses the job.
    """

    def __init__(self, settings: Config) -> None:
        self.settings = settings

    def ttp_command(self, parsed: argparse.Namespace) -> list[str]:
        """Return the arguments of the `ttp` command to run here in place of a job; empty for a job.

        Args:
            parsed: the arguments of ttprun.
        """
        return []

    def require(self) -> None:
        """Refuse settings that make no sense, also with ENABLE_TTP=False; nothing is written."""

    def check(self, parsed: argparse.Namespace, engine: str) -> None:
        """Refuse a job that cannot be run with the settings; nothing is written.

        Args:
            parsed: the arguments of ttprun; a hook may change the arguments of the script.
            engine: the engine that has no agent of the adaptor (TTP_ENGINE); "" for the adaptor's own.
        """

    def prepare(self) -> int:
        """Prepare this node, also with ENABLE_TTP=False; return 0, or the code with which ttprun ends."""
        return 0

    def before_workers(
        self, node: int, nodes: int, store: Store, ranks: Sequence[int], world_size: int
    ) -> None:
        """Prepare a start of all workers; not called on a spare node that takes a place during training.

        Args:
            store: has keys of this generation alone.
            ranks: of this node.
        """

    def begins(self, node: int, nodes: int) -> None:
        """Note that a generation begins, and that this node is number `node` of `nodes`."""

    def has_controller(self, folder: Path, *, took_over: bool) -> None:
        """Note that this node has the controller, and writes the files of the job to `folder`.

        Args:
            took_over: whether the controller has moved to this node during training; then the method is
                called repeatedly, on the control thread: never wait, nor raise.
        """

    def saves_to(self, folder: Path) -> None:
        """Note the save folder of workers of this node; called repeatedly, on the control thread."""

    def notify(self, make: Callable[[], Notice]) -> None:
        """Deliver the notice that `make` returns, of an incident or its end; call `make` in another thread.

        On the control thread: never wait.
        """

    def leave(self, grace_s: float) -> None:
        """Note that ttprun was told to end, and ends within `grace_s` seconds."""

    def close(self) -> None:
        """End the threads and processes of the part; the files of the job are complete."""


class WorkerHooks:
    """The hooks of a part in one worker, on the thread that trains; importing them imports no torch.

    The hooks are created before the process has a rank.

    Attributes:
        interface: the name of another system whose interface the part provides; "" without one
    """

    interface = ""

    def __init__(self, context: Context) -> None:
        self.settings = context.settings

    @property
    def is_wanted(self) -> bool:
        """Return whether a setting asks for the interface, in place of patches of the framework."""
        return False

    def provide(self) -> None:
        """Let the script import the interface. Raises ConfigError."""

    def withdraw(self) -> None:
        """Undo `provide`."""

    def checks(self, args: Any, *, begins: bool) -> Iterator[Callable[[], None]]:
        """Return the checks of a job of Megatron-LM; each raises an AdaptorError.

        Args:
            args: of the framework, parsed.
            begins: whether training begins, after a checkpoint may have changed the arguments.
        """
        yield from ()

    def require_other_loop(self, world_size: int, args: Any = None) -> None:
        """Refuse settings that need Megatron-LM's training loop or `load_checkpoint`, in a job without them.

        Args:
            world_size: the number of ranks.
            args: of a framework; None for a loop of a user.

        Raises:
            UnsupportedError: names the setting.
            ConfigError: a setting makes no sense for the job.
        """

    def resize(self, args: Any) -> None:
        """Set other parallel sizes in the arguments of Megatron-LM, because the model does not fit the ranks.

        Args:
            args: of the framework, before it validates them; changed.

        Raises:
            UnsupportedError: there are no such sizes.
        """

    def advise_sizes(self, args: Any) -> str:
        """Return how the user starts the job in parallel sizes that fit the ranks; "" if it is not known."""
        return ""

    def before_load(self, args: Any) -> None:
        """Prepare the checkpoint that Megatron-LM is about to load; on all ranks.

        Raises:
            ResumeError: the checkpoint cannot be loaded; the same on all ranks.
        """

    def memory_of(self, optimizer: Any) -> Any:
        """Return the object to call around the updates of an optimizer of Megatron's chain; None: no object.

        Its methods `before_update` and `after_update` are called inside the update window.
        """
        return None

    def watch(self, models: Sequence[Any]) -> None:
        """Note that training begins.

        Args:
            models: the chunks of the model on this rank, unwrapped.
        """

    def begin_step(self, step: int) -> None:
        """Note the begin of `step`; an earlier step has ended, even without `end_step`."""

    def before_update(self) -> None:
        """Note that the gradients of the step are complete."""

    def end_step(self) -> None:
        """Note the end of the step, if one has begun."""

    def close(self) -> None:
        """Note that no further step comes in this process."""


def of_agent(settings: Config) -> list[AgentHooks]:
    """Make the hooks of all parts for one `ttprun`."""
    kinds = plug_ins.load_all(plug_ins.AGENT_HOOKS)
    return [cast("Callable[[Config], AgentHooks]", kind)(settings) for kind in kinds]


class _WorkerParts:
    """The hooks of this process, a part of its context."""

    def __init__(self, context: Context) -> None:
        kinds = plug_ins.load_all(plug_ins.WORKER_HOOKS)
        self.hooks = [cast("Callable[[Context], WorkerHooks]", kind)(context) for kind in kinds]


def of_worker() -> Sequence[WorkerHooks]:
    """Return the hooks of all parts in this worker."""
    return context.part(_WorkerParts).hooks


def each(hooks: Sequence[AgentHooks], act: Callable[[AgentHooks], None]) -> None:
    """Call `act` with each hook; an error is a line for the user, and ends nothing."""
    from adaptor import (  # with ENABLE_TTP=False it must not be imported: it registers a fork hook
        output,
        text,
    )

    for hook in hooks:
        try:
            act(hook)
        except Exception as error:
            output.tell(f"[ttp] {type(hook).__name__} has failed: {text.describe(error)}")
