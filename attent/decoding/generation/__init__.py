"""Text generation with decoder-only models."""
