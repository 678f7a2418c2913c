"""`python -m adaptor report`."""

from __future__ import annotations

from pathlib import Path

from tests.patches.conftest import Run

# The command, with the patches on the fake framework in place of the adaptor's own.
REPORT = """
import sys
import adaptor.patches, units
from adaptor.__main__ import main
adaptor.patches.FILES["ttp"] = ()
sys.exit(main(["report", *sys.argv[1:]]))
"""


def test_whole_units(python: Run) -> None:
    done = python("-c", REPORT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "patch         unit  status   why, or what is wrong\n"
        "fake.core:f   pair  applied  f is doubled\n"
        "fake.extra:g  pair  applied  g is negated\n"
        "\n"
        "unit pair: fake 1.2.0rc1 is tested (>=1,<2)\n"
    )


def test_drift(folder: Path, python: Run) -> None:
    (folder / "fake/extra.py").write_text("def g(b, a): ...\n")
    done = python("-c", REPORT)
    assert done.returncode == 1
    assert "fake.core:f   pair  silenced  f is doubled\n" in done.stdout
    assert "fake.extra:g  pair  drifted   expected (a, b), found (b, a)\n" in done.stdout
    assert done.stderr == (
        "python -m adaptor: fake.extra:g (unit pair): expected (a, b), found (b, a)"
        f" in {folder}/fake/extra.py, fake 1.2.0rc1 (tested: >=1,<2)\n"
    )


def test_a_module_that_cannot_be_imported(folder: Path, python: Run) -> None:
    (folder / "fake/extra.py").write_text("import engine_that_is_not_here\n")
    done = python("-c", REPORT)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "python -m adaptor: fake.extra cannot be imported: No module named 'engine_that_is_not_here'",
        (
            "python -m adaptor: unit pair is half applied: fake.core:f is patched, fake.extra:g is not,"
            " because fake.extra was not imported"
        ),
    ]


def test_a_module_that_is_gone(folder: Path, python: Run) -> None:
    (folder / "fake/extra.py").unlink()
    done = python("-c", REPORT)
    assert done.returncode == 1
    assert "found no module fake.extra" in done.stderr


def test_no_framework(folder: Path, python: Run) -> None:
    (folder / "fake").rename(folder / "elsewhere")
    done = python("-c", REPORT)
    assert done.returncode == 1
    assert done.stderr == (
        "python -m adaptor: none of the patched modules is on the path: is the framework installed?\n"
    )


def test_the_framework_beside_a_script(folder: Path, python: Run) -> None:
    scripts = folder / "scripts"
    scripts.mkdir()
    (folder / "fake").rename(scripts / "fake")
    (scripts / "train.py").write_text("raise AssertionError('trained')\n")
    done = python("-c", REPORT, "--", "scripts/train.py", "--lr", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "fake.core:f   pair  applied" in done.stdout


def test_no_such_script(python: Run) -> None:
    done = python("-m", "adaptor", "report", "--", "absent.py")
    assert (done.returncode, done.stderr) == (2, "python -m adaptor: there is no script absent.py\n")


def test_a_setting_that_makes_no_sense(python: Run) -> None:
    done = python("-c", REPORT, env={"TTP_DEVICE": "gpu"})
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("python -m adaptor: TTP_DEVICE is 'gpu': it must be cpu, or nothing")
