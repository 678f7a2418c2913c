"""ModelOpt for torch."""
