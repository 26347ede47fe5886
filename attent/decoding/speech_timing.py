"""When speech occurs in a recording: segments that a model can transcribe, and the times of words.

Long recordings are cut at silences where there are any, else with overlap. Voice activity is found by energy: a frame
of 10 ms is speech if its level is well above that of the quietest tenth. Recordings are read in blocks, so memory is
bounded whatever their length.

Words are timed by the most likely CTC path, else by dynamic time warping over cross-attention, as in Whisper. Some
heads attend to the sound of the token that they output. Their weights, one row for each token, are normalized over
tokens and smoothed; the monotonic path with the greatest sum through them gives the first encoder state of each token.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attent.data.arrays import Array
from attent.decoding.alignment import WORD_START_MARKERS, find_cross_layers, map_tokens_to_words, record_weights
from attent.decoding.loading import pad_token_ids
from attent.decoding.options import Hypothesis
from attent.models import Seq2Seq
from attent.nn import Memory
from attent.nn.eval_mode import eval_mode
from attent.nn.frontends import HOP_SAMPLES, SAMPLE_RATE
from attent.text.scripts import UNSPACED_SCRIPTS, compile_letter_pattern
from attent.text.vocabulary import Vocabulary

SILENCE_LEVEL = -70.0  # dB of full scale; nothing quieter is speech
MAX_LEVEL_RANGE = 50.0  # dB from the quietest tenth to the loudest frames; digital silence would make it larger
MIN_SPEECH_MARGIN, SPEECH_FRACTION = 6.0, 0.3  # of speech above the quietest tenth: in dB, and as a share of the range
MIN_EDGE_MARGIN, EDGE_FRACTION = 3.0, 0.1  # of the frames before and after speech that belong to it
MIN_SPEECH_FRAMES = 6  # shorter sounds are clicks
MIN_SILENCE_FRAMES = 20  # shorter pauses may be within a word: 0.2 s
PAUSE_FRAMES = 100  # a pause of 1 s always ends a segment
MARGIN_FRAMES = 20  # of silence before and after a segment
MAX_OVERLAP_FRAMES, OVERLAP_FRACTION = 200, 0.25  # of segments that no silence separates, and as a share of one
BUFFER_SEGMENTS = 4  # longest segments in memory

Span = tuple[int, int]  # start and stop


@dataclass(frozen=True, kw_only=True, eq=False)
class AudioSegment:
    samples: Array
    start: float  # in seconds
    overlap: float = 0.0  # seconds that it shares with the segment before
    language: str | None = None  # that Whisper is given

    @property
    def seconds(self) -> float:
        return len(self.samples) / SAMPLE_RATE


def iter_segments(blocks: Iterable[Array], max_seconds: float) -> Iterator[AudioSegment]:
    """Yield the segments of a recording, given in blocks; a short one, unless it is silent, is one segment."""
    max_frames = count_max_frames(max_seconds)
    buffer, position, previous_stop = np.zeros(0, np.float32), 0, 0

    def cut(start: int, stop: int) -> AudioSegment:
        nonlocal previous_stop
        overlap, previous_stop = previous_stop - position - start, position + stop
        return AudioSegment(
            samples=buffer[start:stop], start=(position + start) / SAMPLE_RATE, overlap=max(0, overlap) / SAMPLE_RATE
        )

    for block in blocks:
        buffer = np.concatenate([buffer, block])
        if len(buffer) >= BUFFER_SEGMENTS * max_frames * HOP_SAMPLES:
            spans = find_segments(buffer, max_frames)
            if spans and len(buffer) - spans[-1][1] < PAUSE_FRAMES * HOP_SAMPLES:  # its last words may be cut
                rest = spans.pop()[0]
            else:
                rest = len(buffer) - MARGIN_FRAMES * HOP_SAMPLES
            yield from (cut(*span) for span in spans)
            buffer, position = buffer[rest:], position + rest
    if position == 0 and len(buffer) <= max_frames * HOP_SAMPLES:
        spans = [(0, len(buffer))] if measure_levels(buffer).max(initial=-np.inf) > SILENCE_LEVEL else []
    else:
        spans = find_segments(buffer, max_frames)
    yield from (cut(*span) for span in spans)


def cut_finished(samples: Array, max_seconds: float) -> tuple[list[Array], Array]:
    """Return the finished segments of a growing recording, up to a pause or the quietest place, and the rest."""
    max_frames, finished = count_max_frames(max_seconds), []
    while spans := find_segments(samples, max_frames):
        stop = spans[0][1]
        if len(spans) == 1 and len(samples) - stop < PAUSE_FRAMES * HOP_SAMPLES:
            break
        if len(spans) > 1 and spans[1][0] < stop:
            last, overlap = stop // HOP_SAMPLES, count_overlap_frames(max_frames)
            stop = (last - overlap + int(measure_levels(samples)[last - overlap : last].argmin())) * HOP_SAMPLES
        finished.append(samples[:stop])
        samples = samples[stop:]
    return finished, samples


def count_max_frames(max_seconds: float) -> int:
    return max(4 * MARGIN_FRAMES, int(max_seconds * SAMPLE_RATE) // HOP_SAMPLES)


def count_overlap_frames(max_frames: int) -> int:
    return min(MAX_OVERLAP_FRAMES, int(OVERLAP_FRACTION * max_frames))


def find_segments(samples: Array, max_frames: int) -> list[Span]:
    """Return the samples of each segment. Segments overlap only where speech without a pause is too long for one."""
    runs: list[Span] = []
    for start, stop in find_runs(find_speech(samples)):
        first = runs.pop()[0] if runs and start - runs[-1][1] < MIN_SILENCE_FRAMES else start
        runs.append((first, stop))
    longest = max_frames - 2 * MARGIN_FRAMES
    spans: list[Span] = []
    while runs:
        count = count_runs_of_segment(runs, longest)
        start, stop = runs[0][0], runs[count - 1][1]
        while stop - start > longest:
            spans.append((start, start + longest))
            start += longest - count_overlap_frames(max_frames)
        spans.append((start, stop))
        runs = runs[count:]
    if not spans:
        return []
    # Margins end in the middle of a silence.
    gaps = [b - a for (_, a), (b, _) in pairwise([(0, 0), *spans, (len(samples) // HOP_SAMPLES,) * 2])]
    gaps = [2 * gaps[0], *gaps[1:-1], 2 * gaps[-1]]
    margins = [MARGIN_FRAMES if gap < 0 else min(MARGIN_FRAMES, gap // 2) for gap in gaps]
    return [
        ((start - before) * HOP_SAMPLES, (stop + after) * HOP_SAMPLES)
        for (start, stop), (before, after) in zip(spans, pairwise(margins), strict=True)
    ]


def count_runs_of_segment(runs: list[Span], longest: int) -> int:
    """Return the runs of the first segment: up to a pause, or to the longest silence of the second half."""
    count = 1
    while count < len(runs) and runs[count][0] - runs[count - 1][1] < PAUSE_FRAMES:
        if runs[count][1] - runs[0][0] > longest:
            is_late = [runs[i - 1][1] - runs[0][0] >= longest // 2 for i in range(1, count + 1)]
            gaps = [runs[i][0] - runs[i - 1][1] for i in range(1, count + 1)]
            return 1 + max(range(count), key=lambda i: (is_late[i], gaps[i]))
        count += 1
    return count


def find_speech(samples: Array) -> NDArray[np.bool_]:
    """Return for each frame of 10 ms whether it is speech, by its level."""
    levels = measure_levels(samples)
    if not len(levels):
        return np.zeros(0, bool)
    quiet, loud = np.percentile(levels, (10, 99))
    quiet = max(quiet, loud - MAX_LEVEL_RANGE)
    threshold = quiet + max(MIN_SPEECH_MARGIN, SPEECH_FRACTION * (loud - quiet))
    is_speech = levels > max(threshold, SILENCE_LEVEL)
    for start, stop in find_runs(is_speech):
        is_speech[start:stop] = stop - start >= MIN_SPEECH_FRAMES
    threshold = quiet + max(MIN_EDGE_MARGIN, EDGE_FRACTION * (loud - quiet))  # of quiet sounds next to speech
    for start, stop in find_runs(is_speech | (levels > max(threshold, SILENCE_LEVEL))):
        is_speech[start:stop] = is_speech[start:stop].any()
    return is_speech


def measure_levels(samples: Array) -> NDArray[np.float64]:
    """Return the level of each frame of 10 ms with its neighbors, in dB of full scale, without its constant offset."""
    frames = samples[: len(samples) // HOP_SAMPLES * HOP_SAMPLES].reshape(-1, HOP_SAMPLES)
    power = frames.astype(np.float64).var(1)
    padded = np.pad(power, 1, mode="edge") if len(power) else np.zeros(2)
    return 10 * np.log10(np.maximum(np.convolve(padded, np.full(3, 1 / 3), mode="valid")[: len(power)], 1e-12))


def find_runs(mask: NDArray[np.bool_]) -> list[Span]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


# --- times of words ------------------------------------------------------------------------------------------------


Floats = NDArray[np.float64]

FRAME_SECONDS = HOP_SAMPLES / SAMPLE_RATE
STATE_FRAMES = 2  # frames of an encoder state
STATE_SECONDS = STATE_FRAMES * FRAME_SECONDS
MEDIAN_WIDTH = 7  # states over which weights are smoothed
MAX_HEADS = 6  # that align best and are averaged,
MIN_HEAD_QUALITY = 0.7  # if they are this good, compared with the best
MIN_WORD_GAP_FRAMES = 5  # of silence between words
MAX_SHIFT = 0.15  # seconds from a boundary to the silence that it is moved to
MAX_WEIGHTS = 2**26  # attention weights at once: 256 MiB

UNSPACED = compile_letter_pattern(UNSPACED_SCRIPTS).pattern
WORD = re.compile(rf"{UNSPACED}[^\w\s]*|(?:(?!{UNSPACED})\S)+")  # or a character with the marks after it
NO_SPACE = re.compile(rf"\0(?={UNSPACED})|(?<={UNSPACED})\0|(?<={UNSPACED}[^\w\s])\0")

Head = tuple[int, int]  # (layer, head), each from 0


@dataclass(frozen=True, kw_only=True)
class SpokenWord:
    text: str
    start: float
    end: float


def compute_word_times(
    model: Seq2Seq,
    vocabulary: Vocabulary,
    source: Tensor,
    lengths: Tensor | None,
    num_frames: Sequence[int],
    hypotheses: Sequence[Hypothesis],
    *,
    prefix_ids: Sequence[int] = (),
    heads: Sequence[Head] | None = None,
) -> list[list[SpokenWord]]:
    """Return the words of each hypothesis of a batch; those of empty texts are empty.

    source      the batch that was searched, with its lengths
    num_frames  frames of each recording without padding
    prefix_ids  tokens that the decoder reads before the text
    heads       whose attention aligns; None: chosen for each recording by how well they do
    """
    words: list[list[SpokenWord]] = [[] for _ in hypotheses]
    states = -(-source.shape[1] // STATE_FRAMES)
    num_heads = sum(layer.heads for layer in find_cross_layers(model))
    size = max(1, MAX_WEIGHTS // (num_heads * states * max(len(x.token_ids) + 2 for x in hypotheses)))
    indices = [i for i, hypothesis in enumerate(hypotheses) if hypothesis.text]
    for batch in (indices[at : at + size] for at in range(0, len(indices), size)):
        rows = torch.tensor(batch, device=source.device)
        token_ids = [hypotheses[i].token_ids for i in batch]
        num_states = [max(1, -(-num_frames[i] // STATE_FRAMES)) for i in batch]
        with eval_mode(model), torch.no_grad():
            memory = model.encode(source[rows], None if lengths is None else lengths[rows])
            if model.ctc_output is not None:
                log_probs = model.ctc_output(memory.states).double().log_softmax(-1).cpu().numpy()
                blank_id, inputs = model.config.start_id, zip(log_probs, num_states, token_ids, strict=True)
                spans = [align_ctc(row[:count], ids, blank_id) for row, count, ids in inputs]
            else:
                spans = align_by_attention(model, memory, token_ids, num_states, prefix_ids, heads)
        for index, token_spans in zip(batch, spans, strict=True):
            words[index] = group_words(vocabulary, hypotheses[index], token_spans)
    return words


def align_by_attention(
    model: Seq2Seq,
    memory: Memory,
    token_ids: Sequence[Sequence[int]],
    num_states: Sequence[int],
    prefix_ids: Sequence[int],
    heads: Sequence[Head] | None,
) -> list[Floats]:
    """Decode the tokens of a batch again, and return the start and the end of each in seconds, (U, 2)."""
    targets = [[model.config.start_id, *prefix_ids, *ids] for ids in token_ids]
    target, target_lengths = pad_token_ids(targets, memory.states.device)
    with record_weights(find_cross_layers(model)) as records:
        model.decode(target, memory, target_lengths)
    spans = []
    for row, count in enumerate(num_states):
        positions = slice(len(prefix_ids), len(targets[row]))
        layer_weights = [x[row, :, positions, :count].double().cpu().numpy() for (x,) in records]
        starts = find_token_starts(layer_weights, heads)
        spans.append(np.stack([starts[:-2], starts[1:-1]], -1))  # without the end token
    return spans


def align_ctc(log_probs: Floats, token_ids: Sequence[int], blank_id: int) -> Floats:
    """Return the start and the end of each token in seconds, (U, 2), on the most likely path of states that outputs
    the tokens (Graves et al. 2006), given the log-probabilities (T, V) of each state.

    The labels are the tokens with blanks around them; each state keeps the label of the state before, takes the next
    label, or skips a blank between different tokens. If there are too few states for that, tokens share them evenly.
    """
    labels = np.full(2 * len(token_ids) + 1, blank_id)
    labels[1::2] = token_ids
    can_skip = np.zeros(len(labels), bool)
    can_skip[3::2] = labels[3::2] != labels[1:-2:2]
    scores = np.where(np.arange(len(labels)) < 2, log_probs[0, labels], -np.inf)
    steps = np.zeros((len(log_probs), len(labels)), np.int64)  # labels passed on the way to each state
    for state in range(1, len(log_probs)):
        previous, skipping = (np.concatenate([np.full(n, -np.inf), scores[:-n]]) for n in (1, 2))
        choices = np.stack([scores, previous, np.where(can_skip, skipping, -np.inf)])
        steps[state] = choices.argmax(0)
        scores = choices.max(0) + log_probs[state, labels]
    label = len(labels) - 1 - int(scores[-2] > scores[-1])
    if np.isinf(scores[label]):
        edges = np.linspace(0, len(log_probs), len(token_ids) + 1).astype(np.float64) * STATE_SECONDS
        return np.stack([edges[:-1], edges[1:]], -1)
    path = np.zeros(len(log_probs), np.int64)
    for state in range(len(log_probs) - 1, -1, -1):
        path[state] = label
        label -= steps[state, label]
    tokens = np.arange(1, len(labels), 2)
    states = np.stack([np.searchsorted(path, tokens), np.searchsorted(path, tokens, "right")], -1)
    return states.astype(np.float64) * STATE_SECONDS


def find_token_starts(layer_weights: Sequence[Floats], heads: Sequence[Head] | None = None) -> Floats:
    """Return the start of each token in seconds, (U + 1,), from the weights (H, U, T) of each layer, and the end."""
    weights = np.concatenate(layer_weights)
    if heads is not None:
        offsets = np.cumsum([0, *(len(x) for x in layer_weights)])
        weights = weights[[offsets[layer] + head for layer, head in heads]]
    weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-9)  # Whisper's are of 30 seconds
    prepared = smooth(normalize_over_tokens(weights))
    if heads is None:
        prepared = prepared[select_heads(weights, prepared)]
    return align_monotonic(-prepared.mean(0)).astype(np.float64) * STATE_SECONDS


def normalize_over_tokens(weights: Floats) -> Floats:
    """(H, U, T) with mean 0 and standard deviation 1 over tokens: a state that all tokens attend to says nothing."""
    mean, std = weights.mean(1, keepdims=True), weights.std(1, keepdims=True)
    return (weights - mean) / np.maximum(std, 1e-9)


def smooth(weights: Floats) -> Floats:
    reach = MEDIAN_WIDTH // 2
    if weights.shape[-1] <= reach:
        return weights
    padded = np.pad(weights, ((0, 0), (0, 0), (reach, reach)), mode="reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, MEDIAN_WIDTH, axis=-1), axis=-1)


def select_heads(weights: Floats, prepared: Floats) -> Floats:
    """Return the heads that align best: by the share of their attention along their own monotonic path.

    An even head, or one that attends to the same state for every token, has a share of about 1 / U.
    """
    starts = align_monotonic(-prepared)
    states = np.arange(weights.shape[-1])
    is_on_path = (states >= starts[:, :-1, None]) & (states <= starts[:, 1:, None])
    quality = (weights * is_on_path).sum(-1).mean(-1)
    best = np.argsort(-quality, kind="stable")[:MAX_HEADS]
    return best[quality[best] >= MIN_HEAD_QUALITY * quality[best[0]]]


def align_monotonic(costs: Floats) -> NDArray[np.int64]:
    """Return the first state of each token, and the number of states, (..., U + 1), on the path of least cost through
    (..., U, T) from the first state of the first token to the last state of the last one.

    Each step of the path goes to the next state, to the next token, or to both. The costs of staying with a token are
    differences of a cumulative sum, so that one pass over the tokens is enough: O(T * U) without a loop over states.
    """
    *batch, U, T = costs.shape
    costs = costs.reshape(-1, U, T)
    N, states = len(costs), np.arange(T)
    before = np.full((N, T), np.inf)  # the least cost of a path to each state of the previous token
    run_starts = np.zeros((N, U, T), dtype=np.int64)  # the first state of the token on the best path to each state
    is_diagonal = np.zeros((N, U, T), dtype=bool)  # that state comes after the last one of the previous token
    for token in range(U):
        sums = np.cumsum(costs[:, token], axis=1)
        diagonal = np.concatenate([np.full((N, 1), np.inf), before[:, :-1]], 1)
        entry = np.minimum(diagonal, before) if token else np.where(states == 0, 0.0, np.full((N, T), np.inf))
        entry = entry - (sums - costs[:, token])
        least = np.minimum.accumulate(entry, axis=1)
        run_starts[:, token] = np.maximum.accumulate(np.where(entry == least, states, 0), axis=1)
        is_diagonal[:, token] = diagonal <= before
        before = sums + least
    starts, rows, state = np.full((N, U + 1), T), np.arange(N), np.full(N, T - 1)
    for token in range(U - 1, -1, -1):
        state = starts[:, token] = run_starts[rows, token, state]
        state = np.maximum(state - is_diagonal[rows, token, state], 0)
    return starts.reshape(*batch, U + 1)


def join_words(words: Iterable[str]) -> str:
    return NO_SPACE.sub("", "\0".join(words)).replace("\0", " ")


def group_words(vocabulary: Vocabulary, hypothesis: Hypothesis, token_spans: Floats) -> list[SpokenWord]:
    ids, texts, words = hypothesis.token_ids, hypothesis.text.split(), WORD.findall(hypothesis.text)
    if words != texts:  # characters have the times of their tokens, or between these
        ends = np.maximum.accumulate([len(vocabulary.decode(ids[:i]).lstrip()) for i in range(len(ids) + 1)])
        edges = np.append(token_spans[:, 0], token_spans[-1, 1])
        times = [np.interp(x.span(), ends, edges).tolist() for x in WORD.finditer(hypothesis.text)]
        return [SpokenWord(text=text, start=start, end=end) for text, (start, end) in zip(words, times, strict=True)]
    word_ids, pieces = map_tokens_to_words(vocabulary, ids, texts), vocabulary.to_pieces(ids)
    spans: dict[int, tuple[float, float]] = {}
    for token, (word, piece) in enumerate(zip(word_ids, pieces, strict=True)):
        if word is not None and piece not in WORD_START_MARKERS:  # a space alone is no part of the word
            start, _ = spans.get(word, token_spans[token])
            spans[word] = (start, token_spans[token][1])
    return [SpokenWord(text=texts[i], start=float(start), end=float(end)) for i, (start, end) in sorted(spans.items())]


def snap_to_silence(words: Sequence[SpokenWord], is_speech: NDArray[np.bool_]) -> list[SpokenWord]:
    """Move boundaries between words to the longest or nearest silence (frames of 10 ms), else to the middle."""
    starts, ends = [word.start for word in words], [word.end for word in words]
    total = len(is_speech)
    frames = [(i, k) for i, k in find_runs(~is_speech) if k - i >= MIN_WORD_GAP_FRAMES or i == 0 or k == total]
    silences = [(start * FRAME_SECONDS, stop * FRAME_SECONDS) for start, stop in frames]
    for i in range(len(words) + 1 if words else 0):
        is_first, is_last = i == 0, i == len(words)
        gap = (0.0 if is_first else ends[i - 1], total * FRAME_SECONDS if is_last else starts[i])
        lowest, highest = -1.0 if is_first else starts[i - 1], np.inf if is_last else ends[i]
        overlaps = [
            (min(stop, gap[1]) - max(start, gap[0]), start, stop)
            for start, stop in silences
            if lowest < start and stop < highest
        ]
        overlap, start, stop = max(overlaps, default=(-np.inf, 0.0, 0.0))
        if overlap < (0 if is_first else -MAX_SHIFT):
            if is_first or is_last:
                continue
            start = stop = sum(gap) / 2
        if not is_first:
            ends[i - 1] = start
        if not is_last:
            starts[i] = stop
    return [replace(word, start=start, end=end) for word, start, end in zip(words, starts, ends, strict=True)]
