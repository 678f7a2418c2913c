"""Golden traces of the controller: its messages and its orders, as text.

A line that begins with `>` is a message to the controller, or lets time pass. The indented lines below it are
the controller's orders. The first line describes the job:

    > job nodes=2 shards=2 origin=0   two nodes with two ranks each; rank r holds shard r % 2 of group `g`
    > job ... copies=1                each rank keeps a local copy of the state before its update
    > job ... handlers=1              handlers of the script write and rename the checkpoint
    > job ... online=60               failed ranks are replaced (TTP_ONLINE)

Messages from workers and about them:

    > hello 3 pid=7                   hello of rank 3's process; its first process has the pid 1003
    > layout 3 other copies=1         layout of rank 3 with the fingerprint `other`
    > frozen 0 running 4              board of a frozen rank: running 4, ready 5, updating 5, broken 5, or
                                      unreadable 4 (its device has failed);
                                      copied=4/6: the steps in host memory, also in `died`
    > frozen 0 running 4 waits        in a hang: the main thread waits for others (`waits`) or not (`apart`);
                                      a number after that is its line in the script
    > died 3 -9                       a process ended with this status; `ended`: after its script had
    > dying 3                         the lifeline of rank 3 broke; its status is not known yet
    > raised 1 boom code=3            an exception left the script of rank 1; the default code is 1;
                                      echo=1: it may follow from the end of another rank
    > sigterm 3                       SIGTERM to rank 3; `agent-sigterm 1`: to the agent of node 1
    > refused 2 reason...             rank 2 refuses to train
    > written 0                       rank 0 reports group `g`; attempt=1 or incident=7: of an old order
    > written 0 shard 1 is not finite rank 0 wrote the shard unchanged
    > write-failed 0 reason...        doubted=1: the shard of rank 1 is not finite; broken=6: an exception has
                                      left the update of step 6
    > renamed 0 [reason...]           rank 0's handler renamed the checkpoint; with a reason: it failed
    > joined 3                        rank 3 has joined; other values by step=4, attempt=1 or digest=b
    > regroup-failed 3 reason...      rank 3 cannot join; `hangs` in the reason: its main thread is stuck;
                                      `connection`: another rank may be lost
    > present 3                       rank 3 answers a presence probe

Messages from agents:

    > agent-hello 1, agent-lost 1, progress 0
    > node-stalled 1 60               no progress on node 1 for some seconds; inside=6: the step of a rank
                                      inside a step, between=6: the last step of a rank between steps; -1: no
                                      such rank; `node-resumed 1`: there is progress again
    > prepared [reason...]            with a reason: it failed; `published` and `publish-failed` likewise;
                                      folder=0, number=0: of an old order
    > filled 1 2                      spare nodes take the places of nodes 1 and 2; `spare-hello 1`: the agent
                                      of the first one connects; `not-filled 1`: no spare node waits
    > succeed 1                       the controller of term 1 takes over
    > replay 1                        the agent of node 1 repeats its hello and its ranks' layouts
    > replayed 1                      the repetition is complete; with a word: the verdict that it had
    > at 60.5                         the time is 60.5 seconds

Set UPDATE_TRACES=1 to write the orders of the current controller into the files; then read the difference.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from adaptor.controller.controller import Controller
from adaptor.controller.incident_state import Orders, Stage
from adaptor.protocol import naming
from adaptor.protocol.messages import (
    Addressed,
    AgentHello,
    AgentLost,
    AgentTerminationRequested,
    BoardRecord,
    Died,
    Dump,
    Dying,
    EndScript,
    Exit,
    FillPlaces,
    Find,
    Freeze,
    FromAgent,
    Frozen,
    Hello,
    Joined,
    Layout,
    Message,
    NodeResumed,
    NodeStalled,
    NodesWaiting,
    Origin,
    Phase,
    PlacesFilled,
    Prepare,
    Prepared,
    PresenceProbe,
    Present,
    Proceed,
    Progress,
    Publish,
    Published,
    PublishFailed,
    Raised,
    Recovered,
    Refused,
    Regroup,
    RegroupFailed,
    Rename,
    Renamed,
    Replace,
    ReplayComplete,
    ScriptStage,
    Share,
    Standing,
    TerminationRequested,
    Verdict,
    WriteFailed,
    Written,
)
from adaptor.protocol.naming import FileEntry

GROUP = "g"
RANKS_PER_NODE = 2
SAVE = "/save"


def board(rank: int, phase: str, step: int, copies: bool) -> BoardRecord:
    """Return a board: `running 4` has finished step 4; `ready`, `updating` and `broken 5` work on step 5."""
    finished = step if phase in ("running", "unreadable") else step - 1
    changed = phase in ("updating", "broken")
    live = step if changed else finished
    oldest = live - 1 if copies else live
    error = "it has failed" if phase == "unreadable" else ""
    return BoardRecord(rank, 1, Phase[phase.upper()], oldest, finished, step, error=error)


class Trace:
    """A controller, and the language of its messages."""

    def __init__(self) -> None:
        self.now = 0.0
        self.controller = Controller(0, 120.0, ("store", 1, b""))

    def say(self, line: str) -> Iterator[str]:
        """Execute a line without its `>`; yield the orders as lines."""
        name, *fields = line.split()
        settings = {k: v for k, _, v in (word.partition("=") for word in fields if "=" in word)}
        fields = [word for word in fields if "=" not in word]
        if name == "job":
            self._begin(**{key: int(value) for key, value in settings.items()})
            return
        if name == "succeed":
            self._succeed(int(fields[0]))
            return
        if name == "replay":
            for message in self._messages_of(int(fields[0])):
                yield from _lines(self.controller.handle(message, self.now))
            return
        if name == "at":
            self.now = float(fields[0])
            orders = self.controller.tick(self.now)
        else:
            orders = self.controller.handle(self._message(name, fields, settings), self.now)
        yield from _lines(orders)

    def _node_with_order(self, settings: dict[str, str]) -> int:
        """Return the node of an answer about the save folder: the last node with an order."""
        incident = self.controller.incident
        is_finding = incident is not None and incident.state.stage is Stage.FINDING
        node = self.controller.term if is_finding or incident is None else incident.state.target.publisher
        return int(settings.get("node", node))

    def _begin(
        self,
        nodes: int = 1,
        shards: int = 2,
        origin: int = 0,
        started: int = 1,
        copies: int = 0,
        handlers: int = 0,
        online: int = 0,
    ) -> None:
        """Begin a job; `started` is 0 if no rank has reported its layout yet."""
        self._shards, self._origin, self._copies = shards, origin, bool(copies)
        self._nodes, self._started = nodes, bool(started)
        self._save = "" if handlers else SAVE
        self._online = online
        world = nodes * RANKS_PER_NODE
        self.controller = Controller(world, 120.0, ("store", 1, b""), online_s=float(online))
        for node in range(nodes):
            ranks = tuple(range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE))
            assert not self.controller.handle(AgentHello(node, ranks), 0.0)
        for rank in range(world):
            assert not self.controller.handle(Hello(rank, 1000 + rank), 0.0)
        for rank in range(world if started else 0):
            assert not self.controller.handle(self._layout(rank, "same"), 0.0)

    def _succeed(self, term: int) -> None:
        self.controller = Controller(
            self._nodes * RANKS_PER_NODE, 120.0, ("store", term, b""), term=term, online_s=float(self._online)
        )
        messages = [m for node in range(self._nodes) for m in self._messages_of(node)]
        standby_state = [m for m in messages if isinstance(m, AgentHello | Layout)]
        self.controller.succeed(standby_state, range(term, self._nodes), self.now)

    def _messages_of(self, node: int) -> list[FromAgent]:
        ranks = tuple(range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE))
        layouts = [self._layout(rank, "same") for rank in ranks if self._started]
        return [AgentHello(node, ranks), *(Hello(rank, 1000 + rank) for rank in ranks), *layouts]

    def _layout(self, rank: int, fingerprint: str) -> Layout:
        share = Share(GROUP, rank % self._shards, self._shards)
        online = "" if self._online else "off"
        return Layout(rank, (share,), self._save, self._origin, fingerprint, self._copies, online)

    def _message(self, name: str, fields: list[str], settings: dict[str, str]) -> FromAgent:
        incident = self.controller.incident
        number = int(settings.get("incident", incident.number if incident else 0))
        attempt = int(settings.get("attempt", incident.state.writing.attempt if incident else 0))
        rank = int(fields[0]) if fields and fields[0].isdigit() else -1
        text = " ".join(fields[1:])
        match name:
            case "died":
                phase = Phase.ENDED if "ended" in fields else Phase.STARTING
                last_board = BoardRecord(rank, phase=phase, stage=_stage(fields), copies=_copied(settings))
                return Died(rank, int(fields[1]), 0.0, last_board)
            case "sigterm":
                return TerminationRequested(rank, "SIGTERM")
            case "agent-sigterm":
                return AgentTerminationRequested(rank, "SIGTERM")
            case "nodes-wait":
                return NodesWaiting(rank, int(fields[1]))
            case "dying":
                return Dying(rank, 0.0, BoardRecord(rank, stage=_stage(fields)))
            case "raised":
                stage = ScriptStage(int(settings.get("stage", 0)))
                origin = Origin(may_be_echo="echo" in settings)
                return Raised(rank, text, int(settings.get("code", 1)), origin=origin, stage=stage)
            case "refused":
                return Refused(rank, text)
            case "layout":
                self._copies = settings.get("copies", str(int(self._copies))) == "1"
                nodes = tuple(map(int, filter(None, settings.get("nodes", "").split("/"))))
                return msgspec.structs.replace(self._layout(rank, fields[1]), nodes=nodes)
            case "hello":
                return Hello(rank, int(settings.get("pid", 1000 + rank)))
            case "joined":
                step = int(settings.get("step", incident.step if incident else -1))
                return Joined(rank, number, attempt, step, settings.get("digest", "a"))
            case "present":
                return Present(rank, number)
            case "regroup-failed":
                return RegroupFailed(
                    rank,
                    number,
                    attempt,
                    text,
                    is_replaceable="hangs" in text,
                    may_be_echo="connection" in text,
                )
            case "agent-hello":
                return AgentHello(rank, tuple(range(rank * RANKS_PER_NODE, (rank + 1) * RANKS_PER_NODE)))
            case "spare-hello":
                ranks = range(rank * RANKS_PER_NODE, (rank + 1) * RANKS_PER_NODE)
                return AgentHello(rank, tuple(ranks), host=f"spare{rank}", owner=f"owner{rank}")
            case "filled" | "not-filled":
                places = tuple(map(int, fields))
                owners = {node: f"owner{node}" for node in places} if name == "filled" else {}
                reason = "" if owners else "no spare node waits"
                return PlacesFilled(self.controller.home, number, places, owners, reason)
            case "replayed":
                verdict = (
                    Verdict(
                        incident=1,
                        outcome=fields[1],
                        step=5,
                        line="as it was",
                        cause_rank=0,
                        exit_code=3,
                        save_folder=SAVE,
                    )
                    if fields[1:]
                    else None
                )
                return ReplayComplete(rank, verdict)
            case "agent-lost":
                return AgentLost(rank)
            case "progress":
                return Progress(rank, 1)
            case "frozen":
                stack = bytes(fields[4].zfill(3), "ascii") if fields[4:] else b""
                place = f"wait (script.py:{fields[4] if fields[4:] else rank})"
                standing = Standing(fields[3] == "waits", place, b"main" + stack) if fields[3:] else None
                record = board(rank, fields[1], int(fields[2]), self._copies)
                record = msgspec.structs.replace(record, stage=_stage(fields), copies=_copied(settings))
                return Frozen(rank, number, record, standing)
            case "node-stalled":
                inside, between = int(settings.get("inside", 6)), int(settings.get("between", -1))
                return NodeStalled(rank, float(fields[1]), inside, between)
            case "node-resumed":
                return NodeResumed(rank)
            case "prepared":
                folder = int(settings.get("folder", incident.state.target.number if incident else 0))
                step = incident.step if incident else 0
                name = naming.temporary_name(max(step, 0), self.controller.term, folder, "0f3a")
                path = "" if fields else f"{SAVE}/{name}"
                return Prepared(self._node_with_order(settings), number, path, " ".join(fields), folder)
            case "written":
                entry = FileEntry(f"{GROUP}/{rank}.pt", 10, "00", attempt)
                return Written(rank, number, attempt, GROUP, (entry,), text)
            case "renamed":
                return Renamed(rank, number, text)
            case "write-failed":
                doubted = (int(settings["doubted"]),) if "doubted" in settings else ()
                at = incident.step if incident else 0
                phase, step = ("broken", int(settings["broken"])) if "broken" in settings else ("running", at)
                record = board(rank, phase, step, self._copies)
                return WriteFailed(rank, number, attempt, GROUP, text, record, doubted)
            case "published":
                step = int(settings.get("step", incident.step if incident else -1))
                folder_number = int(settings.get("number", incident.state.target.number if incident else 0))
                return Published(self._node_with_order(settings), number, step, SAVE, folder_number)
            case "publish-failed":
                folder_number = int(settings.get("number", incident.state.target.number if incident else 0))
                return PublishFailed(self._node_with_order(settings), number, " ".join(fields), folder_number)
        raise ValueError(f"no such line: {name}")


def _copied(settings: dict[str, str]) -> tuple[int, ...]:
    return tuple(map(int, filter(None, settings.get("copied", "").split("/"))))


def _stage(fields: list[str]) -> ScriptStage:
    if "finished" in fields or "ended" in fields:
        return ScriptStage.FINISHED
    return ScriptStage.TRAINED if "trained" in fields else ScriptStage.TRAINING


def _lines(orders: Orders) -> Iterator[str]:
    for node, order in orders:
        if isinstance(order, Addressed):
            yield f"node {node}, rank {order.rank}: {_order_text(order.message)}"
        else:
            yield f"node {node}: {_order_text(order)}"


def _order_text(order: Message) -> str:
    match order:
        case Freeze(incident=incident, stacks=stacks):
            return f"freeze for incident {incident}" + (", tell where you stand" if stacks else "")
        case Dump(attempt=attempt, step=step, groups=groups):
            parts = [f"{g.group} from {','.join(map(str, g.holders))} by {g.writer}" for g in groups]
            as_is = ", as it is" if order.as_is else ""
            return f"dump step {step}, attempt {attempt}: {'; '.join(parts)}{as_is}"
        case Replace(rank=rank, attempt=attempt, cold=cold):
            return f"replace rank {rank}, attempt {attempt}" + (", not by a spare" if cold else "")
        case FillPlaces(nodes=nodes):
            return f"have spare nodes take the places of {', '.join(map(str, nodes))}"
        case PresenceProbe():
            return "are you there?"
        case Regroup(attempt=attempt, step=step, replaced=replaced, from_copies=True):
            ranks = ", ".join(f"rank {replacement.rank} like {replacement.twin}" for replacement in replaced)
            return f"regroup at step {step} from copies, attempt {attempt}: {ranks or 'nobody is replaced'}"
        case Regroup(attempt=attempt, step=step, replaced=replaced):
            parts = [
                f"rank {replacement.rank} like {replacement.twin}, "
                + ", ".join(f"{s.group}.{s.index} from {s.source}" for s in replacement.sources)
                for replacement in replaced
            ]
            return f"regroup at step {step}, attempt {attempt}: {'; '.join(parts) or 'nobody is replaced'}"
        case Proceed(step=step):
            return f"proceed from step {step}"
        case Recovered(step=step, line=line, replaced=replaced, retried=retried):
            affected = [
                f"{word} {list(ranks)}"
                for word, ranks in (("replaced", replaced), ("retried", retried))
                if ranks
            ]
            return f"recovered, step {step}, {', '.join(affected)}\n        {line}"
        case Rename(step=step):
            return f"rename step {step}"
        case EndScript():
            return "let the script end"
        case Exit():
            return "exit"
        case Prepare(step=step, term=term, number=number):
            folder = f", folder {number}" if number else ""
            return f"prepare step {step}" + (f" in term {term}" if term else "") + folder
        case Publish(step=step, files=files, writers=writers, number=number, written=written):
            taken = f", folder {written} taken as {number}" if number != written else ""
            return f"publish step {step}: {', '.join(e.draft for e in files)}; holders {writers}{taken}"
        case Find(step=step):
            return f"find step {step}, or a later one"
        case Verdict(outcome=outcome, step=step, line=line, cause_rank=rank, exit_code=code, leaves=nodes):
            leaves = "".join(f", node {node} leaves" for node in nodes)
            return (
                f"verdict {outcome}, step {step}, cause rank {rank}, exit code {code}{leaves}\n        {line}"
            )
    raise ValueError(f"no words for {order}")


def replay(text: str) -> str:
    """Return the trace `text` with the orders that the controller gives now."""
    trace = Trace()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(">"):
            lines.append(line)
            lines.extend("    " + order for order in trace.say(line[1:].strip()))
        elif not line.startswith("    "):
            lines.append(line)  # comments and empty lines
    return "\n".join(lines) + "\n"
