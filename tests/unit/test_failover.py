"""The controller that an agent obeys, and the successor after its loss."""

from __future__ import annotations

import pytest

from adaptor.controller import failover
from adaptor.controller.controller import Controller
from adaptor.controller.failover import RECONNECT_S, StandbyReplicator, Succession
from adaptor.controller.freeze import LAYOUT_WAIT_S
from adaptor.protocol.messages import (
    Addressed,
    AgentHello,
    AgentLost,
    BoardRecord,
    Died,
    Dismissed,
    Dying,
    Endpoint,
    EndScript,
    FillPlaces,
    Freeze,
    Frozen,
    Hello,
    Layout,
    Phase,
    PresenceProbe,
    Proceed,
    Progress,
    Raised,
    Recovered,
    ReplayComplete,
    Share,
    ToController,
    Unprotected,
    Verdict,
    Welcome,
)

HELLO = AgentHello(2, (4, 5))
FIRST = AgentHello(0, (0, 1))
ENDPOINT = Endpoint("10.0.0.2", 8000)
VERDICT = Verdict(
    incident=1, outcome="saved", step=5, line="as it was", cause_rank=0, exit_code=3, save_folder="/save"
)


def _terms(succession: Succession) -> list[int]:
    terms = []
    while succession.go_on():
        terms.append(succession.term)
        if succession.is_mine:
            break
    return terms


def test_the_nodes_that_stand_by_are_gone_through_in_their_order() -> None:
    succession = Succession(2, 4)
    for order in (FIRST, AgentHello(1, (2, 3), ENDPOINT), AgentHello(3, (6, 7), ENDPOINT)):
        assert not succession.accept(order)
    assert _terms(succession) == [1, 2]
    assert succession.is_mine


def test_a_node_that_does_not_know_all_standby_nodes_does_not_move() -> None:
    """A node that does not know all standby nodes would go to another controller than the others."""
    succession = Succession(2, 9)
    for order in (FIRST, AgentHello(3, (6, 7), ENDPOINT), AgentHello(1, (2, 3), ENDPOINT)):
        assert not succession.knows_standby_endpoints
        assert not succession.go_on()
        succession.accept(order)
    assert succession.knows_standby_endpoints
    assert _terms(succession) == [1, 2]


def test_a_possible_controller_must_know_node_0() -> None:
    succession = Succession(1, 2)
    assert not succession.knows_standby_endpoints
    succession.accept(FIRST)
    assert succession.knows_standby_endpoints


def test_a_node_that_does_not_stand_by_finds_the_others() -> None:
    succession = Succession(7, 8)
    for node in (1, 2, 3):
        succession.accept(AgentHello(node, (node,), ENDPOINT))
    assert _terms(succession) == [1, 2, 3]
    assert succession.endpoint == ENDPOINT


def test_a_job_of_one_node_has_no_other_controller() -> None:
    succession = Succession(0, 1)
    assert succession.knows_standby_endpoints
    assert not succession.go_on()


def test_after_an_online_recovery_the_node_before_stands_by_again() -> None:
    """A spare has node 0's place; node 1 has the controller, and is lost, too."""
    succession = Succession(2, 3)
    for order in (FIRST, AgentHello(1, (2, 3), ENDPOINT)):
        succession.accept(order)
    assert (succession.go_on(), succession.term, succession.lost_homes) == (True, 1, [0])
    succession.accept(AgentHello(0, (0, 1), ENDPOINT))
    succession.accept(Recovered(1, 5, "as it was", replaced=(0, 1)))
    newcomer = Succession(0, 3, term=1)
    for order in (AgentHello(1, (2, 3), ENDPOINT), AgentHello(2, (4, 5), ENDPOINT)):
        assert not newcomer.knows_standby_endpoints
        newcomer.accept(order)
    assert (_terms(succession), succession.home, succession.lost_homes) == ([2], 2, [1])
    assert (_terms(newcomer), newcomer.lost_homes) == ([2, 3], [1, 2])
    assert newcomer.is_mine


def test_the_controller_is_lost_when_a_spare_node_has_the_place_of_node_0() -> None:
    """Node 0's place is filled, although the recovery is not over."""
    succession = Succession(2, 4)
    for order in (FIRST, AgentHello(1, (2, 3), ENDPOINT), AgentHello(3, (6, 7), ENDPOINT)):
        succession.accept(order)
    assert (succession.go_on(), succession.lost_homes) == (True, [0])
    succession.accept(AgentHello(0, (0, 1), ENDPOINT, owner="spare"))
    assert (succession.lost_homes, succession.go_on(), succession.lost_homes) == ([], True, [1])


def test_a_new_controller_gets_the_orders_that_changed_more_than_doors() -> None:
    succession = Succession(2, 3)
    for message in (Freeze(1), PresenceProbe(1)):
        succession.accept(Addressed(4, message))
        assert succession.all_again == [ReplayComplete(2)]
    succession.accept(Addressed(4, EndScript(1)))
    assert succession.all_again == [ReplayComplete(2, has_acted=True)]
    succession.accept(Recovered(1, 5, "as it was"))
    succession.accept(Addressed(4, Proceed(1, 5)))
    assert succession.all_again == [ReplayComplete(2)]


def test_the_messages_to_a_new_controller() -> None:
    succession = Succession(2, 3)
    lasting = [HELLO, Hello(4, 1000), Unprotected(4, "no optimizer is known")]
    for message in (*lasting, Progress(2, 7)):
        succession.keep(message)
    assert succession.all_again == [*lasting, ReplayComplete(2)]
    assert succession.accept(VERDICT)
    assert succession.all_again[-1] == ReplayComplete(2, VERDICT)


def test_the_newest_controller_is_obeyed() -> None:
    succession = Succession(2, 3)
    layout = Layout(0, (), "/save", 0, "same")
    assert [succession.accept(order) for order in (FIRST, layout, Welcome())] == [False] * 3
    assert succession.standby_state == [FIRST, layout]
    assert succession.accept(Dismissed())
    assert [succession.accept(VERDICT), succession.accept(VERDICT)] == [True, False]


def test_the_next_controller_gets_the_new_process_and_no_ended_incident() -> None:
    """Rank 4 was replaced, rank 5 raised and continued; later failures are reported."""
    succession = Succession(2, 4)
    first, second = Layout(4, (), "/save", 0, "same"), Layout(4, (), "/save", 0, "same")
    gone = BoardRecord(4, 10)
    for message in (
        *(HELLO, Hello(4, 10), Hello(5, 11), first, Layout(5, (), "/save", 0, "same")),
        *(Dying(4, 0.0, gone), Raised(5, "an echo", 1), Died(4, -9, 0.0, gone)),
        *(Hello(4, 12), second, Dying(4, 0.0, BoardRecord(4, 12))),
    ):
        succession.keep(message)
    assert succession.accept(Recovered(1, 5, "as it was", replaced=(4,), retried=(5,)))
    assert succession.all_again == [
        *(HELLO, Hello(5, 11), Layout(5, (), "/save", 0, "same"), Hello(4, 12), second),
        *(Dying(4, 0.0, BoardRecord(4, 12)), ReplayComplete(2, None)),
    ]
    assert succession.verdict is None, "the job goes on"


def test_unreplaced_ranks_are_reported_again() -> None:
    succession = Succession(2, 4)
    messages = [HELLO, Hello(4, 10), Hello(5, 11), Raised(5, "it failed", 1)]
    for message in messages:
        succession.keep(message)
    succession.accept(Recovered(1, 5, "as it was", replaced=(0,)))
    assert succession.all_again[:-1] == messages


@pytest.mark.robustness(
    "B10",
    "the controller's node is lost, and another takes its place, then a rank is killed",
    "the report names the host of the rank that failed, of whichever node",
)
@pytest.mark.parametrize("failed", [0, 1, 2])
def test_the_next_controller_knows_the_hosts(failed: int) -> None:
    """Only the first controller's relay is known of the lost node, which repeats nothing."""
    passed_on, succession = StandbyReplicator(), Succession(1, 3)
    for node in (1, 0, 2):
        for to, replicated in passed_on.replicate(AgentHello(node, (node,), host=f"host{node}")):
            if to == 1:
                succession.accept(replicated)
    assert [
        replicated.host for replicated in succession.standby_state if isinstance(replicated, AgentHello)
    ] == ["host0", "host2"]
    for rank in (0, 1, 2):
        for to, replicated in passed_on.replicate(Layout(rank, (Share("g", 0, 1),), "/save", 0, "same")):
            if to == 1:
                succession.accept(replicated)
    controller = Controller(3, 120.0, ("store", 1, b""), term=1)
    controller.succeed(succession.standby_state, (1, 2), 0.0)
    messages: list[ToController] = []
    for node in (1, 2):
        messages += [
            AgentHello(node, (node,), host=f"host{node}"),
            Hello(node, 1000 + node),
            ReplayComplete(node),
        ]
    if failed == 0:
        messages.append(AgentLost(0))
    else:
        messages += [Died(failed, -9, 1.0, BoardRecord(failed, 1000 + failed)), AgentLost(0)]
    for message in messages:
        controller.handle(message, 1.0)
    assert controller.incident is not None
    for rank in {1, 2} - {failed}:
        controller.handle(Frozen(rank, controller.incident.number, BoardRecord(rank)), 1.0)
    controller.tick(1000.0)
    assert controller.verdict is not None
    assert (controller.verdict.fault.ranks[0], controller.verdict.fault.host) == (failed, f"host{failed}")


@pytest.mark.parametrize("has_acted", [False, True])
def test_after_a_loss_in_the_middle_of_a_save_all_are_started_again(has_acted: bool) -> None:
    """The lost controller's orders may still run on the node of rank 1."""
    job = Controller(2, 120.0, ("store", 1, b""), term=1, online_s=60.0)
    layouts = [Layout(rank, (Share("g", 0, 1),), "/save", 0, "same", False, "") for rank in range(2)]
    job.succeed([*(AgentHello(node, (node,)) for node in range(2)), *layouts], [1], 0.0)
    messages = (AgentHello(1, (1,)), Hello(1, 1001), ReplayComplete(1, None, has_acted))
    for message in (*messages, AgentLost(0)):
        job.handle(message, 0.0)
    assert job.incident is not None
    orders = job.handle(Frozen(1, job.incident.number, BoardRecord(1, 1001, Phase.RUNNING, 4, 4, 4)), 0.1)
    assert any(isinstance(order, FillPlaces) for _, order in orders) == (not has_acted)


def test_a_spare_node_takes_over_before_it_knows_a_layout() -> None:
    """Training had begun, or the spare could not have joined. An awaited node may know the layouts."""
    job = Controller(3, 120.0, ("store", 1, b""), term=1)
    job.succeed([AgentHello(0, (0,)), AgentHello(2, (2,))], (1, 2), 0.0)
    for message in (AgentHello(1, (1,), owner="a spare node"), ReplayComplete(1), AgentLost(0)):
        job.handle(message, 0.0)
    job.tick(LAYOUT_WAIT_S)
    assert job.verdict is None
    job.tick(RECONNECT_S)
    job.tick(RECONNECT_S)
    assert job.verdict is not None
    assert job.verdict.outcome == "lost"


def test_a_node_given_up_during_its_report_gets_the_verdict() -> None:
    """Its packets were delayed; without the verdict the node would wait forever."""
    job = Controller(3, 120.0, ("store", 1, b""), term=1)
    layouts = [Layout(rank, (Share("g", 0, 1),), "/save", 0, "same") for rank in range(3)]
    job.succeed([*(AgentHello(node, (node,)) for node in range(3)), *layouts], range(1, 3), 0.0)
    job.handle(AgentLost(0), 0.0)
    for node in (1, 2):
        job.handle(AgentHello(node, (node,)), 0.1)
    job.handle(ReplayComplete(1), 0.1)
    job.tick(1000.0)
    assert job.membership.lost == {0, 2}
    nodes = [node for node, order in job.give_up("it is a test") if isinstance(order, Verdict)]
    assert nodes == [1, 2]


@pytest.mark.parametrize(
    ("lost", "successor", "places"),
    [((0,), 1, (1,)), ((0, 1), 2, (1, 2)), ((0, 2), 1, (1, 2)), ((0, 3), 1, (1, 3))],
)
def test_the_place_of_the_next_node_0_becomes_empty(
    lost: tuple[int, ...], successor: int, places: tuple[int, ...]
) -> None:
    assert failover.empty_places_after(lost, successor) == places


def test_at_least_half_of_the_nodes_go_on_without_node_0() -> None:
    assert failover.may_go_on(2, (0,))
    assert failover.may_go_on(4, (0, 1))
    assert not failover.may_go_on(3, (0, 1))
    assert not failover.may_go_on(4, (0, 1, 2))
