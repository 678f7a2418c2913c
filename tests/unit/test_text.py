"""Text from outside, made fit to be sent and shown."""

from __future__ import annotations

import subprocess
import sys

import pytest

from adaptor import text


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError("cannot open /data/caf\udce9.bin"), "OSError: cannot open /data/caf\\udce9.bin"),
        (ValueError("two\nlines"), "ValueError: two"),
        (ValueError(), "ValueError"),
        (Mute(), "Mute: <Mute: its __str__ raised RuntimeError>"),
    ],
)
def test_an_exception_in_one_line(error: Exception, expected: str) -> None:
    assert text.describe(error) == expected
    assert text.trace(error).encode()


def test_a_text_of_megabytes_is_cut() -> None:
    description = text.describe(ValueError("x" * 20_000_000))
    assert len(description) < 2 * text.LINE
    assert description.endswith(" more characters)")
    assert len(text.trace(ValueError("x" * 20_000_000))) < 2 * text.PAGE


@pytest.mark.parametrize("code", [0, 1, 255, 256, -1, 10**30, -(10**30), True, 1 << 63, (1 << 63) - 1])
def test_exit_codes_equal_those_of_the_kernel(code: int) -> None:
    completed = subprocess.run([sys.executable, "-S", "-c", f"raise SystemExit({code})"], check=False)
    assert text.exit_code(code) == completed.returncode
