"""Files, logs, notices and lines for operators."""
