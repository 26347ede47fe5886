"""Masks written as drawings: a row per query, a column per key, x = visible."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from attent.nn import Mask, Packing
from attent.nn.kernels.attention import compute_offsets

CPU = torch.device("cpu")


def draw_mask(mask: Mask, B: int, Tq: int, Tk: int) -> list[list[str]]:
    """One list of strings per row of the batch."""
    dense = mask.to_dense(B, Tq, Tk, CPU).expand(B, 1, Tq, Tk)[:, 0]
    return [["".join(".x"[int(may)] for may in query) for query in row] for row in dense]


def parse_drawings(*rows: str) -> list[list[str]]:
    return [row.split() for row in rows]


ONE_ROW: dict[str, tuple[Mask, int, int, str]] = {
    "everything": (Mask(), 2, 3, "xxx xxx"),
    "causal": (Mask(causal=True), 4, 4, "x... xx.. xxx. xxxx"),
    "causal, more keys": (Mask(causal=True), 2, 4, "x... xx.."),
    "causal, fewer keys": (Mask(causal=True), 4, 2, "x. xx xx xx"),
    "causal behind a cache": (Mask(causal=True, q_start=2), 2, 4, "xxx. xxxx"),
    "causal, one query of a cache": (Mask(causal=True, q_start=3), 1, 4, "xxxx"),
    "window 1, 0": (Mask(window=(1, 0)), 4, 4, "x... xx.. .xx. ..xx"),
    "window 0, 0": (Mask(window=(0, 0)), 3, 3, "x.. .x. ..x"),
    "window 2, 1": (Mask(window=(2, 1)), 5, 5, "xx... xxx.. xxxx. .xxxx ..xxx"),
    "window 1, any": (Mask(window=(1, None)), 4, 4, "xxxx xxxx .xxx ..xx"),
    "window any, 1": (Mask(window=(None, 1)), 4, 4, "xx.. xxx. xxxx xxxx"),
    "window any, any": (Mask(window=(None, None)), 2, 2, "xx xx"),
    "causal window 1, any": (Mask(causal=True, window=(1, None)), 4, 4, "x... xx.. .xx. ..xx"),
    "causal window 2, 2": (Mask(causal=True, window=(2, 2)), 4, 4, "x... xx.. xxx. .xxx"),
    "window behind a cache": (Mask(window=(1, 0), q_start=2), 2, 4, ".xx. ..xx"),
    "window past the keys": (Mask(window=(1, 0), q_start=2), 3, 3, ".xx ..x ..."),
}


@pytest.mark.parametrize("name", ONE_ROW)
def test_masks_without_per_row_rules(name: str) -> None:
    mask, Tq, Tk, expected = ONE_ROW[name]
    assert not mask.is_per_row
    assert draw_mask(mask, 2, Tq, Tk) == parse_drawings(expected, expected)


def test_lengths_hide_padding() -> None:
    mask = Mask(key_lengths=torch.tensor([3, 1, 0]))
    assert draw_mask(mask, 3, 2, 3) == parse_drawings("xxx xxx", "x.. x..", "... ...")


def test_lengths_and_order() -> None:
    mask = Mask(causal=True, key_lengths=torch.tensor([3, 1]))
    assert draw_mask(mask, 2, 3, 3) == parse_drawings("x.. xx. xxx", "x.. x.. x..")


def test_lengths_and_window() -> None:
    mask = Mask(window=(1, 1), key_lengths=torch.tensor([4, 2]))
    assert draw_mask(mask, 2, 4, 4) == parse_drawings("xx.. xxx. .xxx ..xx", "xx.. xx.. .x.. ....")


def test_rows_with_different_starts() -> None:
    mask = Mask(causal=True, q_start=torch.tensor([0, 2]))
    assert draw_mask(mask, 2, 2, 4) == parse_drawings("x... xx..", "xxx. xxxx")


def test_rows_with_different_starts_and_a_window() -> None:
    mask = Mask(causal=True, window=(1, None), q_start=torch.tensor([0, 2]))
    assert draw_mask(mask, 2, 2, 4) == parse_drawings("x... xx..", ".xx. ..xx")


def test_starts_and_lengths() -> None:
    mask = Mask(causal=True, q_start=torch.tensor([1, 2]), key_lengths=torch.tensor([4, 2]))
    assert draw_mask(mask, 2, 2, 4) == parse_drawings("xx.. xxx.", "xx.. xx..")


def test_packed_sentences_see_themselves() -> None:
    """Two sentences of 2 and 1 with one padding token; one of 3; padding neither attends nor is attended to."""
    packing = Packing.from_lengths([[2, 1], [3]], 4)
    mask = Mask(packing=(packing, packing))
    assert draw_mask(mask, 2, 4, 4) == parse_drawings("xx.. xx.. ..x. ....", "xxx. xxx. xxx. ....")


def test_packed_and_causal() -> None:
    packing = Packing.from_lengths([[2, 2], [3]], 4)
    mask = Mask(causal=True, packing=(packing, packing))
    assert draw_mask(mask, 2, 4, 4) == parse_drawings("x... xx.. ..x. ..xx", "x... xx.. xxx. ....")


def test_packed_and_window() -> None:
    packing = Packing.from_lengths([[3, 2]])
    mask = Mask(window=(0, 1), packing=(packing, packing))
    assert draw_mask(mask, 1, 5, 5) == parse_drawings("xx... .xx.. ..x.. ...xx ....x")


def test_packed_pairs_attend_within_their_sentence() -> None:
    """Padding of one side does not attend to padding of the other: segment -1 never matches -1."""
    queries, keys = Packing.from_lengths([[1, 2], [2]], 4), Packing.from_lengths([[2, 1], [1]], 4)
    assert draw_mask(Mask(packing=(queries, keys)), 2, 4, 4) == parse_drawings(
        "xx.. ..x. ..x. ....", "x... x... .... ...."
    )


def test_packed_pairs_with_an_empty_side() -> None:
    queries, keys = Packing.from_lengths([[2, 1, 1]]), Packing.from_lengths([[0, 2, 1]])
    assert draw_mask(Mask(packing=(queries, keys)), 1, 4, 3) == parse_drawings("... ... xx. ..x")


def test_packed_pairs_count_positions_within_each_sentence() -> None:
    queries, keys = Packing.from_lengths([[1, 3]]), Packing.from_lengths([[2, 3]])
    mask = Mask(causal=True, packing=(queries, keys))
    assert draw_mask(mask, 1, 4, 5) == parse_drawings("x.... ..x.. ..xx. ..xxx")


def test_shortcuts_agree_with_the_dense_mask() -> None:
    """For every small shape, the flags for fast kernels agree with the dense mask."""
    sides = (None, 0, 1, 4)
    windows = [None, *product(sides, sides)]
    seen = {"hides nothing": 0, "plain causal": 0}
    for Tq, Tk, start in product(range(1, 5), range(1, 5), range(5)):
        for causal, window in product((False, True), windows):
            mask = Mask(causal=causal, window=window, q_start=start)
            dense = mask.to_dense(1, Tq, Tk, CPU).expand(1, 1, Tq, Tk)[0, 0]
            if mask.allows_all_keys(Tk):
                seen["hides nothing"] += 1
                assert dense.all(), mask
            if mask.is_plain_causal(Tq, Tk):
                seen["plain causal"] += 1
                assert torch.equal(dense, torch.ones(Tq, Tk).tril().bool()), mask
                assert Tq == Tk  # where the alignment of `is_causal` is unambiguous
    assert seen["hides nothing"] >= 4 * 4 * 5  # at least all masks without any rule
    assert seen["plain causal"] >= 4


@pytest.mark.parametrize(
    "mask",
    [
        Mask(key_lengths=torch.tensor([2])),
        Mask(q_start=torch.tensor([0]), causal=True),
        Mask(packing=(Packing.from_lengths([[2]]), Packing.from_lengths([[2]]))),
        Mask(packing=(Packing.from_lengths([[2]]), Packing.from_lengths([[2]])), causal=True),
    ],
    ids=["lengths", "starts", "packed", "packed causal"],
)
def test_no_shortcut_where_rows_may_differ(mask: Mask) -> None:
    assert mask.is_per_row
    assert not mask.allows_all_keys(2)
    assert not mask.is_plain_causal(2, 2)


def test_the_dense_form_has_four_dimensions_and_is_as_small_as_it_can_be() -> None:
    lengths = torch.tensor([1, 2, 3])
    assert Mask(causal=True).to_dense(3, 2, 4, CPU).shape == (1, 1, 2, 4)
    assert Mask(key_lengths=lengths).to_dense(3, 2, 4, CPU).shape == (3, 1, 1, 4)
    assert Mask(causal=True, key_lengths=lengths).to_dense(3, 2, 4, CPU).shape == (3, 1, 2, 4)


def test_each_form_is_computed_once() -> None:
    mask = Mask(causal=True)
    assert mask.to_dense(2, 3, 3, CPU) is mask.to_dense(2, 3, 3, CPU)
    assert mask.to_dense(2, 2, 3, CPU).shape != mask.to_dense(2, 3, 3, CPU).shape


# --- packing -------------------------------------------------------------------------------------------------------

LAYOUTS: list[tuple[list[list[int]], int | None]] = [
    ([[2, 3], [4]], None),
    ([[2, 3], [4]], 8),
    ([[1, 0, 2], [0, 3], [1, 1, 1, 1]], 6),
    ([[5, 1, 2, 7]], None),
    ([[], [2]], 3),
    ([[0], [0]], 2),
    ([[3]], 3),
]


@pytest.mark.parametrize(("rows", "width"), LAYOUTS, ids=str)
def test_packing_has_the_position_of_each_token(rows: list[list[int]], width: int | None) -> None:
    packing = Packing.from_lengths(rows, width)
    width = max(map(sum, rows)) if width is None else width
    assert packing.shape == (len(rows), width)
    assert packing.max_length == max((n for row in rows for n in row), default=0)
    for b, row in enumerate(rows):
        segments = [s for s, n in enumerate(row) for _ in range(n)]
        positions = [t for n in row for t in range(n)]
        text = len(segments)
        assert packing.segments[b].tolist() == segments + [-1] * (width - text)
        assert packing.positions[b, :text].tolist() == positions
        assert (packing.positions[b] >= 0).all()


@pytest.mark.parametrize(("rows", "width"), LAYOUTS, ids=str)
def test_offsets_concatenate_all_rows(rows: list[list[int]], width: int | None) -> None:
    """Each sentence of the queries is matched with that of the keys, and padding with an empty range."""
    other = [[n + 1 for n in row] for row in rows]
    queries, keys = Packing.from_lengths(rows, width), Packing.from_lengths(other, max(map(sum, other)) + 2)
    offsets_q, offsets_k = compute_offsets(Mask(packing=(queries, keys)))
    assert offsets_q.dtype == offsets_k.dtype == torch.int32
    assert offsets_q[0] == offsets_k[0] == 0
    assert offsets_q[-1] == queries.segments.numel()
    assert offsets_k[-1] == keys.segments.numel()
    assert len(offsets_q) == len(offsets_k)
    meets = torch.zeros(queries.segments.numel(), keys.segments.numel(), dtype=torch.bool)
    for q0, q1, k0, k1 in zip(offsets_q, offsets_q[1:], offsets_k, offsets_k[1:], strict=False):
        meets[q0:q1, k0:k1] = True
    dense = Mask(packing=(queries, keys)).to_dense(len(rows), queries.shape[1], keys.shape[1], CPU)[:, 0]
    assert torch.equal(meets, torch.block_diag(*dense.unbind()).bool())


def test_extra_sentence_slots_change_shapes_only() -> None:
    """So that all batches share one compiled graph."""
    tight, roomy = (Packing.from_lengths([[2, 1], [3]], 4, max_sentences=most) for most in (None, 5))
    assert roomy.ends.shape == (2, 5)
    assert torch.equal(tight.segments, roomy.segments)
    assert torch.equal(tight.positions, roomy.positions)
    masks = [Mask(packing=(packing, packing)).to_dense(2, 4, 4, CPU) for packing in (tight, roomy)]
    assert torch.equal(*masks)


def test_packing_moves_to_a_device() -> None:
    packing = Packing.from_lengths([[2, 1]], 4).to("meta")
    assert {packing.segments.device.type, packing.positions.device.type, packing.ends.device.type} == {"meta"}
    assert packing.max_length == 2


def test_packing_of_no_rows_is_empty() -> None:
    packing = Packing.from_lengths([])
    assert (packing.shape, packing.ends.shape, packing.max_length) == ((0, 0), (0, 0), 0)


def test_queries_without_any_key_are_found() -> None:
    mask = Mask(key_lengths=torch.tensor([0, 2]))
    assert mask.has_visible_keys(2, 3, 2, torch.device("cpu")).expand(2, 1, 3, 1).flatten(1).tolist() == [
        [False] * 3,
        [True] * 3,
    ]


def test_ancestors_must_fit_the_beams_and_the_keys() -> None:
    mask = Mask(ancestors=torch.zeros(2, 3, 4, dtype=torch.int64))
    mask.check(2, 3, 12, torch.device("cpu"))
    for sizes in ((2, 3, 13), (1, 3, 12), (2, 2, 8)):
        with pytest.raises(
            ValueError, match=r"`ancestors` must be of \(\d, \d\) beams and \d+ keys at most, but is of"
        ):
            mask.check(*sizes, torch.device("cpu"))
