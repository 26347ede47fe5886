"""Fine-tuning with general text: the mixture has the named ratio, both texts decide, and resuming changes nothing."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attent
from attent.data.pairs import Pair
from attent.training.config import RunConfig
from attent.training.events import Event, Note
from attent.training.loop import write_model
from attent.training.run_options import DataConfig, TrainError
from attent.training.tasks.base import RunContext
from attent.training.tasks.generation_task import GenerationTask
from attent.training.tasks.translation import TranslationTask
from attent.training.tasks.translation_data import (
    SAMPLE_FILE,
    build_train_batches,
    encode_sample,
    fetch_sample,
    load_corpora,
    prepare_tokens,
)
from tests.text.corpus import lines, tokenizer
from tests.training.tasks.test_translation_data import DATA, TRAIN
from tests.training.toys import model

PAIRS = list(dict.fromkeys(zip(*lines(), strict=True)))


def write(path: Path, first: int, last: int) -> str:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS[first:last]), encoding="utf-8")
    return str(path)


def context(tmp_path: Path) -> RunContext:
    return RunContext(data_dir=tmp_path / "data", device=torch.device("cpu"), report=lambda event: None)


def fine_tune(tmp_path: Path, out: str, **options: Any) -> Any:
    """Fine-tune a tiny model on 60 new and 120 general pairs."""
    base = tmp_path / "base"
    if not base.exists():
        write_model(base, model(), tokenizer())
    settings = {"decode.beam_size": 1, "data.max_tokens": 64}
    arguments: dict[str, Any] = {
        "src": "en", "tgt": "de", "init_from": base, "steps": 8, "batch_tokens": 256, "warmup": 2, "lr": 0.01,
        "valid_every": 4, "valid_sentences": 4, "hold_out": 10, "device": "cpu", "threads": 1, "progress": False,
    }  # fmt: skip
    new = write(tmp_path / "ours.tsv", 0, 60)
    return attent.train(new, out=tmp_path / out, settings=settings, **arguments | options)


# ---- the mixture -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "expected"), [("", 40), (":0.5", 20), (":3", 120)])
def test_the_ratio_is_that_of_general_to_new_pairs(tmp_path: Path, ratio: str, expected: int) -> None:
    new, general = write(tmp_path / "ours.tsv", 0, 40), write(tmp_path / "general.tsv", 40, 150)
    config = replace(DATA, train=(new,), replay=(general + ratio,), hold_out=0)
    splits = load_corpora(config, 1, context(tmp_path))
    assert splits.has_replay
    prepared = prepare_tokens(splits, tokenizer(), config, context(tmp_path))
    batches = build_train_batches(prepared, config, TRAIN)
    pairs = [int(pair) for step in range(batches.num_batches(0)) for pair in batches.get_batch(0, step).example_ids]
    assert sum(pair < 40 for pair in pairs) == 40
    assert sum(pair >= 40 for pair in pairs) == pytest.approx(expected, abs=1)


def test_new_pairs_count_with_their_weight(tmp_path: Path) -> None:
    new, general = write(tmp_path / "ours.tsv", 0, 40), write(tmp_path / "general.tsv", 40, 150)
    config = replace(DATA, train=(f"{new}:2",), replay=(general,), hold_out=0)
    (_, corpus) = load_corpora(config, 1, context(tmp_path)).train
    assert corpus.weight == pytest.approx(2 * 40 / 110)


def test_no_text_of_a_held_out_pair_is_trained_on(tmp_path: Path) -> None:
    """Also if the general text has the new pairs."""
    new, general = write(tmp_path / "ours.tsv", 0, 60), write(tmp_path / "general.tsv", 20, 150)
    config = replace(DATA, train=(new,), replay=(general,), hold_out=10)
    splits = load_corpora(config, 1, context(tmp_path))
    assert splits.valid
    assert splits.replay_valid
    held_out = {text for corpus in (*splits.valid, *splits.replay_valid) for pair in corpus for text in pair[:2]}
    trained_on = [{text for pair in corpus for text in pair[:2]} for corpus in splits.train]
    assert [bool(texts & held_out) for texts in trained_on] == [False, False]
    assert all(len(texts) > 60 for texts in trained_on)


def test_both_texts_have_validation_and_test_sets(tmp_path: Path) -> None:
    (tmp_path / "general").mkdir()
    new, general = write(tmp_path / "ours.tsv", 0, 40), write(tmp_path / "general" / "train.tsv", 40, 90)
    config = replace(DATA, train=(new,), replay=(general,), hold_out=8)
    splits = load_corpora(config, 1, context(tmp_path))
    sizes = [sum(isinstance(entry, Pair) for entry in corpus) for corpus in (*splits.valid, *splits.replay_valid)]
    assert sizes == [8, 8]
    write(tmp_path / "general" / "valid.tsv", 90, 95)
    write(tmp_path / "general" / "test.tsv", 95, 100)
    splits = load_corpora(config, 1, context(tmp_path))
    assert [corpus.name for corpus in (*splits.replay_valid, *splits.tests)] == ["valid", "test"]


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_reports_both_texts_before_and_after(tmp_path: Path) -> None:
    general = write(tmp_path / "general.tsv", 60, 180)
    result = fine_tune(tmp_path, "out", replay=(general,), metric="chrf")
    names = [scores["name"] for scores in result.scores]
    assert names == ["held-out part", general, "held-out part, before", f"{general}, before"]
    card = (tmp_path / "out" / "card.md").read_text(encoding="utf-8")
    assert card.count("part, before |") == 1
    assert card.count("| average of the last") + card.count("| best, step") == 2
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    validated = [event for event in log if event["event"] == "validated"]
    notes = [event["text"] for event in log if event["event"] == "note" and event["text"].count("chrF") == 2]
    assert len(notes) >= len(validated) > 0
    each = [float(part.partition("chrF ")[2].partition(",")[0]) for part in notes[0].split("; ")]
    assert validated[0]["metrics"]["chrf"] == pytest.approx(sum(each) / 2, abs=0.06)


def test_the_scores_before_count_in_the_time_for_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerationTask, "estimate_scoring_seconds", lambda *_: 3.0)
    data = replace(DATA, train=(write(tmp_path / "ours.tsv", 0, 40),), hold_out=5)
    seconds = []
    for replay in ((), (write(tmp_path / "general.tsv", 40, 90),)):
        run = RunConfig(data=replace(data, replay=replay), init_from=str(tmp_path))
        task = TranslationTask(run, tokenizer(), context(tmp_path))
        seconds.append(task.estimate_scoring_seconds(model(), run))
    assert seconds == [3.0, 6.0]


def test_a_resumed_run_with_mixing_and_augmentation_is_the_same(tmp_path: Path) -> None:
    options = {"replay": (write(tmp_path / "general.tsv", 60, 180),), "augment": (), "save_every": 2}
    fine_tune(tmp_path, "whole", **options)
    stops = iter([False] * 14 + [True])
    stopped = fine_tune(tmp_path, "parts", **options, should_stop=lambda: next(stops, True))
    assert 0 < stopped.step < 8
    assert stopped.stop_reason == "stopped"
    assert fine_tune(tmp_path, "parts", **options).step == 8
    files = [(tmp_path / name / "state" / "step-00000008" / "weights.safetensors") for name in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "parts/model.safetensors").read_bytes()


def test_the_stored_sample_is_replayed(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "first", ignore_errors=True)
    fine_tune(tmp_path, "first", store_sample=30)
    rows = gzip.decompress((tmp_path / "first" / SAMPLE_FILE).read_bytes()).decode().splitlines()
    assert rows[0] == "en\tde"
    assert len(rows) == 31
    assert {tuple(row.split("\t")) for row in rows[1:]} < set(PAIRS[:60])
    second = {"init_from": tmp_path / "first", "hold_out": 5}
    result = fine_tune(tmp_path, "second", **second)
    assert any(SAMPLE_FILE in scores["name"] for scores in result.scores)
    shutil.rmtree(tmp_path / "first")
    assert fine_tune(tmp_path, "second", steps=9, hold_out=5, init_from=None).step == 9  # resumes without it


def test_a_sample_in_other_languages_is_not_replayed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / SAMPLE_FILE).write_bytes(gzip.compress(b"en\tfr\na\tb\n"))
    events: list[Event] = []
    run = replace(context(tmp_path), report=events.append)
    splits = load_corpora(
        replace(DATA, train=(write(tmp_path / "ours.tsv", 0, 60),)), 1, run, replay_sample=folder / SAMPLE_FILE
    )
    assert not splits.has_replay
    assert any("not replaying the sample" in event.text for event in events if isinstance(event, Note))


def test_a_new_run_replays_the_sample_of_its_own_model(tmp_path: Path) -> None:
    write_model(tmp_path / "with", model(), tokenizer(), {SAMPLE_FILE: b"sample"})
    write_model(tmp_path / "without", model(), tokenizer())
    new, resumed = (replace(context(tmp_path), is_new=is_new) for is_new in (True, False))
    assert fetch_sample(str(tmp_path / "without"), new) is None
    path = fetch_sample(str(tmp_path / "with"), new)
    assert path is not None
    assert path.read_bytes() == b"sample"
    assert fetch_sample("no/such/model", resumed) == path
    assert fetch_sample(str(tmp_path / "without"), new) is None  # after an interruption, with another --from
    assert fetch_sample("no/such/model", resumed) is None


@pytest.mark.slow
def test_the_sample_can_be_left_out(tmp_path: Path) -> None:
    fine_tune(tmp_path, "first", store_sample=30)
    result = fine_tune(tmp_path, "second", init_from=tmp_path / "first", replay=("none",))
    assert [scores["name"] for scores in result.scores] == ["held-out part"]


def test_samples_follow_the_weights(tmp_path: Path) -> None:
    corpora = load_corpora(
        replace(DATA, train=(write(tmp_path / "a.tsv", 0, 80) + ":9", write(tmp_path / "b.tsv", 80, 160)), hold_out=0),
        1,
        context(tmp_path),
    ).train
    content = encode_sample(corpora, 40, seed=1)
    assert content == encode_sample(corpora, 40, seed=1) != encode_sample(corpora, 40, seed=2)
    rows = {tuple(row.split("\t")) for row in gzip.decompress(content).decode().splitlines()[1:]}
    assert sum(row in set(PAIRS[:80]) for row in rows) > 30


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    general = write(tmp_path / "general.tsv", 60, 180)
    with pytest.raises(TrainError, match=r"`data\.replay` needs a model to fine-tune"):
        attent.train(general, out=tmp_path / "x", src="en", tgt="de", replay=(general,), progress=False)
    (tmp_path / "empty.tsv").write_text("one column\n")
    with pytest.raises(TrainError, match=r"`data\.replay` must have sentence pairs|contains no sentence pairs"):
        fine_tune(tmp_path, "y", replay=(str(tmp_path / "empty.tsv"),))
    with pytest.raises(ValueError, match="`store_sample` must be 0 to 100,000"):
        DataConfig(store_sample=-1)
