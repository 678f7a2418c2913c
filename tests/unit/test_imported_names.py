"""Changes that a script makes before an import count as differences for a spare; later changes do not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = """
class Base: pass
class Kept(Base): pass
def function(): pass
def other(): pass
"""
THERE = """
import functools
from here import Base, Kept, function
class Own(Base): pass
def decorated(wrapped):
    @functools.wraps(wrapped)
    def around(): wrapped()
    return around
@decorated
def own(): pass
"""
# Modules that change attributes of another module.
CHANGES = "import there; there.function = print"
WRAPS = """
import functools, there
there.function = functools.wraps(there.function)(lambda: None)
"""
THIRD = "from there import function"
FILES = {"here": HERE, "there": THERE, "changes": CHANGES, "wraps": WRAPS, "third": THIRD}
# Calls `tell` with each of the values, in a fork.
EACH = """
import json, os, sys
def tell_each(tell):
    for given in json.loads(sys.argv[2]):
        read, write = os.pipe()
        if not (pid := os.fork()):
            with open(write, "w") as told:
                json.dump(tell(given), told)
            sys.exit()
        os.close(write)
        with open(read) as told:
            print(told.read())
        assert os.waitpid(pid, 0)[1] == 0
sys.path.insert(0, sys.argv[1])
"""
# The processes of a job: a worker that runs a script and reports its imports, and a spare.
WORKER = f"""{EACH}
from adaptor import context
from adaptor.worker import script_imports
from adaptor.worker.script_imports import ScriptImports
def names_of(script):
    context.part(ScriptImports).begin()
    exec(script, {{}})
    names = script_imports.modules_of_this_process(0).names
    return {{name: code.hex() for name, code in names.items()}}
tell_each(names_of)
"""
SPARE = f"""{EACH}
from importlib.util import find_spec
from adaptor.launchers.spares import spare_imports
from adaptor.protocol.spare_messages import Import
def differs_from(worker):
    names = {{name: bytes.fromhex(code) for name, code in worker.items()}}
    origins = {{name: find_spec(name).origin for name in names}}
    imports = spare_imports._ImportsAsAWorker(Import((), origins, names, {{}}, ()))
    return imports.run().unfit.partition(" is another one")[0]
tell_each(differs_from)
"""


def run(program: str, *arguments: object) -> str:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    completed = subprocess.run(command, text=True, capture_output=True, check=True)
    assert not completed.stderr
    return completed.stdout.strip()


def names_of(folder: Path, *scripts: str) -> list[dict[str, str]]:
    """Return the imports of each script, each run in its own worker."""
    return [json.loads(line) for line in run(WORKER, folder, json.dumps(scripts)).splitlines()]


def compared(folder: Path, *scripts: str) -> list[str]:
    """Return how processes with the same imports differ from the processes that run the scripts."""
    for name, source in FILES.items():
        (folder / f"{name}.py").write_text(source)
    imported_names = names_of(folder, *scripts)
    assert all(names["there"] for names in imported_names)
    return [json.loads(line) for line in run(SPARE, folder, json.dumps(imported_names)).splitlines()]


CHANGED_BEFORE = {
    "": "",
    "import here; here.function = lambda: None": "there.function",
    "import here, functools; here.function = functools.wraps(here.function)(lambda: 0)": "there.function",
    "import here, wrapt; wrapt.wrap_function_wrapper(here, 'function', lambda *given: 0)": "there.function",
    "import here; here.Kept = type('Kept', (here.Kept,), {})": "there.Kept",
    "import here; here.Base = type('New', (), {})": "there.Base",
    # A later lookup gets the new attribute, in a spare as well, once it runs the script.
    "import here; here.other = lambda: None": "",
    "import here; here.Kept.method = lambda self: None": "",
}


def test_a_change_before_an_import_by_name_is_found(tmp_path: Path) -> None:
    differs = compared(tmp_path, *(f"{change}\nimport there" for change in CHANGED_BEFORE))
    assert dict(zip(CHANGED_BEFORE, differs, strict=True)) == CHANGED_BEFORE


HOOK = """
import wrapt
Other = type("Other", (), {"__module__": "__main__"})
wrapt.register_post_import_hook(lambda there: vars(there).update(own=print, Own=Other), "there")
import there
assert there.own is print
"""


CHANGED_AFTERWARDS = {
    "import there; there.function = lambda: None": "",
    "import here, there; here.function = there.function = lambda: None": "",
    "import there; there.Kept = type('Kept', (), {})": "",
    "import there; there.Own = type('Own', (), {})": "",
    "import there; del there.function": "",
    # As networkx does at the first call.
    "import there; there.function.__code__ = (lambda: None).__code__": "",
    # In a spare the hook runs when the script registers it.
    HOOK: "",
    # A spare imports both, and only then runs the script.
    "import there; there.function = lambda: None; import third": "third.function",
    "import there; there.function = lambda: None; import wraps": "there.function",
    "import here; here.function = lambda: None; import there, wraps": "there.function",
    # A module makes the change, in a spare as well.
    "import there, changes": "",
    "import here; here.function = lambda: None; import there, changes": "there.function",
    "import here; here.function = lambda: None; import there; there.Kept = None": "there.function",
}


def test_a_change_after_an_import_is_made_in_a_spare_as_well(tmp_path: Path) -> None:
    differs = compared(tmp_path, *CHANGED_AFTERWARDS)
    assert dict(zip(CHANGED_AFTERWARDS, differs, strict=True)) == CHANGED_AFTERWARDS


LAZY = """
import importlib.util, sys
spec = importlib.util.find_spec("late")
spec.loader = importlib.util.LazyLoader(spec.loader)
module = sys.modules["late"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""


def test_comparing_loads_no_lazy_module(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text(HERE)
    (tmp_path / "late.py").write_text(THIRD.replace("there", "here"))
    check = "assert 'here' not in sys.modules, 'it was loaded'"
    not_loaded, loaded = names_of(tmp_path, f"{LAZY}\n{check}", f"{LAZY}\nmodule.function")
    assert not_loaded == {}
    assert "here" in loaded


def test_the_traceback_of_an_import_is_that_of_python(tmp_path: Path) -> None:
    """The watcher of imports has no frame during an import, and leaves nothing behind."""
    (tmp_path / "inner.py").write_text("1 / 0\n")
    (tmp_path / "outer.py").write_text("import inner\n")
    script = (
        "import traceback\n"
        "try: import outer\n"
        "except ZeroDivisionError as error:\n"
        "    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}\n"
        "    assert not [file for file in files if 'script_imports' in file], files\n"
        "    assert len(traceback.extract_tb(error.__traceback__)) == 3\n"
        "import there; assert type(there.__spec__).__name__ == 'ModuleSpec'"
    )
    assert compared(tmp_path, script) == [""]


def test_objects_that_answer_nothing_are_left_out(tmp_path: Path) -> None:
    """A module may hold any object: its other attributes are still compared."""
    odd = "class Odd(type):\n    __mro__ = property(lambda cls: 1 / 0)\n"
    change = "import here; here.odd = Odd('odd', (), {}); here.function = lambda: None; import there"
    assert compared(tmp_path, odd + change) == ["there.function"]


def test_the_record_of_changed_variables_is_no_read_of_a_module() -> None:
    """A spare would stop before the next module, as if it read the script's variable."""
    program = """
import os
from adaptor import context
from adaptor.launchers.spares import spare_imports
from adaptor.worker import script_imports
from adaptor.worker.script_imports import ScriptImports
recorder = context.part(ScriptImports)
reads = []
with spare_imports._reads_of(lambda name, module: reads.append(name)):
    recorder.begin()
    os.environ["SET_BY_THE_SCRIPT"] = "1"
    recorder.note_variables()
print(reads, list(recorder.changed_variables()))
"""
    assert run(program) == "[] ['SET_BY_THE_SCRIPT']"


def test_a_module_that_reads_all_variables_is_imported_by_a_spare(tmp_path: Path) -> None:
    """The adaptor disables the watchdogs in a worker; a spare still imports such a module."""
    (tmp_path / "first.py").touch()
    (tmp_path / "reads_all.py").write_text(
        "import os; watchdog = dict(os.environ)['TORCH_NCCL_ENABLE_MONITORING']"
    )
    program = """
import os, sys
from adaptor.launchers.spares import spare_imports
from adaptor.protocol.messages import ChangedVariable
from adaptor.protocol.spare_messages import Import
from adaptor.worker.script_imports import code_of_variable
folder, name = sys.argv[1], "TORCH_NCCL_ENABLE_MONITORING"
sys.path.insert(0, folder)
os.environ[name] = "0"
off = ChangedVariable("first", code_of_variable(name))
os.environ[name] = "1"
origins = {module: f"{folder}/{module}.py" for module in ("first", "reads_all")}
imports = spare_imports._ImportsAsAWorker(Import((), origins, {}, {name: off}, ()))
with spare_imports._reads_of(imports.note_read):
    ready = imports.run()
# At a restart reading all variables does not count as reading the changed ones; asking for one does.
before = dict(os.environ)
now = {**before, "PATH": "/other"}
print(ready.unfit, sys.modules["reads_all"].watchdog, imports.changed_read(before, now))
imports.note_read("PATH", "asks")
print(imports.changed_read(before, now))
"""
    changed = "asks reads PATH while it is imported, and it has another value now"
    assert run(program, tmp_path).split() == ["0", *changed.split()]
