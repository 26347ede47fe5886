"""Invariants of every model of the family. Needs pytest and torch only, so that it runs on any device."""
