"""Fused beam search on an NVIDIA GPU, captured as CUDA graphs."""
