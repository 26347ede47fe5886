"""Monolingual text: files of running text (documents) or of one text per line, .jsonl with the key "text", and folders.

Validation and test files in the folder of a `train...` file are found by their names.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from attent.data.arrays import draw_permutation
from attent.data.formats import jsonl, registry
from attent.data.formats.streams import InputFile, strip_compression_suffix
from attent.data.formats.tsv import QUOTED_CELL
from attent.data.pairs import CorpusError, detect_split
from attent.data.split import default_validation_size

TextLayout = Literal["documents", "lines"]
EvalSplit = Literal["valid", "test"]
MAX_HELD_OUT_CHARS = 500_000  # of running text: more makes validation no more precise
FEW_DOCUMENTS = 20  # with fewer, the end of each is held out: a whole one would be too much, or unlike the others
MIN_SHARED_CHARS = 20  # of a line, for a repetition to be meaningful
SUFFIXES = (".txt", ".jsonl", ".ndjson")
HELD_OUT_SEED = 21
NO_HOLD_OUT_ADVICE = "give a validation set with --valid, or train without one (--hold-out 0)"
LABELED_SUFFIXES = (".tsv", ".tab", ".jsonl", ".ndjson")
TEXT_COLUMNS = ("text", "sentence", "question", "review", "content")
LABEL_COLUMNS = ("label", "class", "category", "target", "sentiment", "coarse_label")
TEXT_PAIR_COLUMNS = ("sentence1", "sentence2", "question1", "question2", "premise", "hypothesis", "text1", "text2")
MAX_LABELS = 10_000  # with more distinct values it is not a column of labels
MIN_LINES_FOR_HEADER = 10  # to recognize an unnamed header by its difference from the other lines
_WORD = re.compile(r"[\w-]+")

LabeledTexts = list[tuple[str, str]]  # (text, label)


@dataclass(frozen=True)
class TextFiles:
    train: tuple[Path, ...]
    valid: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()


@dataclass(frozen=True)
class TextCorpus:
    name: str
    texts: list[str] = field(repr=False)
    labels: list[str] = field(default_factory=list, repr=False)  # of each text, if they have labels
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()  # how ambiguous files were read

    @property
    def char_count(self) -> int:
        return sum(map(len, self.texts))


def find_text_files(names: Sequence[str], suffixes: Sequence[str] = SUFFIXES) -> TextFiles:
    """Return the named files and their siblings, by split. Named validation and test files (as by a shell's `*.txt`)
    count as such only if a `train...` file is named too."""
    splits: dict[str, dict[Path, None]] = {"train": {}, "valid": {}, "test": {}}
    paths = [_resolve_path(name) for name in names]
    has_train = any(detect_split(path.name) == "train" and not path.is_dir() for path in paths)
    for path in paths:
        if path.is_dir():
            for split, files in _group_by_split(path, suffixes).items():
                splits[split] |= dict.fromkeys(files)
        else:
            splits[(has_train and detect_split(path.name)) or "train"][path] = None
            for split, sibling in _find_sibling_splits(path):
                splits[split][sibling] = None
    return TextFiles(*(tuple(splits[split]) for split in ("train", "valid", "test")))


def list_eval_files(names: Sequence[str], split: EvalSplit, suffixes: Sequence[str] = SUFFIXES) -> tuple[Path, ...]:
    """Return the files named for validation or a test: of a folder with several splits, that one."""
    files: dict[Path, None] = {}
    for path in map(_resolve_path, names):
        splits = _group_by_split(path, suffixes) if path.is_dir() else {split: [path]}
        if split not in splits and len(splits) > 1:
            present = " and ".join(sorted(splits))
            raise CorpusError(f"{path}: has files for {present}, but none for {split}; give a file")
        files |= dict.fromkeys(splits.get(split) or next(iter(splits.values())))
    return tuple(files)


def _resolve_path(name: str) -> Path:
    path = Path(name).expanduser()
    if path.exists():
        return path
    bare, _, weight = name.rpartition(":")
    if re.fullmatch(r"[\d.]+", weight) and Path(bare).expanduser().exists():
        raise CorpusError(f"{name}: weights are for --task translate only; give {bare}")
    raise CorpusError(f"{name}: there is no such file or folder; check the path")


def _group_by_split(folder: Path, suffixes: Sequence[str]) -> dict[str, list[Path]]:
    names = {path: strip_compression_suffix(path.name).lower() for path in folder.iterdir() if path.is_file()}
    files = sorted(p for p, name in names.items() if name.endswith(tuple(suffixes)) and not name.startswith("."))
    if not files:
        known = ", ".join(suffixes)
        raise CorpusError(f"{folder}: no file in this folder can be read: they must end in {known} (.gz, .xz, .zst)")
    splits: dict[str, list[Path]] = {}
    for path in files:
        splits.setdefault(detect_split(path.name) or "", []).append(path)
    others = splits.pop("", [])
    return splits if splits.get("train") else {**splits, "train": others} if others else {"train": files}


def _find_sibling_splits(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the validation and test files with the same suffix in the folder of a train file."""
    if detect_split(path.name) != "train":
        return
    suffix = strip_compression_suffix(path.name).rpartition(".")[2]
    for sibling in sorted(path.parent.iterdir()):
        split = detect_split(sibling.name)
        is_same_kind = strip_compression_suffix(sibling.name).rpartition(".")[2] == suffix
        if split in ("valid", "test") and sibling.is_file() and is_same_kind:
            yield split, sibling


def read_texts(paths: Sequence[Path], layout: TextLayout) -> TextCorpus:
    """Return every text of these files; at least one."""
    texts: list[str] = []
    skipped: Counter[str] = Counter()
    for path in paths:
        is_jsonl = registry.detect_format(path.name) == "jsonl"
        texts += _read_jsonl(path, skipped) if is_jsonl else _read_plain_text(path, layout)
    if not texts:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in skipped.most_common()) or "it is empty"
        names = ", ".join(map(str, paths))
        raise CorpusError(f"{names}: there is no text to learn from ({reasons}); give another file")
    return TextCorpus(", ".join(path.name for path in paths), texts, skipped=skipped, files=tuple(paths))


def _read_plain_text(path: Path, layout: TextLayout) -> list[str]:
    if key := registry.detect_format(path.name):
        advice = "for pairs there is --task translate, for texts with labels --task classify"
        raise CorpusError(f"{path}: is a file of pairs ({key}), but must be plain text: give .txt or .jsonl; {advice}")
    text = read_text_file(path)
    if layout == "documents":
        return [text] if text.strip() else []
    return [line.strip() for line in text.split("\n") if line.strip()]


def read_text_file(path: Path) -> str:
    raw = b"".join(InputFile(path).read_blocks())
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise CorpusError(f"{path}:{line}: is not UTF-8 text; save the file as UTF-8, or give another") from error
    return text.replace("\r\n", "\n")


def _read_jsonl(path: Path, skipped: Counter[str]) -> list[str]:
    texts = []
    for line_number, record in read_json_objects(path, skipped):
        text = record.get("text")
        if not isinstance(text, str):
            if line_number == 1:
                keys = ", ".join(record) or "none"
                raise CorpusError(f'{path}:1: must be an object with the key "text", but its keys are {keys}')
            skipped["without a text"] += 1
        elif text.strip():
            texts.append(text)
        else:
            skipped["empty"] += 1
    return texts


def read_json_objects(path: Path, skipped: Counter[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of JSON Lines; bad lines are counted in `skipped`."""
    for line_number, line in enumerate(read_text_file(path).split("\n"), 1):
        if not line.strip():
            continue
        record = jsonl.parse_object(line)
        if record is None:
            skipped[jsonl.NOT_JSON] += 1
        else:
            yield line_number, record


def hold_out_texts(
    corpus: TextCorpus, requested_size: int | None, seed: int, layout: TextLayout = "lines"
) -> tuple[TextCorpus, TextCorpus]:
    """Return (train, held out); a tenth is held out at most.

    Of a few documents the end of each is held out, else whole texts drawn by the seed: each with all its copies, and of
    every label its share. `requested_size` is in texts, or in characters of a few documents.
    """
    count = len(corpus.texts)
    if not corpus.labels and (count == 1 or (layout == "documents" and count < FEW_DOCUMENTS)):
        return _cut_tails(corpus, requested_size)
    size = default_validation_size(count) if requested_size is None else requested_size
    if not 0 < size < count:
        problem = f"`data.hold_out` must be less than the {count:,} texts, but is {size:,}"
        raise CorpusError(f"{problem}; add texts, {NO_HOLD_OUT_ADVICE}")
    held_out = set(_draw_held_out(corpus, size, seed, by_length=layout == "documents" and requested_size is None))
    rest = [i for i in range(count) if i not in held_out]
    valid = replace(_select_texts(corpus, sorted(held_out), "held-out part"), skipped=Counter())
    return _select_texts(corpus, rest, corpus.name), valid


def _draw_held_out(corpus: TextCorpus, size: int, seed: int, *, by_length: bool) -> list[int]:
    """Draw whole groups of equal texts while they fit. At least one text of each label stays."""
    groups: dict[str, list[int]] = {}
    for i, text in enumerate(corpus.texts):
        groups.setdefault(text, []).append(i)
    labels = corpus.labels or [""] * len(corpus.texts)
    lengths = [len(text) if by_length else 1 for text in corpus.texts]
    budget = min(sum(lengths) // 10, MAX_HELD_OUT_CHARS) if by_length else size
    remaining, sums = Counter(labels), Counter[str]()
    for label, length in zip(labels, lengths, strict=True):
        sums[label] += length
    quotas = Counter({label: math.ceil(budget * length / sum(lengths)) for label, length in sums.items()})
    held_out: list[int] = []
    copies = list(groups.values())
    for indices in (copies[int(i)] for i in draw_permutation(len(copies), (seed, HELD_OUT_SEED))):
        length, drawn = lengths[indices[0]], Counter(labels[i] for i in indices)
        fits = all(quotas[label] >= length * n and remaining[label] > n for label, n in drawn.items())
        if length * len(indices) <= budget and fits:
            held_out += indices
            budget -= length * len(indices)
            remaining.subtract(drawn)
            quotas.subtract({label: length * n for label, n in drawn.items()})
        if not budget:
            break
    return held_out or _find_smallest_group(corpus, copies, labels)


def _find_smallest_group(corpus: TextCorpus, groups: Sequence[list[int]], labels: Sequence[str]) -> list[int]:
    """Return the least repeated text that is not the last of its label, if none fits."""
    counts = Counter(labels)
    for indices in sorted(groups, key=len):
        if all(counts[label] > n for label, n in Counter(labels[i] for i in indices).items()):
            return indices
    problem = "each label has one text only" if corpus.labels and len(groups) > 1 else "all its texts are the same"
    raise CorpusError(f"{corpus.name}: {problem}, so that none can be held out; give others, {NO_HOLD_OUT_ADVICE}")


def _select_texts(corpus: TextCorpus, indices: Sequence[int], name: str) -> TextCorpus:
    labels = [corpus.labels[i] for i in indices] if corpus.labels else []
    return replace(corpus, name=name, texts=[corpus.texts[i] for i in indices], labels=labels)


def _cut_tails(corpus: TextCorpus, requested_size: int | None) -> tuple[TextCorpus, TextCorpus]:
    """Hold out the end of each document, in proportion to its length."""
    total = corpus.char_count
    size = min(total - int(total * 0.9), MAX_HELD_OUT_CHARS) if requested_size is None else requested_size
    cuts = [max(len(text) - round(size * len(text) / max(1, total)), 0) for text in corpus.texts]
    heads = [text[:cut] for text, cut in zip(corpus.texts, cuts, strict=True)]
    tails = [text[cut:] for text, cut in zip(corpus.texts, cuts, strict=True)]
    if not any(map(str.strip, heads)) or not any(map(str.strip, tails)):
        problem = f"has {total:,} characters, too few to hold out {size:,} of them"
        raise CorpusError(f"{corpus.name}: {problem}; give more text, {NO_HOLD_OUT_ADVICE}")
    train = replace(corpus, texts=[text for text in heads if text.strip()])
    name = "last part" if len(tails) == 1 else "last parts"
    return train, replace(corpus, name=name, texts=[text for text in tails if text.strip()], skipped=Counter())


def count_shared_texts(train: TextCorpus, other: TextCorpus, layout: TextLayout) -> int:
    """Count the texts (of documents, the lines) of `other` that are also trained on."""
    if layout == "lines":
        known = set(train.texts)
        return sum(text in known for text in other.texts)
    known = {line for text in train.texts for line in text.split("\n")}
    lines = (line for text in other.texts for line in text.split("\n"))
    return sum(line in known for line in lines if len(line) >= MIN_SHARED_CHARS)


@dataclass
class ReadNotes:
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    messages: list[str] = field(default_factory=list)


def read_labeled_texts(paths: Sequence[Path]) -> TextCorpus:
    texts: LabeledTexts = []
    notes = ReadNotes()
    for path in paths:
        read = _read_labeled_jsonl if registry.detect_format(path.name) == "jsonl" else _read_tsv
        texts += read(path, notes)
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


def _read_labeled_jsonl(path: Path, notes: ReadNotes) -> LabeledTexts:
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
