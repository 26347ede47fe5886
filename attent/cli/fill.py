"""`attent fill`: the likeliest words behind the masks of a text. What is done with it is `attent.decode.reader`'s."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from attent.cli.input_texts import (
    OUTPUT_GROUP,
    TEXTS_HELP,
    TextBlock,
    TextInputFlags,
    check_flags,
    load_predictor,
    print_message,
    print_result,
    read_text_blocks,
)

if TYPE_CHECKING:
    from attent.decoding.encoder_inference import FilledText, Predictor


@dataclass(frozen=True, kw_only=True)
class FillFlags(TextInputFlags):
    """What may be asked for; each field is a flag of the command."""

    top: Annotated[
        int,
        Parameter(
            name=["--top", "-n"], group=OUTPUT_GROUP, help="words for each mask; 1: print the filled texts alone"
        ),
    ] = 5


def fill(
    model: Annotated[
        Path, Parameter(help="a folder of `attent train --task mlm` or `spans`, or a BERT or T5 of Hugging Face's")
    ],
    texts: Annotated[list[str] | None, Parameter(help=TEXTS_HELP, negative_iterable="")] = None,
    /,
    *,
    flags: Annotated[FillFlags, Parameter(name="*", show_default=False)] = FillFlags(),  # noqa: B008 - frozen
) -> None:
    """Say which word may stand behind each mask of a text.

    attent fill runs/mlm "The [MASK] sat on the mat."
    """
    check_flags(flags, "fill", flags.top)
    reader = load_predictor(model, flags)
    whole = 0
    for block in read_text_blocks(texts or []):
        for found in fill_block(reader, block, flags.top):
            whole += not found.masks
            print_result(format_json(found) if flags.json else format_text(found, flags.top))
    if whole:
        print_message(f"without a mask, and printed as read: {whole:,} line{'s' * (whole != 1)}")


def fill_block(predictor: Predictor, block: TextBlock, top: int) -> Iterator[FilledText]:
    """In their order; a line of a file that has no mask stays as it is, while a text that was typed must have one."""
    from attent.decoding.encoder_inference import FilledText

    numbered = list(enumerate(block.texts, block.first_number))
    chosen = (
        numbered if block.is_from_command else [(number, text) for number, text in numbered if predictor.has_mask(text)]
    )
    found = iter(predictor.fill([text for _, text in chosen], top, [number for number, _ in chosen]))
    numbers = {number for number, _ in chosen}
    for number, text in numbered:
        yield next(found) if number in numbers else FilledText(source=text, text=text, masks=())


def format_json(filled: FilledText) -> str:
    masks = [[asdict(guess) for guess in guesses] for guesses in filled.masks]
    return json.dumps({"source": filled.source, "text": filled.text, "masks": masks}, ensure_ascii=False)


def format_text(filled: FilledText, top: int) -> str:
    """The filled text; or a line for each guess, with how likely it is, mask after mask."""
    from attent.decoding.output_format import replace_line_breaks

    if top == 1 or not filled.masks:
        return replace_line_breaks(filled.text)
    lines = []
    for number, guesses in enumerate(filled.masks, 1):
        before = f"{number}\t" if len(filled.masks) > 1 else ""
        lines += [
            f"{before}{guess.probability:.4f}\t{replace_line_breaks(guess.word)}\t{replace_line_breaks(guess.text)}"
            for guess in guesses
        ]
    return "\n".join(lines)
