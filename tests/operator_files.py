"""Checks what a job has written for operators against the JSON Schemas that `ttp schema` prints."""

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
    """Every file for operators below the log folder `logs` is as its schema says."""
    for path in logs.glob("*/incidents/*.json"):
        _validator("incident").validate(json.loads(path.read_text()))
    for path in logs.glob("*/status.json"):
        _validator("status").validate(json.loads(path.read_text()))
    for event in (event for path in logs.glob("*/events.jsonl") for event in events(path)):
        _validator("event").validate(event)


def assert_notice(notice: object) -> None:
    """A notice is as its schema says."""
    _validator("notice").validate(notice)


def events(path: Path) -> list[dict[str, Any]]:
    """Return the lines of an events.jsonl; all of them are whole, for the job has ended."""
    return [json.loads(line) for line in path.read_text().splitlines()]
