"""Imports go downwards and form no circle, including those inside functions and under TYPE_CHECKING."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit import source_tree

# From bottom to top; a module belongs to the longest of these prefixes of its name. It may import
# modules of its own and lower layers. docs/architecture.md describes the layers.
LAYERS = (
    (
        *("adaptor.text", "adaptor.output", "adaptor.threads", "adaptor.descriptors", "adaptor.errors"),
        *("adaptor.terminal", "adaptor.plug_ins"),
    ),
    (
        *("adaptor.config", "adaptor.misspelt", "adaptor.setting_values", "adaptor.context"),
        *("adaptor.host_memory", "adaptor._script", "adaptor.patching"),
    ),
    ("adaptor.engines", "adaptor.waits"),
    ("adaptor.devices",),
    ("adaptor.protocol",),
    ("adaptor.hooks",),
    ("adaptor.controller", "adaptor.replica"),
    ("adaptor.checkpoint", "adaptor.diagnostics", "adaptor.verification"),
    ("adaptor.operations", "adaptor.transform"),
    ("adaptor.store",),
    ("adaptor.worker", "adaptor.library"),
    ("adaptor.online",),
    ("adaptor.host_copy",),
    ("adaptor.mindio",),
    ("adaptor.frameworks", "adaptor.preflight", "adaptor.protection_plan"),
    ("adaptor.patches", "adaptor.mindio.provided"),
    ("adaptor", "adaptor._start", "adaptor.commands", "adaptor.__main__"),
    ("adaptor.launchers",),
)
# The optional parts, by prefixes of their modules' names. All other modules are the core, which
# imports none of them: parts register by hooks (`adaptor.plug_ins`).
OPTIONAL = {
    "operations": ("adaptor.operations", "adaptor.launchers.operations"),
    "doctor": ("adaptor.launchers.doctor",),
    "store": ("adaptor.store", "adaptor.launchers.store"),
    "transform": ("adaptor.transform", "adaptor.frameworks.reshape"),
    "recordings": ("adaptor.diagnostics",),
    "mindio": ("adaptor.mindio", "adaptor.frameworks.mindio_"),
    "mindspeed": ("adaptor.frameworks.mindspeed_", "adaptor.patches.mindspeed"),
    "modellink": ("adaptor.frameworks.ascendspeed", "adaptor.patches.ascendspeed_"),
    "adapters": ("adaptor.adapters",),
    "cpu stand-ins": ("adaptor.devices.cpu", "adaptor.patches.cpu_megatron"),
}
# The public functions that `adaptor` names, and imports when a script asks for them.
PUBLIC = {("adaptor", "adaptor.transform.functions")}
# The launcher starts training processes: it must not import what only those need.
WORKERS_ONLY = (
    "adaptor.worker",
    "adaptor.online",
    "adaptor.host_copy",
    "adaptor.frameworks",
    "adaptor.patches",
    "adaptor.replica",
    "adaptor.library",
)
# The first things that a worker runs.
WORKER_MAIN = {
    "adaptor.launchers.agent.worker_main",
    "adaptor.launchers.spares.spare_main",
    "adaptor.launchers.spares.spare_imports",
}
# Settings are read once: by the context of a process, by ttprun, which passes them on, and by ttp.
READS_SETTINGS = {
    "adaptor.context",
    "adaptor.launchers.doctor.doctor_command",
    "adaptor.launchers.cli.ttprun",
    "adaptor.operations.cli",
    "adaptor.store.command",
}
# State of a whole process that stands in a module, and why it is no part of the context. All other state is a
# part of it (`adaptor.context`).
STATE = {
    "adaptor._enabled": "nothing else is imported before the adaptor is enabled",
    "adaptor.checkpoint.save_folder_claim._claimed": "a process claims one save folder",
    "adaptor.checkpoint.step_record._numpy": "the last read random state of numpy, of the whole process",
    "adaptor.checkpoint.step_record._python": "the last read state of `random`, of the whole process",
    "adaptor.context._context": "the context itself",
    "adaptor.devices.cpu._active": "without anything else of the adaptor",
    "adaptor.output._streams": "the threads of stdout and stderr",
    "adaptor.output._writers": "what is drained at the end of the process",
    "adaptor.patching._raises": "import hooks last as long as the interpreter",
    "adaptor.patching._watched": "import hooks last as long as the interpreter",
    "adaptor.patching._unit._units": "declarations, which importing a module makes",
    "adaptor.replica.group._everyone": "a process group, as torch's own are the process's",
    "adaptor.threads.reserve": "threads, which last as long as the process",
    "adaptor.worker.runtime._runtime": "the connection to the agent",
}
# The decisions depend on messages alone.
PURE = {"adaptor.controller": ("adaptor.controller", "adaptor.protocol")}


def _imports(module: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    for node in source_tree.nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports are not looked at"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else str(node.module)


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    modules = source_tree.modules()
    return {
        module: {name for name in _imports(module, path, modules) if name in modules} - {module}
        for module, path in modules.items()
    }


def _belongs(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def _layer(module: str) -> int:
    return max((len(name), n) for n, names in enumerate(LAYERS) for name in names if _belongs(module, name))[
        1
    ]


def test_the_graph_has_every_shipped_module(graph: dict[str, set[str]]) -> None:
    assert {"adaptor", "adaptor.patches.megatron_core", "adaptor.launchers.agent.node"} <= graph.keys()


def test_no_import_goes_upwards(graph: dict[str, set[str]]) -> None:
    upwards = [
        f"{module} imports {imported}, which is above it"
        for module, imports_of_module in sorted(graph.items())
        for imported in sorted(imports_of_module)
        if _layer(imported) > _layer(module)
    ]
    assert upwards == []


def part_of(module: str) -> str | None:
    """Return the optional part that a module belongs to; None: the core."""
    return next((part for part, names in OPTIONAL.items() if module.startswith(names)), None)


def test_the_core_imports_no_optional_part(graph: dict[str, set[str]]) -> None:
    assert {part_of(module) for module in graph} == {None, *OPTIONAL}
    imports = [
        f"{module} imports {imported} of {part_of(imported)}"
        for module, imports_of_module in sorted(graph.items())
        for imported in sorted(imports_of_module)
        if part_of(module) is None and part_of(imported) is not None and (module, imported) not in PUBLIC
    ]
    assert imports == []


def test_there_is_no_circle(graph: dict[str, set[str]]) -> None:
    remaining = dict(graph)
    while leaves := [
        module for module, imports_of_module in remaining.items() if not imports_of_module & remaining.keys()
    ]:
        for module in leaves:
            del remaining[module]
    # What imports a circle stays as well: take away what nothing in the rest imports.
    while tops := remaining.keys() - {imported for imports in remaining.values() for imported in imports}:
        for module in tops:
            del remaining[module]
    assert sorted(remaining) == []


def test_the_controller_decides_by_messages_alone(graph: dict[str, set[str]]) -> None:
    for package, allowed in PURE.items():
        mixed = [
            f"{module} imports {imported}"
            for module, imports_of_module in sorted(graph.items())
            for imported in sorted(imports_of_module)
            if _belongs(module, package) and not any(_belongs(imported, name) for name in allowed)
        ]
        assert mixed == []


def test_the_launcher_imports_nothing_of_the_worker(graph: dict[str, set[str]]) -> None:
    launcher = {module for module in graph if _belongs(module, "adaptor.launchers")} - WORKER_MAIN
    reached, new = set[str](), launcher
    while new:
        reached |= new
        new = {imported for module in new for imported in graph[module]} - reached
    theirs = [name for name in sorted(reached) if any(_belongs(name, worker) for worker in WORKERS_ONLY)]
    assert theirs == []


def test_a_launcher_that_starts_loads_no_patches() -> None:
    script = "import sys, adaptor.launchers.cli.ttprun; print(*sys.modules)"
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = completed.stdout.split()
    assert "adaptor.launchers.cli.ttprun" in loaded
    assert [name for name in loaded if name in ("wrapt", "adaptor.worker", "adaptor.patching")] == []


def test_settings_are_read_once() -> None:
    readers = {
        module
        for module, path in source_tree.modules().items()
        for node in source_tree.nodes(path)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "config.load"
    }
    assert readers == READS_SETTINGS


def test_a_coroutine_that_is_cancelled_ends() -> None:
    """In Python 3.10 and 3.11 `asyncio.wait_for` may lose a cancellation; `wire.deadline` does not."""
    calls = [
        f"{module}, line {node.lineno}"
        for module, path in source_tree.modules().items()
        for node in source_tree.nodes(path)
        if isinstance(node, ast.Attribute) and node.attr == "wait_for"
        if isinstance(node.value, ast.Name) and node.value.id == "asyncio"
    ]
    assert calls == []


def test_frames_are_read_while_no_garbage_is_collected() -> None:
    modules = {
        module
        for module, path in source_tree.modules().items()
        for node in source_tree.nodes(path)
        if isinstance(node, ast.Attribute) and node.attr == "_current_frames"
    }
    assert modules == {"adaptor.worker.stacks"}


def _changing_classes() -> set[str]:
    """Return the names of the adaptor's classes whose objects change after their construction.

    A unit of patches is a declaration, held by `adaptor.patching._unit._units`.
    """
    return {
        kind.name
        for path in source_tree.modules().values()
        for kind in source_tree.nodes(path)
        if isinstance(kind, ast.ClassDef)
        for method in kind.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        and method.name not in ("__init__", "__post_init__")
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    } - {"Unit"}


def _state(path: Path, changing: set[str]) -> Iterator[str]:
    """Yield the names that a module's functions rebind, and its mutable containers and objects."""
    for node in source_tree.nodes(path):
        if isinstance(node, ast.Global):
            yield from node.names
    for statement in source_tree.parsed(path).body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        value = statement.value
        kind = ast.unparse(value.func).split("[")[0].split(".")[-1] if isinstance(value, ast.Call) else ""
        mutable = isinstance(value, ast.List | ast.Dict | ast.Set) or kind in (
            *("list", "dict", "set", "deque", "defaultdict", "OrderedDict", "Counter"),
            *("WeakSet", "WeakKeyDictionary", "WeakValueDictionary"),
            *changing,
        )
        yield from (
            target.id
            for target in targets
            if isinstance(target, ast.Name) and mutable and not target.id.isupper() and target.id != "__all__"
        )


def test_state_stands_in_the_context() -> None:
    changing = _changing_classes()
    names = {
        f"{module}.{name}"
        for module, path in source_tree.modules().items()
        for name in _state(path, changing)
    }
    assert names - STATE.keys() == set(), "make it a part of the context (adaptor.context)"
    assert STATE.keys() - names == set(), "declared, and no longer there"


def test_no_module_changes_a_name_of_another(graph: dict[str, set[str]]) -> None:
    """Only functions of a module change its state."""
    changed = [
        f"{module}, line {node.lineno}: {ast.unparse(node)}"
        for module, path in source_tree.modules().items()
        if (own_names := _own_modules(path, graph))
        for node in source_tree.nodes(path)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id in own_names
    ]
    assert changed == []


def _own_modules(path: Path, graph: dict[str, set[str]]) -> set[str]:
    """Return the names by which a module has imported the adaptor's modules."""
    return {
        (alias.asname or alias.name).split(".")[0]
        for node in source_tree.nodes(path)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}") in graph
    }


def test_arguments_are_named_and_not_grouped() -> None:
    """`*(a, b)` in a call hides which parameter is which."""
    grouped = [
        f"{module}, line {call.lineno}: {ast.unparse(argument)}"
        for module, path in source_tree.modules().items()
        for call in source_tree.nodes(path)
        if isinstance(call, ast.Call)
        for argument in call.args
        if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple)
    ]
    assert grouped == []


def test_messages_are_imported_from_their_package(graph: dict[str, set[str]]) -> None:
    package = "adaptor.protocol.messages"
    past_it = [
        f"{module} imports {imported}"
        for module, imports_of_module in sorted(graph.items())
        for imported in sorted(imports_of_module)
        if imported.startswith(f"{package}.") and not _belongs(module, package)
    ]
    assert past_it == []
