"""`attent fill`: the most likely words for the masks of a text."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from attent.cli import input_texts
from attent.cli.input_texts import TextInputFlags
from attent.cli.line_progress import print_message
from attent.cli.search_flags import check_positive, flag

if TYPE_CHECKING:
    from attent.decoding.predictor import FilledText, Predictor


@dataclass(frozen=True, kw_only=True)
class FillFlags(TextInputFlags):
    top: Annotated[int, flag("Output", "words per mask; 1: print only the filled text", "--top", "-n")] = 5


def fill(
    model: Annotated[Path, Parameter(help="a folder of `attent train --task mlm`, or Hugging Face's BERT")],
    /,
    *texts: Annotated[str, Parameter(help=input_texts.TEXTS_HELP)],
    flags: Annotated[FillFlags, Parameter(name="*", show_default=False)] = FillFlags(),
) -> None:
    """Fill in the masks of a text.

    attent fill runs/mlm "The [MASK] sat on the mat."
    """
    check_positive("fill", threads=flags.threads, batch_tokens=flags.batch_tokens, top=flags.top)
    predictor = input_texts.load_predictor(model, flags)
    without_mask = 0
    for block in input_texts.read_text_blocks(texts):
        for filled in fill_block(predictor, block, flags.top):
            without_mask += not filled.masks
            as_json = json.dumps(asdict(filled), ensure_ascii=False) if flags.json else None
            input_texts.print_result(as_json or format_text(filled, flags.top))
    if without_mask:
        print_message(f"{without_mask:,} line{'s' * (without_mask != 1)} without a mask, printed unchanged")


def fill_block(predictor: "Predictor", block: input_texts.TextBlock, top: int) -> "Iterator[FilledText]":
    """Fill texts in order. A line of a file may lack a mask and stays unchanged; a text on the command line may not."""
    from attent.decoding.predictor import FilledText

    numbered = dict(enumerate(block.texts, block.first_number))
    masked = {n: text for n, text in numbered.items() if block.is_from_command or predictor.has_mask(text)}
    filled = iter(predictor.fill(list(masked.values()), top, list(masked)))
    for number, text in numbered.items():
        yield next(filled) if number in masked else FilledText(source=text, text=text, masks=())


def format_text(filled: "FilledText", top: int) -> str:
    from attent.decoding.output_format import replace_line_breaks

    if top == 1 or not filled.masks:
        return replace_line_breaks(filled.text)
    rows = [
        [*([str(number)] if len(filled.masks) > 1 else []), f"{item.probability:.4f}", item.word, item.text]
        for number, predictions in enumerate(filled.masks, 1)
        for item in predictions
    ]
    return "\n".join("\t".join(map(replace_line_breaks, row)) for row in rows)
