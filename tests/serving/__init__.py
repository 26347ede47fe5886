"""Tests of the running server, with a plain function as the model."""
