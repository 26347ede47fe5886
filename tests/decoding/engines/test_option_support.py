"""Engines refuse options that they do not know."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

from attent.decoding.engines import ctranslate2
from attent.decoding.engines.gpu import eligibility
from attent.decoding.options import SearchOptions, SearchRequest, find_unsupported_field

ENGINES = [ctranslate2, eligibility]


@dataclass(frozen=True, kw_only=True)
class NewOptions(SearchOptions):
    new_option: float = 0.5


@dataclass(frozen=True, kw_only=True)
class NewRequest(SearchRequest):
    new_field: tuple[int, ...] = ()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_new_option_is_refused_unless_it_has_its_default(engine: object) -> None:
    supported: frozenset[str] = engine.SUPPORTED_OPTIONS  # type: ignore[attr-defined]
    assert find_unsupported_field(NewOptions(beam_size=2), supported) is None
    assert find_unsupported_field(NewOptions(new_option=0.0), supported) == "new_option"
    supported = engine.SUPPORTED_REQUEST_FIELDS  # type: ignore[attr-defined]
    assert find_unsupported_field(NewRequest(source_ids=[4]), supported) is None
    assert find_unsupported_field(NewRequest(source_ids=[4], new_field=(3,)), supported) == "new_field"


@pytest.mark.parametrize("engine", ENGINES)
def test_supported_names_are_fields(engine: object) -> None:
    options, request_fields = ({field.name for field in fields(kind)} for kind in (SearchOptions, SearchRequest))
    assert options.issuperset(engine.SUPPORTED_OPTIONS)  # type: ignore[attr-defined]
    assert request_fields.issuperset(engine.SUPPORTED_REQUEST_FIELDS)  # type: ignore[attr-defined]


def test_an_empty_list_is_the_default_of_an_empty_tuple() -> None:
    assert find_unsupported_field(SearchRequest(source_ids=[4], prefix_ids=[]), frozenset({"source_ids"})) is None


def test_a_batch_is_supported_if_all_of_its_requests_are() -> None:
    requests = [SearchRequest(source_ids=(1, 2), max_length=5)] * 3
    assert eligibility.supports_requests([])
    assert eligibility.supports_requests(requests)
    assert not eligibility.supports_requests([*requests, SearchRequest(source_ids=(1,), banned_phrases=("x",))])
