"""The token store: pairs in corpus order without duplicates, complete or absent."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attent.data import token_store as stores
from attent.data.augment import Augmenter, parse_rates
from attent.data.batch_plan import BatchConfig
from attent.data.corpus import Corpus, open_corpora
from attent.data.encode import BLOCK_PAIRS, EncodingConfig, learn_tokenizer
from attent.data.filters import FilterConfig
from attent.data.loader import PairLoader
from attent.data.pairs import CorpusError, LanguagePair, Pair
from attent.data.token_store import EpochStores, TokenStore, prepare_store, store_key
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer
from attent.text.vocabulary import END

LINES = [f"a small house number {n}\tein kleines Haus Nummer {n}" for n in range(300)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    sides = [[line.split("\t")[side] for line in LINES] for side in range(2)]
    return train_tokenizer(sides[0], sides[1], TokenizerConfig(vocab=340), tags=["de", "fr"])


def write_corpus(path: Path, lines: list[str]) -> list[Corpus]:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return open_corpora([str(path)], LanguagePair("en", "de"))


def read_files(store: TokenStore) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.folder.iterdir()) if path.is_file()}


def learn_augmenters(corpora: list[Corpus]) -> dict[LanguagePair, Augmenter]:
    pairs = ((pair.source, pair.target) for pair in corpora[0] if isinstance(pair, Pair))
    return {corpora[0].languages: Augmenter.learn(parse_rates(()), pairs)}


def list_visible(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.is_dir()]


def decode_store(store: TokenStore, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [
        (tokenizer.source.decode(store.source[i].tolist()), tokenizer.target.decode(store.target[i].tolist()))
        for i in range(len(store))
    ]


def test_store_keeps_corpus_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    store = prepare_store(
        write_corpus(tmp_path / "a.tsv", LINES), EncodingConfig(tokenizer=tokenizer), tmp_path / "stores"
    )
    assert decode_store(store, tokenizer) == [tuple(line.split("\t")) for line in LINES]
    assert all(store.source[i][-1] == END and store.target[i][-1] == END for i in range(len(store)))
    assert store.format_location(41) == f"{tmp_path / 'a.tsv'}:42"
    assert store.source.lengths.tolist() == [len(store.source[i]) for i in range(len(store))]


def test_dropped_pairs_are_counted_with_location(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [LINES[0], "one column only", LINES[1], LINES[0], "\tein Haus", LINES[2]]
    store = prepare_store(
        write_corpus(tmp_path / "a.tsv", lines), EncodingConfig(tokenizer=tokenizer), tmp_path / "stores"
    )
    (part,) = store.meta.parts
    assert part.pairs == len(store) == 3
    assert sum(part.dropped.values()) == 3
    assert part.dropped["duplicates"] == 1
    assert part.examples["duplicates"] == [f"{tmp_path / 'a.tsv'}:4"]
    assert store.format_location(2) == f"{tmp_path / 'a.tsv'}:6"
    everything = prepare_store(
        write_corpus(tmp_path / "a.tsv", lines),
        EncodingConfig(tokenizer=tokenizer, filters=FilterConfig.disabled()),
        tmp_path / "stores",
    )
    assert len(everything) == 5


def test_second_run_opens_the_store_of_the_first(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpora = write_corpus(tmp_path / "a.tsv", LINES)
    first = prepare_store(corpora, EncodingConfig(tokenizer=tokenizer), tmp_path / "stores")
    monkeypatch.setattr(stores, "encode_corpus", None)  # must not be read again
    assert read_files(prepare_store(corpora, EncodingConfig(tokenizer=tokenizer), tmp_path / "stores")) == read_files(
        first
    )


def test_key_depends_on_everything_that_determines_the_ids(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpora = write_corpus(tmp_path / "a.tsv", LINES)
    config = EncodingConfig(tokenizer=tokenizer)
    augmented = replace(config, augmenters=learn_augmenters(corpora))
    other = train_tokenizer(["a b c"] * 9, ["c b a"] * 9, TokenizerConfig(kind="char"))
    keys = [
        store_key(corpora, config, tmp_path),
        store_key(corpora, replace(config, tokenizer=other), tmp_path),
        store_key(corpora, replace(config, filters=FilterConfig.disabled()), tmp_path),
        store_key(corpora, replace(config, language_tags=True), tmp_path),
        store_key(corpora, replace(augmented, augmentation_seed=(0, 1)), tmp_path),
        store_key(corpora, replace(augmented, augmentation_seed=(0, 2)), tmp_path),
        store_key(open_corpora([str(tmp_path / "a.tsv")], LanguagePair("de", "en")), config, tmp_path),
        store_key(corpora + corpora, config, tmp_path),
        store_key(write_corpus(tmp_path / "a.tsv", LINES[1:]), config, tmp_path),
    ]
    assert len(set(keys)) == len(keys)
    assert store_key([replace(corpora[0], weight=3.0)], config, tmp_path) == store_key(
        corpora, config, tmp_path
    )  # weights affect batches, not the store


def test_changed_content_of_same_size_and_mtime_changes_the_key(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpora, config, path = (
        write_corpus(tmp_path / "a.tsv", ["one\teins"]),
        EncodingConfig(tokenizer=tokenizer),
        tmp_path / "a.tsv",
    )
    before, status = store_key(corpora, config, tmp_path), path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert store_key(corpora, config, tmp_path) == before
    path.write_text("two\tzwei\n", encoding="utf-8")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert store_key(corpora, config, tmp_path) != before


def test_root_may_be_a_string(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_corpus(tmp_path / "a.tsv", LINES)
    store = prepare_store(
        open_corpora(str(tmp_path / "a.tsv")), EncodingConfig(tokenizer=tokenizer), str(tmp_path / "stores")
    )
    assert len(store) == len(LINES)
    assert len(repr(store)) < 2000


def test_language_tags_need_a_target_language(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_corpus(tmp_path / "a.tsv", LINES)
    with pytest.raises(CorpusError, match="need the target language"):
        prepare_store(
            open_corpora([str(tmp_path / "a.tsv")]),
            EncodingConfig(tokenizer=tokenizer, language_tags=True),
            tmp_path / "stores",
        )


def test_epoch_stores_keep_few_epochs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpora = write_corpus(tmp_path / "a.tsv", LINES)
    config = EncodingConfig(tokenizer=tokenizer, augmenters=learn_augmenters(corpora))
    epochs = EpochStores(corpora, config, tmp_path / "epochs", seed=5, workers=0)
    stores = [read_files(epochs(epoch)) for epoch in range(4)]
    assert len({store["source.ids"] for store in stores}) == 4
    assert len(list_visible(tmp_path / "epochs")) == 2
    again = EpochStores(corpora, config, tmp_path / "elsewhere", seed=5)
    assert read_files(again(3)) == stores[3]


@pytest.mark.slow
@pytest.mark.parametrize("max_serial_pairs", [10**6, 10], ids=["an epoch per worker", "workers share an epoch"])
def test_stores_built_ahead_are_the_same(
    max_serial_pairs: int, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "MAX_SERIAL_PAIRS", max_serial_pairs)
    corpora = write_corpus(tmp_path / "a.tsv", LINES)
    config = EncodingConfig(tokenizer=tokenizer, augmenters=learn_augmenters(corpora))
    here = EpochStores(corpora, config, tmp_path / "here", seed=5, workers=0)
    expected = [read_files(here(epoch)) for epoch in range(4)]
    with closing(EpochStores(corpora, config, tmp_path / "ahead", seed=5, workers=2)) as ahead:
        assert [read_files(ahead(epoch)) for epoch in (0, 1, 2)] == expected[:3]
        ahead.close()  # as after a rollback
        assert read_files(ahead(1)) == expected[1]
        assert read_files(ahead(3)) == expected[3]
        last = 3 + (1 if max_serial_pairs == 10 else 2)
        wait([ahead._pending[last]])
        assert (tmp_path / "ahead" / stores.store_key(corpora, here.builder.config_for(last), tmp_path)).is_dir()


def test_error_of_a_store_worker_is_raised(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpora = write_corpus(tmp_path / "a.tsv", LINES)
    config = EncodingConfig(tokenizer=tokenizer, augmenters=learn_augmenters(corpora))
    with closing(EpochStores(corpora, config, tmp_path / "ahead", seed=5, workers=1)) as ahead:
        ahead(0)
        (tmp_path / "a.tsv").unlink()
        with pytest.raises(FileNotFoundError):
            ahead(1)


def test_loader_stops_the_store_workers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpora = write_corpus(tmp_path / "a.tsv", LINES)
    config = EncodingConfig(tokenizer=tokenizer)
    augmented = replace(config, augmenters=learn_augmenters(corpora))
    ahead = EpochStores(corpora, augmented, tmp_path / "ahead", seed=5, workers=1)
    store = prepare_store(corpora, config, tmp_path / "stores")
    loader = PairLoader(store, BatchConfig(batch_tokens=4096), store_for_epoch=ahead)
    loader.get_epoch(0)
    with closing(loader.iter_batches(workers=1)) as batches:  # type: ignore[type-var]
        epochs = [next(batches)[0].epoch for _ in range(2 * loader.num_batches(0))]
        assert set(epochs) == {0, 1}
        assert ahead._pool is not None
    assert ahead._pool is None


@pytest.mark.slow
def test_number_of_workers_does_not_change_the_store(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attent.data.encode.BLOCK_PAIRS", 16)
    monkeypatch.setattr("attent.data.encode.SERIAL_BLOCKS", 2)
    corpora = write_corpus(tmp_path / "a.tsv", [*LINES, "bad", *LINES[:50], "\t"])
    for config in (
        EncodingConfig(tokenizer=tokenizer),
        EncodingConfig(tokenizer=tokenizer, augmenters=learn_augmenters(corpora), augmentation_seed=(1, 2)),
    ):
        contents = [read_files(prepare_store(corpora, config, tmp_path / f"by {n}", workers=n)) for n in (1, 4)]
        assert contents[0] == contents[1]


def test_augmented_stores_keep_the_pairs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpora = write_corpus(tmp_path / "a.tsv", [*LINES, *LINES[:9]])
    plain = EncodingConfig(tokenizer=tokenizer)
    config = replace(plain, augmenters=learn_augmenters(corpora))
    first, again, other, clean = (
        prepare_store(corpora, replace(settings, augmentation_seed=(7, epoch)), tmp_path / root)
        for settings, epoch, root in ((config, 1, "x"), (config, 1, "y"), (config, 2, "x"), (plain, 0, "x"))
    )
    assert read_files(first) == read_files(again)
    assert read_files(first) != read_files(other)
    assert len({store.folder.name for store in (first, other, clean)}) == 3
    assert first.locations.tolist() == clean.locations.tolist()  # duplicates are those of the clean text
    pairs = list(zip(decode_store(clean, tokenizer), decode_store(first, tokenizer), strict=True))
    assert any(changed == tuple(text.upper() for text in pair) for pair, changed in pairs)
    assert 0.1 < sum(pair != changed for pair, changed in pairs) / len(pairs) < 0.6


def test_language_tags_prefix_the_source(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "m.jsonl").write_text('{"translation": {"en": "a house", "de": "ein Haus", "fr": "a house"}}\n' * 2)
    corpora = open_corpora([str(tmp_path / "m.jsonl")], LanguagePair("en", "de,fr"))
    store = prepare_store(
        corpora, EncodingConfig(tokenizer=tokenizer, language_tags=True, filters=FilterConfig()), tmp_path / "stores"
    )
    assert [part.pairs for part in store.meta.parts] == [1, 1]
    assert [int(store.source[i][0]) for i in range(2)] == [
        tokenizer.source.get_tag_id("de"),
        tokenizer.source.get_tag_id("fr"),
    ]


def test_tokenizer_is_trained_on_the_corpora(tmp_path: Path) -> None:
    corpora = write_corpus(tmp_path / "a.tsv", [*LINES, "one column only"])
    trained = learn_tokenizer(corpora, TokenizerConfig(vocab=340), language_tags=True)
    sides = [[line.split("\t")[side] for line in LINES] for side in range(2)]
    assert (
        trained.fingerprint == train_tokenizer(sides[0], sides[1], TokenizerConfig(vocab=340), tags=["de"]).fingerprint
    )
    assert trained.source.tags == ("de",)
    assert learn_tokenizer(corpora, TokenizerConfig(vocab=340)).source.tags == ()


def test_large_vocabulary_uses_a_wider_dtype(tmp_path: Path, tokenizer: Tokenizer) -> None:
    class Huge:
        def __init__(self) -> None:
            self.size = 70_000

    config = EncodingConfig(tokenizer=replace(tokenizer, source=Huge()))  # type: ignore[arg-type]
    assert config.dtype == "<u4"
    assert EncodingConfig(tokenizer=tokenizer).dtype == "<u2"


def test_damaged_store_is_rebuilt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpora = write_corpus(tmp_path / "a.tsv", LINES)
    store = prepare_store(corpora, EncodingConfig(tokenizer=tokenizer), tmp_path / "stores")
    original_files = read_files(store)
    for name, damage in (("source.ids", b"\0"), ("store.json", b"{"), ("store.json", b"{}"), ("target.offsets", b"")):
        (store.folder / name).write_bytes(damage)
        with pytest.raises(ValueError, match=name):
            TokenStore.open(store.folder)
        assert (
            read_files(prepare_store(corpora, EncodingConfig(tokenizer=tokenizer), tmp_path / "stores"))
            == original_files
        )


def test_unreadable_corpus_leaves_no_store(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "c.en").write_text("one\ntwo\n")
    (tmp_path / "c.de").write_text("eins\n")
    corpora = open_corpora([str(tmp_path / "c")], LanguagePair("en", "de"))
    with pytest.raises(CorpusError, match="2 lines"):
        prepare_store(corpora, EncodingConfig(tokenizer=tokenizer), tmp_path / "stores")
    assert list_visible(tmp_path / "stores") == []


def test_concurrent_builds_share_one_store(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpora, stores_built = write_corpus(tmp_path / "a.tsv", LINES), []
    threads = [
        threading.Thread(
            target=lambda: stores_built.append(
                prepare_store(corpora, EncodingConfig(tokenizer=tokenizer), tmp_path / "stores")
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(store) for store in stores_built] == [len(LINES)] * 4
    assert len(list_visible(tmp_path / "stores")) == 1


def test_killed_build_leaves_no_store_and_is_cleaned_up(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    corpora = write_corpus(tmp_path / "a.tsv", LINES * 50)
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
        corpora = open_corpora([str(home / "a.tsv")], LanguagePair("en", "de"))
        prepare_store(corpora, recipe, home / "stores", progress=slowly)
    """)
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0  # writing has started
        process.send_signal(signal.SIGKILL if os.name == "posix" else signal.SIGTERM)
    (part_folder,) = (tmp_path / "stores").glob("*.part")
    assert list_visible(tmp_path / "stores") == [part_folder.name]
    config = EncodingConfig(tokenizer=tokenizer, filters=FilterConfig.disabled())
    store = prepare_store(corpora, config, tmp_path / "stores")
    assert len(store) == 50 * len(LINES)
    assert list_visible(tmp_path / "stores") == [store.folder.name]


def test_releasing_pages_does_not_change_ids(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = prepare_store(
        write_corpus(tmp_path / "a.tsv", LINES), EncodingConfig(tokenizer=tokenizer), tmp_path / "stores"
    )
    expected = np.concatenate([store.source[pair] for pair in range(50)])
    monkeypatch.setattr(stores, "MAX_RESIDENT_BYTES", 1)
    for _ in range(3):
        stores_built = store.source.gather(store.source.offsets[:50], store.source.lengths[:50].astype(np.int64))
        assert stores_built.tolist() == expected.tolist()
        assert store.source._read_count == [0]


def test_an_empty_corpus_is_an_empty_store(tmp_path: Path, tokenizer: Tokenizer) -> None:
    store = prepare_store(
        write_corpus(tmp_path / "a.tsv", ["only one column"]), EncodingConfig(tokenizer=tokenizer), tmp_path / "stores"
    )
    assert len(store) == 0
    assert store.source.lengths.size == 0


def test_progress_counts_every_pair(tmp_path: Path, tokenizer: Tokenizer) -> None:
    counts: list[int] = []
    corpora = write_corpus(tmp_path / "a.tsv", [*LINES * (BLOCK_PAIRS // len(LINES) + 2), "\tempty source"])
    prepare_store(corpora, EncodingConfig(tokenizer=tokenizer), tmp_path / "stores", progress=counts.append)
    assert counts == sorted(counts)
    assert counts[-1] == sum(1 for _ in corpora[0])


def test_blocks_are_contiguous(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attent.data.encode.BLOCK_PAIRS", 7)
    corpora = write_corpus(tmp_path / "a.tsv", LINES) + write_corpus(
        tmp_path / "b.tsv", [line + " mehr" for line in LINES]
    )
    store = prepare_store(corpora, EncodingConfig(tokenizer=tokenizer), tmp_path / "stores")
    assert len(store) == 2 * len(LINES)
    assert int(store.source.offsets[-1]) == len(store.source.ids)
    assert np.all(np.diff(store.target.offsets) > 0)
    assert store.format_location(len(LINES)) == f"{tmp_path / 'b.tsv'}:1"
