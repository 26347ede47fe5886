"""The model card: it contains every fact of a run, and no text breaks its Markdown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attent.scoring.metrics import format_headline
from attent.training.events import ValidationSample
from attent.training.model_card import ModelCard, render_card, write_card
from attent.training.tasks.base import CorpusStats, DataSummary, FinalScores
from attent.training.tasks.translation import describe_translator

SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
CARD = ModelCard(
    description=describe_translator("runs/en-de", "en", "de", None),
    unit="pair",
    weights_label="average of the last 5",
    data=DataSummary(
        corpora=(
            CorpusStats(name="multi30k", num_read=29_000, num_used=28_900, dropped=(("empty", 60), ("ratio", 40))),
            CorpusStats(
                name="own.tmx", num_read=110, num_used=100, dropped=(("ratio", 10),), files=(("own.tmx", "ab" * 32),)
            ),
        ),
        source_tokens=377_534,
        target_tokens=360_706,
        data_key="cd" * 32,
        num_held_out=1_014,
        held_out_method="the file val, which lies beside the data",
    ),
    parameters=2_634_752,
    model=(("Size", "tiny"), ("Layers", "4 encoder, 3 decoder"), ("Fine-tuned from", "")),
    settings=(
        ("train.lr", "0.002"),
        ("size", "tiny"),
    ),
    scores=(
        FinalScores(
            name="test_2016_flickr",
            split="test",
            num_examples=1_000,
            decoding="beam 4, length penalty 0.6",
            metrics={"bleu": 38.64, "chrf": 62.02, "exact": 4.1},
            summary="",
            signatures=(SIGNATURE,),
        ),
    ),
    training=(("Steps", "8,000 (64.0 epochs)"), ("Hardware", "NVIDIA H200, bfloat16, compiled")),
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
        "Dropped: empty (60), ratio (50).",
        "377,534",
        "cd" * 32,
        "ab" * 32,
        "1,014 pairs; the file val",
        "4 encoder, 3 decoder",
        "| `train.lr` | `0.002` |\n| `size` | `tiny` |",
        "| Set | Pairs | Weights | Decoding | BLEU | chrF | Exact |",
        f"| `own.tmx` | `{'ab' * 32}` |",
        f"`{SIGNATURE}`",
        "average of the last 5",
        "8,000 (64.0 epochs)",
        "of 2.6 million parameters",
        "(curves.svg)",
        "A \\*man\\*.",
        "Ein \\| Mann \\# Titel",
        "\\<b\\>Ein Mann",
        "Trained on multi30k, own.tmx, and on nothing else",
    ],
)
def test_the_card_contains(fact: str) -> None:
    assert fact in render_card(CARD)


PAGE = """\
# en-de translator

A Transformer of 2.6 million parameters, trained by attent on 29,000 pairs; 38.6 BLEU on test\\_2016\\_flickr.

## Scores

| Set | Pairs | Weights | Decoding | Loss | BLEU | chrF | Exact | Perplexity |
| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |
| test\\_2016\\_flickr | 1,000 | average of the last 5 | beam 4, length penalty 0.6 |  | 38.6 | 62.0 | 4.1% |  |
| valid | 7 | average of the last 5 | beam 4, length penalty 0.6 | 1.235 | 5.0 |  |  | 3.44 |

Loss is cross-entropy in nats per target token. Exact is the share of outputs that equal the reference.

Metric signatures:

- `{signature}`

## Usage

```sh
attent translate runs/en-de < input.txt > output.txt
```

```python
import attent

translator = attent.Translator.load('runs/en-de')
print(translator("..."))
```

## Data

| Corpus | Pairs read | Used | Dropped | Weight |
| --- | ---: | ---: | ---: | ---: |
| multi30k | 29,000 | 28,900 | 100 | 1 |
| own.tmx | 110 | 100 | 10 | 1 |

Dropped: empty (60), ratio (50).

- Tokens: 377,534 source, 360,706 target.
- Held out for validation: 1,014 pairs; the file val, which lies beside the data.
- Key of the encoded data: `{key}`

| File | SHA-256 |
| --- | --- |
| `own.tmx` | `{checksum}` |

## Model

|  |  |
| --- | --- |
| Size | tiny |
| Layers | 4 encoder, 3 decoder |

## Settings

| Setting | Value |
| --- | --- |
| `train.lr` | `0.002` |
| `size` | `tiny` |

All settings are in `run.toml` in the same folder.

## Training

|  |  |
| --- | --- |
| Steps | 8,000 (64.0 epochs) |
| Hardware | NVIDIA H200, bfloat16, compiled |

![Training curves](curves.svg)

## Sample translations

From held-out text, evenly spaced and not selected by hand.

- **Source:** A \\*man\\*.
- **Reference:** \\<b\\>Ein Mann
- **Output:** Ein \\| Mann \\# Titel

## Limits

Trained on multi30k, own.tmx, and on nothing else: """


def test_the_page_as_a_whole() -> None:
    test = CARD.scores[0]
    columns = (("Perplexity", "3.44"),)
    valid = replace(test, name="valid", num_examples=7, metrics={"loss": 1.23456, "bleu": 5.0}, extra_columns=columns)
    page = render_card(replace(CARD, scores=(test, valid)))
    assert page.startswith(PAGE.format(signature=SIGNATURE, key="cd" * 32, checksum="ab" * 32))
    assert page.endswith("The scores hold for the sets above only.\n")


@pytest.mark.parametrize(("length", "shown"), [(400, "x" * 400), (401, "x" * 399 + "…")])
def test_long_samples_are_cut(length: int, shown: str) -> None:
    sample = ValidationSample(source="x" * length, reference="", output="")
    assert f"- **Source:** {shown}\n" in render_card(replace(CARD, samples=(sample,)))


def test_the_same_facts_give_the_same_page_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "card.md"
    write_card(CARD, path)
    first = path.read_bytes()
    write_card(replace(CARD), path)
    assert path.read_bytes() == first == render_card(CARD).encode()
    assert [file.name for file in tmp_path.iterdir()] == ["card.md"]


def test_missing_facts_leave_no_empty_row() -> None:
    description = describe_translator("runs/en-de", "", "", None)
    bare = replace(CARD, description=description, settings=(), scores=(), samples=(), curves_file="")
    page = render_card(bare)
    assert "text-to-text" in page
    for absent in ("## Scores", "## Settings", "## Sample", "curves.svg", "Fine-tuned", "Seed", "None", "|  |\n"):
        assert absent not in page.replace("|  |  |\n| --- | --- |", "")


def test_a_fine_tuned_model_names_its_base() -> None:
    assert "before that, on the data of opus-mt-en-de" in render_card(replace(CARD, base_model="opus-mt-en-de"))


def test_a_folder_with_a_space_is_quoted_for_the_shell() -> None:
    description = describe_translator("my runs", "en", "de", None)
    assert "attent translate 'my runs' <" in render_card(replace(CARD, description=description))


def test_empty_columns_are_omitted() -> None:
    assert "nats" not in render_card(CARD)
    with_loss = replace(CARD, scores=(replace(CARD.scores[0], metrics={"loss": 1.5, "bleu": 1.0}),))
    assert "| Decoding | Loss | BLEU |" in render_card(with_loss)
    assert "nats" in render_card(with_loss)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"bleu": 38.64, "chrf": 62.0, "exact": 4.1}, "38.6 BLEU"),
        ({"bleu": 0.0, "chrf": 100.0, "exact": 99.2}, "99.2% exact"),  # dates: no reference has four words
        ({"bleu": 20.0, "chrf": 70.0, "exact": 80.0}, "80.0% exact"),  # labels, with a few long ones
        ({"bleu": 0.0, "chrf": 41.5, "exact": 0.0}, "41.5 chrF"),
        ({"bleu": 0.0, "chrf": 0.0, "exact": 0.0}, "0.0 BLEU"),
        ({"loss": 0.3, "accuracy": 92.125}, "92.12% accuracy"),
        ({}, ""),
    ],
)
def test_the_headline_is_the_most_informative_metric(metrics: dict[str, float], expected: str) -> None:
    assert format_headline(metrics) == expected
    score = replace(CARD.scores[0], metrics=metrics)
    head = render_card(replace(CARD, scores=(score,))).split("## Scores")[0]
    assert (f"; {expected} on test" in head) == bool(expected)
    assert head.rstrip().endswith("." if expected else "29,000 pairs.")


def test_without_a_known_metric_the_headline_is_an_extra_column() -> None:
    score = replace(CARD.scores[0], metrics={"loss": 1.0}, extra_columns=(("Perplexity", "2.72"),))
    assert "; 2.72 perplexity on test" in render_card(replace(CARD, scores=(score,)))


def test_a_multilingual_model_has_an_example_language() -> None:
    french, unknown = (replace(CARD, description=describe_translator("x", "en", "fr", tag)) for tag in ("fr", ""))
    assert "attent translate x --to fr <" in render_card(french)
    assert """print(translator("...", to='fr'))""" in render_card(french)
    assert "translate x --to '' <" in render_card(unknown)
    assert "--to" not in render_card(CARD)


def test_a_file_that_two_corpora_share_is_listed_once() -> None:
    shared = CARD.data.corpora[1]
    page = render_card(replace(CARD, data=replace(CARD.data, corpora=(shared, replace(shared, name="own.tmx (fr)")))))
    assert page.count("ab" * 32) == 1


def test_without_validation_nothing_is_held_out() -> None:
    page = render_card(replace(CARD, data=replace(CARD.data, num_held_out=0, held_out_method="")))
    assert "Held out for validation: nothing." in page
