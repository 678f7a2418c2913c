"""The command `ttp`: what reads the files of jobs (`adaptor.operations.cli`), and `ttp doctor`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from adaptor.launchers import doctor
from adaptor.operations import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one question; return the exit code."""
    return cli.main(arguments, doctor.add)


if __name__ == "__main__":
    sys.exit(main())
