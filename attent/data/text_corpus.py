"""Text that is read by itself: files of running text, or of one text a line, become documents or lines.

    .txt and any name that says no other format   one running text, in which newlines are text; or a text a line
    .jsonl                                        an object a line, of which "text" is read
    a folder                                      every .txt and .jsonl file in it

each also with .gz, .xz or .zst. Files for validation and tests that lie beside `train...` are found by their names.
What becomes of the text is left to others (`rows`, `attent.train`); texts with labels are read by `labels`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from attent.data.arrays import draw_permutation
from attent.data.formats import registry, streams
from attent.data.pairs import CorpusError
from attent.data.split import default_validation_size
from attent.data.split_names import detect_split

TextLayout = Literal["documents", "lines"]
EvalSplit = Literal["valid", "test"]
MAX_HELD_OUT_CHARS = 500_000  # of running text that are held out at most: more tell no more
FEW_DOCUMENTS = (
    20  # documents, below which each gives its last part: a whole one would be too much, or unlike the others
)
MIN_SHARED_CHARS = 20  # characters of a line, from which on finding it twice says something
SUFFIXES = (".txt", ".jsonl", ".ndjson")
HELD_OUT_SEED = 21  # a seed of its own


@dataclass(frozen=True)
class TextFiles:
    """The files of a run, by what they are for."""

    train: tuple[Path, ...]
    valid: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()


@dataclass(frozen=True)
class TextCorpus:
    """Some texts in memory, and what was left out of them."""

    name: str
    texts: list[str] = field(repr=False)
    labels: list[str] = field(default_factory=list, repr=False)  # of each text, where they have labels
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()  # how they were read, where that had to be guessed

    @property
    def char_count(self) -> int:
        return sum(map(len, self.texts))


# ---- which files -----------------------------------------------------------------------------------------------------


def find_text_files(names: Sequence[str], suffixes: Sequence[str] = SUFFIXES) -> TextFiles:
    """What a person named, with what lies beside it. Where a file `train...` is among those named, as a shell's `*.txt`
    has it, files for validation and tests among them are for that."""
    parts: dict[str, dict[Path, None]] = {"train": {}, "valid": {}, "test": {}}
    paths = [_resolve_path(name) for name in names]
    has_train = any(detect_split(path.name) == "train" and not path.is_dir() for path in paths)
    for path in paths:
        if path.is_dir():
            for part, inside in _group_by_split(path, suffixes).items():
                parts[part] |= dict.fromkeys(inside)
        else:
            parts[(has_train and detect_split(path.name)) or "train"][path] = None
            for part, other in _find_sibling_splits(path):
                parts[part][other] = None
    return TextFiles(*(tuple(parts[part]) for part in ("train", "valid", "test")))


def list_eval_files(names: Sequence[str], split: EvalSplit, suffixes: Sequence[str] = SUFFIXES) -> tuple[Path, ...]:
    """The files that a person named for validation or a test: of a folder with several parts, that one."""
    found: dict[Path, None] = {}
    for path in map(_resolve_path, names):
        parts = _group_by_split(path, suffixes) if path.is_dir() else {split: [path]}
        if split not in parts and len(parts) > 1:
            raise CorpusError(
                f"{path}: holds files for {' and '.join(sorted(parts))}, but none for {split}; name a file"
            )
        found |= dict.fromkeys(parts.get(split) or next(iter(parts.values())))
    return tuple(found)


def _resolve_path(name: str) -> Path:
    path = Path(name).expanduser()
    if path.exists():
        return path
    bare, _, weight = name.rpartition(":")
    if re.fullmatch(r"[\d.]+", weight) and Path(bare).expanduser().exists():
        raise CorpusError(
            f"{name}: weights are for --task translate alone, and all texts count alike here; give {bare}"
        )
    raise CorpusError(f"{name}: there is no such file or folder; check the path")


def _group_by_split(folder: Path, suffixes: Sequence[str]) -> dict[str, list[Path]]:
    inside = sorted(path for path in folder.iterdir() if path.is_file() and _has_suffix(path, suffixes))
    if not inside:
        known = ", ".join(suffixes)
        raise CorpusError(f"{folder}: no file in this folder can be read: they must end in {known} (.gz, .xz, .zst)")
    parts: dict[str, list[Path]] = {}
    for path in inside:
        parts.setdefault(detect_split(path.name) or "", []).append(path)
    rest = parts.pop("", [])
    return parts if parts.get("train") else {**parts, "train": rest} if rest else {"train": inside}


def _has_suffix(path: Path, suffixes: Sequence[str]) -> bool:
    return streams.strip_compression_suffix(path.name).lower().endswith(tuple(suffixes)) and not path.name.startswith(
        "."
    )


def _find_sibling_splits(path: Path) -> Iterator[tuple[str, Path]]:
    """Files for other parts in the same folder, which end as this one does."""
    if detect_split(path.name) != "train":
        return
    suffix = streams.strip_compression_suffix(path.name).rpartition(".")[2]
    for other in sorted(path.parent.iterdir()):
        part = detect_split(other.name)
        if (
            part in ("valid", "test")
            and other.is_file()
            and streams.strip_compression_suffix(other.name).rpartition(".")[2] == suffix
        ):
            yield part, other


# ---- what stands in them ---------------------------------------------------------------------------------------------


def read_texts(paths: Sequence[Path], layout: TextLayout) -> TextCorpus:
    """Every text of these files. Without a single one, it says so."""
    texts: list[str] = []
    left_out: Counter[str] = Counter()
    for path in paths:
        texts += _read_jsonl(path, left_out) if _is_jsonl(path) else _read_plain_text(path, layout)
    name = ", ".join(path.name for path in paths)
    if not texts:
        why = ", ".join(f"{count:,} {reason}" for reason, count in left_out.most_common()) or "it is empty"
        raise CorpusError(f"{', '.join(map(str, paths))}: there is no text to learn from ({why}); give another file")
    return TextCorpus(name, texts, skipped=left_out, files=tuple(paths))


def _is_jsonl(path: Path) -> bool:
    return registry.detect_format(path.name) == "jsonl"


def _read_plain_text(path: Path, layout: TextLayout) -> list[str]:
    if kind := registry.detect_format(path.name):
        raise CorpusError(
            f"{path}: is a file of pairs ({kind}), and text alone is wanted here: give .txt or .jsonl; for pairs there "
            "is --task translate, for texts with labels --task classify"
        )
    text = read_text_file(path)
    if layout == "documents":
        return [text] if text.strip() else []
    return [line.strip() for line in text.split("\n") if line.strip()]


def read_text_file(path: Path) -> str:
    """The whole text of a file."""
    raw = b"".join(streams.InputFile(path).read_blocks())
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise CorpusError(f"{path}:{line}: is not UTF-8 text; save the file as UTF-8, or give another") from error
    return text.replace("\r\n", "\n")


def _read_jsonl(path: Path, skipped: Counter[str]) -> list[str]:
    texts = []
    for number, table in read_json_objects(path, skipped):
        text = table.get("text")
        if not isinstance(text, str):
            if number == 1:
                raise CorpusError(
                    f'{path}:1: must be an object with the key "text", but its keys are {", ".join(table) or "none"}'
                )
            skipped["without a text"] += 1
        elif text.strip():
            texts.append(text)
        else:
            skipped["empty"] += 1
    return texts


def read_json_objects(path: Path, skipped: Counter[str]) -> Iterator[tuple[int, dict[str, object]]]:
    """The objects of JSON lines, with their lines' numbers."""
    for number, line in enumerate(read_text_file(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            table = json.loads(line)
        except (ValueError, RecursionError):
            table = None
        if isinstance(table, dict):
            yield number, table
        else:
            skipped["not a JSON object"] += 1


# ---- what is held out ------------------------------------------------------------------------------------------------


def hold_out_texts(
    texts: TextCorpus, requested_size: int | None, seed: int, layout: TextLayout = "lines"
) -> tuple[TextCorpus, TextCorpus]:
    """(to train on, held out), a tenth at most. Of a few documents the last part of each, else whole texts, drawn by
    the seed: each with all its copies, and of every label its share. `asked` says how many texts, or characters of the
    few."""
    count = len(texts.texts)
    if not texts.labels and (count == 1 or (layout == "documents" and count < FEW_DOCUMENTS)):
        return _cut_tails(texts, requested_size)
    size = default_validation_size(count) if requested_size is None else requested_size
    if not 0 < size < count:
        raise CorpusError(
            f"`data.hold_out` must be less than the {count:,} texts there are, but is {size:,}; add texts, "
            "name a validation set with --valid, or train without one (--hold-out 0)"
        )
    held = set(_draw_held_out(texts, size, seed, by_length=layout == "documents" and requested_size is None))
    rest = [i for i in range(count) if i not in held]
    return _select_texts(texts, rest, texts.name), replace(
        _select_texts(texts, sorted(held), "held-out part"), skipped=Counter()
    )


def _draw_held_out(texts: TextCorpus, size: int, seed: int, *, by_length: bool) -> list[int]:
    """Whole groups of the same text, as long as there is room for them. One of each label stays at least."""
    groups: dict[str, list[int]] = {}
    for i, text in enumerate(texts.texts):
        groups.setdefault(text, []).append(i)
    names = texts.labels or [""] * len(texts.texts)
    lengths = [len(text) if by_length else 1 for text in texts.texts]
    whole = min(sum(lengths) // 10, MAX_HELD_OUT_CHARS) if by_length else size
    stay, room = Counter(names), _compute_label_quotas(names, lengths, whole)
    held: list[int] = []
    same = list(groups.values())
    for places in (same[int(i)] for i in draw_permutation(len(same), (seed, HELD_OUT_SEED))):
        length, gone = lengths[places[0]], Counter(names[i] for i in places)
        if length * len(places) <= whole and all(room[x] >= length * n and stay[x] > n for x, n in gone.items()):
            held += places
            whole -= length * len(places)
            stay.subtract(gone)
            room.subtract({label: length * n for label, n in gone.items()})
        if not whole:
            break
    return held or _find_smallest_group(texts, same, names)


def _compute_label_quotas(names: Sequence[str], lengths: Sequence[int], total_held_out: int) -> Counter[str]:
    """Of what is held out, how much of each label at most."""
    sums: Counter[str] = Counter()
    for name, length in zip(names, lengths, strict=True):
        sums[name] += length
    total = sum(lengths)
    return Counter({name: math.ceil(total_held_out * own / total) for name, own in sums.items()})


def _find_smallest_group(texts: TextCorpus, groups: Sequence[list[int]], names: Sequence[str]) -> list[int]:
    """Where nothing had room: the text that is repeated least, if it is not the last of its label."""
    counts = Counter(names)
    for places in sorted(groups, key=len):
        if all(counts[label] > n for label, n in Counter(names[i] for i in places).items()):
            return places
    what = "of each label there is one text only" if texts.labels and len(groups) > 1 else "all its texts are the same"
    raise CorpusError(
        f"{texts.name}: {what}, so that none can be held out; give others, or validate on others (--valid, or "
        "--hold-out 0 for none)"
    )


def _select_texts(texts: TextCorpus, indices: Sequence[int], name: str) -> TextCorpus:
    labels = [texts.labels[i] for i in indices] if texts.labels else []
    return replace(texts, name=name, texts=[texts.texts[i] for i in indices], labels=labels)


def _cut_tails(texts: TextCorpus, requested_size: int | None) -> tuple[TextCorpus, TextCorpus]:
    """The last part of each, by its length."""
    whole = texts.char_count
    size = min(whole - int(whole * 0.9), MAX_HELD_OUT_CHARS) if requested_size is None else requested_size
    cuts = [len(text) - round(size * len(text) / max(1, whole)) for text in texts.texts]
    rest = [text[: max(at, 0)] for text, at in zip(texts.texts, cuts, strict=True)]
    held = [text[max(at, 0) :] for text, at in zip(texts.texts, cuts, strict=True)]
    if not any(map(str.strip, rest)) or not any(map(str.strip, held)):
        raise CorpusError(
            f"{texts.name}: has {whole:,} characters, too few to hold out {size:,} of them; give more "
            "text, name a validation set with --valid, or train without one (--hold-out 0)"
        )
    train = replace(texts, texts=[text for text in rest if text.strip()])
    name = "last part" if len(held) == 1 else "last parts"
    return train, replace(texts, name=name, texts=[text for text in held if text.strip()], skipped=Counter())


def count_shared_texts(train: TextCorpus, other: TextCorpus, layout: TextLayout) -> int:
    """How many of the other texts are trained on, too; of documents, how many lines."""
    if layout == "lines":
        known = set(train.texts)
        return sum(text in known for text in other.texts)
    known = {line for text in train.texts for line in text.split("\n")}
    return sum(line in known for text in other.texts for line in text.split("\n") if len(line) >= MIN_SHARED_CHARS)
