"""Training data for summaries from scratch: text for span corruption, pairs that teach copying, and SciTLDR itself.

    python -m benchmarks.summary_data scitldr europarl.en.xz OUT [--lines 20000]

    OUT/text/train.txt, valid.txt   Europarl, six sentences a line, and the abstracts five times; the dev abstracts
    OUT/copy/europarl.tsv           up to eight sentences of Europarl, and the only one of them with the word "we"
    OUT/copy/abstracts.tsv          an abstract, and its sentence with the most words of the summary
    OUT/copy/valid.tsv              the same of the dev set
    OUT/pairs/train.tsv, valid.tsv  abstracts and summaries; OUT/test.tsv: the test set, apart so that no run scores it

A decoder trained on 2,000 pairs does not learn to copy names and terms; these pairs make it copy whole sentences. Most
summaries are close to a sentence of the abstract with "we" in it ("We propose ..."), hence the choice in Europarl.
"""

from __future__ import annotations

import argparse
import lzma
import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from attent.text.sentence_splitter import split_sentences

SENTENCES_PER_LINE, MAX_SENTENCES = 6, 8
ABSTRACT_COPIES = 5  # in the text: they are 3% of it
WE = re.compile(r"\bwe\b", re.IGNORECASE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scitldr", type=Path, nargs="?")
    parser.add_argument("europarl", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--lines", type=int, help="of Europarl [default: all]")
    args = parser.parse_args()
    if args.out is None:
        parser.print_usage()
        return
    pairs = {part: list(read_pairs(args.scitldr, part)) for part in ("train", "dev", "test")}
    sentences = list(islice(read_lines(args.europarl), args.lines))
    abstracts = [abstract for abstract, _ in pairs["train"]] * ABSTRACT_COPIES
    groups = [" ".join(sentences[i : i + SENTENCES_PER_LINE]) for i in range(0, len(sentences), SENTENCES_PER_LINE)]
    write_lines(args.out / "text/train.txt", groups + abstracts)
    write_lines(args.out / "text/valid.txt", [abstract for abstract, _ in pairs["dev"]])
    write_pairs(args.out / "copy/europarl.tsv", list(draw_copy_pairs(sentences)))
    write_pairs(args.out / "copy/abstracts.tsv", [(a, find_nearest_sentence(a, s)) for a, s in pairs["train"]])
    write_pairs(args.out / "copy/valid.tsv", [(a, find_nearest_sentence(a, s)) for a, s in pairs["dev"]])
    write_pairs(args.out / "pairs/train.tsv", pairs["train"])
    write_pairs(args.out / "pairs/valid.tsv", pairs["dev"])
    write_pairs(args.out / "test.tsv", pairs["test"])


def read_lines(path: Path) -> Iterator[str]:
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
        yield from (" ".join(line.split()) for line in file)


def read_pairs(folder: Path, part: str) -> Iterator[tuple[str, str]]:
    sides = (read_lines(folder / f"{part}.{side}.xz") for side in ("src", "tgt"))
    return ((source, target) for source, target in zip(*sides, strict=True) if source and target)


def draw_copy_pairs(sentences: list[str]) -> Iterator[tuple[str, str]]:
    """Yield texts of one to eight sentences, and the only one with "we"."""
    rng = random.Random(1)
    with_we = [sentence for sentence in sentences if WE.search(sentence)]
    others = iter([sentence for sentence in sentences if not WE.search(sentence)])
    for sentence in with_we:
        group = list(islice(others, rng.randrange(MAX_SENTENCES)))
        group.insert(rng.randint(0, len(group)), sentence)
        yield " ".join(group), sentence


def find_nearest_sentence(abstract: str, summary: str) -> str:
    """Return the sentence with the highest F1 of words, compared with the summary."""
    words = Counter(summary.lower().split())

    def score(sentence: str) -> float:
        own = Counter(sentence.lower().split())
        return 2 * (own & words).total() / (own.total() + words.total())

    return max((part.text for part in split_sentences(abstract, "en")), key=score)


def write_lines(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{path}: {len(lines):,} lines")


def write_pairs(path: Path, pairs: list[tuple[str, str]]) -> None:
    write_lines(path, ["\t".join(pair) for pair in pairs])


if __name__ == "__main__":
    main()
