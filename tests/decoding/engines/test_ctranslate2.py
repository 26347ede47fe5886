"""The CTranslate2 engine gives the hypotheses and scores of a plain search, or says why it does not."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attent.decoding.engines import ctranslate2
from attent.decoding.engines.ctranslate2 import CTranslate2Engine
from attent.decoding.options import Hypothesis, SamplingOptions, SearchOptions, SearchRequest
from attent.decoding.translator import Translator
from attent.interop import ctranslate2 as converter
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.seq2seq import find_suppressed_tokens
from attent.nn import LearnedConfig, StackConfig
from attent.storage.manifest import hash_file, write_manifest
from attent.training.autoconfig import fit_to_tokenizer
from tests.text.corpus import tokenizer

pytest.importorskip("ctranslate2")

VOCAB, START, END = 40, 1, 2
TOY = StackConfig(layers=1, width=32, heads=4, ffn_width=40, dropout=0.0)


def make_model(seed: int = 0, ends: float = 4.0, sharp: float = 2.0, **stack: Any) -> Seq2Seq:
    """Random weights; `ends` makes the end likelier, `sharp` makes distributions peaked."""
    torch.manual_seed(seed)
    encoder = replace(TOY, **stack)
    decoder = replace(encoder, causal=True, cross_attention=True)
    model = Seq2Seq(Seq2SeqConfig(vocab=VOCAB, encoder=encoder, decoder=decoder, output_bias=True, tie_output=False))
    assert model.output.bias is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        model.output.weight *= sharp
        model.output.bias[END] += ends
    return model.eval()


def open_engine(model: Seq2Seq, **options: Any) -> CTranslate2Engine:
    return CTranslate2Engine(model, None, **{"compute_type": "float32", "threads": 1, **options})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTENT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_sources(count: int = 12, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[*(rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 12))), END] for _ in range(count)]


def compute_log_probs(model: Seq2Seq, source: list[int], targets: list[tuple[int, ...]]) -> torch.Tensor:
    """Return the log-probabilities (N, V) of the token after each target; the start is suppressed."""
    read = torch.tensor([[START, *target] for target in targets])
    with torch.no_grad():
        logits = model(torch.tensor([source]).expand(len(read), -1), read)[:, -1].double()
    logits[:, START] = float("-inf")
    return logits.log_softmax(-1)


def search_plainly(model: Seq2Seq, request: SearchRequest, search: SearchOptions) -> list[Hypothesis]:
    """Beam search for one source, without a cache."""
    K, ended = search.beam_size, list[Hypothesis]()
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(request.max_length):
        gains = compute_log_probs(model, list(request.source_ids), [ids for ids, _ in beams])
        grown = [
            ((*ids, token), total + gain)
            for (ids, total), row in zip(beams, gains.tolist(), strict=True)
            for token, gain in enumerate(row)
        ]
        grown = sorted(grown, key=lambda hypothesis: -hypothesis[1])[: 2 * K]
        ended += [make_hypothesis(ids, total, search) for ids, total in grown[:K] if ids[-1] == END]
        beams = [hypothesis for hypothesis in grown if hypothesis[0][-1] != END][:K]
        if len(ended) >= round(K * (search.patience or ctranslate2.DEFAULT_PATIENCE)) or (K == 1 and ended):
            beams = []
            break
    cut = [make_hypothesis(ids, total, search) for ids, total in beams]
    return sorted([*ended, *cut], key=lambda hypothesis: (not hypothesis.is_finished, -hypothesis.score))[
        : search.n_best
    ]


def make_hypothesis(ids: tuple[int, ...], total: float, search: SearchOptions) -> Hypothesis:
    ended = ids[-1] == END
    score = total / search.compute_score_divisor(len(ids))
    return Hypothesis(token_ids=ids[:-1] if ended else ids, log_prob=total, score=score, is_finished=ended)


def is_same(results: list[Hypothesis], expected: list[Hypothesis]) -> bool:
    alike = [(hypothesis.token_ids, hypothesis.is_finished) for hypothesis in results] == [
        (hypothesis.token_ids, hypothesis.is_finished) for hypothesis in expected
    ]
    return alike and all(
        abs(a.log_prob - b.log_prob) < 1e-4 and abs(a.score - b.score) < 1e-4
        for a, b in zip(results, expected, strict=True)
    )


# --- the same as a plain search ------------------------------------------------------------------------------------

SEARCHES = {
    "greedy": SearchOptions(beam_size=1),
    "greedy, Wu": SearchOptions(beam_size=1, length_penalty_type="wu"),
    "default": SearchOptions(),
    "4 best": SearchOptions(n_best=4, patience=1.0),
    "no penalty": SearchOptions(beam_size=3, n_best=2, length_penalty_type="none", patience=1.0),
    "exponent 0": SearchOptions(beam_size=3, n_best=3, length_penalty=0.0, patience=1.0),
    "prefers long": SearchOptions(beam_size=5, n_best=3, length_penalty=2.0, patience=1.5),
}


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize(("seed", "ends"), [(1, 3.0), (2, 5.0), (3, 7.0)])
def test_results_match_a_plain_search(name: str, seed: int, ends: float, tmp_path: Path) -> None:
    model, search = make_model(seed, ends), SEARCHES[name]
    rng = random.Random(seed)
    requests = [
        SearchRequest(source_ids=source, max_length=rng.choice([3, 8, len(source) + 9]))
        for source in make_sources(8, seed)
    ]
    engine = open_engine(model)
    assert engine.find_unsupported_reason(search, requests) is None
    results = list(engine.search(requests, search))
    assert sorted(index for index, _ in results) == list(range(len(requests)))
    wrong = [index for index, best in results if not is_same(best, search_plainly(model, requests[index], search))]
    assert not wrong


@pytest.mark.parametrize(
    "search", [SearchOptions(length_penalty=0.0), SearchOptions(length_penalty_type="none"), SearchOptions(beam_size=1)]
)
def test_a_zero_exponent_is_passed_as_a_tiny_one(search: SearchOptions) -> None:
    # With 0 CTranslate2 continues until the best hypothesis has finished, however many others have.
    assert 0 < ctranslate2.get_length_exponent(search) < 1e-9
    assert 29 ** ctranslate2.get_length_exponent(search) == pytest.approx(1, abs=1e-9)


def test_each_request_keeps_its_maximum_length(tmp_path: Path) -> None:
    model = make_model(ends=2.0)
    source = make_sources(1)[0]
    requests = [SearchRequest(source_ids=source, max_length=limit) for limit in (1, 2, 3, 5, 8, 13, 40)]
    results = dict(open_engine(model).search(requests, SearchOptions(n_best=4)))
    assert all(
        len(hypothesis.token_ids) + hypothesis.is_finished <= request.max_length
        for i, request in enumerate(requests)
        for hypothesis in results[i]
    )
    assert all(
        is_same(results[i], search_plainly(model, request, SearchOptions(n_best=4)))
        for i, request in enumerate(requests)
    )


def test_truncated_hypotheses_rank_behind_finished_ones(tmp_path: Path) -> None:
    model, search = make_model(4, ends=3.0), SearchOptions(length_penalty=3.0, patience=1.0)
    requests = [SearchRequest(source_ids=source, max_length=6) for source in make_sources(40)]
    results = dict(open_engine(model).search(requests, search))
    expected = [search_plainly(model, request, replace(search, n_best=4)) for request in requests]
    assert any(
        best[0].is_finished and best[0].score < best[-1].score for best in expected
    )  # otherwise the test is too weak
    assert all(is_same(results[i], best[:1]) for i, best in enumerate(expected))


def test_results_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    engine = open_engine(make_model(5))
    requests = [SearchRequest(source_ids=source, max_length=20) for source in make_sources(40)]
    together = dict(engine.search(requests, SearchOptions()))
    assert all(
        is_same(together[i], next(engine.search([request], SearchOptions()))[1]) for i, request in enumerate(requests)
    )


def test_a_model_that_cannot_end_is_truncated(tmp_path: Path) -> None:
    requests = [SearchRequest(source_ids=source, max_length=7) for source in make_sources()]
    model = make_model(ends=-1e4)
    results = dict(open_engine(model).search(requests, SearchOptions(n_best=2)))
    assert all(
        not hypothesis.is_finished and len(hypothesis.token_ids) == 7
        for best in results.values()
        for hypothesis in best
    )
    assert all(
        is_same(results[i], search_plainly(model, request, SearchOptions(n_best=2)))
        for i, request in enumerate(requests)
    )


def score_hypothesis(model: Seq2Seq, source: list[int], hypothesis: Hypothesis) -> float:
    """The log-probability by forced decoding."""
    written = [*hypothesis.token_ids, END] if hypothesis.is_finished else list(hypothesis.token_ids)
    rows = [compute_log_probs(model, source, [tuple(written[:i])])[0, token] for i, token in enumerate(written)]
    return float(sum(rows))


# --- refusals ------------------------------------------------------------------------------------------------------

REFUSED = {
    "does not sample": (SearchOptions(sampling=SamplingOptions()), {}),
    "guard against loops": (SearchOptions(), {"forbid_loops": True}),
    "diverse beam search": (SearchOptions(beam_groups=2), {}),
    "length penalty of Wu": (SearchOptions(length_penalty_type="wu"), {}),
    "under a minimum length": (SearchOptions(min_length=3), {}),
    "without repeated n-grams": (SearchOptions(no_repeat_ngram_size=2), {}),
    "needs 2 x 20 candidate tokens, but this model has 39": (SearchOptions(beam_size=20), {}),
    "required phrases": (SearchOptions(), {"required_phrases": ((5,),)}),
    "banned phrases": (SearchOptions(), {"banned_phrases": ("word",)}),
    "probability of a prefix": (SearchOptions(), {"prefix_ids": (5,)}),
    "has 2,048 positions, and a text needs 2,049": (SearchOptions(), {"max_length": 2049}),
    "a text needs 3,001": (SearchOptions(), {"source_ids": [5] * 3000 + [END]}),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> CTranslate2Engine:
    return open_engine(make_model(), use_cache=False)


@pytest.mark.parametrize("words", REFUSED)
def test_unsupported_searches_are_refused(words: str, engine: CTranslate2Engine) -> None:
    search, request = REFUSED[words]
    assert words in (
        engine.find_unsupported_reason(
            search,
            [
                SearchRequest(source_ids=[5, END], max_length=9),
                SearchRequest(**{"source_ids": [5, END], "max_length": 9, **request}),
            ],
        )
        or ""
    )


def test_requests_at_the_limits_are_supported(engine: CTranslate2Engine) -> None:
    for options, changes in ((SearchOptions(beam_size=19), {}), (SearchOptions(), {"max_length": 2048})):
        request = SearchRequest(**{"source_ids": [5] * 2047 + [END], "max_length": 9, **changes})
        assert engine.find_unsupported_reason(options, [request]) is None


def test_a_new_option_is_refused(engine: CTranslate2Engine) -> None:
    @dataclass(frozen=True, kw_only=True)
    class NewOptions(SearchOptions):
        coverage_penalty: float = 0.0

    requests = [SearchRequest(source_ids=[5, END], max_length=9)]
    assert engine.find_unsupported_reason(NewOptions(), requests) is None
    reason = engine.find_unsupported_reason(NewOptions(coverage_penalty=0.2), requests)
    assert reason == "does not support `coverage_penalty`"


def test_text_beyond_learned_positions_is_refused(tmp_path: Path) -> None:
    engine = open_engine(make_model(positions=LearnedConfig(max_length=10)))
    assert (
        engine.find_unsupported_reason(SearchOptions(), [SearchRequest(source_ids=[5] * 9 + [END], max_length=10)])
        is None
    )
    assert (
        engine.find_unsupported_reason(SearchOptions(), [SearchRequest(source_ids=[5, END], max_length=11)]) is not None
    )


def test_a_source_of_more_than_a_thousand_tokens_is_not_truncated(tmp_path: Path) -> None:
    model, search = make_model(9), SearchOptions(beam_size=1, max_length=3)
    requests = [SearchRequest(source_ids=[5] * 1500 + [last, END], max_length=3) for last in (6, 7, 8)]
    results = dict(open_engine(model).search(requests, search))
    assert all(is_same(results[i], search_plainly(model, request, search)) for i, request in enumerate(requests))


# --- the conversion ------------------------------------------------------------------------------------------------


def is_converted_again(model: Seq2Seq, monkeypatch: pytest.MonkeyPatch) -> bool:
    written: list[Any] = []
    real = converter.write_conversion

    def write(*arguments: Any, **options: Any) -> None:
        written.append(arguments)
        real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(converter, "write_conversion", write)
        open_engine(model)
    return bool(written)


def list_cached(cache: Path) -> list[Path]:
    return sorted((cache / "ctranslate2").iterdir())


def test_a_conversion_is_made_once_and_kept_in_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_converted_again(make_model(), monkeypatch)
    assert not is_converted_again(make_model(), monkeypatch)
    (path,) = list_cached(cache)
    assert (path / "model.bin").exists()
    assert is_converted_again(make_model(1), monkeypatch)
    assert len(list_cached(cache)) == 2


def test_nothing_is_kept_without_the_cache(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = open_engine(make_model(), use_cache=False)
    assert not list(tmp_path.iterdir())
    check_search(engine, make_model())


def check_search(engine: CTranslate2Engine, model: Seq2Seq) -> None:
    """The engine translates as this model does."""
    requests = [SearchRequest(source_ids=source, max_length=20) for source in make_sources(4)]
    results = dict(engine.search(requests, SearchOptions()))
    assert all(is_same(results[i], search_plainly(model, each, SearchOptions())) for i, each in enumerate(requests))


def test_a_damaged_conversion_is_renewed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_engine(make_model())
    weights = list_cached(cache)[0] / "model.bin"
    content = bytearray(weights.read_bytes())
    content[-500] ^= 64
    weights.write_bytes(content)
    assert is_converted_again(make_model(), monkeypatch)
    assert weights.read_bytes() != bytes(content)


@pytest.mark.parametrize("how", ["a file", "a folder that cannot be written to", "a full disk"])
def test_a_cache_that_cannot_be_written_is_not_needed(
    how: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = converter.write_synced
    if how == "a file":
        cache.write_text("not a folder")
    elif how == "a full disk":

        def write(path: Path, content: bytes) -> None:
            if cache in path.parents:
                raise OSError(28, "No space left on device")
            real(path, content)

        monkeypatch.setattr(converter, "write_synced", write)
    else:

        def make_folder(path: Path) -> None:
            if cache in path.parents:
                raise PermissionError(13, "Permission denied", str(path))
            path.mkdir(parents=True, exist_ok=True)

        monkeypatch.setattr(converter, "make_folder", make_folder)
    check_search(open_engine(make_model()), make_model())
    assert not cache.is_dir() or not list(cache.rglob("model.bin"))


def test_a_conversion_in_the_model_folder_is_ignored(tmp_path: Path, cache: Path) -> None:
    """It says that it is one of these weights, and its checksums match, but it is one of others."""
    model, of, messages = make_translator_model(1), tokenizer(), list[str]()
    poisoned = tmp_path / "ctranslate2-int8"
    converter.write_conversion(make_translator_model(2), of, poisoned)
    suppressed = find_suppressed_tokens(model.config, of)
    origin = {"fingerprint": converter.compute_fingerprint(model, of, "int8", suppressed), "quantization": "int8"}
    (poisoned / converter.ORIGIN_FILE).write_text(json.dumps(origin))
    (poisoned / converter.CHECKSUMS_FILE).unlink()
    hashes = {path.name: hash_file(path) for path in sorted(poisoned.iterdir())}
    write_manifest(poisoned / converter.CHECKSUMS_FILE, hashes)
    assert converter.is_intact(poisoned, origin["fingerprint"])  # it vouches for itself

    def translate(folder: Path | None) -> list[str]:
        translator = Translator(model, of, folder=folder, engine="ctranslate2", threads=1, notify=messages.append)
        return [translation.text for translation in translator.translate(["A dog.", "Two dogs walk."])]

    assert translate(tmp_path) == translate(None)
    assert len(list_cached(cache)) == 1


def make_translator_model(seed: int) -> Seq2Seq:
    torch.manual_seed(seed)
    config = Seq2SeqConfig(vocab=9, encoder=TOY, decoder=replace(TOY, causal=True, cross_attention=True))
    return Seq2Seq(fit_to_tokenizer(config, tokenizer())).eval()


def test_unused_conversions_are_removed(cache: Path) -> None:
    for seed in (1, 2):
        open_engine(make_model(seed))
    old, recent = list_cached(cache)
    os.utime(old, (time.time() - 2 * ctranslate2.MAX_UNUSED_SECONDS,) * 2)
    open_engine(make_model(3))
    assert old not in list_cached(cache)
    assert recent in list_cached(cache)


def test_conversions_at_the_same_time_do_not_collide(cache: Path) -> None:
    model = make_model()
    with ThreadPoolExecutor(6) as pool:
        engines = list(pool.map(lambda _: open_engine(model), range(6)))
    for engine in engines:
        check_search(engine, model)
    assert [path for path in list_cached(cache) if (path / "model.bin").exists()] == list_cached(cache)
    assert len(list_cached(cache)) == 1


def test_int8_is_near_the_model(tmp_path: Path) -> None:
    model = make_model(3, sharp=4.0)
    requests = [SearchRequest(source_ids=source, max_length=20) for source in make_sources(30)]
    exact = dict(open_engine(model).search(requests, SearchOptions()))
    near = dict(open_engine(model, compute_type="int8").search(requests, SearchOptions()))
    assert sum(exact[i][0].token_ids == near[i][0].token_ids for i in exact) >= len(requests) / 2
    off = [
        abs(near[i][0].log_prob - score_hypothesis(model, list(request.source_ids), near[i][0]))
        for i, request in enumerate(requests)
    ]
    assert 1e-4 < sum(off) / len(off) < 0.5
