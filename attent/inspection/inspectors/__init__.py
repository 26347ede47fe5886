"""Inspectors: record one forward pass of a model and describe it for the page."""
