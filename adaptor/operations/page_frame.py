"""The frame of all pages: the style, the script, and what a browser may do for them.

A page is one file. It asks nothing of any other place, so it can be sent to anybody: its policy allows this
style and this script by their digests, and a request to the server that the page is from.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from adaptor.operations import charts, timeline
from adaptor.operations.words import duration, size


def _text(name: str) -> str:
    return resources.files("adaptor.operations").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


_CSS, _SCRIPT = _text("page.css"), _text("page.js")
POLICY = (
    f"default-src 'none'; style-src {_digest(_CSS)}; script-src {_digest(_SCRIPT)}; img-src data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'"
)


def environment(*folders: Path) -> jinja2.Environment:
    """Return the environment of the templates of pages.

    Args:
        folders: with more templates; those here come first.
    """
    loaders: Sequence[jinja2.BaseLoader] = [
        jinja2.PackageLoader("adaptor.operations", ""),
        jinja2.FileSystemLoader(folders),
    ]
    jinja_environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja_environment.globals.update(
        css=Markup(_CSS),
        script=Markup(_SCRIPT),
        policy=POLICY,
        duration=duration,
        size=size,
        row=charts.row,
        scale_of=timeline.scale,
        tick_labels=timeline.tick_labels,
    )
    return jinja_environment
