"""The kernels of the GPU engine against plain PyTorch, and its beam search against the reference search."""

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
from attent.decoding.constraints.token_rules import (
    MinLength,
    NoLoops,
    NoRepeatNgram,
    has_loop,
)
from attent.decoding.engines.gpu import beam_search, eligibility, kernels
from attent.decoding.engines.gpu.inference_model import attend_within_sources, find_unsupported_reason
from attent.decoding.engines.gpu.request_batch import HypothesisBatch, RequestBatch, sort_by_length
from attent.decoding.engines.reference import TorchEngine
from attent.decoding.options import Hypothesis, SamplingOptions, SearchOptions, SearchRequest
from attent.decoding.search import SearchContext, list_suppressed_tokens, make_suppressed_tensor, stable_topk
from attent.inspection import record
from attent.inspection.ablate import ModelPart, mask_heads
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import AlibiConfig, Attention, LearnedConfig, Mask, Packing, StackConfig
from attent.nn.dot_product import attend_explicit
from attent.nn.kernels import INTERPRETER_MODE
from tests.decoding.toy_models import to_ids

START, END, PAD = 0, 1, 2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class SpecializedKernel:
    """A kernel in the interpreter, with Triton's specialization on a GPU: an integer argument that equals 1 becomes a
    constant, which lacks some methods of a number."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        parameters = inspect.signature(kernel.fn).parameters.values()
        self.plain = [parameter.annotation is inspect.Parameter.empty for parameter in parameters]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            pairs = zip(arguments, self.plain, strict=True)
            changed = [tl.constexpr(1) if plain and type(x) is int and x == 1 else x for x, plain in pairs]
            self.kernel[grid](*changed, **options)

        return launch


@pytest.fixture(autouse=INTERPRETER_MODE)
def specialize_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "embed_kernel",
        "attend_past_kernel",
        "attend_memory_kernel",
        "group_max_kernel",
        "forbid_loops_kernel",
        "topk_kernel",
        "advance_rows_kernel",
        "backtrack_kernel",
    ):
        monkeypatch.setattr(kernels, f"_{name}", SpecializedKernel(getattr(kernels, f"_{name}")))


def make_rows(lengths: list[int], memory: list[int], limit: int, device: torch.device) -> Tensor:
    """Rows with consecutive caches and memories; the second row has no source."""
    rows = torch.zeros(len(lengths), kernels.ROW_FIELDS, dtype=torch.int32)
    for i, (length, tokens) in enumerate(zip(lengths, memory, strict=True)):
        before = sum(memory[:i])
        rows[i] = torch.tensor([i if i != 1 else -1, length, i * limit, before, tokens, limit, 0, 0])
    return rows.to(device)


# --- attention -------------------------------------------------------------------------------------------------------


def test_the_first_token_attends_to_itself(device: torch.device) -> None:
    qkv = torch.randn(1, 48, device=device)
    keys, values = torch.zeros(2, 1, 1, 16, device=device)
    rows, no_ancestors = make_rows([0], [0], 1, device), torch.zeros(2, 1, dtype=torch.int8, device=device)
    got = kernels.attend_past(qkv, keys, values, no_ancestors, rows, 1, 1, 0.3)
    torch.testing.assert_close(got, qkv[:, 32:])
    assert torch.equal(values[0], qkv[:, 32:])


@pytest.mark.parametrize(("K", "heads", "kv_heads"), [(1, 2, 2), (3, 4, 2), (4, 2, 1)])
def test_each_beam_attends_to_its_ancestors_and_itself(
    K: int, heads: int, kv_heads: int, device: torch.device, dtype_of: torch.dtype
) -> None:
    D, limit, lengths = 16, 40, [0, 5, 1, 17, 39]
    R, columns = len(lengths), len(lengths) * limit * K
    rows = make_rows(lengths, [0] * R, limit, device)
    qkv = torch.randn(R * K, (heads + 2 * kv_heads) * D, device=device).to(dtype_of)
    keys, values = (torch.randn(kv_heads, columns, D, device=device).to(dtype_of) for _ in range(2))
    past_keys, past_values = keys.clone(), values.clone()
    ancestors = torch.randint(0, K, (R, limit, K), device=device)
    for row, length in enumerate(lengths):  # shared up to a position
        rows[row, 7] = alike = length // 2
        ancestors[row, :alike] = ancestors[row, :alike, :1]
    table = torch.full((2, columns), 100, dtype=torch.int8, device=device)
    for row, length in enumerate(lengths):
        half = table[length % 2].view(R, limit, K)
        half[row, :length] = ancestors[row, :length].to(torch.int8)
    got = kernels.attend_past(qkv, keys, values, table, rows, K, heads, 0.3).float().view(R, K, heads, D)
    parts = qkv.float().view(R, K, heads + 2 * kv_heads, D)
    for row, length in enumerate(lengths):
        if row == 1:
            continue
        for k in range(K):
            at = [(row * limit + t) * K + int(ancestors[row, t, k]) for t in range(length)]
            q, own_key, own_value = parts[row, k].split([heads, kv_heads, kv_heads])
            seen = [
                torch.cat([past[:, at].float(), own[:, None]], 1)[None]
                for past, own in ((past_keys, own_key), (past_values, own_value))
            ]
            expected = attend_explicit(q[None, :, None], *seen, Mask(), None, 0.3)[0][0, :, 0]
            torch.testing.assert_close(got[row, k], expected, rtol=TOLERANCE[dtype_of], atol=TOLERANCE[dtype_of])
            column = (row * limit + length) * K + k
            assert torch.equal(keys[:, column].float(), own_key)
            assert torch.equal(values[:, column].float(), own_value)
    changed = (keys != past_keys).any(-1).any(0).sum()
    assert changed == (R - 1) * K


def test_the_beams_of_a_row_attend_to_its_source(device: torch.device, dtype_of: torch.dtype) -> None:
    K, heads, kv_heads, D, memory = 3, 4, 2, 16, [1, 9, 16, 35]
    rows = make_rows([0] * 4, memory, 10, device)
    q = torch.randn(4 * K, heads * D, device=device).to(dtype_of)
    memory_kv = torch.randn(sum(memory), 2, kv_heads, D, device=device).to(dtype_of)
    got = kernels.attend_memory(q, memory_kv, rows, K, 0.3).float().view(4, K, heads, D)
    for row in (0, 2, 3):
        begin = sum(memory[:row])
        k, v = (memory_kv[begin : begin + memory[row], i].float().transpose(0, 1)[None] for i in range(2))
        expected = attend_explicit(q.float().view(4, K, heads, D)[row].transpose(0, 1)[None], k, v, Mask(), None, 0.3)[
            0
        ][0]
        torch.testing.assert_close(
            got[row].transpose(0, 1), expected, rtol=TOLERANCE[dtype_of], atol=TOLERANCE[dtype_of]
        )


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_source_attends_to_itself_only(kv_heads: int, device: torch.device, dtype_of: torch.dtype) -> None:
    H, D, lengths = 4, 16, [40, 33, 16, 3, 1]
    offsets = [sum(lengths[:i]) for i in range(len(lengths))]
    attention = Attention(StackConfig(width=H * D, heads=H, kv_heads=kv_heads, scale=0.3))
    qkv = torch.randn(sum(lengths), (H + 2 * kv_heads) * D, device=device).to(dtype_of)
    packing = Packing.from_lengths([lengths], device=device)
    got = attend_within_sources(qkv, Mask(packing=(packing, packing)), attention).float()
    for begin, length in zip(offsets, lengths, strict=True):
        source_qkv = qkv[begin : begin + length].float().unflatten(-1, (-1, D)).transpose(0, 1)[None]
        expected = (
            attend_explicit(*source_qkv.split([H, kv_heads, kv_heads], 1), Mask(), None, 0.3)[0][0]
            .transpose(0, 1)
            .flatten(1)
        )
        torch.testing.assert_close(
            got[begin : begin + length], expected, rtol=TOLERANCE[dtype_of], atol=TOLERANCE[dtype_of]
        )


# --- candidates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("K", "V"), [(1, 40), (2, 200), (4, 2100)])
@pytest.mark.parametrize("has_ties", [False, True])
def test_top_k_equals_that_of_the_reference_search(K: int, V: int, has_ties: bool, device: torch.device) -> None:
    """On ties the lowest index comes first."""
    logits = torch.randn(2 * K, V, device=device) * 2
    logits = logits.round() if has_ties else logits
    logits[:, 3] = float("-inf")
    logits[0, END] = 9.0
    rows = make_rows([0, 0], [0, 0], 9, device)
    rows[1, 0], rows[1, 1] = 1, 5
    settings = torch.tensor([3, 0], dtype=torch.int32, device=device)  # row 0 may not end yet
    ids, log_probs = kernels.topk_log_probs(logits, rows, settings, K, END)
    total = logits.logsumexp(-1, keepdim=True)
    allowed = logits.clone()
    allowed[:K, END] = float("-inf")
    values, indices = stable_topk(allowed, 1 if K == 1 else 2 * K)
    assert ids.tolist() == indices.tolist()
    torch.testing.assert_close(log_probs, values - total, rtol=1e-5, atol=1e-5)


def test_a_chunk_of_impossible_tokens_has_no_share_in_the_denominator(device: torch.device) -> None:
    """While the logits of the other chunk are far below 0."""
    V = kernels.GROUP_SIZE * kernels.GROUPS_PER_CHUNK + 1
    logits = torch.full((1, V), -200.0, device=device)
    logits[0, 7] = -150.0
    logits[0, -1] = float("-inf")
    ids, log_probs = kernels.topk_log_probs(
        logits, make_rows([0], [0], 9, device), torch.zeros(2, dtype=torch.int32, device=device), 1, END
    )
    assert ids.tolist() == [[7]]
    assert float(log_probs) == pytest.approx(0.0, abs=1e-5)


def make_loops(units: list[list[int]], K: int, rng: random.Random) -> list[list[int]]:
    """The tokens of K beams at each position: nearly the same unit repeated."""
    return [
        [unit[t % len(unit)] if rng.random() > 0.01 else 3 for _ in range(K)] for unit in units for t in range(LIMIT)
    ]


WORDS, LIMIT = 200, 40


@pytest.mark.parametrize("K", [1, 3])
def test_no_token_closes_a_loop(K: int, device: torch.device, dtype_of: torch.dtype) -> None:
    """Compared with the constraint of the search: beams of mixed ancestry, an inactive row, and one in which loops are
    allowed. Some are just long enough for a loop, others not."""
    R, rng = 16 if INTERPRETER_MODE else 200, random.Random(K)
    units = [[rng.randrange(4, WORDS) for _ in range(row % 8 + 1)] for row in range(R - 1)] + [[WORDS - 1]]
    shortest = [kernels.LOOP_HISTORIES[len(unit) - 1] for unit in units]
    lengths = [rng.choice((length, length, length - 1, 0, 1, 39)) for length in shortest]
    rows = make_rows(lengths, [0] * R, LIMIT, device)
    rows[:, 6] = rows[:, 2]  # trees and caches have the same layout
    requests = [SearchRequest(source_ids=[5], forbid_loops=row != 2) for row in range(R)]
    tokens = make_loops(units, K, rng)
    parents = [[rng.randrange(K) for _ in range(K)] for _ in tokens]
    logits = torch.randn(R * K, WORDS, device=device).to(dtype_of)
    constraint = NoLoops(device)
    state = constraint.build_initial_state(requests).repeat_interleave(K, 0)
    for index in range(R * K):
        first, length, k = index // K * LIMIT, lengths[index // K], index % K
        ids = [tokens[first + t][parents[first + t + 1][k] if t + 1 < length else k] for t in range(length)]
        for token in ids:
            state[index] = constraint.advance_state(state[index, None], torch.tensor([token], device=device))[0]
        logits[index, ids] += 5
    halves = torch.tensor([parents, parents], dtype=torch.int8, device=device).view(2, R, -1)
    for row, length in enumerate(lengths):
        halves[1 - length % 2, row] = (halves[length % 2, row] + 1) % K  # of the previous step
    past = SimpleNamespace(
        forbid_loops=torch.tensor([request.forbid_loops for request in requests], dtype=torch.int32, device=device),
        tree_tokens=torch.tensor(tokens, dtype=torch.int32, device=device),
        ancestors=halves.view(2, -1),
    )
    scores = logits.float().log_softmax(-1)
    nothing = GeneratedTokens(*torch.zeros(3, R * K, 1, dtype=torch.int64, device=device))
    allowed = constraint.mask_logits(scores.clone(), state, nothing)
    assert int((allowed != scores).any(1).sum()) > R * K // 8
    values, words = stable_topk(allowed, 1 if K == 1 else 2 * K)
    got, log_probs = kernels.topk_log_probs(
        logits, rows, torch.zeros(2, dtype=torch.int32, device=device), K, END, past
    )
    active = [index for index in range(R * K) if index // K != 1]
    assert got[active].tolist() == words[active].tolist()
    torch.testing.assert_close(log_probs[active], values[active], rtol=1e-5, atol=1e-5)


# --- the whole search -----------------------------------------------------------------------------------------------


def make_model(device: torch.device, ends: float, vocab: int, **changes: Any) -> Seq2Seq:
    torch.manual_seed(0)
    stack = StackConfig(**{"layers": 1, "width": 32, "heads": 2, "ffn_width": 24, "dropout": 0.0, **changes})
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
    rng = random.Random(0)
    return [
        SearchRequest(
            source_ids=[*(rng.randrange(3, vocab) for _ in range(rng.randrange(20))), END],
            rng_key=number,
            max_length=rng.choice((2, 5) if INTERPRETER_MODE else (1, 2, 5, 9, 30)),
        )
        for number in range(count)
    ]


def search_on_gpu(
    model: Seq2Seq, requests: list[SearchRequest], context: SearchContext, max_rows: int
) -> list[list[Hypothesis]]:
    assert get_search(model, requests, context) is not None
    return search_by_reference(model, requests, context, max_rows, use_graphs=True)


def get_search(
    model: Seq2Seq, requests: list[SearchRequest], context: SearchContext
) -> beam_search.GpuBeamSearch | None:
    batch = RequestBatch.from_requests(requests)
    return eligibility.get_gpu_search(model, batch, context, list_suppressed_tokens(START, END, (PAD,)))


def make_context(options: SearchOptions, device: torch.device, constraints: Any = ()) -> SearchContext:
    return SearchContext(
        options=options,
        start_id=START,
        end_id=END,
        suppressed_tokens=make_suppressed_tensor(START, END, (PAD,), device),
        constraints=constraints,
    )


def search_by_reference(
    model: Seq2Seq, requests: list[SearchRequest], context: SearchContext, max_rows: int = 50, use_graphs: bool = False
) -> list[Any]:
    results = list(make_engine(model, context, max_rows, use_graphs).search(requests, context.options))
    return [best for _, best in sorted(results, key=lambda result: result[0])]


def make_engine(model: Seq2Seq, context: SearchContext, max_rows: int, use_graphs: bool) -> TorchEngine[Any]:
    return TorchEngine(
        model=model,
        start_id=START,
        end_id=END,
        suppressed_tokens=(PAD,),
        pad=PAD,
        device=context.suppressed_tokens.device,
        choose_batch_size=lambda source, target, beams: max_rows,
        build_constraints=lambda search, jobs: (context.constraints, None),
        use_gpu_engine=use_graphs,
        notify=pytest.fail,  # called if the GPU engine gives up
    )


PRE = {"norm_order": "pre", "norm": "rms", "kv_heads": 1, "activation": "silu", "gated": True}
LEARNED = {"norm_order": "pre", "positions": LearnedConfig(max_length=30), "bias": False}
CASES: dict[str, Any] = {
    "greedy": (2.0, 30, {"embedding_norm": True}, SearchOptions(beam_size=1), 0, 2),
    "beam 4": (3.0, 30, {}, SearchOptions(beam_size=4, n_best=2, length_penalty_type="wu"), 0, 2),
    "impatient": (4.0, 150, PRE, SearchOptions(beam_size=3, n_best=3, length_penalty=1.0, patience=1.0), 0, 2),
    "min length": (
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
@pytest.mark.parametrize(
    ("ends", "vocab", "changes", "options", "min_length", "max_rows"), CASES.values(), ids=CASES.keys()
)
def test_it_equals_the_reference_search(
    ends: float,
    vocab: int,
    changes: Any,
    options: SearchOptions,
    min_length: int,
    max_rows: int,
    device: torch.device,
) -> None:
    """With fewer rows than sources, so that rows are reused; and sources encoded in several batches."""
    model, requests = make_model(device, ends, vocab, **changes), make_requests(3 if INTERPRETER_MODE else 60, vocab)
    constraints = (MinLength(min_length, [END]),) if min_length else ()
    context = make_context(options, device, constraints)
    expected = search_by_reference(model, requests, context)
    got = search_on_gpu(model, requests, context, max_rows)
    assert [to_ids(best) for best in got] == [to_ids(best) for best in expected]
    for ours, theirs in zip(got, expected, strict=True):
        assert [h.score for h in ours] == pytest.approx([h.score for h in theirs], abs=1e-4)
        assert [h.log_prob for h in ours] == pytest.approx([h.log_prob for h in theirs], abs=1e-4)
    assert INTERPRETER_MODE or len({h.is_finished for best in expected for h in best}) == 2


@pytest.mark.usefixtures("small_steps")
@pytest.mark.skipif(INTERPRETER_MODE, reason="takes minutes in the interpreter")
@pytest.mark.parametrize("beams", [1, 4])
def test_shrinking_equals_the_reference_search(beams: int, device: torch.device) -> None:
    """Rows become inactive anywhere, and steps shrink repeatedly."""
    model, requests = make_model(device, 2.0, 30), make_requests(300, 30)
    context = make_context(SearchOptions(beam_size=beams), device)
    expected, got = search_by_reference(model, requests, context), search_on_gpu(model, requests, context, 96)
    assert [to_ids(best) for best in got] == [to_ids(best) for best in expected]


@pytest.mark.usefixtures("small_steps")
def test_a_batch_gives_the_same_as_its_requests(device: torch.device) -> None:
    model, requests = make_model(device, 3.0, 30), make_requests(3 if INTERPRETER_MODE else 60, 30)
    context = make_context(SearchOptions(beam_size=2, n_best=2), device)
    order = sort_by_length(requests)
    result = make_engine(model, context, 2, True).search_batch(
        RequestBatch.from_requests([requests[i] for i in order]), context.options
    )
    assert isinstance(result, HypothesisBatch)
    got = dict(zip(order, result.to_hypotheses(2), strict=True))
    assert [got[index] for index in range(len(requests))] == search_on_gpu(model, requests, context, 2)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("beams", [1, 2] if INTERPRETER_MODE else [1, 2, 4])
def test_loops_are_forbidden_per_request(beams: int, device: torch.device) -> None:
    """Compare with the reference search, with more sources than rows."""
    count, limit = (3, 14) if INTERPRETER_MODE else (60, 50)
    model = make_model(device, -50.0, 30)
    requests = [
        replace(request, max_length=limit, forbid_loops=request.rng_key % 3 > 0) for request in make_requests(count, 30)
    ]
    context = make_context(SearchOptions(beam_size=beams), device, (NoLoops(device),))
    expected, got = (
        search_by_reference(model, requests, context),
        search_on_gpu(model, requests, context, 2 if INTERPRETER_MODE else 24),
    )
    assert [to_ids(best) for best in got] == [to_ids(best) for best in expected]
    assert not any(
        has_loop(best[0].token_ids) for request, best in zip(requests, got, strict=True) if request.forbid_loops
    )
    free = search_by_reference(model, requests, make_context(context.options, device))
    assert any(
        has_loop(best[0].token_ids) for request, best in zip(requests, free, strict=True) if request.forbid_loops
    )
    assert any(
        has_loop(best[0].token_ids) for request, best in zip(requests, got, strict=True) if not request.forbid_loops
    )
    other = [
        replace(request, forbid_loops=not request.forbid_loops) for request in requests
    ]  # nothing is left of the last search
    expected, got = (
        search_by_reference(model, other, context),
        search_on_gpu(model, other, context, 2 if INTERPRETER_MODE else 24),
    )
    assert [to_ids(best) for best in got] == [to_ids(best) for best in expected]


@pytest.mark.usefixtures("small_steps")
def test_a_cached_search_uses_weights_that_were_changed_in_place(device: torch.device) -> None:
    """Also changes without a version counter, and after a first search in inference mode."""
    model, requests, context = (
        make_model(device, 3.0, 30),
        make_requests(2, 30),
        make_context(SearchOptions(beam_size=2), device),
    )
    with torch.inference_mode():
        search_on_gpu(model, requests, context, 2)
    cached = get_search(model, requests, context)
    for parameter in model.parameters():
        parameter.data.mul_(-0.7)
    with mask_heads(model, ModelPart("decoder.blocks.0.cross_attn")):
        expected = search_by_reference(model, requests, context)
        assert [to_ids(best) for best in search_on_gpu(model, requests, context, 2)] == [
            to_ids(best) for best in expected
        ]
    assert get_search(model, requests, context) is cached
    model.decoder.blocks[0].self_attn.scale *= 2
    assert get_search(model, requests, context) is not cached


def test_cached_searches_of_replaced_weights_are_dropped(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = make_model(device, 3.0, 30), make_requests(2, 30)
    contexts = [make_context(SearchOptions(beam_size=beams), device) for beams in (1, 2, 3)]
    first, second, third = (get_search(model, requests, context) for context in contexts)
    assert list(eligibility.CACHED_SEARCHES[model].values()) == [second, third]
    model.output.bias = torch.nn.Parameter(torch.zeros_like(model.output.weight[:, 0]))
    again = get_search(model, requests, contexts[0])
    assert again is not first
    assert list(eligibility.CACHED_SEARCHES[model].values()) == [again]
    monkeypatch.setattr(eligibility.kernels, "can_use_kernels", lambda x: False)
    assert get_search(model, requests, contexts[0]) is None
    assert model not in eligibility.CACHED_SEARCHES


def test_unsupported_searches_are_refused(device: torch.device) -> None:
    model, search = make_model(device, 3.0, 30), SearchOptions(beam_size=2)
    assert eligibility.supports_search(model, make_context(search, device))
    for other in (
        replace(search, beam_groups=2),
        SearchOptions(sampling=SamplingOptions()),
        replace(search, beam_size=17),
    ):
        assert not eligibility.supports_search(model, make_context(other, device))
    assert not eligibility.supports_search(model, make_context(search, device, (NoRepeatNgram(3),)))
    assert not eligibility.supports_search(
        model, make_context(replace(search, beam_size=16), device)
    )  # the vocabulary is too small
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
    assert find_unsupported_reason(make_model(device, 3.0, 30, compatibility="additive")) is not None


class QuantizedParameter(torch.nn.Parameter):
    """A parameter of another class, as quantized weights have."""


def replace_forward(model: Seq2Seq) -> None:
    model.decoder.blocks[0].self_attn.forward = lambda *_: None  # type: ignore[method-assign, assignment]


def replace_feedforward(model: Seq2Seq) -> None:
    model.decoder.blocks[0].feedforward = torch.nn.Identity()  # type: ignore[assignment]


def replace_parameter(model: Seq2Seq) -> None:
    model.output.bias = QuantizedParameter(torch.zeros_like(model.output.weight[:, 0]))


CHANGES: dict[str, Any] = {
    "training mode": lambda model: model.train(),
    "partly in training mode": lambda model: model.decoder.train(),
    "float64": lambda model: model.double(),
    "two devices": lambda model: model.encoder.to("meta"),
    "own forward": replace_forward,
    "another sub-layer": replace_feedforward,
    "parameter subclass": replace_parameter,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_modified_model_is_refused(change: Any, device: torch.device) -> None:
    model = make_model(device, 3.0, 30)
    change(model)
    assert find_unsupported_reason(model) is not None


def test_texts_beyond_the_positions_are_refused(device: torch.device) -> None:
    model, context = (
        make_model(device, 3.0, 30, positions=LearnedConfig(max_length=8)),
        make_context(SearchOptions(beam_size=2), device),
    )
    fitting = [SearchRequest(source_ids=[5] * 8, max_length=8)]
    assert get_search(model, fitting, context) is not None
    for other in (
        SearchRequest(source_ids=[5] * 9, max_length=8),
        SearchRequest(source_ids=[5] * 8, max_length=9),
        SearchRequest(source_ids=[], max_length=8),
    ):
        assert get_search(model, [*fitting, other], context) is None


# --- memory ----------------------------------------------------------------------------------------------------------


def make_search(device: torch.device, beams: int = 2) -> tuple[Seq2Seq, SearchContext, beam_search.GpuBeamSearch]:
    model, context = make_model(device, 3.0, 30), make_context(SearchOptions(beam_size=beams, patience=1e10), device)
    return model, context, beam_search.GpuBeamSearch(model, context)


def test_buffers_that_grow_still_fit_earlier_searches(device: torch.device) -> None:
    _, context, search = make_search(device)
    long = replace(beam_search.MIN_BUFFER_SIZES, max_target_length=3000, cache_positions=3000)
    many = replace(beam_search.MIN_BUFFER_SIZES, sources=5000, rows=96)
    first = search._ensure_buffers(beam_search.MIN_BUFFER_SIZES, context)
    assert search._ensure_buffers(replace(beam_search.MIN_BUFFER_SIZES, rows=1, max_target_length=2), context) is first
    search._ensure_buffers(long, context)
    both = search._ensure_buffers(many, context)
    assert search._ensure_buffers(long, context) is both
    assert search._ensure_buffers(many, context) is both
    none = torch.zeros(0, kernels.ROW_FIELDS, dtype=torch.int32, device=device)
    both.reset(none, none[:, : kernels.SOURCE_FIELDS], none[:, 0], context)
    assert both.settings.tolist() == [0, beam_search.INT32_MAX]


def test_compaction_keeps_the_order_of_active_rows(device: torch.device) -> None:
    _, context, search = make_search(device)
    buffers = search._ensure_buffers(beam_search.MIN_BUFFER_SIZES, context)
    buffers.rows[:, 0] = torch.tensor([-1, 5, -1, 2, 7, -1, -1, -1])
    buffers.input_tokens[:] = torch.arange(16, device=device).view(8, 2)
    buffers.compact_rows(4)
    assert buffers.rows[:4, 0].tolist() == [5, 2, 7, -1]
    assert buffers.input_tokens[:3].tolist() == [[2, 3], [6, 7], [8, 9]]
    buffers.rows[1, 0] = -1
    buffers.compact_rows(4)
    assert buffers.rows[:, 0].tolist() == [5, 7, -1, -1, -1, -1, -1, -1]


def test_allocated_rows_depend_on_the_target_length(device: torch.device) -> None:
    _, context, search = make_search(device)
    assert search._count_allocated_rows(2) == 0
    search._ensure_buffers(replace(beam_search.MIN_BUFFER_SIZES, rows=40, cache_positions=1024), context)
    assert search._count_allocated_rows(2) == 40
    assert search._count_allocated_rows(100) == 10


def test_after_running_out_of_memory_fewer_rows_are_used(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts, room = [], [2]

    def short(
        search: beam_search.GpuBeamSearch, batch: RequestBatch, context: SearchContext, max_rows: int, stop: Any
    ) -> Any:
        search._ensure_buffers(beam_search.MIN_BUFFER_SIZES, context)
        attempts.append((len(batch), max_rows))
        if max_rows > room[0]:
            raise torch.OutOfMemoryError
        return batch

    monkeypatch.setattr(beam_search.GpuBeamSearch, "_search", short)
    _, context, search = make_search(device)
    batch_of_9, batch_of_1 = (
        RequestBatch.from_requests([SearchRequest(source_ids=[5], max_length=9)] * count) for count in (9, 1)
    )
    assert search.search(batch_of_9, context, 1000, check_cancelled) is None
    assert search.buffers is None
    assert search.search(batch_of_9, context, 1000, check_cancelled) is None
    assert [search.search(batch_of_9, context, 1000, check_cancelled) for _ in range(3)] == [
        batch_of_9,
        None,
        batch_of_9,
    ]
    assert attempts == [(9, 1000), (9, 4), (9, 2), (9, 4), (9, 2)]
    room[0] = 0
    with pytest.raises(torch.OutOfMemoryError):
        search.search(batch_of_1, context, 1000, check_cancelled)


def check_cancelled() -> None:
    pass


def test_a_batch_that_does_not_fit_is_refused_unless_it_is_one_request(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, context, search = make_search(device)
    batch_of_1, batch_of_2 = (
        RequestBatch.from_requests([SearchRequest(source_ids=[5] * 3, max_length=9)] * count) for count in (1, 2)
    )
    monkeypatch.setattr(beam_search, "estimate_max_source_tokens", lambda *_: 6)
    assert search.has_room_for(batch_of_2, context)
    monkeypatch.setattr(beam_search, "MAX_TREE_NODES", 35)
    assert not search.has_room_for(batch_of_2, context)
    monkeypatch.setattr(beam_search, "MAX_TREE_NODES", 36)
    assert search.has_room_for(batch_of_2, context)
    monkeypatch.setattr(beam_search, "estimate_max_source_tokens", lambda *_: 5)
    assert not search.has_room_for(batch_of_2, context)
    monkeypatch.setattr(beam_search, "estimate_max_source_tokens", lambda *_: 1)
    assert search.has_room_for(batch_of_1, context)


def test_there_are_no_more_rows_than_the_longest_source_leaves_work_for() -> None:
    equal = np.full(5000, 10)
    assert beam_search.choose_row_count(equal, 1024, 4) == 1024
    assert beam_search.choose_row_count(equal[:100], 1024, 4) == 100
    mixed = np.array([100, *[20] * 4000])
    assert 600 < beam_search.choose_row_count(mixed, 1024, 4) <= 801
    assert [beam_search.round_up_rows(rows) for rows in (1, 9, 100, 769)] == [8, 12, 128, 1024]
