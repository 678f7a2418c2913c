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
- Each module with targets has one of wrapt's post-import hooks (`arm`).
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

import hashlib
import json
import sys
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any

import wrapt

from adaptor.errors import DriftError, StartError
from adaptor.patching._target import is_gone
from adaptor.patching._unit import Outcome, Patch, PatchState, Unit, format_outcomes, units

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

_watched: set[str] = set()
_raises: dict[str, bool] = {}


def target_modules(group: str) -> tuple[str, ...]:
    """Return the modules with targets, in the order of declaration."""
    return tuple(dict.fromkeys(patch.module_name for unit in units(group) for patch in unit.patches))


def targets(group: str) -> tuple[str, ...]:
    """Return the targets of all patches of `group`, as declared."""
    return tuple(patch.target for unit in units(group) for patch in unit.patches)


def around(
    group: str, target: str, function: Callable[..., Any], replacement: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Return the replacement of `function` that the framework itself is about to put in place of `target`.

    For frameworks with a patch manager of their own (MindSpeed), which call this at each replacement of a
    function. The patch acts once, around `function`, even if `function` calls the patched original inside.

    Args:
        replacement: the part of `function` that replaces the target itself, if `function` is more than
            wrappers. If the part is patched itself, under the name of its definition, `function` is returned
            unchanged.

    Raises:
        DriftError: the replacement does not have the expected signature.
    """
    for unit in units(group):
        for patch in unit.patches:
            if patch.target == target:
                function = patch.around(function, replacement)
    return function


def arm(group: str, *, raises: bool = True, wait_for_claim: Collection[Unit] = ()) -> None:
    """Patch every target of the group as soon as its module is imported, and imported targets at once.

    A target that does not fit raises DriftError out of the import of its module. With `raises=False` the
    misfit is only recorded in the outcomes (for reports); its unit is silent either way. Arming again
    includes newly declared patches.

    Args:
        raises: whether a misfit is an error.
        wait_for_claim: units that change nothing, and whose targets need not fit, until `claim` is called.
    """
    _raises[group] = raises
    for unit in units(group):
        unit.armed = True
        unit.waits_for_claim = unit in wait_for_claim
        for patch in unit.patches:
            if patch.status is PatchState.OFF:
                patch.status = PatchState.WAITING
        unit.settle()
    for name in target_modules(group):
        module = sys.modules.get(name)
        if module is not None:
            _patch(module)
        elif name not in _watched:
            _watched.add(name)
            wrapt.register_post_import_hook(_on_import, name)
    for name in {patch.replaced_by for unit in units(group) for patch in unit.patches} - {"", *_watched}:
        if name not in sys.modules:
            _watched.add(name)
            wrapt.register_post_import_hook(_on_import, name)


def claim(group: str) -> bool:
    """Let the waiting units of `group` act; a later claim changes nothing.

    Returns:
        True if units have waited.

    Raises:
        DriftError: a target that was imported meanwhile does not fit.
    """
    waiting = [unit for unit in units(group) if unit.waits_for_claim]
    for unit in waiting:
        unit.waits_for_claim = False
        unit.settle()
    if _raises.get(group):
        for patch in (patch for unit in waiting for patch in unit.patches):
            if patch.status is PatchState.DRIFTED:
                raise patch.drift()
    return bool(waiting)


def is_claimed(group: str) -> bool:
    """Return True if no unit of `group` waits for a claim."""
    return not any(unit.waits_for_claim for unit in units(group))


def disarm(group: str) -> None:
    """Undo the patches of a group. Names imported elsewhere keep their wrapper, which does nothing now."""
    _raises.pop(group, None)
    for unit in reversed(units(group)):
        unit.armed = unit.half_applied = unit.waits_for_claim = False
        unit.settle()
        for patch in reversed(unit.patches):
            patch.uninstall()


def outcomes(group: str | None = None) -> tuple[Outcome, ...]:
    """Return the outcome of every declared patch, in the order of declaration."""
    chosen = units(group)
    # Looked up here, once for all patches, and not in each hook: a scan of a framework takes 20 ms.
    holders = _holders([patch.original for unit in chosen for patch in unit.patches if patch.applied])
    return tuple(outcome for unit in chosen for outcome in unit.outcomes(holders))


def check(group: str) -> None:
    """Require that every unit is applied completely, or that nothing of the unit was imported.

    Called before the first step.

    Raises:
        DriftError: a target does not fit.
        StartError: a unit is half applied, or the group is not armed.
    """
    if group not in _raises:
        raise StartError(f"the patches of group {group} are not armed: call adaptor.enable() first")
    for misfit in misfits(group):
        raise misfit


def require_modules(group: str) -> None:
    """Require that each module with targets still exists in the imported framework.

    Called early: if the training loop itself has moved to another module, `check` is never reached.

    Raises:
        DriftError: a module is gone from the framework.
    """
    for unit in units(group):
        _find_what_is_gone(unit)
        unit.settle()
        for patch in unit.patches:
            if patch.status is PatchState.DRIFTED:
                raise patch.drift()


def misfits(group: str) -> tuple[DriftError | StartError, ...]:
    """Return the errors that `check` would raise: at most one for each unit."""
    return tuple(misfit for unit in units(group) if (misfit := _misfit(unit)) is not None)


def fingerprint(group: str) -> str:
    """Return 16 hex digits that are equal in two processes exactly if their outcomes are equal.

    Modules that hold an original are left out: the search would look at all names of all modules.
    """
    data = [vars(outcome) for unit in units(group) for outcome in unit.outcomes({})]
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def imported_unpatched(group: str) -> tuple[str, ...]:
    """Return the target modules that were imported before they could be patched: too late for `enable`."""
    on_time = {
        patch.module_name for unit in units(group) for patch in unit.patches if patch.found is not None
    }
    return tuple(name for name in target_modules(group) if name in sys.modules and name not in on_time)


def _find_what_is_gone(unit: Unit) -> None:
    for patch in unit.patches:
        if patch.status is PatchState.WAITING and not patch.may_be_missing and is_gone(patch.module_name):
            patch.status, patch.found = PatchState.DRIFTED, f"no module {patch.module_name}"


def _misfit(unit: Unit) -> DriftError | StartError | None:
    _find_what_is_gone(unit)
    waiting = [
        patch for patch in unit.patches if patch.status is PatchState.WAITING and not patch.may_be_missing
    ]
    applied = [patch for patch in unit.patches if patch.applied]
    unit.half_applied = bool(waiting and applied)
    unit.settle()
    for patch in unit.patches:
        if patch.status is PatchState.DRIFTED:
            return patch.drift()
    if unit.half_applied:
        return StartError(
            f"unit {unit.name} is half applied: {applied[0].target} is patched,"
            f" {waiting[0].target} is not, because {waiting[0].module_name} was not imported"
        )
    return None


def _on_import(module: ModuleType) -> None:
    # wrapt forgets a called hook, even if it raised, and a second import would pass unpatched. wrapt would
    # call a hook at once for an imported module, so the module is hidden for the moment; other threads that
    # import the module wait for the lock of the import, which this thread holds.
    name = module.__name__
    sys.modules.pop(name, None)
    try:
        wrapt.register_post_import_hook(_on_import, name)
    finally:
        sys.modules[name] = module
    _patch(module)
    patches = (patch for group in _raises for unit in units(group) for patch in unit.patches)
    for target in {patch.module_name for patch in patches if patch.replaced_by == name}:
        if (replaced := sys.modules.get(target)) is not None:
            _patch(replaced)


def _patch(module: ModuleType) -> None:
    concerned = [
        patch
        for group in _raises
        for unit in units(group)
        for patch in unit.patches
        if patch.module_name == module.__name__
    ]
    for patch in concerned:
        patch.status = PatchState.WAITING
    fitting = [patch for patch in concerned if patch.fits(module)]
    fatal = [patch for patch in concerned if patch.status is PatchState.DRIFTED and _is_fatal(patch)]
    if not fatal:
        for patch in fitting:
            patch.install(module)
    for patch in concerned:
        patch.unit.half_applied = False
        patch.unit.settle()
    if fatal:
        further = f" (and {len(fatal) - 1} more in this module)" if len(fatal) > 1 else ""
        raise DriftError(f"{fatal[0].drift()}{further}")


def _is_fatal(patch: Patch) -> bool:
    return _raises[patch.unit.group] and (patch.claims or not patch.unit.waits_for_claim)


def _holders(functions: Sequence[object]) -> dict[int, tuple[str, ...]]:
    """Return the modules that hold these very objects, as "module:name" texts by the id of the object."""
    names_by_function: dict[int, list[str]] = {id(function): [] for function in functions}
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType):
            continue
        # Past any __getattribute__: the search must not make a lazy module load.
        names = dict(object.__getattribute__(module, "__dict__"))
        if names_by_function.keys().isdisjoint(
            map(id, names.values())
        ):  # nearly always, and much quicker than a loop
            continue
        for name, value in names.items():
            if id(value) in names_by_function:
                names_by_function[id(value)].append(f"{module_name}:{name}")
    return {identity: tuple(sorted(names)) for identity, names in names_by_function.items()}
