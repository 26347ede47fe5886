"""One inspector per model family: runs a model on an input and returns the trace document."""
