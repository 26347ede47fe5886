"""Cut long recordings into segments that a model can transcribe: at silences where there are any, else with overlap.

Voice activity is found by energy: a frame of 10 ms is speech if its level is well above that of the quietest tenth.
Recordings are read in blocks, so memory is bounded whatever their length.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from attent.data.arrays import Array
from attent.nn.frontends import HOP_SAMPLES, SAMPLE_RATE

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
