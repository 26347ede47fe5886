"""Demanded sequences against plain Python that counts them, and a small beam search that must meet them."""

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


def job(*demanded: Tokens, prefix: Tokens = (), limit: int = 0) -> SearchRequest:
    return SearchRequest(source_ids=(), required_phrases=demanded, prefix_ids=prefix, max_length=limit)


def chance_jobs(seed: int, count: int = 30) -> list[SearchRequest]:
    """Sequences of few different tokens: they overlap, hold one another and are demanded twice."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        some = [tuple(chance.choices((2, 3, 4), k=chance.randint(1, 4))) for _ in range(chance.randint(0, 4))]
        found.append(job(*some, *some[: chance.randint(0, 1)]))
    return found


def progress(text: Tokens, one: Tokens) -> int:
    """How many tokens of a sequence have just been written, of those behind its last occurrence."""
    at = 0
    while at + len(one) <= len(text):
        at += len(one) if text[at : at + len(one)] == one else 1
        if text[at - len(one) : at] == one and count_occurrences(text[:at], one) > count_occurrences(
            text[: at - 1], one
        ):
            text, at = text[at:], 0
    return max(n for n in range(len(one)) if n == 0 or text[len(text) - n :] == one[:n])


def plain(one_job: SearchRequest, text: Tokens) -> tuple[bool, int, set[int]]:
    """(Has all come? How many tokens have? Which may bring more nearer?)"""
    times = Counter(one_job.required_phrases)
    left = {one: max(n - count_occurrences(text, one), 0) for one, n in times.items()}
    begun = {one: progress(text, one) for one in times if left[one]}
    missing = sum(len(one) * n for one, n in left.items()) - max(begun.values(), default=0)
    total = sum(len(one) * n for one, n in times.items())
    return not any(left.values()), total - missing, {one[n] for one, n in begun.items()}


@pytest.mark.parametrize("seed", range(6))
def test_what_has_come_is_what_a_count_says(seed: int) -> None:
    jobs, chance = chance_jobs(seed), random.Random(seed)
    rule = RequiredPhrases(jobs, end=END)
    state, texts = rule.build_initial_state(jobs), [() for _ in jobs]
    for _ in range(25):
        wanted = [plain(*both) for both in zip(jobs, texts, strict=True)]
        assert rule.is_satisfied(state).tolist() == [full for full, _, _ in wanted]
        assert rule.compute_banks(state).tolist() == [bank for _, bank, _ in wanted]
        assert [set(row) - {-1} for row in rule.get_next_tokens(state).tolist()] == [tokens for _, _, tokens in wanted]
        token = [chance.choice((2, 3, 4, 5) if chance.random() < 0.2 else (2, 3, 4)) for _ in jobs]
        state = rule.advance_state(state, torch.tensor(token))
        texts = [(*text, one) for text, one in zip(texts, token, strict=True)]
    assert sum(full for full, _, _ in wanted) > 5


@pytest.mark.parametrize(
    ("demanded", "text", "met"),
    [
        (((2, 3),), (2, 2, 3), True),  # what breaks off may be the beginning of what follows
        (((2, 3, 2, 4),), (2, 3, 2, 3, 2, 4), True),
        (((2, 3),), (2, 4, 3), False),
        (((2,), (2, 3)), (2, 3), True),  # each of them has come
        (((3,), (2, 3)), (2, 3), True),
        (((2, 2), (2, 2)), (2, 2, 2), False),  # twice is without overlap
        (((2, 2), (2, 2)), (2, 2, 2, 2), True),
        ((), (), True),
        (((),), (), True),
    ],
)
def test_a_sequence_is_met_where_it_comes(demanded: tuple[Tokens, ...], text: Tokens, met: bool) -> None:
    rule = RequiredPhrases([job(*demanded)], end=END)
    state = rule.build_initial_state([job(*demanded)])
    for token in text:
        state = rule.advance_state(state, torch.tensor([token]))
    assert bool(rule.is_satisfied(state)) is met


# --- what may be written ---------------------------------------------------------------------------------------------


def allowed(rule: RequiredPhrases, one: SearchRequest, text: Tokens, limit: int) -> set[int]:
    state = rule.build_initial_state([one])
    for token in text:
        state = rule.advance_state(state, torch.tensor([token]))
    tokens = torch.tensor([[*text, 0]])
    written = GeneratedTokens(tokens, torch.tensor([len(text)]), torch.tensor([limit]))
    scores = torch.randn(1, V, generator=torch.Generator().manual_seed(0))
    got = rule.mask_scores(scores.clone(), state, written)
    assert torch.equal(got[got > NEVER], scores[got > NEVER])
    return set((got[0] > NEVER).nonzero()[:, 0].tolist())


EVERY = set(range(V))


def test_no_end_comes_before_what_is_demanded() -> None:
    one = job((2, 3), (4,))
    rule = RequiredPhrases([one], end=END)
    assert allowed(rule, one, (), 20) == EVERY - {END}
    assert allowed(rule, one, (2, 3), 20) == EVERY - {END}
    assert allowed(rule, one, (2, 3, 4), 20) == EVERY


def test_where_room_is_short_only_what_is_missing_may_come() -> None:
    one = job((2, 3), (4,))
    rule = RequiredPhrases([one], end=END)
    assert allowed(rule, one, (), 5) == EVERY - {END}  # 3 tokens and the end are missing, one more may come
    assert allowed(rule, one, (), 4) == {2, 4}
    assert allowed(rule, one, (2,), 4) == {3}  # 4 would break off what is begun, and there is no room to begin anew
    assert allowed(rule, one, (2,), 5) == {3, 4}
    assert allowed(rule, one, (2,), 6) == EVERY - {END}
    assert allowed(rule, one, (6, 6, 4), 6) == {2}


def test_behind_a_demanded_word_no_piece_goes_on_with_it() -> None:
    continues = torch.tensor([False, False, False, False, False, True, True, False])
    one = job((2, 3))
    rule = RequiredPhrases([one], end=END, word_continuations=continues)
    assert allowed(rule, one, (2,), 20) == EVERY - {END}
    assert allowed(rule, one, (2, 3), 20) == EVERY - {5, 6}
    assert allowed(rule, one, (2, 3, 4), 20) == EVERY
    assert allowed(rule, one, (2, 3, 4, 2, 3), 20) == EVERY  # it was not demanded again


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_chosen_among_the_allowed_all_that_is_demanded_comes_in_time(seed: int) -> None:
    chance = random.Random(seed)
    jobs = chance_jobs(seed)
    limits = [sum(map(len, one.required_phrases)) + 1 + chance.randrange(4) for one in jobs]
    rule = RequiredPhrases(jobs, end=END)
    for _ in range(8):
        state, texts = rule.build_initial_state(jobs), [() for _ in jobs]
        for length in range(max(limits)):
            tokens = torch.tensor([[*text, 0] for text in texts])
            written = GeneratedTokens(tokens, torch.full((len(jobs),), length), torch.tensor(limits))
            scores = rule.mask_scores(torch.zeros(len(jobs), V), state, written)
            free = [[i for i, score in enumerate(row) if score == 0] for row in scores.tolist()]
            over = [length >= limit or END in text for text, limit in zip(texts, limits, strict=True)]
            token = [END if done else chance.choice(some) for done, some in zip(over, free, strict=True)]
            texts = [(*text, one) for text, one in zip(texts, token, strict=True)]
            state = rule.advance_state(state, torch.tensor(token))
        for one, text, limit in zip(jobs, texts, limits, strict=True):
            assert plain(one, text[:limit])[0], (one.required_phrases, text[:limit])


def test_what_has_no_room_is_an_error_that_says_so() -> None:
    check_required_length(
        [job((2, 3), limit=3), job((2, 3), limit=0), job(limit=1), job((2, 3), prefix=(4, 2, 3), limit=4)]
    )
    with pytest.raises(
        RequiredPhraseError,
        match="into max_length=3 tokens, but 3 tokens and the end token make 4",
    ):
        check_required_length([job((2, 3), (4,), limit=3)])
    with pytest.raises(RequiredPhraseError, match="2 tokens after a prefix of 2 and the end token make 5"):
        RequiredPhrases([job((2, 3), prefix=(4, 4), limit=4)], end=END)


# --- the beam --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_beams_are_shared_out_among_banks(seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    totals = torch.randint(-6, 0, (40, 13), generator=chance).float()  # with ties
    totals[torch.rand(40, 13, generator=chance) < 0.3] = NEVER
    banks = torch.randint(0, 4, (40, 13), generator=chance)
    for k in (1, 4, 13):
        for got, total, bank in zip(
            allocate_beams(totals, banks, k).tolist(), totals.tolist(), banks.tolist(), strict=True
        ):
            queues = [sorted((p for p in range(13) if bank[p] == b), key=lambda p: -total[p]) for b in (3, 2, 1, 0)]
            rounds = [queue[i] for i in range(13) for queue in queues if i < len(queue) and total[queue[i]] > NEVER]
            finite = [place for place in got if total[place] > NEVER]
            assert finite == rounds[:k]
            assert got[: len(finite)] == finite
            assert len(set(got)) == k


def logits(read: Tokens) -> Tensor:
    chance = torch.Generator().manual_seed(hash((7, *read)) % 2**31)
    return 2 * torch.randn(V, generator=chance)


def searched(one: SearchRequest, beam_size: int) -> tuple[Tokens, float]:
    """A beam search in a few lines: the best target with its end."""
    rule = RequiredPhrases([one], end=END)
    state, texts, sums = rule.build_initial_state([one]), [()], torch.zeros(1)
    ended: list[tuple[float, Tokens]] = []
    for length in range(one.max_length):
        rows = len(texts)
        tokens = torch.tensor([[*text, 0] for text in texts])
        written = GeneratedTokens(tokens, torch.full((rows,), length), torch.full((rows,), one.max_length))
        scores = torch.stack([logits(text) for text in texts]).log_softmax(-1)
        totals = sums[:, None] + apply_constraints([rule], scores, [state], written, END)
        ended += [(total, (*text, END)) for total, text in zip(totals[:, END].tolist(), texts, strict=True)]
        totals[:, END] = NEVER
        after = rule.advance_state(state.repeat_interleave(V, 0), torch.arange(V).repeat(rows))
        best = allocate_beams(totals.view(1, -1), rule.compute_banks(after).view(1, -1), min(beam_size, rows * V))[0]
        best = best[totals.flatten()[best] > NEVER]
        if not len(best):
            break
        texts = [(*texts[int(i) // V], int(i) % V) for i in best]
        state, sums = after[best], totals.flatten()[best]
    return max(ended)[1], max(ended)[0]


@pytest.mark.parametrize("beam_size", [1, 2, 5])
def test_a_search_meets_every_demand(beam_size: int) -> None:
    for one in chance_jobs(11, 20):
        one = job(*one.required_phrases, limit=sum(map(len, one.required_phrases)) + 4)
        text, total = searched(one, beam_size)
        assert plain(one, text)[0], (one.required_phrases, text)
        assert text[-1] == END
        assert total > NEVER


def test_a_beam_as_wide_as_all_there_is_finds_the_best_that_meets_the_demands() -> None:
    one = job((2, 3), (3,), limit=5)
    texts = [(*body, END) for n in range(5) for body in product([t for t in range(V) if t != END], repeat=n)]
    texts = [text for text in texts if plain(one, text)[0]]

    def total(text: Tokens) -> float:
        return sum(float(logits(text[:i]).log_softmax(-1)[token]) for i, token in enumerate(text))

    best = max(texts, key=total)
    assert searched(one, 5000)[0] == best
