"""The language of `accepts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from adaptor.patching._target import Expected, parameters_of, render


def plain(a, b): ...
def default(a, b=1): ...
def more(a, b=1, c=2, *, d=3): ...
def star(a, *args, **kwargs): ...
def keyword(a, *, d, e=None): ...
def positional(a, /, b): ...
def nothing(): ...


@pytest.mark.parametrize(
    ("accepts", "function", "fits"),
    [
        ("(a, b)", plain, True),
        ("(a, b)", default, True),
        ("(a, b=)", plain, False),
        ("(a, b=)", default, True),
        ("(b, a)", plain, False),
        ("(a)", plain, False),
        ("(a, ...)", plain, True),
        ("(b, ...)", plain, False),
        ("(a, b, c)", plain, False),
        ("(a, b=, ...)", more, True),
        ("(a, b=)", more, False),
        ("(a, c=, ...)", more, False),
        ("(a, b=, c=, *, d=)", more, True),
        ("(a, b=, c=, *, e=)", more, False),
        ("(a, ..., *, d=)", more, True),
        ("(a, *, d=, ...)", more, True),
        ("(a, *, b=, ...)", more, False),
        ("(a, *, d, ...)", keyword, True),
        ("(a, *, d=, ...)", keyword, False),
        ("(a, d, ...)", keyword, False),
        ("(a, *, e=, d)", keyword, True),
        ("(a, *args, **kwargs)", star, True),
        ("(a, *args)", star, False),
        ("(a, b, ...)", star, False),
        ("(a, b)", positional, True),
        ("()", nothing, True),
        ("()", plain, False),
        ("(...)", plain, True),
    ],
)
def test_fits(accepts: str, function: Callable[..., Any], fits: bool) -> None:
    parameters = parameters_of(function, bound=False)
    assert parameters is not None
    assert Expected.parse(accepts).matches(parameters) is fits


@pytest.mark.parametrize("text", ["a, b", "(a, ..., b)", "(a-b)", "(a, b=1)"])
def test_an_expectation_that_cannot_be_parsed(text: str) -> None:
    with pytest.raises(ValueError, match=r"accepts|parameter name"):
        Expected.parse(text)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (more, "(a, b=, c=, *, d=)"),
        (star, "(a, *args, **kwargs)"),
        (keyword, "(a, *, d, e=)"),
        (nothing, "()"),
    ],
)
def test_rendered_in_the_same_language(function: Callable[..., Any], text: str) -> None:
    parameters = parameters_of(function, bound=False)
    assert render(parameters) == text
    assert Expected.parse(text).matches(parameters or ())


def test_a_builtin_that_does_not_tell() -> None:
    assert parameters_of(dict.update, bound=False) is None
    assert render(None) == "(unknown)"
