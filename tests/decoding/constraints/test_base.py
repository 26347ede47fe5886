"""Constraints against plain Python that checks one row at a time, on rows of different lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attent.decoding.constraints.banned_phrases import BannedPhrases
from attent.decoding.constraints.base import Constraint, GeneratedTokens, apply_constraints
from attent.decoding.constraints.phrase_automaton import TokenSpellings
from attent.decoding.constraints.prefix import ForcedPrefix
from attent.decoding.constraints.required_phrases import RequiredPhrases, allocate_beams
from attent.decoding.constraints.token_rules import MinLength, NoLoops, NoRepeatNgram, has_loop
from attent.decoding.options import SearchRequest

END, V, FILLER = 1, 7, 5
NEVER = float("-inf")


def build_random_rows(seed: int, count: int = 60, longest: int = 40, vocab: int = 4) -> list[list[int]]:
    """Build rows of few distinct tokens with many repetitions."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        row: list[int] = []
        for _ in range(rng.randrange(longest)):
            unit = rng.randint(1, 9)
            row += row[-unit:] if rng.random() < 0.3 else [rng.randrange(2, 2 + vocab)]
        rows.append(row[: rng.randrange(longest)])
    return rows


def build_generated(texts: Sequence[Sequence[int]], limit: int = 100) -> GeneratedTokens:
    longest = max(map(len, texts)) + 2
    tokens = torch.tensor([[*row, *[FILLER] * (longest - len(row))] for row in texts])
    return GeneratedTokens(tokens, torch.tensor([len(row) for row in texts]), torch.full((len(texts),), limit))


def advance_rows(constraint: Constraint, requests: Sequence[SearchRequest], texts: Sequence[Sequence[int]]) -> Tensor:
    """Return the state after each text, token by token."""
    states = []
    for request, text in zip(requests, texts, strict=True):
        state = constraint.build_initial_state([request])
        for token in text:
            state = constraint.advance_state(state, torch.tensor([token]))
        states.append(state)
    return torch.cat(states)


def list_masked(
    constraint: Constraint, texts: Sequence[Sequence[int]], requests: Sequence[SearchRequest] = ()
) -> list[set[int]]:
    requests = requests or [SearchRequest(source_ids=(), forbid_loops=True)] * len(texts)
    logits = torch.randn(len(texts), V, generator=torch.Generator().manual_seed(0))
    got = constraint.mask_logits(logits.clone(), advance_rows(constraint, requests, texts), build_generated(texts))
    assert got.shape == logits.shape
    assert torch.equal(got[got > NEVER], logits[got > NEVER]), "what is allowed keeps its score"
    return [set((row == NEVER).nonzero()[:, 0].tolist()) for row in got]


def count_masked(constraint: Constraint, oracle: Callable[[list[int], int], bool], texts: list[list[int]]) -> int:
    """Compare with an oracle and return the number of masked tokens."""
    expected = [{token for token in range(V) if oracle(row, token)} for row in texts]
    assert list_masked(constraint, texts) == expected
    return sum(map(len, expected))


@pytest.mark.parametrize("least", [0, 1, 10])
def test_the_end_token_is_masked_before_the_minimum_length(least: int) -> None:
    count_masked(MinLength(least, [END]), lambda row, token: token == END and len(row) < least, build_random_rows(1))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_no_ngram_occurs_twice(n: int, seed: int) -> None:
    def completes_repeated_ngram(row: list[int], token: int) -> bool:
        grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
        return len(row) >= n - 1 and (*row[len(row) - n + 1 :], token) in grams

    assert count_masked(NoRepeatNgram(n), completes_repeated_ngram, [[], *build_random_rows(seed)]) > 20


def test_rows_shorter_than_an_ngram_are_allowed() -> None:
    assert list_masked(NoRepeatNgram(5), [[2], [3, 3]]) == [set(), set()]


def has_loop_by_definition(row: list[int]) -> bool:
    """A unit of 1 to 8 tokens, at least four times in a row and over at least 8 tokens."""
    for unit in range(1, 9):
        times = max(4, -(-8 // unit))
        for at in range(len(row) - unit * times + 1):
            if row[at : at + unit] * times == row[at : at + unit * times]:
                return True
    return False


@pytest.mark.parametrize("seed", range(4))
def test_has_loop_matches_its_definition(seed: int) -> None:
    texts = build_random_rows(seed, 300, vocab=3)
    assert [has_loop(row) for row in texts] == [has_loop_by_definition(row) for row in texts]
    assert 20 < sum(map(has_loop, texts)) < 280


@pytest.mark.parametrize("seed", range(4))
def test_only_tokens_that_complete_a_loop_are_masked(seed: int) -> None:
    texts = build_random_rows(seed, 80, vocab=3)
    for text in texts:
        while has_loop(text):
            del text[-1]
    assert count_masked(NoLoops(), lambda row, token: has_loop([*row, token]), texts) > 5


def test_loops_are_forbidden_only_in_requests_that_ask_for_it() -> None:
    constraint = NoLoops()
    state = constraint.build_initial_state(
        [SearchRequest(source_ids=[4], forbid_loops=True), SearchRequest(source_ids=[4])]
    )
    for _ in range(7):
        state = constraint.advance_state(state, torch.tensor([5, 5]))
    generated = GeneratedTokens(torch.full((2, 7), 5), torch.tensor([7, 7]), torch.tensor([9, 9]))
    logits = constraint.mask_logits(torch.zeros(2, 6), state, generated)
    assert (logits == NEVER).nonzero().tolist() == [[0, 5]]


def test_moderate_repetition_is_no_loop() -> None:
    assert not has_loop([2] * 7)
    assert not has_loop([2, 3] * 3 + [2])
    assert has_loop([2] * 8)
    assert has_loop([2, 3] * 4)
    assert has_loop([9, *[2, 3, 4, 5, 6, 7, 8, 9] * 4])
    assert not has_loop([2, 3, 4, 5, 6, 7, 8, 9, 10] * 9)


# --- prefixes --------------------------------------------------------------------------------------------------------

CONTINUES = torch.tensor([False, False, False, True, True, False, False])


def test_a_prefix_is_forced_and_then_anything_is_allowed() -> None:
    requests = [SearchRequest(source_ids=(), prefix_ids=prefix) for prefix in ([], [2, 3], [4], [4, 4, 4], [0])]
    constraint = ForcedPrefix(requests, CONTINUES)
    for text in ([], [2], [4, 4], [2, 3, 4, 5, 6, 2]):
        expected = []
        for request in requests:
            here = request.prefix_ids[len(text) : len(text) + 1]
            expected.append(set(range(V)) - set(here) if here else set())
        assert list_masked(constraint, [text] * 5, requests) == expected


def test_a_prefix_that_ends_a_word_is_not_followed_by_a_continuation() -> None:
    requests = [
        SearchRequest(source_ids=(), prefix_ids=[2, 3], prefix_ends_word=True),
        SearchRequest(source_ids=(), prefix_ids=[2, 3]),
    ]
    constraint = ForcedPrefix(requests, CONTINUES)
    assert list_masked(constraint, [[2, 3], [2, 3]], requests) == [{3, 4}, set()]
    assert list_masked(constraint, [[2, 3, 5], [2, 3, 5]], requests) == [set(), set()]
    assert list_masked(constraint, [[2], [2]], requests) == [set(range(V)) - {3}] * 2


def test_an_empty_prefix_masks_nothing() -> None:
    request = SearchRequest(source_ids=(), prefix_ends_word=True)
    assert list_masked(ForcedPrefix([request], CONTINUES), [[]], [request]) == [set()]


def test_a_prefix_as_long_as_max_length_is_rejected() -> None:
    with pytest.raises(ValueError, match="shorter than max_length=3 tokens, but has 3; shorten it"):
        ForcedPrefix([SearchRequest(source_ids=(), prefix_ids=[2, 3, 4], max_length=3)], None)


# --- combinations ----------------------------------------------------------------------------------------------------


def apply_together(rules: Sequence[Constraint], request: SearchRequest, text: list[int], logits: Tensor) -> Tensor:
    states = [advance_rows(constraint, [request], [text]) for constraint in rules]
    return apply_constraints(rules, logits.clone()[None], states, build_generated([text]), END)[0]


def test_a_forced_prefix_overrides_other_constraints() -> None:
    logits = torch.arange(V).float()
    request = SearchRequest(source_ids=(), prefix_ids=[2, 2, 2])
    rules = [ForcedPrefix([request], None), NoRepeatNgram(1), MinLength(9, [END])]
    got = apply_together(rules, request, [2], logits)
    assert got.tolist() == [NEVER, NEVER, 2.0, *[NEVER] * 4]
    assert apply_together(rules, request, [2, 2, 2], logits).tolist() == [0.0, NEVER, NEVER, 3.0, 4.0, 5.0, 6.0]


def test_a_row_without_allowed_tokens_may_end() -> None:
    logits = torch.arange(V).float()
    text = [0, 2, 3, 4, 5, 6]
    got = apply_together([MinLength(9, [END]), NoRepeatNgram(1)], SearchRequest(source_ids=()), text, logits)
    assert got.tolist() == [NEVER, 1.0, *[NEVER] * 5]


class UnsatisfiedMinLength(MinLength):
    def is_satisfied(self, state: Tensor) -> Tensor:
        return torch.zeros(len(state), dtype=torch.bool)


def test_a_row_without_allowed_tokens_and_with_missing_phrases_is_dropped() -> None:
    got = apply_together(
        [NoRepeatNgram(1), UnsatisfiedMinLength(9, [END])],
        SearchRequest(source_ids=()),
        [0, 2, 3, 4, 5, 6],
        torch.arange(V).float(),
    )
    assert got.tolist() == [NEVER] * V


def test_constraints_do_not_synchronize_with_the_device() -> None:
    """Reading a value of a `meta` tensor raises."""
    pieces = [b"", b" a", b" Haus", b"\xc3", b"\xa4n", b"boot\xc3", b"x"]
    request = SearchRequest(
        source_ids=(),
        prefix_ids=[2, 3],
        required_phrases=((2, 3), (4,)),
        banned_phrases=("Haus",),
        prefix_ends_word=True,
    )
    rules = [
        MinLength(3, [END]),
        NoRepeatNgram(2),
        NoLoops("meta"),
        BannedPhrases([replace(request, prefix_ids=())], TokenSpellings(pieces, END), "meta"),
        ForcedPrefix([request], CONTINUES, "meta"),
        RequiredPhrases([request], end_id=END, word_continuations=CONTINUES, device="meta"),
    ]
    unprefixed = replace(request, prefix_ids=())
    states = [
        constraint.build_initial_state([unprefixed if isinstance(constraint, BannedPhrases) else request]).to("meta")
        for constraint in rules
    ]
    row = torch.zeros(1, dtype=torch.int64, device="meta")
    for _ in range(2):
        scores = apply_constraints(
            rules, torch.zeros(1, V, device="meta"), states, GeneratedTokens(row[None].expand(1, 5), row, row), END
        )
        states = [constraint.advance_state(state, row) for constraint, state in zip(rules, states, strict=True)]
    assert scores.shape == (1, V)
    assert allocate_beams(scores, torch.zeros(1, V, dtype=torch.int64, device="meta"), 2).shape == (1, 2)
