"""`attent classify`: labels of texts or images with probabilities, and the accuracy on a labelled set."""

from __future__ import annotations

import json as json_module
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import CycloptsError, Parameter

from attent.cli import input_texts
from attent.cli.input_texts import TextInputFlags
from attent.cli.line_progress import print_message
from attent.cli.search_flags import check_positive, flag

if TYPE_CHECKING:
    from attent.decoding.predictor import Classification, Predictor

MAX_LISTED_CONFUSIONS = 3
ITEMS_HELP = "texts, or files with one text per line, by default standard input; for an image model, image files"
DATA_HELP = "labelled test set: a .tsv or .jsonl of texts, or a folder of images per class"


@dataclass(frozen=True, kw_only=True)
class ClassifyFlags(TextInputFlags):
    data: Annotated[Path | None, Parameter(help=DATA_HELP)] = None
    top: Annotated[int, flag("Output", "labels to print, most likely first; by default 1", "--top", "-n")] = 1


def classify(
    model: Annotated[
        Path, Parameter(help="a folder of `attent train --task classify` or `--task images`, or a Hugging Face one")
    ],
    /,
    *items: Annotated[str, Parameter(help=ITEMS_HELP)],
    flags: Annotated[ClassifyFlags, Parameter(name="*", show_default=False)] = ClassifyFlags(),
) -> None:
    """Classify texts or images: prints the text, its label and the probability.

    attent classify runs/sst2 "A film to remember."
    """
    check_positive("classify", threads=flags.threads, batch_tokens=flags.batch_tokens, top=flags.top)
    if flags.data is not None and items:
        raise CycloptsError(msg="--data names a test set: leave the texts out", command_chain=("classify",))
    predictor = input_texts.load_predictor(model, flags)
    predictor.require_labels()  # fails before anything is read
    if flags.data is not None:
        print_report(*classify_labelled_set(predictor, flags.data), flags)
        return
    for texts in input_texts.read_inputs(predictor, items):
        for text, prediction in zip(texts, predictor.classify(texts), strict=True):
            input_texts.print_result(format_line(text, prediction, flags))


def format_line(text: str, prediction: Classification, flags: ClassifyFlags) -> str:
    from attent.decoding.output_format import replace_line_breaks

    probabilities = list(prediction.probabilities.items())
    if flags.json:
        labels = {label: round(probability, 6) for label, probability in probabilities}
        best: dict[str, Any] = {"label": prediction.label, "probability": round(prediction.probability, 6)}
        return json_module.dumps({"text": text, **best, "labels": labels}, ensure_ascii=False)
    cells = [cell for label, p in probabilities[: flags.top] for cell in (label, f"{p:.4f}")]
    return "\t".join(map(replace_line_breaks, [text, *cells]))


def classify_labelled_set(predictor: Predictor, data: Path) -> tuple[list[str], list[Classification]]:
    """Return the labels of a test set, and the predictions."""
    known = predictor.require_labels()
    classify_set = classify_images if input_texts.reads_images(predictor) else classify_texts
    labels, predictions = classify_set(predictor, data)
    unknown = sorted(set(labels) - set(known))
    if unknown:
        shown = ", ".join(known[:8]) + (" ..." if len(known) > 8 else "")
        raise ValueError(f"{data}: its labels must be the model's ({shown}), but `{unknown[0]}` is not")
    return labels, predictions


def classify_images(predictor: Predictor, data: Path) -> tuple[list[str], list[Classification]]:
    """Classify the test split of an image set, or its only split."""
    import tempfile

    import numpy as np
    import torch

    from attent.data import images
    from attent.data.media_store import describe_skipped
    from attent.models import VisionTransformer

    assert isinstance(predictor.model, VisionTransformer)
    splits = images.find_splits(data)
    split = splits.get("test") or splits.get("valid") or splits["train"]
    shape = images.ImageShape.from_config(predictor.model.config)
    predictions: list[Classification] = []
    with tempfile.TemporaryDirectory() as folder:
        prepared = images.prepare_images(split, shape, folder)
        if skipped := describe_skipped(prepared.name, prepared.skipped):
            print_message(skipped)
        print_message(f"{len(prepared):,} images of {prepared.name}")
        for start in range(0, len(prepared), input_texts.BLOCK_TEXTS):
            pixels, _ = prepared.take(np.arange(start, min(start + input_texts.BLOCK_TEXTS, len(prepared))))
            predictions += predictor.classify(list(torch.from_numpy(pixels)))
        return [prepared.class_names[label] for label in prepared.item_labels.tolist()], predictions


def classify_texts(predictor: Predictor, data: Path) -> tuple[list[str], list[Classification]]:
    from attent.data import labeled_text

    path = data.expanduser()
    if not path.is_file():
        raise ValueError(f"{data}: must be a file of labelled texts (.tsv, .jsonl), but is none; check its name")
    examples = labeled_text.read_labeled_texts([path])
    if examples.skipped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in examples.skipped.items())
        print_message(f"skipped in {data}: {reasons}")
    return list(examples.labels), predictor.classify(list(examples.texts))


def print_report(labels: list[str], predictions: list[Classification], flags: ClassifyFlags) -> None:
    """Print the accuracy with its confidence interval, and the most frequent confusions."""
    from attent.training.tasks.text_classification import compute_wilson_interval

    pairs = [(label, prediction.label) for label, prediction in zip(labels, predictions, strict=True)]
    correct = sum(label == predicted for label, predicted in pairs)
    accuracy = correct / len(labels)
    low, high = compute_wilson_interval(accuracy, len(labels))
    confusions = Counter(pair for pair in pairs if pair[0] != pair[1]).most_common()
    if flags.json:
        report = {"count": len(labels), "correct": correct, "accuracy": accuracy, "interval": [low, high]}
        report["confusions"] = [{"label": a, "predicted": b, "count": n} for (a, b), n in confusions]
        print(json_module.dumps(report, ensure_ascii=False))
        return
    print(f"accuracy {accuracy:.2%} of {len(labels):,} (95% interval {low:.2%} to {high:.2%})")
    for (label, predicted), count in confusions[:MAX_LISTED_CONFUSIONS]:
        print(f"  {label} predicted as {predicted}: {count:,} times", file=sys.stderr)
