"""Keeps compiled code in memory, for the forks of the process that has read it.

A third of the CPU time of a tiny job goes into bytecode: each worker reads and unmarshals the same six
hundred files, and compiles the same methods of dataclasses. `keep` does both once, without executing a
module: in a fork the import system finds, executes and hooks each module as always, and only takes the code
from memory.

*Scouts*, forks that import the modules and end, report the needed files and texts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import runpy
from collections.abc import Callable, Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

_read: Callable[[SourceFileLoader, str], CodeType | None] = SourceFileLoader.get_code
# By the path of the source: modification time and size, and the code.
_modules: dict[str, tuple[tuple[int, int], CodeType]] = {}
# By source text: the code of methods that dataclasses generate.
_methods: dict[str, CodeType] = {}
# By path: the source text of a script, and its code.
_scripts: dict[str, tuple[bytes, CodeType]] = {}


def keep(acts: Iterable[Callable[[], None]], scripts: Iterable[Path] = ()) -> None:
    """Keep the code of modules and scripts, for this process and its forks.

    Args:
        acts: functions that import modules, each called in a scout of its own; if one raises, the modules
            imported until then are kept.
        scripts: scripts to keep by path; missing ones are skipped.
    """
    files: dict[str, str] = {}
    texts: set[str] = set()
    for act in acts:
        imported, compiled = _scouted(act)
        files |= imported
        texts |= set(compiled)
    for path, name in files.items():
        version, code = _version(path), _read(SourceFileLoader(name, path), name)
        if code is not None:
            _modules[path] = version, code
    for text in texts:
        _methods[text] = _compiled(text)
    for script in scripts:
        if script.exists():
            source = script.read_bytes()
            _scripts[str(script)] = source, compile(source, str(script), "exec", dont_inherit=True)
    runpy.compile = _compile_script  # type: ignore[attr-defined]
    SourceFileLoader.get_code = _code_of_module  # type: ignore[method-assign, assignment]
    dataclasses.exec = _execute  # type: ignore[attr-defined]


def _scouted(act: Callable[[], None]) -> tuple[dict[str, str], list[str]]:
    """Return the imported modules (name by path), and the texts that dataclasses have compiled."""
    read_end, write_end = os.pipe()
    scout = os.fork()
    if scout == 0:
        try:
            os.close(read_end)
            with os.fdopen(write_end, "w") as stream:
                json.dump(_imported(act), stream)
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as stream:
        report = stream.read()
    os.waitpid(scout, 0)
    files, texts = json.loads(report)
    return files, texts


def _imported(act: Callable[[], None]) -> tuple[dict[str, str], list[str]]:
    files: dict[str, str] = {}
    texts: dict[str, None] = {}

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        files[loader.path] = name
        return _read(loader, name)

    def execute(text: str, *spaces: Any) -> None:
        texts[text] = None
        exec(_compiled(text), *spaces)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]
    dataclasses.exec = execute  # type: ignore[attr-defined]
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(devnull, stream)
    with contextlib.suppress(BaseException):
        act()
    return files, list(texts)


def _version(path: str) -> tuple[int, int]:
    status = os.stat(path)  # noqa: PTH116  # for each module that is imported
    return status.st_mtime_ns, status.st_size


def _code_of_module(loader: SourceFileLoader, name: str) -> CodeType | None:
    kept = _modules.get(loader.path)
    if kept is not None and kept[0] == _version(loader.path):
        return kept[1]
    return _read(loader, name)


def _compiled(text: str) -> CodeType:
    """Compile a text as `exec` does in dataclasses: without the future features of this file."""
    return compile(text, "<string>", "exec", dont_inherit=True)


def _execute(text: str, *spaces: Any) -> None:
    exec(_methods.get(text) or _compiled(text), *spaces)


def _compile_script(source: bytes, path: str, mode: str) -> CodeType:
    kept = _scripts.get(path)
    if kept is not None and kept[0] == source:
        return kept[1]
    return compile(source, path, mode, dont_inherit=True)
