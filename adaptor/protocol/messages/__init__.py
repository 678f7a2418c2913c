"""The messages of workers, agents and the controller.

All messages are msgspec structs, encoded as msgpack with a tag; nothing is ever unpickled. A worker talks to
its own agent only; the agent forwards the messages for the controller (`FromWorker`) and the controller's
orders (`ToWorker`).

Import messages from this package. Each message is defined in the module of its sender: `from_worker`,
`from_agent` or `from_controller`; `parts` has the types that several messages share.
"""

from __future__ import annotations

from adaptor.protocol.messages.from_agent import *  # noqa: F403
from adaptor.protocol.messages.from_controller import *  # noqa: F403
from adaptor.protocol.messages.from_worker import *  # noqa: F403
from adaptor.protocol.messages.parts import *  # noqa: F403
