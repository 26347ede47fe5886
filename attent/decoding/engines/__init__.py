"""Search engines: the reference search in PyTorch, CTranslate2, and fused beam search on a GPU."""
