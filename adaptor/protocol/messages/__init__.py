"""The messages of workers, agents and the controller.

All messages are msgspec structs, encoded as msgpack with a tag; nothing is ever unpickled. A worker talks to
its own agent only; the agent forwards the messages for the controller (`FromWorker`) and the controller's
orders (`ToWorker`).

Messages are imported from this package, which has all names of its modules; these hold them by direction.
"""

from __future__ import annotations

from adaptor.protocol.messages.from_agent import *  # noqa: F403
from adaptor.protocol.messages.from_controller import *  # noqa: F403
from adaptor.protocol.messages.from_worker import *  # noqa: F403
from adaptor.protocol.messages.parts import *  # noqa: F403
