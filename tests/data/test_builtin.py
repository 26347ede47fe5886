"""Built-in corpora, downloaded from a local server: complete or absent, and read like any folder."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from attent.data import builtin
from attent.data.builtin import (
    BUILTIN_CORPORA,
    OPUS_CORPORA,
    OPUS_SHA256,
    Multi30kFile,
    get_corpus_folder,
)
from attent.data.corpus import open_corpora
from attent.data.pairs import CorpusError, LanguagePair, Pair
from attent.storage.errors import StorageError
from benchmarks import phrases
from tests.data.http_server import FakeSite, serve_site

EN_DE = LanguagePair("en", "de")
TATOEBA = "tatoeba-v2023-04-12-de-en"
ARCHIVE = "/OPUS-Tatoeba/v2023-04-12/moses/de-en.txt.zip"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "cache"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """A server that is used instead of those of Multi30k and OPUS."""
    with serve_site() as site:
        replace_sites(site, monkeypatch)
        yield site


def make_captions(split: str, language: str) -> bytes:
    read_lines = "".join(f"{split} caption {number} in {language}\n" for number in range(20))
    return gzip.compress(read_lines.encode(), mtime=0)


def replace_sites(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Download from this server, with a small Multi30k on it."""
    files = []
    for theirs, ours in (("train", "train"), ("val", "valid"), ("test_2016_flickr", "test")):
        for language in ("cs", "de", "en"):
            content = make_captions(ours, language)
            site.files[f"/{theirs}.{language}.gz"] = content
            digest = hashlib.sha256(content).hexdigest()
            files.append(Multi30kFile(f"{theirs}.{language}.gz", f"{ours}.{language}.gz", len(content), digest))
    for name, value in {"MULTI30K_URL": site.url, "MULTI30K_FILES": tuple(files), "OPUS_URL": site.url}.items():
        monkeypatch.setattr(builtin, name, value)


def make_zip(members: dict[str, str]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return content.getvalue()


def make_pairs(count: int = 2_000) -> list[tuple[str, str]]:
    """Return pairs; some sentences of each side are repeated with another translation."""
    return [
        (f"Satz {number % (count * 9 // 10)}", f"sentence {number * 7 % (count * 4 // 5)}") for number in range(count)
    ]


def make_tatoeba_zip(pairs: list[tuple[str, str]], readme: str = "") -> bytes:
    german = "".join(f"{source}\n" for source, _ in pairs)
    english = "".join(f"{target}\r\n" for _, target in pairs)
    return make_zip({"Tatoeba.de-en.de": german, "Tatoeba.de-en.en": english, "README": readme, "LICENSE": ""})


def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- the list of corpora -----------------------------------------------------------------------------------


def test_every_corpus_has_a_one_line_description() -> None:
    assert {"dates", "multi30k", "tatoeba", "europarl"} <= set(BUILTIN_CORPORA)
    assert all(0 < len(about) < 120 and "\n" not in about for about in BUILTIN_CORPORA.values())


def test_multi30k_is_pinned_file_by_file() -> None:
    assert len({file.sha256 for file in builtin.MULTI30K_FILES}) == len(builtin.MULTI30K_FILES) == 12
    assert all(len(bytes.fromhex(file.sha256)) == 32 for file in builtin.MULTI30K_FILES)
    assert len(builtin.MULTI30K_URL.split("/")[5]) == 40, "a commit, since a branch moves"


def test_unknown_name_lists_the_built_in_corpora() -> None:
    with pytest.raises(
        CorpusError, match="wmt99: is not a built-in corpus; there are phrases, dates, multi30k, tatoeba"
    ):
        get_corpus_folder("wmt99", EN_DE)


# ---- multi30k ----------------------------------------------------------------------------------------------


def test_multi30k_is_a_folder_with_splits(site: FakeSite, cache: Path) -> None:
    folder = get_corpus_folder("multi30k", EN_DE)
    assert folder == cache / "corpora" / "multi30k-de-en"
    assert list_names(folder) == [
        "SOURCE.json",
        *("test.de.gz", "test.en.gz", "train.de.gz", "train.en.gz", "valid.de.gz", "valid.en.gz"),
    ]
    assert list_names(cache / "corpora") == [".multi30k-de-en.lock", "multi30k-de-en"]


def test_only_the_requested_languages_are_downloaded(site: FakeSite) -> None:
    get_corpus_folder("multi30k", LanguagePair("en", "cs"))
    assert {path.split(".")[1] for path, _ in site.requests} == {"cs", "en"}


def test_second_time_nothing_is_downloaded(site: FakeSite) -> None:
    assert get_corpus_folder("multi30k", EN_DE) == get_corpus_folder("multi30k", LanguagePair("de", "en"))
    assert len(site.requests) == 6


def test_built_in_corpus_is_read_like_any_folder(site: FakeSite) -> None:
    get_corpus_folder("multi30k", EN_DE)
    (corpus,) = open_corpora(["multi30k"], EN_DE)
    pairs = [pair for pair in corpus if isinstance(pair, Pair)]
    assert [(pair.source, pair.target) for pair in pairs[:1]] == [("train caption 0 in en", "train caption 0 in de")]
    assert len(pairs) == 20
    valid = corpus.get_sibling_split("valid")
    assert valid is not None
    assert next(iter(valid))[0] == "valid caption 0 in en"


def test_two_processes_at_once_both_succeed_with_one_download(site: FakeSite, cache: Path, tmp_path: Path) -> None:
    rows = [tuple(vars(file).values()) for file in builtin.MULTI30K_FILES]
    script = tmp_path / "open_multi30k.py"
    script.write_text(
        "from attent.data import builtin\n"
        f"builtin.MULTI30K_FILES = tuple(builtin.Multi30kFile(*row) for row in {rows!r})\n"
        f"builtin.MULTI30K_URL = {site.url!r}\n"
        "print(builtin.get_corpus_folder('multi30k', builtin.LanguagePair('en', 'de')))\n"
    )
    processes = [subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert folders == [str(cache / "corpora" / "multi30k-de-en")] * 2
    assert len(site.requests) == 6


def test_after_a_failure_the_next_run_fetches_only_what_is_missing(site: FakeSite, cache: Path) -> None:
    content = site.files.pop("/val.de.gz")
    with pytest.raises(StorageError, match="404"):
        get_corpus_folder("multi30k", EN_DE)
    assert not (cache / "corpora" / "multi30k-de-en").exists()
    site.files["/val.de.gz"] = content
    site.requests.clear()
    get_corpus_folder("multi30k", EN_DE)
    assert [path for path, _ in site.requests] == [
        *("/val.de.gz", "/val.en.gz", "/test_2016_flickr.de.gz", "/test_2016_flickr.en.gz")
    ]


def test_truncated_gz_is_refused(site: FakeSite, cache: Path) -> None:
    site.files["/train.en.gz"] = site.files["/train.en.gz"][:-20]
    with pytest.raises(StorageError, match=r"train\.en\.gz\.part: does not match"):
        get_corpus_folder("multi30k", EN_DE)
    assert not (cache / "corpora" / "multi30k-de-en").exists()


def test_offline_error_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_site() as site:
        replace_sites(site, monkeypatch)
    with pytest.raises(CorpusError) as caught:
        get_corpus_folder("multi30k", EN_DE)
    message = str(caught.value)
    assert message.startswith(f"multi30k-de-en: cannot download {site.url}/train.de.gz: no network (")
    folder = cache / "corpora" / "multi30k-de-en"
    assert message.endswith(f"). Fetch it elsewhere and give its path instead of the name, or put it into {folder}")


def test_manual_copy_is_used_as_it_is(site: FakeSite, cache: Path) -> None:
    folder = cache / "corpora" / "multi30k-de-en"
    folder.mkdir(parents=True)
    (folder / "train.en").write_text("a\n")
    (folder / "train.de").write_text("b\n")
    assert get_corpus_folder("multi30k", EN_DE) == folder
    assert site.requests == []


def test_empty_folder_is_not_a_manual_copy(site: FakeSite, cache: Path) -> None:
    (cache / "corpora" / "multi30k-de-en").mkdir(parents=True)
    assert "train.en.gz" in list_names(get_corpus_folder("multi30k", EN_DE))


@pytest.mark.parametrize(
    ("languages", "message"),
    [
        (LanguagePair(), "multi30k: is in several languages; choose them, such as --src en --tgt de"),
        (LanguagePair("en", "it"), "multi30k: is in cs, de, en, fr, not in `it`; choose --src and --tgt from these"),
        (LanguagePair("en", "EN"), "multi30k: --src and --tgt are both `en`; give two languages"),
    ],
)
def test_languages_outside_multi30k_are_refused(languages: LanguagePair, message: str) -> None:
    with pytest.raises(CorpusError) as caught:
        get_corpus_folder("multi30k", languages)
    assert str(caught.value) == message


# ---- changed files -----------------------------------------------------------------------------------------


def test_file_changed_later_is_noticed(site: FakeSite) -> None:
    folder = get_corpus_folder("multi30k", EN_DE)
    (folder / "valid.en.gz").write_bytes(make_captions("other", "en"))
    with pytest.raises(CorpusError, match=r"valid\.en\.gz: has changed since it was made; delete the folder"):
        get_corpus_folder("multi30k", EN_DE)
    (folder / "SOURCE.json").unlink()
    assert get_corpus_folder("multi30k", EN_DE) == folder


def test_file_lost_later_is_noticed(site: FakeSite) -> None:
    folder = get_corpus_folder("multi30k", EN_DE)
    (folder / "test.de.gz").unlink()
    with pytest.raises(CorpusError, match=r"test\.de\.gz: is missing since it was made"):
        get_corpus_folder("multi30k", EN_DE)


def test_damaged_source_file_is_reported(site: FakeSite) -> None:
    folder = get_corpus_folder("multi30k", EN_DE)
    (folder / "SOURCE.json").write_text("{")
    with pytest.raises(ValueError, match=r"SOURCE\.json: is not valid JSON"):
        get_corpus_folder("multi30k", EN_DE)


# ---- OPUS --------------------------------------------------------------------------------------------------


def test_opus_splits_share_no_sentence(site: FakeSite) -> None:
    site.files[ARCHIVE] = make_tatoeba_zip(make_pairs())
    folder = get_corpus_folder("tatoeba", EN_DE)
    sides = {
        tag: {split: read_lines(folder / f"{split}.{tag}") for split in ("train", "valid", "test")}
        for tag in ("de", "en")
    }
    for tag in ("de", "en"):
        train, valid, test = (set(sides[tag][split]) for split in ("train", "valid", "test"))
        assert not train & valid
        assert not train & test
        assert not valid & test
    assert [len(sides["en"][split]) for split in ("valid", "test")] == [100, 100]
    assert len(sides["de"]["train"]) == len(sides["en"]["train"]) > 1_400


def test_opus_pairs_stay_pairs(site: FakeSite) -> None:
    pairs = make_pairs()
    site.files[ARCHIVE] = make_tatoeba_zip(pairs)
    folder = get_corpus_folder("tatoeba", EN_DE)
    for split in ("train", "valid", "test"):
        assert set(zip(read_lines(folder / f"{split}.de"), read_lines(folder / f"{split}.en"), strict=True)) <= set(
            pairs
        )


def test_both_directions_share_one_folder_and_one_split(site: FakeSite, cache: Path) -> None:
    site.files[ARCHIVE] = make_tatoeba_zip(make_pairs(100))
    assert get_corpus_folder("tatoeba", EN_DE) == get_corpus_folder("tatoeba", LanguagePair("de", "en"))
    assert list_names(cache / "corpora") == [f".{TATOEBA}.lock", TATOEBA]


def test_origin_of_an_opus_corpus_is_recorded(site: FakeSite) -> None:
    site.files[ARCHIVE] = make_tatoeba_zip(make_pairs(100))
    source = json.loads((get_corpus_folder("tatoeba", EN_DE) / "SOURCE.json").read_text())
    assert source["from"] == site.url + ARCHIVE
    assert source["archive_sha256"] == hashlib.sha256(site.files[ARCHIVE]).hexdigest()
    assert sorted(source["sha256"]) == ["test.de", "test.en", "train.de", "train.en", "valid.de", "valid.en"]


def test_archive_downloaded_elsewhere_is_used(site: FakeSite, cache: Path) -> None:
    (cache / "corpora" / TATOEBA).mkdir(parents=True)
    (cache / "corpora" / TATOEBA / "de-en.txt.zip").write_bytes(make_tatoeba_zip(make_pairs(100)))
    assert "train.de" in list_names(get_corpus_folder("tatoeba", EN_DE))
    assert site.requests == []


def test_few_pairs_are_all_for_training(site: FakeSite) -> None:
    site.files[ARCHIVE] = make_tatoeba_zip(make_pairs(19))
    assert list_names(get_corpus_folder("tatoeba", EN_DE)) == [
        "SOURCE.json",
        "train.de",
        "train.en",
    ]


def test_empty_and_overlong_lines_drop_the_pair(site: FakeSite) -> None:
    pairs = [("eins", "one"), ("", "two"), ("drei", ""), ("4" * 3_000_000, "four"), ("fünf", "five")]
    site.files[ARCHIVE] = make_tatoeba_zip(
        pairs, readme=random.Random(0).randbytes(50_000).hex()
    )  # compresses like real text
    folder = get_corpus_folder("tatoeba", EN_DE)
    assert list(zip(read_lines(folder / "train.de"), read_lines(folder / "train.en"), strict=True)) == [
        pairs[0],
        pairs[4],
    ]


def test_opus_archive_must_have_the_published_checksum(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site.files[ARCHIVE] = make_tatoeba_zip(make_pairs(100))
    wrong, right = ({TATOEBA: digest} for digest in ("0" * 64, hashlib.sha256(site.files[ARCHIVE]).hexdigest()))
    monkeypatch.setattr(builtin, "OPUS_SHA256", wrong)
    with pytest.raises(StorageError, match=r"de-en\.txt\.zip\.part: does not match .* and was removed"):
        get_corpus_folder("tatoeba", EN_DE)
    monkeypatch.setattr(builtin, "OPUS_SHA256", right)
    get_corpus_folder("tatoeba", EN_DE)


def test_published_checksums_are_of_known_archives() -> None:
    keys = {f"{name}-{corpus.version}" for name, corpus in OPUS_CORPORA.items()}
    for key, digest in OPUS_SHA256.items():
        corpus, first, second = key.rsplit("-", 2)
        assert corpus in keys
        assert first < second
        assert re.fullmatch("[0-9a-f]{64}", digest)
    assert len(set(OPUS_SHA256.values())) == len(OPUS_SHA256)


def test_missing_opus_language_pair_is_reported(site: FakeSite) -> None:
    with pytest.raises(CorpusError, match=r"404 Not Found; https://opus\.nlpl\.eu lists the language pairs of Tatoeba"):
        get_corpus_folder("tatoeba", LanguagePair("en", "tlh"))


def test_region_is_spelled_as_opus_spells_it(site: FakeSite) -> None:
    site.files["/OPUS-KDE4/v2/moses/en-pt_BR.txt.zip"] = make_zip(
        {"KDE4.en-pt_BR.en": "a\n", "KDE4.en-pt_BR.pt_BR": "b\n"}
    )
    assert "train.pt-BR" in list_names(get_corpus_folder("kde4", LanguagePair("pt-br", "en")))


@pytest.mark.parametrize("tag", ["../../etc", "de/en", "d", "", "de en", "de\n"])
def test_invalid_language_tag_never_reaches_a_url(tag: str) -> None:
    with pytest.raises(CorpusError, match="is not a language tag; write one such as de or pt-BR"):
        get_corpus_folder("tatoeba", LanguagePair("en", tag))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"Tatoeba.de-en.de": "x\n"}, r"there is no Tatoeba\.de-en\.en in it"),
        ({"Tatoeba.de-en.de": "x\ny\n", "Tatoeba.de-en.en": "x\n"}, "its two sides have different numbers of lines"),
        (
            {"Tatoeba.de-en.de": "x" * 10**6, "Tatoeba.de-en.en": "x" * 10**6},
            "claims to contain 2,000,000 bytes of text",
        ),
        ({"Tatoeba.de-en.de": "", "Tatoeba.de-en.en": ""}, "it has no pairs"),
    ],
)
def test_hostile_and_damaged_archives_are_refused(
    members: dict[str, str], message: str, site: FakeSite, tmp_path: Path
) -> None:
    site.files[ARCHIVE] = make_zip(members)
    with pytest.raises(CorpusError, match=rf"was a damaged archive \(.*{message}.*\) and was removed; run again"):
        get_corpus_folder("tatoeba", EN_DE)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.parametrize("damage", [b"", b"<html>not a zip</html>"])
def test_non_archive_is_refused(damage: bytes, site: FakeSite) -> None:
    site.files[ARCHIVE] = damage
    with pytest.raises(CorpusError, match="damaged archive"):
        get_corpus_folder("tatoeba", EN_DE)


def test_flipped_byte_inside_an_archive_is_noticed(site: FakeSite, cache: Path) -> None:
    content = bytearray(make_tatoeba_zip(make_pairs()))
    content[2_000] ^= 1
    site.files[ARCHIVE] = bytes(content)
    with pytest.raises(CorpusError, match="damaged archive"):
        get_corpus_folder("tatoeba", EN_DE)
    assert not (cache / "corpora" / TATOEBA).exists()


# ---- dates -------------------------------------------------------------------------------------------------


def test_dates_are_generated_offline_and_once(cache: Path) -> None:
    folder = get_corpus_folder("dates", LanguagePair())
    assert [len(read_lines(folder / f"{split}.tsv")) for split in ("train", "valid", "test")] == [100_000, 1_000, 2_000]
    made_at = (folder / "train.tsv").stat().st_mtime_ns
    assert get_corpus_folder("dates", LanguagePair(None, "iso")) == folder
    assert (folder / "train.tsv").stat().st_mtime_ns == made_at
    assert folder.parent == cache / "corpora"


# Phrases.


def test_phrases_are_read_in_both_directions_and_splits_share_no_sentence(cache: Path) -> None:
    (corpus,) = open_corpora(["phrases"], EN_DE)
    (backwards,) = open_corpora(["phrases"], LanguagePair("de", "en"))
    splits = [corpus, corpus.get_sibling_split("valid"), corpus.get_sibling_split("test")]
    make_pairs = [{pair.source for pair in split or () if isinstance(pair, Pair)} for split in splits]
    assert [len(sources) for sources in make_pairs] == list(builtin.PHRASES_SPLITS.values())
    assert len(set.union(*make_pairs)) == sum(builtin.PHRASES_SPLITS.values())
    assert min(len(source.split()) for source in make_pairs[0]) >= 4
    assert [(pair.target, pair.source) for pair in backwards if isinstance(pair, Pair)] == [
        (pair.source, pair.target) for pair in corpus if isinstance(pair, Pair)
    ]


def test_phrases_agree_in_gender_number_and_word_order() -> None:
    pairs = dict(islice(phrases.generate_pairs(), 5_000))
    for source, target in pairs.items():
        message = target.split()
        if "Katze" in message:
            assert message[message.index("Katze") - 2] in ("die", "eine")
        if source.split()[0] in dict(phrases.TIMES):
            assert message[1] in {form for verb in phrases.VERBS for form in (verb.de, verb.de_third)}
        if " has " in source or " have " in source:
            assert message[-1] in {verb.de_participle for verb in phrases.VERBS}
