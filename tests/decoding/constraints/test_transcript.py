"""Whisper's rules for transcripts ban the same tokens as the logits processors of `transformers`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attent.decoding.constraints import TargetVocabulary, build_constraints
from attent.decoding.constraints.base import apply_constraints
from attent.decoding.constraints.transcript import TranscriptConstraint
from attent.decoding.options import SearchOptions, SearchRequest, TranscriptRules
from attent.decoding.search import BeamState, SearchContext, advance_beams

transformers = pytest.importorskip("transformers")

VOCAB, END, NO_TIMESTAMPS = 60, 20, 25  # text, end, prompt tokens, <|notimestamps|>, 34 timestamps
ROWS, STEPS = 50, 12
PROMPT = [21, 22, 24]


def make_processors(begin: int, rules: TranscriptRules) -> list[object]:
    config = transformers.GenerationConfig(
        eos_token_id=END,
        no_timestamps_token_id=NO_TIMESTAMPS,
        max_initial_timestamp_index=rules.max_initial_timestamp,
    )
    processors = [transformers.SuppressTokensAtBeginLogitsProcessor(list(rules.banned_first), begin)]
    if rules.first_timestamp is not None:
        processors.append(transformers.WhisperTimeStampLogitsProcessor(config, begin))
    return processors


def make_context(rules: TranscriptRules, requests: list[SearchRequest], beam_size: int = 1) -> SearchContext:
    options = SearchOptions(beam_size=beam_size, transcript_rules=rules)
    vocabulary = TargetVocabulary(None, VOCAB, [END], torch.device("cpu"))
    constraints, _ = build_constraints(options, requests, vocabulary)
    return SearchContext(
        options=options, start_id=21, end_id=END, suppressed_tokens=torch.tensor([21]), constraints=constraints
    )


@pytest.mark.parametrize("max_initial", [0, 3, None])
@pytest.mark.parametrize("timestamps", [True, False])
@pytest.mark.parametrize("spread", [0.5, 5.0])  # with 0.5, the sum of the timestamps is what counts
def test_banned_tokens_are_those_of_transformers(max_initial: int | None, timestamps: bool, spread: float) -> None:
    first = NO_TIMESTAMPS + 1 if timestamps else None
    rules = TranscriptRules(banned_first=(3, END), first_timestamp=first, max_initial_timestamp=max_initial)
    requests = [SearchRequest(source_ids=(), max_length=STEPS + 1)] * ROWS
    context = make_context(rules, requests)
    beams = BeamState.from_requests(requests, STEPS + 1, context)
    generator = torch.Generator().manual_seed(1)
    processors = make_processors(len(PROMPT), rules)
    num_timestamps = 0
    for step in range(STEPS):
        logits = torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64) * spread
        logits[:, END] -= spread * 4  # so that most rows go on,
        logits[:, NO_TIMESTAMPS + 1 :] -= spread * torch.arange(VOCAB - NO_TIMESTAMPS - 1) / 8  # in small steps of time
        sequences = torch.cat([torch.tensor([PROMPT] * ROWS), beams.tokens[:, 0, :step]], 1)
        expected = logits.clone()
        for processor in processors:
            expected = processor(sequences, expected)
        states = [state.flatten(0, 1) for state in beams.constraint_states]
        got = apply_constraints(context.constraints, logits.clone(), states, beams.flatten_beams(), END)
        active = ~beams.done
        assert torch.equal(got[active], expected[active])
        num_timestamps += int((got.argmax(1) > NO_TIMESTAMPS)[active].sum())
        beams, _ = advance_beams(beams, logits[:, None], context)
    assert int((~beams.done).sum()) > ROWS / 4
    assert not timestamps or num_timestamps > 1.5 * ROWS


def collect_logits(constraint: TranscriptConstraint, request: SearchRequest, tokens: list[int]) -> Tensor:
    """Return the logits, all 0 if not banned, after `tokens`."""
    state = constraint.build_initial_state([request])
    for token in tokens:
        state = constraint.advance_state(state, torch.tensor([token]))
    logits = torch.zeros(1, VOCAB)
    logits[:, NO_TIMESTAMPS + 1 :] = -10  # the timestamps together are less probable than one other token
    return constraint.mask_logits(logits, state, generated=None)[0]  # type: ignore[arg-type]


def list_allowed(tokens: list[int], prefix: tuple[int, ...] = ()) -> list[int]:
    rules = TranscriptRules(banned_first=(3, END), first_timestamp=26, max_initial_timestamp=2)
    constraint = TranscriptConstraint(rules, VOCAB, END)
    logits = collect_logits(constraint, SearchRequest(source_ids=(), prefix_ids=prefix), [*prefix, *tokens])
    return (logits > -torch.inf).nonzero()[:, 0].tolist()


def test_segments_are_enclosed_in_timestamps() -> None:
    text, rest = list(range(NO_TIMESTAMPS)), range(26, VOCAB)
    assert list_allowed([]) == [26, 27, 28]
    assert list_allowed([27]) == text  # no second timestamp, and no end of the segment yet
    assert list_allowed([27, 5]) == text + [i for i in rest if i > 27]  # the segment is not empty
    assert list_allowed([27, 5, 30]) == [*range(END, NO_TIMESTAMPS), *range(30, VOCAB)]  # the end or a segment
    assert list_allowed([27, 5, 30, 30]) == text
    assert list_allowed([27, 5, 30, 30, 6]) == text + [i for i in rest if i > 30]


def test_the_rules_begin_after_a_prefix() -> None:
    assert list_allowed([], prefix=(22, 24)) == [26, 27, 28]
    for tokens in ([27], [27, 5], [27, 5, 30]):
        assert list_allowed(tokens, prefix=(22, 24)) == list_allowed(tokens)
    constraint = TranscriptConstraint(TranscriptRules(first_timestamp=26), VOCAB, END)
    inside = collect_logits(constraint, SearchRequest(source_ids=(), prefix_ids=(22, 24)), [22])
    assert bool((inside > -torch.inf).all())


def test_beams_keep_their_own_timestamps() -> None:
    """Two beams that swap take the state of their parent."""
    rules = TranscriptRules(first_timestamp=26)
    requests = [SearchRequest(source_ids=(), max_length=6)]
    context = make_context(rules, requests, beam_size=2)
    beams = BeamState.from_requests(requests, 6, context)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        beams, _ = advance_beams(beams, torch.randn(1, 2, VOCAB, generator=generator) * 3, context)
    for tokens, state in zip(beams.tokens[0].tolist(), beams.constraint_states[0][0].tolist(), strict=True):
        timestamps = [token for token in tokens[:5] if token >= 26]
        assert state == [5, int(tokens[4] >= 26), int(tokens[3] >= 26), timestamps[-1]]
        assert timestamps == sorted(timestamps)
