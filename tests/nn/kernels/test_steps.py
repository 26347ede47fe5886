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

from attent.decode import lane, lanes
from attent.decode.engine import TorchEngine
from attent.decode.layers import refuses
from attent.decode.lots import Found, Lot, in_order, sizes
from attent.decode.options import Hypothesis, Job, Sampling, Search
from attent.decode.rules import LEAST, LONGEST_UNIT, TIMES, MinLength, NoLoops, NoRepeat, Written, looping
from attent.decode.search import Plan, banned, likeliest, unwritten
from attent.look import record
from attent.look.silence import Part, silenced
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import decoder_of
from attent.nn import AlibiConfig, LearnedConfig, Mask, StackConfig
from attent.nn.attend import explicit
from attent.nn.kernels import INTERPRETED, steps
from tests.decode.toys import texts

START, END, PAD = 0, 1, 2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Specialised:
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


@pytest.fixture(autouse=INTERPRETED)
def specialised(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "embed",
        "add",
        "look_back",
        "look_across",
        "look_around",
        "survey",
        "unloop",
        "pick",
        "turn",
        "trace",
    ):
        monkeypatch.setattr(steps, f"_{name}", Specialised(getattr(steps, f"_{name}")))


def rows_of(lengths: list[int], memory: list[int], limit: int, device: torch.device) -> Tensor:
    """As `steps` has them: each row's cache and memory behind those before it; the second row has no source."""
    rows = torch.zeros(len(lengths), steps.ROW, dtype=torch.int32)
    for i, (length, tokens) in enumerate(zip(lengths, memory, strict=True)):
        before = sum(memory[:i])
        rows[i] = torch.tensor([i if i != 1 else -1, length, i * limit, before, tokens, limit, 0, 0])
    return rows.to(device)


# --- attention -------------------------------------------------------------------------------------------------------


def test_the_first_token_of_one_sees_itself(device: torch.device) -> None:
    qkv = torch.randn(1, 48, device=device)
    keys, values = torch.zeros(2, 1, 1, 16, device=device)
    rows, nobody = rows_of([0], [0], 1, device), torch.zeros(2, 1, dtype=torch.int8, device=device)
    got = steps.look_back(qkv, keys, values, nobody, rows, 1, 1, 0.3)
    torch.testing.assert_close(got, qkv[:, 32:])
    assert torch.equal(values[0], qkv[:, 32:])


@pytest.mark.parametrize(("K", "heads", "shared"), [(1, 2, 2), (3, 4, 2), (4, 2, 1)])
def test_each_beam_sees_the_columns_of_its_ancestors_and_its_own(
    K: int, heads: int, shared: int, device: torch.device, dtype_of: torch.dtype
) -> None:
    D, limit, lengths = 16, 40, [0, 5, 1, 17, 39]
    R, columns = len(lengths), len(lengths) * limit * K
    rows = rows_of(lengths, [0] * R, limit, device)
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
    got = steps.look_back(qkv, keys, values, table, rows, K, heads, 0.3).float().view(R, K, heads, D)
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
            wanted = explicit(q[None, :, None], *seen, Mask(), None, 0.3)[0][0, :, 0]
            torch.testing.assert_close(got[row, k], wanted, rtol=TOLERANCE[dtype_of], atol=TOLERANCE[dtype_of])
            column = (row * limit + length) * K + k
            assert torch.equal(keys[:, column].float(), own_key)
            assert torch.equal(values[:, column].float(), own_value)
    changed = (keys != past_keys).any(-1).any(0).sum()
    assert changed == (R - 1) * K


def test_the_beams_of_a_row_look_at_its_own_source(device: torch.device, dtype_of: torch.dtype) -> None:
    K, heads, shared, D, memory = 3, 4, 2, 16, [1, 9, 16, 35]
    rows = rows_of([0] * 4, memory, 10, device)
    q = torch.randn(4 * K, heads * D, device=device).to(dtype_of)
    kept = torch.randn(sum(memory), 2, shared, D, device=device).to(dtype_of)
    got = steps.look_across(q, kept, rows, K, 0.3).float().view(4, K, heads, D)
    for row in (0, 2, 3):
        begin = sum(memory[:row])
        k, v = (kept[begin : begin + memory[row], i].float().transpose(0, 1)[None] for i in range(2))
        wanted = explicit(q.float().view(4, K, heads, D)[row].transpose(0, 1)[None], k, v, Mask(), None, 0.3)[0][0]
        torch.testing.assert_close(got[row].transpose(0, 1), wanted, rtol=TOLERANCE[dtype_of], atol=TOLERANCE[dtype_of])


def test_a_source_sees_all_of_itself_and_nothing_else(device: torch.device, dtype_of: torch.dtype) -> None:
    H, shared, D, lengths = 4, 2, 16, [40, 33, 16, 3, 1]
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    qkv = torch.randn(sum(lengths), (H + 2 * shared) * D, device=device).to(dtype_of)
    places = (torch.tensor(x, dtype=torch.int32, device=device) for x in (begins, lengths))
    got = steps.look_around(qkv, *places, max(lengths), (H, shared, D), 0.3).float()
    for begin, length in zip(begins, lengths, strict=True):
        mine = qkv[begin : begin + length].float().unflatten(-1, (-1, D)).transpose(0, 1)[None]
        wanted = explicit(*mine.split([H, shared, shared], 1), Mask(), None, 0.3)[0][0].transpose(0, 1).flatten(1)
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
    rows = rows_of([0, 0], [0, 0], 9, device)
    rows[1, 0], rows[1, 1] = 1, 5
    settings = torch.tensor([3, 0], dtype=torch.int32, device=device)  # row 0 may not end yet
    ids, gains = steps.likely(logits, rows, settings, K, END)
    total = logits.logsumexp(-1, keepdim=True)
    allowed = logits.clone()
    allowed[:K, END] = float("-inf")
    values, places = likeliest(allowed, 1 if K == 1 else 2 * K)
    assert ids.tolist() == places.tolist()
    torch.testing.assert_close(gains, values - total, rtol=1e-5, atol=1e-5)


def test_words_that_are_all_impossible_have_no_share_in_the_sum(device: torch.device) -> None:
    """Those of a whole chunk, while the others are far below 0."""
    V = steps.GROUP * steps.CHUNK + 1
    logits = torch.full((1, V), -200.0, device=device)
    logits[0, 7] = -150.0
    logits[0, -1] = float("-inf")
    ids, gains = steps.likely(
        logits, rows_of([0], [0], 9, device), torch.zeros(2, dtype=torch.int32, device=device), 1, END
    )
    assert ids.tolist() == [[7]]
    assert float(gains) == pytest.approx(0.0, abs=1e-5)


def in_circles(units: list[list[int]], K: int, dice: random.Random) -> list[list[int]]:
    """What the K beams of each row wrote at each place: nearly the same unit again and again."""
    return [
        [unit[t % len(unit)] if dice.random() > 0.01 else 3 for _ in range(K)] for unit in units for t in range(LIMIT)
    ]


WORDS, LIMIT = 200, 40
LOOP = steps.Loop(LONGEST_UNIT, TIMES, LEAST)


@pytest.mark.parametrize("K", [1, 3])
def test_no_word_closes_a_loop(K: int, device: torch.device, dtype_of: torch.dtype) -> None:
    """Beside the rule of the search: beams of mixed descent, a row at rest, and one that may go in circles. Some are
    just long enough, others not."""
    R, dice = 16 if INTERPRETED else 200, random.Random(K)
    units = [[dice.randrange(4, WORDS) for _ in range(row % 8 + 1)] for row in range(R - 1)] + [[WORDS - 1]]
    shortest = [LOOP.before(len(unit)) for unit in units]
    lengths = [dice.choice((one, one, one - 1, 0, 1, 39)) for one in shortest]
    rows = rows_of(lengths, [0] * R, LIMIT, device)
    rows[:, 6] = rows[:, 2]  # trees lie as caches do
    some = [Job(source=[5], no_loops=row != 2) for row in range(R)]
    wrote = in_circles(units, K, dice)
    whose = [[dice.randrange(K) for _ in range(K)] for _ in wrote]
    logits = torch.randn(R * K, WORDS, device=device).to(dtype_of)
    rule = NoLoops(device, every=False)
    state = rule.begin(some).repeat_interleave(K, 0)
    for place in range(R * K):
        first, length, k = place // K * LIMIT, lengths[place // K], place % K
        ids = [wrote[first + t][whose[first + t + 1][k] if t + 1 < length else k] for t in range(length)]
        for token in ids:
            state[place] = rule.advance(state[place, None], torch.tensor([token], device=device))[0]
        logits[place, ids] += 5
    halves = torch.tensor([whose, whose], dtype=torch.int8, device=device).view(2, R, -1)
    for row, length in enumerate(lengths):
        halves[1 - length % 2, row] = (halves[length % 2, row] + 1) % K  # of the step before
    past = SimpleNamespace(
        loop=LOOP,
        no_loops=torch.tensor([job.no_loops for job in some], dtype=torch.int32, device=device),
        tokens=torch.tensor(wrote, dtype=torch.int32, device=device),
        ancestors=halves.view(2, -1),
    )
    scores = logits.float().log_softmax(-1)
    nothing = Written(*torch.zeros(3, R * K, 1, dtype=torch.int64, device=device))
    allowed = rule.forbid(scores.clone(), state, nothing)
    assert int((allowed != scores).any(1).sum()) > R * K // 8
    values, words = likeliest(allowed, 1 if K == 1 else 2 * K)
    got, gains = steps.likely(logits, rows, torch.zeros(2, dtype=torch.int32, device=device), K, END, past)
    at_work = [place for place in range(R * K) if place // K != 1]
    assert got[at_work].tolist() == words[at_work].tolist()
    torch.testing.assert_close(gains[at_work], values[at_work], rtol=1e-5, atol=1e-5)


# --- the lane --------------------------------------------------------------------------------------------------------


def made(device: torch.device, ends: float, vocab: int, **more: Any) -> Seq2Seq:
    torch.manual_seed(0)
    stack = StackConfig(**{"layers": 1, "width": 32, "heads": 2, "inner": 24, "dropout": 0.0, **more})
    config = Seq2SeqConfig(
        vocab=vocab, encoder=stack, decoder=decoder_of(stack), output_bias=True, start=START, end=END
    )
    model = Seq2Seq(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        assert model.output.bias is not None
        model.output.bias[END] += ends
    return model.eval().to(device)


def jobs(count: int, vocab: int) -> list[Job]:
    chance = random.Random(0)
    return [
        Job(
            source=[*(chance.randrange(3, vocab) for _ in range(chance.randrange(20))), END],
            number=number,
            limit=chance.choice((2, 5) if INTERPRETED else (1, 2, 5, 9, 30)),
        )
        for number in range(count)
    ]


def in_the_lane(model: Seq2Seq, some: list[Job], plan: Plan, most: int) -> list[list[Hypothesis]]:
    assert lane_of(model, some, plan) is not None
    return searched(model, some, plan, most, record=True)


def lane_of(model: Seq2Seq, some: list[Job], plan: Plan) -> lane.Lane | None:
    return lanes.lane_of(model, *sizes(some), plan, unwritten(START, END, (PAD,)))


def plan_of(search: Search, device: torch.device, rules: Any = ()) -> Plan:
    return Plan(search=search, start=START, end=END, never=banned(START, END, (PAD,), device), rules=rules)


def searched(model: Seq2Seq, some: list[Job], plan: Plan, most: int = 50, record: bool = False) -> list[Any]:
    found = list(engine_of(model, plan, most, record).search(some, plan.search))
    return [best for _, best in sorted(found, key=lambda one: one[0])]


def engine_of(model: Seq2Seq, plan: Plan, most: int, record: bool) -> TorchEngine[Any]:
    return TorchEngine(
        model=model,
        start=START,
        end=END,
        never=(PAD,),
        pad=PAD,
        device=plan.never.device,
        batch_size=lambda source, target, beams: most,
        make_rules=lambda search, jobs: (plan.rules, None),
        record=record,
        say=pytest.fail,  # that the lane was left
    )


PRE = {"norm_order": "pre", "norm": "rms", "kv_heads": 1, "activation": "silu", "gated": True}
LEARNED = {"norm_order": "pre", "positions": LearnedConfig(max_length=30), "bias": False}
CASES: dict[str, Any] = {
    "greedy": (2.0, 30, {"embedding_norm": True}, Search(beam_size=1), 0, 2),
    "beam 4": (3.0, 30, {}, Search(beam_size=4, n_best=2, length_penalty_type="wu"), 0, 2),
    "impatient": (4.0, 150, PRE, Search(beam_size=3, n_best=3, length_penalty=1.0, patience=1.0), 0, 2),
    "not too short": (6.0, 70, LEARNED, Search(beam_size=2, length_penalty_type="none", cut_equals=True), 3, 4),
}


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "SMALLEST", 2)
    monkeypatch.setattr(lane, "LOOK", 1)
    monkeypatch.setattr(lane, "READ_AT_ONCE", 40)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize(("ends", "vocab", "more", "search", "least", "most"), CASES.values(), ids=CASES.keys())
def test_the_lane_finds_what_the_search_finds(
    ends: float,
    vocab: int,
    more: Any,
    search: Search,
    least: int,
    most: int,
    device: torch.device,
) -> None:
    """With fewer rows than sources, so that rows are filled again; and read in several parts."""
    model, some = made(device, ends, vocab, **more), jobs(3 if INTERPRETED else 60, vocab)
    rules = (MinLength(least, END, device),) if least else ()
    plan = plan_of(search, device, rules)
    wanted = searched(model, some, plan)
    got = in_the_lane(model, some, plan, most)
    assert [texts(one) for one in got] == [texts(one) for one in wanted]
    for ours, theirs in zip(got, wanted, strict=True):
        assert [one.score for one in ours] == pytest.approx([one.score for one in theirs], abs=1e-4)
        assert [one.log_prob for one in ours] == pytest.approx([one.log_prob for one in theirs], abs=1e-4)
    assert INTERPRETED or len({one.ended for best in wanted for one in best}) == 2


@pytest.mark.usefixtures("small_steps")
@pytest.mark.skipif(INTERPRETED, reason="takes minutes in the interpreter")
@pytest.mark.parametrize("beams", [1, 4])
def test_many_rows_that_become_few_find_what_the_search_finds(beams: int, device: torch.device) -> None:
    """Rows come to rest anywhere among the others, and steps become smaller again and again."""
    model, some = made(device, 2.0, 30), jobs(300, 30)
    plan = plan_of(Search(beam_size=beams), device)
    wanted, got = searched(model, some, plan), in_the_lane(model, some, plan, 96)
    assert [texts(one) for one in got] == [texts(one) for one in wanted]


@pytest.mark.usefixtures("small_steps")
def test_for_a_lot_is_found_what_is_found_for_its_jobs(device: torch.device) -> None:
    model, some = made(device, 3.0, 30), jobs(3 if INTERPRETED else 60, 30)
    plan = plan_of(Search(beam_size=2, n_best=2), device)
    order = in_order(*sizes(some))
    found = engine_of(model, plan, 2, True).search_lot(Lot.of([some[i] for i in order], False), plan.search)
    assert isinstance(found, Found)
    got = dict(zip(order, found.hypotheses(2), strict=True))
    assert [got[place] for place in range(len(some))] == in_the_lane(model, some, plan, 2)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("beams", [1, 2] if INTERPRETED else [1, 2, 4])
def test_only_who_may_goes_in_circles(beams: int, device: torch.device) -> None:
    """As in the search, with more sources than rows."""
    count, limit = (3, 14) if INTERPRETED else (60, 50)
    model = made(device, -50.0, 30)
    some = [replace(job, limit=limit, no_loops=job.number % 3 > 0) for job in jobs(count, 30)]
    plan = plan_of(Search(beam_size=beams), device, (NoLoops(device, every=False),))
    wanted, got = searched(model, some, plan), in_the_lane(model, some, plan, 2 if INTERPRETED else 24)
    assert [texts(one) for one in got] == [texts(one) for one in wanted]
    assert not any(looping(best[0].ids) for job, best in zip(some, got, strict=True) if job.no_loops)
    free = searched(model, some, plan_of(plan.search, device))
    assert any(looping(best[0].ids) for job, best in zip(some, free, strict=True) if job.no_loops)
    assert any(looping(best[0].ids) for job, best in zip(some, got, strict=True) if not job.no_loops)
    other = [replace(job, no_loops=not job.no_loops) for job in some]  # nothing is kept from the last search
    wanted, got = searched(model, other, plan), in_the_lane(model, other, plan, 2 if INTERPRETED else 24)
    assert [texts(one) for one in got] == [texts(one) for one in wanted]


@pytest.mark.usefixtures("small_steps")
def test_a_lane_is_kept_and_sees_weights_that_were_changed_in_place(device: torch.device) -> None:
    """Also by those whom nothing counts, and by whoever was there first in inference mode."""
    model, some, plan = made(device, 3.0, 30), jobs(2, 30), plan_of(Search(beam_size=2), device)
    with torch.inference_mode():
        in_the_lane(model, some, plan, 2)
    kept = lane_of(model, some, plan)
    for parameter in model.parameters():
        parameter.data.mul_(-0.7)
    with silenced(model, [Part("decoder.blocks.0.cross")]):
        wanted = searched(model, some, plan)
        assert [texts(one) for one in in_the_lane(model, some, plan, 2)] == [texts(one) for one in wanted]
    assert lane_of(model, some, plan) is kept
    model.decoder.blocks[0].own.scale *= 2
    assert lane_of(model, some, plan) is not kept


def test_lanes_of_weights_that_are_elsewhere_now_are_given_up(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, some = made(device, 3.0, 30), jobs(2, 30)
    plans = [plan_of(Search(beam_size=beams), device) for beams in (1, 2, 3)]
    one, two, three = (lane_of(model, some, plan) for plan in plans)
    assert list(lanes.LANES[model].values()) == [two, three]
    model.output.bias = torch.nn.Parameter(torch.zeros_like(model.output.weight[:, 0]))
    again = lane_of(model, some, plans[0])
    assert again is not one
    assert list(lanes.LANES[model].values()) == [again]
    monkeypatch.setattr(lanes.kernels, "usable", lambda x: False)
    assert lane_of(model, some, plans[0]) is None
    assert model not in lanes.LANES


def test_what_is_not_plain_is_left_to_the_search(device: torch.device) -> None:
    model, search = made(device, 3.0, 30), Search(beam_size=2)
    assert lanes.can(model, plan_of(search, device))
    for other in (replace(search, groups=2), Search(sampling=Sampling()), replace(search, beam_size=17)):
        assert not lanes.can(model, plan_of(other, device))
    assert not lanes.can(model, plan_of(search, device, (NoRepeat(3, device),)))
    assert not lanes.can(model, plan_of(replace(search, beam_size=16), device))  # hardly more words than that
    assert lanes.can(model, plan_of(replace(search, beam_size=10), device, (NoLoops(device),)))
    assert not lanes.can(model, plan_of(replace(search, beam_size=11), device, (NoLoops(device),)))
    with record(model):
        assert refuses(model) is not None
    assert refuses(model) is None
    hook = model.decoder.blocks[0].register_forward_hook(lambda *_: None)
    assert refuses(model) is not None
    hook.remove()
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert refuses(model) is not None
    hook.remove()
    assert refuses(model) is None
    assert refuses(made(device, 3.0, 30, positions=AlibiConfig())) is not None
    assert refuses(made(device, 3.0, 30, window=(3, None))) is not None


class Short(torch.nn.Parameter):
    """As weights of few bits are."""


def with_a_forward(model: Seq2Seq) -> None:
    model.decoder.blocks[0].own.forward = lambda *_: None  # type: ignore[method-assign, assignment]


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
    model = made(device, 3.0, 30)
    change(model)
    assert refuses(model) is not None


def test_what_has_no_position_is_left_to_the_search(device: torch.device) -> None:
    model, plan = made(device, 3.0, 30, positions=LearnedConfig(max_length=8)), plan_of(Search(beam_size=2), device)
    fitting = [Job(source=[5] * 8, limit=8)]
    assert lane_of(model, fitting, plan) is not None
    for other in (Job(source=[5] * 9, limit=8), Job(source=[5] * 8, limit=9), Job(source=[], limit=8)):
        assert lane_of(model, [*fitting, other], plan) is None


# --- memory ----------------------------------------------------------------------------------------------------------


def made_lane(device: torch.device, beams: int = 2) -> tuple[Seq2Seq, Plan, lane.Lane]:
    model, plan = made(device, 3.0, 30), plan_of(Search(beam_size=beams, patience=1e10), device)
    return model, plan, lane.Lane(model, plan)


def test_a_board_that_had_to_grow_has_room_for_what_was_before(device: torch.device) -> None:
    model, plan, mine = made_lane(device)
    long = replace(lane.LEAST, longest=3000, places=3000)
    many = replace(lane.LEAST, sources=5000, rows=96)
    first = mine._board(model, lane.LEAST, plan)
    assert mine._board(model, replace(lane.LEAST, rows=1, longest=2), plan) is first
    mine._board(model, long, plan)
    both = mine._board(model, many, plan)
    assert mine._board(model, long, plan) is both
    assert mine._board(model, many, plan) is both
    none = torch.zeros(0, steps.ROW, dtype=torch.int32, device=device)
    both.begin(none, none[:, : steps.SOURCE], none[:, 0], plan)
    assert both.settings.tolist() == [0, lane.FOREVER]


def test_rows_that_are_at_work_come_first_in_their_order(device: torch.device) -> None:
    model, plan, mine = made_lane(device)
    board = mine._board(model, lane.LEAST, plan)
    board.rows[:, 0] = torch.tensor([-1, 5, -1, 2, 7, -1, -1, -1])
    board.read[:] = torch.arange(16, device=device).view(8, 2)
    board.compact(4)
    assert board.rows[:4, 0].tolist() == [5, 2, 7, -1]
    assert board.read[:3].tolist() == [[2, 3], [6, 7], [8, 9]]
    board.rows[1, 0] = -1
    board.compact(4)
    assert board.rows[:, 0].tolist() == [5, 7, -1, -1, -1, -1, -1, -1]


def test_no_more_rows_are_held_than_their_targets_have_room_for(device: torch.device) -> None:
    model, plan, mine = made_lane(device)
    assert mine._held(2) == 0
    mine._board(model, replace(lane.LEAST, rows=40, places=1024), plan)
    assert mine._held(2) == 40
    assert mine._held(100) == 10


def test_after_a_shortage_fewer_rows_are_taken_until_it_has_gone_well(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, room = [], [2]

    def short(mine: lane.Lane, model: Seq2Seq, lot: Lot, plan: Plan, most: int, stop: Any) -> Any:
        mine._board(model, lane.LEAST, plan)
        asked.append((len(lot), most))
        if most > room[0]:
            raise torch.OutOfMemoryError
        return lot

    monkeypatch.setattr(lane.Lane, "_searched", short)
    model, plan, mine = made_lane(device)
    many, one = (Lot.of([Job(source=[5], limit=9)] * count, False) for count in (9, 1))
    assert mine.found(model, many, plan, 1000, stop) is None
    assert mine.board is None
    assert mine.found(model, many, plan, 1000, stop) is None
    assert [mine.found(model, many, plan, 1000, stop) for _ in range(3)] == [many, None, many]
    assert asked == [(9, 1000), (9, 4), (9, 2), (9, 4), (9, 2)]
    room[0] = 0
    with pytest.raises(torch.OutOfMemoryError):
        mine.found(model, one, plan, 1000, stop)


def stop() -> None:
    pass


def test_a_lot_for_which_there_is_no_room_is_not_taken_unless_it_is_one(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plan, mine = made_lane(device)
    one, two = (Lot.of([Job(source=[5] * 3, limit=9)] * count, False) for count in (1, 2))
    monkeypatch.setattr(lane, "room_for", lambda *_: 6)
    assert mine.takes(two, plan)
    monkeypatch.setattr(lane, "MOST_LEAVES", 35)
    assert not mine.takes(two, plan)
    monkeypatch.setattr(lane, "MOST_LEAVES", 36)
    assert mine.takes(two, plan)
    monkeypatch.setattr(lane, "room_for", lambda *_: 5)
    assert not mine.takes(two, plan)
    monkeypatch.setattr(lane, "room_for", lambda *_: 1)
    assert mine.takes(one, plan)


def test_there_are_no_more_rows_than_the_longest_source_leaves_work_for() -> None:
    equal = np.full(5000, 10)
    assert lane.useful(equal, 1024, 4) == 1024
    assert lane.useful(equal[:100], 1024, 4) == 100
    mixed = np.array([100, *[20] * 4000])
    assert 600 < lane.useful(mixed, 1024, 4) <= 801
    assert [lane.fitting(rows) for rows in (1, 9, 100, 769)] == [8, 12, 128, 1024]
