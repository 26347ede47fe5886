"""From names to numbers: the validation part is never trained on, what is left out is told, and nothing to train on is
an error that says why.
"""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerConfig
from attent.training.events import Event, Note
from attent.training.run_options import DataConfig, TrainConfig, TrainError
from attent.training.tasks import translation_data
from attent.training.tasks.translation_data import (
    CorpusSplits,
    PreparedData,
    build_train_batches,
    build_valid_batches,
    read_eval_texts,
)
from tests.text.corpus import lines, tokenizer

DATA = DataConfig(src="en", tgt="de", layout="bucketed", tokenizer=TokenizerConfig(vocab=350))
TRAIN = TrainConfig(batch_tokens=512)


def write(path: Path, first: int = 0, last: int = 100) -> str:
    pairs = list(dict.fromkeys(zip(*lines(), strict=True)))[first:last]
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    return str(path)


def found(tmp_path: Path, config: DataConfig, told: list[Event] | None = None) -> CorpusSplits:
    return translation_data.load_corpora(config, tmp_path / "data", 1, (told if told is not None else []).append)


def prepared(
    tmp_path: Path, config: DataConfig, told: list[Event] | None = None, of: Tokenizer | None = None
) -> PreparedData:
    tell = (told if told is not None else []).append
    return translation_data.prepare_tokens(found(tmp_path, config, told), of, config, tmp_path / "data", 1, tell)


def said(told: list[Event]) -> str:
    return "\n".join(event.text for event in told if isinstance(event, Note))


def test_without_a_validation_set_a_part_is_held_out_and_not_trained_on(tmp_path: Path) -> None:
    told: list[Event] = []
    config = replace(DATA, train=(write(tmp_path / "c.tsv"),), hold_out=10)
    what = found(tmp_path, config, told)
    train, valid = read_eval_texts(what.train, use_tags=False), read_eval_texts(what.valid, use_tags=False)
    assert what.held_out
    assert len(valid.sources) == 10
    assert not set(train.sources) & set(valid.sources)
    assert not set(train.references) & set(valid.references)
    assert "held out" in said(told)
    again = found(tmp_path, config)
    assert read_eval_texts(again.valid, use_tags=False) == valid


def test_a_validation_set_that_is_named_or_lies_beside_is_taken(tmp_path: Path) -> None:
    train, named = write(tmp_path / "train.tsv"), write(tmp_path / "mine.tsv", 100, 110)
    beside, test = write(tmp_path / "valid.tsv", 110, 130), write(tmp_path / "test.tsv", 130, 160)
    assert beside
    assert test
    by_itself = found(tmp_path, replace(DATA, train=(train,)))
    assert (
        len(read_eval_texts(by_itself.valid, False).sources),
        len(read_eval_texts(by_itself.tests, False).sources),
    ) == (20, 30)
    assert not by_itself.held_out
    asked = found(tmp_path, replace(DATA, train=(train,), valid=(named,)))
    assert len(read_eval_texts(asked.valid, False).sources) == 10


def test_nothing_is_held_out_when_nothing_is_to_be(tmp_path: Path) -> None:
    what = found(tmp_path, replace(DATA, train=(write(tmp_path / "c.tsv"),), hold_out=0))
    assert not what.held_out
    assert not what.valid


def test_more_held_out_than_there_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"`data\.hold_out` must be less than the 5 pairs there are, but is 9"):
        found(tmp_path, replace(DATA, train=(write(tmp_path / "c.tsv", 0, 5),), hold_out=9))


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.tsv").write_text("")
    with pytest.raises(ValueError, match=r"c\.tsv"):
        found(tmp_path, replace(DATA, train=(str(tmp_path / "c.tsv"),)))


def test_standard_input_is_kept_for_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path(write(tmp_path / "c.tsv")).read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    config = replace(DATA, train=("-",), hold_out=0)
    first = read_eval_texts(found(tmp_path, config).train, use_tags=False)
    assert len(first.sources) == 100
    assert read_eval_texts(found(tmp_path, config).train, use_tags=False).sources == first.sources  # read once only


def test_every_validation_pair_is_in_its_batches_once_however_long(tmp_path: Path) -> None:
    source, target = lines()
    long = tmp_path / "valid.tsv"
    long.write_text(f"{' '.join(source[:60])}\t{' '.join(target[:60])}\nA dog.\tEin Hund.\n", encoding="utf-8")
    config = replace(DATA, train=(write(tmp_path / "c.tsv"),), valid=(str(long),), max_tokens=30)
    made = prepared(tmp_path, config, of=tokenizer())
    assert made.valid_store is not None
    of = build_valid_batches(made.valid_store, config.max_tokens)
    pairs = [int(pair) for step in range(of.num_steps(0)) for pair in of.get_batch(0, step).example_ids]
    assert sorted(pairs) == [0, 1]
    assert sum(of.get_batch(0, step).target.num_tokens for step in range(of.num_steps(0))) == len(
        made.valid_store.target.ids
    )


def test_a_validation_set_is_not_filtered(tmp_path: Path) -> None:
    odd = tmp_path / "valid.tsv"
    odd.write_text("same\tsame\nsame\tsame\nA dog.\tEin Hund.\n", encoding="utf-8")
    made = prepared(tmp_path, replace(DATA, train=(write(tmp_path / "c.tsv"),), valid=(str(odd),)), of=tokenizer())
    assert made.valid_store is not None
    assert len(made.valid_store) == 3


def test_what_is_left_out_is_told_and_the_tokenizer_too(tmp_path: Path) -> None:
    told: list[Event] = []
    path = Path(write(tmp_path / "c.tsv"))
    path.write_text(path.read_text(encoding="utf-8") * 2, encoding="utf-8")
    made = prepared(tmp_path, replace(DATA, train=(str(path),), hold_out=0), told)
    assert made.tokenizer.source.size == 350
    assert "tokenizer: bpe, 350 subwords" in said(told)
    assert "data: 100 pairs to train on; left out: 100 duplicates" in said(told)


def test_the_second_time_everything_is_only_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(DATA, train=(write(tmp_path / "c.tsv"),), hold_out=0)
    first = prepared(tmp_path, config, of=tokenizer())
    changed = first.store.folder.stat().st_mtime_ns
    second = prepared(tmp_path, config, of=tokenizer())
    assert second.store.folder == first.store.folder
    assert second.store.folder.stat().st_mtime_ns == changed


def test_no_pairs_left_is_an_error_that_says_why_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "c.tsv"
    sentences = [f"nobody has put {i} into other words" for i in range(20)]
    path.write_text("".join(f"{each}\t{each}\n" for each in sentences), encoding="utf-8")
    config = replace(DATA, train=(str(path),), hold_out=0)
    with pytest.raises(
        TrainError,
        match=r"no pairs are left to train on: 20 identical .*`attent data .*--set data\.filters\.NAME=false",
    ):
        prepared(tmp_path, config, of=tokenizer())


def test_a_tokenizer_without_the_tag_of_a_language_is_refused(tmp_path: Path) -> None:
    config = replace(DATA, tgt="fr", tags=True, train=(write(tmp_path / "c.tsv"),), hold_out=0)
    with pytest.raises(TrainError, match="no tag for `fr`: it knows de, pt-BR"):
        prepared(tmp_path, config, of=tokenizer())


def test_a_weight_counts_in_the_amount_and_in_the_batches(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a.tsv", 0, 50), write(tmp_path / "b.tsv", 50, 100)
    plain = prepared(tmp_path, replace(DATA, train=(one, other), hold_out=0), of=tokenizer())
    config = replace(DATA, train=(f"{one}:3", other), hold_out=0)
    heavy = prepared(tmp_path, config, of=tokenizer())
    assert heavy.data_size.num_examples == plain.data_size.num_examples == 100
    assert heavy.data_size.num_tokens == pytest.approx(2 * plain.data_size.num_tokens, rel=0.01)
    of = build_train_batches(heavy, config, TRAIN)
    pairs = [int(pair) for step in range(of.num_steps(0)) for pair in of.get_batch(0, step).example_ids]
    assert len(pairs) == 200
    assert sum(pair < 50 for pair in pairs) == 150


def test_subword_sampling_gives_every_epoch_its_own_ids(tmp_path: Path) -> None:
    config = replace(DATA, train=(write(tmp_path / "c.tsv"),), hold_out=0, subword_sampling=0.2)
    of = build_train_batches(prepared(tmp_path, config, of=tokenizer()), config, TRAIN)
    ids = [of.get_epoch(epoch).store.source.ids.tolist() for epoch in (0, 1, 0)]
    assert ids[0] != ids[1]
    assert ids[0] == ids[2]


def test_texts_are_an_even_choice_with_their_languages(tmp_path: Path) -> None:
    what = found(tmp_path, replace(DATA, train=(write(tmp_path / "c.tsv"),), hold_out=0))
    every, some = read_eval_texts(what.train, use_tags=True), read_eval_texts(what.train, use_tags=True, max_pairs=10)
    assert some.sources == every.sources[::10]
    assert some.references == every.references[::10]
    assert set(some.target_languages) == {"de"}
    assert some.language == "de"
    assert set(read_eval_texts(what.train, use_tags=False).target_languages) == {None}
