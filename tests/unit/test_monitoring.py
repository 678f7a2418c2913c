"""The alert rules and dashboard in examples/monitoring use existing metrics and runbooks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.waiting import captured

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "monitoring"
RULES: list[dict[str, Any]] = yaml.safe_load((EXAMPLE / "alerts.yml").read_text())["groups"][0]["rules"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alert_has_its_metrics_and_its_runbook(rule: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    for metric in re.findall(r"\bttp_\w+", rule["expr"]):
        assert re.search(rf"^\| `{metric}\b", page, re.MULTILINE), metric
    runbook = ROOT / rule["annotations"]["runbook_url"]
    assert runbook.name == f"{rule['alert']}.md"
    text = runbook.read_text()
    assert text.startswith(f"# {rule['alert']}\n")
    assert {"## Look", "## Do"} <= set(text.splitlines())
    index = (ROOT / "docs" / "alerts" / "README.md").read_text()
    assert f"| [{rule['alert']}]({runbook.name}) | {rule['labels']['severity']} |" in index
    assert rule["alert"] in (EXAMPLE / "README.md").read_text()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool (Debian: prometheus)")
def test_the_rules_fire_when_they_must() -> None:
    subprocess.run(["promtool", "test", "rules", "alerts_test.yml"], cwd=EXAMPLE, check=True)
    subprocess.run(["promtool", "check", "config", "prometheus.yml"], cwd=EXAMPLE, check=True)


@pytest.mark.skipif(
    shutil.which("amtool") is None, reason="there is no amtool (Debian: prometheus-alertmanager)"
)
def test_the_configuration_of_alertmanager() -> None:
    subprocess.run(["amtool", "check-config", "alertmanager.yml"], cwd=EXAMPLE, check=True)


DASHBOARD: dict[str, Any] = json.loads((EXAMPLE / "grafana.json").read_text())
TARGETS = [(panel["title"], target) for panel in DASHBOARD["panels"] for target in panel["targets"]]
# The suffixes that Prometheus adds to the name of a histogram.
PARTS = ("_sum", "_count", "_bucket")


def _metrics() -> dict[str, set[str]]:
    """The metrics of docs/operations.md with their labels; another test compares the page with the server."""
    page = (ROOT / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| `(ttp_\w+)(?:\{([\w,]+)\})?`", page, re.MULTILINE)
    return {name: {*labels.split(","), "instance", ""} for name, labels in rows}


@pytest.mark.parametrize(
    ("title", "target"), TARGETS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_panel_shows_served_metrics(title: str, target: dict[str, Any]) -> None:
    metrics = _metrics()
    labels = set()
    for metric in re.findall(r"\bttp_\w+", target["expr"]):
        name = next((metric.removesuffix(part) for part in PARTS if metric.endswith(part)), metric)
        assert metric in metrics or (name in metrics and name != metric), f"{title}: there is no {metric}"
        labels |= metrics[metric if metric in metrics else name]
    used = {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]), *re.findall(r"(\w+)=~", target["expr"])}
    assert used <= labels
    assert target["expr"].count("(") == target["expr"].count(")")
    assert target["datasource"]["uid"] == "${datasource}"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool (Debian: prometheus)")
def test_prometheus_reads_each_expression(tmp_path: Path) -> None:
    expressions = [target["expr"] for _, target in TARGETS]
    expressions += [expression["expr"] for expression in DASHBOARD["annotations"]["list"]]
    rules = [
        {"record": f"panel:{number}", "expr": expression} for number, expression in enumerate(expressions)
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    completed = captured(["promtool", "check", "rules", "rules.yml"], cwd=tmp_path)
    assert (completed.returncode, f"{len(rules)} rules found" in completed.stdout) == (0, True), (
        completed.stderr
    )


# Fields outside of Grafana's schema: the Prometheus data source reads them.
OF_THE_DATA_SOURCE = {"annotations.list.0.expr", "annotations.list.0.step", "annotations.list.0.titleFormat"}


def test_grafana_knows_each_field() -> None:
    """Grafana's own classes read the dashboard and write it again: no field is misspelt or malformed."""
    pytest.importorskip(
        "grafana_foundation_sdk", reason="Grafana's classes are not installed (the extra test)"
    )
    from grafana_foundation_sdk.cog import encoder, plugins
    from grafana_foundation_sdk.models import dashboard, prometheus, stat, timeseries

    plugins.register_default_plugins()
    read = dashboard.Dashboard.from_json(DASHBOARD)
    assert read.panels is not None
    for panel in read.panels:
        assert isinstance(panel, dashboard.Panel)
        assert isinstance(
            panel.options, {"stat": stat.Options, "timeseries": timeseries.Options}[panel.type_val]
        )
        assert {type(target) for target in panel.targets or ()} == {prometheus.Dataquery}
    encoded = json.loads(encoder.JSONEncoder().encode(read))
    assert set(_not_in(DASHBOARD, encoded)) <= OF_THE_DATA_SOURCE


def _not_in(expected: Any, actual: Any, path: str = "") -> Iterator[str]:
    """Yield the paths in `left` that are missing or different in `right`."""
    if isinstance(expected, dict | list) and isinstance(actual, type(expected)):
        keys = expected if isinstance(expected, dict) else range(len(expected))
        for key in keys:
            is_there = key in actual if isinstance(actual, dict) else key < len(actual)
            place = f"{path}.{key}".lstrip(".")
            yield from _not_in(expected[key], actual[key], place) if is_there else [place]
    elif expected != actual:
        yield path


def test_the_dashboard_shows_all_metrics_but_these() -> None:
    shown = " ".join(target["expr"] for _, target in TARGETS)
    left_out = {name for name in _metrics() if name not in shown}
    assert left_out == {
        *("ttp_build_info", "ttp_running", "ttp_status_timestamp_seconds"),  # the last two are in alerts
        *("ttp_generation", "ttp_controller_term", "ttp_checkpoint_bytes"),
        "ttp_failed_saves",  # in an alert
        "ttp_incidents_of_unknown_loss",  # of unprotected jobs
        "ttp_agent_up",  # a series for each node; the counts are in ttp_nodes
        *("ttp_host_copy_step", "ttp_host_copy_timestamp_seconds"),  # of few jobs
        *("ttp_slow_rank", "ttp_slow_score"),  # of jobs with a slow rank
        *("ttp_drill_recoverable", "ttp_drill_step", "ttp_drill_timestamp_seconds"),
    }


def test_panels_do_not_overlap() -> None:
    taken = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert all(x < 24 for x, _ in taken)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
