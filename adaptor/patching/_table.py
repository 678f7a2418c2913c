"""The outcomes as a table for people."""

from __future__ import annotations

from adaptor.patching._unit import Outcome, Status


def format_outcomes(outcomes: tuple[Outcome, ...]) -> str:
    """Return an aligned table of the patches, then for each unit the found and the tested versions."""
    rows = [("patch", "unit", "status", "why, or what is wrong")]
    rows += [(outcome.target, outcome.unit, outcome.status.value, _detail(outcome)) for outcome in outcomes]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]
    lines += [""]
    lines += dict.fromkeys(f"unit {outcome.unit}: {_version(outcome)}" for outcome in outcomes)
    return "\n".join(lines)


def _detail(outcome: Outcome) -> str:
    if outcome.status is Status.DRIFTED:
        return f"expected {outcome.expected}, found {outcome.found}"
    if outcome.late:
        return f"{outcome.why}; goes past it: {', '.join(outcome.late)}"
    return outcome.why


def _version(outcome: Outcome) -> str:
    if outcome.version is None:
        return f"{outcome.framework}, tested {outcome.tested}, not imported or of unknown version"
    verdict = {True: "tested", False: "not tested", None: "a version that cannot be compared"}
    return f"{outcome.framework} {outcome.version} is {verdict[outcome.in_tested_range]} ({outcome.tested})"
