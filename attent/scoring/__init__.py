"""Scores of translations against references, and of word alignments against gold alignments."""
