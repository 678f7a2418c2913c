"""Makes text from outside encodable, and limits its length, before any other use.

An exception may quote a file name in another encoding than UTF-8, carry megabytes, or fail in its own
`__str__`. Such text must not be sent, logged or printed: a message that cannot be encoded would end the
sending thread.
"""

from __future__ import annotations

import traceback

# The characters that are kept of a reason: enough for a path and a sentence, little enough for a message.
LINE = 2000
# The characters that are kept of a traceback.
PAGE = 1 << 20
_HIGHEST_CODE = 255


def encodable(text: str, limit: int = LINE) -> str:
    """Return `text` in a form that can be encoded as UTF-8: undecodable bytes of file names become `\\udc..`.

    Args:
        limit: the number of kept characters; the end then says how many are left out.
    """
    if len(text) > limit:
        text = f"{text[:limit]}... ({len(text) - limit} more characters)"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def say(thing: object) -> str:
    """Return `str(thing)`, or a substitute if `__str__` fails."""
    try:
        return str(thing)
    except Exception as error:
        return f"<{type(thing).__name__}: its __str__ raised {type(error).__name__}>"


def describe(error: BaseException) -> str:
    """Return `Type: message` in one encodable line."""
    kind, message = type(error).__name__, say(error)
    lines = f"{kind}: {message}".removesuffix(": ").splitlines()
    return encodable(lines[0] if lines else kind)


def trace(error: BaseException) -> str:
    """Return the traceback of `error`, as Python prints tracebacks."""
    try:
        return encodable("".join(traceback.format_exception(error)).rstrip("\n"), PAGE)
    except Exception as failure:  # of a class that cannot be shown
        return f"{describe(error)} (no traceback: {describe(failure)})"


def exit_code(code: int) -> int:
    """Return the exit status that the kernel keeps when a Python process ends with `code`: 0 to 255.

    Python takes a number outside of a C long for -1, which is 255.
    """
    fits = -(1 << 63) <= code < 1 << 63
    return code & _HIGHEST_CODE if fits else _HIGHEST_CODE


def shown(raw_text: str) -> str:
    """Return text from a file as a line that any terminal can show."""
    return encodable(raw_text.replace("\n", " ").replace("\x1b", "?"))


def duration(seconds: float) -> str:
    """Return a number of seconds in a fitting unit."""
    if 0 < seconds < 0.001:
        return "below 1 ms"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(count: int) -> str:
    """Return a number of bytes in a fitting unit."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
