"""Changes pages for the site; `mkdocs.yml` names this hook.

Links to what the site does not have, such as sources, become text. The page of settings gets the table that
the code has.

A link to what the repository does not have either is left as it is, which ends the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from adaptor.config import settings

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the text of a page, as MkDocs asks for it."""
    folder = posixpath.dirname(page.file.src_uri)

    def changed(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if files.get_file_from_path(path) is not None:
            return link[0]
        if files.get_file_from_path(f"{path}/README.md") is not None:
            return f"[{text}]({target.rstrip('/')}/README.md{link[3] or ''})"
        return text if (ROOT / path).exists() else link[0]

    if page.file.src_uri == "docs/settings.md":
        markdown += _settings()
    return _LINK.sub(changed, markdown)


def _settings() -> str:
    """Return the table of settings with what each allows, as `ttprun --help-all` prints it."""

    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("<", "&lt;")

    rows = [
        f"| `{setting.variable}` | `{setting.flag}` | {cell(setting.default)} | {cell(setting.allowed)} |"
        f" {cell(setting.help)} |"
        for setting in settings()
    ]
    head = [
        "",
        "",
        "## What each allows",
        "",
        "From the tables in `adaptor/config.py` and in the optional parts (`adaptor/plug_ins.py`).",
        "",
    ]
    return "\n".join(
        [*head, "| variable | flag | default | allowed | meaning |", "|---|---|---|---|---|", *rows, ""]
    )
