"""Tokens that are banned at the start are those of `transformers`."""

from __future__ import annotations

import pytest
import torch

from attent.decoding.constraints import TargetVocabulary, build_constraints
from attent.decoding.constraints.base import GeneratedTokens, apply_constraints
from attent.decoding.options import SearchOptions, SearchRequest

transformers = pytest.importorskip("transformers")

VOCAB, END = 60, 20


def test_banned_first_tokens_are_those_of_transformers() -> None:
    options, requests = SearchOptions(beam_size=1, banned_first=(3, END)), [SearchRequest(source_ids=())] * 5
    vocabulary = TargetVocabulary(None, VOCAB, [END], torch.device("cpu"))
    constraints, _ = build_constraints(options, requests, vocabulary)
    processor = transformers.SuppressTokensAtBeginLogitsProcessor([3, END], 1)
    states = [constraint.build_initial_state(requests) for constraint in constraints]
    for length in range(3):
        logits, tokens = torch.randn(5, VOCAB), torch.zeros(5, length + 1, dtype=torch.int64)
        generated = GeneratedTokens(tokens, torch.full((5,), length), torch.full((5,), 9))
        got = apply_constraints(constraints, logits.clone(), states, generated, END)
        assert torch.equal(got, processor(tokens, logits))
