"""Rules against plain Python that reads one row at a time, on rows of different lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attent.decoding.constraints.banned_phrases import BannedPhrases
from attent.decoding.constraints.base import Constraint, GeneratedTokens, apply_constraints
from attent.decoding.constraints.min_length import MinLength
from attent.decoding.constraints.no_repeat import NoLoops, NoRepeatNgram, has_loop
from attent.decoding.constraints.phrase_automaton import TokenSpellings
from attent.decoding.constraints.prefix import ForcedPrefix, PrefixError
from attent.decoding.constraints.required_phrases import RequiredPhrases, allocate_beams
from attent.decoding.options import SearchRequest

END, V, FILLER = 1, 7, 5
NEVER = float("-inf")


def rows(seed: int, count: int = 60, longest: int = 40, vocab: int = 4) -> list[list[int]]:
    """Few different tokens, and often some of them again, so that much comes twice."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        row: list[int] = []
        for _ in range(chance.randrange(longest)):
            unit = chance.randint(1, 9)
            row += row[-unit:] if chance.random() < 0.3 else [chance.randrange(2, 2 + vocab)]
        found.append(row[: chance.randrange(longest)])
    return found


def written(texts: Sequence[Sequence[int]], limit: int = 100) -> GeneratedTokens:
    longest = max(map(len, texts)) + 2
    tokens = torch.tensor([[*row, *[FILLER] * (longest - len(row))] for row in texts])
    return GeneratedTokens(tokens, torch.tensor([len(row) for row in texts]), torch.full((len(texts),), limit))


def states(rule: Constraint, jobs: Sequence[SearchRequest], texts: Sequence[Sequence[int]]) -> Tensor:
    """Behind each text, as it comes about token by token."""
    found = []
    for job, text in zip(jobs, texts, strict=True):
        state = rule.build_initial_state([job])
        for token in text:
            state = rule.advance_state(state, torch.tensor([token]))
        found.append(state)
    return torch.cat(found)


def forbidden(rule: Constraint, texts: Sequence[Sequence[int]], jobs: Sequence[SearchRequest] = ()) -> list[set[int]]:
    jobs = jobs or [SearchRequest(source_ids=())] * len(texts)
    scores = torch.randn(len(texts), V, generator=torch.Generator().manual_seed(0))
    got = rule.mask_scores(scores.clone(), states(rule, jobs, texts), written(texts))
    assert got.shape == scores.shape
    assert torch.equal(got[got > NEVER], scores[got > NEVER]), "what is allowed keeps its score"
    return [set((row == NEVER).nonzero()[:, 0].tolist()) for row in got]


def against(rule: Constraint, oracle: Callable[[list[int], int], bool], texts: list[list[int]]) -> int:
    """Compare; how many tokens were forbidden."""
    wanted = [{token for token in range(V) if oracle(row, token)} for row in texts]
    assert forbidden(rule, texts) == wanted
    return sum(map(len, wanted))


@pytest.mark.parametrize("least", [0, 1, 10])
def test_no_end_comes_before_the_least_length(least: int) -> None:
    against(MinLength(least, END), lambda row, token: token == END and len(row) < least, rows(1))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_no_sequence_of_n_tokens_comes_twice(n: int, seed: int) -> None:
    def comes_again(row: list[int], token: int) -> bool:
        grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
        return len(row) >= n - 1 and (*row[len(row) - n + 1 :], token) in grams

    assert against(NoRepeatNgram(n), comes_again, [[], *rows(seed)]) > 20


def test_a_repetition_is_found_in_rows_shorter_than_itself() -> None:
    assert forbidden(NoRepeatNgram(5), [[2], [3, 3]]) == [set(), set()]


def loops(row: list[int]) -> bool:
    """By the words of the definition: a unit of 1 to 8 tokens, four times in a row or more, over 8 tokens or more."""
    for unit in range(1, 9):
        times = max(4, -(-8 // unit))
        for at in range(len(row) - unit * times + 1):
            if row[at : at + unit] * times == row[at : at + unit * times]:
                return True
    return False


@pytest.mark.parametrize("seed", range(4))
def test_a_loop_is_what_its_definition_says(seed: int) -> None:
    texts = rows(seed, 300, vocab=3)
    assert [has_loop(row) for row in texts] == [loops(row) for row in texts]
    assert 20 < sum(map(has_loop, texts)) < 280


@pytest.mark.parametrize("seed", range(4))
def test_a_token_that_would_make_a_loop_is_forbidden_and_no_other(seed: int) -> None:
    texts = rows(seed, 80, vocab=3)
    for text in texts:
        while has_loop(text):
            del text[-1]
    assert against(NoLoops(), lambda row, token: has_loop([*row, token]), texts) > 5


def test_where_not_all_are_asked_only_jobs_that_say_so_may_not_loop() -> None:
    rule = NoLoops(all_requests=False)
    state = rule.build_initial_state([SearchRequest(source_ids=[4], forbid_loops=True), SearchRequest(source_ids=[4])])
    for _ in range(7):
        state = rule.advance_state(state, torch.tensor([5, 5]))
    written = GeneratedTokens(torch.full((2, 7), 5), torch.tensor([7, 7]), torch.tensor([9, 9]))
    scores = rule.mask_scores(torch.zeros(2, 6), state, written)
    assert (scores == NEVER).nonzero().tolist() == [[0, 5]]


def test_text_that_repeats_within_reason_is_no_loop() -> None:
    assert not has_loop([2] * 7)
    assert not has_loop([2, 3] * 3 + [2])
    assert has_loop([2] * 8)
    assert has_loop([2, 3] * 4)
    assert has_loop([9, *[2, 3, 4, 5, 6, 7, 8, 9] * 4])
    assert not has_loop([2, 3, 4, 5, 6, 7, 8, 9, 10] * 9)


# --- the beginning ---------------------------------------------------------------------------------------------------

CONTINUES = torch.tensor([False, False, False, True, True, False, False])


def test_a_prefix_is_kept_and_then_anything_may_come() -> None:
    jobs = [SearchRequest(source_ids=(), prefix_ids=prefix) for prefix in ([], [2, 3], [4], [4, 4, 4])]
    rule = ForcedPrefix(jobs, CONTINUES)
    for text in ([], [2], [4, 4], [2, 3, 4, 5, 6, 2]):
        wanted = []
        for job in jobs:
            here = job.prefix_ids[len(text) : len(text) + 1]
            wanted.append(set(range(V)) - set(here) if here else set())
        assert forbidden(rule, [text] * 4, jobs) == wanted


def test_behind_a_prefix_of_whole_words_no_piece_goes_on_with_the_last() -> None:
    jobs = [
        SearchRequest(source_ids=(), prefix_ids=[2, 3], prefix_ends_word=True),
        SearchRequest(source_ids=(), prefix_ids=[2, 3]),
    ]
    rule = ForcedPrefix(jobs, CONTINUES)
    assert forbidden(rule, [[2, 3], [2, 3]], jobs) == [{3, 4}, set()]
    assert forbidden(rule, [[2, 3, 5], [2, 3, 5]], jobs) == [set(), set()]
    assert forbidden(rule, [[2], [2]], jobs) == [set(range(V)) - {3}] * 2


def test_an_empty_prefix_has_no_last_word() -> None:
    job = SearchRequest(source_ids=(), prefix_ends_word=True)
    assert forbidden(ForcedPrefix([job], CONTINUES), [[]], [job]) == [set()]


def test_a_prefix_that_leaves_no_room_is_an_error_that_says_so() -> None:
    with pytest.raises(PrefixError, match="shorter than max_length=3 tokens, but has 3; shorten it"):
        ForcedPrefix([SearchRequest(source_ids=(), prefix_ids=[2, 3, 4], max_length=3)], None)


# --- all together ----------------------------------------------------------------------------------------------------


def together(rules: Sequence[Constraint], job: SearchRequest, text: list[int], scores: Tensor) -> Tensor:
    some = [states(rule, [job], [text]) for rule in rules]
    return apply_constraints(rules, scores.clone()[None], some, written([text]), END)[0]


def test_a_prefix_comes_before_what_other_rules_forbid() -> None:
    scores = torch.arange(V).float()
    job = SearchRequest(source_ids=(), prefix_ids=[2, 2, 2])
    rules = [ForcedPrefix([job], None), NoRepeatNgram(1), MinLength(9, END)]
    got = together(rules, job, [2], scores)
    assert got.tolist() == [NEVER, NEVER, 2.0, *[NEVER] * 4]
    assert together(rules, job, [2, 2, 2], scores).tolist() == [0.0, NEVER, NEVER, 3.0, 4.0, 5.0, 6.0]


def test_where_nothing_is_left_a_row_may_end() -> None:
    scores = torch.arange(V).float()
    text = [0, 2, 3, 4, 5, 6]
    got = together([MinLength(9, END), NoRepeatNgram(1)], SearchRequest(source_ids=()), text, scores)
    assert got.tolist() == [NEVER, 1.0, *[NEVER] * 5]


class Lacking(MinLength):
    def is_satisfied(self, state: Tensor) -> Tensor:
        return torch.zeros(len(state), dtype=torch.bool)


def test_where_nothing_is_left_and_something_is_missing_a_row_is_given_up() -> None:
    got = together(
        [NoRepeatNgram(1), Lacking(9, END)], SearchRequest(source_ids=()), [0, 2, 3, 4, 5, 6], torch.arange(V).float()
    )
    assert got.tolist() == [NEVER] * V


def test_no_step_asks_the_device_for_a_number() -> None:
    """Tensors on `meta` have no numbers: whoever asked for one would be told so."""
    pieces = [b"", b" a", b" Haus", b"\xc3", b"\xa4n", b"boot\xc3", b"x"]
    job = SearchRequest(
        source_ids=(),
        prefix_ids=[2, 3],
        required_phrases=((2, 3), (4,)),
        banned_phrases=("Haus",),
        prefix_ends_word=True,
    )
    rules = [
        MinLength(3, END, "meta"),
        NoRepeatNgram(2, "meta"),
        NoLoops("meta"),
        BannedPhrases([replace(job, prefix_ids=())], TokenSpellings(pieces, END), "meta"),
        ForcedPrefix([job], CONTINUES, "meta"),
        RequiredPhrases([job], end=END, word_continuations=CONTINUES, device="meta"),
    ]
    unprefixed = replace(job, prefix_ids=())
    some = [rule.build_initial_state([unprefixed if isinstance(rule, BannedPhrases) else job]) for rule in rules]
    row = torch.zeros(1, dtype=torch.int64, device="meta")
    for _ in range(2):
        scores = apply_constraints(
            rules, torch.zeros(1, V, device="meta"), some, GeneratedTokens(row[None].expand(1, 5), row, row), END
        )
        some = [rule.advance_state(state, row) for rule, state in zip(rules, some, strict=True)]
    assert scores.shape == (1, V)
    assert allocate_beams(scores, torch.zeros(1, V, dtype=torch.int64, device="meta"), 2).shape == (1, 2)
