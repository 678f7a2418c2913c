"""Reports, lines and documents name the same versions of Megatron-LM as tested."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.specifiers import SpecifierSet

from adaptor.frameworks import tested_versions
from adaptor.frameworks.megatron_online_support import of_version
from adaptor.frameworks.tested_versions import MEGATRON, ONLINE
from adaptor.patches import _versions

ROOT = Path(__file__).parents[2]
WORDS = tested_versions.words(ONLINE)


def _text(page: str) -> str:
    return (ROOT / page).read_text()


def test_the_report_and_the_line_of_a_job() -> None:
    tested = SpecifierSet(_versions.MEGATRON)
    for minor in range(6, 25):
        is_tested = f"0.{minor}" in ("0.6", *MEGATRON)
        assert tested.contains(f"0.{minor}.1", prereleases=True) == is_tested
        assert (not of_version(f"0.{minor}.1")) == (f"0.{minor}" in ONLINE)
    assert of_version("0.18.0").endswith(f"; {WORDS} have been")


def test_the_documents() -> None:
    assert f"Online recovery works with Megatron-LM {WORDS}, " in _text("README.md")
    assert f"| Megatron-LM {WORDS} (`main`) | yes | yes, over gloo | by hand |" in _text(
        "docs/is_it_for_me.md"
    )
    (before,) = set(MEGATRON) - set(ONLINE)
    assert f"| 0.15.0rc5 | {before}, {WORDS} (main) |" in _text("docs/promises.md")


def test_the_runs() -> None:
    """Each version has a run on the page of runs, and no other version has one."""
    page = _text("docs/compatibility.md")
    (row,) = [line for line in page.splitlines() if line.startswith("| [Megatron-LM](#megatron-lm) |")]
    (runs,) = re.findall(r"^\| version \| commit \| tried \|\n\|.*\n((?:\|.*\n)*)", page, re.MULTILINE)[:1]
    minors = set(re.findall(r"\b0\.\d+(?=\.\d)", row))
    assert minors == set(MEGATRON)
    assert {f"0.{minor}" for minor in re.findall(r"^\| 0\.(\d+)\.", runs, re.MULTILINE)} == minors
