"""`python -m adaptor report [-- script.py [args]]`: how the patches fit the framework, without training."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from adaptor import _script, config
from adaptor.errors import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 where every unit is whole or not needed, 1 where not, 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="python -m adaptor", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser(
        "report", help="print how the patches fit the framework that a script would import"
    )
    report.add_argument("script", nargs=argparse.REMAINDER, metavar="-- script.py [args]")
    parsed = parser.parse_args(arguments)
    script = parsed.script[1:] if parsed.script[:1] == ["--"] else parsed.script
    if script:
        if not Path(script[0]).is_file():
            print(f"python -m adaptor: there is no script {script[0]}", file=sys.stderr)
            return 2
        _script.take_over(script)
    try:
        settings = config.load()
        config.refuse_misspelt(os.environ)
    except ConfigError as error:
        print(f"python -m adaptor: {error}", file=sys.stderr)
        return 2
    if settings.device:
        from adaptor.devices import activate

        activate(settings.device)
    return _report()


def _report() -> int:
    import adaptor.patches as patches
    from adaptor import patching

    patches.load("ttp")
    patching.arm("ttp", raises=False)
    failures = _import_targets(patching.target_modules("ttp"))
    failures += [str(misfit) for misfit in patching.misfits("ttp")]
    outcomes = patching.outcomes("ttp")
    print(patching.format_outcomes(outcomes))
    if not failures and all(outcome.found is None for outcome in outcomes):
        failures.append("none of the patched modules is on the path: is the framework installed?")
    for failure in failures:
        print(f"python -m adaptor: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _import_targets(names: tuple[str, ...]) -> list[str]:
    """Import them all. Returns a line for each that is there and cannot be imported."""
    failures: list[str] = []
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                failures.append(f"{name} cannot be imported: {error}")
        except Exception as error:  # whatever a framework raises when it is imported
            failures.append(f"{name} cannot be imported: {type(error).__name__}: {error}")
    return failures


if __name__ == "__main__":
    sys.exit(main())
