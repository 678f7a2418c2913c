"""Docstrings: how they begin, and which functions need one and its sections."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.unit import source_tree

# No docstring begins like this.
QUESTIONS = re.compile(r"(Who|Whom|Whose|What|Whether|Where|Which|When|How)\b")
# Of so many parameters each is described.
MANY = 3
# What has one meaning in the whole tree.
PLAIN = {
    *(
        "rank",
        "node",
        "step",
        "generation",
        "term",
    ),  # as in the glossary; ranks of nodes; a controller's term
    *("model", "optimizer", "scheduler"),  # the live objects of the framework
    *("wrapped", "args", "kwargs"),  # what wrapt hands to a wrapper
    *("root", "config", "secret"),  # the save folder; the settings; what shows who is of the job
    *("message", "reader", "writer"),  # of a connection
    "now",  # seconds by the caller's clock
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {module: source_tree.parsed(path) for module, path in source_tree.modules().items()}


def test_they_say_what_a_thing_is_or_does(trees: dict[str, ast.Module]) -> None:
    """They begin with a verb or a noun."""
    questions = [
        f"{module}, line {node.body[0].lineno}: {text.splitlines()[0]}"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, Function | ast.ClassDef | ast.Module)
        and QUESTIONS.match(text := ast.get_docstring(node) or "")
    ]
    assert questions == []


def test_attributes_and_parameters_stand_in_sections(trees: dict[str, ast.Module]) -> None:
    """Below `Attributes:` and `Args:`, as Google's style has it, and in no table of another form."""
    tables = [
        f"{module}, line {node.lineno}: {node.name}"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, Function | ast.ClassDef)
        and re.search(r"^[a-z_]\w*(?:, \w+)*  +\S", ast.get_docstring(node) or "", re.MULTILINE)
    ]
    assert tables == []


def test_what_other_files_call_has_one(
    called_from_elsewhere: list[tuple[str, Function]],
) -> None:
    without = [
        f"{module}, line {function.lineno}: {function.name}"
        for module, function in called_from_elsewhere
        if not ast.get_docstring(function)
    ]
    assert without == []


def test_many_parameters_are_described_one_by_one(
    called_from_elsewhere: list[tuple[str, Function]],
) -> None:
    incomplete = [
        f"{module}, line {function.lineno}: {function.name} says nothing of {', '.join(missing)}"
        for module, function in called_from_elsewhere
        if len(names := _parameters(function)) >= MANY and (missing := _undescribed(function, names))
    ]
    assert incomplete == []


def test_errors_are_named(called_from_elsewhere: list[tuple[str, Function]]) -> None:
    """What a function itself raises its docstring names, below `Raises:` or in a sentence of one line."""
    silent = [
        f"{module}, line {function.lineno}: {function.name} says nothing of {', '.join(sorted(missing))}"
        for module, function in called_from_elsewhere
        if "aises" not in (text := ast.get_docstring(function) or "")
        and (missing := {name for name in _raised(function) if name not in text})
    ]
    assert silent == []


def _raised(function: Function) -> Iterator[str]:
    """Return the names of the classes that the body raises; what only subclasses implement is none."""
    rest: list[ast.AST] = [*function.body]
    while rest:
        node = rest.pop()
        if isinstance(node, Function | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func).split(".")[-1]
            if name[:1].isupper() and name != "NotImplementedError":
                yield name
        rest.extend(ast.iter_child_nodes(node))


def _undescribed(function: Function, names: list[str]) -> list[str]:
    """Return the parameters that the docstring names neither below `Args:` nor between backticks."""
    text = ast.get_docstring(function) or ""
    if "arguments are those of" in text or "arguments are the fields of" in text:
        return []
    arguments = re.search(r"\nArgs:\n((?: .*\n?|\n)*)", text)
    entries = re.findall(r"^ {4}(\S[^:]*):", arguments.group(1) if arguments else "", re.MULTILINE)
    described = set(re.findall(r"\w+", " ".join((*entries, *re.findall(r"`([^`]*)`", text)))))
    return [name for name in names if name not in described and name not in _plain(function)]


def _plain(function: Function) -> set[str]:
    """Return the parameters that need no words: the name of their type has their own, or PLAIN has."""
    arguments = function.args
    typed = {
        argument.arg
        for argument in (*arguments.args, *arguments.kwonlyargs)
        if argument.annotation is not None
        and argument.arg.replace("_", "") in re.sub(r"\W|_", "", ast.unparse(argument.annotation)).lower()
    }
    return typed | PLAIN


def _parameters(function: Function) -> list[str]:
    arguments = function.args
    return [a.arg for a in (*arguments.args, *arguments.kwonlyargs) if a.arg not in ("self", "cls")]


@pytest.fixture(scope="module")
def called_from_elsewhere(trees: dict[str, ast.Module]) -> list[tuple[str, Function]]:
    """Return the public functions whose names another module has, but for those that a base class documents.

    Wrappers of patches are called by wrapt alone; their declarations say what they are for.
    """
    return list(_called_from_elsewhere(trees))


def _called_from_elsewhere(trees: dict[str, ast.Module]) -> Iterator[tuple[str, Function]]:
    users = Counter(name for tree in trees.values() for name in _names(tree))
    documented = _documented_by_bases(trees)
    for module, tree in trees.items():
        if module.startswith("adaptor.patches."):
            continue
        own = _names(tree)
        for owner, function in _functions(tree):
            is_public = not function.name.startswith("_") and not owner.startswith("_")
            inherits = bool(owner) and function.name in documented
            if is_public and not inherits and users[function.name] > (function.name in own):
                yield module, function


def _names(tree: ast.Module) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }


def _functions(node: ast.AST, owner: str = "") -> Iterator[tuple[str, Function]]:
    """Return the functions of modules and classes, each with the name of its class."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, child.name)
        elif isinstance(child, Function):
            yield owner, child
        else:
            yield from _functions(child, owner)


def _documented_by_bases(trees: dict[str, ast.Module]) -> set[str]:
    """Return the names of methods that protocols and base classes document."""
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {ast.unparse(base).split("[")[0].split(".")[-1] for one in classes for base in one.bases}
    return {
        function.name
        for one in classes
        if one.name in bases or any(ast.unparse(base).startswith(("Protocol", "ABC")) for base in one.bases)
        for function in one.body
        if isinstance(function, Function) and ast.get_docstring(function)
    }


def test_all_that_ships_is_looked_at(
    called_from_elsewhere: list[tuple[str, Function]],
) -> None:
    found = {f"{module}.{function.name}" for module, function in called_from_elsewhere}
    assert {"adaptor.controller.plan.plan", "adaptor.launchers.flags.parse"} <= found
