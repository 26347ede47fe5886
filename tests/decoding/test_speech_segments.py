"""Segments of recordings: cut at silences, overlapping without any, the same in any blocks, and none of silence."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from attent.data.arrays import Array
from attent.decoding.speech_timing import (
    AudioSegment,
    cut_finished,
    find_runs,
    find_segments,
    find_speech,
    iter_segments,
)
from attent.nn.frontends import HOP_SAMPLES, SAMPLE_RATE

LOUD, QUIET = 0.2, 0.002


def make_recording(*parts: tuple[float, float]) -> Array:
    """Noise of (seconds, level) each."""
    rng = np.random.default_rng(0)
    return np.concatenate([rng.normal(0, level, int(s * SAMPLE_RATE)) for s, level in parts]).astype(np.float32)


def get_times(segments: list[AudioSegment]) -> list[tuple[float, float]]:
    return [(round(x.start, 2), round(x.start + x.seconds, 2)) for x in segments]


def iter_blocks(samples: Array, size: int) -> list[Array]:
    return [samples[at : at + size] for at in range(0, len(samples), size)]


@pytest.mark.parametrize("gain", [1.0, 0.01])
@pytest.mark.parametrize("floor", [QUIET, 0.0])
def test_speech_is_found_at_any_level_above_noise_or_digital_silence(gain: float, floor: float) -> None:
    samples = gain * make_recording((1, floor), (0.8, LOUD), (0.5, floor), (2, LOUD / 2), (1, floor), (0.02, LOUD))
    runs = find_runs(find_speech(samples))
    np.testing.assert_allclose(runs, [(100, 180), (230, 430)], atol=2)  # and no click


def test_a_constant_offset_changes_nothing() -> None:
    quiet_speech = 0.02 * make_recording((1, QUIET), (0.8, LOUD), (0.5, QUIET), (2, LOUD), (1, QUIET))
    assert find_runs(find_speech(quiet_speech + np.float32(0.01))) == find_runs(find_speech(quiet_speech))
    assert not list(iter_segments([np.full(SAMPLE_RATE, 0.01, np.float32)], max_seconds=4))


def test_steady_noise_and_silence_are_no_speech() -> None:
    assert not find_speech(make_recording((5, QUIET))).any()
    assert not find_speech(make_recording((5, 1e-5))).any()
    assert not find_speech(np.zeros(0, np.float32)).any()


def test_a_short_recording_is_one_segment() -> None:
    for parts in ([(0.3, LOUD)], [(1.0, QUIET), (0.5, LOUD), (2.0, QUIET)], [(0.004, LOUD), (0.02, LOUD)]):
        samples = make_recording(*parts)
        (segment,) = iter_segments(iter_blocks(samples, 7_000), max_seconds=4)
        assert np.array_equal(segment.samples, samples)
        assert (segment.start, segment.overlap) == (0, 0)
    assert not list(iter_segments([np.zeros(SAMPLE_RATE, np.float32)], max_seconds=4))
    assert not list(iter_segments([], max_seconds=4))


def test_segments_end_at_pauses_and_at_the_longest_silence_before_the_limit() -> None:
    samples = make_recording(
        *((1, LOUD), (0.3, QUIET), (1, LOUD), (0.5, QUIET), (1, LOUD), (0.3, QUIET), (1, LOUD)),  # 5.1 s, too long
        *((2, QUIET), (1, LOUD), (1.5, QUIET), (0.5, LOUD), (3, QUIET)),
    )
    segments = list(iter_segments(iter_blocks(samples, 8_000), max_seconds=4))
    expected = [(0, 2.5), (2.6, 5.3), (6.9, 8.3), (9.4, 10.3)]
    np.testing.assert_allclose(get_times(segments), expected, atol=0.06)
    assert [x.overlap for x in segments] == [0] * 4
    for segment in segments:
        first = round(segment.start * SAMPLE_RATE)
        assert np.array_equal(segment.samples, samples[first : first + len(segment.samples)])


def test_speech_without_silence_is_cut_into_overlapping_segments() -> None:
    samples = make_recording((1, QUIET), (13, LOUD), (2, QUIET))
    segments = list(iter_segments(iter_blocks(samples, 8_000), max_seconds=4))
    assert all(x.seconds <= 4 for x in segments)
    assert all(x.overlap == pytest.approx(1.4, abs=0.3) for x in segments[1:])
    times = get_times(segments)
    assert times[0][0] == pytest.approx(0.8, abs=0.05)
    assert times[-1][1] == pytest.approx(14.2, abs=0.05)
    assert all(b[0] < a[1] for a, b in pairwise(times))


def test_memory_is_bounded_and_nothing_is_lost_in_a_long_recording() -> None:
    """Speech and silence of 20 minutes: no block is kept for long."""
    minute = make_recording(*((2.0, LOUD), (1.5, QUIET)) * 10, (25.0, QUIET))
    blocks = (block for _ in range(20) for block in iter_blocks(minute, 80_000))
    segments = list(iter_segments(blocks, max_seconds=10))
    assert len(segments) == 200
    starts = [x.start for x in segments]
    expected = [60 * m + 3.5 * i for m in range(20) for i in range(10)]
    np.testing.assert_allclose(starts, expected, atol=0.25)
    assert max(len(x.samples.base) for x in segments if x.samples.base is not None) <= 46 * SAMPLE_RATE


def test_finished_segments_of_a_growing_recording_are_cut_off() -> None:
    samples = make_recording((0.5, QUIET), (1, LOUD), (1.5, QUIET), (1, LOUD), (0.5, QUIET))
    (first,), rest = cut_finished(samples, max_seconds=4)
    assert len(first) / SAMPLE_RATE == pytest.approx(1.7, abs=0.05)
    assert np.array_equal(np.concatenate([first, rest]), samples)
    assert cut_finished(rest, max_seconds=4)[0] == []
    samples = make_recording((3.4, LOUD), (0.05, LOUD / 9), (4, LOUD), (1, QUIET))  # no pause: cut where it is quietest
    (first, *_), _ = cut_finished(samples, max_seconds=4)
    assert len(first) / SAMPLE_RATE == pytest.approx(3.42, abs=0.05)
    assert find_segments(np.zeros(HOP_SAMPLES, np.float32), 100) == []
