"""A process of `ttprun` that works with an object store, and ends with `ttprun`.

    python .../store_main.py probe URL ENDPOINT             whether the store takes an object
    python .../store_main.py pull URL ENDPOINT SAVE STEP NODE    download a checkpoint; STEP: null: newest;
                                                            NODE: null, or the ranks of the node
    python .../store_main.py data ENDPOINT URL FOLDER ...       download the data of a job (TTP_PULL)
    python .../store_main.py send                           the checkpoints of the job, until its end
    python .../store_main.py outputs                        other files (TTP_STORE_ALSO), until the end

Stdin is a pipe from `ttprun`: its end means the end of `ttprun`. `send` and `outputs` read their order from
stdin, and the remaining time at the end of the job. `pull` prints the step, or null without a checkpoint.
Errors are printed with exit code 2. The program is started by its path, as `worker_main.py` is.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from adaptor import _script

if TYPE_CHECKING:
    from types import FrameType

# Training goes first: for the processor, and where the memory of the machine ends.
_NICE = 10
_FIRST_TO_BE_ENDED = "1000"
# The most seconds of a download after the end of ttprun, if its disk hangs.
_LEAVING_S = 10.0
# The time for the last line after the time limit.
_TELLING_S = 2.0


def main() -> None:
    """Run the command of the arguments (see above)."""
    _script.leave_own_path()
    import os
    import signal
    import traceback

    from adaptor.errors import AdaptorError
    from adaptor.protocol.environment import ending_signals
    from adaptor.text import shown

    # A signal to all processes of a job, as from Slurm, is for ttprun, which saves first; the save is sent.
    for number in (signal.SIGHUP, *ending_signals()):
        signal.signal(number, signal.SIG_IGN)
    task_name, *arguments = sys.argv[1:]
    try:
        if task_name == "probe":
            _probe(*arguments)
        elif task_name == "pull":
            _pull(*arguments)
        elif task_name == "data":
            _data(*arguments)
        else:
            _send(task_name)
    except AdaptorError as error:
        print(shown(str(error)))
        sys.stdout.flush()
        os._exit(2)  # a request may be in progress
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the interpreter's end would wait for the reader of stdin, and abort


def _probe(url: str, endpoint: str) -> None:
    from adaptor import output
    from adaptor.store import client
    from adaptor.text import shown

    _end_with_ttprun()
    client.probe(url, endpoint, lambda line: output.tell(shown(f"[ttp] {line}")))
    output.finish()


def _pull(url: str, endpoint: str, save: str, step: str, node: str) -> None:
    import json
    import os
    from pathlib import Path

    import msgspec

    from adaptor import output
    from adaptor.store import pull
    from adaptor.store.client import open_waiting
    from adaptor.store.pull import NodeRanks
    from adaptor.text import shown, size

    _end_with_ttprun()
    store = open_waiting(url, endpoint, lambda line: output.tell(shown(f"[ttp] {line}")))
    ranks = msgspec.json.decode(node, type=NodeRanks | None)
    pulled = pull.resume(store, Path(save), json.loads(step), ranks)
    for problem in pulled.problems if pulled is not None else ():
        output.tell(f"[ttp] damaged, so an older checkpoint is taken: {shown(problem)}")
    if pulled is None:
        output.tell(f"[ttp] {store} has no checkpoint, and {save} has none: training begins anew")
    elif pulled.there:
        later_note = f"; step {pulled.untracked} is in both, but the tracker there names step {pulled.step}"
        tracker_note = "" if pulled.untracked is None else f"{later_note}, as after going back by hand"
        output.tell(f"[ttp] step {pulled.step} is in {save}, nothing is pulled from {store}{tracker_note}")
    else:
        size_text = (
            size(pulled.bytes) if pulled.whole else f"{size(pulled.bytes)}, what the ranks of this node load"
        )
        output.tell(f"[ttp] step {pulled.step} has come from {store} to {save} ({size_text})")
    output.finish()
    print(json.dumps(pulled.step if pulled is not None else None))
    sys.stdout.flush()
    os._exit(0)


def _data(endpoint: str, *pairs: str) -> None:
    """Download the objects below each URL to its folder; progress goes to stderr."""
    import os
    import signal
    import threading
    from pathlib import Path

    from adaptor import output
    from adaptor.store import data_pull
    from adaptor.store.client import open_waiting
    from adaptor.text import shown

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(1)  # removes the incomplete file

    def tell(line: str) -> None:
        output.tell(shown(line))

    def hear() -> None:
        while os.read(0, 4096):
            pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        threading.Event().wait(_LEAVING_S)
        os._exit(1)

    signal.signal(signal.SIGUSR1, leave)
    threading.Thread(target=hear, name="ttp-hear", daemon=True).start()
    try:
        pulls = [
            (open_waiting(url, endpoint, lambda line: tell(f"[ttp] {line}")), Path(folder))
            for url, folder in zip(pairs[::2], pairs[1::2], strict=True)
        ]
        data_pull.bring(pulls, tell)
    except SystemExit:
        os._exit(1)
    finally:
        output.finish()
    os._exit(0)


def _end_with_ttprun() -> None:
    import os
    import threading

    def hear() -> None:
        # Without Python's buffer, whose lock must not be held at the end of the interpreter.
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=hear, name="ttp-hear", daemon=True).start()


def _send(task_name: str) -> None:
    import contextlib
    import os
    import threading
    from pathlib import Path

    import msgspec

    from adaptor import output
    from adaptor.store.outputs import OutputUploader
    from adaptor.store.settings import End, OutputSettings, UploadSettings
    from adaptor.store.uploader import Uploader

    with contextlib.suppress(OSError):
        os.nice(_NICE)
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_BE_ENDED)
    text, tell = sys.stdin.buffer.readline(), lambda line: output.tell(line, to="stdout")
    sending: Uploader | OutputUploader
    if task_name == "outputs":
        sending = OutputUploader(msgspec.json.decode(text, type=OutputSettings), tell)
    else:
        sending = Uploader(msgspec.json.decode(text, type=UploadSettings), tell)

    def leave(reason: str) -> None:
        try:
            # In a thread that nobody waits for: the disk of the save folder may hang.
            telling = threading.Thread(target=sending.tell_what_is_local, args=(reason,), daemon=True)
            telling.start()
            telling.join(_TELLING_S)
            output.finish()
        finally:
            os._exit(0)  # a request may be in progress

    def hear() -> None:
        text = sys.stdin.buffer.readline()
        if text:
            within_s = msgspec.json.decode(text, type=End).within_s
            sending.end()
            if within_s is not None:
                timer = threading.Timer(within_s, leave, ("TTP_GRACE is over",))
                timer.daemon = True
                timer.start()
            sys.stdin.buffer.read()
        leave("ttprun has ended")

    threading.Thread(target=hear, name="ttp-hear", daemon=True).start()
    sending.run()
    output.finish()
    os._exit(0)


if __name__ == "__main__":
    main()
