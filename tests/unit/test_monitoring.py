"""The alert rules in examples/monitoring: of metrics that there are, with runbooks that there are."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "monitoring"
RULES: list[dict[str, Any]] = yaml.safe_load((EXAMPLE / "alerts.yml").read_text())["groups"][0]["rules"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alert_has_its_metrics_and_its_runbook(rule: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    for metric in re.findall(r"\bttp_\w+", rule["expr"]):
        assert re.search(rf"^\| `{metric}\b", page, re.MULTILINE), metric
    path, _, section = rule["annotations"]["runbook"].partition("#")
    titles = re.findall(r"^## (.+)$", (ROOT / path).read_text(), re.MULTILINE)
    assert not section or section in {title.lower().replace(" ", "-") for title in titles}
    assert rule["alert"] in (EXAMPLE / "README.md").read_text()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool (Debian: prometheus)")
def test_the_rules_fire_when_they_must() -> None:
    subprocess.run(["promtool", "test", "rules", "alerts_test.yml"], cwd=EXAMPLE, check=True)
    subprocess.run(["promtool", "check", "config", "prometheus.yml"], cwd=EXAMPLE, check=True)
