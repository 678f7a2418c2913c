"""Its training."""
