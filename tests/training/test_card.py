"""The card of a model: everything that is known stands in it, and no text can break out of its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attent.training.events import ValidationSample
from attent.training.model_card import (
    CardCorpus,
    CardScore,
    CardSetting,
    DataSummary,
    ModelCard,
    ModelSummary,
    TrainingSummary,
    format_headline,
    render_card,
    write_card,
)

SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
CARD = ModelCard(
    folder="runs/en-de",
    source_language="en",
    target_language="de",
    data=DataSummary(
        corpora=(
            CardCorpus(name="multi30k", read=29_000, used=28_900, dropped=(("empty", 60), ("ratio", 40))),
            CardCorpus(name="own.tmx", read=110, used=100, dropped=(("ratio", 10),), files=(("own.tmx", "ab" * 32),)),
        ),
        source_tokens=377_534,
        target_tokens=360_706,
        data_key="cd" * 32,
        num_held_out=1_014,
        held_out_method="the file val, which lies beside the data",
    ),
    model=ModelSummary(
        size="tiny",
        encoder_layers=4,
        decoder_layers=3,
        width=128,
        heads=4,
        ffn_width=256,
        parameters=2_634_752,
        trainable_parameters=2_634_752,
        vocab_size=8_000,
        tokenizer="BPE, joint",
        tokenizer_sha256="ef" * 32,
    ),
    settings=(
        CardSetting(name="train.lr", value="0.002"),
        CardSetting(name="size", value="tiny", reason="29,000 pairs"),
    ),
    scores=(
        CardScore(
            name="test_2016_flickr",
            num_examples=1_000,
            weights="average of the last 5",
            decoding="beam 4, length penalty 0.6",
            bleu=38.64,
            chrf=62.02,
            exact=4.1,
            signatures=(SIGNATURE,),
        ),
    ),
    training=TrainingSummary(
        steps=8_000,
        epochs=64.0,
        seconds=432.0,
        tokens_per_second=318_400.0,
        hardware="NVIDIA H200, bfloat16, compiled",
        end_reason="8,000 updates were done",
        attent_version="0.1.0",
        torch_version="2.13.0",
        python_version="3.11.7",
    ),
    samples=(ValidationSample(source="A *man*.", reference="<b>Ein Mann", output="Ein | Mann\n# Titel"),),
    curves_file="curves.svg",
)


@pytest.mark.parametrize(
    "fact",
    [
        "# en-de translator",
        "29,000 pairs; 38.6 BLEU on test\\_2016\\_flickr.",
        "| 38.6 | 62.0 | 4.1% |",
        "attent translate runs/en-de",
        "attent.Translator.load('runs/en-de')",
        "29,000 | 28,900 | 100",
        "Left out: empty (60), ratio (50).",
        "377,534",
        "cd" * 32,
        "ab" * 32,
        "ef" * 32,
        "1,014 pairs; the file val",
        "4 encoder, 3 decoder",
        "2,634,752",
        "| `train.lr` | `0.002` |  |\n| `size` | `tiny` | 29,000 pairs |",
        "| Set | Pairs | Weights | Decoding | BLEU | chrF | Exact |",
        f"| `own.tmx` | `{'ab' * 32}` |",
        f"`{SIGNATURE}`",
        "average of the last 5",
        "8,000 (64.0 epochs)",
        "7 min 12 s",
        "318,400 tokens a second",
        "attent 0.1.0, torch 2.13.0, Python 3.11.7",
        "(curves.svg)",
        "A \\*man\\*.",
        "Ein \\| Mann \\# Titel",
        "\\<b\\>Ein Mann",
        "from multi30k, own.tmx and from nothing else",
    ],
)
def test_the_card_says(fact: str) -> None:
    assert fact in render_card(CARD)


def test_the_same_facts_give_the_same_page_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "card.md"
    write_card(CARD, path)
    first = path.read_bytes()
    write_card(replace(CARD), path)
    assert path.read_bytes() == first == render_card(CARD).encode()
    assert [found.name for found in tmp_path.iterdir()] == ["card.md"]


def test_what_is_not_known_leaves_no_empty_row() -> None:
    bare = replace(CARD, source_language="", target_language="", settings=(), scores=(), samples=(), curves_file="")
    page = render_card(bare)
    assert "text-to-text" in page
    for absent in ("## Scores", "## Recipe", "## Sample", "curves.svg", "Trained further", "Seed", "None", "|  |\n"):
        assert absent not in page.replace("|  |  |\n| --- | --- |", "")


def test_a_model_trained_further_with_frozen_parts_says_so() -> None:
    page = render_card(replace(CARD, model=replace(CARD.model, trainable_parameters=1_000, base_model="opus-mt-en-de")))
    assert "of which 1,000 were trained" in page
    assert "| Trained further from | opus-mt-en-de |" in page
    assert "from what opus-mt-en-de had learned, from multi30k" in page


def test_a_folder_with_a_space_is_quoted_for_the_shell() -> None:
    assert "attent translate 'my runs/it'\\''s'" in render_card(replace(CARD, folder="my runs/it's"))


def test_a_column_without_anything_is_left_out() -> None:
    page = render_card(replace(CARD, settings=(CardSetting(name="train.lr", value="0.1"),)))
    assert "| Setting | Value |\n" in page
    assert "nats" not in page
    with_loss = replace(CARD, scores=(replace(CARD.scores[0], loss=1.5),))
    assert "| Decoding | Loss | BLEU |" in render_card(with_loss)
    assert "nats" in render_card(with_loss)


@pytest.mark.parametrize(
    ("bleu", "chrf", "exact", "told"),
    [
        (38.64, 62.0, 4.1, "38.6 BLEU"),
        (0.0, 100.0, 99.2, "99.2% exact"),  # dates: no reference has four words
        (20.0, 70.0, 80.0, "80.0% exact"),  # labels, with a few long ones
        (0.0, 41.5, 0.0, "41.5 chrF"),
        (0.0, 0.0, 0.0, "0.0 BLEU"),
        (None, None, None, ""),
    ],
)
def test_the_headline_is_the_figure_that_says_most(
    bleu: float | None, chrf: float | None, exact: float | None, told: str
) -> None:
    score = replace(CARD.scores[0], bleu=bleu, chrf=chrf, exact=exact)
    assert format_headline(score) == told
    head = render_card(replace(CARD, scores=(score,))).split("## Scores")[0]
    assert (f"; {told} on test" in head) == bool(told)
    assert head.rstrip().endswith("." if told else "29,000 pairs.")


def test_a_model_of_several_languages_is_shown_with_one() -> None:
    page = render_card(replace(CARD, target_tag="fr"))
    assert "attent translate runs/en-de --to fr <" in page
    assert """["..."], to='fr')[0].text)""" in page
    assert "translate runs/en-de --to '' <" in render_card(replace(CARD, target_tag=""))
    assert "--to" not in render_card(CARD)


def test_a_file_that_two_corpora_share_is_listed_once() -> None:
    shared = CARD.data.corpora[1]
    page = render_card(replace(CARD, data=replace(CARD.data, corpora=(shared, replace(shared, name="own.tmx (fr)")))))
    assert page.count("ab" * 32) == 1


def test_without_validation_nothing_is_held_out() -> None:
    page = render_card(replace(CARD, data=replace(CARD.data, num_held_out=0, held_out_method="")))
    assert "Held out for validation: nothing." in page
