"""The replacement of asyncio.timeout on Python 3.10."""

from __future__ import annotations

import asyncio

import pytest

from adaptor.protocol.wire import _Deadline, deadline
from tests.unit.threads import LONG_S


@pytest.mark.parametrize("kind", [deadline, _Deadline])
async def test_a_deadline(kind: type[_Deadline]) -> None:
    async with kind(LONG_S):
        await asyncio.sleep(0)
    with pytest.raises(asyncio.TimeoutError):
        async with kind(0.01):
            await asyncio.Event().wait()
    with pytest.raises(KeyError):
        async with kind(LONG_S):
            raise KeyError
    await asyncio.sleep(0)  # nothing cancels us later
