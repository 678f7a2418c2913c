"""A killed rank on its way to whoever is on call: a job, Prometheus, Alertmanager and a webhook, all real."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import monitoring

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(monitoring.why_absent()), reason=monitoring.why_absent()),
]


@pytest.mark.timeout(900)
def test_three_restarts_are_counted_and_told(tmp_path: Path) -> None:
    seen = monitoring.observe(tmp_path)
    assert (seen.alert["status"], seen.alert["labels"]["alertname"]) == ("firing", "TTPRestartLoop")
    assert seen.alert["annotations"]["runbook_url"] == "docs/alerts/TTPRestartLoop.md"
    assert seen.metrics["ttp_restarts_total"] == monitoring.KILLS
    assert seen.metrics['sum(ttp_incidents_total{cause="signal",verdict="saved"})'] == monitoring.KILLS
    assert seen.metrics["ttp_steps_lost_total"] == 0
    assert seen.metrics["ttp_protected"] == 1
    assert seen.samples > 100
    checked = monitoring.check_metrics(tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
