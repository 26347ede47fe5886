"""Training tasks."""
