"""torch's agent ends the workers while the control thread reaps dead workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from adaptor.launchers.agent.elastic_agent import SurvivorsAgent


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_worker_whose_status_is_taken_before_the_signal(monkeypatch: pytest.MonkeyPatch, gone: int) -> None:
    """torch checks that a worker is alive, then signals its process group, which may have ended meanwhile."""
    calls: list[Any] = []

    def shutdown(agent: SurvivorsAgent, *args: Any) -> None:
        calls.append(args)
        if len(calls) <= gone:
            raise ProcessLookupError

    monkeypatch.setattr(LocalElasticAgent, "_shutdown", shutdown)
    agent = SurvivorsAgent.__new__(SurvivorsAgent)
    monkeypatch.setattr(agent, "_tell_of_recoveries", lambda: None)
    vars(agent).update(
        _interrupted=False,
        _record=SimpleNamespace(save_folder=""),
        _node=SimpleNamespace(save_folder="", dismiss=lambda *, at_once: None),
        _worker_group=SimpleNamespace(spec=SimpleNamespace(local_world_size=2)),
    )
    agent._shutdown()
    assert calls == [()] * (gone + 1)
