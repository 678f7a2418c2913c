"""Names alone; nothing is an instance of them."""

from __future__ import annotations


class DeepSpeedEngine: ...


class PipelineEngine(DeepSpeedEngine): ...
