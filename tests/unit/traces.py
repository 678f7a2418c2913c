"""Golden traces of the controller: what it hears and what it orders, as text.

A line that starts with `>` is heard by the controller, or lets time pass; the indented lines below it are
what the controller then orders. The first line says what the job is like:

    > job nodes=2 shards=2 origin=0   two nodes with two ranks each; rank r holds shard r % 2 of group `g`
    > job ... copies=1                each rank keeps a local copy of the state before its update
    > job ... handled=1               handlers of the script write what is saved, and name it
    > job ... online=60               failed ranks are replaced (TTP_ONLINE)
    > hello 3 pid=7                   the process of rank 3 says hello; 1003 is its first one
    > joined 3                        rank 3 has joined; step=4, attempt=1 or digest=b to say something else;
                                      regroup-failed 3 reason... it cannot; with `hangs`
                                      in the reason, its main thread will not come any more; with
                                      `connection`, another rank may be lost
    > present 3                       rank 3 answers that it is there
    > still 1 60                      nothing moves on node 1, for so many seconds; `moving 1`: it does again;
                                      inside=6, the step that one there is in, between=6, what one that is
                                      between two steps has finished; -1: there is none
    > frozen 0 running 4 waits        a job that hangs: the main thread waits for others, or `apart` does not;
                                      at this line of the script, if a number follows, else one of its own
    > told 3                          SIGTERM has reached rank 3; `leave 1` the agent of node 1
    > died 3 -9                       a process ended, with this status; `ended` when its script had
    > dying 3                         its lifeline is cut: how it ends is not known yet
    > raised 1 0 boom                 an exception left the script of rank 1, exit code 1 if not said
    > frozen 0 running 4              the board that comes with it: running 4, ready 5, updating 5, broken 5;
                                      unreadable 4: the device of that rank has failed;
                                      copied=4/6: the steps copied to host memory, also of one that died
    > prepared [reason...]            with a reason it failed; published and publish-failed likewise;
                                      folder=0, number=0 to say an old one
    > written 0                       rank 0 reports group `g`; attempt=1 or incident=7 to say an old one
    > written 0 shard 1 is not finite it has written that as it is
    > renamed 0 [reason...]           rank 0's handler has given it its name; with a reason it failed
    > write-failed 0 reason...        with doubted=1, what rank 1 gave is not finite; with broken=6, an
                                      exception has left the update of step 6
    > succeed 1                       the controller of term 1 takes the place of the one before
    > again 1                         the agent of node 1 says again who it is, and what its ranks hold
    > recalled 1                      that was all of it; with a word, it has been given this verdict
    > filled 1 2                      spare nodes take the places of nodes 1 and 2; `spare 1`: the agent of
                                      the first has come; `not-filled 1`: no spare node waits
    > agent-lost 1, progress 0, refused 2 reason..., layout 3 other copies=1, agent-hello 1, hello 2
    > at 60.5                         the time is now 60.5 seconds, and the controller is told

Set UPDATE_TRACES=1 to write what the controller orders now into the files, and read the difference.
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
    """`running 4` has finished step 4; `ready 5`, `updating 5` and `broken 5` are on their way to it."""
    finished = step if phase in ("running", "unreadable") else step - 1
    changed = phase in ("updating", "broken")
    live = step if changed else finished
    oldest = live - 1 if copies else live
    error = "it has failed" if phase == "unreadable" else ""
    return BoardRecord(rank, 1, Phase[phase.upper()], oldest, finished, step, error=error)


class Trace:
    """A controller, and how to say things to it in words."""

    def __init__(self) -> None:
        self.now = 0.0
        self.controller = Controller(0, 120.0, ("store", 1, b""))

    def say(self, line: str) -> Iterator[str]:
        """Do what a line says; yields the orders as lines."""
        name, *words = line.split()
        settings = {k: v for k, _, v in (word.partition("=") for word in words if "=" in word)}
        words = [word for word in words if "=" not in word]
        if name == "job":
            self._begin(**{key: int(value) for key, value in settings.items()})
            return
        if name == "succeed":
            self._succeed(int(words[0]))
            return
        if name == "again":
            for message in self._known_of(int(words[0])):
                yield from _lines(self.controller.handle(message, self.now))
            return
        if name == "at":
            self.now = float(words[0])
            orders = self.controller.tick(self.now)
        else:
            heard = self._message(name, words, settings)
            orders = self.controller.handle(heard, self.now)
        yield from _lines(orders)

    def _asked(self, settings: dict[str, str]) -> int:
        """Return the node that an answer about the folder comes from: the one that was asked last."""
        incident = self.controller.incident
        finding = incident is not None and incident.state.stage is Stage.FINDING
        asked = self.controller.term if finding or incident is None else incident.state.target.publisher
        return int(settings.get("node", asked))

    def _begin(
        self,
        nodes: int = 1,
        shards: int = 2,
        origin: int = 0,
        started: int = 1,
        copies: int = 0,
        handled: int = 0,
        online: int = 0,
    ) -> None:
        """`started` is 0 for a job of which no rank has told its layout yet."""
        self._shards, self._origin, self._copies = shards, origin, bool(copies)
        self._nodes, self._started = nodes, bool(started)
        self._save = "" if handled else SAVE
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
            self._nodes * RANKS_PER_NODE,
            120.0,
            ("store", term, b""),
            term=term,
            online_s=float(self._online),
        )
        legacy = [m for node in range(self._nodes) for m in self._known_of(node)]
        known = [m for m in legacy if isinstance(m, AgentHello | Layout)]
        self.controller.succeed(known, range(term, self._nodes), self.now)

    def _known_of(self, node: int) -> list[FromAgent]:
        ranks = tuple(range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE))
        layouts = [self._layout(rank, "same") for rank in ranks if self._started]
        return [AgentHello(node, ranks), *(Hello(rank, 1000 + rank) for rank in ranks), *layouts]

    def _layout(self, rank: int, fingerprint: str) -> Layout:
        share = Share(GROUP, rank % self._shards, self._shards)
        online = "" if self._online else "off"
        return Layout(rank, (share,), self._save, self._origin, fingerprint, self._copies, online)

    def _message(self, name: str, words: list[str], settings: dict[str, str]) -> FromAgent:
        incident = self.controller.incident
        number = int(settings.get("incident", incident.number if incident else 0))
        attempt = int(settings.get("attempt", incident.state.writing.attempt if incident else 0))
        rank = int(words[0]) if words and words[0].isdigit() else -1
        text = " ".join(words[1:])
        match name:
            case "died":
                phase = Phase.ENDED if "ended" in words else Phase.STARTING
                left = BoardRecord(rank, phase=phase, stage=_stage(words), copies=_copied(settings))
                return Died(rank, int(words[1]), 0.0, left)
            case "told":
                return TerminationRequested(rank, "SIGTERM")
            case "leave":
                return AgentTerminationRequested(rank, "SIGTERM")
            case "nodes-wait":
                return NodesWaiting(rank, int(words[1]))
            case "dying":
                return Dying(rank, 0.0, BoardRecord(rank, stage=_stage(words)))
            case "raised":
                stage = ScriptStage(int(settings.get("stage", 0)))
                return Raised(rank, text, int(settings.get("code", 1)), stage=stage)
            case "refused":
                return Refused(rank, text)
            case "layout":
                self._copies = settings.get("copies", str(int(self._copies))) == "1"
                nodes = tuple(map(int, filter(None, settings.get("nodes", "").split("/"))))
                return msgspec.structs.replace(self._layout(rank, words[1]), nodes=nodes)
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
            case "spare":
                ranks = range(rank * RANKS_PER_NODE, (rank + 1) * RANKS_PER_NODE)
                return AgentHello(rank, tuple(ranks), host=f"spare{rank}", owner=f"owner{rank}")
            case "filled" | "not-filled":
                places = tuple(map(int, words))
                owners = {node: f"owner{node}" for node in places} if name == "filled" else {}
                reason = "" if owners else "no spare node waits"
                return PlacesFilled(self.controller.home, number, places, owners, reason)
            case "recalled":
                verdict = (
                    Verdict(
                        incident=1,
                        outcome=words[1],
                        step=5,
                        line="as it was",
                        cause_rank=0,
                        exit_code=3,
                        save_folder=SAVE,
                    )
                    if words[1:]
                    else None
                )
                return ReplayComplete(rank, verdict)
            case "agent-lost":
                return AgentLost(rank)
            case "progress":
                return Progress(rank, 1)
            case "frozen":
                way = bytes(words[4].zfill(3), "ascii") if words[4:] else b""
                where = f"wait (script.py:{words[4] if words[4:] else rank})"
                standing = Standing(words[3] == "waits", where, b"main" + way) if words[3:] else None
                there = board(rank, words[1], int(words[2]), self._copies)
                there = msgspec.structs.replace(there, stage=_stage(words), copies=_copied(settings))
                return Frozen(rank, number, there, standing)
            case "still":
                inside, between = int(settings.get("inside", 6)), int(settings.get("between", -1))
                return NodeStalled(rank, float(words[1]), inside, between)
            case "moving":
                return NodeResumed(rank)
            case "prepared":
                folder = int(settings.get("folder", incident.state.target.number if incident else 0))
                step = incident.step if incident else 0
                name = naming.temporary_name(max(step, 0), self.controller.term, folder, "0f3a")
                path = "" if words else f"{SAVE}/{name}"
                return Prepared(self._asked(settings), number, path, " ".join(words), folder)
            case "written":
                entry = FileEntry(f"{GROUP}/{rank}.pt", 10, "00", attempt)
                return Written(rank, number, attempt, GROUP, (entry,), text)
            case "renamed":
                return Renamed(rank, number, text)
            case "write-failed":
                doubted = (int(settings["doubted"]),) if "doubted" in settings else ()
                at = incident.step if incident else 0
                phase, step = ("broken", int(settings["broken"])) if "broken" in settings else ("running", at)
                there = board(rank, phase, step, self._copies)
                return WriteFailed(rank, number, attempt, GROUP, text, there, doubted)
            case "published":
                step = int(settings.get("step", incident.step if incident else -1))
                which = int(settings.get("number", incident.state.target.number if incident else 0))
                return Published(self._asked(settings), number, step, SAVE, which)
            case "publish-failed":
                which = int(settings.get("number", incident.state.target.number if incident else 0))
                return PublishFailed(self._asked(settings), number, " ".join(words), which)
        raise ValueError(f"no such line: {name}")


def _copied(settings: dict[str, str]) -> tuple[int, ...]:
    return tuple(map(int, filter(None, settings.get("copied", "").split("/"))))


def _stage(words: list[str]) -> ScriptStage:
    if "finished" in words or "ended" in words:
        return ScriptStage.FINISHED
    return ScriptStage.TRAINED if "trained" in words else ScriptStage.TRAINING


def _lines(orders: Orders) -> Iterator[str]:
    for node, order in orders:
        if isinstance(order, Addressed):
            yield f"node {node}, rank {order.rank}: {_words(order.message)}"
        else:
            yield f"node {node}: {_words(order)}"


def _words(order: Message) -> str:
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
            who = ", ".join(f"rank {one.rank} like {one.twin}" for one in replaced)
            return f"regroup at step {step} from copies, attempt {attempt}: {who or 'nobody is replaced'}"
        case Regroup(attempt=attempt, step=step, replaced=replaced):
            given = [
                f"rank {one.rank} like {one.twin}, "
                + ", ".join(f"{s.group}.{s.index} from {s.source}" for s in one.sources)
                for one in replaced
            ]
            return f"regroup at step {step}, attempt {attempt}: {'; '.join(given) or 'nobody is replaced'}"
        case Proceed(step=step):
            return f"proceed from step {step}"
        case Recovered(step=step, line=line, replaced=replaced, retried=retried):
            who = [
                f"{word} {list(ranks)}"
                for word, ranks in (("replaced", replaced), ("retried", retried))
                if ranks
            ]
            return f"recovered, step {step}, {', '.join(who)}\n        {line}"
        case Rename(step=step):
            return f"rename step {step}"
        case EndScript():
            return "let the script end"
        case Exit():
            return "exit"
        case Prepare(step=step, term=term, number=number):
            where = f", folder {number}" if number else ""
            return f"prepare step {step}" + (f" in term {term}" if term else "") + where
        case Publish(step=step, files=files, writers=writers, number=number, written=written):
            taken = f", folder {written} taken as {number}" if number != written else ""
            return f"publish step {step}: {', '.join(e.draft for e in files)}; holders {writers}{taken}"
        case Find(step=step):
            return f"find step {step}, or a later one"
        case Verdict(outcome=outcome, step=step, line=line, cause_rank=rank, exit_code=code, leaves=nodes):
            left = "".join(f", node {node} leaves" for node in nodes)
            return (
                f"verdict {outcome}, step {step}, cause rank {rank}, exit code {code}{left}\n        {line}"
            )
    raise ValueError(f"no words for {order}")


def replay(text: str) -> str:
    """The trace `text` with the orders that the controller gives now."""
    trace = Trace()
    out: list[str] = []
    for line in text.splitlines():
        if line.startswith(">"):
            out.append(line)
            out.extend("    " + order for order in trace.say(line[1:].strip()))
        elif not line.startswith("    "):
            out.append(line)  # comments and empty lines
    return "\n".join(out) + "\n"
