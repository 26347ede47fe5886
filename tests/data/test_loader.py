"""Batches: every pair once per epoch, within the token budget, and resumable from (epoch, step)."""

import hashlib
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import attent
from attent.data.batch_plan import LAYOUTS, BatchConfig, Layout, RowCapacity, best_fit, draw_epoch_order
from attent.data.loader import LoaderPosition, PairBatch, PairLoader, TokenBatch
from attent.data.pairs import CorpusError
from attent.data.token_store import TokenSequences, TokenStore
from attent.models.seq2seq import shift_right
from attent.nn import Packing

without_deadline = hypothesis_settings(deadline=None, max_examples=30)  # no failures on busy machines


def make_store(lengths: list[tuple[int, int]], pad: int = 0) -> TokenStore:
    """Return a store with sentences of these lengths; ids depend on the pair, so that swapped pairs are detected."""
    sides = []
    for side in range(2):
        side_lengths = [pair[side] for pair in lengths]
        ids = np.concatenate([np.arange(n) + 10 + 100 * i for i, n in enumerate(side_lengths)] or [np.empty(0)]).astype(
            "<u4"
        )
        sides.append(TokenSequences(ids, np.concatenate([[0], np.cumsum(side_lengths)]).astype("<i8")))
    return TokenStore.from_sequences(sides[0], sides[1], (0, pad), "corpus.tsv", Path("nowhere"))


def draw_wmt_lengths(n: int, seed: int = 0) -> list[tuple[int, int]]:
    """Draw lengths as in news text: log-normal, about 29 source and 30 target tokens."""
    rng = np.random.default_rng(seed)
    source = np.exp(np.log(29) - 0.18 + 0.6 * rng.standard_normal(n)).round().clip(1, 200)
    target = (source * 1.03 * np.exp(0.15 * rng.standard_normal(n))).round().clip(1, 200)
    return list(zip(source.astype(int).tolist(), target.astype(int).tolist(), strict=True))


def list_epoch(batches: PairLoader, epoch: int = 0) -> list[PairBatch]:
    return [batches.get_batch(epoch, step) for step in range(batches.num_batches(epoch))]


def list_sentences(text: TokenBatch) -> list[tuple[int, ...]]:
    """Return the sentences of one side of a batch, from its tensors."""
    if text.packing is None:
        assert text.lengths is not None
        rows = zip(text.ids.tolist(), text.lengths.tolist(), strict=True)
        return [tuple(row[:length]) for row, length in rows if length]
    packed_sentences = []
    for ids, segments in zip(text.ids, text.packing.segments, strict=True):
        packed_sentences += [tuple(ids[segments == s].tolist()) for s in range(int(segments.max()) + 1)]
    return packed_sentences


def is_equal(first: PairBatch, second: PairBatch) -> bool:
    tensors = [
        [side.ids, side.lengths, *(vars(side.packing).values() if side.packing else [])]
        for batch in (first, second)
        for side in (batch.source, batch.target)
    ]
    pairs = zip(tensors[0] + tensors[1], tensors[2] + tensors[3], strict=True)
    return np.array_equal(first.example_ids, second.example_ids) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs
    )


lengths = st.lists(st.tuples(st.integers(1, 24), st.integers(1, 24)), max_size=60)
configs = st.builds(
    lambda layout, tokens, max_tokens, too_long: BatchConfig(
        layout=layout, batch_tokens=max(tokens, max_tokens), max_tokens=max_tokens, too_long=too_long
    ),
    st.sampled_from(LAYOUTS),
    st.integers(8, 120),
    st.integers(4, 32),
    st.sampled_from(["drop", "truncate"]),
)


@without_deadline
@given(lengths, configs, st.integers(0, 3), st.integers(0, 2))
def test_every_kept_pair_appears_once_per_epoch(
    lengths: list[tuple[int, int]], config: BatchConfig, seed: int, epoch: int
) -> None:
    batches = PairLoader(make_store(lengths), config, seed=seed)
    pair_ids = [pair for batch in list_epoch(batches, epoch) for pair in batch.example_ids.tolist()]
    limits = batches.shape.max_source_length, batches.shape.max_target_length
    long = {i for i, (s, t) in enumerate(lengths) if s > limits[0] or t > limits[1]}
    assert set(batches.get_epoch(epoch).plan.too_long_pairs.tolist()) == long
    expected = set(range(len(lengths))) - (long if config.too_long == "drop" else set())
    assert sorted(pair_ids) == sorted(expected)


@without_deadline
@given(lengths, configs)
def test_batch_has_whole_aligned_pairs(lengths: list[tuple[int, int]], config: BatchConfig) -> None:
    store = make_store(lengths)
    batches = PairLoader(store, config)
    for batch in list_epoch(batches):
        for text, side, limit in (
            (batch.source, store.source, batches.shape.max_source_length),
            (batch.target, store.target, batches.shape.max_target_length),
        ):
            expected = [tuple(side[pair][:limit].tolist()) for pair in batch.example_ids.tolist()]
            assert list_sentences(text) == expected
            assert text.num_tokens == sum(map(len, expected))


@without_deadline
@given(lengths, configs)
@example([(1, 1 + n % 24) for n in range(200)], BatchConfig(layout="bucketed", batch_tokens=100, max_tokens=32))
@example([(1 + n % 24, 1) for n in range(200)], BatchConfig(layout="bucketed", batch_tokens=100, max_tokens=32))
def test_no_batch_exceeds_its_token_budget(lengths: list[tuple[int, int]], config: BatchConfig) -> None:
    batches = PairLoader(make_store(lengths), config)
    rows, room = max(1, batches.shape.rows), batches.shape.row_capacity
    for batch in list_epoch(batches):
        for side, width in ((batch.source, room.source), (batch.target, room.target)):
            limit = config.batch_tokens if config.layout == "fixed" else rows * width
            assert side.ids.numel() <= limit <= config.batch_tokens


@pytest.mark.slow
@without_deadline
@given(lengths.filter(bool), st.sampled_from(LAYOUTS), st.integers(0, 1), st.data())
def test_get_batch_equals_iteration(
    lengths: list[tuple[int, int]], layout: Layout, epoch: int, data: st.DataObject
) -> None:
    batches = PairLoader(make_store(lengths), BatchConfig(layout=layout, batch_tokens=48, max_tokens=24), seed=3)
    step = data.draw(st.integers(0, batches.num_batches(epoch) - 1))
    iterated = next(batch for position, batch in batches.iter_batches(workers=0) if position == (epoch, step))
    loader = PairLoader(batches.store, batches.config, seed=3)
    assert is_equal(iterated, loader.get_batch(epoch, step))
    assert is_equal(iterated, next(loader.iter_batches(LoaderPosition(epoch, step), workers=0))[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_number_of_workers_does_not_change_batches(layout: Layout) -> None:
    batches = PairLoader(make_store(draw_wmt_lengths(300)), BatchConfig(layout=layout, batch_tokens=512), seed=1)
    steps = 2 * batches.num_batches(0) + 3  # until the third epoch
    sequential = list(islice(batches.iter_batches(workers=0), steps))
    parallel = list(islice(batches.iter_batches(workers=4), steps))
    assert [position for position, _ in sequential] == [position for position, _ in parallel]
    assert all(is_equal(first, second) for (_, first), (_, second) in zip(sequential, parallel, strict=True))
    assert sequential[-1][0].epoch == 2


@without_deadline
@given(lengths, st.integers(4, 32), st.sampled_from(["drop", "truncate"]))
def test_packed_and_bucketed_have_the_same_sentences(
    lengths: list[tuple[int, int]], max_tokens: int, too_long: Literal["drop", "truncate"]
) -> None:
    store, sentence_counts = make_store(lengths), []
    for layout in LAYOUTS:
        config = BatchConfig(layout=layout, batch_tokens=96, max_tokens=max_tokens, too_long=too_long)
        batches_of_epoch = list_epoch(PairLoader(store, config))
        sentence_counts.append(
            Counter(
                s for batch in batches_of_epoch for side in (batch.source, batch.target) for s in list_sentences(side)
            )
        )
    assert all(counts == sentence_counts[0] for counts in sentence_counts)


@without_deadline
@given(lengths, configs)
def test_packing_matches_rows(lengths: list[tuple[int, int]], config: BatchConfig) -> None:
    batches = PairLoader(make_store(lengths), config)
    for batch in list_epoch(batches):
        for text in (batch.source, batch.target):
            if text.packing is None:
                continue
            ends = [[0, *sorted(set(row))] if row[0] else [0] for row in text.packing.ends.tolist()]
            rows = [[b - a for a, b in pairwise(row)] for row in ends]
            expected = Packing.from_lengths(rows, text.ids.shape[1], text.packing.ends.shape[1])
            assert torch.equal(text.packing.segments, expected.segments)
            assert torch.equal(text.packing.positions, expected.positions)
            assert torch.equal(text.packing.ends, expected.ends)
            assert text.packing.max_length >= expected.max_length


def test_all_packed_batches_have_one_shape() -> None:
    batches = PairLoader(make_store(draw_wmt_lengths(2000)), BatchConfig(layout="packed", batch_tokens=2048))
    shapes = {
        (tuple(side.ids.shape), tuple(side.packing.ends.shape), side.packing.max_length, number)
        for epoch in range(2)
        for batch in list_epoch(batches, epoch)
        for number, side in enumerate((batch.source, batch.target))
        if side.packing is not None
    }
    assert len(shapes) == 2  # one per side


def test_fixed_batches_have_one_shape_for_each_width() -> None:
    batches = PairLoader(make_store(draw_wmt_lengths(2000)), BatchConfig(layout="fixed", batch_tokens=2048))
    shapes = {side.ids.shape for epoch in range(2) for b in list_epoch(batches, epoch) for side in (b.source, b.target)}
    assert all(width % 8 == 0 and rows == 2048 // width for rows, width in shapes)
    assert all(batch.source.ids.shape == batch.target.ids.shape for batch in list_epoch(batches))


@pytest.mark.parametrize(("layout", "least"), [("packed", 0.96), ("bucketed", 0.95), ("fixed", 0.7)])
def test_padding_is_small(layout: Layout, least: float) -> None:
    batches = PairLoader(make_store(draw_wmt_lengths(30_000)), BatchConfig(layout=layout, batch_tokens=4096))
    batches_of_epoch = list_epoch(batches)
    tokens = sum(batch.source.num_tokens + batch.target.num_tokens for batch in batches_of_epoch)
    assert tokens / sum(batch.source.ids.numel() + batch.target.ids.numel() for batch in batches_of_epoch) >= least


def test_row_capacity_follows_the_longer_side() -> None:
    summaries = [(200, 10)] * 990 + [(200, 90)] * 10
    batches = PairLoader(make_store(summaries), BatchConfig(max_tokens=256, batch_tokens=1024))
    assert batches.shape.row_capacity.source == 256
    assert batches.shape.row_capacity.target == 96  # a proportional capacity would be 16 and drop the ten
    assert len(batches.get_epoch(0).plan.too_long_pairs) == 0


@pytest.mark.parametrize(("too_long", "action"), [("drop", "dropped"), ("truncate", "truncated")])
def test_too_long_pairs_are_described_with_location(too_long: Literal["drop", "truncate"], action: str) -> None:
    store = make_store([(5, 5), (40, 5), (5, 41), (6, 6)])
    batches = PairLoader(store, BatchConfig(batch_tokens=64, max_tokens=32, too_long=too_long))
    description = batches.describe_too_long()
    assert description is not None
    assert description.startswith("2 of 4 pairs have more than 32 source or 32 target tokens")
    assert f"are {action} (such as corpus.tsv:2, corpus.tsv:3)" in description
    assert PairLoader(make_store([(5, 5)]), BatchConfig()).describe_too_long() is None


def test_epochs_and_seeds_shuffle_differently() -> None:
    store = make_store(draw_wmt_lengths(200))
    orders = [
        np.concatenate(
            [
                batch.example_ids
                for batch in list_epoch(PairLoader(store, BatchConfig(batch_tokens=1024), seed=seed), epoch)
            ]
        )
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert len({order.tobytes() for order in orders}) == 3


@without_deadline
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.data())
def test_corpus_weight_repeats_pairs(sizes: list[int], data: st.DataObject) -> None:
    weights = [data.draw(st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.0])) for _ in sizes]
    order = draw_epoch_order(sizes, weights, seed=5, epoch=data.draw(st.integers(0, 3)))
    first = 0
    for size, weight in zip(sizes, weights, strict=True):
        times = np.bincount(order[(order >= first) & (order < first + size)] - first, minlength=size)
        assert all(int(weight) <= n <= int(np.ceil(weight)) for n in times)
        assert times.sum() == int(weight) * size + round((weight % 1) * size)
        first += size


def test_epoch_order_is_pinned() -> None:
    """Resumed training must get the same batches with another version of attent or numpy."""
    assert draw_epoch_order([12], [1.0], seed=1, epoch=2).tolist() == [5, 1, 3, 4, 11, 9, 8, 6, 2, 10, 7, 0]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [("packed", "bf1c673e"), ("bucketed", "d987a1b2"), ("fixed", "a38151df")],
)
def test_epoch_batches_are_pinned(layout: Layout, expected: str) -> None:
    lengths = [(7919 * n % 61 + 1, 104729 * n % 53 + 1) for n in range(3000)]
    plan = PairLoader(make_store(lengths), BatchConfig(layout=layout, batch_tokens=1024), seed=1).get_epoch(2).plan
    numbers = [*plan.pair_ids.tolist(), *plan.row_offsets.tolist(), *plan.batch_offsets.tolist()]
    assert hashlib.sha256(repr(numbers).encode()).hexdigest()[:8] == expected


def test_short_side_drops_at_most_one_pair_in_1000() -> None:
    lengths = [(200, 10)] * 4995 + [(200, 60)] * 5
    batches = PairLoader(make_store(lengths), BatchConfig(max_tokens=256, batch_tokens=1024))
    assert batches.shape.max_target_length < 60  # a capacity for them would leave rows mostly empty
    assert len(batches.get_epoch(0).plan.too_long_pairs) == 5
    assert (
        len(
            PairLoader(make_store(lengths), BatchConfig(max_tokens=1280, batch_tokens=4096))
            .get_epoch(0)
            .plan.too_long_pairs
        )
        == 0
    )


def test_capacity_of_32767_tokens_does_not_overflow() -> None:
    lengths = np.array([16000, 300, 16000]), np.array([16000, 300, 16000])
    assert best_fit(*lengths, RowCapacity(16391, 16376, 100)).tolist() in ([0, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 0])


def test_epoch_loss_does_not_depend_on_layout() -> None:
    store = make_store([(s % 7 + 1, t % 6 + 1) for s, t in draw_wmt_lengths(40)])
    torch.manual_seed(0)
    model = attent.build(attent.presets.tiny(vocab=4200)).double().eval()
    losses = []
    for layout in LAYOUTS:
        total = torch.zeros((), dtype=torch.float64)
        for batch in list_epoch(PairLoader(store, BatchConfig(layout=layout, batch_tokens=64, max_tokens=16))):
            total += negative_log_likelihood(model, batch)
        losses.append(float(total.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert losses[2] == pytest.approx(losses[0], rel=1e-9)


def negative_log_likelihood(model: torch.nn.Module, batch: PairBatch) -> torch.Tensor:
    source, target = batch.source, batch.target
    decoder_input = shift_right(target.ids, 1, target.packing)
    logits = model(source.ids, decoder_input, source.lengths, target.lengths, packing=batch.packing)
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), target.ids.flatten(), ignore_index=0, reduction="sum"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_is_copied_as_one_tensor(layout: Layout) -> None:
    batch = PairLoader(make_store(draw_wmt_lengths(50)), BatchConfig(layout=layout, batch_tokens=512)).get_batch(0, 0)
    moved = batch.to("cpu")
    assert is_equal(batch, moved)
    assert moved.flat_tensor is not None
    storages = {t.untyped_storage().data_ptr() for side in (moved.source, moved.target) for t in side.tensors()}
    assert storages == {moved.flat_tensor.untyped_storage().data_ptr()}
    assert moved.to("cpu").flat_tensor is moved.flat_tensor


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_padded_with_the_pad_id(layout: Layout) -> None:
    for batch in list_epoch(
        PairLoader(make_store([(3, 5), (4, 2)], pad=77), BatchConfig(layout=layout, batch_tokens=64, max_tokens=16))
    ):
        for text, pad in ((batch.source, 0), (batch.target, 77)):
            assert (text.ids[~text.token_mask()] == pad).all()
            assert int(text.token_mask().sum()) == text.num_tokens
            assert (text.ids[text.token_mask()] >= 10).all()


def test_augmentation_uses_one_store_per_epoch() -> None:
    stores = [make_store([(n, n)] * 5) for n in (3, 4)]
    batches = PairLoader(
        stores[0], BatchConfig(batch_tokens=32, max_tokens=16), store_for_epoch=lambda epoch: stores[epoch % 2]
    )
    assert {len(s) for batch in list_epoch(batches, 1) for s in list_sentences(batch.source)} == {4}
    assert {len(s) for batch in list_epoch(batches, 2) for s in list_sentences(batch.source)} == {3}


def test_empty_store_is_refused() -> None:
    with pytest.raises(CorpusError, match="epoch 0 has no batches"):
        next(PairLoader(make_store([]), BatchConfig()).iter_batches())


def test_limits_of_the_batch_settings_are_allowed() -> None:
    store = make_store([(3, 4)])
    assert BatchConfig(batch_tokens=1, max_tokens=1).max_tokens == 1
    assert BatchConfig(batch_tokens=8, max_tokens=8).batch_tokens == 8
    for settings in ({"max_tokens": 0}, {"batch_tokens": 7, "max_tokens": 8}, {"layout": "flat "}, {"too_long": "cut"}):
        with pytest.raises(ValueError, match=f"`{next(iter(settings))}` must"):
            BatchConfig(**settings)  # type: ignore[arg-type]
    assert PairLoader(store, BatchConfig(), weights=[999.5]).weights == [999.5]
    for arguments in ({"seed": -1}, {"weights": [1000.0]}, {"weights": [0.0]}):
        with pytest.raises(ValueError, match=f"`{next(iter(arguments))}` must be"):
            PairLoader(store, BatchConfig(), **arguments)  # type: ignore[arg-type]


def test_sentences_of_exactly_the_maximum_length_are_kept() -> None:
    config = BatchConfig(batch_tokens=64, max_tokens=32)
    loader = PairLoader(make_store([(32, 32), (33, 32), (32, 33)]), config)
    assert loader.get_epoch(0).plan.too_long_pairs.tolist() == [1, 2]


def test_invalid_arguments_are_refused() -> None:
    store = make_store([(1, 1)])
    with pytest.raises(ValueError, match="`batch_tokens` must hold the longest sentence"):
        BatchConfig(batch_tokens=100, max_tokens=256)
    with pytest.raises(ValueError, match="`layout` must be packed or bucketed or fixed, but is 'paked'"):
        BatchConfig(layout="paked")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`seed` must be 0 or more"):
        PairLoader(store, BatchConfig(), seed=-1)
    with pytest.raises(IndexError, match="cannot start at batch 5"):
        next(PairLoader(store, BatchConfig()).iter_batches(LoaderPosition(0, 5)))
    with pytest.raises(ValueError, match="`weights` must be 1 numbers over 0"):
        PairLoader(store, BatchConfig(), weights=[float("inf")])
    with pytest.raises(ValueError, match="`weights` must be 1 numbers over 0"):
        PairLoader(store, BatchConfig(), weights=[1.0, 2.0])
    with pytest.raises(IndexError, match="epoch 0 has 1 batches, so there is no batch 1"):
        PairLoader(store, BatchConfig()).get_batch(0, 1)
