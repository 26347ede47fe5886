"""Options at their limits: the last valid value is accepted, the next one is refused by name."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from attent.decoding.options import (
    NO_CONSTRAINTS,
    GenerationOptions,
    PhraseConstraints,
    SamplingOptions,
    SearchKeywords,
    SearchOptions,
)
from attent.decoding.translator import TranslateKeywords, Translator

INFINITY = float("inf")
# class, settings, field, (valid values), (invalid values)
LIMITS: list[tuple[Any, dict[str, Any], str, tuple[Any, ...], tuple[Any, ...]]] = [
    (SamplingOptions, {}, "temperature", (1e-9, 100.0), (0.0, -1.0, INFINITY)),
    (SamplingOptions, {}, "top_k", (0, 1), (-1,)),
    (SamplingOptions, {}, "top_p", (1e-9, 1.0), (0.0, 1.001)),
    (SearchOptions, {}, "beam_size", (1, 500), (0, -1)),
    (SearchOptions, {"beam_size": 3}, "n_best", (1, 3), (0, 4)),
    (SearchOptions, {"beam_size": 6}, "beam_groups", (1, 2, 3, 6), (0, 4, 12)),
    (SearchOptions, {}, "length_penalty", (0.0, 3.0), (-0.1, INFINITY)),
    (SearchOptions, {}, "length_penalty_type", ("avg", "wu", "none"), ("sum", "")),
    (SearchOptions, {}, "max_length", (None, 1), (0,)),
    (SearchOptions, {"max_length": 5}, "min_length", (0, 4), (-1, 5)),
    (SearchOptions, {}, "no_repeat_ngram_size", (0, 1), (-1,)),
    (SearchOptions, {}, "patience", (None, 1.0), (0.99, INFINITY)),
    (SearchOptions, {}, "diversity_penalty", (0.0,), (-0.1,)),
    (GenerationOptions, {}, "max_new_tokens", (1,), (0,)),
    (GenerationOptions, {}, "temperature", (0.0, 1e-9), (-1e-9, INFINITY)),
    (GenerationOptions, {}, "top_p", (1e-9, 1.0), (0.0, 1.001)),
    (GenerationOptions, {}, "top_k", (0,), (-1,)),
    (GenerationOptions, {}, "n", (1, 5), (0, -1)),
    (GenerationOptions, {"temperature": 0.0}, "n", (1,), (0, 2)),
    (GenerationOptions, {}, "stop", ((), ("\n",)), (("",), ("a", ""))),
]


@pytest.mark.parametrize(("kind", "settings", "name", "valid", "invalid"), LIMITS, ids=lambda value: str(value)[:40])
def test_limits(
    kind: Any, settings: dict[str, Any], name: str, valid: tuple[Any, ...], invalid: tuple[Any, ...]
) -> None:
    for value in valid:
        assert getattr(kind(**settings, **{name: value}), name) == value
    for value in invalid:
        with pytest.raises(ValueError, match=f"`{name}`"):
            kind(**settings, **{name: value})


def test_sampled_texts_may_outnumber_the_beams() -> None:
    assert SearchOptions(beam_size=1, n_best=5, sampling=SamplingOptions()).n_best == 5
    assert GenerationOptions(n=5).sampling == SamplingOptions(temperature=0.8, top_p=0.95, seed=1)
    assert GenerationOptions(temperature=0).sampling is None


def test_length_penalties_at_length_0_and_above() -> None:
    average, wu, none = (SearchOptions(length_penalty=2.0, length_penalty_type=kind) for kind in ("avg", "wu", "none"))  # type: ignore[arg-type]
    assert [average.compute_score_divisor(length) for length in (0, 1, 3)] == [1, 1, 9]
    assert [wu.compute_score_divisor(length) for length in (1, 7)] == [1, 4]
    assert none.compute_score_divisor(7) == 1
    assert average.score_formula == "score = log_prob / length^alpha, alpha = 2"
    assert none.score_formula == "score = log_prob"


def test_the_maximum_length_follows_the_source_unless_it_is_set() -> None:
    assert [SearchOptions().compute_max_length(length) for length in (0, 7)] == [50, 57]
    assert [SearchOptions(max_length=9).compute_max_length(length) for length in (0, 70)] == [9, 9]


@pytest.mark.parametrize(
    ("prefix", "is_partial", "ends_word"),
    [
        ("", False, False),
        ("Ein", False, True),
        ("Ein", True, False),
        ("Ein ", False, True),
        ("Ein ", True, True),
        ("Ein „", False, False),
    ],
)
def test_a_prefix_ends_a_word(prefix: str, is_partial: bool, ends_word: bool) -> None:
    assert PhraseConstraints(prefix=prefix, prefix_is_partial=is_partial).prefix_ends_word == ends_word


def test_constraints_without_additions_stay_the_same_object() -> None:
    assert NO_CONSTRAINTS.extend() is NO_CONSTRAINTS
    assert NO_CONSTRAINTS.extend(prefix="") == NO_CONSTRAINTS
    base = PhraseConstraints(prefix="Ein", prefix_is_partial=True, require=("a",), ban=("b",))
    assert base.extend(require=["c"], ban=["d"]) == PhraseConstraints(
        prefix="Ein", prefix_is_partial=True, require=("a", "c"), ban=("b", "d")
    )
    assert base.extend(prefix="") == PhraseConstraints(require=("a",), ban=("b",))


def test_keywords_have_the_names_and_types_of_the_declaration() -> None:
    declared = {
        field.name: get_type_hints(kind)[field.name]
        for kind in (SearchOptions, SamplingOptions)
        for field in fields(kind)
        if "option" in field.metadata
    }
    assert get_type_hints(SearchKeywords) == declared
    for method in (Translator.translate, Translator.stream, Translator.stream_async):
        parameters = inspect.signature(method).parameters
        assert [name for name in parameters if name in declared] == list(declared)
        assert parameters["beam_size"].default == 4
        assert "divide the logits by this" in (method.__doc__ or "")


def test_translate_takes_the_keywords_of_its_overloads() -> None:
    parameters = dict(inspect.signature(Translator.translate).parameters)
    for name in ("self", "text", "options"):
        del parameters[name]
    assert set(parameters) == set(TranslateKeywords.__annotations__)


def test_dir_shows_a_user_what_there_is() -> None:
    assert [name for name in dir(Translator) if not name.startswith("_")] == [
        "context", "describe_wrong_language", "device", "hold_device", "language_identifier", "load", "search",
        "search_batch", "stream", "stream_async", "stream_sentences", "suggest_continuations", "translate",
        "use_torch_engine", "with_adapter",
    ]  # fmt: skip
