"""Online recovery: the survivors of a fault keep their processes, and only the failed ranks are replaced."""
