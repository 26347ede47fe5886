"""Translator: n-best lists, streaming, sentence splitting, constraints, loops, alignment, loading."""

from __future__ import annotations

import asyncio
import copy
import re
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attent.decoding import quality, translator
from attent.decoding.alignment import find_cross_layers
from attent.decoding.constraints.token_rules import has_loop
from attent.decoding.engines.reference import SearchCancelled, TorchEngine
from attent.decoding.ensemble import Ensemble
from attent.decoding.forced_decoding import EncodedPair, score_token_ids
from attent.decoding.glossary import Glossary
from attent.decoding.loading import compute_max_rows, resolve_device_and_dtype
from attent.decoding.options import (
    NO_CONSTRAINTS,
    InputError,
    PhraseConstraints,
    SamplingOptions,
    SearchOptions,
    SearchRequest,
)
from attent.decoding.translator import TranslationError, Translator
from attent.models import Seq2Seq, Seq2SeqConfig, shift_right
from attent.models.config import mirror_encoder
from attent.models.seq2seq import find_suppressed_tokens
from attent.nn import LearnedConfig, StackConfig
from attent.nn.eval_mode import SharedContext
from attent.text.tokenizer import Tokenizer
from attent.training.autoconfig import fit_to_tokenizer
from attent.training.loop import write_model
from tests.searching import beam_search
from tests.text.corpus import lines, tokenizer
from tests.text.imported_tokenizers import marian_folder

STACK = StackConfig(layers=1, width=48, heads=4, ffn_width=96, dropout=0.0)
TEXTS = [text for text in dict.fromkeys(lines()[0]) if "7:30" not in text][:6]
ODD = ["Two dogs again walking near a theatre.", "the children", "%s, at 7:30!", "A man singing singing singing."]


def pad_rows(rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    widest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (widest - len(row))] for row in rows])
    return ids, torch.tensor([len(row) for row in rows])


@pytest.fixture(scope="module")
def model() -> Seq2Seq:
    """Trained on the small corpus, imperfectly; in float64, so that rounding decides nothing."""
    torch.manual_seed(0)
    of = tokenizer()
    made = Seq2Seq(fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=STACK, decoder=mirror_encoder(STACK)), of)).train()
    optimiser = torch.optim.Adam(made.parameters(), lr=5e-3)
    texts = lines(80 * 32)
    for at in range(0, 80 * 32, 32):
        source, lengths = pad_rows(of.encode_source(texts[0][at : at + 32]), of.source.pad)
        target, _ = pad_rows(of.encode_target(texts[1][at : at + 32]), -100)
        logits = made(source, shift_right(target.clamp(min=0), made.config.start_id), lengths)
        optimiser.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
        optimiser.step()
    return made.eval().double()


@pytest.fixture
def trained_translator(model: Seq2Seq) -> Translator:
    return Translator(model, tokenizer())


def translate_to_texts(
    trained_translator: Translator, texts: list[str], search: SearchOptions | None = None, **more: Any
) -> list[str]:
    return [one.text for one in trained_translator.translate(texts, search, **more)]


# --- a translation ---------------------------------------------------------------------------------------------------


def test_translates_the_training_corpus(trained_translator: Translator) -> None:
    wanted = dict(zip(*lines(), strict=True))
    assert (
        sum(
            text == wanted[source]
            for text, source in zip(translate_to_texts(trained_translator, TEXTS), TEXTS, strict=True)
        )
        >= 4
    )


def test_a_translation_has_score_tokens_and_n_best(trained_translator: Translator, model: Seq2Seq) -> None:
    of, search = trained_translator.tokenizer, SearchOptions(beam_size=5, n_best=3)
    for source, one in zip(ODD, trained_translator.translate(ODD, search), strict=True):
        assert (one.source, one.text, one.score) == (source, one.n_best[0].text, one.n_best[0].score)
        assert len({found.tokens for found in one.n_best}) == 3
        assert [found.score for found in one.n_best] == sorted((found.score for found in one.n_best), reverse=True)
        for found in one.n_best:
            ids = [*map(piece_id, found.tokens), of.target.end]
            assert of.target.decode(ids[:-1]).strip() == found.text
            row = EncodedPair(source=of.encode_source([source])[0], target=ids, truncated=False)
            assert found.is_finished
            assert found.log_prob == pytest.approx(score_pair(model, row), abs=1e-4)
            assert found.score == pytest.approx(found.log_prob / len(ids) ** 0.6)


def test_a_string_gives_one_translation_and_a_list_gives_a_list(trained_translator: Translator) -> None:
    one, several = trained_translator(TEXTS[0], n_best=2), trained_translator(TEXTS[:2], n_best=2)
    assert several == trained_translator.translate(TEXTS[:2], SearchOptions(n_best=2))
    assert one == several[0]
    assert trained_translator(tuple(TEXTS[:2]))[1].text == several[1].text
    assert trained_translator([]) == []


def test_a_column_keeps_its_index_name_and_missing_values(trained_translator: Translator) -> None:
    column = pd.Series([TEXTS[0], None, TEXTS[1], TEXTS[0]], index=[3, 1, 1, 7], name="en")
    texts = translate_to_texts(trained_translator, TEXTS[:2])
    for kind in ("object", "string", "category"):
        translated = trained_translator(column.astype(kind), beam_size=4)  # type: ignore[call-overload]
        assert translated.isna().tolist() == [False, True, False, False]
        assert translated.dropna().tolist() == [texts[0], texts[1], texts[0]]
        assert (translated.index.tolist(), translated.name) == ([3, 1, 1, 7], "en")
    assert trained_translator(column[:0]).tolist() == []
    with pytest.raises(InputError, match="must be strings, but one is of type int"):
        trained_translator(pd.Series([1]))
    with pytest.raises(InputError, match="must be a string, strings or a column, but is of type int"):
        trained_translator(1)  # type: ignore[call-overload]


def test_keywords_change_the_options(trained_translator: Translator) -> None:
    base = SearchOptions(beam_size=2, length_penalty=1.0)
    expected = trained_translator.translate(ODD, SearchOptions(beam_size=3, n_best=3, length_penalty=1.0))
    assert trained_translator(ODD, base, n_best=3) == expected
    sampled = SearchOptions(sampling=SamplingOptions(top_k=3, seed=2))
    assert trained_translator(ODD, top_k=3, seed=2) == trained_translator.translate(ODD, sampled)
    with pytest.raises(InputError, match="there is no option `bem_size` of the search; did you mean `beam"):
        trained_translator(ODD, bem_size=3)  # type: ignore[call-overload]


def test_phrases_may_be_keywords(trained_translator: Translator) -> None:
    constraints = PhraseConstraints(prefix="Zwei", require=("Hund",), ban=("park",))
    expected = trained_translator.translate([TEXTS[0]], constraints=constraints)
    given = trained_translator([TEXTS[0]], prefix="Zwei", require=["Hund"], ban=["park"])
    assert given == expected
    per_text = [PhraseConstraints(ban=("park",)), PhraseConstraints(prefix="Ein")]
    one, other = trained_translator(TEXTS[:2], constraints=per_text, require=["Hund"])
    assert "hund" in one.text.lower()
    assert other.text.startswith("Ein")


def test_a_translation_prints_as_its_text(trained_translator: Translator) -> None:
    one = trained_translator(TEXTS[0])
    assert f"{one}" == one.text
    assert repr(one) == f"Translation({one.text!r}, score={one.score:.4f})"


def test_scores_are_the_log_probabilities_of_the_tokens(trained_translator: Translator, model: Seq2Seq) -> None:
    twice = Translator(Ensemble([model, model]), trained_translator.tokenizer)
    texts = [ODD[0], f"{TEXTS[1]} {TEXTS[2]}", ""]
    for translator_ in (trained_translator, twice):
        one, split, empty = translator_(texts, split_sentences=True)
        (row,) = trained_translator.tokenizer.encode_source([one.source])
        suppressed = find_suppressed_tokens(model.config, trained_translator.tokenizer)
        ((*expected, end),) = score_token_ids(
            model, [row], [[*one.token_ids, model.config.end_id]], suppressed_tokens=suppressed
        )
        assert one.scores == pytest.approx(expected, abs=1e-5)
        assert one.log_prob == pytest.approx(sum(one.scores) + end, abs=1e-4)
        assert len(split.scores) == len(split.tokens)
        assert split.scores[: len(split.scores) // 3] == translator_(TEXTS[1]).scores[: len(split.scores) // 3]
        assert empty.scores == ()


def test_a_stored_translation_is_without_the_model(trained_translator: Translator) -> None:
    one = trained_translator(TEXTS[0], alignment=True)
    stored = copy.copy(one)
    assert stored == one
    assert stored.alignment == one.alignment
    with pytest.raises(TranslationError, match="translate the source again"):
        _ = stored.scores
    assert asdict(one)["text"] == one.text


@cache
def ids_of_pieces() -> dict[str, int]:
    of = tokenizer().target
    return {of.to_pieces([i])[0]: i for i in range(of.size)}


def piece_id(piece: str) -> int:
    return ids_of_pieces()[piece]


def score_pair(model: Seq2Seq, row: EncodedPair) -> float:
    target = torch.tensor([row.target])
    with torch.no_grad():
        logits = model(torch.tensor([row.source]), shift_right(target, model.config.start_id))
    logits[..., find_suppressed_tokens(model.config, tokenizer())] = float("-inf")
    return float(logits.log_softmax(-1).gather(-1, target[..., None]).sum())


def test_a_translator_can_be_copied(trained_translator: Translator) -> None:
    texts = lines(3)[0]
    assert translate_to_texts(copy.deepcopy(trained_translator), texts) == translate_to_texts(trained_translator, texts)


def test_beam_size_and_n_best_override_the_options(trained_translator: Translator) -> None:
    asked = trained_translator.translate(ODD, beam_size=2, n_best=2)
    assert asked == trained_translator.translate(ODD, SearchOptions(beam_size=2, n_best=2))
    assert [one.text for one in asked] == translate_to_texts(trained_translator, ODD, SearchOptions(beam_size=2))


def test_order_and_empty_texts_are_kept_and_whitespace_is_stripped(trained_translator: Translator) -> None:
    texts = ["", TEXTS[0], "  ", f" {TEXTS[1]}\n", TEXTS[0], "\t"]
    got = trained_translator.translate(texts)
    assert [one.source for one in got] == texts
    first, second = translate_to_texts(trained_translator, TEXTS[:2])
    assert [one.text for one in got] == ["", first, "", second, first, ""]


def test_samples_repeat_for_the_same_seed_and_index(trained_translator: Translator) -> None:
    search = SearchOptions(sampling=SamplingOptions(temperature=1.5, seed=3), n_best=4)
    first = trained_translator.translate(ODD, search)
    trained_translator.batch_tokens = 1
    assert [[found.tokens for found in one.n_best] for one in trained_translator.translate(ODD, search)] == [
        [found.tokens for found in one.n_best] for one in first
    ]
    assert len({found.tokens for one in first for found in one.n_best}) > 8
    twice = trained_translator.translate([ODD[0], ODD[0]], search)
    assert twice[0].tokens != twice[1].tokens


def test_should_stop_is_polled(trained_translator: Translator) -> None:
    with pytest.raises(SearchCancelled):
        trained_translator.translate(TEXTS, should_stop=lambda: True)


# --- piece by piece --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beam_size", [1, 4])
def test_a_stream_joins_to_the_translation(trained_translator: Translator, beam_size: int) -> None:
    """Yielded text never changes, and much of it comes before the end."""
    search, several = SearchOptions(beam_size=beam_size), 0
    for text in [*TEXTS[:3], *ODD, " two women "]:
        pieces = list(trained_translator.stream(text, search))
        assert "".join(pieces).strip() == trained_translator.translate([text], search, prevent_loops=False)[0].text
        assert all(pieces)
        several += len(pieces) > (3 if beam_size == 1 else 1)
    assert several > 3


def test_a_stream_of_an_empty_text_is_empty(trained_translator: Translator) -> None:
    assert list(trained_translator.stream("  ")) == []


def test_a_stream_may_end_in_an_incomplete_character(trained_translator: Translator) -> None:
    of = trained_translator.tokenizer.target
    half = next(i for i in range(of.size) if of.decode([i]) == "\ufffd")
    made = looping_model(half, of.encode(["a"])[0][-1])
    one = Translator(made, trained_translator.tokenizer)
    search = SearchOptions(max_length=4, beam_size=1)
    assert "".join(one.stream("a dog", search)) == one.translate(["a dog"], search, prevent_loops=False)[0].text
    assert one.translate(["a dog"], search)[0].text.endswith("\ufffd")


def test_a_stream_yields_before_the_end(trained_translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    step = trained_translator.model.step
    monkeypatch.setattr(trained_translator.model, "step", lambda *given: [steps.append(0), step(*given)][1])
    seen = [len(steps) for _ in trained_translator.stream(TEXTS[0], SearchOptions(beam_size=1))]
    assert seen[0] <= 2
    steps.clear()
    seen = [len(steps) for _ in trained_translator.stream(TEXTS[0], SearchOptions(beam_size=2))]
    assert seen[0] < len(steps)


def test_pieces_arrive_while_the_search_runs_in_a_thread(trained_translator: Translator) -> None:
    async def collect(beam_size: int) -> list[str]:
        return [piece async for piece in trained_translator.stream_async(TEXTS[0], beam_size=beam_size)]

    for beam_size in (1, 2):
        assert asyncio.run(collect(beam_size)) == list(trained_translator.stream(TEXTS[0], beam_size=beam_size))


def test_an_error_of_a_stream_reaches_the_task(trained_translator: Translator) -> None:
    async def collect() -> list[str]:
        return [piece async for piece in trained_translator.stream_async(TEXTS[0], max_length=0)]

    with pytest.raises(InputError, match="`max_length` must be 1 or more"):
        asyncio.run(collect())


def test_a_cancelled_task_stops_the_search_within_a_step(
    trained_translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model waits in its third step until the task is cancelled: no fourth step follows."""
    step, steps = trained_translator.model.step, list[str]()
    in_third_step, may_continue = threading.Event(), threading.Event()

    def wait_in_third_step(*given: Any) -> Tensor:
        steps.append(threading.current_thread().name)
        if len(steps) == 3:
            in_third_step.set()
            assert may_continue.wait(30)
        return step(*given)

    async def cancel() -> None:
        async def consume() -> None:
            async for _ in trained_translator.stream_async(TEXTS[0], beam_size=1):
                pass

        task = asyncio.create_task(consume())
        assert await asyncio.to_thread(in_third_step.wait, 30)
        task.cancel()
        asyncio.get_running_loop().call_later(0.01, may_continue.set)
        with pytest.raises(asyncio.CancelledError):
            await task

    monkeypatch.setattr(trained_translator.model, "step", wait_in_third_step)
    asyncio.run(cancel())
    assert len(steps) == 3
    assert threading.main_thread().name not in steps


# --- how else --------------------------------------------------------------------------------------------------------


def test_continuations_share_the_prefix_and_differ_after_it(trained_translator: Translator) -> None:
    for prefix in ("", "Ein hund ", "Zwei fr"):
        found = trained_translator.suggest_continuations(TEXTS[0], prefix, 4)
        assert len(found) == 4
        assert all(one.text.startswith(prefix.strip()) for one in found)
        assert len({one.tokens for one in found}) == 4
        assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    assert all(
        re.match(r"Ein hund\b", one.text) for one in trained_translator.suggest_continuations(TEXTS[0], "Ein hund ", 6)
    )


def test_the_best_continuation_is_the_translation(trained_translator: Translator) -> None:
    for text in TEXTS[:2]:
        (best,) = trained_translator.translate([text])
        assert trained_translator.suggest_continuations(text, "", 8)[0].tokens == best.tokens


def test_continuations_clean_the_text_as_translations_do(trained_translator: Translator) -> None:
    text = TEXTS[0].replace(" ", "\u2003")
    assert trained_translator._clean_text(text) == TEXTS[0]
    plain, unusual = (trained_translator.suggest_continuations(each, "", 4) for each in (TEXTS[0], text))
    assert [item.tokens for item in unusual] == [item.tokens for item in plain]


def test_the_torch_engine_does_not_start_if_nothing_loops(
    trained_translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained_translator, "_build_torch_engine", None)
    assert trained_translator._search_without_loops({}, {}, SearchOptions(), None) == {}


# --- long texts ------------------------------------------------------------------------------------------------------


def test_sentences_are_joined_with_their_original_gaps(trained_translator: Translator) -> None:
    gaps = [" ", "\n\n", "   ", "\n - "]
    text = "".join(a + b for a, b in zip(TEXTS, [*gaps, ""], strict=False))
    (whole,) = trained_translator.translate([f"  {text} "], split_sentences=True, source_lang="en")
    assert whole.segment_count == 5
    parts = trained_translator.translate([*TEXTS[:4], f"- {TEXTS[4]}"])
    gaps[3] = "\n "
    wanted = "".join(one.text + gap for one, gap in zip(parts, [*gaps, ""], strict=True))
    assert whole.text == wanted
    assert whole.log_prob == pytest.approx(sum(one.log_prob for one in parts), abs=1e-4)
    assert whole.tokens == tuple(token for one in parts for token in one.tokens)
    assert whole.score == pytest.approx(whole.log_prob / (len(whole.tokens) + 5) ** 0.6, abs=1e-6)
    assert trained_translator.translate([text])[0].segment_count == 1


def test_long_texts_are_split_by_default(trained_translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translator, "MAX_UNSPLIT_TOKENS", 40)
    got = trained_translator.translate([" ".join(TEXTS), TEXTS[0], "", " ".join(TEXTS[:3])])
    assert got[0].segment_count > 3 >= got[3].segment_count > got[1].segment_count == 1
    words = got[0].text
    for text in translate_to_texts(trained_translator, TEXTS):
        assert text in words


@pytest.mark.parametrize(
    ("said", "whole"),
    [
        ("[data]\nmax_tokens = 257\n", True),
        ("[data]\nmax_tokens = 256\n", False),
        ('[data]\nmax_tokens = "many"\n', False),
        ("[model]\n", False),
        ("not TOML", False),
        ("", False),
    ],
)
def test_a_model_trained_on_long_texts_does_not_split_them(
    trained_translator: Translator, said: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A summary needs the whole text, not each sentence."""
    monkeypatch.setattr(translator, "MAX_UNSPLIT_TOKENS", 40)
    assert isinstance(trained_translator.model, Seq2Seq)
    (tmp_path / "run.toml").write_text(said, encoding="utf-8")
    got = Translator(trained_translator.model, trained_translator.tokenizer, folder=tmp_path).translate(
        [" ".join(TEXTS)]
    )
    assert (got[0].segment_count == 1) == whole


def test_a_text_of_just_the_maximum_length_is_not_split(
    trained_translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " ".join(TEXTS[:2])
    length = len(trained_translator.tokenizer.source.encode([text])[0])
    for to, special_tokens in ((None, 1), ("de", 2)):
        for max_tokens, count in ((length + special_tokens, 1), (length + special_tokens - 1, 2)):
            monkeypatch.setattr(translator, "MAX_UNSPLIT_TOKENS", max_tokens)
            assert trained_translator.translate([text], to=to, beam_size=1)[0].segment_count == count


def test_segments_fit_into_the_positions() -> None:
    of = tokenizer()
    stack = replace(STACK, positions=LearnedConfig(max_length=12))
    made = Seq2Seq(fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=stack, decoder=mirror_encoder(stack)), of)).double()
    got = Translator(made, of).translate([" ".join(TEXTS), "a dog", "x" * 40], to="de")
    assert got[0].segment_count > 10
    assert all(len(one.tokens) <= 12 * one.segment_count for one in got)


# --- what must and must not come -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["Ein mann", "Zwei frauen ", "Die", "vor einem", "Z"])
@pytest.mark.parametrize("beam_size", [1, 4])
def test_a_prefix_is_kept(trained_translator: Translator, prefix: str, beam_size: int) -> None:
    texts = [*TEXTS, *ODD]
    got = translate_to_texts(
        trained_translator, texts, SearchOptions(beam_size=beam_size), constraints=PhraseConstraints(prefix=prefix)
    )
    assert all(text.startswith(prefix.strip()) for text in got)
    assert len(set(got)) > 3
    assert all(re.match(rf"{prefix.strip()}(\W|$)", text) for text in got)
    longer = translate_to_texts(
        trained_translator,
        texts,
        SearchOptions(beam_size=beam_size),
        constraints=PhraseConstraints(prefix=prefix, prefix_is_partial=True),
    )
    assert all(text.startswith(prefix.strip()) for text in longer)


def test_a_prefix_of_the_best_translation_changes_nothing(trained_translator: Translator) -> None:
    """Forcing the start of the best translation gives the same translation."""
    for best in trained_translator.translate(TEXTS[:4]):
        prefix = " ".join(best.text.split()[:3]) + " "
        (again,) = trained_translator.translate([best.source], constraints=PhraseConstraints(prefix=prefix))
        assert again.text == best.text


def count_whole_words(word: str, text: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


@pytest.mark.parametrize(
    "words", [("Hund",), ("frauen", "wartet"), ("Marktplatz.", "schläft", "um 7.30 uhr"), ("xyz",)]
)
def test_required_phrases_occur(trained_translator: Translator, words: tuple[str, ...]) -> None:
    for one in trained_translator.translate(
        [*TEXTS, *ODD], SearchOptions(beam_size=6), constraints=PhraseConstraints(require=words)
    ):
        assert one.is_finished
        for word in words:
            assert word in one.text


@pytest.mark.parametrize("words", [("Hund", "frauen"), ("im",), ("park", "ein", "Die", "wieder", "läuft")])
def test_banned_phrases_never_occur(trained_translator: Translator, words: tuple[str, ...]) -> None:
    texts = [*TEXTS, *ODD]
    freely = translate_to_texts(trained_translator, texts)
    got = translate_to_texts(trained_translator, texts, constraints=PhraseConstraints(ban=words))
    assert any(count_whole_words(word, text) for word in words for text in freely)
    assert not any(count_whole_words(word, text) for word in words for text in got)
    clean = [not any(count_whole_words(word, text) for word in words) for text in freely]
    assert [a for a, free in zip(got, clean, strict=True) if free] == [
        a for a, free in zip(freely, clean, strict=True) if free
    ]


def test_each_text_has_its_own_constraints(trained_translator: Translator) -> None:
    controls = [
        PhraseConstraints(),
        PhraseConstraints(prefix="Die"),
        PhraseConstraints(require=("Hund",)),
        PhraseConstraints(ban=("park",)),
    ]
    together = translate_to_texts(trained_translator, TEXTS[:4], constraints=controls)
    assert together == [
        translate_to_texts(trained_translator, [text], constraints=one)[0]
        for text, one in zip(TEXTS, controls, strict=False)
    ]
    assert together[0] == translate_to_texts(trained_translator, TEXTS[:1])[0]
    with pytest.raises(TranslationError, match="one per text, but are 4"):
        trained_translator.translate(TEXTS[:3], constraints=controls)


@pytest.mark.parametrize("demanded", ["hund", "Der Hund"])
def test_a_required_phrase_must_not_be_banned(trained_translator: Translator, demanded: str) -> None:
    control = PhraseConstraints(require=(demanded,), ban=("hund",))
    with pytest.raises(TranslationError, match=f"`{demanded}` is required, but contains the banned `hund`"):
        trained_translator.translate(TEXTS[:2], constraints=[PhraseConstraints(), control])
    with pytest.raises(TranslationError, match="banned"):
        list(trained_translator.stream(TEXTS[0], constraints=control))
    trained_translator.translate(TEXTS[:1], constraints=PhraseConstraints(require=("Hundehaus",), ban=("hund",)))


def test_a_prefix_must_not_be_banned(trained_translator: Translator) -> None:
    refused = PhraseConstraints(prefix="Ein  Hund ", ban=("Katze", "ein hund"))
    translate: list[Callable[[PhraseConstraints], object]] = [
        lambda constraints: trained_translator.translate(TEXTS[:1], constraints=constraints),
        lambda constraints: list(trained_translator.stream(TEXTS[0], constraints=constraints)),
        lambda constraints: trained_translator.suggest_continuations(TEXTS[0], constraints, 1),
    ]
    for call in translate:
        for constraints in (refused, replace(refused, prefix="Ein  Hund"), replace(refused, prefix_is_partial=True)):
            with pytest.raises(TranslationError, match="prefix `Ein  Hund` contains the banned `ein hund`; leave one"):
                call(constraints)
        call(replace(refused, prefix="Ein  Hund", prefix_is_partial=True))


def test_phrases_are_accepted_as_lists(trained_translator: Translator) -> None:
    phrases = ["Haus", "Garten"], ["Hund", "Katze"]
    as_lists = PhraseConstraints(require=phrases[0], ban=phrases[1])  # type: ignore[arg-type]
    as_tuples = PhraseConstraints(require=tuple(phrases[0]), ban=tuple(phrases[1]))
    assert as_lists == as_tuples
    texts = [trained_translator.translate(TEXTS[:2], constraints=item)[1].text for item in (as_lists, as_tuples)]
    assert texts[0] == texts[1]


def test_a_required_word_with_an_unknown_letter_is_a_whole_word(trained_translator: Translator) -> None:
    for word in ("Łódź", "Москва", "7"):
        (one,) = trained_translator.translate(TEXTS[:1], constraints=PhraseConstraints(require=(word,)))
        assert re.search(rf"(^|\s){word}(\W|$)", one.text)


def test_required_phrases_may_cause_loops(trained_translator: Translator) -> None:
    (one,) = trained_translator.translate(TEXTS[:1], constraints=PhraseConstraints(require=(" ".join(["ha"] * 12),)))
    assert " ".join(["ha"] * 12) in one.text


@pytest.mark.parametrize("search", [SearchOptions(beam_groups=2), SearchOptions(sampling=SamplingOptions())])
def test_required_phrases_need_plain_beam_search(trained_translator: Translator, search: SearchOptions) -> None:
    with pytest.raises(TranslationError, match="need plain beam search"):
        trained_translator.translate(TEXTS[:1], search, constraints=PhraseConstraints(require=("Hund",)))
    with pytest.raises(TranslationError, match="must be a word, but is empty"):
        trained_translator.translate(TEXTS[:1], constraints=PhraseConstraints(require=(" ",)))


def test_unknown_spaces_are_replaced(trained_translator: Translator) -> None:
    odd = ["A dog\u2003walks.", "A\tdog walks.", "A dog\u200b walks.", "\ufeffA dog walks."]
    assert translate_to_texts(trained_translator, odd) == translate_to_texts(trained_translator, ["A dog walks."] * 4)


def test_glossary_terms_occur_where_required(trained_translator: Translator) -> None:
    glossary, placed = Glossary.from_terms({"dog": "Pudel|mann", "park": "Garten|theater"}), 0
    for source, one in zip(
        TEXTS, trained_translator.translate(TEXTS, SearchOptions(beam_size=6), glossary=glossary), strict=True
    ):
        missed = {each.match.entry.term for each in one.missed_terms if not each.is_elsewhere}
        for term, forms in (("dog", {"Pudel", "mann", "Mann"}), ("park", {"Garten", "theater", "Theater"})):
            has_form = not forms.isdisjoint(re.findall(r"\w+", one.text))
            assert has_form == (term in source.lower() and term not in missed)
            placed += has_form
    assert placed > 3
    assert any("dog" in text for text in TEXTS)
    assert any("dog" not in text for text in TEXTS)


def test_a_prefix_or_required_phrase_needs_a_single_sentence(trained_translator: Translator) -> None:
    for control in (PhraseConstraints(prefix="Ein"), PhraseConstraints(require=("Hund",))):
        with pytest.raises(TranslationError, match=r"must be one sentence of at most .* tokens, but has 2"):
            trained_translator.translate([f"{TEXTS[0]} {TEXTS[1]}"], constraints=control, split_sentences=True)
    with pytest.raises(ValueError, match="must be shorter than max_length"):
        trained_translator.translate(
            TEXTS[:1], SearchOptions(max_length=2), constraints=PhraseConstraints(prefix="Ein hund steht")
        )


# --- what runs in circles --------------------------------------------------------------------------------------------


def looping_model(*tokens: int) -> Seq2Seq:
    """A model that generates these tokens for any input, mostly the first, and hardly ever the end token."""
    of = tokenizer()
    config = fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=STACK, decoder=mirror_encoder(STACK)), of)
    made = Seq2Seq(replace(config, tie_output=False, output_bias=True)).eval().double()
    assert made.output.bias is not None
    with torch.no_grad():
        made.output.weight.zero_()
        made.output.bias[list(tokens)] = torch.arange(len(tokens), 0, -1.0).double() + 20
        made.output.bias[of.target.end] = 15
    return made


def test_a_translation_with_a_loop_is_searched_again() -> None:
    of = tokenizer()
    ids = [i for i in range(of.target.size) if of.target.to_pieces([i])[0].strip("▁").isalpha()][:6]
    one = Translator(looping_model(*ids), of)
    sources, search = ["a dog", "a a a a a a a a a a a a a a a a"], SearchOptions(beam_size=2, max_length=30)
    circling = one.translate(sources, search, prevent_loops=False)
    guarded = one.translate(sources, search)
    assert all(has_loop([piece_id(piece) for piece in found.tokens]) for found in circling)
    assert not has_loop([piece_id(piece) for piece in guarded[0].tokens])
    assert guarded[1].tokens == circling[1].tokens  # as its source does


def test_loops_forbidden_from_the_start_need_no_second_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except with constraints: required phrases may need loops."""
    of = tokenizer()
    ids = [i for i in range(of.target.size) if of.target.to_pieces([i])[0].strip("▁").isalpha()][:6]
    one = Translator(looping_model(*ids), of, engine="torch")
    sources, search = ["a dog", "a a a a a a a a a a a a a a a a"], SearchOptions(beam_size=2, max_length=30)
    wished = [NO_CONSTRAINTS, NO_CONSTRAINTS, PhraseConstraints(prefix="ein")]
    wanted = one.translate([*sources, "a dog"], search, constraints=wished)
    requests: list[int] = []
    real = TorchEngine.search

    def counted(engine: Any, some: Any, asked: SearchOptions) -> Any:
        requests.append(len(some))
        return real(engine, some, asked)

    monkeypatch.setattr(TorchEngine, "search", counted)
    monkeypatch.setattr(Translator, "_forbids_loops_in_first_search", True)
    got = one.translate(sources, search)
    assert [found.tokens for found in got] == [found.tokens for found in wanted[:2]]
    assert requests == [2]
    got = one.translate([*sources, "a dog"], search, constraints=wished)
    assert [found.tokens for found in got] == [found.tokens for found in wanted]
    assert requests == [2, 3, 1]


def test_a_search_prepares_while_another_thread_holds_the_device(
    trained_translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, done = threading.Event(), threading.Event()
    real = TorchEngine.build_context

    def plan(*given: Any) -> Any:
        ready.set()
        return real(*given)

    monkeypatch.setattr(TorchEngine, "build_context", plan)
    other = Translator(trained_translator.model, trained_translator.tokenizer, engine="torch")
    thread = threading.Thread(target=lambda: (other.translate(["a dog"], SearchOptions(max_length=9)), done.set()))
    with other._locks.device_lock:
        thread.start()
        assert ready.wait(30)
        assert not done.wait(0.1)
    assert done.wait(30)
    thread.join()


def test_training_mode_is_restored_after_the_last_thread() -> None:
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


def test_mbr_selects_among_the_candidates(trained_translator: Translator) -> None:
    chosen = trained_translator.translate(ODD, SearchOptions(beam_size=2, n_best=2), mbr_candidates=6)
    for one, every in zip(chosen, trained_translator.translate(ODD, SearchOptions(beam_size=6, n_best=6)), strict=True):
        texts = [found.text for found in every.n_best]
        shares = quality.normalize_log_probs([found.log_prob for found in every.n_best])
        assert one.text == texts[quality.compute_expected_chrf(texts, shares).argmax()]
        assert len(one.n_best) == 2
    drawn = trained_translator.translate(
        ODD, SearchOptions(sampling=SamplingOptions(temperature=2.0)), mbr_candidates=8
    )
    every = trained_translator.translate(ODD, SearchOptions(sampling=SamplingOptions(temperature=2.0), n_best=8))
    for one, some in zip(drawn, every, strict=True):
        texts = [found.text for found in some.n_best]
        assert one.text == texts[quality.compute_expected_chrf(texts).argmax()]
    with pytest.raises(TranslationError, match="`mbr_candidates` must be at least `n_best`=4, but is 2"):
        trained_translator.translate(ODD, SearchOptions(n_best=4), mbr_candidates=2)


def test_a_head_that_attends_evenly_is_reported(model: Seq2Seq, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    even = Translator(copy.deepcopy(model), tokenizer(), notify=messages.append)
    for layer in find_cross_layers(even.model):
        torch.nn.init.zeros_(layer.query.weight)
    (translation,) = even.translate(TEXTS[:1], alignment=True)
    assert translation.alignment is not None
    assert translation.alignment.links == ()
    assert len(translation.alignment.unreliable_links) == len(translation.text.split())
    assert len(messages) == 1
    assert "more than half of the words have no reliable alignment" in messages[0]
    monkeypatch.setattr("attent.decoding.alignment.MIN_SHARPNESS", -1.0)
    even._notified.clear()
    even.translate(TEXTS[:1], alignment=True)
    assert len(messages) == 1


def test_an_alignment_links_every_target_word(trained_translator: Translator) -> None:
    texts = [TEXTS[0], "", f"{TEXTS[1]} {TEXTS[2]}"]
    plain, aligned = (
        trained_translator.translate(texts, alignment=wanted, split_sentences=True) for wanted in (False, True)
    )
    assert [one.text for one in plain] == [one.text for one in aligned]
    assert not any("alignment" in vars(one) for one in plain)  # computed when it is first used
    assert [one.alignment for one in plain] == [vars(one)["alignment"] for one in aligned]
    for one in aligned:
        assert [target for _, target in one.alignment.all_links] == list(range(len(one.text.split())))
        assert all(0 <= source < len(one.source.split()) for source, _ in one.alignment.all_links)
        assert all(len(row) == len(one.source.split()) for row in one.alignment.weights)
    first = len(TEXTS[1].split())
    parts = [trained_translator.translate([text], alignment=True)[0].alignment for text in TEXTS[1:3]]
    words = len(translate_to_texts(trained_translator, [TEXTS[1]])[0].split())
    moved = tuple((source + first, target + words) for source, target in parts[1].all_links)
    assert aligned[2].alignment.all_links == parts[0].all_links + moved


# --- models ----------------------------------------------------------------------------------------------------------


def test_an_ensemble_of_equal_models_equals_the_model(trained_translator: Translator, model: Seq2Seq) -> None:
    twice = Translator(Ensemble([model, model]), trained_translator.tokenizer)
    search = SearchOptions(n_best=4)
    for one, other in zip(trained_translator.translate(ODD, search), twice.translate(ODD, search), strict=True):
        assert [found.tokens for found in one.n_best] == [found.tokens for found in other.n_best]
        assert [found.score for found in one.n_best] == pytest.approx([found.score for found in other.n_best], abs=1e-6)
    assert "".join(twice.stream(ODD[0])) == translate_to_texts(trained_translator, ODD[:1])[0]
    assert (
        twice.translate(ODD[:1], alignment=True)[0].alignment
        == trained_translator.translate(ODD[:1], alignment=True)[0].alignment
    )


def test_one_or_several_folders_are_loaded(trained_translator: Translator, model: Seq2Seq, tmp_path: Path) -> None:
    write_model(tmp_path / "one", model.float(), trained_translator.tokenizer)
    model.double()
    wanted = translate_to_texts(trained_translator, TEXTS)
    one = Translator.load(tmp_path / "one", device="cpu", engine="torch")
    assert translate_to_texts(one, TEXTS) == wanted
    assert one.folder == tmp_path / "one"
    two = Translator.load(tmp_path / "one", tmp_path / "one", device="cpu")
    assert translate_to_texts(two, TEXTS) == wanted


def test_bfloat16_is_chosen_on_gpus_that_support_it(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {"cuda:0": (7, 5), "cuda:1": (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[str(device)])
    assert translator.choose_dtype(torch.device("cuda:0")) == "float32"
    assert translator.choose_dtype(torch.device("cuda:1")) == "bfloat16"
    assert translator.choose_dtype(torch.device("cpu")) == "float32"
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert translator.choose_dtype(torch.device("cuda:1")) == "float32"


def test_weights_for_ctranslate2_are_loaded_in_float32(
    trained_translator: Translator, model: Seq2Seq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "one", model.float(), trained_translator.tokenizer)
    model.double()
    choose = {"ctranslate2": "float32"}
    monkeypatch.setattr(translator, "choose_dtype", lambda device, engine: choose.get(engine, "bfloat16"))
    formats = {
        engine: next(Translator.load(tmp_path / "one", device="cpu", engine=engine).model.parameters()).dtype
        for engine in (None, "torch", "ctranslate2")
    }
    assert formats == {None: torch.bfloat16, "torch": torch.bfloat16, "ctranslate2": torch.float32}


def test_bound_token_count_is_an_upper_bound(trained_translator: Translator) -> None:
    some = [*TEXTS, *ODD, "xqz" * 9, "a  b", "\u00e4\u4e2d\U0001f600", "~"]
    counts = [len(row) for row in trained_translator.tokenizer.source.encode(some)]
    assert all(count <= translator.bound_token_count(text) for count, text in zip(counts, some, strict=True))


def test_the_smallest_batch_is_one_token(model: Seq2Seq) -> None:
    assert translate_to_texts(Translator(model, tokenizer(), batch_tokens=1), TEXTS[:2]) == translate_to_texts(
        Translator(model, tokenizer()), TEXTS[:2]
    )
    with pytest.raises(TranslationError, match="`batch_tokens` must be 1 or more, but is 0"):
        Translator(model, tokenizer(), batch_tokens=0)


def test_an_unknown_dtype_is_rejected() -> None:
    for name in ("float64", "int8", ""):
        with pytest.raises(InputError, match="`dtype` must be one of float32, bfloat16, float16, but is"):
            resolve_device_and_dtype("cpu", name)


def test_rows_of_a_batch_fit_into_memory() -> None:
    cpu = torch.device("cpu")
    assert compute_max_rows(2**20, cpu, 128, 4096) == 128
    assert compute_max_rows(2**23, cpu, 128, 4096) == 128
    assert compute_max_rows(2**24, cpu, 128, 4096) == 64
    assert compute_max_rows(2**20, torch.device("mps"), 128, 4096) == 2048
    assert compute_max_rows(2**10, torch.device("mps"), 128, 4096) == 4096


def test_continuations_are_never_suppressed_tokens(trained_translator: Translator) -> None:
    request = SearchRequest(source_ids=trained_translator.tokenizer.encode_source(TEXTS[:1])[0], max_length=9)
    tokens = trained_translator._get_next_tokens(request, 10**6)
    config, target = trained_translator.model.config, trained_translator.tokenizer.target
    assert {config.start_id, config.end_id, target.pad}.isdisjoint(tokens)
    assert set(range(4, target.size)) - set(tokens) <= {target.start, target.end, target.pad, target.unknown}
    assert trained_translator._get_next_tokens(request, 2) == tokens[:2]


@pytest.mark.parametrize(
    ("folders", "changes", "words"),
    [
        ((), {}, "there must be a model to translate with, but none is named"),
        (("x",), {"engine": "fast"}, "`engine` must be one of torch, ctranslate2, but is 'fast'"),
    ],
)
def test_invalid_load_arguments_are_rejected(folders: tuple[str, ...], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TranslationError, match=words):
        Translator.load(*folders, **changes)


@pytest.fixture
def marian(tmp_path: Path) -> Path:
    """A random Marian model with its tokenizer; as published, the decoder starts with the padding token."""
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


def test_a_marian_folder_is_loaded(marian: Path) -> None:
    trained_translator = Translator.load(marian, device="cpu", engine="torch")
    trained_translator.model.double()
    of, search = trained_translator.tokenizer, SearchOptions(n_best=2, max_length=12)
    got = trained_translator.translate(TEXTS, search, prevent_loops=False)
    source, lengths = pad_rows(of.encode_source(TEXTS), of.source.pad)
    config = trained_translator.model.config
    never = find_suppressed_tokens(config, of)
    wanted = beam_search(
        trained_translator.model,
        source,
        lengths,
        start_id=config.start_id,
        end_id=config.end_id,
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
    assert "".join(trained_translator.stream(TEXTS[0], search)).strip() == got[0].text
    (kept,) = trained_translator.translate(
        TEXTS[:1], search, constraints=PhraseConstraints(prefix="Ein", ban=("Mann",))
    )
    assert kept.text.startswith("Ein")


def test_continuations_obey_constraints(trained_translator: Translator) -> None:
    wanted = trained_translator.suggest_continuations(TEXTS[0], "Ein ", 6)
    words = {word.strip(".,") for one in wanted for word in one.text.split()[1:2]}
    for word in words - {"Ein"}:
        kept = trained_translator.suggest_continuations(TEXTS[0], PhraseConstraints(prefix="Ein ", ban=(word,)), 6)
        assert all(word not in re.findall(r"\w+", one.text) for one in kept)


def test_glossary_terms_may_be_a_mapping(trained_translator: Translator) -> None:
    terms = {"dog": "Pudel"}
    assert translate_to_texts(trained_translator, TEXTS, glossary=terms) == translate_to_texts(
        trained_translator, TEXTS, glossary=Glossary.from_terms(terms)
    )
    with pytest.raises(InputError, match="must be strings, but one is of type int"):
        trained_translator.translate(["A dog.", 3])


def test_min_length_must_be_less_than_max_length() -> None:
    with pytest.raises(ValueError, match="`min_length` must be less than `max_length`=5"):
        SearchOptions(min_length=5, max_length=5)
