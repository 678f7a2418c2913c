"""Forward and backward passes."""
