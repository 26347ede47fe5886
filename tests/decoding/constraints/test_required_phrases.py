"""Required phrases against plain Python that counts them, and in a small beam search."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attent.decoding.constraints import TargetVocabulary, build_constraints
from attent.decoding.constraints.base import GeneratedTokens, apply_constraints
from attent.decoding.constraints.required_phrases import (
    RequiredPhrases,
    allocate_beams,
)
from attent.decoding.engines.reference import TorchEngine
from attent.decoding.glossary import Glossary
from attent.decoding.options import Hypothesis, PhraseConstraints, SearchOptions, SearchRequest
from attent.decoding.search import select_with_required
from attent.decoding.translator import TranslationError, Translator
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import StackConfig
from attent.training.autoconfig import fit_to_tokenizer
from tests.decoding.toy_models import ToyModel
from tests.text.corpus import tokenizer

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


def count_occurrences(tokens: Tokens, phrase: Tokens) -> int:
    """Count occurrences without overlap."""
    count, start = 0, 0
    while start + len(phrase) <= len(tokens):
        is_match = tokens[start : start + len(phrase)] == phrase
        count, start = count + is_match, start + (len(phrase) if is_match else 1)
    return count


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
    constraint = RequiredPhrases(requests, end_id=END)
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
    constraint = RequiredPhrases([build_request(*demanded)], end_id=END)
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
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(0))
    got = constraint.mask_logits(logits.clone(), state, written)
    assert torch.equal(got[got > NEVER], logits[got > NEVER])
    return set((got[0] > NEVER).nonzero()[:, 0].tolist())


EVERY = set(range(V))


def test_the_end_token_is_masked_until_all_phrases_are_met() -> None:
    request = build_request((2, 3), (4,))
    constraint = RequiredPhrases([request], end_id=END)
    assert list_allowed(constraint, request, (), 20) == EVERY - {END}
    assert list_allowed(constraint, request, (2, 3), 20) == EVERY - {END}
    assert list_allowed(constraint, request, (2, 3, 4), 20) == EVERY


def test_only_missing_tokens_are_allowed_when_room_is_short() -> None:
    request = build_request((2, 3), (4,))
    constraint = RequiredPhrases([request], end_id=END)
    assert list_allowed(constraint, request, (), 5) == EVERY - {END}  # 4 of 5 are needed
    assert list_allowed(constraint, request, (), 4) == {2, 4}
    assert list_allowed(constraint, request, (2,), 4) == {3}  # 4 would interrupt the phrase, with no room to restart it
    assert list_allowed(constraint, request, (2,), 5) == {2, 3, 4}  # 2 starts it anew
    assert list_allowed(constraint, request, (2,), 6) == EVERY - {END}
    assert list_allowed(constraint, request, (6, 6, 4), 6) == {2}


def test_a_met_phrase_is_not_followed_by_a_word_continuation() -> None:
    continues = torch.tensor([False, False, False, False, False, True, True, False])
    request = build_request((2, 3))
    constraint = RequiredPhrases([request], end_id=END, word_continuations=continues)
    assert list_allowed(constraint, request, (2,), 20) == EVERY - {END}
    assert list_allowed(constraint, request, (2, 3), 20) == EVERY - {5, 6}
    assert list_allowed(constraint, request, (2, 3, 4), 20) == EVERY
    assert list_allowed(constraint, request, (2, 3, 4, 2, 3), 20) == EVERY  # it was required only once


@pytest.mark.parametrize("seed", range(4))
def test_any_choice_of_allowed_tokens_meets_all_phrases_in_time(seed: int) -> None:
    rng = random.Random(seed)
    requests = build_random_requests(seed)
    limits = [sum(map(len, request.required_phrases)) + 1 + rng.randrange(4) for request in requests]
    constraint = RequiredPhrases(requests, end_id=END)
    for _ in range(8):
        state, texts = constraint.build_initial_state(requests), [() for _ in requests]
        for length in range(max(limits)):
            tokens = torch.tensor([[*text, 0] for text in texts])
            written = GeneratedTokens(tokens, torch.full((len(requests),), length), torch.tensor(limits))
            logits = constraint.mask_logits(torch.zeros(len(requests), V), state, written)
            free = [[i for i, score in enumerate(row) if score == 0] for row in logits.tolist()]
            over = [length >= limit or END in text for text, limit in zip(texts, limits, strict=True)]
            token = [END if done else rng.choice(allowed) for done, allowed in zip(over, free, strict=True)]
            texts = [(*text, next_token) for text, next_token in zip(texts, token, strict=True)]
            state = constraint.advance_state(state, torch.tensor(token))
        for request, text, limit in zip(requests, texts, limits, strict=True):
            assert track_plainly(request, text[:limit])[0], (request.required_phrases, text[:limit])


def test_phrases_that_do_not_fit_are_rejected() -> None:
    RequiredPhrases(
        [
            build_request((2, 3), limit=3),
            build_request((2, 3), limit=0),
            build_request(limit=1),
            build_request((2, 3), prefix=(4, 2, 3), limit=4),
        ],
        end_id=END,
    )
    with pytest.raises(
        ValueError,
        match="into max_length=3 tokens, but 3 tokens and the end token make 4",
    ):
        RequiredPhrases([build_request((2, 3), (4,), limit=3)], end_id=END)
    with pytest.raises(ValueError, match="2 tokens after a prefix of 2 and the end token make 5"):
        RequiredPhrases([build_request((2, 3), prefix=(4, 4), limit=4)], end_id=END)


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
    constraint = RequiredPhrases([request], end_id=END)
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


@pytest.mark.parametrize("token", [0, V - 1])
def test_required_token_is_chosen_however_improbable(token: int) -> None:
    """Token 0 too, which is text in some imported vocabularies."""
    constraint = RequiredPhrases([build_request((token,), limit=5)], end_id=END)
    state = constraint.build_initial_state([build_request((token,), limit=5)])
    beams = SimpleNamespace(log_probs=torch.zeros(1, 1), constraint_states=[state[None]])
    scores = torch.arange(V).float().index_fill(0, torch.tensor([token]), -9.0).log_softmax(-1).view(1, 1, V)
    context = SimpleNamespace(required_phrases=constraint, end_id=END)
    selection = select_with_required(beams, scores, torch.zeros(1, 1, 1), context)  # type: ignore[arg-type]
    assert (selection.tokens.tolist(), selection.log_probs.tolist()) == ([[token]], [[float(scores[0, 0, token])]])


# --- the property: always met, or refused ----------------------------------------------------------------------------

SPELLINGS = ["", "", "", " a", " b", " c", "d", "e", "."]  # of the tokens; `d` and `e` continue a word
CONTINUATIONS = {token for token, text in enumerate(SPELLINGS) if text.isalpha()}
SUPPRESSED = 2


def build_vocabulary() -> TargetVocabulary:
    vocabulary = TargetVocabulary(None, len(SPELLINGS), [END], torch.device("cpu"))
    vocabulary.token_bytes = [text.encode() for text in SPELLINGS]
    return vocabulary


def count_whole(tokens: Tokens, phrase: Tokens) -> int:
    """Count occurrences without overlap that no token extends to a longer word."""
    count, start = 0, 0
    while start + len(phrase) <= len(tokens):
        end = start + len(phrase)
        is_match = tokens[start:end] == phrase and not CONTINUATIONS & set(tokens[end : end + 1])
        count, start = count + is_match, end if is_match else start + 1
    return count


def decode(tokens: Tokens) -> str:
    return "".join(SPELLINGS[token] for token in tokens)


def has_banned(request: SearchRequest, tokens: Tokens) -> bool:
    """True if a banned phrase ends after the prefix."""
    start = len(decode(request.prefix_ids))
    matches = (re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", decode(tokens)) for word in request.banned_phrases)
    return any(match.end() > start for word_matches in matches for match in word_matches)


def search_all(requests: list[SearchRequest], options: SearchOptions, sharp: float) -> list[list[Hypothesis]]:
    engine = TorchEngine[Any](
        model=ToyModel(len(SPELLINGS), sharp),
        start_id=0,
        end_id=END,
        suppressed_tokens=(SUPPRESSED,),
        pad=SUPPRESSED,
        device=torch.device("cpu"),
        choose_batch_size=lambda source, target, beams: 3,
        build_constraints=partial(build_constraints, vocabulary=build_vocabulary()),
    )
    return [hypotheses for _, hypotheses in sorted(engine.search(requests, options))]


PHRASES = st.lists(st.lists(st.integers(3, 8), min_size=1, max_size=4).map(tuple), min_size=1, max_size=4)
REQUESTS = st.builds(
    lambda phrases, repeated, prefix, ends_word, room, banned, source: SearchRequest(
        source_ids=(source, END),
        required_phrases=(*phrases, *phrases[:repeated]),
        prefix_ids=prefix,
        prefix_ends_word=ends_word,
        max_length=len(prefix) + sum(map(len, phrases)) + room,
        banned_phrases=banned,
    ),
    PHRASES,
    st.integers(0, 2),
    st.lists(st.integers(3, 8), max_size=3).map(tuple),
    st.booleans(),
    st.integers(0, 6),
    st.sampled_from([(), (), ("a",), ("b d",), ("a b", "c"), ("ad",)]),
    st.integers(3, 8),
)


@settings(deadline=None, max_examples=30)
@given(st.lists(REQUESTS, min_size=1, max_size=4), st.integers(1, 4), st.sampled_from([0.1, 2.0, 30.0]))
def test_required_phrases_are_met_or_refused(requests: list[SearchRequest], beam_size: int, sharp: float) -> None:
    check_met_or_refused(requests, beam_size, sharp)


@pytest.mark.slow
@settings(deadline=None, max_examples=3000)
@given(st.lists(REQUESTS, min_size=1, max_size=4), st.integers(1, 4), st.sampled_from([0.1, 2.0, 30.0]))
def test_thousands_of_required_phrases_are_met_or_refused(
    requests: list[SearchRequest], beam_size: int, sharp: float
) -> None:
    check_met_or_refused(requests, beam_size, sharp)


@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("max_length", [5, 6, 12])
def test_a_phrase_that_starts_another_is_met_too(max_length: int, beam_size: int) -> None:
    """Like `Haus` and `Hausboot`: the second cannot be counted as the first."""
    requests = [
        build_request((3,), (3, 6), limit=max_length),
        build_request((3, 6), (6, 4), (3,), limit=max_length + 2),
    ]
    for sharp in (0.1, 2.0, 30.0):
        check_met_or_refused([replace(each, source_ids=(3, END)) for each in requests], beam_size, sharp)


def check_met_or_refused(requests: list[SearchRequest], beam_size: int, sharp: float) -> None:
    accepted, reasons = [], []
    for request in requests:
        try:
            build_constraints(SearchOptions(), [request], build_vocabulary())
            accepted.append(request)
        except ValueError as error:
            reasons.append(str(error))
    expected = "must fit into|contains the banned|shorter than max_length"
    assert all(re.search(expected, reason) for reason in reasons), reasons
    results = search_all(accepted, SearchOptions(beam_size=beam_size, n_best=beam_size), sharp)
    for request, hypotheses in zip(accepted, results, strict=True):
        assert hypotheses or request.banned_phrases, request  # a ban may leave no way
        for hypothesis in hypotheses:
            tokens = hypothesis.token_ids
            for phrase, count in Counter(request.required_phrases).items():
                assert count_whole(tokens, phrase) >= count, (request, tokens)
            assert tokens[: len(request.prefix_ids)] == request.prefix_ids
            assert len(tokens) + hypothesis.is_finished <= request.max_length
            assert not has_banned(request, tokens), (request, tokens)


@pytest.mark.parametrize("sharp", [0.1, 2.0, 30.0])
def test_a_banned_phrase_in_the_prefix_hides_no_other(sharp: float) -> None:
    """After the prefix `a c a`, which contains the banned `c`, `b` would complete `a b`."""
    requests = [
        SearchRequest(
            source_ids=(source, END),
            required_phrases=((3,),),
            prefix_ids=(3, 5, 3),
            max_length=max_length,
            banned_phrases=("a b", "c"),
        )
        for source in range(3, 9)
        for max_length in (4, 5, 9)
    ]
    check_met_or_refused(requests, 1, sharp)


# --- through Translator ----------------------------------------------------------------------------------------------

TARGET_WORDS = ["ein", "eine", "einem Park", "in", "in einem", "Hund", "Hunde", "Hundehaus", "und", "Haus", "Hausboot"]
SOURCE_WORDS = ["dog", "dogs", "a dog", "park", "in a park"]
CONSTRAINTS = st.builds(
    PhraseConstraints,
    prefix=st.sampled_from(["", "", "Ein", "Ein Hund", "Ein Haus", "Hun"]),
    prefix_is_partial=st.booleans(),
    require=st.lists(st.sampled_from(TARGET_WORDS), max_size=4).map(tuple),
    ban=st.sampled_from([(), (), (), ("haus",), ("ein hund", "und")]),
)
TERMS = st.dictionaries(st.sampled_from(SOURCE_WORDS), st.sampled_from(TARGET_WORDS), max_size=2)


@cache
def build_random_translator() -> Translator:
    torch.manual_seed(5)
    stack = StackConfig(layers=1, width=16, heads=2, ffn_width=16, dropout=0.0)
    config = Seq2SeqConfig(vocab=9, encoder=stack, decoder=mirror_encoder(stack))
    return Translator(Seq2Seq(fit_to_tokenizer(config, tokenizer())).eval(), tokenizer(), engine="torch")


def contains_word(text: str, word: str, flags: int = 0) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, flags) is not None


@settings(deadline=None, max_examples=10)
@example(PhraseConstraints(prefix="Ein", require=("Hund",), ban=("ein hund", "und")), {}, 1, 12)  # a tag in a word
@given(CONSTRAINTS, TERMS, st.integers(1, 2), st.sampled_from([6, 12, 24]))
def test_translations_have_all_required_phrases_or_are_refused(
    constraints: PhraseConstraints, terms: dict[str, str], beam_size: int, max_length: int
) -> None:
    source, glossary = "A dog runs in a park.", Glossary.from_terms(terms)
    options = SearchOptions(beam_size=beam_size, max_length=max_length)
    try:
        (translation,) = build_random_translator().translate(
            [source], options, constraints=constraints, glossary=glossary
        )
    except ValueError as error:
        reason = "must fit into|contains the banned|shorter than max_length|no translation of"
        assume(re.search(reason, str(error)) is None)  # any other error fails the test
        raise
    missed = {each.match.entry.term for each in translation.missed_terms if not each.is_elsewhere}
    for match in glossary.find_terms(source):
        has_form = any(contains_word(translation.text, form, re.IGNORECASE) for form in match.forms)
        assert has_form == (match.entry.term not in missed), (match, translation.text)
    for word in constraints.require:
        assert contains_word(translation.text, word), (word, translation.text)
    after_prefix = translation.text.removeprefix(constraints.prefix)
    assert not any(contains_word(after_prefix, word, re.IGNORECASE) for word in constraints.ban)
    assert translation.text.startswith(constraints.prefix)


def test_a_phrase_that_repeats_a_forbidden_ngram_is_refused() -> None:
    with pytest.raises(TranslationError, match=r"without repeating 1 tokens \(`no_repeat_ngram_size`\); relax them"):
        build_random_translator().translate(
            ["A dog."],
            SearchOptions(beam_size=2, no_repeat_ngram_size=1),
            constraints=PhraseConstraints(require=("Hund Hund",)),
        )


def test_a_phrase_with_unknown_characters_is_refused() -> None:
    vocabulary = build_vocabulary()
    vocabulary.tokenizer_vocabulary = SimpleNamespace(unknown=2)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="only characters of the model's vocabulary, but `a` has others"):
        build_constraints(SearchOptions(), [build_request((3, 2))], vocabulary)
