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

from attent.data.formats import language_tags, registry, streams
from attent.data.formats.language_tags import ANY_LANGUAGES
from attent.data.formats.registry import DEFAULT_READ_OPTIONS, FormatName, ParallelFile, ReadOptions
from attent.data.formats.streams import InputFile
from attent.data.pairs import BadLine, CorpusError, LanguagePair, Pair, is_tag_match, normalize_tag

__all__ = ["Corpus", "CorpusSplit", "ReadOptions", "open_corpora"]

_SPLIT_PATTERNS = {"train": r"train(ing)?", "valid": r"val(id(ation)?)?|dev", "test": r"test(ing)?"}
_LANGUAGE_TAG = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]+)*")
_LABELING_ADVICE: dict[FormatName | None, str] = {  # how a file says its languages
    "tsv": "name its columns in a first line such as en<TAB>de<TAB>fr",
    "jsonl": 'use languages as keys, as in {"en": ..., "de": ...}',
    "moses": "name its files by language, such as corpus.en and corpus.de",
    "po": "name its language in its header",
    "xliff": "name both languages in its <file>",
}
_NON_LANGUAGE_SUFFIXES = {
    "bak",
    "csv",
    "doc",
    "htm",
    "log",
    "md",
    "pdf",
    "py",
    "rst",
    "sgm",
    "sh",
    "tar",
    "txt",
    "xml",
    "zip",
}


@dataclass(frozen=True, kw_only=True)
class CorpusSplit:
    """The part of a corpus that is meant, such as that to train on; `holdout` chooses it."""

    membership: bytes = field(
        repr=False
    )  # for each entry, pair or bad, in the order of reading: 1 if it belongs to the part
    fingerprint: tuple[tuple[str, int, int], ...]  # of the files for which this holds: `Corpus.fingerprint`
    pair_count: int  # in this part
    corpus_pair_count: int  # pairs of the corpus
    has_disjoint_targets: bool  # no pair of the other part has the same target; False: this is known of sources alone


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Parallel text: iterate over it for each `Pair` and, where a line or unit is none, a `Bad`."""

    name: str  # as typed, without the weight
    weight: float = 1.0
    languages: LanguagePair  # as asked for; a side that was left open is as the files say, None if they do not
    parallel_files: tuple[ParallelFile, ...]
    sibling_files: tuple[
        tuple[str, ParallelFile], ...
    ] = ()  # what stands beside: ("valid", a part of it), ("test", a part of it)
    ignored_files: tuple[str, ...] = ()  # parallel text in its folder that is not read, as `more.tsv (the reason)`
    options: ReadOptions = DEFAULT_READ_OPTIONS
    split: CorpusSplit | None = None  # None: all of it

    def __iter__(self) -> Iterator[Pair | BadLine]:
        """Every unit of every file, or of the part of it that is meant."""
        if self.split is None:
            return self._read_items()
        if self.split.fingerprint != tuple(self.fingerprint()):
            raise CorpusError(f"{self.name} has changed since a part of it was held out: start again")
        return compress(self._read_items(), self.split.membership)

    def _read_items(self) -> Iterator[Pair | BadLine]:
        """A file of a folder that holds other languages is passed over, unless all do."""
        refused: list[language_tags.LanguageMismatchError] = []
        for part in self.parallel_files:
            try:
                yield from registry.read_pairs(part, self.languages, self.options)
            except language_tags.LanguageMismatchError as error:
                refused.append(error)
                if len(refused) == len(self.parallel_files):
                    raise
                yield BadLine("a file in other languages", part.files[0].name, 1, str(error))

    @property
    def file_names(self) -> tuple[str, ...]:
        """The names of its files, as a person knows them."""
        return tuple(file.name for part in self.parallel_files for file in part.files)

    def fingerprint(self) -> list[tuple[str, int, int]]:
        """Absolute path, size and time of change (ns) of each file: differs when the data do."""
        return [_get_file_stamp(file) for part in self.parallel_files for file in part.files]

    def get_sibling_split(self, split: str) -> Corpus | None:
        """All files for `valid` or `test` in the same folder, or None."""
        parts = tuple(part for name, part in self.sibling_files if name == split)
        return replace(self, parallel_files=parts, sibling_files=(), ignored_files=(), split=None) if parts else None


def _get_file_stamp(file: InputFile) -> tuple[str, int, int]:
    if file.path is None or not file.is_regular:
        raise _make_read_once_error(file)
    status = file.path.stat()
    return str(file.path.absolute()), status.st_size, status.st_mtime_ns


def _make_read_once_error(file: InputFile) -> CorpusError:
    return CorpusError(f"{file.name} can be read only once: save it to a file and name that file")


def open_corpora(
    names: Sequence[str], languages: LanguagePair = ANY_LANGUAGES, options: ReadOptions = DEFAULT_READ_OPTIONS
) -> list[Corpus]:
    """The corpora that a person named, in order; for `en` to `de,fr` each gives one for each pair of languages."""
    if isinstance(names, str):  # which is a sequence of letters
        names = [names]
    pairs = _expand_language_pairs(languages)
    found = [[_open_corpus(name, pair, options) for pair in pairs] for name in names]
    for same in found:
        _check_languages_declared(same)
    return [corpus for same in found for corpus in same]


def _check_languages_declared(corpora: Sequence[Corpus]) -> None:
    """The files of one name, as each pair of languages reads them: no text may pass as German and as French."""
    readers: dict[ParallelFile, list[LanguagePair]] = {}
    for corpus in corpora:
        for part in (*corpus.parallel_files, *(part for _, part in corpus.sibling_files)):
            readers.setdefault(part, []).append(corpus.languages)
    for part, asked in readers.items():
        if len(asked) > 1 and not part.files[0].is_regular:
            raise _make_read_once_error(part.files[0])
        if len(asked) > 1 and registry.is_language_ambiguous(part, asked):
            first, second = ("-".join(filter(None, (pair.source, pair.target))) for pair in asked[:2])
            raise CorpusError(
                f"{part.files[0].name} does not say its languages, so that it would be read as {first} and as {second} "
                f"alike: {_LABELING_ADVICE.get(part.format, 'name them in it')}, or give only one --src and one --tgt"
            )


def _expand_language_pairs(languages: LanguagePair) -> list[LanguagePair]:
    """Every source with every target, but no language with itself."""
    sources, targets = _parse_tags(languages.source), _parse_tags(languages.target)
    pairs = [
        LanguagePair(s, t)
        for s, t in product(sources, targets)
        if not (s and t) or normalize_tag(s) != normalize_tag(t)
    ]
    if not pairs:
        raise CorpusError(f"--src and --tgt are both {languages.source}: name two different languages")
    return list(dict.fromkeys(pairs))


def _parse_tags(requested: str | None) -> list[str] | list[None]:
    if requested is None:
        return [None]
    found = [tag.strip() for tag in requested.split(",")]
    for tag in found:
        if not _LANGUAGE_TAG.fullmatch(tag):
            raise CorpusError(f"`{tag}` is not a language tag: write en, de or pt-BR, or several with commas")
    return found


def _open_corpus(typed: str, languages: LanguagePair, options: ReadOptions) -> Corpus:
    name, weight = _parse_weight(typed)
    if not name:
        raise CorpusError(
            "the name of a corpus is empty: give a file, a folder, a built-in name, or - for standard input"
        )
    corpus = Corpus(name=name, weight=weight, languages=languages, parallel_files=(), options=options)
    if name == "-":
        return replace(corpus, parallel_files=(ParallelFile(None, (InputFile(None),)),))
    return _fill_declared_languages(_locate_files(corpus, _expand_path(name)))


def _locate_files(corpus: Corpus, path: Path) -> Corpus:
    """With the files that its name means."""
    name, languages = corpus.name, corpus.languages
    if path.is_dir():
        return _open_folder(corpus, path)
    if path.exists():
        return _open_file(corpus, path)
    if group := [item for item in _list_files(path.parent) if item.stem == path.name and item.language_tag]:
        return _open_moses_pair(corpus, path, group, languages)
    from attent.data import builtin  # here, since few corpora need what it imports

    if name in builtin.BUILTIN_CORPORA:
        return _open_folder(corpus, builtin.get_corpus_folder(name, languages))
    raise _make_not_found_error(name, path, list(builtin.BUILTIN_CORPORA))


def _fill_declared_languages(corpus: Corpus) -> Corpus:
    """With the languages that were left open as its files themselves name them, if they all agree."""
    asked = corpus.languages
    if (asked.source and asked.target) or not all(
        file.is_regular for part in corpus.parallel_files for file in part.files
    ):
        return corpus
    found = [registry.read_declared_languages(part) for part in corpus.parallel_files]
    sources = {language_tags.get_primary_subtag(one.source): one.source for one in found if one.source}
    targets = {language_tags.get_primary_subtag(one.target): one.target for one in found if one.target}
    source, target = next(iter(sources.values()), None), next(iter(targets.values()), None)
    swapped = language_tags.is_reversed(asked, LanguagePair(source, target))
    if len(sources) > 1 or len(targets) > 1 or swapped is None:
        raise language_tags.make_mismatch_error(corpus.name, asked, [*sources, *targets])
    return replace(
        corpus, languages=language_tags.fill_open_sides(asked, *((target, source) if swapped else (source, target)))
    )


def _expand_path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # `~someone` without a home
        return Path(name)


def _parse_weight(typed: str) -> tuple[str, float]:
    """`a.tsv:3` is `a.tsv` with weight 3, unless there is a file of that whole name."""
    name, colon, tail = typed.rpartition(":")
    if not colon or not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)", tail) or _expand_path(typed).exists():
        return typed, 1.0
    weight = float(tail)
    if weight <= 0:
        raise CorpusError(f"{typed}: a weight must be greater than 0, but is {tail}; leave the corpus out instead")
    return name, weight


def _make_not_found_error(name: str, path: Path, built_in: Sequence[str]) -> CorpusError:
    siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, [*siblings, *built_in], n=1, cutoff=0.75)
    guess = f"did you mean {path.parent / near[0] if near[0] in siblings else near[0]}?" if near else "check the path"
    return CorpusError(f"{name}: there is no such file or folder; {guess}")


# A folder, and what stands in it.


@dataclass(frozen=True)
class _FolderFile:
    """A file in a folder, and what its name says."""

    path: Path

    @property
    def stem(self) -> str:
        """The name without format, language and compression: what the two files of a pair share."""
        return registry.strip_compression_suffix(self.path.name).rpartition(".")[0]

    @property
    def language_tag(self) -> str | None:
        """The language (or role, such as `src`) that the suffix tells, if it can be one."""
        suffix = registry.strip_compression_suffix(self.path.name).rpartition(".")[2]
        is_tag = _LANGUAGE_TAG.fullmatch(suffix) or any(suffix in roles for roles in registry.MOSES_ROLES)
        if not self.stem or not is_tag or suffix in _NON_LANGUAGE_SUFFIXES or registry.detect_format(self.path.name):
            return None
        return suffix


def _list_files(folder: Path) -> list[_FolderFile]:
    """The files of a folder by name. Of a file and its compressed copy only the first is taken: it is one text."""
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [
        _FolderFile(path)
        for path in {registry.strip_compression_suffix(path.name): path for path in reversed(paths)}.values()
    ][::-1]


def _open_folder(corpus: Corpus, folder: Path) -> Corpus:
    """All of it, or its train part with the others beside it."""
    items = _list_files(folder)
    found = _find_parallel_files(items, corpus.languages)
    if not found:
        raise _make_unreadable_error(corpus, items)
    _check_sides_known(items, folder, corpus.languages)
    splits: dict[str | None, list[ParallelFile]] = {}
    for stem, part in found:
        splits.setdefault(detect_split(stem), []).append(part)
    main = next((split for split in ("train", None) if split in splits), next(iter(splits)))
    if main in ("valid", "test") and len(splits) > 1:
        raise CorpusError(f"{corpus.name} has no file for training: name one of {_format_file_list(found)}")
    others = tuple((split, part) for split, parts in splits.items() if split and split != main for part in parts)
    left = [] if main is None else splits.get(None, [])
    ignored = [
        *(f"{file.path.name} (not a {main} file)" for part in left for file in part.files if file.path),
        *(f"{item.path.name} (no translation beside it)" for item in _find_unpaired(items, corpus.languages)),
    ]
    return replace(
        corpus, parallel_files=tuple(splits[main]), sibling_files=others, ignored_files=tuple(sorted(ignored))
    )


def _check_sides_known(folder_files: Sequence[_FolderFile], folder: Path, requested: LanguagePair) -> None:
    """Moses pairs of which nobody said which side is the source: to read only the rest would be a surprise."""
    for stem, members in _group_by_stem(folder_files):
        known = [
            tag
            for tag in members
            if language_tags.is_known_language(tag) and language_tags.is_requested(requested, tag)
        ]
        if (
            None in (requested.source, requested.target)
            and len(known) > 1
            and _choose_sides(list(members), requested) is None
        ):
            raise language_tags.make_mismatch_error(str(folder / stem), requested, known)


def _find_unpaired(folder_files: Sequence[_FolderFile], requested: LanguagePair) -> list[_FolderFile]:
    """Files of Moses pairs whose other side is missing. A suffix that is no language says nothing."""
    roles = {role for pair in registry.MOSES_ROLES for role in pair}
    groups = [members for _, members in _group_by_stem(folder_files) if _choose_sides(list(members), requested) is None]
    loose = {path: tag for members in groups for tag, path in members.items()}
    meant = {
        tag
        for tag in loose.values()
        if tag in roles or (language_tags.is_known_language(tag) and language_tags.is_requested(requested, tag))
    }
    return [item for item in folder_files if loose.get(item.path) in meant]


def _format_file_list(parallel_files: Sequence[tuple[str, ParallelFile]]) -> str:
    return ", ".join(file.name for _, part in parallel_files[:5] for file in part.files)


def _make_unreadable_error(corpus: Corpus, folder_files: Sequence[_FolderFile]) -> CorpusError:
    found = {item.language_tag for item in folder_files if item.language_tag}
    if found:
        return language_tags.make_mismatch_error(corpus.name, corpus.languages, found)
    return CorpusError(
        f"{corpus.name}: no file in this folder is parallel text: attent reads {registry.SUPPORTED_FORMATS}"
    )


def detect_split(stem: str) -> str | None:
    """`train`, `valid` or `test` when a name begins so: `train500k`, `test_2016_flickr`, but not `testimony`."""
    return next(
        (name for name, begin in _SPLIT_PATTERNS.items() if re.match(rf"({begin})(?![a-z])", stem.lower())), None
    )


def _find_parallel_files(
    folder_files: Sequence[_FolderFile], languages: LanguagePair
) -> list[tuple[str, ParallelFile]]:
    """Every file of a known format and every Moses pair in these languages, each with its stem, by name."""
    found = [
        (item.stem, ParallelFile(kind, (InputFile(item.path),)))
        for item in folder_files
        if (kind := registry.detect_format(item.path.name))
    ]
    for stem, members in _group_by_stem(folder_files):
        if chosen := _choose_sides(list(members), languages):
            found.append((stem, ParallelFile("moses", tuple(InputFile(members[tag]) for tag in chosen))))
    return sorted(found, key=lambda pair: pair[0])


def _group_by_stem(folder_files: Sequence[_FolderFile]) -> list[tuple[str, dict[str, Path]]]:
    """Files whose names differ in the language only, by what they share."""
    groups: dict[str, dict[str, Path]] = {}
    for item in folder_files:
        if item.language_tag:
            groups.setdefault(item.stem, {})[item.language_tag] = item.path
    return sorted(groups.items())


def _choose_sides(available: Sequence[str], languages: LanguagePair) -> tuple[str, str] | None:
    """Which two of a Moses group are source and target. Two suffixes alone do not tell which is which."""
    for roles in registry.MOSES_ROLES:
        if roles[0] in available and roles[1] in available:
            return roles
    return language_tags.choose_sides(languages, tuple(available)) if languages != ANY_LANGUAGES else None


# A file.


def _open_file(corpus: Corpus, path: Path) -> Corpus:
    item = _FolderFile(path)
    kind = registry.detect_format(path.name)
    if kind is None and item.language_tag:
        group = [
            other
            for other in _list_files(path.parent)
            if other.stem == item.stem and other.language_tag != item.language_tag
        ]
        return _open_moses_pair(corpus, path, [item, *group], corpus.languages)
    if kind is None:
        _check_sniffed_format(path)
    part = ParallelFile(kind, (InputFile(path),))
    return replace(
        corpus, parallel_files=(part,), sibling_files=_find_sibling_splits(path, part, item.stem, corpus.languages)
    )


def _check_sniffed_format(path: Path) -> None:
    """A name that says nothing: only content that says it clearly is read. What can be read but once is trusted."""
    if not path.is_file():
        return
    head, _ = streams.peek_head(InputFile(path).read_blocks())
    first = next(streams.read_lines([head], str(path)), "")
    if registry.sniff_format(head, str(path)) == "tsv" and (isinstance(first, BadLine) or "\t" not in first):
        raise CorpusError(
            f"{path}: this format is not known: attent reads {registry.SUPPORTED_FORMATS}; text without translations is for "
            "attent train --task lm or mlm"
        )


def _open_moses_pair(corpus: Corpus, path: Path, group: Sequence[_FolderFile], languages: LanguagePair) -> Corpus:
    """A Moses pair by the name of one of its files or by what both names share."""
    members = {item.language_tag: item.path for item in group if item.language_tag}
    typed = next((tag for tag, member in members.items() if member == path), None)
    asked = LanguagePair(typed, None) if typed and languages == ANY_LANGUAGES else languages
    chosen = _choose_sides(list(members), asked)
    if chosen is None or (typed and typed not in chosen):
        raise _make_no_pair_error(path, typed, members, asked)
    part = ParallelFile("moses", tuple(InputFile(members[tag]) for tag in chosen))
    told = asked if chosen in registry.MOSES_ROLES else LanguagePair(*chosen)
    return replace(corpus, parallel_files=(part,), sibling_files=_find_sibling_splits(path, part, group[0].stem, told))


def _make_no_pair_error(
    path: Path, typed: str | None, members: dict[str, Path], requested: LanguagePair
) -> CorpusError:
    others = ", ".join(sorted(tag for tag in members if tag != typed))
    if typed is None:
        return language_tags.make_mismatch_error(str(path), requested, members)
    if not others:
        other = requested.target if requested.source and is_tag_match(requested.source, typed) else requested.source
        name = f"{_FolderFile(path).stem}.{other or 'de'}"
        return CorpusError(f"{path} has no translation beside it: put {name} there, or name a file that holds both")
    if requested.source is None or requested.target is None:
        return CorpusError(f"{path} has several files beside it: choose one of {others} with --src and --tgt")
    wanted = f"{requested.source} and {requested.target}"
    return CorpusError(f"{path} and what stands beside it ({others}) are not {wanted}: change --src and --tgt")


def _find_sibling_splits(
    path: Path, parallel_file: ParallelFile, stem: str, languages: LanguagePair
) -> tuple[tuple[str, ParallelFile], ...]:
    """The validation and test files in the folder of a train file, of the same format."""
    if detect_split(stem) != "train":
        return ()
    found = [
        (detect_split(s), other)
        for s, other in _find_parallel_files(_list_files(path.parent), languages)
        if other.format == parallel_file.format
    ]
    return tuple((split, other) for split, other in found if split in ("valid", "test"))
