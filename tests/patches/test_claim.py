"""Before a job is claimed nothing of the framework is changed, whatever is imported by then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

UNCLAIMED = """
import units
from adaptor import patching
patching.arm("ttp", wait_for_claim=[units.unit])
import fake.user, fake.extra
assert not patching.is_claimed("ttp")
"""
CLAIMING = """
from adaptor import patching

unit = patching.Unit("claiming", framework="fake", tested=">=1,<2", version="fake.info:__version__")

@unit.patch("fake.core:f", why="it is told", accepts="(x, y=)", claims=True)
def told(wrapped, instance, args, kwargs):
    if args[0] == 7:
        patching.claim("ttp")
    return wrapped(*args, **kwargs)

@unit.patch("fake.extra:g", why="g is negated", accepts="(a, b)")
def negated(wrapped, instance, args, kwargs):
    return -wrapped(*args, **kwargs)
"""


def test_only_a_claimed_job_is_patched(holds: Callable[..., None]) -> None:
    """Names that were imported elsewhere before the claim are patched, too."""
    holds(f"""{UNCLAIMED}
assert fake.user.f(1) == 2 and fake.extra.g(1, 2) == -1
assert {{outcome.status.value for outcome in patching.outcomes("ttp")}} == {{"applied"}}
assert patching.claim("ttp") and patching.is_claimed("ttp")
assert fake.user.f(1) == 4 and fake.extra.g(1, 2) == 1
assert not patching.claim("ttp"), "a second claim"
""")


def test_a_patch_may_claim_the_job(folder: Path, holds: Callable[..., None]) -> None:
    (folder / "units.py").write_text(CLAIMING)
    holds(f"""{UNCLAIMED}
assert fake.core.f(1) == 2 and fake.extra.g(1, 2) == -1
fake.core.f(7)
assert patching.is_claimed("ttp") and fake.extra.g(1, 2) == 1
""")


def test_a_misfit_is_an_error_of_claimed_jobs_alone(folder: Path, holds: Callable[..., None]) -> None:
    (folder / "fake/extra.py").write_text("def g(b, a):\n    return b - a\n")
    holds(f"""{UNCLAIMED}
from adaptor.errors import DriftError
assert fake.user.f(1) == 2 and fake.extra.g(1, 2) == -1
try:
    patching.claim("ttp")
except DriftError as error:
    assert "fake.extra:g (unit pair): expected (a, b), found (b, a)" in str(error), error
else:
    raise AssertionError("no error")
assert fake.user.f(1) == 2, "half of a unit acts"
""")


def test_a_plug_in_may_use_wrappers_of_the_adaptor(holds: Callable[..., None]) -> None:
    """The plug-in has its own units, so the import of its framework claims the job."""
    holds("""
from adaptor import patches, patching
patches.load("ttp")
from adaptor.patches import megatron_training
unit = patching.Unit("theirs", framework="theirs", tested=">=1")
unit.patch("theirs:train_step", why="a step begins", accepts="(...)")(megatron_training.steps_are_counted)
assert patches.of_plug_ins()[-1] is unit
assert unit not in patches.own() and len(patches.own()) > 5
""")
