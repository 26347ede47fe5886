"""Format translations as lines (text, Moses n-best lists, Pharaoh alignments, TSV, JSON lines), and transcripts."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any, Literal

from attent.decoding.options import Hypothesis

if TYPE_CHECKING:
    from attent.decoding.speech_timing import SpokenWord
    from attent.decoding.transcriber import Transcript, TranscriptSegment
    from attent.decoding.translator import Translation

OutputType = Literal["text", "json", "tsv"]
AlignmentFormat = Literal["hard", "soft"]
FIELD_SEPARATOR = "|||"
_SEPARATORS = re.compile(r"\|{3,}")
# Besides U+0000 to U+001F, characters that control a terminal, or at which some readers end a line.
_JSON_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}
_LINE_BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    type: OutputType = "text"
    n_best: int = 1
    with_score: bool = False
    with_quality: bool = False  # in JSON and TSV
    alignment: AlignmentFormat | None = None
    score_formula: str = ""

    @property
    def is_plain(self) -> bool:
        return self.type == "text" and self.n_best == 1 and not self.with_score and self.alignment is None

    def format_lines(self, translation: Translation, index: int) -> list[str]:
        """Return the lines of the translation at `index` of the input, without line ends."""
        hypotheses = translation.n_best[: self.n_best] if self.n_best > 1 else [translation]
        match self.type:
            case "json":
                return [self._format_json(translation)]
            case "tsv":
                return [self._format_tsv(translation, hypothesis) for hypothesis in hypotheses]
            case "text" if self.n_best > 1:
                return [format_moses(index, hypothesis) for hypothesis in hypotheses]
            case "text":
                return [self._format_text(translation)]

    def _format_text(self, translation: Translation) -> str:
        score = f"{format_score(translation.score)}\t" if self.with_score else ""
        text = replace_line_breaks(translation.text)
        if not self.alignment:
            return score + text
        links = f" {FIELD_SEPARATOR} {format_pharaoh(translation.alignment.links)}".rstrip(" ")
        return score + escape_separators(text) + links

    def _format_tsv(self, translation: Translation, hypothesis: Hypothesis) -> str:
        cells = [translation.source, hypothesis.text]
        if self.with_score:
            cells.append(format_score(hypothesis.score))
        if self.with_quality:
            figures = astuple(translation.quality) if translation.quality else ()
            cells += ["" if value is None else format_score(value) for value in figures]
        if self.alignment:
            cells.append(format_pharaoh(translation.alignment.links))
        return "\t".join(map(replace_line_breaks, cells))

    def _format_json(self, translation: Translation) -> str:
        fields = {"src": translation.source, **_build_fields(translation)}
        if self.alignment:
            fields["alignment"] = [list(link) for link in translation.alignment.links]
            fields["unreliable_links"] = [list(link) for link in translation.alignment.unreliable_links]
        if self.alignment == "soft":
            fields["weights"] = [[round(float(weight), 4) for weight in row] for row in translation.alignment.weights]
        if translation.quality:
            figures = asdict(translation.quality).items()
            fields["quality"] = {name: None if value is None else _round_finite(value) for name, value in figures}
        if translation.missed_terms:
            fields["missed_terms"] = [
                {"term": entry.term, "translations": list(entry.translations), "elsewhere": each.is_elsewhere}
                for each in translation.missed_terms
                for entry in [each.match.entry]
            ]
        if self.n_best > 1:
            fields["n_best"] = [_build_fields(hypothesis) for hypothesis in translation.n_best[: self.n_best]]
        fields["formula"] = self.score_formula
        return format_json_line(fields)


def format_json_line(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=False, allow_nan=False).translate(_JSON_ESCAPES)


def format_moses(index: int, hypothesis: Hypothesis) -> str:
    text = escape_separators(replace_line_breaks(hypothesis.text))
    return f"{index} {FIELD_SEPARATOR} {text} {FIELD_SEPARATOR} {format_score(hypothesis.score)}"


def format_pharaoh(links: Sequence[tuple[int, int]]) -> str:
    """Format links as `0-0 1-2`: source word, target word, from 0."""
    return " ".join(f"{source}-{target}" for source, target in links)


def replace_line_breaks(text: str) -> str:
    """Replace line breaks, tabs and other control characters by spaces: lines and columns stay aligned."""
    return _LINE_BREAKS.sub(" ", text)


def escape_separators(text: str) -> str:
    """Set bars apart that would be read as a field separator."""
    return _SEPARATORS.sub(lambda bars: " ".join(bars[0]), text)


def format_score(score: float) -> str:
    return f"{round(score, 4) + 0.0:.4f}"  # + 0.0: never -0.0000


def _build_fields(hypothesis: Hypothesis) -> dict[str, Any]:
    return {
        "hyp": hypothesis.text,
        "score": _round_finite(hypothesis.score),
        "log_prob": _round_finite(hypothesis.log_prob),
        "tokens": list(hypothesis.tokens),
        "finished": hypothesis.is_finished,
    }


def _round_finite(value: float) -> float | None:
    """JSON has no infinity."""
    return round(value, 6) + 0.0 if math.isfinite(value) else None


# --- transcripts: text, JSON lines, subtitles (SRT, WebVTT) ----------------------------------------------------------


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
    from attent.decoding.speech_timing import join_words  # which needs torch

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
