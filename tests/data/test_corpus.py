"""Corpus names: the right files are found, and mistakes are reported with advice."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest

from attent.data import builtin
from attent.data.corpus import Corpus, ReadOptions, open_corpora
from attent.data.pairs import BadLine, CorpusError, LanguagePair, Pair

EN_DE = LanguagePair("en", "de")


@pytest.fixture(autouse=True)
def _working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_files(**contents: str) -> None:
    """Write files; `__` in a name is its dot."""
    for name, content in contents.items():
        Path(name.replace("__", ".")).write_text(content, encoding="utf-8")


def open_corpus(name: str, languages: LanguagePair = LanguagePair()) -> Corpus:  # noqa: B008 - frozen
    (corpus,) = open_corpora([name], languages)
    return corpus


def list_texts(corpus: Corpus | None) -> list[tuple[str, str]]:
    assert corpus is not None
    return [(item.source, item.target) for item in corpus if isinstance(item, Pair)]


def set_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


# Names and weights.


def test_several_corpora_with_weights_keep_their_order() -> None:
    write_files(a__tsv="1\t2\n", b__tsv="3\t4\n", c__tsv="5\t6\n")
    corpora = open_corpora(["a.tsv:3", "b.tsv", "c.tsv:0.5"])
    assert [(corpus.name, corpus.weight) for corpus in corpora] == [("a.tsv", 3.0), ("b.tsv", 1.0), ("c.tsv", 0.5)]
    assert [list_texts(corpus) for corpus in corpora] == [[("1", "2")], [("3", "4")], [("5", "6")]]


@pytest.mark.skipif(os.name == "nt", reason="Windows allows no colon in a name")
def test_file_whose_name_looks_like_a_weight_is_that_file() -> None:
    Path("a.tsv:3").write_text("whole\tname\n")
    Path("a.tsv").write_text("short\tname\n")
    assert (open_corpus("./a.tsv:3").weight, list_texts(open_corpus("./a.tsv:3"))) == (1.0, [("whole", "name")])


@pytest.mark.parametrize("weight", ["0", "-1", "0.0"])
def test_weight_must_be_a_positive_number(weight: str) -> None:
    write_files(a__tsv="1\t2\n")
    with pytest.raises(CorpusError, match=f"a.tsv:{weight}: a weight must be greater than 0"):
        open_corpus(f"a.tsv:{weight}")


def test_corpus_can_be_read_again_and_again() -> None:
    write_files(a__tsv="1\t2\n")
    corpus = open_corpus("a.tsv")
    assert list_texts(corpus) == list_texts(corpus) == [("1", "2")]


def test_unknown_name_suggests_the_nearest() -> None:
    write_files(memory__tmx="x")
    Path("sub").mkdir()
    Path("sub/corpus.tsv").write_text("x")
    with pytest.raises(CorpusError, match=r"^memry\.tmx: there is no such file or folder; did you mean memory\.tmx\?$"):
        open_corpus("memry.tmx")
    with pytest.raises(CorpusError, match=r"did you mean sub[/\\]corpus\.tsv\?"):
        open_corpus("sub/corpsu.tsv")
    with pytest.raises(CorpusError, match=r"did you mean multi30k\?"):
        open_corpus("multi3k")
    with pytest.raises(CorpusError, match="qqqq: there is no such file or folder; check the path"):
        open_corpus("qqqq")


def test_empty_name_is_not_the_current_folder() -> None:
    for name in ("", ":3"):
        with pytest.raises(CorpusError, match="the name of a corpus is empty"):
            open_corpus(name)


def test_unknown_format_lists_the_supported_ones() -> None:
    Path("a.docx").write_bytes(b"PK\x03\x04\t\xff\n")
    with pytest.raises(
        CorpusError, match=r"a\.docx is an office document .*: convert it to one of \.tsv, \.jsonl, \.tmx"
    ):
        open_corpus("a.docx")
    Path("notes").write_text("only words\n")
    with pytest.raises(CorpusError, match=r"notes: this format is not known: attent reads \.tsv, \.jsonl, \.tmx"):
        open_corpus("notes")
    Path("a.xml").write_text("<html/>")
    with pytest.raises(CorpusError, match=r"a\.xml is an XML file, and not parallel text"):
        open_corpus("a.xml")


def test_format_is_sniffed_if_the_name_does_not_tell() -> None:
    Path("columns.txt").write_text("a\tb\n")
    Path("objects.txt").write_text('{"src": "a", "tgt": "b"}\n')
    Path("catalogue").write_text('# x\nmsgid "a"\nmsgstr "b"\n')
    Path("memory.xml").write_text(MEMORY)
    for name in ("columns.txt", "objects.txt", "catalogue", "memory.xml"):
        assert list_texts(open_corpus(name)) == [("a", "b")]


def test_fingerprint_changes_with_the_data() -> None:
    write_files(a__en="1\n", a__de="2\n")
    before = open_corpus("a", EN_DE).fingerprint()
    assert [Path(path).name for path, _, _ in before] == ["a.en", "a.de"]
    assert all(Path(path).is_absolute() for path, _, _ in before)
    assert open_corpus("a", EN_DE).fingerprint() == before
    write_files(a__de="3\n\n")
    assert open_corpus("a", EN_DE).fingerprint() != before


# Languages.

MEMORY = (
    '<tmx version="1.4"><header srclang="en"/><body><tu><tuv xml:lang="de-DE"><seg>b</seg></tuv>'
    '<tuv xml:lang="en"><seg>a</seg></tuv></tu></body></tmx>'
)


def test_open_languages_are_declared_by_the_files() -> None:
    write_files(
        m__tmx=MEMORY,
        x__xlf='<xliff><file source-language="en-US" target-language="de"><body/></file></xliff>',
        c__po='msgid ""\nmsgstr "Language: de\\n"\n',
        j__jsonl='{"translation": {"en": "a", "de": "b"}}\n',
        t__tsv="a\tb\n",
        h__tsv="EN-us\tDE\nA dog.\tEin Hund.\n",
        h__txt="en\tde\nA dog.\tEin Hund.\n",
        p__en="a\n",
        p__de="b\n",
    )
    assert open_corpus("m.tmx").languages == open_corpus("x.xlf").languages == open_corpus("j.jsonl").languages == EN_DE
    assert open_corpus("h.tsv").languages == open_corpus("h.txt").languages == open_corpus("p.en").languages == EN_DE
    assert open_corpus("h.tsv", LanguagePair("de", None)).languages == LanguagePair("de", "en")
    assert list_texts(open_corpus("h.tsv", LanguagePair("de", None))) == [("Ein Hund.", "A dog.")]
    assert open_corpus("p.de").languages == LanguagePair("de", "en")
    assert open_corpus("c.po").languages == LanguagePair(None, "de")
    assert open_corpus("c.po", LanguagePair("de", None)).languages == LanguagePair("de", None)
    assert open_corpus("m.tmx", LanguagePair("de", None)).languages == LanguagePair("de", "en")
    assert open_corpus("t.tsv").languages == LanguagePair()


def test_several_languages_give_a_corpus_per_pair() -> None:
    write_files(p__en="a\n", p__de="b\n", p__fr="c\n")
    corpora = open_corpora(["p"], LanguagePair("en,de", "de, fr"))
    assert [(corpus.languages.source, corpus.languages.target) for corpus in corpora] == [
        ("en", "de"),
        ("en", "fr"),
        ("de", "fr"),
    ]
    assert [list_texts(corpus) for corpus in corpora] == [[("a", "b")], [("a", "c")], [("b", "c")]]


EN_DE_FR = LanguagePair("en", "de,fr")


@pytest.mark.parametrize(
    ("name", "contents", "advice"),
    [
        ("a.tsv", {"a__tsv": "1\t2\n"}, "name its columns in a first line such as en<TAB>de<TAB>fr"),
        ("a.tsv", {"a__tsv": "src\ttgt\n1\t2\n"}, "name its columns in a first line"),
        ("a.tsv", {"a__tsv": "en\tde\tlevel5\n1\t2\t3\n"}, "name its columns in a first line"),
        ("a.txt", {"a__txt": "1\t2\n"}, "declare them in it"),
        ("a.jsonl", {"a__jsonl": '{"src": "a", "tgt": "b"}\n'}, "use languages as keys"),
        ("c", {"c__src": "1\n", "c__tgt": "2\n"}, "name its files by language"),
        ("a.po", {"a__po": 'msgid "a"\nmsgstr "b"\n'}, "name its language in its header"),
        ("a.xlf", {"a__xlf": '<xliff><file source-language="en"/></xliff>'}, "name both languages in its <file>"),
        (".", {"train__en": "1\n", "train__de": "2\n", "train__fr": "3\n", "test__tsv": "1\t2\n"}, "name its columns"),
    ],
)
def test_file_without_languages_is_not_read_for_two_pairs(name: str, contents: dict[str, str], advice: str) -> None:
    write_files(**contents)
    with pytest.raises(CorpusError, match="does not declare its languages and would be read as both en-de and en-fr"):
        open_corpora([name], EN_DE_FR)
    with pytest.raises(CorpusError, match=f"{advice}.*, or give only one --src and one --tgt$"):
        open_corpora([name], EN_DE_FR)
    open_corpora([name], EN_DE)


def test_file_with_languages_is_read_for_each_pair() -> None:
    write_files(
        a__tsv="fr\ten\tde\nc\ta\tb\n",
        b__jsonl='{"translation": {"en": "a", "de": "b", "fr": "c"}}\n',
        c__tmx=MEMORY.replace("</tu>", '<tuv xml:lang="fr"><seg>c</seg></tuv></tu>'),
    )
    for name in ("a.tsv", "b.jsonl", "c.tmx"):
        assert [list_texts(corpus) for corpus in open_corpora([name], EN_DE_FR)] == [[("a", "b")], [("a", "c")]]


def test_catalog_is_read_in_both_directions_but_not_for_two_sources() -> None:
    write_files(a__po='msgid ""\nmsgstr "Language: de\\n"\n\nmsgid "a"\nmsgstr "b"\n')
    forward, backward = open_corpora(["a.po"], LanguagePair("en,de", "de,en"))
    assert (list_texts(forward), list_texts(backward)) == ([("a", "b")], [("b", "a")])
    with pytest.raises(CorpusError, match="would be read as both en-de and fr-de"):
        open_corpora(["a.po"], LanguagePair("en,fr", "de"))


def test_pipe_is_not_read_for_two_pairs() -> None:
    with pytest.raises(CorpusError, match="standard input can be read only once: save it to a file"):
        open_corpora(["-"], EN_DE_FR)


@pytest.mark.parametrize(
    ("languages", "message"),
    [
        (LanguagePair("en", "en"), "--src and --tgt are both en: give two different languages"),
        (LanguagePair("en", "german"), "`german` is not a language tag: write en, de or pt-BR"),
        (LanguagePair("en,,de", "fr"), "`` is not a language tag"),
    ],
)
def test_invalid_languages_are_refused(languages: LanguagePair, message: str) -> None:
    write_files(a__tsv="1\t2\n")
    with pytest.raises(CorpusError, match=message):
        open_corpus("a.tsv", languages)


def test_options_reach_the_reader() -> None:
    write_files(a__po='#, fuzzy\nmsgid "a"\nmsgstr "b"\n\n#~ msgid "c"\n#~ msgstr "d"\n')
    assert list_texts(open_corpus("a.po")) == []
    (fuzzy,) = open_corpora(["a.po"], LanguagePair(), ReadOptions(fuzzy=True))
    (fuzzy_and_obsolete,) = open_corpora(["a.po"], LanguagePair(), ReadOptions(fuzzy=True, obsolete=True))
    assert (list_texts(fuzzy), list_texts(fuzzy_and_obsolete)) == ([("a", "b")], [("a", "b"), ("c", "d")])


# Moses pairs.


@pytest.mark.parametrize("name", ["corpus.en.gz", "corpus.de", "corpus"])
def test_moses_pair_is_found_by_either_file_or_the_stem(name: str) -> None:
    Path("corpus.en.gz").write_bytes(gzip.compress(b"a\n"))
    write_files(corpus__de="b\n", corpus__md="notes\n", other__fr="c\n")
    assert list_texts(open_corpus(name, EN_DE)) == [("a", "b")]
    assert list_texts(open_corpus(name, LanguagePair("de", "en"))) == [("b", "a")]


def test_moses_pair_may_name_roles_instead_of_languages() -> None:
    write_files(corpus__src="a\n", corpus__tgt="b\n")
    for name in ("corpus", "corpus.src", "corpus.tgt"):
        assert list_texts(open_corpus(name)) == list_texts(open_corpus(name, EN_DE)) == [("a", "b")]


def test_two_variants_of_one_language_can_be_a_pair() -> None:
    write_files(corpus__zh_hans="a\n", corpus__zh_hant="b\n")
    corpus = open_corpus("corpus.zh_hans")
    assert (corpus.languages, list_texts(corpus)) == (LanguagePair("zh_hans", "zh_hant"), [("a", "b")])


def test_damaged_file_fails_when_it_is_read() -> None:
    data = gzip.compress("".join(f'{{"en": "{n * n}", "de": "{n}"}}\n' for n in range(9000)).encode())
    Path("a.jsonl.gz").write_bytes(data[:-5000])
    corpus = open_corpus("a.jsonl.gz")
    items: list[Pair | BadLine] = []
    with pytest.raises(CorpusError, match=r"a\.jsonl\.gz is cut short after line"):
        items.extend(corpus)
    assert (corpus.languages, len(items) > 1000) == (EN_DE, True)
    write_files(b__po='msgid ""\nmsgstr "Content-Type: text/plain; charset=EBCDIC\\n"\n')
    catalog = open_corpus("b.po")
    with pytest.raises(CorpusError, match="charset ebcdic, which attent does not know"):
        list(catalog)


def test_compressed_copy_is_not_read_twice() -> None:
    write_files(corpus__en="a\n", corpus__de="b\n")
    Path("corpus.de.gz").write_bytes(gzip.compress(b"b\n"))
    assert open_corpus("corpus", EN_DE).file_names == ("corpus.en", "corpus.de")
    assert open_corpus(".", EN_DE).file_names == ("corpus.en", "corpus.de")


def test_unpaired_moses_file_is_an_error() -> None:
    write_files(corpus__en="a\n", corpus__de="b\n", corpus__fr="c\n", alone__en="d\n")
    for name, languages, message in [
        ("alone.en", EN_DE, r"alone\.en has no translation in its folder: add alone\.de"),
        (
            "corpus.en",
            LanguagePair(),
            r"corpus\.en has several translations: choose one of de, fr with --src and --tgt",
        ),
        (
            "corpus.en",
            LanguagePair("de", "fr"),
            r"corpus\.en and its translations \(de, fr\) are not de and fr; change --src",
        ),
        ("corpus", LanguagePair(), "corpus does not say which two languages to read: it has de, en, fr"),
        ("corpus", LanguagePair("en", "tr"), "corpus does not contain en and tr: it has de, en, fr"),
    ]:
        with pytest.raises(CorpusError, match=message):
            open_corpus(name, languages)


# Folders.


def test_folder_without_splits_is_read_completely() -> None:
    write_files(
        b__tsv="3\t4\n", a__jsonl='{"src": "1", "tgt": "2"}\n', c__en="5\n", c__de="6\n", README__md="x", z__log="y"
    )
    Path(".hidden.tsv").write_text("7\t8\n")
    Path("sub").mkdir()
    Path("sub/d.tsv").write_text("9\t9\n")
    corpus = open_corpus(".", EN_DE)
    assert list_texts(corpus) == [("1", "2"), ("3", "4"), ("5", "6")]
    assert corpus.file_names == ("a.jsonl", "b.tsv", "c.en", "c.de")
    assert corpus.get_sibling_split("valid") is None


@pytest.mark.parametrize(
    ("train", "valid", "test"),
    [("train", "valid", "test"), ("train500k", "val", "test_2016_flickr"), ("Training", "dev", "test-a")],
)
def test_folder_with_splits_is_its_train_split_with_siblings(train: str, valid: str, test: str) -> None:
    for number, stem in enumerate((train, valid, test)):
        for tag in ("en", "de", "fr"):
            Path(f"{stem}.{tag}.xz").write_bytes(lzma.compress(f"{tag}{number}\n".encode()))
    Path("testimony.tsv").write_text("no\tsplit\n")
    corpus = open_corpus(".", EN_DE)
    assert list_texts(corpus) == [("en0", "de0")]
    assert list_texts(corpus.get_sibling_split("valid")) == [("en1", "de1")]
    assert list_texts(corpus.get_sibling_split("test")) == [("en2", "de2")]
    assert list_texts(open_corpus(f"{train}.en.xz", EN_DE).get_sibling_split("test")) == [("en2", "de2")]


def test_several_test_files_are_one_test_set() -> None:
    write_files(train__tsv="1\t2\n", dev__tsv="3\t4\n", test_a__tsv="5\t6\n", test_b__tsv="7\t8\n")
    for corpus in (open_corpus("."), open_corpus("train.tsv")):
        test = corpus.get_sibling_split("test")
        assert list_texts(test) == [("5", "6"), ("7", "8")]
        assert test is not None
        assert (test.sibling_files, test.ignored_files, [Path(name).name for name in test.file_names]) == (
            (),
            (),
            ["test_a.tsv", "test_b.tsv"],
        )


def test_folder_lists_ignored_parallel_text() -> None:
    write_files(train__tsv="1\t2\n", more__tsv="3\t4\n", x__en="5\n", y__src="6\n", README__md="a", SOURCE__json="{}")
    write_files(
        raw__en="7\n", raw__de="8\n", raw__fr="9\n", test__tsv="1\t2\n", notes__old="b", c__en="1\n", c__fr="2\n"
    )
    corpus = open_corpus(".", EN_DE)
    assert list_texts(corpus) == [("1", "2")]
    assert corpus.ignored_files == (
        "c.en (without a translation)",
        "more.tsv (not a train file)",
        "raw.de (not a train file)",
        "raw.en (not a train file)",
        "x.en (without a translation)",
        "y.src (without a translation)",
    )
    assert open_corpus("more.tsv").ignored_files == ()


def test_folder_with_moses_pairs_needs_languages() -> None:
    write_files(a__tsv="1\t2\n", c__en="3\n", c__de="4\n", lib__so="x", lib__old="y")
    with pytest.raises(CorpusError, match=r"^c does not say which two languages to read: it has de, en; choose two"):
        open_corpus(".")
    assert (
        list_texts(open_corpus(".", EN_DE))
        == list_texts(open_corpus(".", LanguagePair("en", None)))
        == [("1", "2"), ("3", "4")]
    )
    write_files(c__fr="5\n")
    with pytest.raises(CorpusError, match="c does not contain en: it has de, en, fr; choose two of them with --src"):
        open_corpus(".", LanguagePair("en", None))
    assert list_texts(open_corpus(".", EN_DE)) == [("1", "2"), ("3", "4")]


def test_unpaired_moses_file_does_not_fail_a_folder() -> None:
    write_files(a__tsv="1\t2\n", x__en="3\n")
    assert (list_texts(open_corpus(".")), open_corpus(".").ignored_files) == (
        [("1", "2")],
        ("x.en (without a translation)",),
    )


def test_train_file_has_sibling_splits_of_the_same_format() -> None:
    write_files(train__tsv="1\t2\n", test__tsv="3\t4\n", valid__jsonl='{"src": "5", "tgt": "6"}\n', other__tsv="7\t8\n")
    corpus = open_corpus("train.tsv")
    assert list_texts(corpus.get_sibling_split("test")) == [("3", "4")]
    assert corpus.get_sibling_split("valid") is None
    assert open_corpus("other.tsv").get_sibling_split("test") is None


def test_name_that_only_begins_like_a_split_is_not_one() -> None:
    write_files(devices__tsv="1\t2\n", testimony__tsv="3\t4\n", trains__tsv="5\t6\n", valley__tsv="7\t8\n")
    assert len(list_texts(open_corpus("."))) == 4
    assert open_corpus("trains.tsv").get_sibling_split("test") is None


def test_test_only_folder_is_read_but_valid_and_test_need_train() -> None:
    write_files(test__tsv="1\t2\n")
    assert list_texts(open_corpus(".")) == [("1", "2")]
    write_files(valid__tsv="3\t4\n")
    with pytest.raises(CorpusError, match=r"has no file for training: give one of test\.tsv, valid\.tsv"):
        open_corpus(".")
    write_files(corpus__tsv="5\t6\n")
    assert list_texts(open_corpus(".")) == [("5", "6")]
    assert list_texts(open_corpus(".").get_sibling_split("test")) == [("1", "2")]


def test_only_catalogs_in_the_requested_language_are_read() -> None:
    for tag in ("de", "fr"):
        Path(f"{tag}.po").write_text(f'msgid ""\nmsgstr "Language: {tag}\\n"\n\nmsgid "a"\nmsgstr "{tag}"\n')
    items = list(open_corpus(".", EN_DE))
    assert [item.reason for item in items if isinstance(item, BadLine)] == ["a file in other languages"]
    assert [item.target for item in items if isinstance(item, Pair)] == ["de"]
    with pytest.raises(CorpusError, match="does not say which two languages to read: it has de, fr"):
        open_corpus(".")
    with pytest.raises(CorpusError, match="does not contain en and tr: it has"):
        list(open_corpus(".", LanguagePair("en", "tr")))


def test_folder_without_readable_files_is_an_error() -> None:
    Path("empty").mkdir()
    with pytest.raises(CorpusError, match=r"empty: no file in this folder is parallel text: attent reads \.tsv"):
        open_corpus("empty")


# Standard input and pipes.


@pytest.mark.parametrize(
    "content",
    [
        b"a\tb\n",
        b'{"src": "a", "tgt": "b"}\n',
        b'\xef\xbb\xbf# note\nmsgid "a"\nmsgstr "b"\n',
        b"<?xml version='1.0'?>\n<!-- note -->\n" + MEMORY.encode(),
        MEMORY.encode("utf-16"),
        b"<xliff srcLang='en'><file><segment><source>a</source><target>b</target></segment></file></xliff>",
    ],
)
def test_format_of_standard_input_is_sniffed(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (content, gzip.compress(content), lzma.compress(content)):
        set_stdin(monkeypatch, data)
        assert list_texts(open_corpus("-", EN_DE)) == [("a", "b")]


def test_standard_input_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, b"a\tb\n")
    corpus = open_corpus("-:2")
    assert (corpus.file_names, corpus.weight) == (("standard input",), 2.0)
    with pytest.raises(CorpusError, match="standard input can be read only once: save it to a file"):
        corpus.fingerprint()
    assert list_texts(corpus) == [("a", "b")]
    with pytest.raises(CorpusError, match="standard input can be read only once"):
        list_texts(corpus)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("first", [1, 100])  # bytes of the first write
def test_pipe_is_read(first: int) -> None:
    def write() -> None:
        content = gzip.compress(b"a\tb\n")
        with open("pipe", "wb", buffering=0) as pipe:
            pipe.write(content[:first])
            time.sleep(0.2)
            pipe.write(content[first:])

    os.mkfifo("pipe")
    corpus = open_corpus("pipe")
    writer = threading.Thread(target=write)
    writer.start()
    assert list_texts(corpus) == [("a", "b")]
    writer.join(timeout=5)
    with pytest.raises(CorpusError, match="pipe can be read only once"):
        corpus.fingerprint()


@pytest.mark.parametrize("name", ["a.tsv", "train.tsv"])
def test_a_file_in_a_folder_that_cannot_be_listed_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> NoReturn:  # as without read permission, which root always has
        raise PermissionError(13, "Permission denied", str(folder))

    Path(name).write_text("1\t2\n")
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert list_texts(open_corpus(name)) == [("1", "2")]


# Built-in corpora.


def test_a_built_in_name_takes_precedence_over_a_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requested = []

    def make_folder(name: str, languages: LanguagePair) -> Path:
        requested.append((name, languages))
        path = Path("cache")
        path.mkdir(exist_ok=True)
        (path / "train.en").write_text("a\n")
        for tag in ("de", "fr"):
            (path / f"train.{tag}").write_text("b\n")
        (path / "test.en").write_text("c\n")
        (path / "test.de").write_text("d\n")
        return path

    monkeypatch.setattr(builtin, "get_corpus_folder", make_folder)
    corpus = open_corpus("multi30k:2", EN_DE)
    assert (corpus.name, corpus.weight, list_texts(corpus)) == ("multi30k", 2.0, [("a", "b")])
    assert list_texts(corpus.get_sibling_split("test")) == [("c", "d")]
    assert requested == [("multi30k", EN_DE)]
    Path("multi30k").mkdir()
    Path("multi30k/x.tsv").write_text("local\tcopy\n")
    assert list_texts(open_corpus("./multi30k", EN_DE)) == [("local", "copy")]
    for tag in ("en", "de"):
        Path(f"phrases.{tag}").write_text("local\n")
    assert list_texts(open_corpus("./phrases", EN_DE)) == [("local", "local")]
    for name in ("multi30k", "phrases"):
        notes: list[str] = []
        en_xx = LanguagePair("en", "de,fr")
        assert list_texts(open_corpora([name], en_xx, warn=notes.append)[0]) == [("a", "b")]
        assert notes == [f"using the built-in corpus {name}; to use your own, write ./{name}"]
    assert capsys.readouterr().err == ""


def test_a_pair_named_by_both_files_is_read_once(tmp_path: Path) -> None:
    names = [str(tmp_path / "text.en"), str(tmp_path / "text.de")]
    for name in names:
        Path(name).write_text("a\n", encoding="utf-8")
    assert len(open_corpora(names, LanguagePair("en", "de"))) == 1
    assert len(open_corpora([names[0]] * 2, LanguagePair("en", "de"))) == 2


def test_each_corpus_gives_the_language_pairs_that_it_has() -> None:
    write_files(a__en="1\n", a__de="2\n", b__en="3\n", b__fr="4\n", c__tsv="en\tfr\n5\t6\n")
    corpora = open_corpora(["a", "b:2", "c.tsv"], EN_DE_FR)
    found = [(corpus.name, corpus.languages.target, corpus.weight, list_texts(corpus)) for corpus in corpora]
    assert found == [
        ("a", "de", 1, [("1", "2")]),
        ("b", "fr", 2, [("3", "4")]),
        ("c.tsv", "fr", 1, [("5", "6")]),
    ]
    assert [corpus.languages.target for corpus in open_corpora(["a.en", "b.fr"], EN_DE_FR)] == ["de", "fr"]
    with pytest.raises(CorpusError, match="a does not contain en and fr: it has de, en"):
        open_corpora(["a"], EN_DE_FR)  # in no corpus
    with pytest.raises(CorpusError, match="b does not contain en and de: it has en, fr"):
        open_corpora(["a", "b"], LanguagePair("en", "de,cs"))  # none of the requested
