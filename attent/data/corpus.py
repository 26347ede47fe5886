"""What a person typed as CORPUS becomes files to read: paths with weights, Moses pairs, folders, `-`, built-in names.

A `Corpus` is a description: cheap to make, and read anew each time that it is iterated over. What stands in the files
is left to `attent.data.readers`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import compress, product
from pathlib import Path

from attent.data.pairs import Bad, CorpusError, Languages, Pair, matches, normal_tag
from attent.data.readers import files, formats, tags
from attent.data.readers.files import File
from attent.data.readers.formats import PLAIN, Format, Part, Reading
from attent.data.readers.tags import ANY

__all__ = ["Corpus", "Reading", "Split", "corpora"]

_SPLITS = {"train": r"train(ing)?", "valid": r"val(id(ation)?)?|dev", "test": r"test(ing)?"}
_TAG = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]+)*")
_LABELS: dict[Format | None, str] = {  # how a file says its languages
    "tsv": "name its columns in a first line such as en<TAB>de<TAB>fr",
    "jsonl": 'use languages as keys, as in {"en": ..., "de": ...}',
    "moses": "name its files by language, such as corpus.en and corpus.de",
    "po": "name its language in its header",
    "xliff": "name both languages in its <file>",
}
_NO_TAGS = {"bak", "csv", "doc", "htm", "log", "md", "pdf", "py", "rst", "sgm", "sh", "tar", "txt", "xml", "zip"}


@dataclass(frozen=True, kw_only=True)
class Split:
    """The part of a corpus that is meant, such as that to train on; `holdout` chooses it."""

    kept: bytes = field(repr=False)  # for each entry, pair or bad, in the order of reading: 1 if it belongs to the part
    stamps: tuple[tuple[str, int, int], ...]  # of the files for which this holds: `Corpus.fingerprint`
    pairs: int  # in this part
    of: int  # pairs of the corpus
    targets: bool  # no pair of the other part has the same target; False: this is known of sources alone


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Parallel text: iterate over it for each `Pair` and, where a line or unit is none, a `Bad`."""

    name: str  # as typed, without the weight
    weight: float = 1.0
    languages: Languages  # as asked for; a side that was left open is as the files say, None if they do not
    parts: tuple[Part, ...]
    others: tuple[tuple[str, Part], ...] = ()  # what stands beside: ("valid", a part of it), ("test", a part of it)
    ignored: tuple[str, ...] = ()  # parallel text in its folder that is not read, as `more.tsv (the reason)`
    options: Reading = PLAIN
    split: Split | None = None  # None: all of it

    def __iter__(self) -> Iterator[Pair | Bad]:
        """Every unit of every file, or of the part of it that is meant."""
        if self.split is None:
            return self._entries()
        if self.split.stamps != tuple(self.fingerprint()):
            raise CorpusError(f"{self.name} has changed since a part of it was held out: start again")
        return compress(self._entries(), self.split.kept)

    def _entries(self) -> Iterator[Pair | Bad]:
        """A file of a folder that holds other languages is passed over, unless all do."""
        refused: list[tags.OtherLanguages] = []
        for part in self.parts:
            try:
                yield from formats.read(part, self.languages, self.options)
            except tags.OtherLanguages as error:
                refused.append(error)
                if len(refused) == len(self.parts):
                    raise
                yield Bad("a file in other languages", part.files[0].name, 1, str(error))

    @property
    def files(self) -> tuple[str, ...]:
        """The names of its files, as a person knows them."""
        return tuple(file.name for part in self.parts for file in part.files)

    def fingerprint(self) -> list[tuple[str, int, int]]:
        """Absolute path, size and time of change (ns) of each file: differs when the data do."""
        return [_stamp(file) for part in self.parts for file in part.files]

    def beside(self, split: str) -> Corpus | None:
        """All files for `valid` or `test` in the same folder, or None."""
        parts = tuple(part for name, part in self.others if name == split)
        return replace(self, parts=parts, others=(), ignored=(), split=None) if parts else None


def _stamp(file: File) -> tuple[str, int, int]:
    if file.path is None or not file.is_regular:
        raise _only_once(file)
    status = file.path.stat()
    return str(file.path.absolute()), status.st_size, status.st_mtime_ns


def _only_once(file: File) -> CorpusError:
    return CorpusError(f"{file.name} can be read only once: save it to a file and name that file")


def corpora(names: Sequence[str], languages: Languages = ANY, options: Reading = PLAIN) -> list[Corpus]:
    """The corpora that a person named, in order; for `en` to `de,fr` each gives one for each pair of languages."""
    if isinstance(names, str):  # which is a sequence of letters
        names = [names]
    pairs = _combinations(languages)
    found = [[_corpus(name, pair, options) for pair in pairs] for name in names]
    for same in found:
        _check_labels(same)
    return [corpus for same in found for corpus in same]


def _check_labels(same: Sequence[Corpus]) -> None:
    """The files of one name, as each pair of languages reads them: no text may pass as German and as French."""
    readers: dict[Part, list[Languages]] = {}
    for corpus in same:
        for part in (*corpus.parts, *(part for _, part in corpus.others)):
            readers.setdefault(part, []).append(corpus.languages)
    for part, asked in readers.items():
        if len(asked) > 1 and not part.files[0].is_regular:
            raise _only_once(part.files[0])
        if len(asked) > 1 and formats.is_ambiguous(part, asked):
            first, second = ("-".join(filter(None, (pair.source, pair.target))) for pair in asked[:2])
            raise CorpusError(
                f"{part.files[0].name} does not say its languages, so that it would be read as {first} and as {second} "
                f"alike: {_LABELS.get(part.format, 'name them in it')}, or give only one --src and one --tgt"
            )


def _combinations(languages: Languages) -> list[Languages]:
    """Every source with every target, but no language with itself."""
    sources, targets = _listed(languages.source), _listed(languages.target)
    pairs = [Languages(s, t) for s, t in product(sources, targets) if not (s and t) or normal_tag(s) != normal_tag(t)]
    if not pairs:
        raise CorpusError(f"--src and --tgt are both {languages.source}: name two different languages")
    return list(dict.fromkeys(pairs))


def _listed(asked: str | None) -> list[str] | list[None]:
    if asked is None:
        return [None]
    found = [tag.strip() for tag in asked.split(",")]
    for tag in found:
        if not _TAG.fullmatch(tag):
            raise CorpusError(f"`{tag}` is not a language tag: write en, de or pt-BR, or several with commas")
    return found


def _corpus(typed: str, languages: Languages, options: Reading) -> Corpus:
    name, weight = _weighted(typed)
    if not name:
        raise CorpusError(
            "the name of a corpus is empty: give a file, a folder, a built-in name, or - for standard input"
        )
    corpus = Corpus(name=name, weight=weight, languages=languages, parts=(), options=options)
    if name == "-":
        return replace(corpus, parts=(Part(None, (File(None),)),))
    return _told(_located(corpus, _path(name)))


def _located(corpus: Corpus, path: Path) -> Corpus:
    """With the files that its name means."""
    name, languages = corpus.name, corpus.languages
    if path.is_dir():
        return _folder(corpus, path)
    if path.exists():
        return _file(corpus, path)
    if group := [item for item in _items(path.parent) if item.stem == path.name and item.tag]:
        return _pair(corpus, path, group, languages)
    from attent.data import builtin  # here, since few corpora need what it imports

    if name in builtin.NAMES:
        return _folder(corpus, builtin.folder(name, languages))
    raise _nothing_there(name, path, list(builtin.NAMES))


def _told(corpus: Corpus) -> Corpus:
    """With the languages that were left open as its files themselves name them, if they all agree."""
    asked = corpus.languages
    if (asked.source and asked.target) or not all(file.is_regular for part in corpus.parts for file in part.files):
        return corpus
    found = [formats.declared(part) for part in corpus.parts]
    sources = {tags.primary(one.source): one.source for one in found if one.source}
    targets = {tags.primary(one.target): one.target for one in found if one.target}
    source, target = next(iter(sources.values()), None), next(iter(targets.values()), None)
    swapped = tags.swapped(asked, Languages(source, target))
    if len(sources) > 1 or len(targets) > 1 or swapped is None:
        raise tags.error(corpus.name, asked, [*sources, *targets])
    return replace(corpus, languages=tags.settled(asked, *((target, source) if swapped else (source, target))))


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # `~someone` without a home
        return Path(name)


def _weighted(typed: str) -> tuple[str, float]:
    """`a.tsv:3` is `a.tsv` with weight 3, unless there is a file of that whole name."""
    name, colon, tail = typed.rpartition(":")
    if not colon or not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)", tail) or _path(typed).exists():
        return typed, 1.0
    weight = float(tail)
    if weight <= 0:
        raise CorpusError(f"{typed}: a weight must be greater than 0, but is {tail}; leave the corpus out instead")
    return name, weight


def _nothing_there(name: str, path: Path, built_in: Sequence[str]) -> CorpusError:
    siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, [*siblings, *built_in], n=1, cutoff=0.75)
    guess = f"did you mean {path.parent / near[0] if near[0] in siblings else near[0]}?" if near else "check the path"
    return CorpusError(f"{name}: there is no such file or folder; {guess}")


# A folder, and what stands in it.


@dataclass(frozen=True)
class _Item:
    """A file in a folder, and what its name says."""

    path: Path

    @property
    def stem(self) -> str:
        """The name without format, language and compression: what the two files of a pair share."""
        return formats.plain(self.path.name).rpartition(".")[0]

    @property
    def tag(self) -> str | None:
        """The language (or role, such as `src`) that the suffix tells, if it can be one."""
        suffix = formats.plain(self.path.name).rpartition(".")[2]
        is_tag = _TAG.fullmatch(suffix) or any(suffix in roles for roles in formats.ROLES)
        if not self.stem or not is_tag or suffix in _NO_TAGS or formats.by_name(self.path.name):
            return None
        return suffix


def _items(folder: Path) -> list[_Item]:
    """The files of a folder by name. Of a file and its compressed copy only the first is taken: it is one text."""
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [_Item(path) for path in {formats.plain(path.name): path for path in reversed(paths)}.values()][::-1]


def _folder(corpus: Corpus, folder: Path) -> Corpus:
    """All of it, or its train part with the others beside it."""
    items = _items(folder)
    found = _parts(items, corpus.languages)
    if not found:
        raise _unreadable(corpus, items)
    _check_sides(items, folder, corpus.languages)
    splits: dict[str | None, list[Part]] = {}
    for stem, part in found:
        splits.setdefault(split_of(stem), []).append(part)
    main = next((split for split in ("train", None) if split in splits), next(iter(splits)))
    if main in ("valid", "test") and len(splits) > 1:
        raise CorpusError(f"{corpus.name} has no file for training: name one of {_listing(found)}")
    others = tuple((split, part) for split, parts in splits.items() if split and split != main for part in parts)
    left = [] if main is None else splits.get(None, [])
    ignored = [
        *(f"{file.path.name} (not a {main} file)" for part in left for file in part.files if file.path),
        *(f"{item.path.name} (no translation beside it)" for item in _alone(items, corpus.languages)),
    ]
    return replace(corpus, parts=tuple(splits[main]), others=others, ignored=tuple(sorted(ignored)))


def _check_sides(items: Sequence[_Item], folder: Path, asked: Languages) -> None:
    """Moses pairs of which nobody said which side is the source: to read only the rest would be a surprise."""
    for stem, members in _groups(items):
        known = [tag for tag in members if tags.is_language(tag) and tags.answers(asked, tag)]
        if None in (asked.source, asked.target) and len(known) > 1 and _sides(list(members), asked) is None:
            raise tags.error(str(folder / stem), asked, known)


def _alone(items: Sequence[_Item], asked: Languages) -> list[_Item]:
    """Files of Moses pairs whose other side is missing. A suffix that is no language says nothing."""
    roles = {role for pair in formats.ROLES for role in pair}
    groups = [members for _, members in _groups(items) if _sides(list(members), asked) is None]
    loose = {path: tag for members in groups for tag, path in members.items()}
    meant = {tag for tag in loose.values() if tag in roles or (tags.is_language(tag) and tags.answers(asked, tag))}
    return [item for item in items if loose.get(item.path) in meant]


def _listing(found: Sequence[tuple[str, Part]]) -> str:
    return ", ".join(file.name for _, part in found[:5] for file in part.files)


def _unreadable(corpus: Corpus, items: Sequence[_Item]) -> CorpusError:
    found = {item.tag for item in items if item.tag}
    if found:
        return tags.error(corpus.name, corpus.languages, found)
    return CorpusError(f"{corpus.name}: no file in this folder is parallel text: attent reads {formats.KNOWN}")


def split_of(stem: str) -> str | None:
    """`train`, `valid` or `test` when a name begins so: `train500k`, `test_2016_flickr`, but not `testimony`."""
    return next((name for name, begin in _SPLITS.items() if re.match(rf"({begin})(?![a-z])", stem.lower())), None)


def _parts(items: Sequence[_Item], languages: Languages) -> list[tuple[str, Part]]:
    """Every file of a known format and every Moses pair in these languages, each with its stem, by name."""
    found = [(item.stem, Part(kind, (File(item.path),))) for item in items if (kind := formats.by_name(item.path.name))]
    for stem, members in _groups(items):
        if chosen := _sides(list(members), languages):
            found.append((stem, Part("moses", tuple(File(members[tag]) for tag in chosen))))
    return sorted(found, key=lambda pair: pair[0])


def _groups(items: Sequence[_Item]) -> list[tuple[str, dict[str, Path]]]:
    """Files whose names differ in the language only, by what they share."""
    groups: dict[str, dict[str, Path]] = {}
    for item in items:
        if item.tag:
            groups.setdefault(item.stem, {})[item.tag] = item.path
    return sorted(groups.items())


def _sides(found: Sequence[str], languages: Languages) -> tuple[str, str] | None:
    """Which two of a Moses group are source and target. Two suffixes alone do not tell which is which."""
    for roles in formats.ROLES:
        if roles[0] in found and roles[1] in found:
            return roles
    return tags.sides(languages, tuple(found)) if languages != ANY else None


# A file.


def _file(corpus: Corpus, path: Path) -> Corpus:
    item = _Item(path)
    kind = formats.by_name(path.name)
    if kind is None and item.tag:
        group = [other for other in _items(path.parent) if other.stem == item.stem and other.tag != item.tag]
        return _pair(corpus, path, [item, *group], corpus.languages)
    if kind is None:
        _check_guess(path)
    part = Part(kind, (File(path),))
    return replace(corpus, parts=(part,), others=_beside(path, part, item.stem, corpus.languages))


def _check_guess(path: Path) -> None:
    """A name that says nothing: only content that says it clearly is read. What can be read but once is trusted."""
    if not path.is_file():
        return
    head, _ = files.beginning(File(path).blocks())
    first = next(files.lines([head], str(path)), "")
    if formats.sniff(head, str(path)) == "tsv" and (isinstance(first, Bad) or "\t" not in first):
        raise CorpusError(
            f"{path}: this format is not known: attent reads {formats.KNOWN}; text without translations is for "
            "attent train --task lm or mlm"
        )


def _pair(corpus: Corpus, path: Path, group: Sequence[_Item], languages: Languages) -> Corpus:
    """A Moses pair by the name of one of its files or by what both names share."""
    members = {item.tag: item.path for item in group if item.tag}
    typed = next((tag for tag, member in members.items() if member == path), None)
    asked = Languages(typed, None) if typed and languages == ANY else languages
    chosen = _sides(list(members), asked)
    if chosen is None or (typed and typed not in chosen):
        raise _no_pair(path, typed, members, asked)
    part = Part("moses", tuple(File(members[tag]) for tag in chosen))
    told = asked if chosen in formats.ROLES else Languages(*chosen)
    return replace(corpus, parts=(part,), others=_beside(path, part, group[0].stem, told))


def _no_pair(path: Path, typed: str | None, members: dict[str, Path], asked: Languages) -> CorpusError:
    others = ", ".join(sorted(tag for tag in members if tag != typed))
    if typed is None:
        return tags.error(str(path), asked, members)
    if not others:
        other = asked.target if asked.source and matches(asked.source, typed) else asked.source
        name = f"{_Item(path).stem}.{other or 'de'}"
        return CorpusError(f"{path} has no translation beside it: put {name} there, or name a file that holds both")
    if asked.source is None or asked.target is None:
        return CorpusError(f"{path} has several files beside it: choose one of {others} with --src and --tgt")
    wanted = f"{asked.source} and {asked.target}"
    return CorpusError(f"{path} and what stands beside it ({others}) are not {wanted}: change --src and --tgt")


def _beside(path: Path, part: Part, stem: str, languages: Languages) -> tuple[tuple[str, Part], ...]:
    """The validation and test files in the folder of a train file, of the same format."""
    if split_of(stem) != "train":
        return ()
    found = [(split_of(s), other) for s, other in _parts(_items(path.parent), languages) if other.format == part.format]
    return tuple((split, other) for split, other in found if split in ("valid", "test"))
