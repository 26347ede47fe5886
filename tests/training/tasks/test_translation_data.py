"""Data of a translation run: validation pairs are never trained on, what is dropped is reported, and a corpus without
pairs is refused."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attent.data.formats.placeholders import INLINE_TAGS
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerConfig
from attent.training.config import RunConfig
from attent.training.events import Event, Note
from attent.training.run_options import DataConfig, TrainConfig, TrainError
from attent.training.tasks import base
from attent.training.tasks.base import RunContext
from attent.training.tasks.translation_data import (
    CorpusSplits,
    PreparedData,
    build_train_batches,
    build_valid_batches,
    load_corpora,
    prepare_data,
    prepare_tokens,
    read_eval_set,
)
from tests.text.corpus import lines, tokenizer

DATA = DataConfig(src="en", tgt="de", layout="bucketed", tokenizer=TokenizerConfig(vocab=350))
TRAIN = TrainConfig(batch_tokens=512)


def write(path: Path, first: int = 0, last: int = 100) -> str:
    pairs = list(dict.fromkeys(zip(*lines(), strict=True)))[first:last]
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    return str(path)


def context(tmp_path: Path, events: list[Event] | None = None) -> RunContext:
    report = ([] if events is None else events).append
    return RunContext(data_dir=tmp_path / "data", device=torch.device("cpu"), report=report)


def load(tmp_path: Path, config: DataConfig, events: list[Event] | None = None) -> CorpusSplits:
    return load_corpora(config, 1, context(tmp_path, events))


def prepare(
    tmp_path: Path, config: DataConfig, events: list[Event] | None = None, with_tokenizer: Tokenizer | None = None
) -> PreparedData:
    splits = load(tmp_path, config, events)
    return prepare_tokens(splits, with_tokenizer, config, context(tmp_path, events))


def notes(events: list[Event]) -> str:
    return "\n".join(event.text for event in events if isinstance(event, Note))


def test_held_out_pairs_are_not_trained_on(tmp_path: Path) -> None:
    events: list[Event] = []
    config = replace(DATA, train=(write(tmp_path / "c.tsv"),), hold_out=10)
    splits = load(tmp_path, config, events)
    train, valid = read_eval_set(splits.train, False, "test"), read_eval_set(splits.valid, False, "test")
    assert splits.held_out
    assert len(valid.titles) == 10
    assert not set(train.titles) & set(valid.titles)
    assert not set(train.references) & set(valid.references)
    assert "held out" in notes(events)
    again = load(tmp_path, config)
    assert read_eval_set(again.valid, False, "test").titles == valid.titles


def test_a_validation_set_is_named_or_found_beside_the_data(tmp_path: Path) -> None:
    train, named = write(tmp_path / "train.tsv"), write(tmp_path / "mine.tsv", 100, 110)
    validation, test = write(tmp_path / "valid.tsv", 110, 130), write(tmp_path / "test.tsv", 130, 160)
    assert validation
    assert test
    default = load(tmp_path, replace(DATA, train=(train,)))
    assert (
        len(read_eval_set(default.valid, False, "test").titles),
        len(read_eval_set(default.tests, False, "test").titles),
    ) == (20, 30)
    assert not default.held_out
    named_splits = load(tmp_path, replace(DATA, train=(train,), valid=(named,)))
    assert len(read_eval_set(named_splits.valid, False, "test").titles) == 10


def test_sets_beside_the_data_are_found_once_under_their_names(tmp_path: Path) -> None:
    for name, first in (("train", 0), ("valid", 110), ("test", 130), ("test_2017", 140)):
        write(tmp_path / f"{name}.tsv", first, first + 10)
    train = str(tmp_path / "train.tsv")
    splits = load(tmp_path, replace(DATA, train=(f"{train}:3", train)))
    assert [(corpus.name, corpus.weight) for corpus in splits.valid] == [("valid", 1.0)]
    assert [corpus.name for corpus in splits.tests] == ["test", "test_2017"]
    assert all(len(corpus.parallel_files) == 1 and not corpus.sibling_files for corpus in splits.valid)


def test_a_test_set_that_was_found_and_cannot_be_read_is_skipped(tmp_path: Path) -> None:
    train, test = write(tmp_path / "train.tsv"), tmp_path / "test.tsv"
    test.write_text("\n", encoding="utf-8")
    events: list[Event] = []
    splits = load(tmp_path, replace(DATA, train=(train,)), events)
    assert splits.tests == []
    (warning,) = [event.text for event in events if isinstance(event, Note) and "test set" in event.text]
    assert warning.startswith(f"{test}: this test set contains no sentence pairs")
    assert warning.endswith("; this test set was found automatically and is skipped")
    with pytest.raises(TrainError, match="this test set contains no sentence pairs"):
        load(tmp_path, replace(DATA, train=(train,), test=(str(test),)))


def test_holding_out_can_be_turned_off(tmp_path: Path) -> None:
    splits = load(tmp_path, replace(DATA, train=(write(tmp_path / "c.tsv"),), hold_out=0))
    assert not splits.held_out
    assert not splits.valid


def test_holding_out_everything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"`data\.hold_out` must be less than the 5 pairs there are, but is 9"):
        load(tmp_path, replace(DATA, train=(write(tmp_path / "c.tsv", 0, 5),), hold_out=9))


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.tsv").write_text("")
    with pytest.raises(ValueError, match=r"c\.tsv"):
        load(tmp_path, replace(DATA, train=(str(tmp_path / "c.tsv"),)))


def test_standard_input_is_kept_for_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path(write(tmp_path / "c.tsv")).read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    config = replace(DATA, train=("-",), hold_out=0)
    first = read_eval_set(load(tmp_path, config).train, False, "test")
    assert len(first.titles) == 100
    assert read_eval_set(load(tmp_path, config).train, False, "test").titles == first.titles


def test_validation_batches_have_every_pair_once_however_long(tmp_path: Path) -> None:
    source, target = lines()
    long = tmp_path / "valid.tsv"
    long.write_text(f"{' '.join(source[:60])}\t{' '.join(target[:60])}\nA dog.\tEin Hund.\n", encoding="utf-8")
    config = replace(DATA, train=(write(tmp_path / "c.tsv"),), valid=(str(long),), max_tokens=30)
    prepared = prepare(tmp_path, config, with_tokenizer=tokenizer())
    assert prepared.valid_store is not None
    batches = build_valid_batches(prepared.valid_store, config.max_tokens)
    pairs = [int(pair) for step in range(batches.num_batches(0)) for pair in batches.get_batch(0, step).example_ids]
    assert sorted(pairs) == [0, 1]
    assert sum(batches.get_batch(0, step).target.num_tokens for step in range(batches.num_batches(0))) == len(
        prepared.valid_store.target.ids
    )


def test_a_validation_set_is_not_filtered(tmp_path: Path) -> None:
    odd = tmp_path / "valid.tsv"
    odd.write_text("same\tsame\nsame\tsame\nA dog.\tEin Hund.\n", encoding="utf-8")
    prepared = prepare(
        tmp_path, replace(DATA, train=(write(tmp_path / "c.tsv"),), valid=(str(odd),)), with_tokenizer=tokenizer()
    )
    assert prepared.valid_store is not None
    assert len(prepared.valid_store) == 3


def test_dropped_pairs_and_the_tokenizer_are_reported(tmp_path: Path) -> None:
    events: list[Event] = []
    path = Path(write(tmp_path / "c.tsv"))
    path.write_text(path.read_text(encoding="utf-8") * 2, encoding="utf-8")
    prepared = prepare(tmp_path, replace(DATA, train=(str(path),), hold_out=0), events)
    assert prepared.tokenizer.source.size == 350
    assert "tokenizer: bpe, 350 subwords" in notes(events)
    assert "data: 100 pairs for training; dropped: 100 duplicates" in notes(events)


def spoil(path: Path, count: int) -> None:
    """Write the first lines in Latin-1."""
    rows = path.read_text(encoding="utf-8").splitlines()
    encoded = [f"{row} \xfcbrig".encode("latin-1" if i < count else "utf-8") for i, row in enumerate(rows)]
    path.write_bytes(b"\n".join(encoded) + b"\n")


@pytest.mark.parametrize(("count", "has_warning"), [(1, False), (2, True), (40, True)])
def test_loss_of_more_than_a_hundredth_is_a_warning(tmp_path: Path, count: int, has_warning: bool) -> None:
    events: list[Event] = []
    path = Path(write(tmp_path / "c.tsv"))
    spoil(path, count)
    prepare(tmp_path, replace(DATA, train=(str(path),), hold_out=0), events, tokenizer())
    warnings = [event.text for event in events if isinstance(event, Note) and event.level == "warning"]
    lost = f"{count} of 100 lines ({count}%)" if count >= 10 else f"{count} of 100 lines ({count}.0%)"
    reason = f"the training data: {lost} are not used: {count} not UTF-8 (the first: {path}:1); save the file as UTF-8"
    assert warnings == ([reason] if has_warning else [])


def test_swapped_sides_are_a_warning(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "c.tsv"))
    for expected in ([], [f"{path}: the two sides look swapped (“"]):
        events: list[Event] = []
        load(tmp_path, replace(DATA, train=(str(path),), hold_out=0), events)
        warnings = [event.text for event in events if isinstance(event, Note) and event.level == "warning"]
        assert [text[: len(start)] for text, start in zip(warnings, expected, strict=True)] == expected
        assert all(text.endswith("run attent train with --src de --tgt en") for text in warnings)
        rows = [row.split("\t") for row in path.read_text(encoding="utf-8").splitlines()]
        path.write_text("".join(f"{target}\t{source}\n" for source, target in rows), encoding="utf-8")


def test_losses_of_validation_and_test_sets_are_warnings(tmp_path: Path) -> None:
    events: list[Event] = []
    sets = {name: Path(write(tmp_path / f"{name}.tsv", 0, 20)) for name in ("valid", "test")}
    sets["test"].write_text(sets["test"].read_text(encoding="utf-8") + "\tohne Quelle\n", encoding="utf-8")
    spoil(sets["valid"], 5)
    config = replace(DATA, train=(write(tmp_path / "c.tsv"),), valid=(str(sets["valid"]),), test=(str(sets["test"]),))
    prepare(tmp_path, config, events, tokenizer())
    assert f"5 of 20 lines (25%) are not used: 5 not UTF-8 (the first: {sets['valid']}:1)" in notes(events)
    assert f"1 of 21 lines (4.8%) are not used: 1 without a source (the first: {sets['test']}:21)" in notes(events)


def test_corpus_in_another_encoding_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "c.tsv"))
    spoil(path, 100)
    with pytest.raises(TrainError, match=r"no sentence pairs: 100 not UTF-8 \(the first: .*c\.tsv:1\); save .* UTF-8"):
        prepare(tmp_path, replace(DATA, train=(str(path),)))
    with pytest.raises(TrainError, match="no pair to validate on: 100 not UTF-8"):
        prepare(
            tmp_path, replace(DATA, train=(write(tmp_path / "d.tsv"),), valid=(str(path),)), with_tokenizer=tokenizer()
        )


def test_test_set_without_pairs_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "test.tsv"))
    config = replace(DATA, train=(write(tmp_path / "c.tsv"),), test=(str(path),))
    spoil(path, 100)
    with pytest.raises(TrainError, match=r"this test set contains no sentence pairs: 100 not UTF-8 \(the first: "):
        prepare(tmp_path, config, with_tokenizer=tokenizer())
    path.write_text("")
    with pytest.raises(TrainError, match=r"this test set contains no sentence pairs(?!:)"):
        prepare(tmp_path, config, with_tokenizer=tokenizer())


def test_encoded_data_is_reused(tmp_path: Path) -> None:
    config = replace(DATA, train=(write(tmp_path / "c.tsv"),), hold_out=0)
    first = prepare(tmp_path, config, with_tokenizer=tokenizer())
    changed = first.store.folder.stat().st_mtime_ns
    second = prepare(tmp_path, config, with_tokenizer=tokenizer())
    assert second.store.folder == first.store.folder
    assert second.store.folder.stat().st_mtime_ns == changed


def test_a_corpus_without_usable_pairs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.tsv"
    sentences = [f"nobody has put {i} into other words" for i in range(20)]
    path.write_text("".join(f"{each}\t{each}\n" for each in sentences), encoding="utf-8")
    config = replace(DATA, train=(str(path),), hold_out=0)
    with pytest.raises(
        TrainError,
        match=r"no pairs are left to train on: 20 identical .*`attent data .*--set data\.filters\.NAME=false",
    ):
        prepare(tmp_path, config, with_tokenizer=tokenizer())


def test_a_tokenizer_without_the_tag_of_a_language_is_refused(tmp_path: Path) -> None:
    config = replace(DATA, tgt="fr", tags=True, train=(write(tmp_path / "c.tsv"),), hold_out=0)
    with pytest.raises(TrainError, match="no tag for `fr`: it has de, pt-BR"):
        prepare(tmp_path, config, with_tokenizer=tokenizer())


def test_weights_count_in_the_data_size_and_in_the_batches(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.tsv", 0, 50), write(tmp_path / "b.tsv", 50, 100)
    plain = prepare(tmp_path, replace(DATA, train=(first, second), hold_out=0), with_tokenizer=tokenizer())
    config = replace(DATA, train=(f"{first}:3", second), hold_out=0)
    heavy = prepare(tmp_path, config, with_tokenizer=tokenizer())
    assert heavy.data_size.num_examples == plain.data_size.num_examples == 100
    counts = plain.store.meta.token_counts
    assert counts == {"source": len(plain.store.source.ids), "target": len(plain.store.target.ids)}
    assert counts["source"] != counts["target"]
    assert plain.data_size.num_tokens == max(counts.values())
    assert heavy.data_size.num_tokens == pytest.approx(2 * plain.data_size.num_tokens, rel=0.01)
    batches = build_train_batches(heavy, config, TRAIN)
    pairs = [int(pair) for step in range(batches.num_batches(0)) for pair in batches.get_batch(0, step).example_ids]
    assert len(pairs) == 200
    assert sum(pair < 50 for pair in pairs) == 150


def test_augmentation_gives_every_epoch_its_own_text(tmp_path: Path) -> None:
    config = replace(DATA, train=(write(tmp_path / "c.tsv"),), hold_out=0, augment=("upper=0.5", "tags=0.5"))
    prepared = prepare(tmp_path, config)
    batches = build_train_batches(prepared, config, TRAIN)
    stores = [batches.get_epoch(epoch).store for epoch in (0, 1, 0)]
    assert stores[0].source.ids.tolist() != stores[1].source.ids.tolist()
    assert stores[0].source.ids.tolist() == stores[2].source.ids.tolist()
    vocabulary = prepared.tokenizer.source
    texts = [vocabulary.decode(stores[1].source[i].tolist()) for i in range(len(stores[1]))]
    assert 20 < sum(map(str.isupper, texts)) < 80
    assert any(tag in text for tag in INLINE_TAGS for text in texts)
    for tag in INLINE_TAGS:  # a tag is one token
        assert len(vocabulary.encode([f"({tag}"])[0]) == len(vocabulary.encode(["("])[0]) + 1
    assert not batches.describe_too_long(0)


def test_the_tokenizer_is_trained_on_words_in_capitals_too(tmp_path: Path) -> None:
    config = replace(DATA, train=(write(tmp_path / "c.tsv"),), hold_out=0, tokenizer=TokenizerConfig(vocab=600))
    counts = []
    for augment in (("none",), ("upper=0.3",)):
        vocabulary = prepare(tmp_path, replace(config, augment=augment)).tokenizer.source
        pieces = (vocabulary.to_pieces([index])[0] for index in range(vocabulary.size))
        counts.append(sum(piece.strip("▁").isalpha() and piece.isupper() and len(piece) > 3 for piece in pieces))
    assert counts[0] == 0
    assert counts[1] > 5


def test_test_sets_of_the_same_name_have_that_of_their_folder(tmp_path: Path) -> None:
    for folder in ("news", "talks"):
        (tmp_path / folder).mkdir()
        for split in ("train", "valid", "test")[: 3 if folder == "news" else 2]:
            write(tmp_path / folder / f"{split}.tsv")
    splits = load(tmp_path, replace(DATA, train=(str(tmp_path / "news"), str(tmp_path / "talks"))))
    assert [corpus.name for corpus in splits.valid] == ["news/valid", "talks/valid"]
    assert [corpus.name for corpus in splits.tests] == ["test"]


def test_the_tokenizer_does_not_depend_on_the_seed(tmp_path: Path) -> None:
    data = replace(DATA, train=(write(tmp_path / "c.tsv"),), hold_out=0, augment=("upper=0.3",))
    runs = [RunConfig(data=data, train=replace(TRAIN, seed=seed)) for seed in (1, 2)]
    vocabularies = [prepare_data(run, None, context(tmp_path / f"{run.train.seed}")).tokenizer.source for run in runs]
    first, second = ([each.to_pieces([index]) for index in range(each.size)] for each in vocabularies)
    assert first == second


def test_eval_texts_have_their_languages(tmp_path: Path) -> None:
    splits = load(tmp_path, replace(DATA, train=(write(tmp_path / "c.tsv"),), hold_out=0))
    every = read_eval_set(splits.train, True, "test")
    assert set(every.languages) == {"de"}
    assert every.language == "de"
    assert every.name.endswith("c.tsv en-de")  # tells the language pairs of one file apart in the model card
    untagged = read_eval_set(splits.train, False, "test")
    assert untagged.language == "de"
    assert untagged.name.endswith("c.tsv")


def test_files_that_have_disappeared_have_no_checksum(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert base.hash_files(["x", "y"], [tmp_path / "a", tmp_path / "b"]) == (("x", digest), ("y", ""))
