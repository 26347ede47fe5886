"""Corpus names: the right files are found, and mistakes are reported with advice."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import sys
import threading
from pathlib import Path

import pytest

from attent.data import builtin
from attent.data.corpus import Corpus, ReadOptions, open_corpora
from attent.data.pairs import BadLine, CorpusError, LanguagePair, Pair

EN_DE = LanguagePair("en", "de")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(**contents: str) -> None:
    """Files by name, with `__` for the dot."""
    for name, content in contents.items():
        Path(name.replace("__", ".")).write_text(content, encoding="utf-8")


def one(name: str, languages: LanguagePair = LanguagePair()) -> Corpus:  # noqa: B008 - frozen
    (found,) = open_corpora([name], languages)
    return found


def texts(corpus: Corpus | None) -> list[tuple[str, str]]:
    assert corpus is not None
    return [(item.source, item.target) for item in corpus if isinstance(item, Pair)]


def typed_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


# Names and weights.


def test_several_corpora_with_weights_keep_their_order() -> None:
    write(a__tsv="1\t2\n", b__tsv="3\t4\n", c__tsv="5\t6\n")
    found = open_corpora(["a.tsv:3", "b.tsv", "c.tsv:0.5"])
    assert [(corpus.name, corpus.weight) for corpus in found] == [("a.tsv", 3.0), ("b.tsv", 1.0), ("c.tsv", 0.5)]
    assert [texts(corpus) for corpus in found] == [[("1", "2")], [("3", "4")], [("5", "6")]]


@pytest.mark.skipif(os.name == "nt", reason="Windows allows no colon in a name")
def test_file_whose_name_looks_like_a_weight_is_that_file() -> None:
    Path("a.tsv:3").write_text("whole\tname\n")
    Path("a.tsv").write_text("short\tname\n")
    assert (one("./a.tsv:3").weight, texts(one("./a.tsv:3"))) == (1.0, [("whole", "name")])


@pytest.mark.parametrize("weight", ["0", "-1", "0.0"])
def test_weight_must_be_a_positive_number(weight: str) -> None:
    write(a__tsv="1\t2\n")
    with pytest.raises(CorpusError, match=f"a.tsv:{weight}: a weight must be greater than 0"):
        one(f"a.tsv:{weight}")


def test_corpus_can_be_read_again_and_again() -> None:
    write(a__tsv="1\t2\n")
    corpus = one("a.tsv")
    assert texts(corpus) == texts(corpus) == [("1", "2")]


def test_unknown_name_suggests_the_nearest() -> None:
    write(memory__tmx="x")
    Path("sub").mkdir()
    Path("sub/corpus.tsv").write_text("x")
    with pytest.raises(CorpusError, match=r"^memry\.tmx: there is no such file or folder; did you mean memory\.tmx\?$"):
        one("memry.tmx")
    with pytest.raises(CorpusError, match=r"did you mean sub[/\\]corpus\.tsv\?"):
        one("sub/corpsu.tsv")
    with pytest.raises(CorpusError, match=r"did you mean multi30k\?"):
        one("multi3k")
    with pytest.raises(CorpusError, match="qqqq: there is no such file or folder; check the path"):
        one("qqqq")


def test_empty_name_is_not_the_current_folder() -> None:
    for name in ("", ":3"):
        with pytest.raises(CorpusError, match="the name of a corpus is empty"):
            one(name)


def test_unknown_format_lists_the_supported_ones() -> None:
    Path("a.docx").write_bytes(b"PK\x03\x04\t\xff\n")
    Path("notes").write_text("only words\n")
    for name in ("a.docx", "notes"):
        with pytest.raises(CorpusError, match=rf"{name}: this format is not known: attent reads \.tsv, \.jsonl, \.tmx"):
            one(name)
    Path("a.xml").write_text("<html/>")
    with pytest.raises(CorpusError, match=r"a\.xml is XML, but neither TMX nor XLIFF"):
        one("a.xml")


def test_format_is_sniffed_if_the_name_does_not_tell() -> None:
    Path("columns.txt").write_text("a\tb\n")
    Path("objects.txt").write_text('{"src": "a", "tgt": "b"}\n')
    Path("catalogue").write_text('# x\nmsgid "a"\nmsgstr "b"\n')
    Path("memory.xml").write_text(MEMORY)
    for name in ("columns.txt", "objects.txt", "catalogue", "memory.xml"):
        assert texts(one(name)) == [("a", "b")]


def test_fingerprint_changes_with_the_data() -> None:
    write(a__en="1\n", a__de="2\n")
    before = one("a", EN_DE).fingerprint()
    assert [Path(path).name for path, _, _ in before] == ["a.en", "a.de"]
    assert all(Path(path).is_absolute() for path, _, _ in before)
    assert one("a", EN_DE).fingerprint() == before
    write(a__de="3\n\n")
    assert one("a", EN_DE).fingerprint() != before


# Languages.

MEMORY = (
    '<tmx version="1.4"><header srclang="en"/><body><tu><tuv xml:lang="de-DE"><seg>b</seg></tuv>'
    '<tuv xml:lang="en"><seg>a</seg></tuv></tu></body></tmx>'
)


def test_open_languages_are_declared_by_the_files() -> None:
    write(
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
    assert one("m.tmx").languages == one("x.xlf").languages == one("j.jsonl").languages == EN_DE
    assert one("h.tsv").languages == one("h.txt").languages == one("p.en").languages == EN_DE
    assert one("h.tsv", LanguagePair("de", None)).languages == LanguagePair("de", "en")
    assert texts(one("h.tsv", LanguagePair("de", None))) == [("Ein Hund.", "A dog.")]
    assert one("p.de").languages == LanguagePair("de", "en")
    assert one("c.po").languages == LanguagePair(None, "de")
    assert one("c.po", LanguagePair("de", None)).languages == LanguagePair("de", None)
    assert one("m.tmx", LanguagePair("de", None)).languages == LanguagePair("de", "en")
    assert one("t.tsv").languages == LanguagePair()


def test_several_languages_give_a_corpus_per_pair() -> None:
    write(p__en="a\n", p__de="b\n", p__fr="c\n")
    found = open_corpora(["p"], LanguagePair("en,de", "de, fr"))
    assert [(corpus.languages.source, corpus.languages.target) for corpus in found] == [
        ("en", "de"),
        ("en", "fr"),
        ("de", "fr"),
    ]
    assert [texts(corpus) for corpus in found] == [[("a", "b")], [("a", "c")], [("b", "c")]]


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
    write(**contents)
    with pytest.raises(CorpusError, match="does not declare its languages and would be read as both en-de and en-fr"):
        open_corpora([name], EN_DE_FR)
    with pytest.raises(CorpusError, match=f"{advice}.*, or give only one --src and one --tgt$"):
        open_corpora([name], EN_DE_FR)
    open_corpora([name], EN_DE)


def test_file_with_languages_is_read_for_each_pair() -> None:
    write(
        a__tsv="fr\ten\tde\nc\ta\tb\n",
        b__jsonl='{"translation": {"en": "a", "de": "b", "fr": "c"}}\n',
        c__tmx=MEMORY.replace("</tu>", '<tuv xml:lang="fr"><seg>c</seg></tuv></tu>'),
    )
    for name in ("a.tsv", "b.jsonl", "c.tmx"):
        assert [texts(corpus) for corpus in open_corpora([name], EN_DE_FR)] == [[("a", "b")], [("a", "c")]]


def test_catalog_is_read_in_both_directions_but_not_for_two_sources() -> None:
    write(a__po='msgid ""\nmsgstr "Language: de\\n"\n\nmsgid "a"\nmsgstr "b"\n')
    there, back = open_corpora(["a.po"], LanguagePair("en,de", "de,en"))
    assert (texts(there), texts(back)) == ([("a", "b")], [("b", "a")])
    with pytest.raises(CorpusError, match="would be read as both en-de and fr-de"):
        open_corpora(["a.po"], LanguagePair("en,fr", "de"))


def test_pipe_is_not_read_for_two_pairs() -> None:
    with pytest.raises(CorpusError, match="standard input can be read only once: save it to a file"):
        open_corpora(["-"], EN_DE_FR)


@pytest.mark.parametrize(
    ("languages", "words"),
    [
        (LanguagePair("en", "en"), "--src and --tgt are both en: give two different languages"),
        (LanguagePair("en", "german"), "`german` is not a language tag: write en, de or pt-BR"),
        (LanguagePair("en,,de", "fr"), "`` is not a language tag"),
    ],
)
def test_invalid_languages_are_refused(languages: LanguagePair, words: str) -> None:
    write(a__tsv="1\t2\n")
    with pytest.raises(CorpusError, match=words):
        one("a.tsv", languages)


def test_options_reach_the_reader() -> None:
    write(a__po='#, fuzzy\nmsgid "a"\nmsgstr "b"\n\n#~ msgid "c"\n#~ msgstr "d"\n')
    assert texts(one("a.po")) == []
    (fuzzy,) = open_corpora(["a.po"], LanguagePair(), ReadOptions(fuzzy=True))
    (both,) = open_corpora(["a.po"], LanguagePair(), ReadOptions(fuzzy=True, obsolete=True))
    assert (texts(fuzzy), texts(both)) == ([("a", "b")], [("a", "b"), ("c", "d")])


# Moses pairs.


@pytest.mark.parametrize("name", ["corpus.en.gz", "corpus.de", "corpus"])
def test_moses_pair_is_found_by_either_file_or_the_stem(name: str) -> None:
    Path("corpus.en.gz").write_bytes(gzip.compress(b"a\n"))
    write(corpus__de="b\n", corpus__md="notes\n", other__fr="c\n")
    assert texts(one(name, EN_DE)) == [("a", "b")]
    assert texts(one(name, LanguagePair("de", "en"))) == [("b", "a")]


def test_moses_pair_may_name_roles_instead_of_languages() -> None:
    write(corpus__src="a\n", corpus__tgt="b\n")
    for name in ("corpus", "corpus.src", "corpus.tgt"):
        assert texts(one(name)) == texts(one(name, EN_DE)) == [("a", "b")]


def test_two_variants_of_one_language_can_be_a_pair() -> None:
    write(corpus__zh_hans="a\n", corpus__zh_hant="b\n")
    corpus = one("corpus.zh_hans")
    assert (corpus.languages, texts(corpus)) == (LanguagePair("zh_hans", "zh_hant"), [("a", "b")])


def test_damaged_file_fails_when_it_is_read() -> None:
    data = gzip.compress("".join(f'{{"en": "{n * n}", "de": "{n}"}}\n' for n in range(9000)).encode())
    Path("a.jsonl.gz").write_bytes(data[:-5000])
    corpus = one("a.jsonl.gz")
    found: list[Pair | BadLine] = []
    with pytest.raises(CorpusError, match=r"a\.jsonl\.gz is cut short after line"):
        found.extend(corpus)
    assert (corpus.languages, len(found) > 1000) == (EN_DE, True)
    write(b__po='msgid ""\nmsgstr "Content-Type: text/plain; charset=EBCDIC\\n"\n')
    catalogue = one("b.po")
    with pytest.raises(CorpusError, match="charset ebcdic, which attent does not know"):
        list(catalogue)


def test_compressed_copy_is_not_read_twice() -> None:
    write(corpus__en="a\n", corpus__de="b\n")
    Path("corpus.de.gz").write_bytes(gzip.compress(b"b\n"))
    assert one("corpus", EN_DE).file_names == ("corpus.en", "corpus.de")
    assert one(".", EN_DE).file_names == ("corpus.en", "corpus.de")


def test_unpaired_moses_file_is_an_error() -> None:
    write(corpus__en="a\n", corpus__de="b\n", corpus__fr="c\n", alone__en="d\n")
    for name, languages, words in [
        ("alone.en", EN_DE, r"alone\.en has no translation in its folder: add alone\.de"),
        (
            "corpus.en",
            LanguagePair(),
            r"corpus\.en has several translations: choose one of de, fr with --src and --tgt",
        ),
        (
            "corpus.en",
            LanguagePair("de", "fr"),
            r"corpus\.en and its translations \(de, fr\) are not de and fr: change --src",
        ),
        ("corpus", LanguagePair(), "corpus does not say which two languages to read: it has de, en, fr"),
        ("corpus", LanguagePair("en", "tr"), "corpus does not contain en and tr: it has de, en, fr"),
    ]:
        with pytest.raises(CorpusError, match=words):
            one(name, languages)


# Folders.


def test_folder_without_splits_is_read_completely() -> None:
    write(b__tsv="3\t4\n", a__jsonl='{"src": "1", "tgt": "2"}\n', c__en="5\n", c__de="6\n", README__md="x", z__log="y")
    Path(".hidden.tsv").write_text("7\t8\n")
    Path("sub").mkdir()
    Path("sub/d.tsv").write_text("9\t9\n")
    corpus = one(".", EN_DE)
    assert texts(corpus) == [("1", "2"), ("3", "4"), ("5", "6")]
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
    corpus = one(".", EN_DE)
    assert texts(corpus) == [("en0", "de0")]
    assert texts(corpus.get_sibling_split("valid")) == [("en1", "de1")]
    assert texts(corpus.get_sibling_split("test")) == [("en2", "de2")]
    assert texts(one(f"{train}.en.xz", EN_DE).get_sibling_split("test")) == [("en2", "de2")]


def test_several_test_files_are_one_test_set() -> None:
    write(train__tsv="1\t2\n", dev__tsv="3\t4\n", test_a__tsv="5\t6\n", test_b__tsv="7\t8\n")
    for corpus in (one("."), one("train.tsv")):
        test = corpus.get_sibling_split("test")
        assert texts(test) == [("5", "6"), ("7", "8")]
        assert test is not None
        assert (test.sibling_files, test.ignored_files, [Path(name).name for name in test.file_names]) == (
            (),
            (),
            ["test_a.tsv", "test_b.tsv"],
        )


def test_folder_lists_ignored_parallel_text() -> None:
    write(train__tsv="1\t2\n", more__tsv="3\t4\n", x__en="5\n", y__src="6\n", README__md="a", SOURCE__json="{}")
    write(raw__en="7\n", raw__de="8\n", raw__fr="9\n", test__tsv="1\t2\n", notes__old="b", c__en="1\n", c__fr="2\n")
    corpus = one(".", EN_DE)
    assert texts(corpus) == [("1", "2")]
    assert corpus.ignored_files == (
        "c.en (without a translation)",
        "more.tsv (not a train file)",
        "raw.de (not a train file)",
        "raw.en (not a train file)",
        "x.en (without a translation)",
        "y.src (without a translation)",
    )
    assert one("more.tsv").ignored_files == ()


def test_folder_with_moses_pairs_needs_languages() -> None:
    write(a__tsv="1\t2\n", c__en="3\n", c__de="4\n", lib__so="x", lib__old="y")
    with pytest.raises(CorpusError, match=r"^c does not say which two languages to read: it has de, en; choose two"):
        one(".")
    assert texts(one(".", EN_DE)) == texts(one(".", LanguagePair("en", None))) == [("1", "2"), ("3", "4")]
    write(c__fr="5\n")
    with pytest.raises(CorpusError, match="c does not contain en: it has de, en, fr; choose two of them with --src"):
        one(".", LanguagePair("en", None))
    assert texts(one(".", EN_DE)) == [("1", "2"), ("3", "4")]


def test_unpaired_moses_file_does_not_fail_a_folder() -> None:
    write(a__tsv="1\t2\n", x__en="3\n")
    assert (texts(one(".")), one(".").ignored_files) == ([("1", "2")], ("x.en (without a translation)",))


def test_train_file_has_sibling_splits_of_the_same_format() -> None:
    write(train__tsv="1\t2\n", test__tsv="3\t4\n", valid__jsonl='{"src": "5", "tgt": "6"}\n', other__tsv="7\t8\n")
    corpus = one("train.tsv")
    assert texts(corpus.get_sibling_split("test")) == [("3", "4")]
    assert corpus.get_sibling_split("valid") is None
    assert one("other.tsv").get_sibling_split("test") is None


def test_name_that_only_begins_like_a_split_is_not_one() -> None:
    write(devices__tsv="1\t2\n", testimony__tsv="3\t4\n", trains__tsv="5\t6\n", valley__tsv="7\t8\n")
    assert len(texts(one("."))) == 4
    assert one("trains.tsv").get_sibling_split("test") is None


def test_test_only_folder_is_read_but_valid_and_test_need_train() -> None:
    write(test__tsv="1\t2\n")
    assert texts(one(".")) == [("1", "2")]
    write(valid__tsv="3\t4\n")
    with pytest.raises(CorpusError, match=r"has no file for training: give one of test\.tsv, valid\.tsv"):
        one(".")
    write(corpus__tsv="5\t6\n")
    assert texts(one(".")) == [("5", "6")]
    assert texts(one(".").get_sibling_split("test")) == [("1", "2")]


def test_only_catalogs_in_the_requested_language_are_read() -> None:
    for tag in ("de", "fr"):
        Path(f"{tag}.po").write_text(f'msgid ""\nmsgstr "Language: {tag}\\n"\n\nmsgid "a"\nmsgstr "{tag}"\n')
    found = list(one(".", EN_DE))
    assert [item.reason for item in found if isinstance(item, BadLine)] == ["a file in other languages"]
    assert [item.target for item in found if isinstance(item, Pair)] == ["de"]
    with pytest.raises(CorpusError, match="does not say which two languages to read: it has de, fr"):
        one(".")
    with pytest.raises(CorpusError, match="does not contain en and tr: it has"):
        list(one(".", LanguagePair("en", "tr")))


def test_folder_without_readable_files_is_an_error() -> None:
    Path("empty").mkdir()
    with pytest.raises(CorpusError, match=r"empty: no file in this folder is parallel text: attent reads \.tsv"):
        one("empty")


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
        typed_in(monkeypatch, data)
        assert texts(one("-", EN_DE)) == [("a", "b")]


def test_standard_input_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    typed_in(monkeypatch, b"a\tb\n")
    corpus = one("-:2")
    assert (corpus.file_names, corpus.weight) == (("standard input",), 2.0)
    with pytest.raises(CorpusError, match="standard input can be read only once: save it to a file"):
        corpus.fingerprint()
    assert texts(corpus) == [("a", "b")]
    with pytest.raises(CorpusError, match="standard input can be read only once"):
        texts(corpus)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipe_is_read() -> None:
    os.mkfifo("pipe")
    corpus = one("pipe")
    writer = threading.Thread(target=Path("pipe").write_bytes, args=(gzip.compress(b"a\tb\n"),))
    writer.start()
    assert texts(corpus) == [("a", "b")]
    writer.join(timeout=5)
    with pytest.raises(CorpusError, match="pipe can be read only once"):
        corpus.fingerprint()


# Built-in corpora.


def test_path_takes_precedence_over_a_built_in_name(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    def folder(name: str, languages: LanguagePair) -> Path:
        requested.append((name, languages))
        made = Path("cache")
        made.mkdir(exist_ok=True)
        (made / "train.en").write_text("a\n")
        (made / "train.de").write_text("b\n")
        (made / "test.en").write_text("c\n")
        (made / "test.de").write_text("d\n")
        return made

    monkeypatch.setattr(builtin, "get_corpus_folder", folder)
    corpus = one("multi30k:2", EN_DE)
    assert (corpus.name, corpus.weight, texts(corpus)) == ("multi30k", 2.0, [("a", "b")])
    assert texts(corpus.get_sibling_split("test")) == [("c", "d")]
    assert requested == [("multi30k", EN_DE)]
    Path("multi30k").mkdir()
    Path("multi30k/x.tsv").write_text("local\tcopy\n")
    assert texts(one("multi30k", EN_DE)) == [("local", "copy")]
