"""Objectives and metrics of the text tasks: packed rows give the loss of separate texts, a resumed run the same
weights, and every task learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from attent.data.batch_plan import BatchConfig
from attent.data.text_batches import LabeledBatch, TextLabeler, TextLoader, TokenMasker, WindowLoader
from attent.data.text_corpus import TextCorpus
from attent.data.token_store import EncodedTexts
from attent.models import CausalConfig, CausalLM, EncoderConfig, TextEncoder
from attent.nn import LearnedConfig, StackConfig
from attent.text.tokenizer_training import TokenizerConfig, train_monolingual_tokenizer
from attent.training import checkpoint
from attent.training.distributed import DistributedContext
from attent.training.loop import Trainer
from attent.training.objective import (
    CausalLMObjective,
    MaskedLMObjective,
    SingleStackObjective,
    TextClassificationObjective,
)
from attent.training.tasks.base import BatchLoader, ObjectiveFactory
from attent.training.tasks.language_modeling import MaskedLMTask, build_masker
from attent.training.tasks.text_classification import TextClassificationTask, compute_wilson_interval
from tests.training.toys import RECIPE, are_equal

VOCABULARY, LABELS = 40, ("0", "1", "2")
STACK = StackConfig(layers=2, width=16, heads=2, ffn_width=24, dropout=0.1, positions=LearnedConfig(max_length=64))


def texts(count: int = 60, seed: int = 0) -> EncodedTexts:
    """Texts of 3 to 20 tokens between a start (1) and an end (2)."""
    rng = np.random.default_rng(seed)
    rows = [np.array([1, *rng.integers(5, VOCABULARY, n), 2]) for n in rng.integers(1, 19, count)]
    return EncodedTexts(np.concatenate(rows).astype("<u4"), np.cumsum([0, *map(len, rows)]), "key")


def language(dropout: float = 0.0) -> CausalLM:
    torch.manual_seed(1)
    return CausalLM(CausalConfig(vocab=VOCABULARY, stack=replace(STACK, causal=True, dropout=dropout)))


def encoder(dropout: float = 0.0) -> TextEncoder:
    torch.manual_seed(1)
    stack = replace(STACK, dropout=dropout)
    model = TextEncoder(EncoderConfig(vocab=VOCABULARY, stack=stack, masked_lm=True, pooler=True, labels=LABELS))
    assert model.classifier is not None
    torch.nn.init.normal_(model.classifier.weight)
    return model


def windows(corpus: EncodedTexts | None = None, tokens: int = 128) -> WindowLoader:
    return WindowLoader(corpus or texts(), batch_tokens=tokens, window_size=32, pad=0, seed=1)


def make_packed_batches(ask: Any, layout: Any = "packed", corpus: EncodedTexts | None = None) -> TextLoader:
    return TextLoader(
        corpus or texts(), BatchConfig(batch_tokens=128, max_tokens=32, layout=layout), ask, pad=0, seed=1
    )


def masks() -> TokenMasker:
    return TokenMasker(4, np.arange(5, VOCABULARY), 1, 1)


def labels(count: int = 60) -> TextLabeler:
    return TextLabeler(np.arange(count) % len(LABELS))


def list_batches(batches: Any) -> list[LabeledBatch]:
    return [batches.get_batch(0, step) for step in range(batches.num_batches(0))]


def loss(objective: SingleStackObjective, batches: list[LabeledBatch]) -> tuple[float, int]:
    with torch.no_grad():
        return sum(float(objective(batch)[1]) for batch in batches), sum(batch.num_targets for batch in batches)


# ---- packing ---------------------------------------------------------------------------------------------------------


def test_packed_documents_have_the_loss_of_separate_ones() -> None:
    model = language().double().eval()
    corpus = texts()
    fixed = WindowLoader(corpus, batch_tokens=len(corpus.ids) + 1, window_size=len(corpus.ids), pad=0, fixed=True)
    stack = replace(model.config.stack, positions=LearnedConfig(max_length=len(corpus.ids)))
    wide = CausalLM(replace(model.config, stack=stack)).double().eval()
    state = wide.state_dict()
    wide.load_state_dict({**model.state_dict(), **{n: t for n, t in state.items() if "positions" in n}})
    assert fixed.is_packed
    total, units = loss(CausalLMObjective(wide), list_batches(fixed))
    alone = 0.0
    with torch.no_grad():
        for start, stop in zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True):
            ids = torch.from_numpy(corpus.ids[start:stop].astype(np.int64))[None]
            alone += float(F.cross_entropy(wide(ids)[0, :-1], ids[0, 1:], reduction="sum"))
    assert units == len(corpus.ids) - len(corpus)
    assert total == pytest.approx(alone, rel=1e-9)


def test_masked_tokens_in_packed_rows_have_the_loss_of_separate_texts() -> None:
    model = encoder().double().eval()
    for batch in list_batches(make_packed_batches(masks()))[:3]:
        total, _ = loss(MaskedLMObjective(model), [batch])
        packing, positions = batch.inputs.packing, batch.label_positions
        assert packing is not None
        assert positions is not None
        alone = 0.0
        with torch.no_grad():
            for row, ends in enumerate(packing.ends.tolist()):
                edges = [0, *ends]
                for position, label in zip(positions[row].tolist(), batch.labels[row].tolist(), strict=True):
                    if label >= 0:
                        first = max(edge for edge in edges if edge <= position)
                        last = min(edge for edge in edges if edge > position)
                        states = model(batch.inputs.ids[row : row + 1, first:last])
                        logits = model.masked_logits(states[0, position - first])
                        alone += float(F.cross_entropy(logits[None], torch.tensor([label])))
        assert total == pytest.approx(alone, rel=1e-9)


def test_packed_texts_have_the_classification_loss_of_separate_ones() -> None:
    model = encoder().double().eval()
    whole = [
        loss(TextClassificationObjective(model), list_batches(make_packed_batches(labels(), layout)))
        for layout in ("packed", "bucketed")
    ]
    assert whole[0][1] == whole[1][1] == 60
    assert whole[0][0] == pytest.approx(whole[1][0], rel=1e-9)


def test_padding_and_slicing_do_not_change_the_loss() -> None:
    model = language().double().eval()
    long = EncodedTexts(texts(200).ids, np.array([0, len(texts(200).ids)]), "key")
    for corpus in (long, texts()):
        batch = windows(corpus, 256).get_batch(0, 0)
        total, _ = loss(CausalLMObjective(model), [batch])
        pieces, _ = loss(CausalLMObjective(model), [batch.slice_rows(0, 3), batch.slice_rows(3, len(batch))])
        assert total == pytest.approx(pieces, rel=1e-9)
        filled = batch.inputs.ids.masked_fill(~batch.inputs.token_mask(), 7)
        text = batch.inputs.with_tensors([filled, *batch.inputs.tensors()[1:]])
        other = LabeledBatch.from_labels(text, batch.labels, batch.example_ids, per_token=True)
        assert loss(CausalLMObjective(model), [other])[0] == pytest.approx(total, rel=1e-9)


# ---- metrics ---------------------------------------------------------------------------------------------------------


def stub_task(**attributes: Any) -> Any:
    """The part of a task that its metrics need."""
    return SimpleNamespace(iter_batches=iter, **attributes)


def test_masked_accuracy_ignores_padding() -> None:
    model, batches = without_labels(0.0).eval(), list_batches(make_packed_batches(masks(), "bucketed"))
    hidden = torch.cat([batch.labels[batch.labels >= 0] for batch in batches])
    frequent = int(hidden.mode().values)
    assert model.masked_lm is not None
    assert model.masked_lm.output.bias is not None
    model.masked_lm.output.bias.data[frequent] = 1000  # predicted everywhere
    accuracy, _ = MaskedLMTask.measure_accuracy(stub_task(build_sample=lambda *_: None), model, batches)  # type: ignore[arg-type]
    assert accuracy == pytest.approx(100 * float((hidden == frequent).float().mean()))


def test_batched_predictions_are_those_of_single_texts() -> None:
    model, corpus = encoder().eval(), texts()
    batches = list_batches(make_packed_batches(labels(), "bucketed"))
    assert len(batches) > 1
    predictions = TextClassificationTask.predict_labels(
        stub_task(labels=LABELS, get_eval_batches=lambda _: batches), model, TextCorpus("t", [""] * 60)
    )  # type: ignore[arg-type]
    for i, predicted in enumerate(predictions):
        ids = torch.from_numpy(corpus.ids[corpus.offsets[i] : corpus.offsets[i + 1]].astype(np.int64))[None]
        assert predicted == LABELS[int(model.classify(model(ids)).argmax())]
    assert len(set(predictions)) > 1


def test_wilson_interval() -> None:
    assert compute_wilson_interval(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    assert compute_wilson_interval(0.8, 10) == pytest.approx((0.49016, 0.94331), abs=1e-4)
    assert compute_wilson_interval(0.0, 0) == (0.0, 1.0)


def test_special_tokens_are_no_replacements() -> None:
    vocabulary = train_monolingual_tokenizer(["the cat sat on the mat"] * 3, TokenizerConfig(), mask=True).source
    masker = build_masker(vocabulary, "here")
    assert vocabulary.mask is not None
    special = {vocabulary.pad, vocabulary.start, vocabulary.end, vocabulary.unknown, vocabulary.mask}
    assert set(masker.replacement_ids.tolist()) == set(range(vocabulary.size)) - special
    assert (masker.mask_id, masker.prefix_length, masker.suffix_length) == (vocabulary.mask, 1, 1)


# ---- the loop --------------------------------------------------------------------------------------------------------

Parts = tuple[Callable[[float], Any], Callable[[], BatchLoader], ObjectiveFactory]
TASKS: dict[str, Parts] = {
    "lm": (language, windows, CausalLMObjective),
    "mlm": (
        lambda dropout: without_labels(dropout),
        lambda: make_packed_batches(masks(), "bucketed"),
        MaskedLMObjective,
    ),
    "classify": (
        lambda dropout: encoder(dropout),
        lambda: make_packed_batches(labels(), "bucketed"),
        TextClassificationObjective,
    ),
}


def without_labels(dropout: float) -> TextEncoder:
    torch.manual_seed(1)
    return TextEncoder(EncoderConfig(vocab=VOCABULARY, stack=replace(STACK, dropout=dropout), masked_lm=True))


def training(task: str, out: Path, stop: Callable[[], bool] = lambda: False, **changes: Any) -> Trainer:
    make, batches, objective = TASKS[task]
    recipe = replace(RECIPE, label_smoothing=0.0, metric="loss", **changes)
    team = DistributedContext(torch.device("cpu"))
    model = make(0.1)
    return Trainer(
        model,
        None,
        recipe,
        batches(),
        None,
        None,
        out,
        team,
        lambda _: None,
        stop,
        {"data": "key"},
        make_objective=objective,
    )


@pytest.mark.parametrize("task", list(TASKS))
def test_a_resumed_run_gives_the_same_weights(task: str, tmp_path: Path) -> None:
    uninterrupted = training(task, tmp_path / "uninterrupted", workers=2, steps=12)
    uninterrupted.run()
    first = training(task, tmp_path / "stopped", steps=12)
    first.should_stop = lambda: first.state.step == 7
    assert first.run().reason == "stopped"
    newest = checkpoint.load_newest(tmp_path / "stopped" / "state", print)
    assert newest is not None
    assert newest.step == 7
    again = training(task, tmp_path / "stopped", steps=12)
    again.load_checkpoint(newest)
    again.run()
    assert again.state.order_digest == uninterrupted.state.order_digest
    assert are_equal(dict(again.parameters), dict(uninterrupted.parameters))
    assert uninterrupted.train_batches.num_batches(0) < 12  # more than one epoch


@pytest.mark.parametrize("task", list(TASKS))
def test_a_few_texts_are_overfitted(task: str, tmp_path: Path) -> None:
    trainer = training(task, tmp_path, steps=120 if task == "lm" else 60, lr=2e-2, save_every=1000, clip_norm=1.0)
    few = texts(4)
    ask: Any = masks() if task == "mlm" else labels(4)
    trainer.train_batches = (
        windows(few)
        if task == "lm"
        else TextLoader(
            few, BatchConfig(batch_tokens=128, max_tokens=32, layout="bucketed"), ask, pad=0, seed=1, fixed=True
        )
    )
    before = loss(trainer.objective.eval(), list_batches(trainer.train_batches))  # type: ignore[arg-type]
    trainer.objective.train()
    trainer.run()
    after = loss(trainer.objective.eval(), list_batches(trainer.train_batches))  # type: ignore[arg-type]
    assert after[0] / after[1] < 0.5 * before[0] / before[1]


def test_rdrop_is_refused_for_other_tasks_than_translation() -> None:
    with pytest.raises(ValueError, match="`rdrop` must be 0"):
        CausalLMObjective(language(), rdrop=1.0)
