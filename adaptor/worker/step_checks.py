"""Checks of steps: step numbers, in a loop that numbers steps by itself; a single update of all optimizers in
each step.
"""

from __future__ import annotations

from adaptor.errors import StepError, UnsupportedError


def require_next(step: int, last: int, finished: int) -> None:
    """Check the number of a new step.

    A step that was begun, and left without an update, may be begun again.

    Args:
        step: the new step.
        last: the step begun before; -1: none, since training began or a fault was recovered online.
        finished: the newest finished step.

    Raises:
        StepError: another step was expected; nothing is saved under the wrong number.
    """
    if last < 0:
        if step != finished + 1:
            raise StepError(
                f"step {step} was begun, expected step {finished + 1}: "
                f"adaptor.protect was told step={finished}; give it the step of the checkpoint that "
                "was loaded, or 0"
            )
    elif step != last + 1 and not (step == last and finished < step):
        raise StepError(
            f"step {step} was begun, expected step {last + 1}: the step before was "
            f"{last}, and what is saved has the number of its step"
        )


def require_first_update(step: int, finished: int) -> None:
    """Check that `step` has not been updated yet; `finished`: the newest finished step.

    Raises:
        StepError: the step has been updated.
    """
    if finished >= step:
        raise StepError(
            f"step {step} has a second update of its optimizer, expected "
            f"step {step + 1} to be begun before it: what is saved has the number of its step"
        )


def part_of_an_update(step: int, missing: int, optimizers: int) -> StepError:
    """Return the error of a step that ended before `missing` of its `optimizers` made an update."""
    return StepError(
        f"step {step} has ended, and {missing} of {optimizers} optimizers that adaptor.protect "
        "was given made no update in it: what is saved is the state after the updates of all; "
        "let each make one in every step"
    )


def update_without_hooks(step: int, kinds: str) -> UnsupportedError:
    """Return the error of an update in `step` by optimizers of these `kinds` without a report from a hook."""
    return UnsupportedError(
        f"step {step} has an update of {kinds} that no hook has told of, so it could not be saved: train "
        "with what get_megatron_optimizer returned, and leave its optimizers, their `step` and their hooks "
        "as they are; or set ENABLE_TTP=False"
    )
