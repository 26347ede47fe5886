"""Alignment error rate: Och and Ney's formula, the best head is found, and tested on the other half."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attent.decoding import alignment
from attent.decoding.alignment import HeadSelection
from attent.decoding.forced_decoding import EncodedPair, encode_pairs
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import StackConfig
from attent.scoring.alignment import (
    GoldAlignment,
    drop_out_of_range,
    evaluate_alignment,
    parse_gold_alignment,
    read_gold_alignments,
    score_alignments,
)
from attent.scoring.report import render_best_alignment
from attent.training.autoconfig import fit_to_tokenizer
from tests.text.corpus import lines, tokenizer

STACK = StackConfig(layers=2, width=16, heads=2, ffn_width=24)
TEXTS = list(lines()[0][:10])
GOLD = [parse_gold_alignment(" ".join(f"{i}-{i}" for i in range(len(text.split())))) for text in TEXTS]


def build_model() -> Seq2Seq:
    return Seq2Seq(fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=STACK, decoder=mirror_encoder(STACK)), tokenizer()))


# ---- gold alignments -------------------------------------------------------------------------------------------------


def test_sure_and_possible_links_are_read(tmp_path: Path) -> None:
    (tmp_path / "gold").write_text("0-0 1?2 3p1\n\n2-2\n", encoding="utf-8")
    first, empty, last = read_gold_alignments(tmp_path / "gold")
    assert first == GoldAlignment(sure=frozenset({(0, 0)}), possible=frozenset({(0, 0), (1, 2), (3, 1)}))
    assert empty == GoldAlignment(sure=frozenset(), possible=frozenset())
    assert last.sure == {(2, 2)}


@pytest.mark.parametrize("word", ["0:0", "1-", "-1-2", "a-b", "1-2-3", "1.5-2", "9999999999999-1"])
def test_a_bad_link_is_named_by_its_line(word: str, tmp_path: Path) -> None:
    (tmp_path / "gold").write_text(f"0-0\n1-1 {word}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"gold:2: a link must be two numbers such as 3-4"):
        read_gold_alignments(tmp_path / "gold")


@pytest.mark.parametrize(("content", "message"), [(b"", "holds no alignments"), (b"\xff\xfe", "must be a text file")])
def test_other_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "gold").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_gold_alignments(tmp_path / "gold")
    with pytest.raises(ValueError, match="cannot be read"):
        read_gold_alignments(tmp_path / "nothing")


def test_a_stray_link_is_dropped_but_alignments_of_other_texts_are_refused() -> None:
    many = [*GOLD, *GOLD]
    stray = GoldAlignment(sure=many[3].sure | {(2, 99)}, possible=many[3].possible | {(2, 99)})
    in_range, dropped = drop_out_of_range([*many[:3], stray, *many[4:]], TEXTS * 2, TEXTS * 2, "de-en.wa")
    assert in_range == many
    assert dropped == ("de-en.wa:4: 2-99",)
    with pytest.raises(ValueError, match=r"de-en.wa:1: 3-3 must be a link between words of the pair.* give the text"):
        drop_out_of_range(many, ["one two three"] * 20, TEXTS * 2, "de-en.wa")
    with pytest.raises(ValueError, match="a line for each pair, but has 10 for 9 pairs"):
        drop_out_of_range(GOLD, TEXTS[:9], TEXTS[:9])


@pytest.mark.parametrize(("pairs", "refused"), [(20, False), (19, True)])
def test_one_link_in_twenty_may_be_out_of_range(pairs: int, refused: bool) -> None:
    gold = [parse_gold_alignment("0-1" if i == 0 else "0-0") for i in range(pairs)]
    if refused:
        with pytest.raises(ValueError, match="out of range"):
            drop_out_of_range(gold, ["a"] * pairs, ["a"] * pairs)
    else:
        in_range, dropped = drop_out_of_range(gold, ["a"] * pairs, ["a"] * pairs)
        assert (in_range[0].possible, dropped) == (frozenset(), ("gold:1: 0-1",))


def test_the_error_rate_is_that_of_och_and_ney() -> None:
    gold = [parse_gold_alignment("0-0 1-1 2?2"), parse_gold_alignment("0-0")]
    scores = score_alignments([((0, 0), (2, 2), (2, 1)), ((0, 0),)], gold)
    # 4 predicted and 3 sure links: 2 of those predicted are sure, 3 are possible
    assert scores.aer == pytest.approx(100 * (1 - (2 + 3) / (4 + 3)))
    assert (scores.precision, scores.recall, scores.num_links) == (75, pytest.approx(200 / 3), 4)
    assert score_alignments([((0, 0), (1, 1)), ((0, 0),)], gold).aer == 0
    assert score_alignments([(), ()], gold).aer == 100


# ---- selection -------------------------------------------------------------------------------------------------------


def plant(monkeypatch: pytest.MonkeyPatch, good: HeadSelection, lucky: HeadSelection | None = None) -> None:
    """Patch the attention: `good` aligns the words but for every tenth, `lucky` all words of every other pair."""

    def weights(
        _: nn.Module, rows: Sequence[EncodedPair], layers: Sequence[int], __: int = 0
    ) -> Iterator[tuple[int, Tensor]]:
        for index, row in enumerate(rows):
            attention = torch.zeros(2, 2, len(row.target), len(row.source))
            attention[..., 0] = 1.0  # all other heads
            for token in range(len(row.target) - 1):
                for choice in (good, lucky) if lucky and index % 2 == 0 else (good,):
                    assert choice.heads
                    missed = choice == good and token % 10 == 9
                    step = attention[choice.layer, choice.heads[0], token + choice.shift]
                    step[0], step[0 if missed else token] = 0.0, 0.4
            yield index, attention[list(layers)]

    monkeypatch.setattr(alignment, "compute_cross_weights", weights)


@pytest.mark.parametrize(
    "good", [HeadSelection(layer=1, heads=(0,), shift=True), HeadSelection(layer=0, heads=(1,), shift=False)]
)
def test_the_head_that_aligns_is_found(good: HeadSelection, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, good)
    report = evaluate_alignment(build_model(), tokenizer(), TEXTS, TEXTS, GOLD)
    assert report.best.choice == good
    assert report.best.aer < 15
    assert report.best.test_aer == pytest.approx(report.one_way.aer)
    assert report.mutual.precision >= report.one_way.precision
    assert min(c.aer for c in report.candidates if c.choice.layer != good.layer) > 50
    assert min(c.aer for c in report.candidates if c.choice.shift != good.shift) > report.best.aer + 15
    assert len(report.candidates) == 2 * 2 * (1 + 2)
    assert report.selection.selection == good
    assert report.selection.aer == report.best.test_aer


def test_each_row_of_the_report_has_its_own_heads_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, HeadSelection(layer=1, heads=(0,), shift=True))
    report = evaluate_alignment(build_model(), tokenizer(), TEXTS, TEXTS, GOLD)
    report = replace(
        report,
        best=replace(report.best, selection_aer=1.25),
        one_way=replace(report.one_way, aer=2.25, precision=3.25, recall=4.25),
        mutual=replace(report.mutual, aer=5.25, precision=6.25, recall=7.25),
    )
    rows = [" ".join(line.plain.split()) for line in render_best_alignment(report)]
    assert rows[0].startswith("Best heads layer 1, head 0, at the next step")
    assert rows[-3:] == [
        "selection half 1.2",
        "test half 2.2 3.2 4.2",
        "mutual links only 5.2 6.2 7.2",
    ]


def test_luck_on_the_selection_half_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    lucky = HeadSelection(layer=1, heads=(1,), shift=True)
    plant(monkeypatch, HeadSelection(layer=0, heads=(0,), shift=True), lucky)
    report = evaluate_alignment(build_model(), tokenizer(), TEXTS, TEXTS, GOLD)
    assert report.best.choice == lucky
    assert report.best.selection_aer == 0
    assert report.best.test_aer > 50
    assert report.selection.aer == report.best.test_aer


def test_the_rates_are_those_of_the_alignments() -> None:
    model = build_model()
    rows = encode_pairs(model, tokenizer(), TEXTS, TEXTS)
    report = evaluate_alignment(model, tokenizer(), TEXTS, TEXTS, GOLD)
    for candidate in report.candidates:
        alignments = alignment.align_rows(model, tokenizer(), TEXTS, TEXTS, rows, candidate.choice)
        links = [a.all_links for a in alignments]
        assert candidate.aer == pytest.approx(score_alignments(links, GOLD).aer)
        assert candidate.selection_aer == pytest.approx(score_alignments(links[::2], GOLD[::2]).aer)
        assert candidate.test_aer == pytest.approx(score_alignments(links[1::2], GOLD[1::2]).aer)
    assert report.best.selection_aer == min(candidate.selection_aer for candidate in report.candidates)


def test_one_pair_is_not_enough_to_choose_and_to_measure() -> None:
    for gold in (GOLD[:1], [GOLD[0], parse_gold_alignment("")]):
        with pytest.raises(ValueError, match="two pairs with sure links are needed"):
            evaluate_alignment(build_model(), tokenizer(), TEXTS[: len(gold)], TEXTS[: len(gold)], gold)
