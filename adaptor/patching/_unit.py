"""Declarations of patches, and their outcomes."""

from __future__ import annotations

import enum
import importlib
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from adaptor.errors import DriftError
from adaptor.patching._target import (
    Expected,
    NotFitting,
    PatchTarget,
    Wrapper,
    is_gone,
    locate,
    parameters_of,
    render,
)

Effect = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
# Returns the replacement of a method (`Unit.patch_plainly`).
Make = Callable[[Callable[..., Any], "Unit"], Callable[..., Any]]

# Megatron often runs from a checkout: its version is in its source, not in installed metadata.
_VERSION_OF = {
    "megatron-core": "megatron.core.package_info:__version__",
    "megatron-lm": "megatron.core.package_info:__version__",
    "torch": "torch.version:__version__",
}


class PatchState(str, enum.Enum):
    """The state of a patch."""

    APPLIED = "applied"  # in place, and acting
    WAITING = "not imported"  # armed, but the module of the target is not imported
    MISSING = "missing"  # optional, and missing in this version of the framework
    DRIFTED = "drifted"  # the target does not match the declaration; its whole unit is silent
    SILENCED = "silenced"  # fits, but another patch of its unit does not: does not act
    OFF = "off"  # the group is not armed


@dataclass(frozen=True)
class Outcome:
    """The outcome of one patch, as data.

    `found` is None until the module has been imported, `version` until any module of the unit has been.
    `in_tested_range` is None if the version is not known. `late` names the holders of the unwrapped original,
    as "module:name": their calls go past the patch.
    """

    unit: str
    group: str
    target: str
    why: str
    status: PatchState
    expected: str
    found: str | None
    framework: str
    version: str | None
    tested: str
    in_tested_range: bool | None
    late: tuple[str, ...]


class Patch:
    """A wrapper on a target, and its state."""

    def __init__(
        self,
        unit: Unit,
        target: str,
        why: str,
        accepts: tuple[str, ...],
        optional: bool | str,
        unless_imported: bool,
        effect: Effect | None,
        make: Make | None = None,
        claims: bool = False,
        replaced_by: str = "",
    ) -> None:
        module_name, colon, self.qualname = target.partition(":")
        if not (module_name and colon and self.qualname):
            raise ValueError(f"target={target!r}: must be 'module:name' or 'module:Class.method'")
        self.unit = unit
        self.target = target
        self.module_name = module_name
        self.why = why
        self.accepts = tuple(Expected.parse(text) for text in accepts)
        self.optional = optional
        self.unless_imported = unless_imported
        self.effect = effect
        self.make = make
        self.claims = claims
        self.replaced_by = replaced_by
        self.status = PatchState.OFF
        self.found: str | None = None
        self._file = ""  # of the found target
        self._wrapper: Wrapper | Callable[..., Any] | None = None
        self._place: PatchTarget | None = None
        # Whether the patch acts now, around a replacement of the framework; None: never.
        self._outside: threading.local | None = None

    @property
    def may_be_missing(self) -> bool:
        """Return True if the imported version of the framework may lack the target."""
        return is_gone(self.optional) if isinstance(self.optional, str) else self.optional

    @property
    def expected(self) -> str:
        """Return the declared signatures in one string."""
        return " or ".join(accepted.text for accepted in self.accepts)

    @property
    def applied(self) -> bool:
        """Return True if the wrapper is in place."""
        return self.status is PatchState.APPLIED

    def fits(self, module: ModuleType) -> bool:
        """Return True if the target fits; set `status` to MISSING or DRIFTED otherwise."""
        if self._place is not None and self._place.module is module and self._place.holds(self._wrapper):
            return True  # under a later wrapper
        self._file = getattr(module, "__file__", None) or ""
        try:
            place = locate(module, self.qualname)
        except NotFitting as misfit:
            self.found = misfit.found
            may_be = (misfit.absent and self.may_be_missing) or (misfit.imported and self.unless_imported)
            self.status = PatchState.MISSING if may_be else PatchState.DRIFTED
            return False
        if self.unless_imported and place.function.__module__ != module.__name__:  # with a wrapper of its own
            self.found, self.status = f"an import from {place.function.__module__}", PatchState.MISSING
            return False
        parameters = parameters_of(place.function, place.bound)
        self.found = render(parameters)
        for accepted in self.accepts:
            if accepted.text == "(...)" or (parameters is not None and accepted.matches(parameters)):
                return True
        self.status = PatchState.DRIFTED
        return False

    @property
    def original(self) -> Callable[..., Any] | None:
        """Return the wrapped function, None without a wrapper in place."""
        return self._place.function if self._place is not None and self.applied else None

    def install(self, module: ModuleType) -> None:
        """Put the wrapper in place of a target that fits."""
        if self._place is None or self._place.module is not module or not self._place.holds(self._wrapper):
            place = locate(module, self.qualname)
            if self._place is None or self._place.raw is not place.raw:
                self._wrapper = self._wrapped(place)
            self._place = place
            place.put(self._wrapper)
        self.status = PatchState.APPLIED

    def _wrapped(self, place: PatchTarget) -> Wrapper | Callable[..., Any]:
        if self.make is None:
            assert self.effect is not None
            return Wrapper(place.raw, self.effect, self._acts_inside, place.owner, place.name)
        made = self.make(place.raw, self.unit)
        made.__wrapped__ = place.raw  # type: ignore[attr-defined]
        return made

    def around(
        self, function: Callable[..., Any], replacement: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        """Wrap `function`, which the framework is about to put in place of the target.

        An earlier wrapper may be somewhere in `function`; it does not act a second time.

        Args:
            replacement: the part of `function` that replaces the target itself, if any.

        Raises:
            DriftError: the replacement does not have the signature.
        """
        if self._place is None or self.effect is None or isinstance(replacement, Wrapper):
            return function
        if replacement is not None:
            parameters = parameters_of(replacement, self._place.bound)
            if parameters is None or not any(accepted.matches(parameters) for accepted in self.accepts):
                self.status, self.found = PatchState.DRIFTED, render(parameters)
                self._file = getattr(getattr(replacement, "__code__", None), "co_filename", "")
                self.unit.settle()
                if self.unit.waits_for_claim:  # a claim raises the error
                    return function
                raise self.drift()
        self._outside = self._outside or threading.local()
        return Wrapper(function, self._act, self._acts_inside, self._place.owner, self._place.name)

    def _act(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        assert self._outside is not None
        assert self.effect is not None
        self._outside.acts = True
        try:
            return self.effect(wrapped, instance, args, kwargs)
        finally:
            self._outside.acts = False

    def _acts_inside(self) -> bool:
        # Called at each call of the target, in some cases tens of times in a step.
        outside = self._outside
        acts = self.unit.acts or (self.claims and self.unit.waits_for_claim and self.unit.armed)
        return acts and (outside is None or not getattr(outside, "acts", False))

    def uninstall(self) -> None:
        """Restore the original; a wrapper inside another wrapper stays and does nothing."""
        if self._place is not None and self._place.current() is self._wrapper:
            self._place.restore()
        self.status = PatchState.OFF

    def drift(self) -> DriftError:
        """Return the error that names the misfit and its file, in one line."""
        unit, place = self.unit, f" in {self._file}," if self._file else " in"
        return DriftError(
            f"{self.target} (unit {unit.name}): expected {self.expected}, found {self.found}{place}"
            f" {unit.framework} {unit.framework_version() or 'of unknown version'} (tested: {unit.tested})"
        )


_units: dict[str, Unit] = {}


class Unit:
    """Patches that make sense together only: all act, or none.

    `tested` is a PEP 440 range. `version` gives the framework's version, as a callable or as
    "module:attribute"; the default is known for megatron-lm, megatron-core and torch, and is `__version__` of
    the package otherwise.
    """

    def __init__(
        self,
        name: str,
        *,
        framework: str,
        tested: str,
        group: str = "ttp",
        version: str | Callable[[], str] | None = None,
    ) -> None:
        if name in _units:
            raise ValueError(f"a unit named {name!r} has been declared already")
        self.name = name
        self.framework = framework
        self.tested = tested
        self.group = group
        # The module of this call: wrappers may be defined elsewhere.
        self.declared_in: str = sys._getframe(1).f_globals.get("__name__", "")
        self.patches: list[Patch] = []
        self.armed = False
        self.half_applied = False
        self.waits_for_claim = False  # only patches that may claim the job act
        self.acts = False  # whether the wrappers act; read by each wrapper at every call
        self._version = version or _VERSION_OF.get(framework, f"{framework}:__version__")
        _units[name] = self

    def patch(
        self,
        target: str,
        *,
        why: str,
        accepts: str | tuple[str, ...] = "(...)",
        optional: bool | str = False,
        unless_imported: bool = False,
        claims: bool = False,
        replaced_by: str = "",
    ) -> Callable[[Effect], Effect]:
        """Declare a wrapper `(wrapped, instance, args, kwargs)` on `target`: "module:name" or
        "module:Class.method".

        Args:
            why: for the report.
            accepts: one signature or several, for a framework that changed the signature; the language:
                `_target`; by default any signature.
            optional: whether a version of the framework may lack the name; if present, the signature decides
                as ever. A module name: only a version without the module may lack the name.
            unless_imported: whether nothing is wrapped in a version whose module imports the function from
                another.
            claims: whether the wrapper acts before the job is claimed, because it may claim the job, or
                because its target runs only before; the target must fit in an unclaimed job, too.

        Raises:
            ValueError: a target or signature cannot be parsed.
        """

        def declare(effect: Effect) -> Effect:
            alternatives = (accepts,) if isinstance(accepts, str) else accepts
            options = (optional, unless_imported, effect, None, claims, replaced_by)
            self.patches.append(Patch(self, target, why, alternatives, *options))
            return effect

        return declare

    def patch_plainly(self, target: str, *, why: str) -> Callable[[Make], Make]:
        """Declare a replacement of a C++ method that is called tens of times in a step.

        A wrapper takes ten times as long as such a method. The declared function is called once, with the
        method and the unit, and returns the replacement, which reads `acts` of the unit at each call, and
        calls the method if the unit does not act. A version of the framework may lack the method.

        Args:
            target: "module:Class.method".
            why: for the report.

        Raises:
            ValueError: `target` cannot be parsed.
        """

        def declare(make: Make) -> Make:
            self.patches.append(Patch(self, target, why, ("(...)",), True, False, None, make))
            return make

        return declare

    def patch_copy(self, target: str, *, of: str) -> None:
        """Declare on `target` the wrapper that is declared on `of`, a function of which it is a copy.

        Args:
            target: "module:name" in the framework that has the copy.
            of: the target of a patch that has been declared, such as "megatron.training.training:train".

        Raises:
            KeyError: no patch has that target.
        """
        declared = {patch.target: patch for unit in _units.values() for patch in unit.patches}
        patch = declared[of]
        accepts = tuple(accepted.text for accepted in patch.accepts)
        self.patches.append(Patch(self, target, patch.why, accepts, patch.optional, False, patch.effect))

    def settle(self) -> None:
        """Decide again whether the unit acts, after any change to its patches."""
        self.acts = self.armed and self._fits and not self.waits_for_claim

    @property
    def _fits(self) -> bool:
        return not self.half_applied and all(patch.status is not PatchState.DRIFTED for patch in self.patches)

    def framework_version(self) -> str | None:
        """Return the version of the framework, None until a module of the framework is imported."""
        if all(patch.found is None for patch in self.patches):
            return None
        if callable(self._version):
            return self._version()
        module_name, _, attribute = self._version.partition(":")
        try:
            return str(getattr(importlib.import_module(module_name), attribute))
        except (ImportError, AttributeError):
            return None

    def outcomes(self, holders: Mapping[int, tuple[str, ...]]) -> tuple[Outcome, ...]:
        """Return the outcome of each patch."""
        version = self.framework_version()
        in_range = _in_range(version, self.tested)
        silenced = self.armed and not self._fits
        return tuple(
            Outcome(
                unit=self.name,
                group=self.group,
                target=patch.target,
                why=patch.why,
                status=PatchState.SILENCED if patch.applied and silenced else patch.status,
                expected=patch.expected,
                found=patch.found,
                framework=self.framework,
                version=version,
                tested=self.tested,
                in_tested_range=in_range,
                late=holders.get(id(patch.original), ()),
            )
            for patch in self.patches
        )


def _in_range(version: str | None, tested: str) -> bool | None:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    if version is None:
        return None
    try:
        return SpecifierSet(tested).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return None


def units(group: str | None = None) -> tuple[Unit, ...]:
    """Return the units declared so far, in the order of declaration."""
    return tuple(unit for unit in _units.values() if group in (None, unit.group))


def format_outcomes(outcomes: tuple[Outcome, ...]) -> str:
    """Return an aligned table of the patches, then for each unit the found and the tested versions."""
    rows = [("patch", "unit", "status", "why, or what is wrong")]
    rows += [(outcome.target, outcome.unit, outcome.status.value, _detail(outcome)) for outcome in outcomes]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]
    lines += [""]
    lines += dict.fromkeys(f"unit {outcome.unit}: {_version(outcome)}" for outcome in outcomes)
    return "\n".join(lines)


def _detail(outcome: Outcome) -> str:
    if outcome.status is PatchState.DRIFTED:
        return f"expected {outcome.expected}, found {outcome.found}"
    if outcome.late:
        return f"{outcome.why}; goes past it: {', '.join(outcome.late)}"
    return outcome.why


def _version(outcome: Outcome) -> str:
    if outcome.version is None:
        return f"{outcome.framework}, tested {outcome.tested}, not imported or of unknown version"
    verdict = {True: "tested", False: "not tested", None: "a version that cannot be compared"}
    return f"{outcome.framework} {outcome.version} is {verdict[outcome.in_tested_range]} ({outcome.tested})"
