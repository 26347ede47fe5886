"""BLEU and chrF of translations by sacreBLEU, with the signatures by which others can repeat them, and how many are
exactly right. Translating is left to `decode`.

BLEU counts words. A script without spaces has none to count, so that there it counts characters, in the way that
published figures do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from attent.data import scripts

SAMPLE = 1_000  # references that tell the script where the language does not


@dataclass(frozen=True, kw_only=True)
class Scores:
    """All from 0 to 100, more is better."""

    bleu: float
    chrf: float
    exact: float  # percent of outputs that equal their reference, spaces at the ends aside
    bleu_signature: str
    chrf_signature: str


def scores(outputs: Sequence[str], references: Sequence[str], language: str | None = None) -> Scores:
    """Outputs against one reference each; `language` is the one that they are in, None: as the references look."""
    if len(outputs) != len(references):
        counts = f"{len(references)} references and {len(outputs)} outputs"
        raise ValueError(f"there must be a reference for each output, but there are {counts}; give both in one order")
    if not outputs:
        raise ValueError("there must be at least one output to score, but there is none; give a test set with pairs")
    from sacrebleu.metrics.bleu import BLEU  # here, since it takes a third of a second
    from sacrebleu.metrics.chrf import CHRF

    # `force` keeps it from warning that a text looks tokenised: the signature is the same.
    bleu, chrf = BLEU(tokenize=tokenizer_of(language, references), force=True), CHRF()
    right = sum(output.strip() == reference.strip() for output, reference in zip(outputs, references, strict=True))
    return Scores(
        bleu=bleu.corpus_score(outputs, [references]).score,
        chrf=chrf.corpus_score(outputs, [references]).score,
        exact=100 * right / len(outputs),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )


def tokenizer_of(language: str | None, references: Sequence[str] = ()) -> str:
    """sacreBLEU's name for the way to find words: `13a` is that of the published figures of most languages.

    Japanese by characters, since its words would need MeCab. Korean too: it has spaces, but a word between them holds
    its particles as well, and one wrong particle would count as a wrong word.
    """
    written = scripts.of_language(language) or scripts.of_texts(islice(references, SAMPLE)) or frozenset()
    if "Hani" in written and not written & {"Kana", "Hang"}:
        return "zh"
    return "char" if written & (scripts.UNSPACED | {"Hang"}) else "13a"
