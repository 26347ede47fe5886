"""Texts with labels: a table (.tsv) or JSON lines (.jsonl) become texts and what is said of each.

    sentence<TAB>label        a first line that names its columns: text, sentence or question; label or class
    A fine film.<TAB>1        else the column with fewer different values is the label
    {"text": ..., "label": ...}

Numbers, true and false are labels by how they are written. One text has one label: pairs of texts are refused.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attent.data.formats import registry
from attent.data.pairs import CorpusError
from attent.data.text_corpus import TextCorpus, read_json_objects, read_text_file

SUFFIXES = (".tsv", ".tab", ".jsonl", ".ndjson")
TEXT_COLUMNS = ("text", "sentence", "question", "review", "content")
LABEL_COLUMNS = ("label", "class", "category", "target", "sentiment", "coarse_label")
TEXT_PAIR_COLUMNS = ("sentence1", "sentence2", "question1", "question2", "premise", "hypothesis", "text1", "text2")
MAX_LABELS = 10_000  # different labels: more are no labels
MIN_LINES_FOR_HEADER = 10  # lines, from which on a first one can be seen to be unlike the others
QUOTED_CELL = re.compile(r'"(?:[^"]|"")*"')  # as spreadsheets and pandas write a text that has quotes in it
WORD = re.compile(r"[\w-]+")

LabeledTexts = list[tuple[str, str]]  # texts and their labels


@dataclass
class ReadNotes:
    """What was found on the way."""

    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    messages: list[str] = field(default_factory=list)


def read_labeled_texts(paths: Sequence[Path]) -> TextCorpus:
    """Every text of these files with its label."""
    found: LabeledTexts = []
    notes = ReadNotes()
    for path in paths:
        found += _read_jsonl(path, notes) if registry.detect_format(path.name) == "jsonl" else _read_tsv(path, notes)
    where = ", ".join(map(str, paths))
    if not found:
        why = "".join(f"; {count:,} lines are {reason}" for reason, count in notes.skipped.most_common(2))
        raise CorpusError(f"{where}: there is no text with a label in it; a line needs both, with a tab between{why}")
    labels = [label for _, label in found]
    kinds = len(set(labels))
    if kinds > MAX_LABELS or (len(labels) >= 20 and kinds > 0.5 * len(labels)):
        raise CorpusError(
            f"{where}: has {kinds:,} different labels for {len(labels):,} texts, so that nothing could be learned of "
            "them; is it a corpus of translations (--task translate)? else name its columns in a first line: "
            "text<TAB>label"
        )
    name = ", ".join(path.name for path in paths)
    return TextCorpus(name, [text for text, _ in found], labels, notes.skipped, tuple(paths), tuple(notes.messages))


def sort_labels(labels: Sequence[str]) -> tuple[str, ...]:
    """Each label once, sorted: numbers by their size."""
    found = set(labels)
    if all(map(_is_number, found)):
        return tuple(sorted(found, key=lambda label: (float(label), label)))
    return tuple(sorted(found))


def _is_number(label: str) -> bool:
    """One that has a place among others: nan has none."""
    try:
        return math.isfinite(float(label))
    except ValueError:
        return False


# ---- tables ----------------------------------------------------------------------------------------------------------


def _read_tsv(path: Path, notes: ReadNotes) -> LabeledTexts:
    if registry.detect_format(path.name) not in (None, "tsv"):
        raise CorpusError(
            f"{path}: is a file of translations; texts with labels are .tsv (text<TAB>label) or .jsonl files"
        )
    rows = [line.split("\t") for line in read_text_file(path).split("\n") if line.strip()]
    if not rows:
        raise CorpusError(f"{path}: is empty; a line needs a text and a label, with a tab between them")
    named = _find_named_columns(rows[0], str(path))
    text, label = named or _guess_columns(rows, path)
    if named or _is_header(rows, label):
        head, rows = rows[0], rows[1:]
        told = f"{path.name}: its first line names its columns: texts are `{head[text]}`, labels are `{head[label]}`"
        notes.messages.append(told)
        width = len(head)
    else:
        notes.messages.append(f"{path.name}: texts are column {text + 1}, labels are column {label + 1}")
        width = _get_column_count(rows)
    found = _extract_cells(rows, text, label, width, notes)
    if len(found) < 0.5 * len(rows):
        raise CorpusError(
            f"{path}: {len(rows) - len(found):,} of its {len(rows):,} lines have no text or no label; a line is "
            "text<TAB>label"
        )
    return found


def _extract_cells(rows: Sequence[Sequence[str]], text: int, label: int, width: int, notes: ReadNotes) -> LabeledTexts:
    found = []
    for row in rows:
        if len(row) != width:
            notes.skipped[f"not of {width} columns"] += 1
        elif not row[label].strip():
            notes.skipped["without a label"] += 1
        elif not row[text].strip():
            notes.skipped["empty"] += 1
        else:
            found.append((_unquote_cell(row[text].strip()), _unquote_cell(row[label].strip())))
    return found


def _unquote_cell(cell: str) -> str:
    return cell[1:-1].replace('""', '"').strip() if len(cell) > 2 and QUOTED_CELL.fullmatch(cell) else cell


def _find_named_columns(header: Sequence[str], where: str) -> tuple[int, int] | None:
    """The columns (or keys) that a first line names. Which of two texts is meant is not guessed."""
    names = [_unquote_cell(name.strip()).lower() for name in header]
    label = next((names.index(name) for name in LABEL_COLUMNS if name in names), None)
    texts = [name for name in names if name in (*TEXT_COLUMNS, *TEXT_PAIR_COLUMNS)]
    if label is None or not texts:
        return None
    if len(texts) > 1:
        raise CorpusError(
            f"{where}: has several texts in a line ({', '.join(texts)}), and labels of pairs of texts are not "
            "supported; keep one of them, or join them into one"
        )
    return names.index(texts[0]), label


def _is_header(rows: Sequence[Sequence[str]], label: int) -> bool:
    """Whether the first line must be names that nobody knows: two words, of which the label occurs nowhere else though
    all the others repeat."""
    head, rest = rows[0], Counter(row[label] for row in rows[1:] if len(row) == len(rows[0]))
    words = len(head) == 2 and all(map(WORD.fullmatch, head))
    return words and len(rows) > MIN_LINES_FOR_HEADER and head[label] not in rest and min(rest.values(), default=0) > 1


def _get_column_count(rows: Sequence[Sequence[str]]) -> int:
    return Counter(map(len, rows)).most_common(1)[0][0]


def _guess_columns(rows: Sequence[Sequence[str]], path: Path) -> tuple[int, int]:
    """(text, label) of two columns: labels are fewer, or shorter."""
    if (width := _get_column_count(rows)) != 2:
        raise CorpusError(
            f"{path}: must have two columns, a text and its label, with a tab between them, but has {width}; name them "
            "in a first line: text<TAB>label"
        )
    columns = [[row[i] for row in rows if len(row) == 2] for i in (0, 1)]
    weights = [(len(set(column)), sum(map(len, column))) for column in columns]
    return (1, 0) if weights[0] < weights[1] else (0, 1)


# ---- JSON lines ------------------------------------------------------------------------------------------------------


def _read_jsonl(path: Path, notes: ReadNotes) -> LabeledTexts:
    found: LabeledTexts = []
    keys: tuple[str, str] | None = None
    for number, table in read_json_objects(path, notes.skipped):
        keys = keys or _find_keys(table, path, number, notes)
        text, label = table.get(keys[0]), _format_label(table.get(keys[1]))
        if not label:
            notes.skipped["without a label"] += 1
        elif not isinstance(text, str) or not text.strip():
            notes.skipped["empty"] += 1
        else:
            found.append((text.strip(), label))
    return found


def _find_keys(record: dict[str, object], path: Path, line_number: int, notes: ReadNotes) -> tuple[str, str]:
    names = list(record)
    if (named := _find_named_columns(names, f"{path}:{line_number}")) is None:
        told = ", ".join(names) or "none"
        raise CorpusError(f'{path}:{line_number}: must be an object with the keys "text" and "label", but has {told}')
    keys = names[named[0]], names[named[1]]
    notes.messages.append(f"{path.name}: texts are `{keys[0]}`, labels are `{keys[1]}`")
    return keys


def _format_label(value: object) -> str:
    """As it is written: 1.0 is 1, and what is no label is nothing."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip() if isinstance(value, str | int | float) else ""
