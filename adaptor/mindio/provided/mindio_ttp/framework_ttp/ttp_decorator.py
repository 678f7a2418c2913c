"""The module that defines the newer form in the original; some frameworks import from here."""

from adaptor.mindio.interface import *  # noqa: F403
