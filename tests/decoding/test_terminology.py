"""Terms of a glossary are translated at the aligned place, or reported."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attent.decoding.alignment import Alignment
from attent.decoding.glossary import Glossary, TermPlacement, place_terms, translate_terms
from attent.decoding.options import Hypothesis, InputError, SearchOptions
from attent.decoding.translator import Translation, TranslationError, Translator
from attent.models import Seq2Seq, Seq2SeqConfig, presets
from attent.models.config import mirror_encoder
from attent.nn import StackConfig
from attent.training.autoconfig import fit_to_tokenizer
from tests.text.corpus import tokenizer

FORMS = ["Hund", "ein Hund", "Hunde", "Haus", "Hundehaus", "in", "in einem Park", "Park", "und"]
SOURCES = ["A dog runs in a park.", "In a park a dog sees a dog.", "Dogs", "a dog in a park, a dog, dogs"]
TERMS = st.dictionaries(
    st.sampled_from(["dog", "a dog", "dogs", "park", "in a park"]),
    st.lists(st.sampled_from(FORMS), min_size=1, max_size=3, unique=True),
    min_size=1,
    max_size=3,
)


@cache
def build_random_translator(seed: int) -> Translator:
    torch.manual_seed(seed)
    stack = StackConfig(layers=1, width=16, heads=2, ffn_width=16, dropout=0.0)
    config = Seq2SeqConfig(vocab=9, encoder=stack, decoder=mirror_encoder(stack))
    return Translator(Seq2Seq(fit_to_tokenizer(config, tokenizer())).eval(), tokenizer(), engine="torch")


def find_word_ranges(text: str, form: str) -> list[list[int]]:
    """The words that each occurrence of a form touches, by their character offsets."""
    words = [match.span() for match in re.finditer(r"\S+", text)]
    spans = [match.span() for match in re.finditer(rf"(?<!\w){re.escape(form)}(?!\w)", text)]
    return [[i for i, (left, right) in enumerate(words) if left < end and right > start] for start, end in spans]


def is_linked(source: range, target: list[int], alignment: Alignment) -> bool:
    weights = torch.tensor(alignment.weights)
    from_target = any(int(weights[row].argmax()) in source for row in target)
    return from_target or any(int(weights[:, column].argmax()) in target for column in source)


@settings(deadline=None, max_examples=40)
@given(TERMS, st.sampled_from(SOURCES), st.sampled_from([1, 3]), st.sampled_from([8, 30]), st.integers(0, 2))
def test_a_form_of_each_term_is_at_the_aligned_place_or_the_miss_is_reported(
    terms: dict[str, list[str]], source: str, beam_size: int, max_length: int, seed: int
) -> None:
    glossary = Glossary.from_terms({term: "|".join(forms) for term, forms in terms.items()})
    options = SearchOptions(beam_size=beam_size, max_length=max_length)
    translation = build_random_translator(seed).translate(source, options, glossary=glossary)
    missed = [each.match for each in translation.missed_terms]
    for match in glossary.find_terms(source):
        capitals = [form[0].upper() + form[1:] for form in match.forms]
        forms = {*match.forms, *(form for form in capitals if translation.text.startswith(form))}
        places = [place for form in forms for place in find_word_ranges(translation.text, form)]
        if match not in missed:
            assert any(is_linked(match.words, place, translation.alignment) for place in places), (match, translation)
    for each in translation.missed_terms:
        same = [match for match in glossary.find_terms(source) if match.entry is each.match.entry]
        if len(same) == 1:  # else a form may belong to another occurrence
            assert not each.is_elsewhere or each.match.entry.term in source.lower()


def test_forms_are_placed_by_the_alignment() -> None:
    glossary = Glossary.from_terms({"bike": "Rad|Fahrrad", "lock": "schloss"})
    matches = glossary.find_terms("The lock of the bike and a bike.")
    assert [list(match.words) for match in matches] == [[1], [4], [7]]
    text = "Schloss am Fahrrad, und Rad."

    def place(*links: tuple[int, int]) -> list[tuple[str | None, bool]]:
        weights = [[0.0] * 8 for _ in range(5)]
        for source, target in links:
            weights[target][source] = 1.0
        placements = place_terms(matches, text, Alignment(links=links, weights=tuple(map(tuple, weights))))
        return [(each.form, each.is_elsewhere) for each in placements]

    assert place((1, 0), (4, 2), (7, 4)) == [("Schloss", False), ("Fahrrad", False), ("Rad", False)]
    assert place((1, 0), (4, 4), (7, 2)) == [("Schloss", False), ("Rad", False), ("Fahrrad", False)]
    assert place((3, 0), (1, 1), (4, 1), (7, 4)) == [(None, True), (None, True), ("Rad", False)]
    assert [each.form for each in place_terms(matches, "Radschloss")] == [None] * 3
    assert [each.is_elsewhere for each in place_terms(matches[1:], "das Rad")] == [False, False]
    required = "`lock` must be translated as `schloss`, but no form"
    assert str(TermPlacement(matches[0], None)) == f"{required} occurs"
    assert str(TermPlacement(matches[0], None, is_elsewhere=True)) == f"{required} stands where the alignment puts it"


def test_the_best_form_is_chosen_unless_it_costs_too_much() -> None:
    glossary = Glossary.from_terms({"bike": "Rad|Velo|Fahrrad"})
    costs = {"Rad": -9.0, "Velo": -4.0, "Fahrrad": -30.0}

    def make(text: str, log_prob: float) -> Hypothesis:
        return Hypothesis(token_ids=(hash(text),), log_prob=log_prob, score=log_prob, is_finished=True, text=text)

    def run(limit: float) -> tuple[str, int]:
        hypotheses, missed = translate_terms(
            [glossary.find_terms("my bike"), []],
            [[make("mein Hund", -1.0)], [make("ja", -1.0)]],
            search=lambda attempts: [[make(f"mein {forms[0]}", costs[forms[0]])] for _, forms in attempts],
            align=lambda pairs: [(hypothesis.text, None) for _, hypothesis in pairs],
            compute_penalty=lambda term: limit,
        )
        assert hypotheses[1][0].text == "ja"
        return hypotheses[0][0].text, len(missed[0])

    assert run(100.0) == ("mein Velo", 0)
    assert run(2.0) == ("mein Hund", 1)


def test_what_cannot_be_searched_is_reported() -> None:
    translator = build_random_translator(0)
    for form, options in (("Hund " * 60, {}), ("Hund", {"ban": ["hund"]}), ("Hund", {"max_length": 2})):
        translation = translator(SOURCES[0], glossary={"dog": form.strip()}, **options)
        assert str(translation.missed_terms[0]).startswith("`dog` must be translated as `Hund")
        assert translation.text == translator(SOURCES[0], **options).text
    with pytest.raises(TranslationError, match="need plain beam search"):
        translator(SOURCES[0], glossary={"dog": "Hund"}, top_k=3)
    assert translator("no term", glossary={"dog": "Hund"}, top_k=3).missed_terms == ()


def test_a_model_without_attention_has_forms_anywhere() -> None:
    torch.manual_seed(0)
    config = presets.lstm_no_attention(9, "tiny")
    translator = Translator(Seq2Seq(fit_to_tokenizer(config, tokenizer())).eval(), tokenizer(), engine="torch")
    translation: Translation = translator("A dog runs.", glossary={"dog": "Hund"})
    assert ("Hund" in translation.text.split()) == (not translation.missed_terms)


TBX = """<?xml version="1.0"?>
<!DOCTYPE martif SYSTEM "TBXcoreStructV02.dtd">
<martif type="TBX" xml:lang="en"><text><body>
 <termEntry id="1"><langSet xml:lang="en"><tig><term>bike</term></tig><tig><term>bicycle</term></tig></langSet>
  <langSet xml:lang="de"><tig><term>Velo</term></tig>
   <tig><term>Fahrrad</term><termNote type="administrativeStatus">preferredTerm-admn-sts</termNote></tig>
   <tig><term>Drahtesel</term><termNote type="administrativeStatus">deprecatedTerm-admn-sts</termNote></tig></langSet>
 </termEntry>
 <termEntry id="2"><langSet xml:lang="en-US"><ntig><termGrp><term>lock &amp; key</term></termGrp></ntig></langSet>
  <langSet xml:lang="de-DE"><ntig><termGrp><term>Schloss</term></termGrp></ntig></langSet></termEntry>
 <termEntry id="3"><langSet xml:lang="en"><tig><term>bike</term></tig></langSet>
  <langSet xml:lang="fr"><tig><term>velo</term></tig></langSet></termEntry>
</body></text></martif>"""


def test_tbx_terms_are_read(tmp_path: Path) -> None:
    path = tmp_path / "terms.tbx"
    version_3 = re.sub("termEntry", "conceptEntry", re.sub("langSet", "langSec", re.sub(r"\btig", "termSec", TBX)))
    version_3 = version_3.replace("martif", "tbx").replace("<tbx ", '<tbx xmlns="urn:iso:std:iso:30042:ed-2" ')
    for content in (TBX, version_3.replace("<!DOCTYPE tbx SYSTEM", "<!DOCTYPE tbx SYSTEM")):
        path.write_text(content, encoding="utf-8")
        glossary = Glossary.from_file(path, "en", "de")
        assert [(entry.term, entry.translations) for entry in glossary.entries] == [
            ("bike", ("Fahrrad", "Velo")), ("bicycle", ("Fahrrad", "Velo")), ("lock & key", ("Schloss",)),
        ]  # fmt: skip
    for languages, problem in (((None, "de"), "needs the languages"), (("en", "tw"), "en, de, en-US, de-DE, fr")):
        with pytest.raises(InputError, match=problem):
            Glossary.from_file(path, *languages)
    path.write_text(TBX.replace('"TBXcoreStructV02.dtd"', '"x" [<!ENTITY a "b">]'), encoding="utf-8")
    with pytest.raises(ValueError, match="can be an attack"):
        Glossary.from_file(path, "en", "de")
    path.write_text(TBX[:-40], encoding="utf-8")
    with pytest.raises(ValueError, match=r"cut short|not well-formed"):
        Glossary.from_file(path, "en", "de")
