"""The interface for training frameworks, in its newer form (`tft_*`) and its older one (`ttp_*`)."""

from adaptor.mindio.interface import *  # noqa: F403
