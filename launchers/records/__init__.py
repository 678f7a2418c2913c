"""Files, logs and lines for operators."""
