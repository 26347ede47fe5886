"""From a model to text: search, generation, constraints, alignment."""
