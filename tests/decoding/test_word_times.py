"""Word times: the warping path equals a plain one, and synthetic attention gives known boundaries."""

from __future__ import annotations

import itertools
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from attent.decoding.alignment import find_cross_layers
from attent.decoding.options import Hypothesis
from attent.decoding.source_search import add_text
from attent.decoding.speech_timing import (
    STATE_SECONDS,
    SpokenWord,
    align_ctc,
    align_monotonic,
    compute_word_times,
    find_token_starts,
    group_words,
    join_words,
    normalize_over_tokens,
    select_heads,
    smooth,
    snap_to_silence,
)
from attent.nn import AudioConfig
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerConfig, train_monolingual_tokenizer
from tests.decoding.test_source_search import make_model

Array = NDArray[np.float64]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_monolingual_tokenizer(["zero one two three four five six"] * 3, TokenizerConfig(kind="char"))


def warp_plainly(costs: Array) -> list[int]:
    """Dynamic time warping by its definition: the first state of each token."""
    U, T = costs.shape
    least = np.full((U + 1, T + 1), np.inf)
    least[0, 0] = 0
    for u in range(U):
        for t in range(T):
            least[u + 1, t + 1] = costs[u, t] + min(least[u, t], least[u + 1, t], least[u, t + 1])
    u, t, starts = U - 1, T - 1, [0] * U
    while u > 0 or t > 0:
        starts[u] = t
        steps = {(u - 1, t - 1): least[u, t], (u, t - 1): least[u + 1, t], (u - 1, t): least[u, t + 1]}
        u, t = min(steps, key=lambda step: steps[step])
    return [0, *starts[1:]]


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (5, 1), (4, 9), (9, 4), (7, 7)])
def test_the_path_equals_a_plain_one(shape: tuple[int, int]) -> None:
    costs = np.random.default_rng(shape[0]).normal(size=(5, *shape))
    starts = align_monotonic(costs)
    for row, each in zip(costs, starts, strict=True):
        assert [*warp_plainly(row), shape[1]] == each.tolist()
    assert align_monotonic(costs[0]).tolist() == starts[0].tolist()


def make_attention(boundaries: list[int], spread: float = 2.0) -> Array:
    """Weights (U, T) of a head that attends to the middle of each token's states, with noise."""
    spans = pairwise(boundaries)
    rng, states = np.random.default_rng(1), np.arange(boundaries[-1])
    widths = [(0.5 * (start + stop - 1), max(1.0, (stop - start) / spread)) for start, stop in spans]
    rows = np.stack([np.exp(-(((states - middle) / width) ** 2)) for middle, width in widths])
    rows += rng.uniform(0, 0.02, rows.shape)
    return rows / rows.sum(1, keepdims=True)


def test_synthetic_attention_gives_its_boundaries() -> None:
    boundaries = [0, 14, 30, 41, 66, 90]
    aligning = make_attention(boundaries)
    rng, shape = np.random.default_rng(0), aligning.shape
    even, noise = np.full(shape, 1 / shape[1]), rng.dirichlet(np.ones(shape[1]), shape[0])
    backward, first = aligning[::-1], np.eye(1, shape[1]).repeat(shape[0], 0)
    layers = [np.stack([even, noise]), np.stack([backward, aligning, first])]
    for heads in (None, [(1, 1)]):
        starts = find_token_starts(layers, heads)
        np.testing.assert_allclose(starts, 0.02 * np.array(boundaries), atol=0.04)
    weights = np.concatenate(layers)
    assert select_heads(weights, smooth(normalize_over_tokens(weights))).tolist() == [3]


@pytest.mark.parametrize("token_ids", [(1,), (1, 2), (1, 1), (2, 2, 1)])
def test_tokens_are_where_the_most_likely_ctc_path_outputs_them(token_ids: tuple[int, ...]) -> None:
    log_probs = np.log(np.random.default_rng(len(token_ids)).dirichlet(np.ones(3), 6))
    paths = [
        p for p in itertools.product(range(3), repeat=6) if [k for k, _ in itertools.groupby(p) if k] == [*token_ids]
    ]
    best = max(paths, key=lambda path: log_probs[np.arange(6), path].sum())
    runs, state = [], 0
    for token, group in itertools.groupby(best):
        length = len(list(group))
        runs += [(state, state + length)] if token else []
        state += length
    np.testing.assert_allclose(align_ctc(log_probs, token_ids, 0) / STATE_SECONDS, runs)


def test_more_tokens_than_states_share_them_evenly() -> None:
    spans = align_ctc(np.log(np.full((2, 3), 1 / 3)), [1, 2, 1, 2], 0) / STATE_SECONDS
    np.testing.assert_allclose(spans, [[0, 0.5], [0.5, 1], [1, 1.5], [1.5, 2]])


def test_words_are_groups_of_tokens_without_the_spaces(tokenizer: Tokenizer) -> None:
    ids = tuple(tokenizer.target.encode(["six one"])[0])
    pieces = tokenizer.target.to_pieces(ids)
    edges = np.arange(len(ids) + 1) / 10
    hypothesis = add_text(Hypothesis(token_ids=ids, log_prob=0, score=0, is_finished=True), tokenizer)
    words = group_words(tokenizer.target, hypothesis, np.stack([edges[:-1], edges[1:]], -1))
    assert [word.text for word in words] == ["six", "one"]
    first, space = pieces.index("s"), pieces.index("▁", 1)
    assert [(word.start, word.end) for word in words] == [
        pytest.approx((first / 10, space / 10)),
        pytest.approx(((space + 1) / 10, len(ids) / 10)),
    ]


def test_characters_of_a_script_without_spaces_are_words() -> None:
    text = "你好。 abc 中文 ที่"
    unspaced = train_monolingual_tokenizer([text] * 3, TokenizerConfig(kind="char"))
    ids = tuple(unspaced.target.encode([text])[0])
    hypothesis = add_text(Hypothesis(token_ids=ids, log_prob=0, score=0, is_finished=True), unspaced)
    starts = np.arange(len(ids)) / 10
    words = group_words(unspaced.target, hypothesis, np.stack([starts, starts + 0.1], -1))
    assert [word.text for word in words] == ["你", "好。", "abc", "中", "文", "ที่"]
    times = [time for word in words for time in (word.start, word.end)]
    assert times == sorted(times)
    first = unspaced.target.to_pieces(ids).index("你")
    assert (words[0].start, words[0].end) == pytest.approx((first / 10, (first + 1) / 10))
    assert words[1].end == pytest.approx((first + 3) / 10)
    assert words[-1].end == pytest.approx(len(ids) / 10)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["one", "two."], "one two."),
        (["你", "好。", "我", "有", "iPhone", "手", "机"], "你好。我有iPhone手机"),
        (["今天 天气好。", "我们 去"], "今天 天气好。我们 去"),  # texts keep their spaces
        ([], ""),
    ],
)
def test_words_are_joined_as_their_script_is_written(words: list[str], expected: str) -> None:
    assert join_words(words) == expected


def test_boundaries_move_to_silences_near_them() -> None:
    is_speech = np.ones(300, bool)
    for start, stop in ((0, 30), (95, 105), (140, 143), (203, 240), (290, 300)):
        is_speech[start:stop] = False
    times = [("a", 0.1, 1.02), ("b", 1.02, 1.45), ("c", 1.45, 1.9), ("d", 1.9, 2.8)]
    words = [SpokenWord(text=text, start=start, end=end) for text, start, end in times]
    snapped = snap_to_silence(words, is_speech)
    assert [word.text for word in snapped] == ["a", "b", "c", "d"]
    expected = [(0.3, 0.95), (1.05, 1.45), (1.45, 2.03), (2.4, 2.9)]  # 30 ms of silence are within a word
    np.testing.assert_allclose([(word.start, word.end) for word in snapped], expected)
    assert snap_to_silence([], is_speech) == []
    assert snap_to_silence(words, np.ones(300, bool)) == words
    (word,) = snap_to_silence([SpokenWord(text="a", start=0.0, end=0.2)], np.arange(40) // 10 % 2 == 0)
    assert word.start < word.end  # a silence within a word is not both its start and its end
    peaks = [SpokenWord(text="a", start=0.5, end=0.6), SpokenWord(text="b", start=2.6, end=2.7)]
    times = [(word.start, word.end) for word in snap_to_silence(peaks, is_speech)]
    np.testing.assert_allclose(times, [(0.3, 2.03), (2.4, 2.9)])  # the longest of three silences
    times = [(word.start, word.end) for word in snap_to_silence(peaks, np.ones(300, bool))]
    np.testing.assert_allclose(times, [(0.5, 1.6), (1.6, 2.7)])


@pytest.mark.parametrize(("fixed", "ctc"), [(False, False), (True, False), (False, True)])
def test_words_of_a_batch_have_times_within_their_recordings(tokenizer: Tokenizer, fixed: bool, ctc: bool) -> None:
    """The same alone as in the batch, and without the padding of a fixed length."""
    model = make_model(tokenizer, AudioConfig(mel_bins=8), end_bias=-30, ctc=ctc)
    source, num_frames = torch.randn(3, 60, 8, generator=torch.Generator().manual_seed(0)), [60, 41, 24]
    lengths = None if fixed else torch.tensor(num_frames)
    ids = [tuple(tokenizer.target.encode([text])[0]) for text in ("six one", "two", "")]
    hypotheses = [add_text(Hypothesis(token_ids=row, log_prob=0, score=0, is_finished=True), tokenizer) for row in ids]
    prefix = ids[1]
    batch = compute_word_times(model, tokenizer.target, source, lengths, num_frames, hypotheses, prefix_ids=prefix)
    assert [[word.text for word in words] for words in batch] == [["six", "one"], ["two"], []]
    for i, words in enumerate(batch):
        times = [time for word in words for time in (word.start, word.end)]
        assert times == sorted(times)
        assert all(0 <= time <= num_frames[i] / 100 + 0.01 for time in times)
        alone = compute_word_times(
            model,
            tokenizer.target,
            source[i : i + 1] if fixed else source[i : i + 1, : num_frames[i]],
            None if lengths is None else lengths[i : i + 1],
            num_frames[i : i + 1],
            hypotheses[i : i + 1],
            prefix_ids=prefix,
        )
        assert alone == [words]
    assert not any(layer.observers for layer in find_cross_layers(model))
