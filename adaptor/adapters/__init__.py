"""Adapters of frameworks with training loops of their own, written as plug-ins are (docs/plug_ins.md)."""
