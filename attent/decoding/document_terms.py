"""Consistent terms: a word that a document translates in several ways gets one of them as a glossary entry.

A term is rare to the model (several subwords, or a capital within a sentence) and aligned by mutual links. Its most
frequent form, the first of equals, is required; inflected variants and compounds count as the same. Units of which the
model is unsure neither count nor change: docs/log.md has figures.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from os.path import commonprefix

from attent.decoding.glossary import Glossary, GlossaryEntry, place_terms
from attent.decoding.markup import select_links
from attent.decoding.translator import Translation
from attent.text.tokenizer import Tokenizer

MIN_MEAN_LOG_PROB = -1.3  # of the tokens of a unit
MIN_LETTERS = 4  # of a term, of its form, and of the stem that variants share
MAX_ENDING = 3  # letters after it
MIN_SPECIFICITY = 0.5  # share of the units with a form that have the term too: a function word has less
MAX_COST = 1.5  # log-probability that a consistent term may cost in a unit
_TERM = re.compile(rf"[^\W\d_]{{{MIN_LETTERS},}}(?:-[^\W\d_]+)*")
_ACCENTS = re.compile("[\u0300-\u036f]")
_EDGES = "\"'.,;:!?()[]“”„‘’«»…"


def find_document_terms(
    translations: Mapping[str, Translation], tokenizer: Tokenizer, known: Glossary | None
) -> tuple[Glossary, set[str]]:
    """Return the terms to make consistent and those of `known`, and the keys of the units to translate again."""
    units = {
        key: unit
        for key, unit in translations.items()
        if "alignment" in vars(unit) and unit.log_prob >= MIN_MEAN_LOG_PROB * (len(unit.tokens) + 1)
    }
    occurrences: dict[str, list[tuple[str, str]]] = defaultdict(list)
    capitalized: set[str] = set()
    unit_counts: Counter[str] = Counter()  # of target words
    for key, unit in units.items():
        sources, targets = (list(map(_get_term, text.split())) for text in (unit.source, unit.text))
        unit_counts.update(set(targets))
        for source, target in select_links(unit.alignment, unit.source, unit.text):
            term, form = sources[source], targets[target]
            if term and form:
                occurrences[term].append((key, form))
                capitalized |= {term} if source and term[0].isupper() else set()
    known = known or Glossary(())
    recurring = [term for term, pairs in occurrences.items() if len(dict(pairs)) > 1 and not known.find_terms(term)]
    entries = []
    for term, pieces in zip(recurring, tokenizer.source.encode(recurring), strict=True):
        if len(pieces) > 1 or term in capitalized:
            groups = _group_variants(form for _, form in occurrences[term])
            forms = tuple(dict.fromkeys(best := max(groups, key=len)))
            if len(groups) > 1 and len(best) >= MIN_SPECIFICITY * sum(unit_counts[form] for form in forms):
                entries.append(GlossaryEntry(term=term, translations=forms, max_cost=MAX_COST))
    terms = Glossary(tuple(entries))
    again = {key for key, unit in units.items() if _lacks_term(unit, terms)}
    return Glossary((*entries, *known.entries)), again


def _lacks_term(unit: Translation, terms: Glossary) -> bool:
    """True if a term has no form in place, and no word anywhere with the stem of one: a variant, or a compound."""
    placements = place_terms(terms.find_terms(unit.source), unit.text, unit.alignment)
    missed = [each.match.forms for each in placements if each.form is None]
    words = list(map(_get_term, unit.text.split()))
    return any(not any(_has_stem(word, form) for form in forms for word in words) for forms in missed)


def _get_term(word: str) -> str:
    """Return a word without punctuation around it; "" if it cannot be a term."""
    word = word.strip(_EDGES)
    return word if _TERM.fullmatch(word) else ""


def _group_variants(forms: Iterable[str]) -> list[list[str]]:
    """Group forms by their stem, without diacritics (Vertrag, Verträgen); the first of each group comes first."""
    groups: list[list[str]] = []
    for form in forms:
        group = next((group for group in groups if _has_stem(group[0], form) and _has_stem(form, group[0])), [])
        group.append(form)
        groups += [group] if len(group) == 1 else []
    return groups


def _has_stem(word: str, form: str) -> bool:
    """True if a word starts as a form does, up to its ending."""
    word, form = (_ACCENTS.sub("", unicodedata.normalize("NFD", text.casefold())) for text in (word, form))
    stem = len(commonprefix([word, form]))  # noqa: RUF071 - of words
    return stem >= max(MIN_LETTERS, len(form) - MAX_ENDING)
