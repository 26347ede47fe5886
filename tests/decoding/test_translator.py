"""Text in, text out, as a person asks for it: the n best, piece by piece, with words that must and must not come."""

from __future__ import annotations

import copy
import re
import threading
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attent.decoding import mbr, translator
from attent.decoding.constraints.no_repeat import has_loop
from attent.decoding.constraints.prefix import PrefixError
from attent.decoding.engines.reference import SearchCancelled, TorchEngine
from attent.decoding.ensemble import Ensemble
from attent.decoding.forced_decoding import EncodedPair, SharedContext
from attent.decoding.glossary import Glossary
from attent.decoding.options import NO_CONSTRAINTS, Constraints, InputError, SamplingOptions, SearchOptions
from attent.decoding.search import beam_search
from attent.decoding.translator import TranslationError, Translator
from attent.interop.ctranslate2 import find_suppressed_tokens
from attent.models import Seq2Seq, Seq2SeqConfig, shift_right
from attent.models.config import mirror_encoder
from attent.nn import LearnedConfig, StackConfig
from attent.text.tokenizer import Tokenizer
from attent.training.autoconfig import fit_to_tokenizer
from attent.training.loop import write_model
from tests.text.corpus import lines, tokenizer
from tests.text.imported_tokenizers import marian_folder

STACK = StackConfig(layers=1, width=48, heads=4, ffn_width=96, dropout=0.0)
TEXTS = [text for text in dict.fromkeys(lines()[0]) if "7:30" not in text][:6]
ODD = ["Two dogs again walking near a theatre.", "the children", "%s, at 7:30!", "A man singing singing singing."]


def filled(rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    widest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (widest - len(row))] for row in rows])
    return ids, torch.tensor([len(row) for row in rows])


@pytest.fixture(scope="module")
def model() -> Seq2Seq:
    """It has learnt the little corpus, not quite; in float64, so that rounding decides nothing."""
    torch.manual_seed(0)
    of = tokenizer()
    made = Seq2Seq(fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=STACK, decoder=mirror_encoder(STACK)), of)).train()
    optimiser = torch.optim.Adam(made.parameters(), lr=5e-3)
    texts = lines(80 * 32)
    for at in range(0, 80 * 32, 32):
        source, lengths = filled(of.encode_source(texts[0][at : at + 32]), of.source.pad)
        target, _ = filled(of.encode_target(texts[1][at : at + 32]), -100)
        logits = made(source, shift_right(target.clamp(min=0), made.config.start_id), lengths)
        optimiser.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
        optimiser.step()
    return made.eval().double()


@pytest.fixture
def here(model: Seq2Seq) -> Translator:
    return Translator(model, tokenizer())


def texts_of(here: Translator, texts: list[str], search: SearchOptions | None = None, **more: Any) -> list[str]:
    return [one.text for one in here.translate(texts, search, **more)]


# --- a translation ---------------------------------------------------------------------------------------------------


def test_it_translates_what_it_has_learnt(here: Translator) -> None:
    wanted = dict(zip(*lines(), strict=True))
    assert sum(text == wanted[source] for text, source in zip(texts_of(here, TEXTS), TEXTS, strict=True)) >= 4


def test_a_translation_tells_how_it_was_found(here: Translator, model: Seq2Seq) -> None:
    of, search = here.tokenizer, SearchOptions(beam_size=5, n_best=3)
    for source, one in zip(ODD, here.translate(ODD, search), strict=True):
        assert (one.source, one.text, one.score) == (source, one.n_best[0].text, one.n_best[0].score)
        assert len({found.tokens for found in one.n_best}) == 3
        assert [found.score for found in one.n_best] == sorted((found.score for found in one.n_best), reverse=True)
        for found in one.n_best:
            ids = [*map(piece_id, found.tokens), of.target.end]
            assert of.target.decode(ids[:-1]).strip() == found.text
            row = EncodedPair(source=of.encode_source([source])[0], target=ids, truncated=False)
            assert found.is_finished
            assert found.log_prob == pytest.approx(read(model, row), abs=1e-4)
            assert found.score == pytest.approx(found.log_prob / len(ids) ** 0.6)


@cache
def ids_of_pieces() -> dict[str, int]:
    of = tokenizer().target
    return {of.to_pieces([i])[0]: i for i in range(of.size)}


def piece_id(piece: str) -> int:
    return ids_of_pieces()[piece]


def read(model: Seq2Seq, row: EncodedPair) -> float:
    target = torch.tensor([row.target])
    with torch.no_grad():
        logits = model(torch.tensor([row.source]), shift_right(target, model.config.start_id))
    logits[..., find_suppressed_tokens(model.config, tokenizer())] = float("-inf")
    return float(logits.log_softmax(-1).gather(-1, target[..., None]).sum())


def test_it_can_be_copied(here: Translator) -> None:
    texts = lines(3)[0]
    assert texts_of(copy.deepcopy(here), texts) == texts_of(here, texts)


def test_beam_size_and_n_best_can_be_given_as_they_are(here: Translator) -> None:
    asked = here.translate(ODD, beam_size=2, n_best=2)
    assert asked == here.translate(ODD, SearchOptions(beam_size=2, n_best=2))
    assert [one.text for one in asked] == texts_of(here, ODD, SearchOptions(beam_size=2))


def test_order_and_empty_texts_are_kept_and_space_around_is_not(here: Translator) -> None:
    texts = ["", TEXTS[0], "  ", f" {TEXTS[1]}\n", TEXTS[0], "\t"]
    got = here.translate(texts)
    assert [one.source for one in got] == texts
    first, second = texts_of(here, TEXTS[:2])
    assert [one.text for one in got] == ["", first, "", second, first, ""]


def test_chance_is_the_same_for_the_same_seed_and_place(here: Translator) -> None:
    search = SearchOptions(sampling=SamplingOptions(temperature=1.5, seed=3), n_best=4)
    first = here.translate(ODD, search)
    here.batch_tokens = 1
    assert [[found.tokens for found in one.n_best] for one in here.translate(ODD, search)] == [
        [found.tokens for found in one.n_best] for one in first
    ]
    assert len({found.tokens for one in first for found in one.n_best}) > 8
    twice = here.translate([ODD[0], ODD[0]], search)
    assert twice[0].tokens != twice[1].tokens


def test_stop_is_asked(here: Translator) -> None:
    with pytest.raises(SearchCancelled):
        here.translate(TEXTS, should_stop=lambda: True)


# --- piece by piece --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beam_size", [1, 4])
def test_pieces_of_a_stream_are_the_translation(here: Translator, beam_size: int) -> None:
    """What was given is never taken back, and much of it comes before the end."""
    search, several = SearchOptions(beam_size=beam_size), 0
    for text in [*TEXTS[:3], *ODD, " two women "]:
        pieces = list(here.stream(text, search))
        assert "".join(pieces).strip() == here.translate([text], search, prevent_loops=False)[0].text
        assert all(pieces)
        several += len(pieces) > (3 if beam_size == 1 else 1)
    assert several > 3


def test_a_stream_of_nothing_is_nothing(here: Translator) -> None:
    assert list(here.stream("  ")) == []


def test_a_stream_ends_with_what_it_ends_with_be_it_half_a_character(here: Translator) -> None:
    of = here.tokenizer.target
    half = next(i for i in range(of.size) if of.decode([i]) == "\ufffd")
    made = looping_model(half, of.encode(["a"])[0][-1])
    one = Translator(made, here.tokenizer)
    search = SearchOptions(max_length=4, beam_size=1)
    assert "".join(one.stream("a dog", search)) == one.translate(["a dog"], search, prevent_loops=False)[0].text
    assert one.translate(["a dog"], search)[0].text.endswith("\ufffd")


def test_pieces_come_as_soon_as_they_are_certain(here: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    step = here.model.step
    monkeypatch.setattr(here.model, "step", lambda *given: [steps.append(0), step(*given)][1])
    seen = [len(steps) for _ in here.stream(TEXTS[0], SearchOptions(beam_size=1))]
    assert seen[0] <= 2
    steps.clear()
    seen = [len(steps) for _ in here.stream(TEXTS[0], SearchOptions(beam_size=2))]
    assert seen[0] < len(steps)


# --- how else --------------------------------------------------------------------------------------------------------


def test_alternatives_go_on_behind_the_beginning_each_in_its_own_way(here: Translator) -> None:
    for prefix in ("", "Ein hund ", "Zwei fr"):
        found = here.suggest_continuations(TEXTS[0], prefix, 4)
        assert len(found) == 4
        assert all(one.text.startswith(prefix.strip()) for one in found)
        assert len({one.tokens for one in found}) == 4
        assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    assert all(re.match(r"Ein hund\b", one.text) for one in here.suggest_continuations(TEXTS[0], "Ein hund ", 6))


def test_the_best_alternative_is_the_translation(here: Translator) -> None:
    for text in TEXTS[:2]:
        (best,) = here.translate([text])
        assert here.suggest_continuations(text, "", 8)[0].tokens == best.tokens


# --- long texts ------------------------------------------------------------------------------------------------------


def test_a_text_of_many_sentences_is_joined_with_its_own_gaps(here: Translator) -> None:
    gaps = [" ", "\n\n", "   ", "\n - "]
    text = "".join(a + b for a, b in zip(TEXTS, [*gaps, ""], strict=False))
    (whole,) = here.translate([f"  {text} "], split_sentences=True, source_lang="en")
    assert whole.segment_count == 5
    parts = here.translate([*TEXTS[:4], f"- {TEXTS[4]}"])
    gaps[3] = "\n "
    wanted = "".join(one.text + gap for one, gap in zip(parts, [*gaps, ""], strict=True))
    assert whole.text == wanted
    assert whole.log_prob == pytest.approx(sum(one.log_prob for one in parts), abs=1e-4)
    assert whole.tokens == tuple(token for one in parts for token in one.tokens)
    assert whole.score == pytest.approx(whole.log_prob / (len(whole.tokens) + 5) ** 0.6, abs=1e-6)
    assert here.translate([text])[0].segment_count == 1


def test_what_is_too_long_is_cut_though_nobody_asked(here: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translator, "MAX_UNSPLIT_TOKENS", 40)
    got = here.translate([" ".join(TEXTS), TEXTS[0], "", " ".join(TEXTS[:3])])
    assert got[0].segment_count > 3 >= got[3].segment_count > got[1].segment_count == 1
    words = got[0].text
    for text in texts_of(here, TEXTS):
        assert text in words


@pytest.mark.parametrize(
    ("said", "whole"), [("[data]\nmax_tokens = 512\n", True), ("[data]\nlongest = 256\n", False), ("", False)]
)
def test_a_model_that_was_trained_on_long_texts_reads_them_whole(
    here: Translator, said: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A summary is of the whole text, not of each of its sentences."""
    monkeypatch.setattr(translator, "MAX_UNSPLIT_TOKENS", 40)
    assert isinstance(here.model, Seq2Seq)
    (tmp_path / "run.toml").write_text(said, encoding="utf-8")
    got = Translator(here.model, here.tokenizer, folder=tmp_path).translate([" ".join(TEXTS)])
    assert (got[0].segment_count == 1) == whole


def test_a_model_with_few_positions_is_never_asked_for_more() -> None:
    of = tokenizer()
    stack = replace(STACK, positions=LearnedConfig(max_length=12))
    made = Seq2Seq(fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=stack, decoder=mirror_encoder(stack)), of)).double()
    got = Translator(made, of).translate([" ".join(TEXTS), "a dog", "x" * 40], to="de")
    assert got[0].segment_count > 10
    assert all(len(one.tokens) <= 12 * one.segment_count for one in got)


# --- what must and must not come -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["Ein mann", "Zwei frauen ", "Die", "vor einem", "Z"])
@pytest.mark.parametrize("beam_size", [1, 4])
def test_a_prefix_is_kept(here: Translator, prefix: str, beam_size: int) -> None:
    texts = [*TEXTS, *ODD]
    got = texts_of(here, texts, SearchOptions(beam_size=beam_size), constraints=Constraints(prefix=prefix))
    assert all(text.startswith(prefix.strip()) for text in got)
    assert len(set(got)) > 3
    assert all(re.match(rf"{prefix.strip()}(\W|$)", text) for text in got)
    longer = texts_of(
        here, texts, SearchOptions(beam_size=beam_size), constraints=Constraints(prefix=prefix, prefix_is_partial=True)
    )
    assert all(text.startswith(prefix.strip()) for text in longer)


def test_what_follows_a_prefix_is_as_good_as_it_can_be(here: Translator) -> None:
    """To be told the beginning of the best changes nothing."""
    for best in here.translate(TEXTS[:4]):
        prefix = " ".join(best.text.split()[:3]) + " "
        (again,) = here.translate([best.source], constraints=Constraints(prefix=prefix))
        assert again.text == best.text


def whole_words(word: str, text: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


@pytest.mark.parametrize(
    "words", [("Hund",), ("frauen", "wartet"), ("Marktplatz.", "schläft", "um 7.30 uhr"), ("xyz",)]
)
def test_words_that_are_demanded_come(here: Translator, words: tuple[str, ...]) -> None:
    for one in here.translate([*TEXTS, *ODD], SearchOptions(beam_size=6), constraints=Constraints(required=words)):
        assert one.is_finished
        for word in words:
            assert word in one.text


@pytest.mark.parametrize("words", [("Hund", "frauen"), ("im",), ("park", "ein", "Die", "wieder", "läuft")])
def test_words_that_are_forbidden_never_come(here: Translator, words: tuple[str, ...]) -> None:
    texts = [*TEXTS, *ODD]
    freely = texts_of(here, texts)
    got = texts_of(here, texts, constraints=Constraints(banned=words))
    assert any(whole_words(word, text) for word in words for text in freely)
    assert not any(whole_words(word, text) for word in words for text in got)
    clean = [not any(whole_words(word, text) for word in words) for text in freely]
    assert [a for a, free in zip(got, clean, strict=True) if free] == [
        a for a, free in zip(freely, clean, strict=True) if free
    ]


def test_each_text_has_its_own_control(here: Translator) -> None:
    controls = [
        Constraints(),
        Constraints(prefix="Die"),
        Constraints(required=("Hund",)),
        Constraints(banned=("park",)),
    ]
    together = texts_of(here, TEXTS[:4], constraints=controls)
    assert together == [texts_of(here, [text], constraints=one)[0] for text, one in zip(TEXTS, controls, strict=False)]
    assert together[0] == texts_of(here, TEXTS[:1])[0]
    with pytest.raises(TranslationError, match="one per text, but are 4"):
        here.translate(TEXTS[:3], constraints=controls)


@pytest.mark.parametrize("demanded", ["hund", "Der Hund"])
def test_what_is_demanded_must_not_be_forbidden(here: Translator, demanded: str) -> None:
    control = Constraints(required=(demanded,), banned=("hund",))
    with pytest.raises(TranslationError, match=f"`{demanded}` is required, but contains the banned `hund`"):
        here.translate(TEXTS[:2], constraints=[Constraints(), control])
    with pytest.raises(TranslationError, match="banned"):
        list(here.stream(TEXTS[0], constraints=control))
    here.translate(TEXTS[:1], constraints=Constraints(required=("Hundehaus",), banned=("hund",)))


def test_a_word_that_begins_with_a_letter_never_met_stands_alone(here: Translator) -> None:
    for word in ("Łódź", "Москва", "7"):
        (one,) = here.translate(TEXTS[:1], constraints=Constraints(required=(word,)))
        assert re.search(rf"(^|\s){word}(\W|$)", one.text)


def test_what_must_come_may_go_in_circles(here: Translator) -> None:
    (one,) = here.translate(TEXTS[:1], constraints=Constraints(required=(" ".join(["ha"] * 12),)))
    assert " ".join(["ha"] * 12) in one.text


@pytest.mark.parametrize("search", [SearchOptions(beam_groups=2), SearchOptions(sampling=SamplingOptions())])
def test_words_are_demanded_of_a_plain_search_only(here: Translator, search: SearchOptions) -> None:
    with pytest.raises(TranslationError, match="need plain beam search"):
        here.translate(TEXTS[:1], search, constraints=Constraints(required=("Hund",)))
    with pytest.raises(TranslationError, match="must be a word, but is empty"):
        here.translate(TEXTS[:1], constraints=Constraints(required=(" ",)))


def test_a_text_is_not_a_list_of_texts(here: Translator) -> None:
    with pytest.raises(InputError, match=r"must be a list of strings, but is one: 'A dog.'"):
        here.translate("A dog.")


def test_spaces_that_the_model_has_never_met_are_plain_ones(here: Translator) -> None:
    odd = ["A dog\u2003walks.", "A\tdog walks.", "A dog\u200b walks.", "\ufeffA dog walks."]
    assert texts_of(here, odd) == texts_of(here, ["A dog walks."] * 4)


def test_a_glossary_makes_its_terms_come_where_they_are_called_for(here: Translator) -> None:
    glossary = Glossary.from_terms({"dog": "Pudel", "park": "Garten"})
    for source, one in zip(TEXTS, here.translate(TEXTS, SearchOptions(beam_size=6), glossary=glossary), strict=True):
        assert ("Pudel" in one.text) == ("dog" in source.lower())
        assert ("Garten" in one.text) == ("park" in source.lower())
    assert any("dog" in text for text in TEXTS)
    assert any("dog" not in text for text in TEXTS)


def test_a_prefix_or_demand_is_for_one_sentence(here: Translator) -> None:
    for control in (Constraints(prefix="Ein"), Constraints(required=("Hund",))):
        with pytest.raises(TranslationError, match=r"must be one sentence of at most .* tokens, but has 2"):
            here.translate([f"{TEXTS[0]} {TEXTS[1]}"], constraints=control, split_sentences=True)
    with pytest.raises(PrefixError, match="must be shorter than max_length"):
        here.translate(TEXTS[:1], SearchOptions(max_length=2), constraints=Constraints(prefix="Ein hund steht"))


# --- what runs in circles --------------------------------------------------------------------------------------------


def looping_model(*tokens: int) -> Seq2Seq:
    """It writes these tokens whatever it reads, the first above all, and hardly ever an end."""
    of = tokenizer()
    config = fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=STACK, decoder=mirror_encoder(STACK)), of)
    made = Seq2Seq(replace(config, tie_output=False, output_bias=True)).eval().double()
    assert made.output.bias is not None
    with torch.no_grad():
        made.output.weight.zero_()
        made.output.bias[list(tokens)] = torch.arange(len(tokens), 0, -1.0).double() + 20
        made.output.bias[of.target.end] = 15
    return made


def test_what_runs_in_circles_is_searched_for_again() -> None:
    of = tokenizer()
    ids = [i for i in range(of.target.size) if of.target.to_pieces([i])[0].strip("▁").isalpha()][:6]
    one = Translator(looping_model(*ids), of)
    sources, search = ["a dog", "a a a a a a a a a a a a a a a a"], SearchOptions(beam_size=2, max_length=30)
    circling = one.translate(sources, search, prevent_loops=False)
    guarded = one.translate(sources, search)
    assert all(has_loop([piece_id(piece) for piece in found.tokens]) for found in circling)
    assert not has_loop([piece_id(piece) for piece in guarded[0].tokens])
    assert guarded[1].tokens == circling[1].tokens  # as its source does
    (asked,) = one.translate(sources[:1], replace(search, forbid_loops=True), prevent_loops=False)
    assert asked.tokens == guarded[0].tokens


def test_where_loops_are_forbidden_from_the_start_nobody_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a text has wishes: what must come may go in circles."""
    of = tokenizer()
    ids = [i for i in range(of.target.size) if of.target.to_pieces([i])[0].strip("▁").isalpha()][:6]
    one = Translator(looping_model(*ids), of, engine="torch")
    sources, search = ["a dog", "a a a a a a a a a a a a a a a a"], SearchOptions(beam_size=2, max_length=30)
    wished = [NO_CONSTRAINTS, NO_CONSTRAINTS, Constraints(prefix="ein")]
    wanted = one.translate([*sources, "a dog"], search, constraints=wished)
    jobs: list[int] = []
    real = TorchEngine.search

    def counted(engine: Any, some: Any, asked: SearchOptions) -> Any:
        jobs.append(len(some))
        return real(engine, some, asked)

    monkeypatch.setattr(TorchEngine, "search", counted)
    monkeypatch.setattr(Translator, "can_forbid_loops", True)
    got = one.translate(sources, search)
    assert [found.tokens for found in got] == [found.tokens for found in wanted[:2]]
    assert jobs == [2, 0]
    got = one.translate([*sources, "a dog"], search, constraints=wished)
    assert [found.tokens for found in got] == [found.tokens for found in wanted]
    assert jobs == [2, 0, 3, 1]


def test_while_another_thread_has_the_device_a_search_gets_ready(
    here: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, done = threading.Event(), threading.Event()
    real = TorchEngine.build_context

    def plan(*given: Any) -> Any:
        ready.set()
        return real(*given)

    monkeypatch.setattr(TorchEngine, "build_context", plan)
    other = Translator(here.model, here.tokenizer, engine="torch")
    thread = threading.Thread(target=lambda: (other.translate(["a dog"], SearchOptions(max_length=9)), done.set()))
    with other._locks.device_lock:
        thread.start()
        assert ready.wait(30)
        assert not done.wait(0.1)
    assert done.wait(30)
    thread.join()


def test_a_model_in_training_is_again_when_the_last_thread_has_gone() -> None:
    left: list[str] = []
    shared = SharedContext(lambda: closing(SimpleNamespace(close=lambda: left.append("closed"))))
    with shared:
        with shared:
            pass
        assert not left
    assert left == ["closed"]
    with shared:
        assert left == ["closed"]
    assert left == ["closed"] * 2


# --- the least risk, alignments --------------------------------------------------------------------------------------


def test_the_least_risk_is_chosen_among_the_best(here: Translator) -> None:
    chosen = here.translate(ODD, SearchOptions(beam_size=2, n_best=2), mbr_candidates=6)
    for one, every in zip(chosen, here.translate(ODD, SearchOptions(beam_size=6, n_best=6)), strict=True):
        texts = [found.text for found in every.n_best]
        shares = mbr.normalize_log_probs([found.log_prob for found in every.n_best])
        assert one.text == texts[mbr.select_best(texts, shares)]
        assert len(one.n_best) == 2
    drawn = here.translate(ODD, SearchOptions(sampling=SamplingOptions(temperature=2.0)), mbr_candidates=8)
    every = here.translate(ODD, SearchOptions(sampling=SamplingOptions(temperature=2.0), n_best=8))
    for one, some in zip(drawn, every, strict=True):
        texts = [found.text for found in some.n_best]
        assert one.text == texts[mbr.select_best(texts)]
    with pytest.raises(TranslationError, match="`mbr_candidates` must be at least `n_best`=4, but is 2"):
        here.translate(ODD, SearchOptions(n_best=4), mbr_candidates=2)


def test_an_alignment_links_every_word_of_the_translation(here: Translator) -> None:
    texts = [TEXTS[0], "", f"{TEXTS[1]} {TEXTS[2]}"]
    plain, aligned = (here.translate(texts, alignment=wanted, split_sentences=True) for wanted in (False, True))
    assert [one.text for one in plain] == [one.text for one in aligned]
    assert all(one.alignment is None for one in plain)
    for one in aligned:
        assert one.alignment is not None
        assert [target for _, target in one.alignment.links] == list(range(len(one.text.split())))
        assert all(0 <= source < len(one.source.split()) for source, _ in one.alignment.links)
        assert all(len(row) == len(one.source.split()) for row in one.alignment.weights)
    first = len(TEXTS[1].split())
    parts = [here.translate([text], alignment=True)[0].alignment for text in TEXTS[1:3]]
    words = len(texts_of(here, [TEXTS[1]])[0].split())
    assert parts[0] is not None
    assert parts[1] is not None
    assert aligned[2].alignment is not None
    moved = tuple((source + first, target + words) for source, target in parts[1].links)
    assert aligned[2].alignment.links == parts[0].links + moved


# --- models ----------------------------------------------------------------------------------------------------------


def test_a_model_twice_is_the_model(here: Translator, model: Seq2Seq) -> None:
    twice = Translator(Ensemble([model, model]), here.tokenizer)
    search = SearchOptions(n_best=4)
    for one, other in zip(here.translate(ODD, search), twice.translate(ODD, search), strict=True):
        assert [found.tokens for found in one.n_best] == [found.tokens for found in other.n_best]
        assert [found.score for found in one.n_best] == pytest.approx([found.score for found in other.n_best], abs=1e-6)
    assert "".join(twice.stream(ODD[0])) == texts_of(here, ODD[:1])[0]
    assert twice.translate(ODD[:1], alignment=True)[0].alignment == here.translate(ODD[:1], alignment=True)[0].alignment


def test_folders_are_loaded_one_or_several(here: Translator, model: Seq2Seq, tmp_path: Path) -> None:
    write_model(tmp_path / "one", model.float(), here.tokenizer)
    model.double()
    wanted = texts_of(here, TEXTS)
    one = Translator.load(tmp_path / "one", device="cpu", engine="torch")
    assert texts_of(one, TEXTS) == wanted
    assert one.folder == tmp_path / "one"
    two = Translator.load(tmp_path / "one", tmp_path / "one", device="cpu")
    assert texts_of(two, TEXTS) == wanted


def test_the_numbers_are_short_where_a_gpu_is_quick_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {"cuda:0": (7, 5), "cuda:1": (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[str(device)])
    assert translator.choose_dtype(torch.device("cuda:0")) == "float32"
    assert translator.choose_dtype(torch.device("cuda:1")) == "bfloat16"
    assert translator.choose_dtype(torch.device("cpu")) == "float32"
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert translator.choose_dtype(torch.device("cuda:1")) == "float32"


def test_what_is_converted_has_all_its_digits(
    here: Translator, model: Seq2Seq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "one", model.float(), here.tokenizer)
    model.double()
    choose = {"ctranslate2": "float32"}
    monkeypatch.setattr(translator, "choose_dtype", lambda device, engine: choose.get(engine, "bfloat16"))
    formats = {
        engine: next(Translator.load(tmp_path / "one", device="cpu", engine=engine).model.parameters()).dtype
        for engine in (None, "torch", "ctranslate2")
    }
    assert formats == {None: torch.bfloat16, "torch": torch.bfloat16, "ctranslate2": torch.float32}


def test_no_text_has_more_tokens_than_it_is_thought_to(here: Translator) -> None:
    some = [*TEXTS, *ODD, "xqz" * 9, "a  b", "\u00e4\u4e2d\U0001f600", "~"]
    counts = [len(row) for row in here.tokenizer.source.encode(some)]
    assert all(count <= translator.bound_token_count(text) for count, text in zip(counts, some, strict=True))


@pytest.mark.parametrize(
    ("folders", "changes", "words"),
    [
        ((), {}, "there must be a model to translate with, but none is named"),
        (("x",), {"engine": "fast"}, "`engine` must be one of torch, ctranslate2, but is 'fast'"),
    ],
)
def test_what_cannot_be_loaded_is_refused(folders: tuple[str, ...], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TranslationError, match=words):
        Translator.load(*folders, **changes)


@pytest.fixture
def marian(tmp_path: Path) -> Path:
    """A random Marian with its tokenizer, as they are published: the decoder starts from the padding."""
    transformers = pytest.importorskip("transformers")
    folder = marian_folder(tmp_path / "marian")
    of = Tokenizer.load(folder)
    pad = of.target.pad
    config = transformers.MarianConfig(
        vocab_size=of.target.size,
        d_model=32,
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
        max_position_embeddings=128,
        pad_token_id=pad,
        decoder_start_token_id=pad,
        eos_token_id=of.target.end,
        forced_eos_token_id=None,
        tie_word_embeddings=False,
        share_encoder_decoder_embeddings=True,
    )
    torch.manual_seed(3)
    made = transformers.MarianMTModel(config)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() == 2 and "positions" not in name:
                weight.copy_(torch.randn(weight.shape) * (1.0 if "shared" in name else 1.5 * weight.shape[1] ** -0.5))
        made.final_logits_bias[:, pad] = 9.0  # published models often would write it
    made.save_pretrained(folder)
    return folder


def test_a_marian_folder_works_the_same(marian: Path) -> None:
    here = Translator.load(marian, device="cpu", engine="torch")
    here.model.double()
    of, search = here.tokenizer, SearchOptions(n_best=2, max_length=12)
    got = here.translate(TEXTS, search, prevent_loops=False)
    source, lengths = filled(of.encode_source(TEXTS), of.source.pad)
    config = here.model.config
    never = find_suppressed_tokens(config, of)
    wanted = beam_search(
        here.step_model,
        source,
        lengths,
        start=config.start_id,
        end=config.end_id,
        max_length=12,
        options=search,
        suppressed_tokens=never,
    )
    for row, one in enumerate(got):
        ids = [
            [i for i in tokens[:length] if i != config.end_id]
            for tokens, length in zip(wanted.tokens[row].tolist(), wanted.lengths[row].tolist(), strict=True)
        ]
        assert [found.tokens for found in one.n_best] == [tuple(of.target.to_pieces(tokens)) for tokens in ids]
        assert not any(of.target.pad in tokens for tokens in ids)
        assert [found.score for found in one.n_best] == pytest.approx(wanted.scores[row].tolist(), abs=1e-5)
    assert len({one.text for one in got}) > 3
    assert "".join(here.stream(TEXTS[0], search)).strip() == got[0].text
    (kept,) = here.translate(TEXTS[:1], search, constraints=Constraints(prefix="Ein", banned=("Mann",)))
    assert kept.text.startswith("Ein")


def test_other_ways_to_go_on_keep_to_what_is_asked(here: Translator) -> None:
    wanted = here.suggest_continuations(TEXTS[0], "Ein ", 6)
    words = {word.strip(".,") for one in wanted for word in one.text.split()[1:2]}
    for word in words:
        kept = here.suggest_continuations(TEXTS[0], Constraints(prefix="Ein ", banned=(word,)), 6)
        assert all(word not in re.findall(r"\w+", one.text) for one in kept)


def test_terms_may_be_given_as_they_are(here: Translator) -> None:
    terms = {"dog": "Pudel"}
    assert texts_of(here, TEXTS, glossary=terms) == texts_of(here, TEXTS, glossary=Glossary.from_terms(terms))
    with pytest.raises(InputError, match="must be strings, but one is a int"):
        here.translate(["A dog.", 3])


def test_a_target_must_have_room_for_what_it_must_have() -> None:
    with pytest.raises(ValueError, match="`min_length` must be less than `max_length`=5"):
        SearchOptions(min_length=5, max_length=5)
