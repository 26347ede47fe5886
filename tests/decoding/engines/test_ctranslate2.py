"""The CTranslate2 engine beside a plain search: the same hypotheses, scores and limits, or a refusal in words."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attent.decoding.engines import ctranslate2
from attent.decoding.engines.ctranslate2 import CTranslate2Engine
from attent.decoding.options import Hypothesis, SamplingOptions, SearchOptions, SearchRequest
from attent.interop import ctranslate2 as conversion
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.nn import LearnedConfig, StackConfig
from attent.storage.errors import FolderError

pytest.importorskip("ctranslate2")

VOCAB, START, END = 40, 1, 2
TOY = StackConfig(layers=1, width=32, heads=4, ffn_width=40, dropout=0.0)


def model(seed: int = 0, ends: float = 4.0, sharp: float = 2.0, **stack: Any) -> Seq2Seq:
    """Weights by chance: `ends` makes ends likelier, `sharp` tells likely tokens from unlikely ones."""
    torch.manual_seed(seed)
    encoder = replace(TOY, **stack)
    decoder = replace(encoder, causal=True, cross_attention=True)
    made = Seq2Seq(Seq2SeqConfig(vocab=VOCAB, encoder=encoder, decoder=decoder, output_bias=True, tie_output=False))
    assert made.output.bias is not None
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        made.output.weight *= sharp
        made.output.bias[END] += ends
    return made.eval()


def open_engine(made: Seq2Seq, folder: Path | None, **options: Any) -> CTranslate2Engine:
    return CTranslate2Engine.open(folder, made, None, **{"compute_type": "float32", "threads": 1, **options})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTENT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def sources(count: int = 12, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [[*(chance.randrange(3, VOCAB) for _ in range(chance.randrange(1, 12))), END] for _ in range(count)]


def log_probs(made: Seq2Seq, source: list[int], targets: list[tuple[int, ...]]) -> torch.Tensor:
    """(N, V) of what comes behind each target; the start is never written."""
    read = torch.tensor([[START, *target] for target in targets])
    with torch.no_grad():
        logits = made(torch.tensor([source]).expand(len(read), -1), read)[:, -1].double()
    logits[:, START] = float("-inf")
    return logits.log_softmax(-1)


def search_plainly(made: Seq2Seq, job: SearchRequest, search: SearchOptions) -> list[Hypothesis]:
    """Beam search as one would write it down: one source, nothing kept between steps."""
    K, ended = search.beam_size, list[Hypothesis]()
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(job.max_length):
        gains = log_probs(made, list(job.source_ids), [ids for ids, _ in beams])
        grown = [
            ((*ids, token), total + gain)
            for (ids, total), row in zip(beams, gains.tolist(), strict=True)
            for token, gain in enumerate(row)
        ]
        grown = sorted(grown, key=lambda one: -one[1])[: 2 * K]
        ended += [make_hypothesis(ids, total, search) for ids, total in grown[:K] if ids[-1] == END]
        beams = [one for one in grown if one[0][-1] != END][:K]
        if len(ended) >= round(K * (search.patience or ctranslate2.DEFAULT_PATIENCE)) or (K == 1 and ended):
            beams = []
            break
    cut = [make_hypothesis(ids, total, search) for ids, total in beams]
    return sorted([*ended, *cut], key=lambda one: (not one.is_finished, -one.score))[: search.n_best]


def make_hypothesis(ids: tuple[int, ...], total: float, search: SearchOptions) -> Hypothesis:
    ended = ids[-1] == END
    score = total / search.compute_length_penalty(len(ids))
    return Hypothesis(token_ids=ids[:-1] if ended else ids, log_prob=total, score=score, is_finished=ended)


def is_same(found: list[Hypothesis], wanted: list[Hypothesis]) -> bool:
    alike = [(one.token_ids, one.is_finished) for one in found] == [(one.token_ids, one.is_finished) for one in wanted]
    return alike and all(
        abs(a.log_prob - b.log_prob) < 1e-4 and abs(a.score - b.score) < 1e-4
        for a, b in zip(found, wanted, strict=True)
    )


# --- the same as a plain search ------------------------------------------------------------------------------------

SEARCHES = {
    "greedy": SearchOptions(beam_size=1),
    "greedy, of Wu": SearchOptions(beam_size=1, length_penalty_type="wu"),
    "the default": SearchOptions(),
    "all of four": SearchOptions(n_best=4, patience=1.0),
    "no penalty": SearchOptions(beam_size=3, n_best=2, length_penalty_type="none", patience=1.0),
    "no exponent": SearchOptions(beam_size=3, n_best=3, length_penalty=0.0, patience=1.0),
    "long is good": SearchOptions(beam_size=5, n_best=3, length_penalty=2.0, patience=1.5),
}


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize(("seed", "ends"), [(1, 3.0), (2, 5.0), (3, 7.0)])
def test_it_finds_what_a_plain_search_finds(name: str, seed: int, ends: float, tmp_path: Path) -> None:
    made, search = model(seed, ends), SEARCHES[name]
    chance = random.Random(seed)
    jobs = [
        SearchRequest(source_ids=source, max_length=chance.choice([3, 8, len(source) + 9]))
        for source in sources(8, seed)
    ]
    engine = open_engine(made, tmp_path)
    assert engine.find_unsupported_reason(search, jobs) is None
    found = list(engine.search(jobs, search))
    assert sorted(place for place, _ in found) == list(range(len(jobs)))
    wrong = [place for place, best in found if not is_same(best, search_plainly(made, jobs[place], search))]
    assert not wrong


@pytest.mark.parametrize(
    "search", [SearchOptions(length_penalty=0.0), SearchOptions(length_penalty_type="none"), SearchOptions(beam_size=1)]
)
def test_an_exponent_of_nothing_is_never_told_as_nothing(search: SearchOptions) -> None:
    # For then CTranslate2 goes on until the best of all has ended, however many others have.
    assert 0 < ctranslate2.get_length_penalty(search) < 1e-9
    assert 29 ** ctranslate2.get_length_penalty(search) == pytest.approx(1, abs=1e-9)


def test_limits_side_by_side_are_each_kept(tmp_path: Path) -> None:
    made = model(ends=2.0)
    source = sources(1)[0]
    jobs = [SearchRequest(source_ids=source, max_length=limit) for limit in (1, 2, 3, 5, 8, 13, 40)]
    found = dict(open_engine(made, tmp_path).search(jobs, SearchOptions(n_best=4)))
    assert all(len(one.token_ids) + one.is_finished <= job.max_length for i, job in enumerate(jobs) for one in found[i])
    assert all(is_same(found[i], search_plainly(made, job, SearchOptions(n_best=4))) for i, job in enumerate(jobs))


def test_what_was_cut_comes_behind_what_ended_however_good_its_score(tmp_path: Path) -> None:
    made, search = model(4, ends=3.0), SearchOptions(length_penalty=3.0, patience=1.0)
    jobs = [SearchRequest(source_ids=source, max_length=6) for source in sources(40)]
    found = dict(open_engine(made, tmp_path).search(jobs, search))
    wanted = [search_plainly(made, job, replace(search, n_best=4)) for job in jobs]
    assert any(some[0].is_finished and some[0].score < some[-1].score for some in wanted)  # or this would show nothing
    assert all(is_same(found[i], some[:1]) for i, some in enumerate(wanted))


def test_one_alone_is_as_among_many(tmp_path: Path) -> None:
    engine = open_engine(model(5), tmp_path)
    jobs = [SearchRequest(source_ids=source, max_length=20) for source in sources(40)]
    together = dict(engine.search(jobs, SearchOptions()))
    assert all(is_same(together[i], next(engine.search([job], SearchOptions()))[1]) for i, job in enumerate(jobs))


def test_a_model_that_cannot_end_writes_to_the_limit(tmp_path: Path) -> None:
    jobs = [SearchRequest(source_ids=source, max_length=7) for source in sources()]
    made = model(ends=-1e4)
    found = dict(open_engine(made, tmp_path).search(jobs, SearchOptions(n_best=2)))
    assert all(not one.is_finished and len(one.token_ids) == 7 for best in found.values() for one in best)
    assert all(is_same(found[i], search_plainly(made, job, SearchOptions(n_best=2))) for i, job in enumerate(jobs))


# --- with a beam of one, also what CTranslate2 scores otherwise ------------------------------------------------------


def total(made: Seq2Seq, source: list[int], one: Hypothesis) -> float:
    """The model's own sum."""
    written = [*one.token_ids, END] if one.is_finished else list(one.token_ids)
    rows = [log_probs(made, source, [tuple(written[:i])])[0, token] for i, token in enumerate(written)]
    return float(sum(rows))


@pytest.mark.parametrize(
    ("prefix", "options"),
    [((7, 8, 9), {}), ((), {"min_length": 6}), ((), {"no_repeat_ngram_size": 1}), ((5,), {"min_length": 4})],
)
def test_a_beam_of_one_keeps_prefix_and_rules_and_has_the_models_sum(
    prefix: tuple[int, ...], options: dict[str, int], tmp_path: Path
) -> None:
    made, search = model(7), SearchOptions(beam_size=1, **options)
    jobs = [SearchRequest(source_ids=source, prefix_ids=prefix, max_length=15) for source in sources()]
    engine = open_engine(made, tmp_path)
    assert engine.find_unsupported_reason(search, jobs) is None
    for place, (one,) in engine.search(jobs, search):
        assert one.token_ids[: len(prefix)] == prefix
        assert len(one.token_ids) >= search.min_length
        assert not search.no_repeat_ngram_size or len(set(one.token_ids)) == len(one.token_ids)
        assert one.log_prob == pytest.approx(total(made, list(jobs[place].source_ids), one), abs=1e-4)
        assert one.score == pytest.approx(
            one.log_prob / search.compute_length_penalty(len(one.token_ids) + one.is_finished)
        )


# --- refusals ------------------------------------------------------------------------------------------------------

REFUSED = {
    "does not sample": (SearchOptions(sampling=SamplingOptions()), {}),
    "guard against loops": (SearchOptions(forbid_loops=True), {}),
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
    return open_engine(model(), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_cannot_do_just_so_it_refuses(words: str, engine: CTranslate2Engine) -> None:
    search, job = REFUSED[words]
    assert words in (
        engine.find_unsupported_reason(
            search,
            [
                SearchRequest(source_ids=[5, END], max_length=9),
                SearchRequest(**{"source_ids": [5, END], "max_length": 9, **job}),
            ],
        )
        or ""
    )


def test_a_new_option_is_refused(engine: CTranslate2Engine) -> None:
    @dataclass(frozen=True, kw_only=True)
    class NewOptions(SearchOptions):
        coverage_penalty: float = 0.0

    requests = [SearchRequest(source_ids=[5, END], max_length=9)]
    assert engine.find_unsupported_reason(NewOptions(), requests) is None
    reason = engine.find_unsupported_reason(NewOptions(coverage_penalty=0.2), requests)
    assert reason == "does not support `coverage_penalty`"


def test_text_beyond_learned_positions_is_refused(tmp_path: Path) -> None:
    engine = open_engine(model(positions=LearnedConfig(max_length=10)), tmp_path)
    assert (
        engine.find_unsupported_reason(SearchOptions(), [SearchRequest(source_ids=[5] * 9 + [END], max_length=10)])
        is None
    )
    assert (
        engine.find_unsupported_reason(SearchOptions(), [SearchRequest(source_ids=[5, END], max_length=11)]) is not None
    )


def test_text_of_more_than_a_thousand_tokens_is_not_cut(tmp_path: Path) -> None:
    made, search = model(9), SearchOptions(beam_size=1, max_length=3)
    jobs = [SearchRequest(source_ids=[5] * 1500 + [last, END], max_length=3) for last in (6, 7, 8)]
    found = dict(open_engine(made, tmp_path).search(jobs, search))
    assert all(is_same(found[i], search_plainly(made, job, search)) for i, job in enumerate(jobs))


# --- the conversion ------------------------------------------------------------------------------------------------


def is_converted_again(made: Seq2Seq, folder: Path | None, monkeypatch: pytest.MonkeyPatch) -> bool:
    written, real = [], conversion.write_conversion

    def write(*arguments: Any, **options: Any) -> None:
        written.append(arguments)
        real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_conversion", write)
        open_engine(made, folder)
    return bool(written)


def test_a_conversion_is_made_once_and_kept_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_converted_again(model(), tmp_path / "model", monkeypatch)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["ctranslate2-float32"]
    assert not is_converted_again(model(), tmp_path / "model", monkeypatch)


def test_a_stale_conversion_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_engine(model(1), tmp_path)
    assert is_converted_again(model(2), tmp_path, monkeypatch)
    job = SearchRequest(source_ids=[5, 6, END], max_length=20)
    assert is_same(
        dict(open_engine(model(2), tmp_path).search([job], SearchOptions()))[0],
        search_plainly(model(2), job, SearchOptions()),
    )


def test_a_damaged_conversion_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_engine(model(), tmp_path)
    weights = tmp_path / "ctranslate2-float32" / "model.bin"
    content = bytearray(weights.read_bytes())
    content[-500] ^= 64
    weights.write_bytes(content)
    assert is_converted_again(model(), tmp_path, monkeypatch)
    assert weights.read_bytes() != bytes(content)


@pytest.mark.parametrize("how", ["no folder", "a folder that cannot be written to"])
def test_without_a_place_beside_the_model_the_cache_keeps_it(
    how: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = None
    if how != "no folder":
        folder = tmp_path / "model"
        folder.write_text("a file, into which no folder can be put, whoever asks")
    engine = open_engine(model(), folder)
    assert engine.folder.parent == cache / "ctranslate2"
    assert not is_converted_again(model(), folder, monkeypatch)
    assert is_converted_again(model(1), folder, monkeypatch)
    assert len(list((cache / "ctranslate2").iterdir())) == 2


def test_no_place_at_all_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("neither a model's folder nor a cache")
    monkeypatch.setenv("ATTENT_CACHE", str(tmp_path / "file"))
    with pytest.raises(FolderError, match=r"file.*: the conversion could not be saved"):
        open_engine(model(), tmp_path / "file")


def test_int8_is_near_the_model(tmp_path: Path) -> None:
    made = model(3, sharp=4.0)
    jobs = [SearchRequest(source_ids=source, max_length=20) for source in sources(30)]
    exact = dict(open_engine(made, tmp_path).search(jobs, SearchOptions()))
    near = dict(open_engine(made, tmp_path, compute_type="int8").search(jobs, SearchOptions()))
    assert sum(exact[i][0].token_ids == near[i][0].token_ids for i in exact) >= len(jobs) / 2
    off = [abs(near[i][0].log_prob - total(made, list(job.source_ids), near[i][0])) for i, job in enumerate(jobs)]
    assert 1e-4 < sum(off) / len(off) < 0.5
