"""The token store: what the corpus says, once, in order, and whole or not there at all."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attent.data import token_store as stores
from attent.data.corpus import Corpus, open_corpora
from attent.data.encode import BLOCK_PAIRS, EncodingConfig, learn_tokenizer
from attent.data.filters import FilterConfig
from attent.data.pairs import CorpusError, LanguagePair
from attent.data.token_store import ResampledStores, TokenStore, prepare_store, store_key
from attent.text.tokenizer import END, SubwordSampling, Tokenizer
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer

LINES = [f"a small house number {n}\tein kleines Haus Nummer {n}" for n in range(300)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    sides = [[line.split("\t")[side] for line in LINES] for side in range(2)]
    return train_tokenizer(sides[0], sides[1], TokenizerConfig(vocab=340), tags=["de", "fr"])


def written(path: Path, lines: list[str]) -> list[Corpus]:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return open_corpora([str(path)], LanguagePair("en", "de"))


def content(store: TokenStore) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.folder.iterdir()) if path.is_file()}


def visible(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.is_dir()]


def decoded(store: TokenStore, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [
        (tokenizer.source.decode(store.source[i].tolist()), tokenizer.target.decode(store.target[i].tolist()))
        for i in range(len(store))
    ]


def test_a_store_holds_the_corpus_in_its_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    store = prepare_store(written(tmp_path / "a.tsv", LINES), EncodingConfig(tokenizer=tokenizer), tmp_path / "stores")
    assert decoded(store, tokenizer) == [tuple(line.split("\t")) for line in LINES]
    assert all(store.source[i][-1] == END and store.target[i][-1] == END for i in range(len(store)))
    assert store.format_location(41) == f"{tmp_path / 'a.tsv'}:42"
    assert store.source.lengths.tolist() == [len(store.source[i]) for i in range(len(store))]


def test_what_was_left_out_is_counted_with_its_place(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [LINES[0], "one column only", LINES[1], LINES[0], "\tein Haus", LINES[2]]
    store = prepare_store(written(tmp_path / "a.tsv", lines), EncodingConfig(tokenizer=tokenizer), tmp_path / "stores")
    (part,) = store.meta.parts
    assert part.pairs == len(store) == 3
    assert sum(part.dropped.values()) == 3
    assert part.dropped["duplicates"] == 1
    assert part.examples["duplicates"] == [f"{tmp_path / 'a.tsv'}:4"]
    assert store.format_location(2) == f"{tmp_path / 'a.tsv'}:6"
    everything = prepare_store(
        written(tmp_path / "a.tsv", lines),
        EncodingConfig(tokenizer=tokenizer, filters=FilterConfig.disabled()),
        tmp_path / "stores",
    )
    assert len(everything) == 5


def test_a_second_run_opens_what_the_first_has_made(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = written(tmp_path / "a.tsv", LINES)
    first = prepare_store(found, EncodingConfig(tokenizer=tokenizer), tmp_path / "stores")
    monkeypatch.setattr(stores, "encode_corpus", None)  # must not be needed again
    assert content(prepare_store(found, EncodingConfig(tokenizer=tokenizer), tmp_path / "stores")) == content(first)


def test_the_key_tells_apart_all_that_decides_the_ids(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = written(tmp_path / "a.tsv", LINES)
    recipe = EncodingConfig(tokenizer=tokenizer)
    other = train_tokenizer(["a b c"] * 9, ["c b a"] * 9, TokenizerConfig(kind="char"))
    keys = [
        store_key(found, recipe, tmp_path),
        store_key(found, replace(recipe, tokenizer=other), tmp_path),
        store_key(found, replace(recipe, filters=FilterConfig.disabled()), tmp_path),
        store_key(found, replace(recipe, language_tags=True), tmp_path),
        store_key(found, replace(recipe, subword_sampling=SubwordSampling(rate=0.1), sampling_seed=(0, 1)), tmp_path),
        store_key(found, replace(recipe, subword_sampling=SubwordSampling(rate=0.1), sampling_seed=(0, 2)), tmp_path),
        store_key(open_corpora([str(tmp_path / "a.tsv")], LanguagePair("de", "en")), recipe, tmp_path),
        store_key(found + found, recipe, tmp_path),
        store_key(written(tmp_path / "a.tsv", LINES[1:]), recipe, tmp_path),
    ]
    assert len(set(keys)) == len(keys)
    assert store_key([replace(found[0], weight=3.0)], recipe, tmp_path) == store_key(
        found, recipe, tmp_path
    )  # weights belong to the batches


def test_another_content_of_the_same_size_and_time_has_another_key(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found, recipe, path = (
        written(tmp_path / "a.tsv", ["one\teins"]),
        EncodingConfig(tokenizer=tokenizer),
        tmp_path / "a.tsv",
    )
    before, status = store_key(found, recipe, tmp_path), path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert store_key(found, recipe, tmp_path) == before
    path.write_text("two\tzwei\n", encoding="utf-8")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert store_key(found, recipe, tmp_path) != before


def test_folders_may_be_named_by_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    written(tmp_path / "a.tsv", LINES)
    store = prepare_store(
        open_corpora(str(tmp_path / "a.tsv")), EncodingConfig(tokenizer=tokenizer), str(tmp_path / "stores")
    )
    assert len(store) == len(LINES)
    assert len(repr(store)) < 2000


def test_tags_need_a_language(tmp_path: Path, tokenizer: Tokenizer) -> None:
    written(tmp_path / "a.tsv", LINES)
    with pytest.raises(CorpusError, match="need the target language"):
        prepare_store(
            open_corpora([str(tmp_path / "a.tsv")]),
            EncodingConfig(tokenizer=tokenizer, language_tags=True),
            tmp_path / "stores",
        )


def test_resampled_keeps_the_stores_of_few_epochs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = written(tmp_path / "a.tsv", LINES)
    recipe = EncodingConfig(tokenizer=tokenizer, subword_sampling=SubwordSampling(rate=0.3))
    epochs = ResampledStores(found, recipe, tmp_path / "sampled", seed=5)
    stores = [content(epochs(epoch)) for epoch in range(4)]
    assert len({store["source.ids"] for store in stores}) == 4
    assert len(visible(tmp_path / "sampled")) == 2
    again = ResampledStores(found, recipe, tmp_path / "elsewhere", seed=5)
    assert content(again(3)) == stores[3]


def test_the_number_of_processes_changes_no_byte(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attent.data.encode.BLOCK_PAIRS", 16)
    monkeypatch.setattr("attent.data.encode.SERIAL_BLOCKS", 2)
    found = written(tmp_path / "a.tsv", [*LINES, "bad", *LINES[:50], "\t"])
    for recipe in (
        EncodingConfig(tokenizer=tokenizer),
        EncodingConfig(tokenizer=tokenizer, subword_sampling=SubwordSampling(rate=0.2), sampling_seed=(1, 2)),
    ):
        made = [content(prepare_store(found, recipe, tmp_path / f"by {n}", workers=n)) for n in (1, 4)]
        assert made[0] == made[1]


def test_sampling_segments_anew_each_epoch_and_the_same_for_the_same_seed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = written(tmp_path / "a.tsv", LINES)
    recipe = EncodingConfig(tokenizer=tokenizer, subword_sampling=SubwordSampling(rate=0.3))
    one, again, other = (
        prepare_store(found, replace(recipe, sampling_seed=(7, epoch)), tmp_path / root)
        for epoch, root in ((1, "x"), (1, "y"), (2, "x"))
    )
    assert content(one) == content(again)
    assert content(one) != content(other)
    assert decoded(one, tokenizer) == decoded(other, tokenizer)


def test_tags_stand_before_the_source_in_many_to_many_corpora(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "m.jsonl").write_text('{"translation": {"en": "a house", "de": "ein Haus", "fr": "a house"}}\n' * 2)
    found = open_corpora([str(tmp_path / "m.jsonl")], LanguagePair("en", "de,fr"))
    store = prepare_store(
        found, EncodingConfig(tokenizer=tokenizer, language_tags=True, filters=FilterConfig()), tmp_path / "stores"
    )
    assert [part.pairs for part in store.meta.parts] == [1, 1]
    assert [int(store.source[i][0]) for i in range(2)] == [
        tokenizer.source.get_tag_id("de"),
        tokenizer.source.get_tag_id("fr"),
    ]


def test_a_tokenizer_is_learnt_from_the_corpora_themselves(tmp_path: Path) -> None:
    found = written(tmp_path / "a.tsv", [*LINES, "one column only"])
    learnt = learn_tokenizer(found, TokenizerConfig(vocab=340), language_tags=True)
    sides = [[line.split("\t")[side] for line in LINES] for side in range(2)]
    assert (
        learnt.fingerprint == train_tokenizer(sides[0], sides[1], TokenizerConfig(vocab=340), tags=["de"]).fingerprint
    )
    assert learnt.source.tags == ("de",)
    assert learn_tokenizer(found, TokenizerConfig(vocab=340)).source.tags == ()


def test_a_large_vocabulary_takes_wider_numbers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    class Huge:
        def __init__(self) -> None:
            self.size = 70_000

    recipe = EncodingConfig(tokenizer=replace(tokenizer, source=Huge()))  # type: ignore[arg-type]
    assert recipe.dtype == "<u4"
    assert EncodingConfig(tokenizer=tokenizer).dtype == "<u2"


def test_a_damaged_store_is_made_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = written(tmp_path / "a.tsv", LINES)
    store = prepare_store(found, EncodingConfig(tokenizer=tokenizer), tmp_path / "stores")
    whole = content(store)
    for name, damage in (("source.ids", b"\0"), ("store.json", b"{"), ("store.json", b"{}"), ("target.offsets", b"")):
        (store.folder / name).write_bytes(damage)
        with pytest.raises(ValueError, match=name):
            TokenStore.open(store.folder)
        assert content(prepare_store(found, EncodingConfig(tokenizer=tokenizer), tmp_path / "stores")) == whole


def test_an_unreadable_corpus_leaves_nothing_behind(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "c.en").write_text("one\ntwo\n")
    (tmp_path / "c.de").write_text("eins\n")
    found = open_corpora([str(tmp_path / "c")], LanguagePair("en", "de"))
    with pytest.raises(CorpusError, match="2 lines"):
        prepare_store(found, EncodingConfig(tokenizer=tokenizer), tmp_path / "stores")
    assert visible(tmp_path / "stores") == []


def test_two_at_once_both_get_the_store(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found, got = written(tmp_path / "a.tsv", LINES), []
    threads = [
        threading.Thread(
            target=lambda: got.append(prepare_store(found, EncodingConfig(tokenizer=tokenizer), tmp_path / "stores"))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(store) for store in got] == [len(LINES)] * 4
    assert len(visible(tmp_path / "stores")) == 1


def test_a_killed_run_leaves_no_store_to_be_found_and_its_rest_is_cleared(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    found = written(tmp_path / "a.tsv", LINES * 50)
    script = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from attent.data.corpus import open_corpora
        from attent.data.encode import EncodingConfig
        from attent.data.filters import FilterConfig
        from attent.data.pairs import LanguagePair
        from attent.data.token_store import prepare_store
        from attent.text.tokenizer import Tokenizer
        home = Path(sys.argv[1])
        recipe = EncodingConfig(tokenizer=Tokenizer.load(home / "tokenizer"), filters=FilterConfig.disabled())
        def slowly(pairs):
            print(pairs, flush=True)
            time.sleep(60)
        prepare_store(open_corpora([str(home / "a.tsv")], LanguagePair("en", "de")), recipe, home / "stores", progress=slowly)
    """)
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0  # it has begun to write
        process.send_signal(signal.SIGKILL if os.name == "posix" else signal.SIGTERM)
    (left,) = (tmp_path / "stores").glob("*.part")
    assert visible(tmp_path / "stores") == [left.name]
    recipe = EncodingConfig(tokenizer=tokenizer, filters=FilterConfig.disabled())
    store = prepare_store(found, recipe, tmp_path / "stores")
    assert len(store) == 50 * len(LINES)
    assert visible(tmp_path / "stores") == [store.folder.name]


def test_letting_go_of_what_was_mapped_changes_nothing(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = prepare_store(written(tmp_path / "a.tsv", LINES), EncodingConfig(tokenizer=tokenizer), tmp_path / "stores")
    expected = np.concatenate([store.source[pair] for pair in range(50)])
    monkeypatch.setattr(stores, "MAX_RESIDENT_BYTES", 1)
    for _ in range(3):
        got = store.source.gather(store.source.offsets[:50], store.source.lengths[:50].astype(np.int64))
        assert got.tolist() == expected.tolist()
        assert store.source._read_count == [0]


def test_an_empty_corpus_is_an_empty_store(tmp_path: Path, tokenizer: Tokenizer) -> None:
    store = prepare_store(
        written(tmp_path / "a.tsv", ["only one column"]), EncodingConfig(tokenizer=tokenizer), tmp_path / "stores"
    )
    assert len(store) == 0
    assert store.source.lengths.size == 0


def test_progress_tells_every_pair_that_was_done(tmp_path: Path, tokenizer: Tokenizer) -> None:
    told: list[int] = []
    found = written(tmp_path / "a.tsv", [*LINES * (BLOCK_PAIRS // len(LINES) + 2), "\tempty source"])
    prepare_store(found, EncodingConfig(tokenizer=tokenizer), tmp_path / "stores", progress=told.append)
    assert told == sorted(told)
    assert told[-1] == sum(1 for _ in found[0])


def test_blocks_of_a_store_are_written_without_gaps(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attent.data.encode.BLOCK_PAIRS", 7)
    found = written(tmp_path / "a.tsv", LINES) + written(tmp_path / "b.tsv", [line + " mehr" for line in LINES])
    store = prepare_store(found, EncodingConfig(tokenizer=tokenizer), tmp_path / "stores")
    assert len(store) == 2 * len(LINES)
    assert int(store.source.offsets[-1]) == len(store.source.ids)
    assert np.all(np.diff(store.target.offsets) > 0)
    assert store.format_location(len(LINES)) == f"{tmp_path / 'b.tsv'}:1"
