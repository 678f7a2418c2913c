"""Kept code: a fork executes what its files say now, and reads no bytecode for it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.faults import warm

ROOT = Path(__file__).parents[2]

MODULE = """
import dataclasses
print("executed")
@dataclasses.dataclass
class Point:
    x: int = 1
"""
KEEPS = """
import importlib, os, sys
sys.path[:0] = [{root!r}, {folder!r}]
from tests.faults import kept_code
kept_code.keep(lambda: (importlib.import_module("point"), 1 / 0), [*map(kept_code.Path, {scripts!r})])
opened = []
sys.addaudithook(lambda event, details: event == "open" and opened.append(str(details[0])))
"""


def _run(folder: Path, then: str, *scripts: Path) -> str:
    code = KEEPS.format(root=str(ROOT), folder=str(folder), scripts=[str(script) for script in scripts])
    done = warm.run([sys.executable, "-c", code + then])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_module_is_executed_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / "point.py").write_text(MODULE)
    said = _run(
        tmp_path,
        "assert 'point' not in sys.modules\n"
        "import point\n"
        "made = point.Point.__init__\n"
        "print(point.Point(2), made.__annotations__, made.__code__.co_filename)\n"
        "print([path for path in opened if 'point' in path])\n",
    )
    assert said == "executed\nPoint(x=2) {'x': <class 'int'>, 'return': None} <string>\n[]\n"


def test_a_module_that_has_changed_is_read(tmp_path: Path) -> None:
    (tmp_path / "point.py").write_text(MODULE)
    said = _run(
        tmp_path,
        f"kept_code.Path({str(tmp_path / 'point.py')!r}).write_text('print(\"changed since\")')\n"
        "import point\n",
    )
    assert said == "changed since\n"


def test_a_script_is_run_as_its_file_says(tmp_path: Path) -> None:
    (tmp_path / "point.py").write_text(MODULE)
    script = tmp_path / "script.py"
    script.write_text("print(__file__ + ' one')")
    runs = f"import runpy\nrunpy.run_path({str(script)!r})\n"
    changes = f"kept_code.Path({str(script)!r}).write_text(\"print('two')\")\n"
    assert _run(tmp_path, runs + changes + runs, script, tmp_path / "absent.py") == f"{script} one\ntwo\n"


def test_workers_read_no_bytecode_of_the_adaptor() -> None:
    """The starter of the tests keeps what its forks import."""
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "sys.addaudithook(lambda event, details: event == 'open' and print('opened', details[0]))\n"
        "import adaptor.worker.runtime\n"
        "print(adaptor.__name__)\n"
    )
    done = warm.run([sys.executable, "-c", code])
    assert (done.stdout, done.stderr) == ("adaptor\n", "")
