"""Corpora to batches: readers, filters, token ids cached on disk, batch plans and loaders, and corpus reports."""
