"""Corpora by name: paths with weights, Moses pairs, folders, `-` for standard input, built-in names.

A `Corpus` describes the files: it is cheap to create and reads them each time that it is iterated over.
"""

import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import compress, product
from os.path import expanduser
from pathlib import Path
from typing import NamedTuple

from attent.data.formats import registry, streams
from attent.data.formats.registry import ParallelFile
from attent.data.formats.streams import InputFile, strip_compression_suffix
from attent.data.pairs import (
    ANY_LANGUAGES,
    DEFAULT_READ_OPTIONS,
    BadLine,
    CorpusError,
    LanguageMismatchError,
    LanguagePair,
    Pair,
    ReadOptions,
    choose_sides,
    detect_split,
)
from attent.text.language_id import find_wrong_sides
from attent.text.language_tags import (
    LANGUAGE_TAG,
    get_primary_subtag,
    is_known_language,
    is_same_language,
    is_tag_match,
    normalize_tag,
)
from attent.text.vocabulary import ContextWindow

__all__ = ["Corpus", "CorpusSplit", "ReadOptions", "open_corpora"]

_NON_LANGUAGE_SUFFIXES = frozenset("bak csv doc htm log md pdf py rst sgm sh tar txt xml zip".split())


@dataclass(frozen=True, kw_only=True)
class CorpusSplit:
    """A subset of a corpus, such as its training split; chosen by `split`."""

    membership: bytes = field(repr=False)  # 1 for each item (pair or bad line) of the subset, in reading order
    fingerprint: tuple[tuple[str, int, int], ...]  # `Corpus.fingerprint` of the files
    pair_count: int
    corpus_pair_count: int
    has_disjoint_targets: bool  # False: only the sources are known to be disjoint from those of the other split


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Parallel text. Iterating yields a `Pair` per line or unit, or a `BadLine`."""

    name: str  # as typed, without the weight
    weight: float = 1.0
    languages: LanguagePair  # as requested; open sides as the files declare them
    parallel_files: tuple[ParallelFile, ...]
    sibling_files: tuple[tuple[str, ParallelFile], ...] = ()  # ("valid" or "test", a file in the same folder)
    ignored_files: tuple[str, ...] = ()  # parallel text in the folder that is not read, as `more.tsv (the reason)`
    options: ReadOptions = DEFAULT_READ_OPTIONS
    split: CorpusSplit | None = None  # None: the whole corpus
    context: int = 0  # preceding sources that each pair gets

    def __iter__(self) -> Iterator[Pair | BadLine]:
        if self.split is None:
            return self._read_items()
        if self.split.fingerprint != tuple(self.fingerprint()):
            raise CorpusError(f"{self.name} has changed since a part of it was held out: start again")
        return compress(self._read_items(), self.split.membership)

    def _read_items(self) -> Iterator[Pair | BadLine]:
        """Read all files. A file in other languages is skipped, unless all are."""
        mismatches = 0
        for file in self.parallel_files:
            try:
                items = registry.read_pairs(file, self.languages, self.options)
                yield from _add_context(items, self.context) if self.context else items
            except LanguageMismatchError as error:
                mismatches += 1
                if mismatches == len(self.parallel_files):
                    raise
                yield BadLine("a file in other languages", file.name, 1, str(error))

    @property
    def input_files(self) -> list[InputFile]:
        return [file for parallel_file in self.parallel_files for file in parallel_file.files]

    @property
    def file_names(self) -> tuple[str, ...]:
        return tuple(file.name for file in self.input_files)

    def fingerprint(self) -> list[tuple[str, int, int]]:
        """Return absolute path, size and modification time (ns) of each file."""
        for file in self.input_files:
            if file.path is None or (file.path.exists() and not file.is_regular):
                raise _make_read_once_error(file)
        status = [(file.path, file.path.stat()) for file in self.input_files if file.path]
        return [(str(path.absolute()), stat.st_size, stat.st_mtime_ns) for path, stat in status]

    def get_sibling_split(self, split: str) -> "Corpus | None":
        """Return the `valid` or `test` files of the same folder, or None."""
        files = tuple(file for name, file in self.sibling_files if name == split)
        return replace(self, parallel_files=files, sibling_files=(), ignored_files=(), split=None) if files else None


def _add_context(items: Iterator[Pair | BadLine], size: int) -> Iterator[Pair | BadLine]:
    window = ContextWindow(size)
    for item in items:
        yield item._replace(context=window.prefix) if isinstance(item, Pair) else item
        text = item.source if isinstance(item, Pair) else item.excerpt
        if isinstance(item, Pair) or not text.strip():  # an empty line ends a document
            window.append(text)


def _make_read_once_error(file: InputFile) -> CorpusError:
    return CorpusError(f"{file.name} can be read only once: save it to a file and give its path")


def describe_wrong_languages(corpus: Corpus, pairs: Sequence[Pair], command: str) -> str | None:
    """Describe what is wrong if a sample of the pairs looks like the sides were swapped, or are in one language."""
    source, target = corpus.languages.source, corpus.languages.target
    if source is None or target is None or is_same_language(source, target):
        return None
    wrong = find_wrong_sides([pair.source for pair in pairs], [pair.target for pair in pairs], source, target)
    if not any(wrong):
        return None
    example = max(pairs[:100], key=lambda pair: min(len(pair.source), len(pair.target), 60))
    texts = f"“{example.source.strip()[:60]}” as {source}, “{example.target.strip()[:60]}” as {target}"
    if not all(wrong):
        side, tag = ("source", target) if wrong[0] else ("target", source)
        return f"{corpus.name}: both sides look like {tag} ({texts}); check the {side} side"
    file = corpus.parallel_files[0]
    if file.format == "moses":
        advice = f"exchange the names of {file.files[0].name} and {file.files[1].name}"
    elif file.files[0].is_regular and registry.read_declared_languages(file).tags:
        advice = f"exchange the languages that {file.name} declares"
    else:
        advice = f"run attent {command} with --src {target} --tgt {source}"
    return f"{corpus.name}: the two sides look swapped ({texts}); if they are, {advice}"


def open_corpora(
    names: Sequence[str],
    languages: LanguagePair = ANY_LANGUAGES,
    options: ReadOptions = DEFAULT_READ_OPTIONS,
    warn: Callable[[str], None] = warnings.warn,
) -> list[Corpus]:
    """Return the corpora in order; for `en` to `de,fr` each name gives one for each language pair that it has."""
    if isinstance(names, str):
        names = [names]
    combinations = product(_parse_tags(languages.source), _parse_tags(languages.target))
    pairs = [LanguagePair(s, t) for s, t in combinations if not (s and t) or normalize_tag(s) != normalize_tag(t)]
    if not pairs:
        raise CorpusError(f"--src and --tgt are both {languages.source}: give two different languages")
    for name in names:
        _warn_of_local_files(_parse_weight(name)[0], warn)
    groups = _open_language_pairs(names, dict.fromkeys(pairs), options)
    groups = [group for index, group in enumerate(groups) if not any(_is_other_side(group, g) for g in groups[:index])]
    for corpora in groups:
        _check_languages_declared(corpora)
    return [corpus for corpora in groups for corpus in corpora]


def _open_language_pairs(
    names: Sequence[str], pairs: Collection[LanguagePair], options: ReadOptions
) -> list[list[Corpus]]:
    """Return the corpora of each name. A name must have one of the pairs, and each pair must be in one corpus."""
    groups: list[list[Corpus]] = [[] for _ in names]
    mismatches: list[tuple[int, LanguagePair, LanguageMismatchError]] = []
    for pair in pairs:
        for index, name in enumerate(names):
            try:
                corpus = _open_corpus(name, pair, options)
                if len(pairs) > 1 and all(file.is_regular for file in corpus.input_files):
                    next((entry for entry in corpus if isinstance(entry, Pair)), None)  # most formats say it inside
                groups[index].append(corpus)
            except LanguageMismatchError as error:
                mismatches.append((index, pair, error))
    present_pairs = {corpus.languages for group in groups for corpus in group}
    for index, pair, mismatch in mismatches:
        if not groups[index] or pair not in present_pairs:
            raise mismatch
    return groups


def _is_other_side(group: Sequence[Corpus], earlier: Sequence[Corpus]) -> bool:
    """True if two names, such as text.en and text.de, are the two files of the same Moses pairs."""
    files, earlier_files = ([corpus.parallel_files for corpus in corpora] for corpora in (group, earlier))
    is_moses = all(file.format == "moses" for parallel_files in files for file in parallel_files)
    return is_moses and files == earlier_files and group[0].name != earlier[0].name


def _check_languages_declared(corpora: Sequence[Corpus]) -> None:
    """Refuse a file that several language pairs would read alike: no text may pass as German and as French."""
    requests: dict[ParallelFile, list[LanguagePair]] = {}
    for corpus in corpora:
        for file in (*corpus.parallel_files, *(file for _, file in corpus.sibling_files)):
            requests.setdefault(file, []).append(corpus.languages)
    for file, requested in requests.items():
        if len(requested) > 1 and not file.files[0].is_regular:
            raise _make_read_once_error(file.files[0])
        if len(requested) > 1 and registry.is_language_ambiguous(file, requested):
            first, second = ("-".join(pair.tags) for pair in requested[:2])
            advice = registry.FORMATS[file.format].labeling_advice if file.format else "declare them in it"
            problem = f"does not declare its languages and would be read as both {first} and {second}"
            raise CorpusError(f"{file.name} {problem}: {advice}, or give only one --src and one --tgt")


def _parse_tags(requested: str | None) -> list[str] | list[None]:
    if requested is None:
        return [None]
    tags = [tag.strip() for tag in requested.split(",")]
    for tag in tags:
        if not LANGUAGE_TAG.fullmatch(tag):
            raise CorpusError(f"`{tag}` is not a language tag: write en, de or pt-BR, or several with commas")
    return tags


def _open_corpus(typed: str, languages: LanguagePair, options: ReadOptions) -> Corpus:
    name, weight = _parse_weight(typed)
    if not name:
        advice = "give a file, a folder, a built-in name, or - for standard input"
        raise CorpusError(f"the name of a corpus is empty: {advice}")
    corpus = Corpus(name=name, weight=weight, languages=languages, parallel_files=(), options=options)
    if name == "-":
        return replace(corpus, parallel_files=(ParallelFile(None, (InputFile(None),)),))
    return _fill_declared_languages(_locate_files(corpus, Path(expanduser(name))))


def _locate_files(corpus: Corpus, path: Path) -> Corpus:
    from attent.data import builtin  # imported late: few corpora need it

    if corpus.name in builtin.BUILTIN_CORPORA:
        return _open_folder(corpus, builtin.get_corpus_folder(corpus.name, corpus.languages))
    if path.is_dir():
        return _open_folder(corpus, path)
    if path.exists():
        return _open_file(corpus, path)
    if group := _list_moses_files(path):
        return _open_moses_pair(corpus, path, group)
    siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, [*siblings, *builtin.BUILTIN_CORPORA], cutoff=0.75)
    guess = f"did you mean {path.parent / near[0] if near[0] in siblings else near[0]}?" if near else "check the path"
    raise CorpusError(f"{corpus.name}: there is no such file or folder; {guess}")


def _warn_of_local_files(name: str, warn: Callable[[str], None]) -> None:
    from attent.data import builtin  # imported late: few corpora need it

    with suppress(PermissionError):
        if name in builtin.BUILTIN_CORPORA and (Path(name).exists() or _list_moses_files(Path(name))):
            warn(f"using the built-in corpus {name}; to use your own, write ./{name}")


def _list_moses_files(path: Path) -> "list[_FolderFile]":
    """List the files whose common stem is this path."""
    return [file for file in _list_files(path.parent) if file.stem == path.name and file.language_tag]


def _fill_declared_languages(corpus: Corpus) -> Corpus:
    requested = corpus.languages
    if not requested.is_open or not all(file.is_regular for file in corpus.input_files):
        return corpus
    declared = [registry.read_declared_languages(file) for file in corpus.parallel_files]
    sources = {get_primary_subtag(pair.source): pair.source for pair in declared if pair.source}
    targets = {get_primary_subtag(pair.target): pair.target for pair in declared if pair.target}
    pair = LanguagePair(next(iter(sources.values()), None), next(iter(targets.values()), None))
    is_reversed = requested.is_reversed(pair)
    if len(sources) > 1 or len(targets) > 1 or is_reversed is None:
        raise requested.make_mismatch_error(corpus.name, [*sources, *targets])
    pair = pair.swap() if is_reversed else pair
    return replace(corpus, languages=requested.fill_open_sides(pair.source, pair.target))


def _parse_weight(typed: str) -> tuple[str, float]:
    """Split `a.tsv:3` into name and weight, unless there is a file of that whole name."""
    name, colon, tail = typed.rpartition(":")
    if not colon or not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)", tail) or Path(expanduser(typed)).exists():
        return typed, 1.0
    weight = float(tail)
    if weight <= 0:
        raise CorpusError(f"{typed}: a weight must be greater than 0, but is {tail}; leave the corpus out instead")
    return name, weight


class _FolderFile(NamedTuple):
    path: Path
    stem: str  # the name without format, language and compression, which both files of a pair share
    language_tag: str | None  # the suffix, if it can be a language or a role such as `src`


def _describe_file(path: Path) -> _FolderFile:
    stem, _, suffix = strip_compression_suffix(path.name).rpartition(".")
    is_tag = LANGUAGE_TAG.fullmatch(suffix) or any(suffix in roles for roles in registry.MOSES_ROLES)
    is_other = suffix in _NON_LANGUAGE_SUFFIXES or registry.detect_format(path.name)
    return _FolderFile(path, stem, suffix if stem and is_tag and not is_other else None)


def _list_files(folder: Path) -> list[_FolderFile]:
    """List the files of a folder by name. Of a file and its compressed copy only the first is listed."""
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())
    except (FileNotFoundError, NotADirectoryError):
        return []
    by_name = {strip_compression_suffix(path.name): path for path in reversed(paths)}
    return [_describe_file(path) for path in by_name.values()][::-1]


def _open_folder(corpus: Corpus, folder: Path) -> Corpus:
    """Read a whole folder, or its train split with the others as siblings."""
    folder_files = _list_files(folder)
    parallel_files = _find_parallel_files(folder_files, corpus.languages)
    if not parallel_files:
        if tags := {file.language_tag for file in folder_files if file.language_tag}:
            raise corpus.languages.make_mismatch_error(corpus.name, tags)
        problem = f"no file in this folder is parallel text: attent reads {registry.SUPPORTED_FORMATS}"
        raise CorpusError(f"{corpus.name}: {problem}")
    _check_sides_known(folder_files, folder, corpus.languages)
    splits: dict[str | None, list[ParallelFile]] = {}
    for stem, file in parallel_files:
        splits.setdefault(detect_split(stem), []).append(file)
    main = next((split for split in ("train", None) if split in splits), next(iter(splits)))
    if main in ("valid", "test") and len(splits) > 1:
        listed = ", ".join(side.name for _, file in parallel_files[:5] for side in file.files)
        raise CorpusError(f"{corpus.name} has no file for training: give one of {listed}")
    siblings = tuple((split, file) for split, files in splits.items() if split and split != main for file in files)
    unused = [] if main is None else splits.get(None, [])
    ignored = [
        *(f"{side.path.name} (not a {main} file)" for file in unused for side in file.files if side.path),
        *(f"{file.path.name} (without a translation)" for file in _find_unpaired(folder_files, corpus.languages)),
    ]
    ignored_files = tuple(sorted(ignored))
    return replace(corpus, parallel_files=tuple(splits[main]), sibling_files=siblings, ignored_files=ignored_files)


def _check_sides_known(folder_files: Sequence[_FolderFile], folder: Path, requested: LanguagePair) -> None:
    """Refuse Moses pairs without a known source side: to read only the other files would be a surprise."""
    for stem, members in _group_by_stem(folder_files):
        known = [tag for tag in members if is_known_language(tag) and requested.is_requested(tag)]
        if requested.is_open and len(known) > 1 and _choose_sides(list(members), requested) is None:
            raise requested.make_mismatch_error(str(folder / stem), known)


def _find_unpaired(folder_files: Sequence[_FolderFile], requested: LanguagePair) -> list[_FolderFile]:
    """Return the files of Moses pairs whose other side is missing. A suffix that is no language does not count."""
    roles = {role for pair in registry.MOSES_ROLES for role in pair}
    groups = [members for _, members in _group_by_stem(folder_files) if _choose_sides(list(members), requested) is None]
    known = {
        path
        for members in groups
        for tag, path in members.items()
        if tag in roles or (is_known_language(tag) and requested.is_requested(tag))
    }
    return [file for file in folder_files if file.path in known]


def _find_parallel_files(files: Sequence[_FolderFile], languages: LanguagePair) -> list[tuple[str, ParallelFile]]:
    """Return every file of a known format and every Moses pair in these languages, with its stem, sorted by it."""
    parallel_files = [
        (file.stem, ParallelFile(key, (InputFile(file.path),)))
        for file in files
        if (key := registry.detect_format(file.path.name))
    ]
    for stem, members in _group_by_stem(files):
        if sides := _choose_sides(list(members), languages):
            parallel_files.append((stem, ParallelFile("moses", tuple(InputFile(members[tag]) for tag in sides))))
    return sorted(parallel_files, key=lambda pair: pair[0])


def _group_by_stem(folder_files: Sequence[_FolderFile]) -> list[tuple[str, dict[str, Path]]]:
    """Group files whose names differ in the language only: (stem, path by language)."""
    groups: dict[str, dict[str, Path]] = {}
    for file in folder_files:
        if file.language_tag:
            groups.setdefault(file.stem, {})[file.language_tag] = file.path
    return sorted(groups.items())


def _choose_sides(available: Sequence[str], languages: LanguagePair) -> tuple[str, str] | None:
    """Return source and target of a Moses group. Two suffixes alone do not tell which is which."""
    roles = next((roles for roles in registry.MOSES_ROLES if roles[0] in available and roles[1] in available), None)
    return roles or (choose_sides(languages, tuple(available)) if languages != ANY_LANGUAGES else None)


def _open_file(corpus: Corpus, path: Path) -> Corpus:
    file = _describe_file(path)
    key = registry.detect_format(path.name)
    if key is None and file.language_tag:
        siblings = [other for other in _list_files(path.parent) if other.stem == file.stem]
        others = [other for other in siblings if other.language_tag != file.language_tag]
        return _open_moses_pair(corpus, path, [file, *others])
    if key is None:
        _check_sniffed_format(path)
    parallel_file = ParallelFile(key, (InputFile(path),))
    return _add_sibling_splits(corpus, path, parallel_file, file.stem, corpus.languages)


def _check_sniffed_format(path: Path) -> None:
    """Refuse a file that neither its name nor its content identifies. A pipe is trusted, since it is read once."""
    if not path.is_file():
        return
    head, _ = streams.peek_head(InputFile(path).read_blocks())
    first = next(streams.read_lines([head], str(path)), "")
    if registry.sniff_format(head, str(path)) == "tsv" and (isinstance(first, BadLine) or "\t" not in first):
        advice = "text without translations is for attent train --task lm or mlm"
        raise CorpusError(f"{path}: this format is not known: attent reads {registry.SUPPORTED_FORMATS}; {advice}")


def _open_moses_pair(corpus: Corpus, path: Path, group: Sequence[_FolderFile]) -> Corpus:
    """Open a Moses pair by the name of one of its files or by their common stem."""
    members = {file.language_tag: file.path for file in group if file.language_tag}
    typed = next((tag for tag, member in members.items() if member == path), None)
    requested = LanguagePair(typed, None) if typed and corpus.languages == ANY_LANGUAGES else corpus.languages
    sides = _choose_sides(list(members), requested)
    if sides is None or (typed and typed not in sides):
        raise _make_pair_error(path, typed, members, requested)
    parallel_file = ParallelFile("moses", tuple(InputFile(members[tag]) for tag in sides))
    languages = requested if sides in registry.MOSES_ROLES else LanguagePair(*sides)
    return _add_sibling_splits(corpus, path, parallel_file, group[0].stem, languages)


def _make_pair_error(path: Path, typed: str | None, members: dict[str, Path], requested: LanguagePair) -> CorpusError:
    others = ", ".join(sorted(tag for tag in members if tag != typed))
    if typed is None:
        return requested.make_mismatch_error(str(path), members)
    if not others:
        other = requested.target if requested.source and is_tag_match(requested.source, typed) else requested.source
        name = f"{_describe_file(path).stem}.{other or 'de'}"
        return CorpusError(f"{path} has no translation in its folder: add {name}, or give a file with both languages")
    if requested.is_open:
        return CorpusError(f"{path} has several translations: choose one of {others} with --src and --tgt")
    pair = f"{requested.source} and {requested.target}"
    return LanguageMismatchError(f"{path} and its translations ({others}) are not {pair}", "change --src and --tgt")


def _add_sibling_splits(
    corpus: Corpus, path: Path, parallel_file: ParallelFile, stem: str, languages: LanguagePair
) -> Corpus:
    """Return the corpus with its file and, if that is a train file, the valid and test files of the same format."""
    siblings: list[tuple[str, ParallelFile]] = []
    if detect_split(stem) == "train":
        with suppress(PermissionError):  # the file can be read, but its folder cannot be listed
            siblings = _find_parallel_files(_list_files(path.parent), languages)
    splits = ((detect_split(other_stem), other) for other_stem, other in siblings)
    chosen = ((s, other) for s, other in splits if s in ("valid", "test") and other.format == parallel_file.format)
    return replace(corpus, parallel_files=(parallel_file,), sibling_files=tuple(chosen))
