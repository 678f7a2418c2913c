"""Patches on a framework that is not ours: declared, applied, checked, reported and undone.

A patch is declared beside its reason, the expected signature and the tested versions:

    checkpointing = Unit("checkpointing", framework="megatron-lm", tested=">=0.15.0rc5,<0.17")

    @checkpointing.patch(
        "megatron.training.checkpointing:get_checkpoint_name",
        why="a last-words checkpoint is complete under its own name or not there at all",
        accepts="(checkpoints_path, iteration, release=, ...)",
    )
    def last_words_go_to_a_temporary_directory(wrapped, instance, args, kwargs): ...

Rules (the tests are named after the rules):

- A target names the module that *defines* the function. The patch is put on when the module has been
  imported, so a later `from x import f` binds the wrapper. Modules that hold the original already are
  reported as late, never rewritten.
- The signature decides whether a patch fits; the version range is the tested range, and is only reported.
- A unit acts as a whole or not at all: a target that does not fit raises DriftError out of the import of its
  module and silences the rest of the unit. `check` is called before the first step, when everything has been
  imported; `require_modules` earlier, for modules that are gone from the framework.
- Until a job is claimed (`claim`), the units in `wait_for_claim` of `arm` change nothing: the framework is as
  without the adaptor. Only patches declared with `claims=True` act: they find out whether the job will be
  protected, or wrap what a framework replaces when it is imported (MindSpeed). A claim is made before process
  groups are made, or leaves process groups as they are. Claims come from `adaptor.enable`, `adaptor.protect`,
  the import of a plug-in's framework (`adaptor._start`) and the parsers of the supported frameworks
  (`adaptor.frameworks.megatron_training`).
- `disarm` reaches names that were imported elsewhere, because every wrapper asks its unit whether to act.
- A wrapper is copied and pickled by reference, like the function that it stands for: a pickle names the
  framework's function and loads without the adaptor.
"""

from __future__ import annotations

from adaptor.patching._hooks import (
    arm,
    around,
    check,
    claim,
    disarm,
    fingerprint,
    imported_unpatched,
    is_claimed,
    misfits,
    outcomes,
    require_modules,
    target_modules,
    targets,
)
from adaptor.patching._target import is_gone
from adaptor.patching._unit import Outcome, PatchState, Unit, format_outcomes, units

__all__ = [
    "Outcome",
    "PatchState",
    "Unit",
    "arm",
    "around",
    "check",
    "claim",
    "disarm",
    "fingerprint",
    "format_outcomes",
    "imported_unpatched",
    "is_claimed",
    "is_gone",
    "misfits",
    "outcomes",
    "require_modules",
    "target_modules",
    "targets",
    "units",
]
