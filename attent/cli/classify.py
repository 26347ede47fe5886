"""`attent classify`: labels of texts or images with probabilities."""

import json as json_module
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from attent.cli import shared
from attent.cli.shared import TextInputFlags, check_positive, flag
from attent.decoding.output_format import replace_line_breaks

if TYPE_CHECKING:
    from attent.decoding.predictor import Classification

ITEMS_HELP = "texts, or files with one text per line, by default standard input; for an image model, image files"


@dataclass(frozen=True, kw_only=True)
class ClassifyFlags(TextInputFlags):
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
    check_positive("classify", threads=flags.threads, top=flags.top)
    predictor = shared.load_predictor(model, flags)
    predictor.require_labels()  # fails before anything is read
    for texts in shared.read_inputs(predictor, items):
        for text, prediction in zip(texts, predictor.classify(texts), strict=True):
            shared.print_result(format_line(text, prediction, flags))


def format_line(text: str, prediction: "Classification", flags: ClassifyFlags) -> str:
    probabilities = list(prediction.probabilities.items())
    if flags.json:
        labels = {label: round(probability, 6) for label, probability in probabilities}
        best: dict[str, Any] = {"label": prediction.label, "probability": round(prediction.probability, 6)}
        return json_module.dumps({"text": text, **best, "labels": labels}, ensure_ascii=False)
    cells = [cell for label, p in probabilities[: flags.top] for cell in (label, f"{p:.4f}")]
    return "\t".join(map(replace_line_breaks, [text, *cells]))
