"""Texts with labels, from .tsv (with a header, or label columns found by their values) or .jsonl files."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attent.data.formats import registry
from attent.data.formats.tsv import QUOTED_CELL
from attent.data.pairs import CorpusError
from attent.data.text_corpus import TextCorpus, read_json_objects, read_text_file

SUFFIXES = (".tsv", ".tab", ".jsonl", ".ndjson")
TEXT_COLUMNS = ("text", "sentence", "question", "review", "content")
LABEL_COLUMNS = ("label", "class", "category", "target", "sentiment", "coarse_label")
TEXT_PAIR_COLUMNS = ("sentence1", "sentence2", "question1", "question2", "premise", "hypothesis", "text1", "text2")
MAX_LABELS = 10_000  # with more distinct values it is not a column of labels
MIN_LINES_FOR_HEADER = 10  # to recognize an unnamed header by its difference from the other lines
_WORD = re.compile(r"[\w-]+")

LabeledTexts = list[tuple[str, str]]  # (text, label)


@dataclass
class ReadNotes:
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    messages: list[str] = field(default_factory=list)


def read_labeled_texts(paths: Sequence[Path]) -> TextCorpus:
    texts: LabeledTexts = []
    notes = ReadNotes()
    for path in paths:
        texts += _read_jsonl(path, notes) if registry.detect_format(path.name) == "jsonl" else _read_tsv(path, notes)
    names = ", ".join(map(str, paths))
    if not texts:
        reasons = "".join(f"; {count:,} lines are {reason}" for reason, count in notes.skipped.most_common(2))
        raise CorpusError(f"{names}: has no text with a label; a line needs both, separated by a tab{reasons}")
    labels = [label for _, label in texts]
    label_count = len(set(labels))
    if label_count > MAX_LABELS or (len(labels) >= 20 and label_count > 0.5 * len(labels)):
        problem = f"has {label_count:,} different labels for {len(labels):,} texts, too many to learn"
        advice = "is it a corpus of translations (--task translate)? else begin it with a line text<TAB>label"
        raise CorpusError(f"{names}: {problem}; {advice}")
    name = ", ".join(path.name for path in paths)
    return TextCorpus(name, [text for text, _ in texts], labels, notes.skipped, tuple(paths), tuple(notes.messages))


def sort_labels(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct labels in order: numbers by value."""
    distinct = set(labels)
    with suppress(ValueError):
        if all(math.isfinite(float(label)) for label in distinct):
            return tuple(sorted(distinct, key=lambda label: (float(label), label)))
    return tuple(sorted(distinct))


def _read_tsv(path: Path, notes: ReadNotes) -> LabeledTexts:
    if registry.detect_format(path.name) not in (None, "tsv"):
        advice = "texts with labels are .tsv (text<TAB>label) or .jsonl files"
        raise CorpusError(f"{path}: is a file of translations; {advice}")
    rows = [line.split("\t") for line in read_text_file(path).split("\n") if line.strip()]
    if not rows:
        raise CorpusError(f"{path}: is empty; a line needs a text and a label, separated by a tab")
    named = _find_named_columns(rows[0], str(path))
    text, label = named or _guess_columns(rows, path)
    if named or _is_header(rows, label):
        header, rows = rows[0], rows[1:]
        notes.messages.append(f"{path.name}: header found; texts are `{header[text]}`, labels are `{header[label]}`")
        width = len(header)
    else:
        notes.messages.append(f"{path.name}: texts are column {text + 1}, labels are column {label + 1}")
        width = _get_column_count(rows)
    texts = _extract_cells(rows, text, label, width, notes)
    if len(texts) < 0.5 * len(rows):
        problem = f"{len(rows) - len(texts):,} of its {len(rows):,} lines have no text or no label"
        raise CorpusError(f"{path}: {problem}; a line is text<TAB>label")
    return texts


def _extract_cells(rows: Sequence[Sequence[str]], text: int, label: int, width: int, notes: ReadNotes) -> LabeledTexts:
    texts = []
    for row in rows:
        if len(row) != width:
            notes.skipped[f"not of {width} columns"] += 1
        elif not row[label].strip():
            notes.skipped["without a label"] += 1
        elif not row[text].strip():
            notes.skipped["empty"] += 1
        else:
            texts.append((_unquote_cell(row[text].strip()), _unquote_cell(row[label].strip())))
    return texts


def _unquote_cell(cell: str) -> str:
    """Unquote a cell as spreadsheets and pandas quote it."""
    quoted = QUOTED_CELL.fullmatch(cell) if len(cell) > 2 else None
    return quoted[1].replace('""', '"').strip() if quoted else cell


def _find_named_columns(header: Sequence[str], location: str) -> tuple[int, int] | None:
    """Return the columns (or keys) of text and label that a header names."""
    names = [_unquote_cell(name.strip()).lower() for name in header]
    label = next((names.index(name) for name in LABEL_COLUMNS if name in names), None)
    texts = [name for name in names if name in (*TEXT_COLUMNS, *TEXT_PAIR_COLUMNS)]
    if label is None or not texts:
        return None
    if len(texts) > 1:
        problem = f"has several texts in a line ({', '.join(texts)}), and labels of pairs of texts are not supported"
        raise CorpusError(f"{location}: {problem}; keep one of them, or join them into one")
    return names.index(texts[0]), label


def _is_header(rows: Sequence[Sequence[str]], label: int) -> bool:
    """True if the first line has two unknown words, and its label occurs only there though all others repeat."""
    header, labels = rows[0], Counter(row[label] for row in rows[1:] if len(row) == len(rows[0]))
    is_words = len(header) == 2 and all(map(_WORD.fullmatch, header)) and len(rows) > MIN_LINES_FOR_HEADER
    return is_words and header[label] not in labels and min(labels.values(), default=0) > 1


def _get_column_count(rows: Sequence[Sequence[str]]) -> int:
    return Counter(map(len, rows)).most_common(1)[0][0]


def _guess_columns(rows: Sequence[Sequence[str]], path: Path) -> tuple[int, int]:
    """Return (text, label) of two columns: labels have fewer distinct values, or are shorter."""
    if (width := _get_column_count(rows)) != 2:
        problem = f"must have two columns, a text and its label, separated by a tab, but has {width}"
        raise CorpusError(f"{path}: {problem}; name them in a first line: text<TAB>label")
    columns = [[row[i] for row in rows if len(row) == 2] for i in (0, 1)]
    weights = [(len(set(column)), sum(map(len, column))) for column in columns]
    return (1, 0) if weights[0] < weights[1] else (0, 1)


def _read_jsonl(path: Path, notes: ReadNotes) -> LabeledTexts:
    texts: LabeledTexts = []
    keys: tuple[str, str] | None = None
    for line_number, record in read_json_objects(path, notes.skipped):
        keys = keys or _find_keys(record, path, line_number, notes)
        text, label = record.get(keys[0]), _format_label(record.get(keys[1]))
        if not label:
            notes.skipped["without a label"] += 1
        elif not isinstance(text, str) or not text.strip():
            notes.skipped["empty"] += 1
        else:
            texts.append((text.strip(), label))
    return texts


def _find_keys(record: dict[str, Any], path: Path, line_number: int, notes: ReadNotes) -> tuple[str, str]:
    names = list(record)
    columns = _find_named_columns(names, f"{path}:{line_number}")
    if columns is None:
        keys = ", ".join(names) or "none"
        raise CorpusError(f'{path}:{line_number}: must be an object with the keys "text" and "label", but has {keys}')
    text, label = (names[column] for column in columns)
    notes.messages.append(f"{path.name}: texts are `{text}`, labels are `{label}`")
    return text, label


def _format_label(value: object) -> str:
    """Return a label as written: 1.0 is 1; "" for what cannot be a label."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip() if isinstance(value, str | int | float) else ""
