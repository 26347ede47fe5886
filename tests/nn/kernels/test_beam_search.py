"""What a step of decoding needs, each kernel beside the plain way; the fast lane that they make, beside the search."""

from __future__ import annotations

import inspect
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

from attent.decoding.constraints.base import GeneratedTokens
from attent.decoding.constraints.min_length import MinLength
from attent.decoding.constraints.no_repeat import (
    MAX_LOOP_PERIOD,
    MIN_LOOP_REPEATS,
    MIN_LOOP_TOKENS,
    NoLoops,
    NoRepeatNgram,
    has_loop,
)
from attent.decoding.engines.gpu import beam_search, eligibility, kernels
from attent.decoding.engines.gpu.inference_model import find_unsupported_reason
from attent.decoding.engines.gpu.request_batch import HypothesisBatch, RequestBatch, get_request_lengths, sort_by_length
from attent.decoding.engines.reference import TorchEngine
from attent.decoding.options import Hypothesis, SamplingOptions, SearchOptions, SearchRequest
from attent.decoding.search import SearchContext, list_suppressed_tokens, make_suppressed_tensor, stable_topk
from attent.inspection import record
from attent.inspection.head_masking import ModelPart, mask_parts
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import AlibiConfig, LearnedConfig, Mask, StackConfig
from attent.nn.dot_product import attend_explicit
from attent.nn.kernels import INTERPRETER_MODE
from tests.decoding.toy_models import to_ids

START, END, PAD = 0, 1, 2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class SpecializedKernel:
    """A kernel in the interpreter, with what Triton does for a GPU: a whole number that is 1 becomes a constant, with
    which not all can be done that can be done with a number."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        parameters = inspect.signature(kernel.fn).parameters.values()
        self.plain = [parameter.annotation is inspect.Parameter.empty for parameter in parameters]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            given = zip(arguments, self.plain, strict=True)
            changed = [tl.constexpr(1) if plain and type(one) is int and one == 1 else one for one, plain in given]
            self.kernel[grid](*changed, **options)

        return launch


@pytest.fixture(autouse=INTERPRETER_MODE)
def specialize_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "embed_kernel",
        "add_norm_kernel",
        "attend_past_kernel",
        "attend_memory_kernel",
        "attend_packed_kernel",
        "group_max_kernel",
        "forbid_loops_kernel",
        "topk_kernel",
        "advance_rows_kernel",
        "backtrack_kernel",
    ):
        monkeypatch.setattr(kernels, f"_{name}", SpecializedKernel(getattr(kernels, f"_{name}")))


def make_rows(lengths: list[int], memory: list[int], limit: int, device: torch.device) -> Tensor:
    """As `steps` has them: each row's cache and memory behind those before it; the second row has no source."""
    rows = torch.zeros(len(lengths), kernels.ROW_FIELDS, dtype=torch.int32)
    for i, (length, tokens) in enumerate(zip(lengths, memory, strict=True)):
        before = sum(memory[:i])
        rows[i] = torch.tensor([i if i != 1 else -1, length, i * limit, before, tokens, limit, 0, 0])
    return rows.to(device)


# --- attention -------------------------------------------------------------------------------------------------------


def test_the_first_token_of_one_sees_itself(device: torch.device) -> None:
    qkv = torch.randn(1, 48, device=device)
    keys, values = torch.zeros(2, 1, 1, 16, device=device)
    rows, nobody = make_rows([0], [0], 1, device), torch.zeros(2, 1, dtype=torch.int8, device=device)
    got = kernels.attend_past(qkv, keys, values, nobody, rows, 1, 1, 0.3)
    torch.testing.assert_close(got, qkv[:, 32:])
    assert torch.equal(values[0], qkv[:, 32:])


@pytest.mark.parametrize(("K", "heads", "shared"), [(1, 2, 2), (3, 4, 2), (4, 2, 1)])
def test_each_beam_sees_the_columns_of_its_ancestors_and_its_own(
    K: int, heads: int, shared: int, device: torch.device, dtype_of: torch.dtype
) -> None:
    D, limit, lengths = 16, 40, [0, 5, 1, 17, 39]
    R, columns = len(lengths), len(lengths) * limit * K
    rows = make_rows(lengths, [0] * R, limit, device)
    qkv = torch.randn(R * K, (heads + 2 * shared) * D, device=device).to(dtype_of)
    keys, values = (torch.randn(shared, columns, D, device=device).to(dtype_of) for _ in range(2))
    past_keys, past_values = keys.clone(), values.clone()
    ancestors = torch.randint(0, K, (R, limit, K), device=device)
    for row, length in enumerate(lengths):  # up to some place all have the same
        rows[row, 7] = alike = length // 2
        ancestors[row, :alike] = ancestors[row, :alike, :1]
    table = torch.full((2, columns), 100, dtype=torch.int8, device=device)
    for row, length in enumerate(lengths):
        half = table[length % 2].view(R, limit, K)
        half[row, :length] = ancestors[row, :length].to(torch.int8)
    got = kernels.attend_past(qkv, keys, values, table, rows, K, heads, 0.3).float().view(R, K, heads, D)
    parts = qkv.float().view(R, K, heads + 2 * shared, D)
    for row, length in enumerate(lengths):
        if row == 1:
            continue
        for k in range(K):
            at = [(row * limit + t) * K + int(ancestors[row, t, k]) for t in range(length)]
            q, own_key, own_value = parts[row, k].split([heads, shared, shared])
            seen = [
                torch.cat([past[:, at].float(), own[:, None]], 1)[None]
                for past, own in ((past_keys, own_key), (past_values, own_value))
            ]
            wanted = attend_explicit(q[None, :, None], *seen, Mask(), None, 0.3)[0][0, :, 0]
            torch.testing.assert_close(got[row, k], wanted, rtol=TOLERANCE[dtype_of], atol=TOLERANCE[dtype_of])
            column = (row * limit + length) * K + k
            assert torch.equal(keys[:, column].float(), own_key)
            assert torch.equal(values[:, column].float(), own_value)
    changed = (keys != past_keys).any(-1).any(0).sum()
    assert changed == (R - 1) * K


def test_the_beams_of_a_row_look_at_its_own_source(device: torch.device, dtype_of: torch.dtype) -> None:
    K, heads, shared, D, memory = 3, 4, 2, 16, [1, 9, 16, 35]
    rows = make_rows([0] * 4, memory, 10, device)
    q = torch.randn(4 * K, heads * D, device=device).to(dtype_of)
    kept = torch.randn(sum(memory), 2, shared, D, device=device).to(dtype_of)
    got = kernels.attend_memory(q, kept, rows, K, 0.3).float().view(4, K, heads, D)
    for row in (0, 2, 3):
        begin = sum(memory[:row])
        k, v = (kept[begin : begin + memory[row], i].float().transpose(0, 1)[None] for i in range(2))
        wanted = attend_explicit(q.float().view(4, K, heads, D)[row].transpose(0, 1)[None], k, v, Mask(), None, 0.3)[0][
            0
        ]
        torch.testing.assert_close(got[row].transpose(0, 1), wanted, rtol=TOLERANCE[dtype_of], atol=TOLERANCE[dtype_of])


def test_a_source_sees_all_of_itself_and_nothing_else(device: torch.device, dtype_of: torch.dtype) -> None:
    H, shared, D, lengths = 4, 2, 16, [40, 33, 16, 3, 1]
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    qkv = torch.randn(sum(lengths), (H + 2 * shared) * D, device=device).to(dtype_of)
    places = (torch.tensor(x, dtype=torch.int32, device=device) for x in (begins, lengths))
    got = kernels.attend_packed(qkv, *places, max(lengths), (H, shared, D), 0.3).float()
    for begin, length in zip(begins, lengths, strict=True):
        mine = qkv[begin : begin + length].float().unflatten(-1, (-1, D)).transpose(0, 1)[None]
        wanted = (
            attend_explicit(*mine.split([H, shared, shared], 1), Mask(), None, 0.3)[0][0].transpose(0, 1).flatten(1)
        )
        torch.testing.assert_close(
            got[begin : begin + length], wanted, rtol=TOLERANCE[dtype_of], atol=TOLERANCE[dtype_of]
        )


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("K", "V"), [(1, 40), (2, 200), (4, 2100)])
@pytest.mark.parametrize("even", [False, True])
def test_the_likeliest_words_are_those_of_the_search(K: int, V: int, even: bool, device: torch.device) -> None:
    """Where many are equal, the lowest number comes first."""
    logits = torch.randn(2 * K, V, device=device) * 2
    logits = logits.round() if even else logits
    logits[:, 3] = float("-inf")
    logits[0, END] = 9.0
    rows = make_rows([0, 0], [0, 0], 9, device)
    rows[1, 0], rows[1, 1] = 1, 5
    settings = torch.tensor([3, 0], dtype=torch.int32, device=device)  # row 0 may not end yet
    ids, gains = kernels.topk_log_probs(logits, rows, settings, K, END)
    total = logits.logsumexp(-1, keepdim=True)
    allowed = logits.clone()
    allowed[:K, END] = float("-inf")
    values, places = stable_topk(allowed, 1 if K == 1 else 2 * K)
    assert ids.tolist() == places.tolist()
    torch.testing.assert_close(gains, values - total, rtol=1e-5, atol=1e-5)


def test_words_that_are_all_impossible_have_no_share_in_the_sum(device: torch.device) -> None:
    """Those of a whole chunk, while the others are far below 0."""
    V = kernels.GROUP_SIZE * kernels.GROUPS_PER_CHUNK + 1
    logits = torch.full((1, V), -200.0, device=device)
    logits[0, 7] = -150.0
    logits[0, -1] = float("-inf")
    ids, gains = kernels.topk_log_probs(
        logits, make_rows([0], [0], 9, device), torch.zeros(2, dtype=torch.int32, device=device), 1, END
    )
    assert ids.tolist() == [[7]]
    assert float(gains) == pytest.approx(0.0, abs=1e-5)


def make_loops(units: list[list[int]], K: int, dice: random.Random) -> list[list[int]]:
    """What the K beams of each row wrote at each place: nearly the same unit again and again."""
    return [
        [unit[t % len(unit)] if dice.random() > 0.01 else 3 for _ in range(K)] for unit in units for t in range(LIMIT)
    ]


WORDS, LIMIT = 200, 40
LOOP_LIMITS = kernels.LoopLimits(MAX_LOOP_PERIOD, MIN_LOOP_REPEATS, MIN_LOOP_TOKENS)


@pytest.mark.parametrize("K", [1, 3])
def test_no_word_closes_a_loop(K: int, device: torch.device, dtype_of: torch.dtype) -> None:
    """Beside the rule of the search: beams of mixed descent, a row at rest, and one that may go in circles. Some are
    just long enough, others not."""
    R, dice = 16 if INTERPRETER_MODE else 200, random.Random(K)
    units = [[dice.randrange(4, WORDS) for _ in range(row % 8 + 1)] for row in range(R - 1)] + [[WORDS - 1]]
    shortest = [LOOP_LIMITS.count_tokens_before(len(unit)) for unit in units]
    lengths = [dice.choice((one, one, one - 1, 0, 1, 39)) for one in shortest]
    rows = make_rows(lengths, [0] * R, LIMIT, device)
    rows[:, 6] = rows[:, 2]  # trees lie as caches do
    some = [SearchRequest(source_ids=[5], forbid_loops=row != 2) for row in range(R)]
    wrote = make_loops(units, K, dice)
    whose = [[dice.randrange(K) for _ in range(K)] for _ in wrote]
    logits = torch.randn(R * K, WORDS, device=device).to(dtype_of)
    rule = NoLoops(device, all_requests=False)
    state = rule.build_initial_state(some).repeat_interleave(K, 0)
    for place in range(R * K):
        first, length, k = place // K * LIMIT, lengths[place // K], place % K
        ids = [wrote[first + t][whose[first + t + 1][k] if t + 1 < length else k] for t in range(length)]
        for token in ids:
            state[place] = rule.advance_state(state[place, None], torch.tensor([token], device=device))[0]
        logits[place, ids] += 5
    halves = torch.tensor([whose, whose], dtype=torch.int8, device=device).view(2, R, -1)
    for row, length in enumerate(lengths):
        halves[1 - length % 2, row] = (halves[length % 2, row] + 1) % K  # of the step before
    past = SimpleNamespace(
        loop=LOOP_LIMITS,
        no_loops=torch.tensor([job.forbid_loops for job in some], dtype=torch.int32, device=device),
        tokens=torch.tensor(wrote, dtype=torch.int32, device=device),
        ancestors=halves.view(2, -1),
    )
    scores = logits.float().log_softmax(-1)
    nothing = GeneratedTokens(*torch.zeros(3, R * K, 1, dtype=torch.int64, device=device))
    allowed = rule.mask_scores(scores.clone(), state, nothing)
    assert int((allowed != scores).any(1).sum()) > R * K // 8
    values, words = stable_topk(allowed, 1 if K == 1 else 2 * K)
    got, gains = kernels.topk_log_probs(logits, rows, torch.zeros(2, dtype=torch.int32, device=device), K, END, past)
    at_work = [place for place in range(R * K) if place // K != 1]
    assert got[at_work].tolist() == words[at_work].tolist()
    torch.testing.assert_close(gains[at_work], values[at_work], rtol=1e-5, atol=1e-5)


# --- the lane --------------------------------------------------------------------------------------------------------


def make_model(device: torch.device, ends: float, vocab: int, **more: Any) -> Seq2Seq:
    torch.manual_seed(0)
    stack = StackConfig(**{"layers": 1, "width": 32, "heads": 2, "ffn_width": 24, "dropout": 0.0, **more})
    config = Seq2SeqConfig(
        vocab=vocab, encoder=stack, decoder=mirror_encoder(stack), output_bias=True, start_id=START, end_id=END
    )
    model = Seq2Seq(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        assert model.output.bias is not None
        model.output.bias[END] += ends
    return model.eval().to(device)


def make_requests(count: int, vocab: int) -> list[SearchRequest]:
    chance = random.Random(0)
    return [
        SearchRequest(
            source_ids=[*(chance.randrange(3, vocab) for _ in range(chance.randrange(20))), END],
            rng_key=number,
            max_length=chance.choice((2, 5) if INTERPRETER_MODE else (1, 2, 5, 9, 30)),
        )
        for number in range(count)
    ]


def search_on_gpu(model: Seq2Seq, some: list[SearchRequest], plan: SearchContext, most: int) -> list[list[Hypothesis]]:
    assert get_search(model, some, plan) is not None
    return search_by_reference(model, some, plan, most, record=True)


def get_search(model: Seq2Seq, some: list[SearchRequest], plan: SearchContext) -> beam_search.Lane | None:
    return eligibility.get_gpu_search(
        model, *get_request_lengths(some), plan, list_suppressed_tokens(START, END, (PAD,))
    )


def make_context(search: SearchOptions, device: torch.device, rules: Any = ()) -> SearchContext:
    return SearchContext(
        options=search,
        start=START,
        end=END,
        suppressed_tokens=make_suppressed_tensor(START, END, (PAD,), device),
        constraints=rules,
    )


def search_by_reference(
    model: Seq2Seq, some: list[SearchRequest], plan: SearchContext, most: int = 50, record: bool = False
) -> list[Any]:
    found = list(make_engine(model, plan, most, record).search(some, plan.options))
    return [best for _, best in sorted(found, key=lambda one: one[0])]


def make_engine(model: Seq2Seq, plan: SearchContext, most: int, record: bool) -> TorchEngine[Any]:
    return TorchEngine(
        model=model,
        start=START,
        end=END,
        suppressed_tokens=(PAD,),
        pad=PAD,
        device=plan.suppressed_tokens.device,
        choose_batch_size=lambda source, target, beams: most,
        build_constraints=lambda search, jobs: (plan.constraints, None),
        use_cuda_graphs=record,
        notify=pytest.fail,  # that the lane was left
    )


PRE = {"norm_order": "pre", "norm": "rms", "kv_heads": 1, "activation": "silu", "gated": True}
LEARNED = {"norm_order": "pre", "positions": LearnedConfig(max_length=30), "bias": False}
CASES: dict[str, Any] = {
    "greedy": (2.0, 30, {"embedding_norm": True}, SearchOptions(beam_size=1), 0, 2),
    "beam 4": (3.0, 30, {}, SearchOptions(beam_size=4, n_best=2, length_penalty_type="wu"), 0, 2),
    "impatient": (4.0, 150, PRE, SearchOptions(beam_size=3, n_best=3, length_penalty=1.0, patience=1.0), 0, 2),
    "not too short": (
        6.0,
        70,
        LEARNED,
        SearchOptions(beam_size=2, length_penalty_type="none", rank_truncated_equally=True),
        3,
        4,
    ),
}


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beam_search, "MIN_ROWS", 2)
    monkeypatch.setattr(beam_search, "POLL_INTERVAL", 1)
    monkeypatch.setattr(beam_search, "ENCODER_BATCH_TOKENS", 40)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize(("ends", "vocab", "more", "search", "least", "most"), CASES.values(), ids=CASES.keys())
def test_the_lane_finds_what_the_search_finds(
    ends: float,
    vocab: int,
    more: Any,
    search: SearchOptions,
    least: int,
    most: int,
    device: torch.device,
) -> None:
    """With fewer rows than sources, so that rows are filled again; and read in several parts."""
    model, some = make_model(device, ends, vocab, **more), make_requests(3 if INTERPRETER_MODE else 60, vocab)
    rules = (MinLength(least, END, device),) if least else ()
    plan = make_context(search, device, rules)
    wanted = search_by_reference(model, some, plan)
    got = search_on_gpu(model, some, plan, most)
    assert [to_ids(one) for one in got] == [to_ids(one) for one in wanted]
    for ours, theirs in zip(got, wanted, strict=True):
        assert [one.score for one in ours] == pytest.approx([one.score for one in theirs], abs=1e-4)
        assert [one.log_prob for one in ours] == pytest.approx([one.log_prob for one in theirs], abs=1e-4)
    assert INTERPRETER_MODE or len({one.is_finished for best in wanted for one in best}) == 2


@pytest.mark.usefixtures("small_steps")
@pytest.mark.skipif(INTERPRETER_MODE, reason="takes minutes in the interpreter")
@pytest.mark.parametrize("beams", [1, 4])
def test_many_rows_that_become_few_find_what_the_search_finds(beams: int, device: torch.device) -> None:
    """Rows come to rest anywhere among the others, and steps become smaller again and again."""
    model, some = make_model(device, 2.0, 30), make_requests(300, 30)
    plan = make_context(SearchOptions(beam_size=beams), device)
    wanted, got = search_by_reference(model, some, plan), search_on_gpu(model, some, plan, 96)
    assert [to_ids(one) for one in got] == [to_ids(one) for one in wanted]


@pytest.mark.usefixtures("small_steps")
def test_for_a_lot_is_found_what_is_found_for_its_jobs(device: torch.device) -> None:
    model, some = make_model(device, 3.0, 30), make_requests(3 if INTERPRETER_MODE else 60, 30)
    plan = make_context(SearchOptions(beam_size=2, n_best=2), device)
    order = sort_by_length(some)
    found = make_engine(model, plan, 2, True).search_batch(
        RequestBatch.from_requests([some[i] for i in order], False), plan.options
    )
    assert isinstance(found, HypothesisBatch)
    got = dict(zip(order, found.to_hypotheses(2), strict=True))
    assert [got[place] for place in range(len(some))] == search_on_gpu(model, some, plan, 2)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("beams", [1, 2] if INTERPRETER_MODE else [1, 2, 4])
def test_only_who_may_goes_in_circles(beams: int, device: torch.device) -> None:
    """As in the search, with more sources than rows."""
    count, limit = (3, 14) if INTERPRETER_MODE else (60, 50)
    model = make_model(device, -50.0, 30)
    some = [replace(job, max_length=limit, forbid_loops=job.rng_key % 3 > 0) for job in make_requests(count, 30)]
    plan = make_context(SearchOptions(beam_size=beams), device, (NoLoops(device, all_requests=False),))
    wanted, got = (
        search_by_reference(model, some, plan),
        search_on_gpu(model, some, plan, 2 if INTERPRETER_MODE else 24),
    )
    assert [to_ids(one) for one in got] == [to_ids(one) for one in wanted]
    assert not any(has_loop(best[0].token_ids) for job, best in zip(some, got, strict=True) if job.forbid_loops)
    free = search_by_reference(model, some, make_context(plan.options, device))
    assert any(has_loop(best[0].token_ids) for job, best in zip(some, free, strict=True) if job.forbid_loops)
    assert any(has_loop(best[0].token_ids) for job, best in zip(some, got, strict=True) if not job.forbid_loops)
    other = [replace(job, forbid_loops=not job.forbid_loops) for job in some]  # nothing is kept from the last search
    wanted, got = (
        search_by_reference(model, other, plan),
        search_on_gpu(model, other, plan, 2 if INTERPRETER_MODE else 24),
    )
    assert [to_ids(one) for one in got] == [to_ids(one) for one in wanted]


@pytest.mark.usefixtures("small_steps")
def test_a_lane_is_kept_and_sees_weights_that_were_changed_in_place(device: torch.device) -> None:
    """Also by those whom nothing counts, and by whoever was there first in inference mode."""
    model, some, plan = (
        make_model(device, 3.0, 30),
        make_requests(2, 30),
        make_context(SearchOptions(beam_size=2), device),
    )
    with torch.inference_mode():
        search_on_gpu(model, some, plan, 2)
    kept = get_search(model, some, plan)
    for parameter in model.parameters():
        parameter.data.mul_(-0.7)
    with mask_parts(model, [ModelPart("decoder.blocks.0.cross_attn")]):
        wanted = search_by_reference(model, some, plan)
        assert [to_ids(one) for one in search_on_gpu(model, some, plan, 2)] == [to_ids(one) for one in wanted]
    assert get_search(model, some, plan) is kept
    model.decoder.blocks[0].self_attn.scale *= 2
    assert get_search(model, some, plan) is not kept


def test_lanes_of_weights_that_are_elsewhere_now_are_given_up(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, some = make_model(device, 3.0, 30), make_requests(2, 30)
    plans = [make_context(SearchOptions(beam_size=beams), device) for beams in (1, 2, 3)]
    one, two, three = (get_search(model, some, plan) for plan in plans)
    assert list(eligibility.CACHED_SEARCHES[model].values()) == [two, three]
    model.output.bias = torch.nn.Parameter(torch.zeros_like(model.output.weight[:, 0]))
    again = get_search(model, some, plans[0])
    assert again is not one
    assert list(eligibility.CACHED_SEARCHES[model].values()) == [again]
    monkeypatch.setattr(eligibility.kernels, "can_use_kernels", lambda x: False)
    assert get_search(model, some, plans[0]) is None
    assert model not in eligibility.CACHED_SEARCHES


def test_what_is_not_plain_is_left_to_the_search(device: torch.device) -> None:
    model, search = make_model(device, 3.0, 30), SearchOptions(beam_size=2)
    assert eligibility.supports_search(model, make_context(search, device))
    for other in (
        replace(search, beam_groups=2),
        SearchOptions(sampling=SamplingOptions()),
        replace(search, beam_size=17),
    ):
        assert not eligibility.supports_search(model, make_context(other, device))
    assert not eligibility.supports_search(model, make_context(search, device, (NoRepeatNgram(3, device),)))
    assert not eligibility.supports_search(
        model, make_context(replace(search, beam_size=16), device)
    )  # hardly more words than that
    assert eligibility.supports_search(model, make_context(replace(search, beam_size=10), device, (NoLoops(device),)))
    assert not eligibility.supports_search(
        model, make_context(replace(search, beam_size=11), device, (NoLoops(device),))
    )
    with record(model):
        assert find_unsupported_reason(model) is not None
    assert find_unsupported_reason(model) is None
    hook = model.decoder.blocks[0].register_forward_hook(lambda *_: None)
    assert find_unsupported_reason(model) is not None
    hook.remove()
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert find_unsupported_reason(model) is not None
    hook.remove()
    assert find_unsupported_reason(model) is None
    assert find_unsupported_reason(make_model(device, 3.0, 30, positions=AlibiConfig())) is not None
    assert find_unsupported_reason(make_model(device, 3.0, 30, window=(3, None))) is not None


class Short(torch.nn.Parameter):
    """As weights of few bits are."""


def with_a_forward(model: Seq2Seq) -> None:
    model.decoder.blocks[0].self_attn.forward = lambda *_: None  # type: ignore[method-assign, assignment]


def with_another_kind(model: Seq2Seq) -> None:
    model.decoder.blocks[0].feedforward = torch.nn.Identity()  # type: ignore[assignment]


def with_other_weights(model: Seq2Seq) -> None:
    model.output.bias = Short(torch.zeros_like(model.output.weight[:, 0]))


CHANGES: dict[str, Any] = {
    "trained": lambda model: model.train(),
    "trained in part": lambda model: model.decoder.train(),
    "of eight bytes": lambda model: model.double(),
    "on two devices": lambda model: model.encoder.to("meta"),
    "a forward of its own": with_a_forward,
    "another kind": with_another_kind,
    "other weights": with_other_weights,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_model_that_was_changed_is_left_to_the_search(change: Any, device: torch.device) -> None:
    model = make_model(device, 3.0, 30)
    change(model)
    assert find_unsupported_reason(model) is not None


def test_what_has_no_position_is_left_to_the_search(device: torch.device) -> None:
    model, plan = (
        make_model(device, 3.0, 30, positions=LearnedConfig(max_length=8)),
        make_context(SearchOptions(beam_size=2), device),
    )
    fitting = [SearchRequest(source_ids=[5] * 8, max_length=8)]
    assert get_search(model, fitting, plan) is not None
    for other in (
        SearchRequest(source_ids=[5] * 9, max_length=8),
        SearchRequest(source_ids=[5] * 8, max_length=9),
        SearchRequest(source_ids=[], max_length=8),
    ):
        assert get_search(model, [*fitting, other], plan) is None


# --- memory ----------------------------------------------------------------------------------------------------------


def make_search(device: torch.device, beams: int = 2) -> tuple[Seq2Seq, SearchContext, beam_search.Lane]:
    model, plan = make_model(device, 3.0, 30), make_context(SearchOptions(beam_size=beams, patience=1e10), device)
    return model, plan, beam_search.GpuBeamSearch(model, plan)


def test_a_board_that_had_to_grow_has_room_for_what_was_before(device: torch.device) -> None:
    model, plan, mine = make_search(device)
    long = replace(beam_search.MIN_BUFFER_SIZES, max_target_length=3000, cache_positions=3000)
    many = replace(beam_search.MIN_BUFFER_SIZES, sources=5000, rows=96)
    first = mine._ensure_buffers(model, beam_search.MIN_BUFFER_SIZES, plan)
    assert (
        mine._ensure_buffers(model, replace(beam_search.MIN_BUFFER_SIZES, rows=1, max_target_length=2), plan) is first
    )
    mine._ensure_buffers(model, long, plan)
    both = mine._ensure_buffers(model, many, plan)
    assert mine._ensure_buffers(model, long, plan) is both
    assert mine._ensure_buffers(model, many, plan) is both
    none = torch.zeros(0, kernels.ROW_FIELDS, dtype=torch.int32, device=device)
    both.reset(none, none[:, : kernels.SOURCE_FIELDS], none[:, 0], plan)
    assert both.settings.tolist() == [0, beam_search.INT32_MAX]


def test_rows_that_are_at_work_come_first_in_their_order(device: torch.device) -> None:
    model, plan, mine = make_search(device)
    board = mine._ensure_buffers(model, beam_search.MIN_BUFFER_SIZES, plan)
    board.rows[:, 0] = torch.tensor([-1, 5, -1, 2, 7, -1, -1, -1])
    board.input_tokens[:] = torch.arange(16, device=device).view(8, 2)
    board.compact_rows(4)
    assert board.rows[:4, 0].tolist() == [5, 2, 7, -1]
    assert board.input_tokens[:3].tolist() == [[2, 3], [6, 7], [8, 9]]
    board.rows[1, 0] = -1
    board.compact_rows(4)
    assert board.rows[:, 0].tolist() == [5, 7, -1, -1, -1, -1, -1, -1]


def test_no_more_rows_are_held_than_their_targets_have_room_for(device: torch.device) -> None:
    model, plan, mine = make_search(device)
    assert mine._allocated_rows(2) == 0
    mine._ensure_buffers(model, replace(beam_search.MIN_BUFFER_SIZES, rows=40, cache_positions=1024), plan)
    assert mine._allocated_rows(2) == 40
    assert mine._allocated_rows(100) == 10


def test_after_a_shortage_fewer_rows_are_taken_until_it_has_gone_well(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, room = [], [2]

    def short(
        mine: beam_search.Lane, model: Seq2Seq, lot: RequestBatch, plan: SearchContext, most: int, stop: Any
    ) -> Any:
        mine._ensure_buffers(model, beam_search.MIN_BUFFER_SIZES, plan)
        asked.append((len(lot), most))
        if most > room[0]:
            raise torch.OutOfMemoryError
        return lot

    monkeypatch.setattr(beam_search.GpuBeamSearch, "_search", short)
    model, plan, mine = make_search(device)
    many, one = (
        RequestBatch.from_requests([SearchRequest(source_ids=[5], max_length=9)] * count, False) for count in (9, 1)
    )
    assert mine.search(model, many, plan, 1000, stop) is None
    assert mine.buffers is None
    assert mine.search(model, many, plan, 1000, stop) is None
    assert [mine.search(model, many, plan, 1000, stop) for _ in range(3)] == [many, None, many]
    assert asked == [(9, 1000), (9, 4), (9, 2), (9, 4), (9, 2)]
    room[0] = 0
    with pytest.raises(torch.OutOfMemoryError):
        mine.search(model, one, plan, 1000, stop)


def stop() -> None:
    pass


def test_a_lot_for_which_there_is_no_room_is_not_taken_unless_it_is_one(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plan, mine = make_search(device)
    one, two = (
        RequestBatch.from_requests([SearchRequest(source_ids=[5] * 3, max_length=9)] * count, False) for count in (1, 2)
    )
    monkeypatch.setattr(beam_search, "estimate_max_source_tokens", lambda *_: 6)
    assert mine.has_room_for(two, plan)
    monkeypatch.setattr(beam_search, "MAX_TREE_NODES", 35)
    assert not mine.has_room_for(two, plan)
    monkeypatch.setattr(beam_search, "MAX_TREE_NODES", 36)
    assert mine.has_room_for(two, plan)
    monkeypatch.setattr(beam_search, "estimate_max_source_tokens", lambda *_: 5)
    assert not mine.has_room_for(two, plan)
    monkeypatch.setattr(beam_search, "estimate_max_source_tokens", lambda *_: 1)
    assert mine.has_room_for(one, plan)


def test_there_are_no_more_rows_than_the_longest_source_leaves_work_for() -> None:
    equal = np.full(5000, 10)
    assert beam_search.choose_row_count(equal, 1024, 4) == 1024
    assert beam_search.choose_row_count(equal[:100], 1024, 4) == 100
    mixed = np.array([100, *[20] * 4000])
    assert 600 < beam_search.choose_row_count(mixed, 1024, 4) <= 801
    assert [beam_search.round_up_rows(rows) for rows in (1, 9, 100, 769)] == [8, 12, 128, 1024]
