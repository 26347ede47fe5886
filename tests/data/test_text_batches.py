"""Text batches: every token is a label once per epoch, documents are separated, and masking and spans have the rates of
BERT and T5.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import numpy as np
import pytest

from attent.data.batch_plan import BatchConfig
from attent.data.loader import LoaderPosition
from attent.data.text_batches import (
    LabeledBatch,
    SpanCorruption,
    TextLabeler,
    TextLoader,
    TokenMasker,
    WindowLoader,
    compute_span_counts,
)
from attent.data.token_store import EncodedTexts

PAD, MASK, BEFORE, AFTER = 0, 4, 1, 2


def make_documents(*lengths: int) -> EncodedTexts:
    """Return documents of distinct token ids, from 100 on."""
    total = sum(lengths)
    return EncodedTexts(np.arange(100, 100 + total).astype("<u4"), np.concatenate([[0], np.cumsum(lengths)]), "key")


def make_texts(count: int, seed: int = 0) -> EncodedTexts:
    """Return texts of 3 to 30 tokens, including a start and an end token."""
    lengths = np.random.default_rng(seed).integers(3, 31, count)
    rows = [np.array([BEFORE, *range(100 + i, 100 + i + n - 2), AFTER]) for i, n in enumerate(lengths)]
    return EncodedTexts(np.concatenate(rows).astype("<u4"), np.concatenate([[0], lengths.cumsum()]), "key")


def list_epoch(batches: WindowLoader | TextLoader, epoch: int) -> list[LabeledBatch]:
    return [batches.get_batch(epoch, step) for step in range(batches.num_batches(epoch))]


@pytest.mark.parametrize("lengths", [(1000,), (700, 300, 1), (20, 3, 50, 7, 1, 2, 9)], ids=["one", "long", "short"])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_windows_predict_every_token_once(lengths: tuple[int, ...], epoch: int) -> None:
    documents = make_documents(*lengths)
    windows = WindowLoader(documents, batch_tokens=128, window_size=32, pad=PAD, seed=3)
    is_label: Counter[tuple[int, int]] = Counter()
    for batch in list_epoch(windows, epoch):
        assert batch.inputs.ids.shape == batch.labels.shape == (4, 32)
        known = batch.labels >= 0
        assert batch.num_targets == int(known.sum())
        is_label.update(zip(batch.inputs.ids[known].tolist(), batch.labels[known].tolist(), strict=True))
    firsts = set((documents.offsets[:-1] + 100).tolist())
    assert is_label == Counter({(i - 1, i): 1 for i in range(100, 100 + sum(lengths)) if i not in firsts})


def test_windows_differ_between_epochs() -> None:
    windows = WindowLoader(make_documents(1000), batch_tokens=64, window_size=16, pad=PAD, seed=1)
    assert len({windows.draw_offset(epoch) for epoch in range(8)}) > 3
    first = [int(batch.example_ids[0]) for batch in list_epoch(windows, 0)]
    assert first != sorted(first)
    fixed = WindowLoader(make_documents(1000), batch_tokens=64, window_size=16, pad=PAD, fixed=True)
    assert [int(batch.example_ids[0]) for batch in list_epoch(fixed, 0)] == list(range(0, 999, 64))


def test_short_documents_are_packed_into_windows() -> None:
    windows = WindowLoader(make_documents(5, 9, 3, 14, 2, 7, 30, 4), batch_tokens=64, window_size=16, pad=PAD, seed=1)
    shapes = set()
    for batch in (batch for epoch in range(4) for batch in list_epoch(windows, epoch)):
        packing = batch.inputs.packing
        assert packing is not None
        shapes.add(packing.ends.shape)
        for ids, segments, positions, ends in zip(
            batch.inputs.ids, packing.segments, packing.positions, packing.ends, strict=True
        ):
            document = np.searchsorted(windows.documents.offsets, ids.numpy() - 100, "right")
            real = segments >= 0
            assert (np.diff(document[real]) == np.diff(segments[real])).all()
            for segment in segments[real].unique().tolist():
                mine = (segments == segment).nonzero().flatten()
                assert positions[mine].tolist() == list(range(len(mine)))
                assert int(ends[segment]) == int(mine[-1]) + 1
            assert int(ends[-1]) == int(real.sum())
    assert len(shapes) == 1


def test_iteration_does_not_depend_on_start_or_workers() -> None:
    windows = WindowLoader(make_documents(300), batch_tokens=64, window_size=16, pad=PAD, seed=1)
    steps = windows.num_batches(0)
    for workers in (0, 2):
        walk = windows.iter_batches(LoaderPosition(0, steps - 1), workers=workers)
        for expected in (LoaderPosition(0, steps - 1), LoaderPosition(1, 0)):
            position, batch = next(walk)
            assert position == expected
            assert (batch.labels == windows.get_batch(*expected).labels).all()


# ---- masking ---------------------------------------------------------------------------------------------------------


def make_masked_loader(layout: Literal["packed", "bucketed"], count: int = 2000) -> tuple[TextLoader, EncodedTexts]:
    texts = make_texts(count)
    masks = TokenMasker(MASK, np.arange(5000, 6000), 1, 1)
    return TextLoader(
        texts, BatchConfig(batch_tokens=2048, max_tokens=64, layout=layout), masks, pad=PAD, seed=1
    ), texts


@pytest.mark.parametrize("layout", ["packed", "bucketed"])
def test_masking_rates_are_those_of_bert(layout: Literal["packed", "bucketed"]) -> None:
    batches, texts = make_masked_loader(layout)
    counts: Counter[str] = Counter()
    for batch in list_epoch(batches, 0):
        assert batch.label_positions is not None
        inputs, labels = batch.inputs.ids.gather(1, batch.label_positions), batch.labels
        is_label = labels >= 0
        counts["labels"] += int(is_label.sum())
        counts["masked"] += int((inputs[is_label] == MASK).sum())
        counts["other"] += int((inputs[is_label] >= 5000).sum())
        counts["same"] += int((inputs[is_label] == labels[is_label]).sum())
        assert (labels[is_label] >= 100).all()  # no start or end tokens
        assert int((batch.inputs.ids == MASK).sum()) == int((inputs[is_label] == MASK).sum())
    num_tokens = len(texts.ids) - 2 * len(texts)
    assert 0.14 < counts["labels"] / num_tokens < 0.18  # at least one per row
    assert abs(counts["masked"] / counts["labels"] - 0.8) < 0.02
    assert abs(counts["other"] / counts["labels"] - 0.1) < 0.015
    assert counts["masked"] + counts["other"] + counts["same"] == counts["labels"]


def test_masking_differs_between_epochs_and_is_reproducible() -> None:
    batches, again = (make_masked_loader("packed", 1)[0] for _ in range(2))  # one text, always at the same position
    assert (batches.get_batch(0, 0).inputs.ids == again.get_batch(0, 0).inputs.ids).all()
    assert len({tuple(batches.get_batch(epoch, 0).inputs.ids.flatten().tolist()) for epoch in range(8)}) > 4


def test_packed_batches_have_one_shape_and_slices_keep_all_labels() -> None:
    batches, _ = make_masked_loader("packed")
    epoch_batches = list_epoch(batches, 0)
    assert len({(batch.inputs.ids.shape, batch.labels.shape) for batch in epoch_batches}) == 1
    batch = epoch_batches[0]
    pieces = [batch.slice_rows(0, 10), batch.slice_rows(10, len(batch))]
    assert sum(piece.num_targets for piece in pieces) == batch.num_targets
    assert sum(piece.num_tokens for piece in pieces) == batch.num_tokens
    copied = batch.to("cpu")
    for actual, other in (
        (copied.labels, batch.labels),
        (copied.inputs.ids, batch.inputs.ids),
        (copied.label_positions, batch.label_positions),
    ):
        assert actual is not None
        assert other is not None
        assert (actual == other).all()


# ---- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["packed", "bucketed"])
def test_every_text_has_one_label(layout: Literal["packed", "bucketed"]) -> None:
    texts = make_texts(300)
    config = BatchConfig(batch_tokens=512, max_tokens=64, layout=layout)
    batches = TextLoader(
        texts, config, TextLabeler(np.arange(300)), pad=PAD, seed=1
    )  # the label is the index of the text
    is_label: list[int] = []
    for batch in list_epoch(batches, 0):
        packing = batch.inputs.packing
        for row, labels in enumerate(batch.labels.tolist()):
            for position, label in enumerate(labels):
                if label < 0:
                    continue
                is_label.append(label)
                end = packing.ends[row, position - 1] if packing is not None and position else 0
                assert int(batch.inputs.ids[row, int(end) + 1]) == 100 + label
    assert sorted(is_label) == list(range(300))


# ---- span corruption -------------------------------------------------------------------------------------------------


def test_source_and_target_spans_restore_the_text() -> None:
    lengths = np.random.default_rng(0).integers(2, 80, 300)
    texts = make_documents(*lengths.tolist())
    corruption = SpanCorruption(texts, range(10, 30), AFTER, PAD, seed=1)
    span_lengths_by_epoch: dict[int, list[int]] = {0: [], 1: []}
    for epoch, span_lengths in span_lengths_by_epoch.items():
        store = corruption.build_epoch_store(epoch)
        for i in range(len(texts)):
            source, target = store.source[i].tolist(), store.target[i].tolist()
            assert source[-1] == target[-1] == AFTER
            spans: dict[int, list[int]] = {}
            for token in target[:-1]:
                if token < 30:
                    spans[token] = []
                else:
                    spans[max(spans)].append(token)
            assert list(spans) == list(range(10, 10 + len(spans)))
            span_lengths += map(len, spans.values())
            restored = [
                token
                for source_token in source[:-1]
                for token in (spans[source_token] if source_token < 30 else [source_token])
            ]
            assert restored == texts.ids[texts.offsets[i] : texts.offsets[i + 1]].tolist()
    assert (corruption.build_epoch_store(0).source.ids == corruption.build_epoch_store(0).source.ids).all()
    assert (corruption.build_epoch_store(0).source.ids != corruption.build_epoch_store(1).source.ids).any()
    assert span_lengths_by_epoch[0] != span_lengths_by_epoch[1]
    assert min(span_lengths_by_epoch[0]) == 1
    assert (
        corruption.build_epoch_store(0).source.offsets == corruption.build_epoch_store(1).source.offsets
    ).all()  # the same shape in all epochs


def test_noise_density_and_span_length_are_those_of_t5() -> None:
    noise, spans = compute_span_counts(np.array([2, 10, 100, 512]), 100)
    assert noise.tolist() == [1, 2, 15, 77]
    assert spans.tolist() == [1, 1, 5, 26]
    assert compute_span_counts(np.array([512]), 8)[1].tolist() == [8]
