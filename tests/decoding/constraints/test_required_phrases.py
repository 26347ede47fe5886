"""Required phrases against plain Python that counts them, and in a small beam search."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest
import torch
from torch import Tensor

from attent.decoding.constraints.base import GeneratedTokens, apply_constraints
from attent.decoding.constraints.required_phrases import (
    RequiredPhraseError,
    RequiredPhrases,
    allocate_beams,
    check_required_length,
    count_occurrences,
)
from attent.decoding.options import SearchRequest

END, V = 1, 8
NEVER = float("-inf")
Tokens = tuple[int, ...]


def build_request(*demanded: Tokens, prefix: Tokens = (), limit: int = 0) -> SearchRequest:
    return SearchRequest(source_ids=(), required_phrases=demanded, prefix_ids=prefix, max_length=limit)


def build_random_requests(seed: int, count: int = 30) -> list[SearchRequest]:
    """Build requests with phrases of few distinct tokens, which overlap, contain each other and repeat."""
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        phrases = [tuple(rng.choices((2, 3, 4), k=rng.randint(1, 4))) for _ in range(rng.randint(0, 4))]
        requests.append(build_request(*phrases, *phrases[: rng.randint(0, 1)]))
    return requests


def count_progress(text: Tokens, phrase: Tokens) -> int:
    """Return how many tokens of a phrase end the text, after its last occurrence."""
    at = 0
    while at + len(phrase) <= len(text):
        at += len(phrase) if text[at : at + len(phrase)] == phrase else 1
        if text[at - len(phrase) : at] == phrase and count_occurrences(text[:at], phrase) > count_occurrences(
            text[: at - 1], phrase
        ):
            text, at = text[at:], 0
    return max(n for n in range(len(phrase)) if n == 0 or text[len(text) - n :] == phrase[:n])


def track_plainly(request: SearchRequest, text: Tokens) -> tuple[bool, int, set[int]]:
    """Return whether all phrases are met, the tokens matched, and the tokens that make progress."""
    times = Counter(request.required_phrases)
    left = {phrase: max(n - count_occurrences(text, phrase), 0) for phrase, n in times.items()}
    begun = {phrase: count_progress(text, phrase) for phrase in times if left[phrase]}
    missing = sum(len(phrase) * n for phrase, n in left.items()) - max(begun.values(), default=0)
    total = sum(len(phrase) * n for phrase, n in times.items())
    return not any(left.values()), total - missing, {phrase[n] for phrase, n in begun.items()}


@pytest.mark.parametrize("seed", range(6))
def test_progress_matches_a_plain_count(seed: int) -> None:
    requests, rng = build_random_requests(seed), random.Random(seed)
    constraint = RequiredPhrases(requests, end=END)
    state, texts = constraint.build_initial_state(requests), [() for _ in requests]
    for _ in range(25):
        expected = [track_plainly(*both) for both in zip(requests, texts, strict=True)]
        assert constraint.is_satisfied(state).tolist() == [full for full, _, _ in expected]
        assert constraint.compute_banks(state).tolist() == [bank for _, bank, _ in expected]
        assert [set(row) - {-1} for row in constraint.get_next_tokens(state).tolist()] == [
            tokens for _, _, tokens in expected
        ]
        token = [rng.choice((2, 3, 4, 5) if rng.random() < 0.2 else (2, 3, 4)) for _ in requests]
        state = constraint.advance_state(state, torch.tensor(token))
        texts = [(*text, next_token) for text, next_token in zip(texts, token, strict=True)]
    assert sum(full for full, _, _ in expected) > 5


@pytest.mark.parametrize(
    ("demanded", "text", "met"),
    [
        (((2, 3),), (2, 2, 3), True),  # an interrupted match may start the next one
        (((2, 3, 2, 4),), (2, 3, 2, 3, 2, 4), True),
        (((2, 3),), (2, 4, 3), False),
        (((2,), (2, 3)), (2, 3), True),  # each of them occurs
        (((3,), (2, 3)), (2, 3), True),
        (((2, 2), (2, 2)), (2, 2, 2), False),  # repetitions must not overlap
        (((2, 2), (2, 2)), (2, 2, 2, 2), True),
        ((), (), True),
        (((),), (), True),
    ],
)
def test_a_phrase_is_met_where_it_occurs(demanded: tuple[Tokens, ...], text: Tokens, met: bool) -> None:
    constraint = RequiredPhrases([build_request(*demanded)], end=END)
    state = constraint.build_initial_state([build_request(*demanded)])
    for token in text:
        state = constraint.advance_state(state, torch.tensor([token]))
    assert bool(constraint.is_satisfied(state)) is met


# --- allowed tokens --------------------------------------------------------------------------------------------------


def list_allowed(constraint: RequiredPhrases, request: SearchRequest, text: Tokens, limit: int) -> set[int]:
    state = constraint.build_initial_state([request])
    for token in text:
        state = constraint.advance_state(state, torch.tensor([token]))
    tokens = torch.tensor([[*text, 0]])
    written = GeneratedTokens(tokens, torch.tensor([len(text)]), torch.tensor([limit]))
    scores = torch.randn(1, V, generator=torch.Generator().manual_seed(0))
    got = constraint.mask_scores(scores.clone(), state, written)
    assert torch.equal(got[got > NEVER], scores[got > NEVER])
    return set((got[0] > NEVER).nonzero()[:, 0].tolist())


EVERY = set(range(V))


def test_the_end_token_is_masked_until_all_phrases_are_met() -> None:
    request = build_request((2, 3), (4,))
    constraint = RequiredPhrases([request], end=END)
    assert list_allowed(constraint, request, (), 20) == EVERY - {END}
    assert list_allowed(constraint, request, (2, 3), 20) == EVERY - {END}
    assert list_allowed(constraint, request, (2, 3, 4), 20) == EVERY


def test_only_missing_tokens_are_allowed_when_room_is_short() -> None:
    request = build_request((2, 3), (4,))
    constraint = RequiredPhrases([request], end=END)
    assert list_allowed(constraint, request, (), 5) == EVERY - {END}  # 4 of 5 are needed
    assert list_allowed(constraint, request, (), 4) == {2, 4}
    assert list_allowed(constraint, request, (2,), 4) == {3}  # 4 would interrupt the phrase, with no room to restart it
    assert list_allowed(constraint, request, (2,), 5) == {3, 4}
    assert list_allowed(constraint, request, (2,), 6) == EVERY - {END}
    assert list_allowed(constraint, request, (6, 6, 4), 6) == {2}


def test_a_met_phrase_is_not_followed_by_a_word_continuation() -> None:
    continues = torch.tensor([False, False, False, False, False, True, True, False])
    request = build_request((2, 3))
    constraint = RequiredPhrases([request], end=END, word_continuations=continues)
    assert list_allowed(constraint, request, (2,), 20) == EVERY - {END}
    assert list_allowed(constraint, request, (2, 3), 20) == EVERY - {5, 6}
    assert list_allowed(constraint, request, (2, 3, 4), 20) == EVERY
    assert list_allowed(constraint, request, (2, 3, 4, 2, 3), 20) == EVERY  # it was required only once


@pytest.mark.parametrize("seed", range(4))
def test_any_choice_of_allowed_tokens_meets_all_phrases_in_time(seed: int) -> None:
    rng = random.Random(seed)
    requests = build_random_requests(seed)
    limits = [sum(map(len, request.required_phrases)) + 1 + rng.randrange(4) for request in requests]
    constraint = RequiredPhrases(requests, end=END)
    for _ in range(8):
        state, texts = constraint.build_initial_state(requests), [() for _ in requests]
        for length in range(max(limits)):
            tokens = torch.tensor([[*text, 0] for text in texts])
            written = GeneratedTokens(tokens, torch.full((len(requests),), length), torch.tensor(limits))
            scores = constraint.mask_scores(torch.zeros(len(requests), V), state, written)
            free = [[i for i, score in enumerate(row) if score == 0] for row in scores.tolist()]
            over = [length >= limit or END in text for text, limit in zip(texts, limits, strict=True)]
            token = [END if done else rng.choice(allowed) for done, allowed in zip(over, free, strict=True)]
            texts = [(*text, next_token) for text, next_token in zip(texts, token, strict=True)]
            state = constraint.advance_state(state, torch.tensor(token))
        for request, text, limit in zip(requests, texts, limits, strict=True):
            assert track_plainly(request, text[:limit])[0], (request.required_phrases, text[:limit])


def test_phrases_that_do_not_fit_are_rejected() -> None:
    check_required_length(
        [
            build_request((2, 3), limit=3),
            build_request((2, 3), limit=0),
            build_request(limit=1),
            build_request((2, 3), prefix=(4, 2, 3), limit=4),
        ]
    )
    with pytest.raises(
        RequiredPhraseError,
        match="into max_length=3 tokens, but 3 tokens and the end token make 4",
    ):
        check_required_length([build_request((2, 3), (4,), limit=3)])
    with pytest.raises(RequiredPhraseError, match="2 tokens after a prefix of 2 and the end token make 5"):
        RequiredPhrases([build_request((2, 3), prefix=(4, 4), limit=4)], end=END)


# --- the beam --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_beams_are_allocated_among_banks(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    totals = torch.randint(-6, 0, (40, 13), generator=rng).float()  # with ties
    totals[torch.rand(40, 13, generator=rng) < 0.3] = NEVER
    banks = torch.randint(0, 4, (40, 13), generator=rng)
    for k in (1, 4, 13):
        for got, total, bank in zip(
            allocate_beams(totals, banks, k).tolist(), totals.tolist(), banks.tolist(), strict=True
        ):
            queues = [sorted((p for p in range(13) if bank[p] == b), key=lambda p: -total[p]) for b in (3, 2, 1, 0)]
            rounds = [queue[i] for i in range(13) for queue in queues if i < len(queue) and total[queue[i]] > NEVER]
            finite = [index for index in got if total[index] > NEVER]
            assert finite == rounds[:k]
            assert got[: len(finite)] == finite
            assert len(set(got)) == k


def logits(read: Tokens) -> Tensor:
    rng = torch.Generator().manual_seed(hash((7, *read)) % 2**31)
    return 2 * torch.randn(V, generator=rng)


def search_plainly(request: SearchRequest, beam_size: int) -> tuple[Tokens, float]:
    """Return the best target, with its end token, of a minimal beam search."""
    constraint = RequiredPhrases([request], end=END)
    state, texts, sums = constraint.build_initial_state([request]), [()], torch.zeros(1)
    ended: list[tuple[float, Tokens]] = []
    for length in range(request.max_length):
        rows = len(texts)
        tokens = torch.tensor([[*text, 0] for text in texts])
        written = GeneratedTokens(tokens, torch.full((rows,), length), torch.full((rows,), request.max_length))
        scores = torch.stack([logits(text) for text in texts]).log_softmax(-1)
        totals = sums[:, None] + apply_constraints([constraint], scores, [state], written, END)
        ended += [(total, (*text, END)) for total, text in zip(totals[:, END].tolist(), texts, strict=True)]
        totals[:, END] = NEVER
        after = constraint.advance_state(state.repeat_interleave(V, 0), torch.arange(V).repeat(rows))
        best = allocate_beams(
            totals.view(1, -1), constraint.compute_banks(after).view(1, -1), min(beam_size, rows * V)
        )[0]
        best = best[totals.flatten()[best] > NEVER]
        if not len(best):
            break
        texts = [(*texts[int(i) // V], int(i) % V) for i in best]
        state, sums = after[best], totals.flatten()[best]
    return max(ended)[1], max(ended)[0]


@pytest.mark.parametrize("beam_size", [1, 2, 5])
def test_beam_search_meets_all_phrases(beam_size: int) -> None:
    for request in build_random_requests(11, 20):
        request = build_request(*request.required_phrases, limit=sum(map(len, request.required_phrases)) + 4)
        text, total = search_plainly(request, beam_size)
        assert track_plainly(request, text)[0], (request.required_phrases, text)
        assert text[-1] == END
        assert total > NEVER


def test_an_exhaustive_beam_finds_the_best_target_with_all_phrases() -> None:
    request = build_request((2, 3), (3,), limit=5)
    texts = [(*body, END) for n in range(5) for body in product([t for t in range(V) if t != END], repeat=n)]
    texts = [text for text in texts if track_plainly(request, text)[0]]

    def total(text: Tokens) -> float:
        return sum(float(logits(text[:i]).log_softmax(-1)[token]) for i, token in enumerate(text))

    best = max(texts, key=total)
    assert search_plainly(request, 5000)[0] == best
