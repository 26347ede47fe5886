"""`attent classify`: which label texts or images get, how sure the model is; and on a labelled set, how often it is
right. What is done with it is `attent.decode.reader`'s.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import CycloptsError, Parameter

from attent.cli.input_texts import (
    BLOCK_TEXTS,
    OUTPUT_GROUP,
    TextInputFlags,
    check_flags,
    load_predictor,
    print_message,
    print_result,
    read_text_blocks,
)

if TYPE_CHECKING:
    from attent.decoding.encoder_inference import Classification, Predictor

MAX_LISTED_CONFUSIONS = 3  # labels that are most often taken for another, told of a labelled set


class ClassifyError(ValueError):
    """What cannot be classified as it was asked for, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class ClassifyFlags(TextInputFlags):
    """What may be asked for; each field is a flag of the command."""

    data: Annotated[
        Path | None,
        Parameter(help="a labelled set to be tested on: a .tsv or .jsonl of texts, or a folder of images per class"),
    ] = None
    pairs: Annotated[
        bool, Parameter(negative="", help="each line is two texts with a tab between them, for a model of pairs")
    ] = False
    top: Annotated[
        int,
        Parameter(name=["--top", "-n"], group=OUTPUT_GROUP, help="labels of each, the likeliest first, by default 1"),
    ] = 1


def classify(
    model: Annotated[
        Path, Parameter(help="a folder of `attent train --task classify` or `--task images`, or its like")
    ],
    items: Annotated[
        list[str] | None,
        Parameter(
            help="texts, or files with a text a line, by default standard input; for a model of images, their files",
            negative_iterable="",
        ),
    ] = None,
    /,
    *,
    flags: Annotated[ClassifyFlags, Parameter(name="*", show_default=False)] = ClassifyFlags(),  # noqa: B008 - frozen
) -> None:
    """Say which label each text or image gets: the text, the label, how likely it is.

    attent classify runs/sst2 "A film to remember."
    """
    check_usage(items, flags)
    reader = load_predictor(model, flags)
    if flags.data is not None:
        print_report(*classify_labelled_set(reader, flags.data), flags)
        return
    for block in read_item_blocks(reader, items):
        asked = [parse_pair(text) for text in block] if flags.pairs else list(block)
        for text, found in zip(block, reader.classify(asked), strict=True):
            print_result(format_line(text, found, flags))


def check_usage(items: Sequence[str] | None, flags: ClassifyFlags) -> None:
    check_flags(flags, "classify", flags.top)
    if flags.data is not None and items:
        raise CycloptsError(msg="--data is a set of its own: leave the texts out", command_chain=("classify",))
    if flags.data is not None and flags.pairs:
        problem = "--pairs is for lines that are read as they are: with --data leave it out, a set has one text a label"
        raise CycloptsError(msg=problem, command_chain=("classify",))


def read_item_blocks(predictor: Predictor, items: Sequence[str] | None) -> Iterator[list[str]]:
    """Texts; or the names of images, which standard input may give, too."""
    from attent.models import VisionTransformer

    if isinstance(predictor.model, VisionTransformer) and items:
        return iter([list(items)])
    return (block.texts for block in read_text_blocks(items or []))


def parse_pair(text: str) -> tuple[str, str]:
    first, tab, second = text.partition("\t")
    if not tab:
        raise ClassifyError(f"with --pairs a line must be two texts with a tab between them, but one is {text[:60]!r}")
    return first, second


def format_line(text: str, prediction: Classification, flags: ClassifyFlags) -> str:
    from attent.decoding.output_format import replace_line_breaks

    best = list(prediction.probabilities.items())
    if flags.json:
        facts: dict[str, Any] = {
            "text": text,
            "label": prediction.label,
            "probability": round(prediction.probability, 6),
        }
        facts["labels"] = {label: round(chance, 6) for label, chance in best}
        return json_module.dumps(facts, ensure_ascii=False)
    shown = [cell for label, chance in best[: flags.top] for cell in (label, f"{chance:.4f}")]
    return "\t".join(map(replace_line_breaks, [text, *shown]))


# --- a labelled set --------------------------------------------------------------------------------------------------


def classify_labelled_set(predictor: Predictor, data: Path) -> tuple[list[str], list[Classification]]:
    """The labels that a set has, and what the model says."""
    from attent.models import VisionTransformer

    known = predictor.require_labels()  # a model that has none is told of before anything is read
    labels, found = (
        classify_images(predictor, data)
        if isinstance(predictor.model, VisionTransformer)
        else classify_texts(predictor, data)
    )
    strange = sorted(set(labels) - set(known))
    if strange:
        raise ClassifyError(
            f"{data}: its labels must be the model's ({', '.join(known[:8])}{' ...' if len(known) > 8 else ''}), but "
            f"`{strange[0]}` is not among them; is it another set?"
        )
    return labels, found


def classify_images(predictor: Predictor, data: Path) -> tuple[list[str], list[Classification]]:
    """Of the test part of a set of images, else of the only part."""
    import tempfile

    import numpy as np
    import torch

    from attent.data import images
    from attent.models import VisionTransformer

    assert isinstance(predictor.model, VisionTransformer)
    parts = images.find_splits(data)
    part = parts.get("test") or parts.get("valid") or parts["train"]
    shape = images.ImageShape.from_config(predictor.model.config)
    found: list[Classification] = []
    with tempfile.TemporaryDirectory() as folder:
        of = images.prepare_images(part, shape, folder)
        if told := images.describe_skipped(of):
            print_message(told)
        print_message(f"{len(of):,} images of {of.name}")
        for start in range(0, len(of), BLOCK_TEXTS):
            pixels, _ = of.take(np.arange(start, min(start + BLOCK_TEXTS, len(of))))
            found += predictor.classify(list(torch.from_numpy(pixels)))
        return [of.class_names[label] for label in of.item_labels.tolist()], found


def classify_texts(predictor: Predictor, data: Path) -> tuple[list[str], list[Classification]]:
    """Of the texts of a table."""
    from attent.data import labeled_text

    path = data.expanduser()
    if not path.is_file():
        raise ClassifyError(f"{data}: must be a file of texts with labels (.tsv, .jsonl), but is none; check its name")
    of = labeled_text.read_labeled_texts([path])
    if of.skipped:
        print_message(f"left out of {data}: " + ", ".join(f"{count:,} {why}" for why, count in of.skipped.items()))
    return list(of.labels), predictor.classify(list(of.texts))


def print_report(labels: list[str], predictions: list[Classification], flags: ClassifyFlags) -> None:
    """How often the model is right, and what it takes for what."""
    from attent.training.tasks.text_classification import wilson_interval

    right = sum(one.label == label for label, one in zip(labels, predictions, strict=True))
    low, high = wilson_interval(right / len(labels), len(labels))
    wrong = count_confusions(labels, predictions)
    if flags.json:
        facts = {
            "count": len(labels),
            "right": right,
            "accuracy": right / len(labels),
            "interval": [low, high],
        }
        facts["confused"] = [{"label": a, "taken_for": b, "times": n} for (a, b), n in wrong]
        print(json_module.dumps(facts, ensure_ascii=False))
        return
    print(f"accuracy {right / len(labels):.2%} of {len(labels):,} (95% interval {low:.2%} to {high:.2%})")
    for (label, taken), times in wrong[:MAX_LISTED_CONFUSIONS]:
        print(f"  {label} taken for {taken}: {times:,} times", file=sys.stderr)


def count_confusions(labels: Sequence[str], predictions: Sequence[Classification]) -> list[tuple[tuple[str, str], int]]:
    from collections import Counter

    counts = Counter((label, one.label) for label, one in zip(labels, predictions, strict=True) if label != one.label)
    return counts.most_common()
