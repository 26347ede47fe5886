"""`attent fill`: the likeliest words behind the masks of a text. What is done with it is `attent.decode.reader`'s."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from attent.cli.reading_text import OUTPUT, TEXTS, Block, ReadFlags, blocks_of, check_flags, reader_of, say, write

if TYPE_CHECKING:
    from attent.decode.reader import Filled, Reader


@dataclass(frozen=True, kw_only=True)
class Flags(ReadFlags):
    """What may be asked for; each field is a flag of the command."""

    top: Annotated[
        int, Parameter(name=["--top", "-n"], group=OUTPUT, help="words for each mask; 1: print the filled texts alone")
    ] = 5


def fill(
    model: Annotated[
        Path, Parameter(help="a folder of `attent train --task mlm` or `spans`, or a BERT or T5 of Hugging Face's")
    ],
    texts: Annotated[list[str] | None, Parameter(help=TEXTS, negative_iterable="")] = None,
    /,
    *,
    flags: Annotated[Flags, Parameter(name="*", show_default=False)] = Flags(),  # noqa: B008 - frozen
) -> None:
    """Say which word may stand behind each mask of a text.

    attent fill runs/mlm "The [MASK] sat on the mat."
    """
    check_flags(flags, "fill", flags.top)
    reader = reader_of(model, flags)
    whole = 0
    for block in blocks_of(texts or []):
        for found in filled(reader, block, flags.top):
            whole += not found.masks
            write(as_json(found) if flags.json else as_text(found, flags.top))
    if whole:
        say(f"without a mask, and printed as read: {whole:,} line{'s' * (whole != 1)}")


def filled(reader: Reader, block: Block, top: int) -> Iterator[Filled]:
    """In their order; a line of a file that has no mask stays as it is, while a text that was typed must have one."""
    from attent.decode.reader import Filled

    numbered = list(enumerate(block.texts, block.first))
    chosen = numbered if block.typed else [(number, text) for number, text in numbered if reader.has_mask(text)]
    found = iter(reader.fill([text for _, text in chosen], top, [number for number, _ in chosen]))
    numbers = {number for number, _ in chosen}
    for number, text in numbered:
        yield next(found) if number in numbers else Filled(source=text, text=text, masks=())


def as_json(found: Filled) -> str:
    masks = [[asdict(guess) for guess in guesses] for guesses in found.masks]
    return json.dumps({"source": found.source, "text": found.text, "masks": masks}, ensure_ascii=False)


def as_text(found: Filled, top: int) -> str:
    """The filled text; or a line for each guess, with how likely it is, mask after mask."""
    from attent.cli.output import one_line

    if top == 1 or not found.masks:
        return one_line(found.text)
    lines = []
    for number, guesses in enumerate(found.masks, 1):
        before = f"{number}\t" if len(found.masks) > 1 else ""
        lines += [
            f"{before}{guess.probability:.4f}\t{one_line(guess.word)}\t{one_line(guess.text)}" for guess in guesses
        ]
    return "\n".join(lines)
