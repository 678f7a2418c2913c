"""By what an exception is known, and whether another start could mend it."""

from __future__ import annotations

import pytest

from adaptor.worker.origin import origin_of


def behind(cause: BaseException) -> ValueError:
    """Return an exception that a script raises because of `cause`, and does not say so."""
    error = ValueError("the tokenizer cannot be read")
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "lasting"),
    [
        (AssertionError("class input value 320 and checkpoint value 240 do not match"), True),
        (NameError("name 'TESpecProvider' is not defined"), True),
        (RuntimeError("Error(s) in loading state_dict: size mismatch for weight"), True),
        (behind(KeyError("vocab")), True),
        (OSError("Stale file handle"), False),
        (behind(ConnectionResetError("Connection reset by peer")), False),
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), False),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), False),
        (RuntimeError("can't start new thread"), False),
        (SystemExit("the data are not there yet"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=lambda given: None if isinstance(given, bool) else f"{type(given).__name__}-{given}"[:30],
)
def test_what_another_start_cannot_mend(error: BaseException, lasting: bool) -> None:
    assert origin_of(error, -1, trains=False, is_restart=False).lasting is lasting
    assert not origin_of(error, -1, trains=True, is_restart=False).lasting
