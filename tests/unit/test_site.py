"""The site of the documentation, as `make docs` builds it: links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_docs import pages_of_the_site

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is in the extra site")
@pytest.mark.parametrize(
    ("added", "line"),
    [
        ("", ""),
        ("[a](../docs/absent.md)", "contains a link '../docs/absent.md', but the target"),
        ("[a](settings.md#absent)", "contains a link 'settings.md#absent', but the doc"),
        ("[a](../tests/absent.py)", "contains a link '../tests/absent.py', but the target"),
        ("[a](../tests/ports.py) [b](../benchmarks)", ""),
    ],
)
def test_the_site_is_built(added: str, line: str, tmp_path: Path) -> None:
    for page in {*pages_of_the_site(), "docs/demo.svg"}:
        (tmp_path / "pages" / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / "pages" / page)
    with (tmp_path / "pages" / "docs" / "costs.md").open("a") as page_file:
        page_file.write(f"\n\n{added}\n")
    configuration = (ROOT / "mkdocs.yml").read_text()
    for name in ("pages", "html"):
        configuration = configuration.replace(f"out/site/{name}", str(tmp_path / name))
    configuration = configuration.replace("docs/site_links.py", str(ROOT / "docs/site_links.py"))
    (tmp_path / "mkdocs.yml").write_text(configuration)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(tmp_path / "mkdocs.yml")],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert (done.returncode == 0, line in done.stderr) == (not line, True), done.stderr
