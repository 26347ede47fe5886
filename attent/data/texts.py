"""Text that is read by itself: files of running text, or of one text a line, become documents or lines.

    .txt and any name that says no other format   one running text, in which newlines are text; or a text a line
    .jsonl                                        an object a line, of which "text" is read
    a folder                                      every .txt and .jsonl file in it

each also with .gz, .xz or .zst. Files for validation and tests that lie beside `train...` are found by their names.
What becomes of the text is left to others (`rows`, `attent.train`); texts with labels are read by `labels`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from attent.data.arrays import mixed
from attent.data.corpus import split_of
from attent.data.holdout import default_size
from attent.data.pairs import CorpusError
from attent.data.readers import files, formats

Form = Literal["documents", "lines"]
HELD_CHARACTERS = 500_000  # of running text that are held out at most: more tell no more
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

    @property
    def characters(self) -> int:
        return sum(map(len, self.texts))


# ---- which files -----------------------------------------------------------------------------------------------------


def find(names: Sequence[str], suffixes: Sequence[str] = SUFFIXES) -> Found:
    """What a person named, with what lies beside it."""
    parts: dict[str, dict[Path, None]] = {"train": {}, "valid": {}, "test": {}}
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            for part, inside in _folder(path, suffixes).items():
                parts[part] |= dict.fromkeys(inside)
        elif path.exists():
            parts["train"][path] = None
            for part, other in _beside(path):
                parts[part][other] = None
        else:
            raise CorpusError(f"{name}: there is no such file or folder; check the path")
    return Found(*(tuple(parts[part]) for part in ("train", "valid", "test")))


def listed(names: Sequence[str], suffixes: Sequence[str] = SUFFIXES) -> tuple[Path, ...]:
    """The files that a person named for validation or a test."""
    found = find(names, suffixes)
    return (*found.train, *(() if any(Path(name).is_file() for name in names) else (*found.valid, *found.test)))


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


def hold_out(texts: Texts, asked: int | None, seed: int) -> tuple[Texts, Texts]:
    """(to train on, held out). Of one running text its last tenth, of many texts a tenth at most, drawn by the seed;
    `asked` says how many texts, or characters of the one."""
    if len(texts.texts) == 1 and not texts.labels:
        return _cut(texts, asked)
    size = default_size(len(texts.texts)) if asked is None else asked
    if not 0 < size < len(texts.texts):
        raise CorpusError(
            f"`data.hold_out` must be less than the {len(texts.texts):,} texts there are, but is {size:,}; add texts, "
            "name a validation set with --valid, or train without one (--hold-out 0)"
        )
    held = {int(i) for i in mixed(len(texts.texts), (seed, IN_HELD))[:size]}
    out = _of(texts, sorted(held), "held-out part")
    known = set(out.texts)
    rest = [i for i, text in enumerate(texts.texts) if i not in held and text not in known]
    if not rest:
        raise CorpusError(f"{texts.name}: all its texts are the same; give others, or validate on others (--valid)")
    return _of(texts, rest, texts.name), out


def _of(texts: Texts, places: Sequence[int], name: str) -> Texts:
    labels = [texts.labels[i] for i in places] if texts.labels else []
    return Texts(name, [texts.texts[i] for i in places], labels, texts.left_out, texts.files)


def _cut(texts: Texts, asked: int | None) -> tuple[Texts, Texts]:
    text = texts.texts[0]
    at = max(int(len(text) * 0.9), len(text) - HELD_CHARACTERS) if asked is None else len(text) - asked
    if not text[: max(at, 0)].strip() or not text[max(at, 0) :].strip():
        raise CorpusError(
            f"{texts.name}: has {len(text):,} characters, too few to hold out {len(text) - at:,} of them; give more "
            "text, name a validation set with --valid, or train without one (--hold-out 0)"
        )
    train = Texts(texts.name, [text[:at]], [], texts.left_out, texts.files)
    return train, Texts("last part", [text[at:]], [], Counter(), texts.files)
