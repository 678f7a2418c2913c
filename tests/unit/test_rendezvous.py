"""torch's rendezvous, as the agent has it."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousConnectionError

from adaptor.launchers.rendezvous import Rendezvous


class Handler:
    """What asks a store that may be gone."""

    settings = "as they are"

    def __init__(self, answer: int | Exception) -> None:
        self._answer = answer

    def get_backend(self) -> str:
        return "c10d"

    def num_nodes_waiting(self) -> int:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def test_a_rendezvous_that_is_gone_with_its_node() -> None:
    """The agent goes on watching its workers, which are asked for their state."""
    assert Rendezvous(Handler(RendezvousConnectionError())).num_nodes_waiting() == 0


def test_all_else_is_torch_s() -> None:
    assert Rendezvous(Handler(2)).num_nodes_waiting() == 2
    assert Rendezvous(Handler(0)).settings == "as they are"
    assert not hasattr(Rendezvous(Handler(0)), "nothing")
    with pytest.raises(RendezvousClosedError):
        Rendezvous(Handler(RendezvousClosedError())).num_nodes_waiting()
