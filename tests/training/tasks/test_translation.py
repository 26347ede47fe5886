"""The translation task: scoring reports its progress without changing a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.options import SearchOptions
from attent.training.config import DataConfig, DecodeConfig, RunConfig, TrainConfig
from attent.training.events import StopRequested
from attent.training.tasks import generation_task, translation
from attent.training.tasks.base import RunContext
from attent.training.tasks.generation_task import get_search_options
from attent.training.tasks.translation import TranslationTask
from tests.text.corpus import lines, tokenizer
from tests.training import toys
from tests.training.runs import write_corpus


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TranslationTask:
    folder = tmp_path_factory.mktemp("translation")
    data = DataConfig(train=(str(write_corpus(folder / "c.tsv", 60)),), src="en", tgt="xx", hold_out=7)
    run = RunConfig(data=data, train=TrainConfig())
    context = RunContext(data_dir=folder / "data", device=torch.device("cpu"), report=lambda event: None)
    return TranslationTask(run, toys.tokenizer(), context)


def test_scoring_in_blocks_gives_the_same_translations_and_reports_them(
    task: TranslationTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, run = toys.model(), RunConfig(decode=DecodeConfig(beam_size=2))
    (examples,) = task.list_eval_sets()
    at_once = task.generate(model, examples, run, get_search_options(run))
    reported: list[tuple[str, str, int, int]] = []
    monkeypatch.setattr(translation, "SCORED_BLOCK", {"cpu": 3})
    monkeypatch.setattr(
        RunContext,
        "track_progress",
        lambda self, action, unit, total: lambda done: reported.append((action, unit, total, done)),
    )
    (scores,) = task.score_model(model, run)
    assert [sample.output for sample in scores.samples] == [at_once[7 * i // 5] for i in range(5)]
    assert scores.num_examples == len(at_once) == 7
    assert reported == [("scoring validation held-out part", "pairs", 7, done) for done in (3, 6, 7)]
    assert scores.decoding == "beam 2, length penalty 0.6"


def test_the_time_of_the_scores_is_estimated_from_a_sample(
    task: TranslationTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    clock = iter([100.0, 104.0])
    monkeypatch.setattr(generation_task, "NUM_TIMED_SOURCES", 2)
    monkeypatch.setattr(generation_task.time, "monotonic", lambda: next(clock))

    def generate(model: Any, examples: Any, run: Any, options: Any) -> list[str]:
        calls.append((examples, model.training, options.beam_size, options.length_penalty))
        return list(examples.titles)

    monkeypatch.setattr(task, "generate", generate)
    seconds = task.estimate_scoring_seconds(toys.model().train(), RunConfig(decode=DecodeConfig(beam_size=3)))
    ((examples, *options),) = calls
    assert options == [False, 3, 0.6]
    source = sum(map(len, task.tokenizer.encode_source(examples.titles))) / 2
    target = sum(map(len, task.tokenizer.encode_target(examples.references))) / 2
    assert seconds == pytest.approx(4.0 * 7 / 2 * target / (source + 50))


def test_a_cancelled_search_stops_the_run(task: TranslationTask, monkeypatch: pytest.MonkeyPatch) -> None:
    def cancel(*_: Any, **__: Any) -> list[str]:
        raise SearchCancelled

    monkeypatch.setattr(translation, "translate_texts", cancel)
    with pytest.raises(StopRequested):
        task.generate(toys.model(), task.list_eval_sets()[0], RunConfig(), SearchOptions(beam_size=1))


def test_the_data_summary_counts_what_was_read_used_and_held_out(task: TranslationTask) -> None:
    summary = task.describe_data()
    (corpus,) = summary.corpora
    assert corpus.num_read == corpus.num_used + sum(count for _, count in corpus.dropped)
    assert corpus.num_used == len(task.prepared.store)
    assert summary.num_held_out == 7
    assert summary.source_tokens == task.prepared.store.meta.token_counts["source"]
    assert summary.target_tokens == task.prepared.store.meta.token_counts["target"]
    assert [len(digest) for _, digest in corpus.files] == [64]
    assert summary.held_out_method.startswith("selected by a hash")
    assert task.fingerprints == {"data": summary.data_key, "tokenizer": task.tokenizer.fingerprint}
    assert task.title == "en-xx"


def test_languages_decide_the_card_of_a_translator() -> None:
    plain = translation.describe_translator("runs/a b", "en", "de", None)
    assert plain.title == "en-de translator"
    assert plain.shell_example == "attent translate 'runs/a b' < input.txt > output.txt"
    tagged = translation.describe_translator("runs/x", None, "de", "de", "next")
    assert (tagged.title, tagged.next_step) == ("A text-to-text model", "next")
    assert " --to de <" in tagged.shell_example
    assert ", to='de')" in tagged.python_example
    untagged = translation.describe_translator("runs/x", "en", "de", "")
    assert " --to '' <" in untagged.shell_example
    assert ", to=" not in untagged.python_example


@pytest.fixture(scope="module")
def tagged_task(tmp_path_factory: pytest.TempPathFactory) -> TranslationTask:
    """A task with two target languages and without a validation set."""
    folder = tmp_path_factory.mktemp("tagged")
    source, target = lines(30)
    rows = [f"{a}\t{b}\t{a.upper()}\n" for a, b in zip(source, target, strict=True)]
    (folder / "c.tsv").write_text("en\tde\tpt-BR\n" + "".join(rows), encoding="utf-8")
    data = DataConfig(train=(str(folder / "c.tsv"),), src="en", tgt="de,pt-BR", hold_out=0)
    context = RunContext(data_dir=folder / "data", device=torch.device("cpu"), report=lambda event: None)
    return TranslationTask(RunConfig(data=data, train=TrainConfig()), tokenizer(), context)


def test_a_multilingual_model_is_described_with_a_language(tagged_task: TranslationTask) -> None:
    description = tagged_task.describe_model(Path("runs/m"))
    assert description.next_step == "try it: attent translate runs/m --to de"
    assert " --to de <" in description.shell_example
    assert ", to='de')" in description.python_example
    assert description.has_two_sides


def test_without_a_validation_set_nothing_is_held_out(tagged_task: TranslationTask) -> None:
    summary = tagged_task.describe_data()
    assert (summary.num_held_out, len(summary.corpora)) == (0, 2)


def test_validations_translate_the_requested_number_of_sentences(
    task: TranslationTask, tagged_task: TranslationTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tagged_task.build_evaluator(RunConfig()) is None
    assert task.build_evaluator(RunConfig(train=TrainConfig(valid_sentences=0))) is None
    calls: list[Any] = []

    def generate(model: Any, examples: Any, run: Any, options: Any) -> list[str]:
        calls.append((examples.titles, options))
        return list(examples.references)

    monkeypatch.setattr(task, "generate", generate)
    evaluate = task.build_evaluator(RunConfig(train=TrainConfig(valid_sentences=4)))
    assert evaluate is not None
    result = evaluate(toys.model())
    ((sources, options),) = calls
    assert (len(sources), options.beam_size, options.length_penalty) == (4, 1, 0.0)
    assert result.metrics["chrf"] == pytest.approx(100)
    assert [sample.source for sample in result.samples] == [sources[4 * i // 3] for i in range(3)]
    assert all(sample.output == sample.reference for sample in result.samples)
