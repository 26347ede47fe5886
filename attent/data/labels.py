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

from attent.data.pairs import CorpusError
from attent.data.readers import formats
from attent.data.texts import Texts, content, objects

SUFFIXES = (".tsv", ".tab", ".jsonl", ".ndjson")
TEXT = ("text", "sentence", "question", "review", "content")
LABEL = ("label", "class", "category", "target", "sentiment", "coarse_label")
PAIRS = ("sentence1", "sentence2", "question1", "question2", "premise", "hypothesis", "text1", "text2")
MOST = 10_000  # different labels: more are no labels
ENOUGH = 10  # lines, from which on a first one can be seen to be unlike the others
QUOTED = re.compile(r'"(?:[^"]|"")*"')  # as spreadsheets and pandas write a text that has quotes in it
WORD = re.compile(r"[\w-]+")

Found = list[tuple[str, str]]  # texts and their labels


@dataclass
class Notes:
    """What was found on the way."""

    left_out: Counter[str] = field(default_factory=Counter)  # by reason
    told: list[str] = field(default_factory=list)


def read(paths: Sequence[Path]) -> Texts:
    """Every text of these files with its label."""
    found: Found = []
    notes = Notes()
    for path in paths:
        found += _jsonl(path, notes) if formats.by_name(path.name) == "jsonl" else _table(path, notes)
    where = ", ".join(map(str, paths))
    if not found:
        why = "".join(f"; {count:,} lines are {reason}" for reason, count in notes.left_out.most_common(2))
        raise CorpusError(f"{where}: there is no text with a label in it; a line needs both, with a tab between{why}")
    labels = [label for _, label in found]
    kinds = len(set(labels))
    if kinds > MOST or (len(labels) >= 20 and kinds > 0.5 * len(labels)):
        raise CorpusError(
            f"{where}: has {kinds:,} different labels for {len(labels):,} texts, so that nothing could be learned of "
            "them; is it a corpus of translations (--task translate)? else name its columns in a first line: "
            "text<TAB>label"
        )
    name = ", ".join(path.name for path in paths)
    return Texts(name, [text for text, _ in found], labels, notes.left_out, tuple(paths), tuple(notes.told))


def in_order(labels: Sequence[str]) -> tuple[str, ...]:
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


def _table(path: Path, notes: Notes) -> Found:
    if formats.by_name(path.name) not in (None, "tsv"):
        raise CorpusError(
            f"{path}: is a file of translations; texts with labels are .tsv (text<TAB>label) or .jsonl files"
        )
    rows = [line.split("\t") for line in content(path).split("\n") if line.strip()]
    if not rows:
        raise CorpusError(f"{path}: is empty; a line needs a text and a label, with a tab between them")
    named = _named(rows[0], str(path))
    text, label = named or _guessed(rows, path)
    if named or _is_head(rows, label):
        head, rows = rows[0], rows[1:]
        told = f"{path.name}: its first line names its columns: texts are `{head[text]}`, labels are `{head[label]}`"
        notes.told.append(told)
        width = len(head)
    else:
        notes.told.append(f"{path.name}: texts are column {text + 1}, labels are column {label + 1}")
        width = _usual_width(rows)
    found = _cells(rows, text, label, width, notes)
    if len(found) < 0.5 * len(rows):
        raise CorpusError(
            f"{path}: {len(rows) - len(found):,} of its {len(rows):,} lines have no text or no label; a line is "
            "text<TAB>label"
        )
    return found


def _cells(rows: Sequence[Sequence[str]], text: int, label: int, width: int, notes: Notes) -> Found:
    found = []
    for row in rows:
        if len(row) != width:
            notes.left_out[f"not of {width} columns"] += 1
        elif not row[label].strip():
            notes.left_out["without a label"] += 1
        elif not row[text].strip():
            notes.left_out["empty"] += 1
        else:
            found.append((_unquoted(row[text].strip()), _unquoted(row[label].strip())))
    return found


def _unquoted(cell: str) -> str:
    return cell[1:-1].replace('""', '"').strip() if len(cell) > 2 and QUOTED.fullmatch(cell) else cell


def _named(head: Sequence[str], where: str) -> tuple[int, int] | None:
    """The columns (or keys) that a first line names. Which of two texts is meant is not guessed."""
    names = [_unquoted(name.strip()).lower() for name in head]
    label = next((names.index(name) for name in LABEL if name in names), None)
    texts = [name for name in names if name in (*TEXT, *PAIRS)]
    if label is None or not texts:
        return None
    if len(texts) > 1:
        raise CorpusError(
            f"{where}: has several texts in a line ({', '.join(texts)}), and labels of pairs of texts are not "
            "supported; keep one of them, or join them into one"
        )
    return names.index(texts[0]), label


def _is_head(rows: Sequence[Sequence[str]], label: int) -> bool:
    """Whether the first line must be names that nobody knows: two words, of which the label occurs nowhere else though
    all the others repeat."""
    head, rest = rows[0], Counter(row[label] for row in rows[1:] if len(row) == len(rows[0]))
    words = len(head) == 2 and all(map(WORD.fullmatch, head))
    return words and len(rows) > ENOUGH and head[label] not in rest and min(rest.values(), default=0) > 1


def _usual_width(rows: Sequence[Sequence[str]]) -> int:
    return Counter(map(len, rows)).most_common(1)[0][0]


def _guessed(rows: Sequence[Sequence[str]], path: Path) -> tuple[int, int]:
    """(text, label) of two columns: labels are fewer, or shorter."""
    if (width := _usual_width(rows)) != 2:
        raise CorpusError(
            f"{path}: must have two columns, a text and its label, with a tab between them, but has {width}; name them "
            "in a first line: text<TAB>label"
        )
    columns = [[row[i] for row in rows if len(row) == 2] for i in (0, 1)]
    weights = [(len(set(column)), sum(map(len, column))) for column in columns]
    return (1, 0) if weights[0] < weights[1] else (0, 1)


# ---- JSON lines ------------------------------------------------------------------------------------------------------


def _jsonl(path: Path, notes: Notes) -> Found:
    found: Found = []
    keys: tuple[str, str] | None = None
    for number, table in objects(path, notes.left_out):
        keys = keys or _keys(table, path, number, notes)
        text, label = table.get(keys[0]), _label(table.get(keys[1]))
        if not label:
            notes.left_out["without a label"] += 1
        elif not isinstance(text, str) or not text.strip():
            notes.left_out["empty"] += 1
        else:
            found.append((text.strip(), label))
    return found


def _keys(table: dict[str, object], path: Path, number: int, notes: Notes) -> tuple[str, str]:
    names = list(table)
    if (named := _named(names, f"{path}:{number}")) is None:
        told = ", ".join(names) or "none"
        raise CorpusError(f'{path}:{number}: must be an object with the keys "text" and "label", but has {told}')
    keys = names[named[0]], names[named[1]]
    notes.told.append(f"{path.name}: texts are `{keys[0]}`, labels are `{keys[1]}`")
    return keys


def _label(value: object) -> str:
    """As it is written: 1.0 is 1, and what is no label is nothing."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip() if isinstance(value, str | int | float) else ""
