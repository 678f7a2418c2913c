"""Checks the files that a job writes for operators against the JSON Schemas of `ttp schema`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from adaptor.protocol import records


@cache
def _validator(name: str) -> Any:
    schema = records.schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def assert_valid(logs: Path) -> None:
    """Assert that every file for operators below the log folder matches its schema."""
    for path in logs.glob("*/incidents/*.json"):
        _validator("incident").validate(json.loads(path.read_text()))
    for path in logs.glob("*/status.json"):
        _validator("status").validate(json.loads(path.read_text()))
    for event in (event for path in logs.glob("*/events.jsonl") for event in events(path)):
        _validator("event").validate(event)


def assert_notice(notice: object) -> None:
    """Assert that a notice matches its schema."""
    _validator("notice").validate(notice)


def events(path: Path) -> list[dict[str, Any]]:
    """Return the entries of the events.jsonl of a job that has ended."""
    return [json.loads(line) for line in path.read_text().splitlines()]
