"""Texts that go on from prompts, one token after the other: the likeliest, or one drawn by chance. No beams (those are
`search`'s, through `prompts`), no words (`generator`): ids in, ids out.

A step is one function on a small state. On an NVIDIA GPU it is recorded as a CUDA graph and repeated from there: the
choice of the token, the cache and the test for the end are all part of it, and the host asks only now and then who is
done. Such a step looks at more columns of the cache than are written, up to the next multiple of STRETCH; the rest is
hidden. `Desk` is its memory, which stays for the next texts; `Sheet` is memory for once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol

import torch
from torch import Tensor

from attent.decode.draw import drawn
from attent.decode.options import Job, Sampling
from attent.decode.prompts import read
from attent.decode.rules import MinLength, NoLoops, NoRepeat, Rule, Written, apply
from attent.models import CausalLM
from attent.nn import Cache

Reason = Literal["end", "stop", "length"]
NEVER = float("-inf")
STRETCH = 128  # columns of a cache that one recording more looks at
WARM = 2  # steps before one is recorded: what is only done once must not be part of it
UNASKED = 16  # steps on an accelerator before the host asks who is done: to ask is to wait
FEWER = 0.75  # texts that are done are cleared away when no more than this share is left


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What a text is to go on from, in ids."""

    ids: Sequence[int]  # one at least
    limit: int  # tokens that may be written, the end counted
    number: int = 0  # what chance depends on


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How the next token is chosen, the same for all texts."""

    ends: tuple[int, ...]  # each ends a text
    never: tuple[int, ...] = ()  # ids that are not written
    sampling: Sampling | None = None  # None: the likeliest; its seed is part of a prompt's number
    min_length: int = 0
    no_repeat_ngram_size: int = 0
    no_loops: bool = False

    @property
    def recordable(self) -> bool:
        """Rules that look things up in what is written are left as they are."""
        return not self.no_repeat_ngram_size and not self.no_loops


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What was written behind one prompt."""

    ids: tuple[int, ...]  # without the end
    log_probs: tuple[float, ...]  # of each of them, and of the end where there is one
    reason: Reason


@dataclass(frozen=True, eq=False)
class Plan:
    """A manner, on a device."""

    manner: Manner
    ends: Tensor
    never: Tensor
    rules: tuple[Rule, ...]

    @classmethod
    def of(cls, manner: Manner, device: torch.device) -> Plan:
        ends, never = (torch.tensor(ids, dtype=torch.int64, device=device) for ids in (manner.ends, manner.never))
        return cls(manner, ends, never, tuple(rules_of(manner, device)))


def rules_of(manner: Manner, device: torch.device) -> Iterator[Rule]:
    if manner.min_length:
        yield from (MinLength(manner.min_length, end, device) for end in manner.ends)
    if manner.no_repeat_ngram_size:
        yield NoRepeat(manner.no_repeat_ngram_size, device)
    if manner.no_loops:
        yield NoLoops(device)


# --- the state, and one step ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Texts:
    """B texts under way."""

    read: Tensor  # (B,) the token that each reads next
    tokens: Tensor  # (B, T + 1) what is written; in the last column, what those write who are done
    log_probs: Tensor  # (B, T + 1)
    counts: Tensor  # (B,) tokens that are written
    limits: Tensor  # (B,) tokens that may be
    numbers: Tensor  # (B,)
    done: Tensor  # (B,) it has ended, or reached its limit: it stays as it is
    memories: tuple[Tensor, ...]  # (B, S) of each rule

    @classmethod
    def new(cls, last: Tensor, prompts: Sequence[Prompt], width: int, plan: Plan) -> Texts:
        B, device = len(prompts), last.device
        limits = torch.tensor([prompt.limit for prompt in prompts], device=device)
        numbers = torch.tensor([prompt.number for prompt in prompts], device=device)
        tokens = torch.zeros(B, width + 1, dtype=torch.int64, device=device)
        memories = tuple(rule.begin([Job(source=())] * B).to(device) for rule in plan.rules)
        none = torch.zeros_like(limits)
        return cls(last, tokens, tokens.float(), none, limits, numbers, none.bool(), memories)

    def of(self, rows: Tensor) -> Texts:
        plain = {f.name: getattr(self, f.name).index_select(0, rows) for f in fields(self) if f.name != "memories"}
        return Texts(**plain, memories=tuple(memory.index_select(0, rows) for memory in self.memories))

    def tensors(self) -> Iterator[Tensor]:
        yield from (getattr(self, f.name) for f in fields(self) if f.name != "memories")
        yield from self.memories


@torch.no_grad()
def step(model: CausalLM, cache: Cache, texts: Texts, plan: Plan) -> Texts:
    """Every text that is not done one token longer."""
    held = cache.lengths
    logits = model.step(texts.read[:, None], cache)[:, 0]
    token, log_prob = chosen(logits, texts, plan)
    after = written(texts, token, log_prob, plan)
    if held is not None:  # who is done stays where it is, and never runs out of room
        cache.lengths = torch.where(after.done, held, held + 1)
    return after


def chosen(logits: Tensor, texts: Texts, plan: Plan) -> tuple[Tensor, Tensor]:
    """(B, V) -> the next token of each, (B,), and its log-probability by the model, whatever rules and chance do."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if plan.manner.never:
        logits = logits.index_fill(-1, plan.never, NEVER)
    total = logits.logsumexp(-1)
    if plan.rules:
        end = plan.manner.ends[0] if plan.manner.ends else 0
        so_far = Written(texts.tokens[:, :-1], texts.counts, texts.limits)
        logits = apply(plan.rules, logits, texts.memories, so_far, end)
    if plan.manner.sampling is None:
        token = logits.argmax(-1)
    else:
        token = drawn(logits[:, None], plan.manner.sampling, texts.numbers[:, None], texts.counts)[:, 0]
    return token, (logits.gather(-1, token[:, None])[:, 0] - total).float()


def written(texts: Texts, token: Tensor, log_prob: Tensor, plan: Plan) -> Texts:
    at = torch.where(texts.done, texts.tokens.shape[1] - 1, texts.counts)[:, None]
    counts = texts.counts + ~texts.done
    ended = (token[:, None] == plan.ends).any(-1)
    memories = zip(plan.rules, texts.memories, strict=True)
    return Texts(
        read=token,
        tokens=texts.tokens.scatter(1, at, token[:, None]),
        log_probs=texts.log_probs.scatter(1, at, log_prob[:, None]),
        counts=counts,
        limits=texts.limits,
        numbers=texts.numbers,
        done=texts.done | ended | (counts >= texts.limits),
        memories=tuple(rule.advance(memory, token) for rule, memory in memories),
    )


# --- where it is kept -------------------------------------------------------------------------------------------------


class Memory(Protocol):
    """Texts and what the model keeps of them."""

    @property
    def texts(self) -> Texts: ...

    def step(self, held: int) -> None:
        """One token more; no row of the cache holds more than `held` columns before."""

    def keep(self, rows: Sequence[int]) -> bool:
        """Go on with these rows alone. False: all stay."""


class Sheet:
    """Memory for one batch, as large as it needs."""

    def __init__(self, model: CausalLM, prompts: Sequence[Prompt], plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.cache = model.begin(rows=len(prompts), capacity=room(prompts))
        last = read(model, self.cache, [prompt.ids for prompt in prompts])
        self.texts = Texts.new(last, prompts, max(prompt.limit for prompt in prompts), plan)

    def step(self, held: int) -> None:
        self.cache.used = held
        self.texts = step(self.model, self.cache, self.texts, self.plan)

    def keep(self, rows: Sequence[int]) -> bool:
        kept = torch.tensor(rows, device=self.texts.read.device)
        self.texts = self.texts.of(kept)
        self.cache.reorder(kept)
        return True


class Desk:
    """Memory that stays in its place, for batches of so many texts one after the other, and the recordings of steps
    that read and write it. Without a GPU each step is done instead of recorded, which shows that it is the same."""

    def __init__(self, model: CausalLM, rows: int, capacity: int, plan: Plan) -> None:
        self.model, self.plan, self.capacity = model, plan, capacity
        self.cache = model.begin(rows=rows, capacity=capacity)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=plan.ends.device)
        empty = [Prompt(ids=(0,), limit=1)] * rows
        self.texts = Texts.new(self.lengths.clone(), empty, capacity, plan)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.lengths.is_cuda else None
        self.steps = 0

    def begin(self, prompts: Sequence[Prompt]) -> None:
        """Other texts in the same place; what is left of earlier ones is hidden, as all later columns are."""
        self.cache.used, self.cache.lengths = 0, None
        last = read(self.model, self.cache, [prompt.ids for prompt in prompts])
        self._take(Texts.new(last, prompts, self.capacity, self.plan))
        self.lengths.copy_(torch.tensor([len(prompt.ids) - 1 for prompt in prompts]))
        self.cache.lengths = self.lengths

    def step(self, held: int) -> None:
        upto = min(-(-(held + 1) // STRETCH) * STRETCH, self.capacity)
        self.steps += 1
        if self.pool is None or self.steps <= WARM:
            self._step(upto)
            return
        if upto not in self.graphs:
            self.graphs[upto] = self._recorded(upto)
        self.graphs[upto].replay()

    def keep(self, rows: Sequence[int]) -> bool:
        return False

    def _recorded(self, upto: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on with work of their own.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            self._step(upto)
        return graph

    def _step(self, upto: int) -> None:
        self.cache.used = upto - 1
        self._take(step(self.model, self.cache, self.texts, self.plan))
        assert self.cache.lengths is not None
        self.lengths.copy_(self.cache.lengths)
        self.cache.lengths = self.lengths

    def _take(self, new: Texts) -> None:
        for mine, other in zip(self.texts.tensors(), new.tensors(), strict=True):
            if mine is not other:
                mine.copy_(other)


def can_record(device: torch.device) -> bool:
    return device.type == "cuda"


def unasked(device: torch.device) -> int:
    """Steps between questions who is done."""
    return 1 if device.type == "cpu" else UNASKED


def room(prompts: Sequence[Prompt]) -> int:
    """Columns for the longest, whose last token is never read; one that is done writes its last column again."""
    return max(len(prompt.ids) + prompt.limit - 1 for prompt in prompts)


# --- a batch at work --------------------------------------------------------------------------------------------------


class Flow:
    """A batch of prompts. `rows` are their places among those given; `live` those of which nothing is known yet."""

    def __init__(self, prompts: Sequence[Prompt], memory: Memory, ends: Sequence[int]) -> None:
        self.prompts, self.memory, self.ends = prompts, memory, frozenset(ends)
        self.rows = list(range(len(prompts)))
        self.live = set(self.rows)
        self.stopped: set[int] = set()
        self.steps = self.told = 0

    def run(self) -> None:
        """As many steps as may go by without asking."""
        most = max(self.prompts[place].limit for place in self.live)
        for _ in range(min(unasked(self.memory.texts.read.device), most - self.steps)):
            self.memory.step(max(self._held(place) for place in self.rows))
            self.steps += 1

    def _held(self, place: int) -> int:
        """Columns of the cache that a row may hold."""
        prompt = self.prompts[place]
        return len(prompt.ids) - 1 + min(self.steps, prompt.limit - 1)

    def news(self) -> list[tuple[int, list[int]]]:
        """What live texts have written since this was last asked: their places, and tokens, the end among them."""
        texts = self.memory.texts
        counts, tokens = texts.counts.tolist(), texts.tokens[:, self.told : self.steps].tolist()
        found = [
            (place, new[: count - self.told])
            for place, count, new in zip(self.rows, counts, tokens, strict=True)
            if place in self.live
        ]
        self.told = self.steps
        return found

    def stop(self, place: int) -> None:
        """Its text is not wanted any further."""
        self.stopped.add(place)
        self.memory.texts.done[self.rows.index(place)] = True

    def finished(self) -> list[tuple[int, Finished]]:
        """What is done, each once; its rows are given up where that saves work."""
        done = self.memory.texts.done.tolist()
        over = [row for row, place in enumerate(self.rows) if done[row] and place in self.live]
        found = list(self._found(over)) if over else []
        self.live -= {place for place, _ in found}
        left = [row for row, place in enumerate(self.rows) if place in self.live]
        if left and len(left) <= FEWER * len(self.rows) and self.memory.keep(left):
            self.rows = [self.rows[row] for row in left]
        return found

    def _found(self, over: list[int]) -> Iterator[tuple[int, Finished]]:
        some = self.memory.texts.of(torch.tensor(over, device=self.memory.texts.read.device))
        columns = (some.counts.tolist(), some.tokens.tolist(), some.log_probs.tolist())
        for row, count, tokens, log_probs in zip(over, *columns, strict=True):
            place, ended = self.rows[row], count > 0 and tokens[count - 1] in self.ends
            reason: Reason = "stop" if place in self.stopped else "end" if ended else "length"
            ids = tuple(tokens[: count - ended])
            yield place, Finished(ids=ids, log_probs=tuple(log_probs[:count]), reason=reason)


def write(prompts: Sequence[Prompt], memory: Memory, ends: Sequence[int]) -> list[Finished]:
    """All texts of a batch, for those who have ids."""
    flow = Flow(prompts, memory, ends)
    found: dict[int, Finished] = {}
    while flow.live:
        flow.run()
        found.update(flow.finished())
    return [found[place] for place in range(len(prompts))]
