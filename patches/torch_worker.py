"""torch's functions in every worker: the rendezvous, `torch.save` and `torch.load`, barriers, data loaders.

Data written in a regular save is hashed on its way to the disk; data read for a check before a load is not
read again. `torch` and other modules have copies of the two functions, so the wrappers are around the
functions that open a file.
"""

from __future__ import annotations

import os
from typing import Any

from adaptor import context, patching
from adaptor.frameworks import state_comparison
from adaptor.frameworks.regular_save import RegularSaves
from adaptor.protocol.environment import Generation
from adaptor.worker import runtime

# The agent's store lives through a restart. Up to torch 2.3 clients of the store put the restart count
# before their keys; since then a restarted worker can read the address of a dead worker, and its group never
# connects.
#
# Other stores stay unchanged: a script may make a group with processes outside of the job, which do not know
# the prefix.

rendezvous = patching.Unit("rendezvous", framework="torch", tested=">=2.4,<3", group="worker")


@rendezvous.patch(
    "torch.distributed.rendezvous:_create_c10d_store",
    why="a restarted worker must not read the addresses of dead ones",
    accepts="(hostname, port, rank, world_size, timeout, use_libuv=)",
)
def each_start_has_keys_of_its_own(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from torch.distributed import PrefixStore

    store = wrapped(*args, **kwargs)
    port = args[1] if len(args) > 1 else kwargs["port"]
    if str(port) != os.environ.get("MASTER_PORT"):  # not by host: it has several names
        return store
    return PrefixStore(f"ttp/{context.part(Generation).name}", store)


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
    state_comparison.compare(args[0] if args else kwargs["obj"])
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
    from adaptor.checkpoint import archive_layout

    archive = archive_layout.mapped(args[0] if args else kwargs["name_or_buffer"])
    if archive is None:
        wrapped(*args, **kwargs)
    else:
        instance.file_like = archive


# Ends a spawned process when its parent ends: nobody else ends the children of a killed process. The
# finalizers remove the socket of a manager. A text, because a spawned process may not find the adaptor.
_ENDS_WITH_PARENT = """
import os, threading
from multiprocessing import parent_process, util

def end():
    parent_process().join()
    util._run_finalizers(0)
    os._exit(1)

threading.Thread(target=end, name="ttp-parent", daemon=True).start()
target(*args, **kwargs)
"""
processes = patching.Unit("processes", framework="torch", tested=">=2.4,<3", group="worker")


@processes.patch(
    "multiprocessing.popen_spawn_posix:Popen._launch",
    why="the manager of regular saves in torch_dist must not outlive a worker that dies with ttprun",
    accepts="(process_obj)",
    optional=True,  # without it, a manager stays behind where ttprun is killed
)
def spawned_processes_end_with_the_worker(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    process = args[0] if args else kwargs["process_obj"]
    if process._target is not None:  # otherwise of a class with a `run` of its own
        call = {"target": process._target, "args": process._args, "kwargs": process._kwargs}
        process._target, process._args, process._kwargs = exec, (_ENDS_WITH_PARENT, call), {}
    return wrapped(*args, **kwargs)


# Precedes the command of a resource tracker: ttprun ends all processes in the session of a dead worker. The
# tracker leads no session, since a ttprun that adopts orphans takes the status of no session leader. Its
# warning of leaked objects might follow the last line of ttprun.
_IN_ANOTHER_SESSION = """
import os, warnings
warnings.simplefilter("ignore")
if os.fork():
    os.wait()
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
"""


@processes.patch(
    "multiprocessing.util:spawnv_passfds",
    why="semaphores and shared memory of a killed worker are removed by its resource tracker",
    accepts="(path, args, passfds)",
    optional=True,  # without it, they stay if another process of the worker has them, too
)
def resource_trackers_outlive_the_worker(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    call = {**dict(zip(("path", "args", "passfds"), args, strict=False)), **kwargs}
    *interpreter, command = call["args"]
    if "resource_tracker import main" in os.fsdecode(command):  # of Python, or of joblib
        call["args"] = [*interpreter, _IN_ANOTHER_SESSION + os.fsdecode(command)]
    return wrapped(**call)


data = patching.Unit("data", framework="torch", tested=">=2.4,<3", group="worker")


@data.patch(
    "torch.utils.data.dataloader:_BaseDataLoaderIter.__next__",
    why="what a job spends on waiting for data stands in its goodput",
    optional=True,  # without it that time counts as that of steps
)
def waiting_for_data_is_counted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    worker = runtime.of_this_process()
    if worker is None or worker.pid != os.getpid():  # a process that was forked from a worker
        return wrapped()
    return worker.session.wait_for_data(wrapped)
