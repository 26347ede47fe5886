"""Texts with labels: a table (.tsv) or JSON lines (.jsonl) become texts and what is said of each.

    sentence<TAB>label        a first line that names its columns: text, sentence or question; label or class
    A fine film.<TAB>1        else the column with fewer different values is the label
    {"text": ..., "label": ...}

Numbers, true and false are labels by how they are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from attent.data.pairs import CorpusError
from attent.data.readers import formats
from attent.data.texts import Texts, content, objects

SUFFIXES = (".tsv", ".tab", ".jsonl", ".ndjson")
TEXT = ("text", "sentence", "question", "review", "content")
LABEL = ("label", "class", "category", "target", "sentiment", "coarse_label")
MOST = 10_000  # different labels: more are no labels


def read(paths: Sequence[Path]) -> Texts:
    """Every text of these files with its label."""
    texts, labels = [], []
    left_out: Counter[str] = Counter()
    for path in paths:
        found = _jsonl(path, left_out) if formats.by_name(path.name) == "jsonl" else _table(path, left_out)
        texts += [text for text, _ in found]
        labels += [label for _, label in found]
    where = ", ".join(map(str, paths))
    if not texts:
        raise CorpusError(f"{where}: there is no text with a label in it; a line needs both, with a tab between them")
    kinds = len(set(labels))
    if kinds > MOST or (len(labels) >= 20 and kinds > 0.5 * len(labels)):
        raise CorpusError(
            f"{where}: has {kinds:,} different labels for {len(labels):,} texts, so that nothing could be learned of "
            "them; is it a corpus of translations (--task translate)? else name its columns in a first line: "
            "text<TAB>label"
        )
    return Texts(", ".join(path.name for path in paths), texts, labels, left_out, tuple(paths))


def in_order(labels: Sequence[str]) -> tuple[str, ...]:
    """Each label once, sorted: numbers by their size."""
    found = set(labels)
    try:
        return tuple(sorted(found, key=lambda label: (float(label), label)))
    except ValueError:
        return tuple(sorted(found))


def _table(path: Path, left_out: Counter[str]) -> list[tuple[str, str]]:
    if formats.by_name(path.name) not in (None, "tsv"):
        raise CorpusError(
            f"{path}: is a file of translations; texts with labels are .tsv (text<TAB>label) or .jsonl files"
        )
    rows = [line.split("\t") for line in content(path).split("\n") if line.strip()]
    if not rows:
        raise CorpusError(f"{path}: is empty; a line needs a text and a label, with a tab between them")
    text, label = _named(rows[0]) or (None, None)
    if text is not None and label is not None:
        rows = rows[1:]
    else:
        text, label = _guessed(rows, path)
    found = []
    for row in rows:
        if max(text, label) >= len(row) or not row[label].strip():
            left_out["without a label"] += 1
        elif not row[text].strip():
            left_out["empty"] += 1
        else:
            found.append((row[text].strip(), row[label].strip()))
    if len(found) < 0.5 * len(rows):
        raise CorpusError(
            f"{path}: {len(rows) - len(found):,} of its {len(rows):,} lines have no text or no label; a line is "
            "text<TAB>label"
        )
    return found


def _named(head: Sequence[str]) -> tuple[int, int] | None:
    """The columns that a first line names."""
    names = [name.strip().lower() for name in head]
    text = next((names.index(name) for name in TEXT if name in names), None)
    label = next((names.index(name) for name in LABEL if name in names), None)
    return None if text is None or label is None else (text, label)


def _guessed(rows: Sequence[Sequence[str]], path: Path) -> tuple[int, int]:
    """(text, label) of two columns: labels are fewer, or shorter."""
    if Counter(map(len, rows)).most_common(1)[0][0] != 2:
        width = Counter(map(len, rows)).most_common(1)[0][0]
        raise CorpusError(
            f"{path}: must have two columns, a text and its label, with a tab between them, but has {width}; name them "
            "in a first line: text<TAB>label"
        )
    columns = [[row[i] for row in rows if len(row) == 2] for i in (0, 1)]
    weights = [(len(set(column)), sum(map(len, column))) for column in columns]
    return (1, 0) if weights[0] < weights[1] else (0, 1)


def _jsonl(path: Path, left_out: Counter[str]) -> list[tuple[str, str]]:
    found = []
    for number, table in objects(path, left_out):
        text, label = table.get("text"), table.get("label")
        if "text" not in table or "label" not in table:
            if number == 1:
                keys = ", ".join(table) or "none"
                raise CorpusError(f'{path}:1: must be an object with the keys "text" and "label", but has {keys}')
            left_out["without a label"] += 1
        elif not isinstance(text, str) or not text.strip():
            left_out["empty"] += 1
        elif isinstance(label, str | int | float) and str(label).strip():
            found.append((text.strip(), (str(label).lower() if isinstance(label, bool) else str(label)).strip()))
        else:
            left_out["without a label"] += 1
    return found
