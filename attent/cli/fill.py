"""`attent fill`: the most likely words for the masks of a text."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from attent.cli import shared
from attent.cli.shared import TextInputFlags, check_positive, flag, print_message
from attent.decoding.output_format import replace_line_breaks

if TYPE_CHECKING:
    from attent.decoding.predictor import FilledText, Predictor


@dataclass(frozen=True, kw_only=True)
class FillFlags(TextInputFlags):
    top: Annotated[int, flag("Output", "words per mask; 1: print only the filled text", "--top", "-n")] = 5


def fill(
    model: Annotated[Path, Parameter(help="a folder of `attent train --task mlm`, or Hugging Face's BERT")],
    /,
    *texts: Annotated[str, Parameter(help=shared.TEXTS_HELP)],
    flags: Annotated[FillFlags, Parameter(name="*", show_default=False)] = FillFlags(),
) -> None:
    """Fill in the masks of a text.

    attent fill runs/mlm "The [MASK] sat on the mat."
    """
    check_positive("fill", threads=flags.threads, top=flags.top)
    predictor = shared.load_predictor(model, flags)
    without_mask = 0
    for block in shared.read_text_blocks(texts):
        for filled in fill_block(predictor, block, flags.top):
            without_mask += not filled.masks
            as_json = json.dumps(asdict(filled), ensure_ascii=False) if flags.json else None
            shared.print_result(as_json or format_text(filled, flags.top))
    if without_mask:
        print_message(f"{without_mask:,} line{'s' * (without_mask != 1)} without a mask, printed unchanged")


def fill_block(predictor: "Predictor", block: shared.TextBlock, top: int) -> "Iterator[FilledText]":
    """Fill texts in order. A line of a file may lack a mask and stays unchanged; a text on the command line may not."""
    from attent.decoding.predictor import FilledText

    numbered = dict(enumerate(block.texts, block.first_number))
    masked = {n: text for n, text in numbered.items() if block.is_from_command or predictor.parse_masks(text).mask_ids}
    filled = iter(predictor.fill(list(masked.values()), top, list(masked)))
    for number, text in numbered.items():
        yield next(filled) if number in masked else FilledText(source=text, text=text, masks=())


def format_text(filled: "FilledText", top: int) -> str:
    if top == 1 or not filled.masks:
        return replace_line_breaks(filled.text)
    rows = [
        [*([str(number)] if len(filled.masks) > 1 else []), f"{item.probability:.4f}", item.word, item.text]
        for number, predictions in enumerate(filled.masks, 1)
        for item in predictions
    ]
    return "\n".join("\t".join(map(replace_line_breaks, row)) for row in rows)
