"""Search constraints."""
