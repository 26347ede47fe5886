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

from attent.cli.reading_text import AT_ONCE, OUTPUT, ReadFlags, blocks_of, check_flags, reader_of, say, write

if TYPE_CHECKING:
    from attent.decode.reader import Classified, Reader

WORST = 3  # labels that are most often taken for another, told of a labelled set


class ClassifyError(ValueError):
    """What cannot be classified as it was asked for, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Flags(ReadFlags):
    """What may be asked for; each field is a flag of the command."""

    data: Annotated[
        Path | None,
        Parameter(help="a labelled set to be tested on: a .tsv or .jsonl of texts, or a folder of images per class"),
    ] = None
    pairs: Annotated[
        bool, Parameter(negative="", help="each line is two texts with a tab between them, for a model of pairs")
    ] = False
    top: Annotated[
        int, Parameter(name=["--top", "-n"], group=OUTPUT, help="labels of each, the likeliest first, by default 1")
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
    flags: Annotated[Flags, Parameter(name="*", show_default=False)] = Flags(),  # noqa: B008 - frozen
) -> None:
    """Say which label each text or image gets: the text, the label, how likely it is.

    attent classify runs/sst2 "A film to remember."
    """
    check_usage(items, flags)
    reader = reader_of(model, flags)
    if flags.data is not None:
        report(*tested(reader, flags.data), flags)
        return
    for block in blocks_for(reader, items):
        asked = [pair_of(text) for text in block] if flags.pairs else list(block)
        for text, found in zip(block, reader.classify(asked), strict=True):
            write(line(text, found, flags))


def check_usage(items: Sequence[str] | None, flags: Flags) -> None:
    check_flags(flags, "classify", flags.top)
    if flags.data is not None and items:
        raise CycloptsError(msg="--data is a set of its own: leave the texts out", command_chain=("classify",))
    if flags.data is not None and flags.pairs:
        problem = "--pairs is for lines that are read as they are: with --data leave it out, a set has one text a label"
        raise CycloptsError(msg=problem, command_chain=("classify",))


def blocks_for(reader: Reader, items: Sequence[str] | None) -> Iterator[list[str]]:
    """Texts; or the names of images, which standard input may give, too."""
    from attent.models import Vision

    if isinstance(reader.model, Vision) and items:
        return iter([list(items)])
    return (block.texts for block in blocks_of(items or []))


def pair_of(text: str) -> tuple[str, str]:
    first, tab, second = text.partition("\t")
    if not tab:
        raise ClassifyError(f"with --pairs a line must be two texts with a tab between them, but one is {text[:60]!r}")
    return first, second


def line(text: str, found: Classified, flags: Flags) -> str:
    from attent.cli.output import one_line

    best = list(found.probabilities.items())
    if flags.json:
        facts: dict[str, Any] = {"text": text, "label": found.label, "probability": round(found.probability, 6)}
        facts["labels"] = {label: round(chance, 6) for label, chance in best}
        return json_module.dumps(facts, ensure_ascii=False)
    shown = [cell for label, chance in best[: flags.top] for cell in (label, f"{chance:.4f}")]
    return "\t".join(map(one_line, [text, *shown]))


# --- a labelled set --------------------------------------------------------------------------------------------------


def tested(reader: Reader, data: Path) -> tuple[list[str], list[Classified]]:
    """The labels that a set has, and what the model says."""
    from attent.models import Vision

    known = reader.labels()  # a model that has none is told of before anything is read
    labels, found = images_of(reader, data) if isinstance(reader.model, Vision) else texts_of(reader, data)
    strange = sorted(set(labels) - set(known))
    if strange:
        raise ClassifyError(
            f"{data}: its labels must be the model's ({', '.join(known[:8])}{' ...' if len(known) > 8 else ''}), but "
            f"`{strange[0]}` is not among them; is it another set?"
        )
    return labels, found


def images_of(reader: Reader, data: Path) -> tuple[list[str], list[Classified]]:
    """Of the test part of a set of images, else of the only part."""
    import tempfile

    import numpy as np
    import torch

    from attent.data import images
    from attent.models import Vision

    assert isinstance(reader.model, Vision)
    parts = images.find(data)
    part = parts.get("test") or parts.get("valid") or parts["train"]
    shape = images.Shape.of(reader.model.config)
    found: list[Classified] = []
    with tempfile.TemporaryDirectory() as folder:
        of = images.prepare(part, shape, folder)
        if told := images.told_left_out(of):
            say(told)
        say(f"{len(of):,} images of {of.name}")
        for start in range(0, len(of), AT_ONCE):
            pixels, _ = of.take(np.arange(start, min(start + AT_ONCE, len(of))))
            found += reader.classify(list(torch.from_numpy(pixels)))
        return [of.names[label] for label in of.shown.tolist()], found


def texts_of(reader: Reader, data: Path) -> tuple[list[str], list[Classified]]:
    """Of the texts of a table."""
    from attent.data import labels

    path = data.expanduser()
    if not path.is_file():
        raise ClassifyError(f"{data}: must be a file of texts with labels (.tsv, .jsonl), but is none; check its name")
    of = labels.read([path])
    if of.left_out:
        say(f"left out of {data}: " + ", ".join(f"{count:,} {why}" for why, count in of.left_out.items()))
    return list(of.labels), reader.classify(list(of.texts))


def report(labels: list[str], found: list[Classified], flags: Flags) -> None:
    """How often the model is right, and what it takes for what."""
    from attent.train.labelled import interval

    right = sum(one.label == label for label, one in zip(labels, found, strict=True))
    low, high = interval(right / len(labels), len(labels))
    wrong = confused(labels, found)
    if flags.json:
        facts = {"count": len(labels), "right": right, "accuracy": right / len(labels), "interval": [low, high]}
        facts["confused"] = [{"label": a, "taken_for": b, "times": n} for (a, b), n in wrong]
        print(json_module.dumps(facts, ensure_ascii=False))
        return
    print(f"accuracy {right / len(labels):.2%} of {len(labels):,} (95% interval {low:.2%} to {high:.2%})")
    for (label, taken), times in wrong[:WORST]:
        print(f"  {label} taken for {taken}: {times:,} times", file=sys.stderr)


def confused(labels: Sequence[str], found: Sequence[Classified]) -> list[tuple[tuple[str, str], int]]:
    from collections import Counter

    counts = Counter((label, one.label) for label, one in zip(labels, found, strict=True) if label != one.label)
    return counts.most_common()
