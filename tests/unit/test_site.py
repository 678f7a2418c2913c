"""The documentation site as `make docs` builds it: all links have a target."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.unit.test_docs import pages_of_the_site
from tests.waiting import captured

ROOT = Path(__file__).parents[2]
IMAGES = [str(path.relative_to(ROOT)) for end in ("svg", "css") for path in ROOT.glob(f"docs/*.{end}")]


WRONG = {
    "[a](../docs/absent.md)": "contains a link '../docs/absent.md', but the target",
    "[a](settings.md#absent)": "contains a link 'settings.md#absent', but the doc",
    "[a](../tests/absent.py)": "contains a link '../tests/absent.py', but the target",
}
RIGHT = "[a](../tests/ports.py) [b](../benchmarks)"
MISSING = [name for name in ("mkdocs", "mkdocstrings") if importlib.util.find_spec(name) is None]


@pytest.mark.integration
@pytest.mark.skipif(bool(MISSING), reason="mkdocs and mkdocstrings are in the extra site")
@pytest.mark.parametrize("added", [RIGHT, " ".join(WRONG)], ids=["right", "wrong"])
def test_the_site_is_built(added: str, tmp_path: Path) -> None:
    for page in {*pages_of_the_site(), *IMAGES}:
        (tmp_path / "pages" / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / "pages" / page)
    with (tmp_path / "pages" / "docs" / "costs.md").open("a") as page_file:
        page_file.write(f"\n\n{added}\n")
    configuration = (ROOT / "mkdocs.yml").read_text()
    for name in ("pages", "html"):
        configuration = configuration.replace(f"out/site/{name}", str(tmp_path / name))
    configuration = configuration.replace("docs/site_links.py", str(ROOT / "docs/site_links.py"))
    configuration = configuration.replace("paths: [.]", f"paths: [{ROOT}]")
    (tmp_path / "mkdocs.yml").write_text(configuration)
    completed = captured(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(tmp_path / "mkdocs.yml")],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    lines = [line for line in WRONG.values() if line in completed.stderr]
    assert (completed.returncode == 0, lines) == (
        (True, []) if added == RIGHT else (False, [*WRONG.values()])
    ), completed.stderr
    if added == RIGHT:
        # Pages generated from docstrings and from the table of settings.
        for name, text in {
            "api": "begin_step",
            "messages": "TerminationRequested",
            "settings": "What each allows",
        }.items():
            assert text in (tmp_path / "html" / "docs" / name / "index.html").read_text(), name
