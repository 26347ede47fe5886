"""Format transcripts as text, JSON lines, or subtitles (SRT, WebVTT)."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from attent.decoding.output_format import format_json_line, replace_line_breaks

if TYPE_CHECKING:
    from attent.decoding.transcriber import Transcript, TranscriptSegment
    from attent.decoding.word_times import SpokenWord

TranscriptFormat = Literal["text", "srt", "vtt", "json"]

MAX_CUE_CHARS = 84  # two lines of 42, as is usual for subtitles
MAX_CUE_SECONDS = 7.0
MIN_CUE_SECONDS = 0.1
CUE_PAUSE = 0.6  # seconds between words that start a new cue

Cue = tuple[float, float, str]  # start, end, text


def format_transcript(transcript: Transcript, kind: TranscriptFormat, name: str | None = None) -> str:
    """Return the content of a file, or the line of one recording: `name` is written to JSON, and before a text."""
    match kind:
        case "text":
            text = replace_line_breaks(transcript.text)
            return f"{text}\n" if name is None else f"{name}\t{text}\n"
        case "json":
            segments = [
                {**round_times(segment), "words": [round_times(word) for word in segment.words]}
                for segment in transcript.segments
            ]
            fields = {"text": transcript.text, "duration": round(transcript.duration, 3), "segments": segments}
            return format_json_line({**({} if name is None else {"file": name}), **fields}) + "\n"
        case "srt":
            numbered = enumerate(list_cues(transcript), 1)
            return "\n".join(f"{n}\n{format_times(cue, ',')}\n{cue[2]}\n" for n, cue in numbered)
        case "vtt":
            cues = (f"{format_times(cue, '.')}\n{html.escape(cue[2], quote=False)}\n" for cue in list_cues(transcript))
            return "\n".join(["WEBVTT\n", *cues])


def round_times(timed: TranscriptSegment | SpokenWord) -> dict[str, Any]:
    return {"start": round(timed.start, 3), "end": round(timed.end, 3), "text": timed.text}


def list_cues(transcript: Transcript) -> list[Cue]:
    cues: list[Cue] = []
    for start, end, text in (cue for segment in transcript.segments for cue in split_cues(segment)):
        start = max(start, cues[-1][1] if cues else 0.0)
        cues.append((start, max(end, start + MIN_CUE_SECONDS), replace_line_breaks(text)))
    return cues


def split_cues(segment: TranscriptSegment) -> Iterator[Cue]:
    """Split a segment at pauses and ends of sentences, and where it is too long for a subtitle."""
    from attent.decoding.word_times import join_words  # which needs torch

    if not segment.words:
        yield segment.start, segment.end, segment.text
        return
    words = [segment.words[0]]
    for word in segment.words[1:]:
        text = join_words(x.text for x in (*words, word))
        is_sentence = words[-1].text.endswith(tuple(".?!。？！")) and len(words) > 1
        is_long = len(text) > MAX_CUE_CHARS or word.end - words[0].start > MAX_CUE_SECONDS
        if is_sentence or is_long or word.start - words[-1].end > CUE_PAUSE:
            yield words[0].start, words[-1].end, join_words(x.text for x in words)
            words = []
        words.append(word)
    yield words[0].start, words[-1].end, join_words(x.text for x in words)


def format_times(cue: Cue, point: str) -> str:
    """`01:02:03,456 --> 01:02:04,000`"""
    times = []
    for seconds in cue[:2]:
        minutes, milliseconds = divmod(round(1000 * seconds), 60_000)
        whole, fraction = divmod(milliseconds, 1000)
        times.append(f"{minutes // 60:02}:{minutes % 60:02}:{whole:02}{point}{fraction:03}")
    return " --> ".join(times)
