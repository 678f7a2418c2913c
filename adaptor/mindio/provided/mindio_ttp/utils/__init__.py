"""Times of updates, for repair in place."""

from adaptor.mindio.interface import *  # noqa: F403
