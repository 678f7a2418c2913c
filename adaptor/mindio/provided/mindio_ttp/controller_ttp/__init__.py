"""The controller, and what MindX says to it."""

from adaptor.mindio.interface import *  # noqa: F403
