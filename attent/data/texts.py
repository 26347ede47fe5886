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

from attent.data.arrays import mixed
from attent.data.corpus import split_of
from attent.data.holdout import default_size
from attent.data.pairs import CorpusError
from attent.data.readers import files, formats

Form = Literal["documents", "lines"]
Part = Literal["valid", "test"]
HELD_CHARACTERS = 500_000  # of running text that are held out at most: more tell no more
FEW = 20  # documents, below which each gives its last part: a whole one would be too much, or unlike the others
LONG = 20  # characters of a line, from which on finding it twice says something
SUFFIXES = (".txt", ".jsonl", ".ndjson")
IN_HELD = 21  # a seed of its own


@dataclass(frozen=True)
class Found:
    """The files of a run, by what they are for."""

    train: tuple[Path, ...]
    valid: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Texts:
    """Some texts in memory, and what was left out of them."""

    name: str
    texts: list[str] = field(repr=False)
    labels: list[str] = field(default_factory=list, repr=False)  # of each text, where they have labels
    left_out: Counter[str] = field(default_factory=Counter)  # by reason
    files: tuple[Path, ...] = ()
    told: tuple[str, ...] = ()  # how they were read, where that had to be guessed

    @property
    def characters(self) -> int:
        return sum(map(len, self.texts))


# ---- which files -----------------------------------------------------------------------------------------------------


def find(names: Sequence[str], suffixes: Sequence[str] = SUFFIXES) -> Found:
    """What a person named, with what lies beside it. Where a file `train...` is among those named, as a shell's `*.txt`
    has it, files for validation and tests among them are for that."""
    parts: dict[str, dict[Path, None]] = {"train": {}, "valid": {}, "test": {}}
    paths = [_existing(name) for name in names]
    has_train = any(split_of(path.name) == "train" and not path.is_dir() for path in paths)
    for path in paths:
        if path.is_dir():
            for part, inside in _folder(path, suffixes).items():
                parts[part] |= dict.fromkeys(inside)
        else:
            parts[(has_train and split_of(path.name)) or "train"][path] = None
            for part, other in _beside(path):
                parts[part][other] = None
    return Found(*(tuple(parts[part]) for part in ("train", "valid", "test")))


def listed(names: Sequence[str], part: Part, suffixes: Sequence[str] = SUFFIXES) -> tuple[Path, ...]:
    """The files that a person named for validation or a test: of a folder with several parts, that one."""
    found: dict[Path, None] = {}
    for path in map(_existing, names):
        parts = _folder(path, suffixes) if path.is_dir() else {part: [path]}
        if part not in parts and len(parts) > 1:
            raise CorpusError(
                f"{path}: holds files for {' and '.join(sorted(parts))}, but none for {part}; name a file"
            )
        found |= dict.fromkeys(parts.get(part) or next(iter(parts.values())))
    return tuple(found)


def _existing(name: str) -> Path:
    path = Path(name).expanduser()
    if path.exists():
        return path
    bare, _, weight = name.rpartition(":")
    if re.fullmatch(r"[\d.]+", weight) and Path(bare).expanduser().exists():
        raise CorpusError(
            f"{name}: weights are for --task translate alone, and all texts count alike here; give {bare}"
        )
    raise CorpusError(f"{name}: there is no such file or folder; check the path")


def _folder(folder: Path, suffixes: Sequence[str]) -> dict[str, list[Path]]:
    inside = sorted(path for path in folder.iterdir() if path.is_file() and _has(path, suffixes))
    if not inside:
        known = ", ".join(suffixes)
        raise CorpusError(f"{folder}: no file in this folder can be read: they must end in {known} (.gz, .xz, .zst)")
    parts: dict[str, list[Path]] = {}
    for path in inside:
        parts.setdefault(split_of(path.name) or "", []).append(path)
    rest = parts.pop("", [])
    return parts if parts.get("train") else {**parts, "train": rest} if rest else {"train": inside}


def _has(path: Path, suffixes: Sequence[str]) -> bool:
    return formats.plain(path.name).lower().endswith(tuple(suffixes)) and not path.name.startswith(".")


def _beside(path: Path) -> Iterator[tuple[str, Path]]:
    """Files for other parts in the same folder, which end as this one does."""
    if split_of(path.name) != "train":
        return
    suffix = formats.plain(path.name).rpartition(".")[2]
    for other in sorted(path.parent.iterdir()):
        part = split_of(other.name)
        if part in ("valid", "test") and other.is_file() and formats.plain(other.name).rpartition(".")[2] == suffix:
            yield part, other


# ---- what stands in them ---------------------------------------------------------------------------------------------


def read(paths: Sequence[Path], form: Form) -> Texts:
    """Every text of these files. Without a single one, it says so."""
    texts: list[str] = []
    left_out: Counter[str] = Counter()
    for path in paths:
        texts += _jsonl(path, left_out) if _is_jsonl(path) else _plain(path, form)
    name = ", ".join(path.name for path in paths)
    if not texts:
        why = ", ".join(f"{count:,} {reason}" for reason, count in left_out.most_common()) or "it is empty"
        raise CorpusError(f"{', '.join(map(str, paths))}: there is no text to learn from ({why}); give another file")
    return Texts(name, texts, left_out=left_out, files=tuple(paths))


def _is_jsonl(path: Path) -> bool:
    return formats.by_name(path.name) == "jsonl"


def _plain(path: Path, form: Form) -> list[str]:
    if kind := formats.by_name(path.name):
        raise CorpusError(
            f"{path}: is a file of pairs ({kind}), and text alone is wanted here: give .txt or .jsonl; for pairs there "
            "is --task translate, for texts with labels --task classify"
        )
    text = content(path)
    if form == "documents":
        return [text] if text.strip() else []
    return [line.strip() for line in text.split("\n") if line.strip()]


def content(path: Path) -> str:
    """The whole text of a file."""
    raw = b"".join(files.File(path).blocks())
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise CorpusError(f"{path}:{line}: is not UTF-8 text; save the file as UTF-8, or give another") from error
    return text.replace("\r\n", "\n")


def _jsonl(path: Path, left_out: Counter[str]) -> list[str]:
    texts = []
    for number, table in objects(path, left_out):
        text = table.get("text")
        if not isinstance(text, str):
            if number == 1:
                raise CorpusError(
                    f'{path}:1: must be an object with the key "text", but its keys are {", ".join(table) or "none"}'
                )
            left_out["without a text"] += 1
        elif text.strip():
            texts.append(text)
        else:
            left_out["empty"] += 1
    return texts


def objects(path: Path, left_out: Counter[str]) -> Iterator[tuple[int, dict[str, object]]]:
    """The objects of JSON lines, with their lines' numbers."""
    for number, line in enumerate(content(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            table = json.loads(line)
        except (ValueError, RecursionError):
            table = None
        if isinstance(table, dict):
            yield number, table
        else:
            left_out["not a JSON object"] += 1


# ---- what is held out ------------------------------------------------------------------------------------------------


def hold_out(texts: Texts, asked: int | None, seed: int, form: Form = "lines") -> tuple[Texts, Texts]:
    """(to train on, held out), a tenth at most. Of a few documents the last part of each, else whole texts, drawn by
    the seed: each with all its copies, and of every label its share. `asked` says how many texts, or characters of the
    few."""
    count = len(texts.texts)
    if not texts.labels and (count == 1 or (form == "documents" and count < FEW)):
        return _cut(texts, asked)
    size = default_size(count) if asked is None else asked
    if not 0 < size < count:
        raise CorpusError(
            f"`data.hold_out` must be less than the {count:,} texts there are, but is {size:,}; add texts, "
            "name a validation set with --valid, or train without one (--hold-out 0)"
        )
    held = set(_drawn(texts, size, seed, by_length=form == "documents" and asked is None))
    rest = [i for i in range(count) if i not in held]
    return _of(texts, rest, texts.name), replace(_of(texts, sorted(held), "held-out part"), left_out=Counter())


def _drawn(texts: Texts, size: int, seed: int, *, by_length: bool) -> list[int]:
    """Whole groups of the same text, as long as there is room for them. One of each label stays at least."""
    groups: dict[str, list[int]] = {}
    for i, text in enumerate(texts.texts):
        groups.setdefault(text, []).append(i)
    names = texts.labels or [""] * len(texts.texts)
    lengths = [len(text) if by_length else 1 for text in texts.texts]
    whole = min(sum(lengths) // 10, HELD_CHARACTERS) if by_length else size
    stay, room = Counter(names), _shares(names, lengths, whole)
    held: list[int] = []
    same = list(groups.values())
    for places in (same[int(i)] for i in mixed(len(same), (seed, IN_HELD))):
        length, gone = lengths[places[0]], Counter(names[i] for i in places)
        if length * len(places) <= whole and all(room[x] >= length * n and stay[x] > n for x, n in gone.items()):
            held += places
            whole -= length * len(places)
            stay.subtract(gone)
            room.subtract({label: length * n for label, n in gone.items()})
        if not whole:
            break
    return held or _smallest(texts, same, names)


def _shares(names: Sequence[str], lengths: Sequence[int], whole: int) -> Counter[str]:
    """Of what is held out, how much of each label at most."""
    sums: Counter[str] = Counter()
    for name, length in zip(names, lengths, strict=True):
        sums[name] += length
    total = sum(lengths)
    return Counter({name: math.ceil(whole * own / total) for name, own in sums.items()})


def _smallest(texts: Texts, groups: Sequence[list[int]], names: Sequence[str]) -> list[int]:
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


def _of(texts: Texts, places: Sequence[int], name: str) -> Texts:
    labels = [texts.labels[i] for i in places] if texts.labels else []
    return replace(texts, name=name, texts=[texts.texts[i] for i in places], labels=labels)


def _cut(texts: Texts, asked: int | None) -> tuple[Texts, Texts]:
    """The last part of each, by its length."""
    whole = texts.characters
    size = min(whole - int(whole * 0.9), HELD_CHARACTERS) if asked is None else asked
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
    return train, replace(texts, name=name, texts=[text for text in held if text.strip()], left_out=Counter())


def shared(train: Texts, other: Texts, form: Form) -> int:
    """How many of the other texts are trained on, too; of documents, how many lines."""
    if form == "lines":
        known = set(train.texts)
        return sum(text in known for text in other.texts)
    known = {line for text in train.texts for line in text.split("\n")}
    return sum(line in known for text in other.texts for line in text.split("\n") if len(line) >= LONG)
