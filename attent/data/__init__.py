"""Corpora to batches: `corpus` and `formats` read parallel text, `filters` drops bad pairs, `encode` and `token_store`
cache token ids on disk, `batch_plan` and `loader` make batches. `report` describes a corpus before training.
"""
