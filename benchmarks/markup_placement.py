"""Placement of tags: tag spans of sources with gold alignments, project them, and compare with the gold projection.

    python -m benchmarks.markup_placement MODEL --source test.de --target test.en --gold de-en.wa [--max-words 4]

Every span of up to `--max-words` words that has a gold link is tagged on its own. "Exactly" is the share whose tags are
where projection along the gold links puts them; "contiguous" counts only spans whose gold projection encloses no word
that is aligned elsewhere. The share placed in proportion to the length, without an alignment, is the baseline.
`--translate` also gives the sources with their tags to the model, as it was trained with `--augment tags` or not, and
counts the translations that keep both, in order.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import attent
from attent.data.formats.placeholders import find_problem
from attent.data.formats.units import InlineCode, InlineContent
from attent.data.pretranslate import format_for_model, number_codes, restore_codes
from attent.decoding.alignment import Links, align_rows, load_selection
from attent.decoding.forced_decoding import encode_pairs
from attent.decoding.markup import project_codes, select_links
from attent.formatting import markdown_table
from attent.models import Seq2Seq
from attent.scoring.alignment import drop_out_of_range, read_gold_alignments

TRANSLATED_SPANS = 500


class Placement(NamedTuple):
    """How the tags of one span were placed."""

    is_exact: bool  # by the model's alignment
    is_proportional_exact: bool  # without an alignment
    is_contiguous: bool  # in the gold projection
    is_certain: bool  # by the model's alignment


def tag_span(text: str, first: int, stop: int) -> InlineContent:
    """Return a text with a pair of tags around its words from `first` to before `stop`."""
    words = text.split()
    opening, closing = InlineCode("", "<b>", "open", "1"), InlineCode("", "</b>", "close", "1")
    before, inside, after = (" ".join(words[slice(*ends)]) for ends in ((0, first), (first, stop), (stop, None)))
    return tuple(part for part in (before and f"{before} ", opening, inside, closing, after and f" {after}") if part)


def place_spans(source: str, target: str, gold: Links, links: Links, max_words: int) -> list[Placement]:
    """Place the tags of each span of a sentence pair."""
    placements, count = list[Placement](), len(source.split())
    aligned = {word for word, _ in gold}
    for first in range(count):
        for stop in range(first + 1, min(first + max_words, count) + 1):
            if aligned.isdisjoint(range(first, stop)):
                continue
            content = tag_span(source, first, stop)
            expected, projected, unaligned = (project_codes(content, target, each) for each in (gold, links, ()))
            placement = Placement(
                is_exact=projected.candidates[0] == expected.candidates[0],
                is_proportional_exact=unaligned.candidates[0] == expected.candidates[0],
                is_contiguous=expected.is_certain,
                is_certain=projected.is_certain,
            )
            placements.append(placement)
    return placements


def summarize(placements: Sequence[Placement]) -> str:
    """Return a table of shares in percent."""
    groups = {
        "all spans": placements,
        "contiguous": [each for each in placements if each.is_contiguous],
        "contiguous, certain": [each for each in placements if each.is_contiguous and each.is_certain],
        "certain": [each for each in placements if each.is_certain],
        "for review": [each for each in placements if not each.is_certain],
    }
    rows = [
        [name, f"{len(group):,}", *(f"{100 * fmean(each[i] for each in group):.1f}" if group else "-" for i in (0, 1))]
        for name, group in groups.items()
    ]
    return markdown_table(["spans", "number", "exactly", "in proportion"], rows)


def count_copied_tags(translator: attent.Translator, contents: Sequence[InlineContent]) -> int:
    """Return how many translations of texts with tags have both tags, in order."""
    numbered = [number_codes(content) for content in contents]
    translations = translator([format_for_model(content) for content in numbered])
    restored = [
        restore_codes((item.text,), content, spaced=True) for item, content in zip(translations, numbered, strict=True)
    ]
    return sum(not find_problem(content, target) for content, target in zip(numbered, restored, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name in ("source", "target", "gold"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--max-words", type=int, default=4)
    parser.add_argument("--translate", action="store_true")
    flags = parser.parse_args(arguments)
    sources, targets = (path.read_text(encoding="utf-8").splitlines() for path in (flags.source, flags.target))
    gold, _ = drop_out_of_range(read_gold_alignments(flags.gold), sources, targets)
    translator = attent.Translator.load(flags.model)
    model = translator.model
    assert isinstance(model, Seq2Seq), "an ensemble has no alignment heads of its own"
    rows = encode_pairs(model, translator.tokenizer, sources, targets)
    selection = load_selection(translator.folder, model)
    alignments = align_rows(model, translator.tokenizer, sources, targets, rows, selection)
    placements = [
        placement
        for source, target, links, alignment in zip(sources, targets, gold, alignments, strict=True)
        for placement in place_spans(
            source, target, tuple(sorted(links.sure)), select_links(alignment, source, target), flags.max_words
        )
    ]
    sys.stdout.write(f"{selection}, {len(sources)} sentences\n\n{summarize(placements)}\n")
    if flags.translate:
        rng, contents = random.Random(1), list[InlineContent]()
        for source in rng.choices(sources, k=TRANSLATED_SPANS):
            first = rng.randrange(len(source.split()))
            contents.append(tag_span(source, first, first + rng.randint(1, flags.max_words)))
        copied = count_copied_tags(translator, contents)
        sys.stdout.write(f"\nof {len(contents)} sources with tags the model keeps both in {copied}\n")


if __name__ == "__main__":
    main()
