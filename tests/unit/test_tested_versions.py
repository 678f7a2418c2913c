"""The report and the line of a job agree on the tested versions of Megatron-LM."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

from adaptor.frameworks import tested_versions
from adaptor.frameworks.megatron_online_support import of_version
from adaptor.frameworks.tested_versions import MEGATRON, ONLINE


def test_the_report_and_the_line_of_a_job_name_the_same_versions() -> None:
    tested = SpecifierSet(tested_versions.MEGATRON_SPECIFIER)
    for minor in range(6, 25):
        is_tested = f"0.{minor}" in ("0.6", *MEGATRON)
        assert tested.contains(f"0.{minor}.1", prereleases=True) == is_tested
        assert (not of_version(f"0.{minor}.1")) == (f"0.{minor}" in ONLINE)
    assert of_version("0.21.0").endswith(f"; {tested_versions.words(ONLINE)} have been")
