"""Makes the framework's regular saves (`--save-interval`) atomic.

Each thread may be in a save; others go on in background processes. The framework writes into a temporary
folder; when the framework comes to write its tracker, the folder gets its final name first.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptor import context, descriptors
from adaptor.checkpoint import disk, left_overs, regular_folder, save_folder_claim, tracker
from adaptor.context import Context
from adaptor.errors import CheckpointError
from adaptor.frameworks.failed_saves import FailedSaves, SaveAgreement, SaveFailedError
from adaptor.protocol import naming
from adaptor.protocol.environment import Generation, WorkerPlace
from adaptor.worker import runtime

if TYPE_CHECKING:
    from adaptor.verification.save_check import SaveCheck

# Megatron's names, since 0.7, of what runs at the end of an asynchronous save, on one rank each: the first
# writes the tracker.
_WRITES_TRACKER = "iter_finalize_fn"
_Sums = Callable[[], Mapping[str, str]]
_OF_ONE_RANK = (_WRITES_TRACKER, "onelogger_finalize_fn", "wandb_finalize_fn")


@dataclass
class _Save:
    root: Path
    step: int
    asynchronous: bool
    may_fail: bool = False  # without an end of the job, during training
    agreement: SaveAgreement | None = None  # None: errors are raised
    is_pending: bool = False  # a background process writes, and the ranks compare when that has ended
    # The descriptor of the framework's tracker, a file in memory, on the rank that writes the tracker.
    draft: int | None = None
    check: SaveCheck | None = None  # None: no sums of the state in memory were taken
    put_off: list[Callable[[], Any]] = field(default_factory=list)  # until the save has its name
    # This process has given the save its name. Megatron-LM writes the tokenizer's files afterwards.
    has_name: bool = False

    @property
    def folder(self) -> Path:
        """Return the folder of the writes."""
        return self.root / naming.regular_name(self.step, _generation())

    def name(self, path: str | os.PathLike[str]) -> str | None:
        """Return the name of a file in the folder, None where it is elsewhere."""
        try:
            return Path(path).relative_to(self.folder).as_posix()
        except ValueError:
            return None

    def noting(self) -> contextlib.AbstractContextManager[None]:
        """Note an error of the block if the ranks agree on this save; else the error is raised."""
        return contextlib.nullcontext() if self.agreement is None else self.agreement.noting()

    def meet(self) -> None:
        """Compare with all ranks. Raises SaveFailedError, on all of them: a rank has noted an error."""
        if self.agreement is not None:
            self.agreement.meet()

    def drop_draft(self) -> None:
        """The framework is done with its tracker."""
        if self.draft is not None:
            os.close(self.draft)
            self.draft = None

    def end(self) -> None:
        """Run the actions that were deferred until the checkpoint has its name."""
        while self.put_off:
            self.put_off.pop(0)()


class _OfThread(threading.local):
    """The save of this thread: a script may save in several threads."""

    save: _Save | None = None


class RegularSaves:
    """The regular saves of this process, a part of its context."""

    def __init__(self, context: Context) -> None:
        # Files of the adaptor's own in every save, by name; where the disk refuses one, the save goes on.
        self.on_top: Mapping[str, bytes] = {}
        self.newest = -1  # the newest step that this process has seen saved
        self._running = _OfThread()
        # Asynchronous saves that background processes still write.
        self._in_background: list[_Save] = []

    def _current(self) -> _Save | None:
        """Return the save of this thread; a dump runs beside the main thread, and is no regular save."""
        return self._running.save

    @contextlib.contextmanager
    def regular(
        self,
        root: str,
        step: int,
        asynchronous: bool = False,
        may_fail: bool = False,
        agree: Callable[[int], SaveCheck | None] = lambda step: None,
    ) -> Iterator[None]:
        """While the framework saves `step` below `root`.

        Args:
            asynchronous: the framework goes on writing in the background after the block (`scheduled`).
            may_fail: the barriers of the save are `barrier`, so that the ranks can agree on a failure.
            agree: takes the sums of the state in memory; an error comes on all ranks, or on none.

        Raises:
            SaveFailedError: the save has failed on some rank; on all ranks.
        """
        save = _Save(Path(root), step, asynchronous, may_fail)
        if may_fail:
            save.agreement = context.part(FailedSaves).agreement(save.folder)
        try:
            with save.noting():
                save.check = agree(step)
                regular_folder.prepare_regular(save.root, step, _generation())
            save.meet()
            save_before, self._running.save = self._running.save, save
            try:
                yield
            finally:
                self._running.save = save_before
                if save not in self._in_background:
                    save.drop_draft()
            if not asynchronous:
                with save.noting():
                    self._name_here(save)
                save.meet()
                self._end(save)
        except SaveFailedError as error:
            self._give_up(save, error)
            raise

    def _end(self, save: _Save) -> None:
        """Note that the save is complete on all ranks, and run the deferred actions."""
        self.newest = max(self.newest, save.step)
        if save.agreement is not None:
            context.part(FailedSaves).succeed(save.step)
        elif save.may_fail:
            context.part(FailedSaves).succeed_after_training(save.step)
        save.end()

    def _give_up(self, save: _Save, error: SaveFailedError) -> None:
        """Remove what was written, on each disk once, after all ranks have left the save."""
        save.put_off.clear()
        if save in self._in_background:
            self._in_background.remove(save)
        save.drop_draft()
        if not save.asynchronous:  # whose results were taken before
            from adaptor.frameworks import megatron_settle  # torch, which is for the script to import

            megatron_settle.forget_results_of_writers()
        place = context.part(WorkerPlace)
        unfinished = ""
        if runtime.get().rank == 0 or (
            place.node and not place.local_rank and not save_folder_claim.is_folder_shared(save.root)
        ):
            remains = [save.folder]
            with contextlib.suppress(OSError, CheckpointError):
                remains = left_overs.abandon(save.folder)
            if not left_overs.remove_beside(remains, disk.remove, left_overs.REMOVAL_WAIT_S):
                remains = []  # they are still being removed
            unfinished = " and ".join(str(path) for path in remains if os.path.lexists(path))
        context.part(FailedSaves).fail(save.step, str(error), unfinished)

    @property
    def notes_errors(self) -> bool:
        """Return whether the ranks agree on the save of this thread; else errors of the save are raised."""
        save = self._current()
        return save is not None and save.agreement is not None

    def noting(self) -> contextlib.AbstractContextManager[None]:
        """Note an error of the block in the save of this thread, if the ranks agree on that save."""
        save = self._current()
        return contextlib.nullcontext() if save is None else save.noting()

    def barrier(self, wait: Callable[[], Any]) -> Any:
        """Wait at a barrier of all ranks; in a save the ranks learn at the barrier whether the save has
        failed.

        Raises:
            SaveFailedError: the save of this thread has failed on some rank; on all ranks.
        """
        save = self._current()
        if save is not None and not save.is_pending:
            save.meet()
        return wait()

    def finalize(self, finalize: Callable[[], Any]) -> Any:
        """Call `finalize`, which ends asynchronous saves; repeat the call after each failed save."""
        while True:
            try:
                return finalize()
            except SaveFailedError as error:
                save, self._running.save = self._running.save, None
                assert save is not None
                self._give_up(save, error)

    def renamed(self, path: str) -> str:
        """Return the path below the folder of the running save, until that save has its name."""
        save = self._current()
        if save is None or save.has_name:
            return path
        try:
            relative_path = Path(path).relative_to(save.root / naming.final_name(save.step))
        except ValueError:
            return path
        return str(save.folder / relative_path)

    def written(self, open_archive: Callable[[Any], Any], file: Any) -> Any:
        """Return the writer of an archive of torch; an archive of the running save is hashed during the
        write.

        Args:
            open_archive: takes a path or a file, and returns a context manager.
            file: the argument of `torch.save`.
        """
        save = self._current()
        if save is None:
            return open_archive(file)
        name = save.name(file) if isinstance(file, str | os.PathLike) else None
        archive = (
            open_archive(file)
            if name is None
            else regular_folder.hashed_archive(open_archive, save.folder, name)
        )
        return _written_or_noted(save, archive, open_archive)

    def hashing(self, path: str | os.PathLike[str], results: Any, sums: _Sums = dict) -> Any:
        """Return a queue in which a writer of the framework reports each written file, already hashed.

        Args:
            results: the framework's queue.
            sums: returns the sums of the tensors in the file (`regular_folder.leave_note`).
        """
        is_regular = naming.is_regular(Path(path).parent.name, _generation())
        return _Hashing(Path(path), results, sums) if is_regular else results

    def check_in(self, folder: Path | None = None) -> SaveCheck | None:
        """Return the check of this thread's save, or of the save in `folder`."""
        saves = [self._current()] if folder is None else [self._current(), *self._in_background]
        return next((save.check for save in saves if save and folder in (None, save.folder)), None)

    def tracker(self, path: str) -> str:
        """Return the path for the tracker of the running save: no real file, because this module writes the
        tracker.

        Every rank has written. Rank 0, which should write the tracker, gives the folder its name and replaces
        the tracker. Later writes of the framework go to a file in memory, which holds the old step, 0 without
        an old step, because the framework reads the file, too. Other ranks ask for the name in passing.

        With `--save-retain-interval` the framework removes the checkpoint of the step read from the tracker.
        So the file of an asynchronous save holds 0 until the new checkpoint has its name (`scheduled`).
        """
        save = self._current()
        if save is None or runtime.get().rank != 0:
            return path
        if save.draft is None:
            old = 0 if save.asynchronous else self._complete_or_agree(save)
            save.draft = _draft()
            os.write(save.draft, str(old).encode())
        return f"/proc/{os.getpid()}/fd/{save.draft}"

    def _name_here(self, save: _Save) -> None:
        """Give a save its name on the disk of this node, too, unless the disk is rank 0's.

        The framework has let all ranks wait for rank 0, so in a shared folder the save has its name already.
        """
        place = context.part(WorkerPlace)
        if (
            place.node == 0
            or place.local_rank
            or not _generation()
            or save_folder_claim.is_folder_shared(save.root)
        ):
            return
        taken = None
        with contextlib.suppress(CheckpointError):  # nobody can tell, as on a shared disk with troubles
            taken = regular_folder.take_on_own_disk(save.root, save.step, _generation())
        if taken is not None:
            self._complete(save, taken)

    def _complete_or_agree(self, save: _Save) -> int:
        """Do `_complete`; after a failure, leave the save together with all other ranks, which wait for rank
        0.

        Raises:
            SaveFailedError: the save has failed.
        """
        old = 0
        with save.noting():
            old = self._complete(save)
        if save.agreement is not None and save.agreement.error:
            save.meet()
        return old

    def _complete(self, save: _Save, taken: Path | None = None) -> int:
        """Bring a save, written by every rank, to disk and give the save its name.

        Args:
            taken: the current folder, if not the folder of the writes.

        Returns:
            The step named by the tracker before, 0 without one.
        """
        folder = taken or save.folder
        for name, content in self.on_top.items():
            with contextlib.suppress(OSError):
                regular_folder.write_and_leave(folder, name, content)
        regular_folder.sync_regular(save.root, save.step, _generation(), taken)
        old = tracker.tracked_step(save.root) or 0
        runtime.get().session.publishing(lambda: _publish(save, taken))
        save.has_name = True
        return old

    def scheduled(self, request: Any, meet: Callable[[], Any] = lambda: None) -> None:
        """The framework defers its last actions until every rank has written: so the name is put off, too.

        The name comes before the framework writes its tracker and removes the checkpoint before this one:
        otherwise a job that dies in between would have lost both.

        Args:
            request: Megatron's AsyncRequest, with the deferred functions.
            meet: returns when every rank has called the function; may return at once if no rank depends on
                the name.
        """
        save = self._current()
        if save is None:
            return
        self._in_background.append(save)
        save.is_pending = True

        def begin() -> None:
            save.is_pending, self._running.save = False, save

        def name() -> None:
            save.meet()  # every rank has written
            if save.draft is not None:
                old = self._complete_or_agree(save)
                os.pwrite(save.draft, str(old).encode(), 0)

        def end() -> None:
            save.meet()
            self._running.save = None
            self._in_background.remove(save)
            save.drop_draft()
            meet()
            self._end(save)

        names = [getattr(function, "__name__", "") for function in request.finalize_fns]
        # Without such a function, the framework reads the 0, and removes nothing.
        of_one_rank = [place for place, function in enumerate(names) if function in _OF_ONE_RANK]
        request.finalize_fns.insert(of_one_rank[0] if of_one_rank else len(names), name)
        if save.agreement is not None:
            request.finalize_fns.insert(0, begin)
        request.add_finalize_fn(end)

    def abandon(self) -> None:
        """Forget the saves in background processes: the caller ends these processes.

        Also forget the failed saves: a new process does not know them.
        """
        self._running.save = None
        context.part(FailedSaves).forget()
        while self._in_background:
            self._in_background.pop().drop_draft()

    def tell(self, path: str, tracker: str, listener: Callable[[str, str], Any]) -> None:
        """Report `path` in the folder of a save, and the save's `tracker`, to `listener` when both have
        names.

        The rank of the call may differ from the rank that names the folder: the end of a save that the
        framework goes on with is after a barrier.
        """
        for save in (*filter(None, [self._current()]), *self._in_background):
            with contextlib.suppress(ValueError):
                relative_path = Path(path).relative_to(save.folder)
                named = (save.root / naming.final_name(save.step) / relative_path, save.root / naming.TRACKER)
                save.put_off.append(partial(listener, *map(str, named)))
                return
        listener(path, tracker)


@dataclass(frozen=True)
class _Hashing:
    """A queue: items put into the queue are passed on when the written file has its checksum."""

    path: Path
    results: Any
    sums: _Sums

    def put(self, result: Any) -> None:
        """Hash the file, and put the result into the framework's queue."""
        regular_folder.hash_and_leave(self.path.parent, self.path, self.sums())
        self.results.put(result)


class _Discarding:
    """A file without content: receives the rest of a save that has failed on this rank."""

    def write(self, data: Any) -> int:
        return len(data)

    def flush(self) -> None:
        pass


@contextlib.contextmanager
def _written_or_noted(save: _Save, archive: Any, open_archive: Callable[[Any], Any]) -> Iterator[Any]:
    """Write the `archive` in `save`; an error of the file, or of the data written to the file, is noted."""
    is_open = False
    with save.noting(), archive as opened:
        is_open = True
        yield opened
    if not is_open:
        with open_archive(_Discarding()) as opened:
            yield opened


def _draft() -> int:
    """Return the descriptor of a file without a name; the system may refuse one in memory."""
    with contextlib.suppress(OSError):
        return descriptors.in_memory("ttp-tracker")
    descriptor, path = tempfile.mkstemp("-ttp-tracker")
    Path(path).unlink()
    return descriptor


def _publish(save: _Save, taken: Path | None) -> None:
    state = None if save.check is None else save.check.manifest_state
    regular_folder.publish_regular(save.root, save.step, _generation(), taken, state)
    tracker.advance(save.root, save.step)


def _generation() -> str:
    return context.part(Generation).name
