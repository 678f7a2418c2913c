"""Commands: `ttprun`, `ttp`, their flags, help and last line."""
