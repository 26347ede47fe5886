"""Search over what a model may write: one small step function on a state. It knows no architecture, only `begin` from
sources, `step` by a token of each beam, and beams that `follow` one another. Words are left to `translator`, batches to
`engine`; what can be asked for and how a hypothesis is scored stands in `options`.

Each source has K beams. Of all their continuations the 2K best are looked at: those among the first K that end are put
aside, the first K that do not end go on. So do fairseq, Hugging Face and CTranslate2. A beam of one is greedy search,
and with `sampling` each beam draws its own tokens.

Everything stays on the device: a step asks it for nothing. `done` tells who has nothing better to hope for, to a caller
who wants to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from attent.decode.demand import Demands, choose
from attent.decode.draw import drawn
from attent.decode.options import Job, Search
from attent.decode.rules import Rule, Written, apply

NEVER = float("-inf")
STEPS_UNSEEN = 8  # on an accelerator the host asks no more often than this who is done: to ask is to wait
CHUNK = 256  # tokens of a vocabulary that are first looked at by their best alone
PLACES = 2**24  # more than any vocabulary, or number of continuations, has


class Kept(Protocol):
    """What a model keeps between steps, for K beams of each source."""

    def follow(self, beams: Tensor) -> None:
        """(B, K): beam k of source b goes on from what its beam `beams[b, k]` has written."""

    def reorder(self, rows: Tensor) -> None:
        """Source i becomes what source `rows[i]` was; there may be fewer."""

    def put(self, rows: Tensor, new: Self) -> None:
        """Sources `rows` are replaced by those of `new`, none of which is longer than the longest here was."""

    def rewind(self, places: Sequence[int]) -> None:
        """How many tokens each source's beams have read: all of them, or 0 where they begin anew."""


State = TypeVar("State", bound=Kept)


class Writer(Protocol[State]):
    """What search asks of a model: begin from sources, then logits (B, K, V) behind the next tokens (B, K)."""

    def begin(self, source: Tensor, lengths: Tensor | None = None, *, capacity: int, beams: int = 1) -> State: ...

    def step(self, target: Tensor, state: State, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What stays the same in a whole search."""

    search: Search
    start: int
    end: int
    never: Tensor  # tokens that are not written: the start, padding
    rules: tuple[Rule, ...] = ()
    demands: Demands | None = None

    @property
    def beams(self) -> int:
        return self.search.beam_size if self.search.sampling is None else self.search.n_best

    @property
    def groups(self) -> int:
        """Beams that draw by chance know nothing of one another."""
        return self.search.groups if self.search.sampling is None else 1

    @property
    def moves(self) -> bool:
        """May a beam go on from another?"""
        return self.beams > 1 and self.search.sampling is None

    @property
    def all_rules(self) -> tuple[Rule, ...]:
        return self.rules if self.demands is None else (*self.rules, self.demands)

    def penalty(self, lengths: Tensor) -> Tensor:
        """What sums of log-probabilities are divided by: `Search.penalty` of many."""
        # On a CPU a power in float32 may differ in its last bit with the number's place among the others.
        exact = lengths.double() if lengths.device.type == "cpu" else lengths.float()
        match self.search.length_penalty_type:
            case "avg":
                return (exact.clamp(min=1) ** self.search.length_penalty).float()
            case "wu":
                return (((5 + exact) / 6) ** self.search.length_penalty).float()
            case "none":
                return torch.ones_like(lengths, dtype=torch.float32)


@dataclass(frozen=True, eq=False)
class Pool:
    """The best N hypotheses of each source that are finished, the best first; score -inf where there is none."""

    tokens: Tensor  # (B, N, T), the end where nothing is written
    sums: Tensor  # (B, N) of log-probabilities
    scores: Tensor  # (B, N) with the length penalty
    lengths: Tensor  # (B, N) with the end

    @classmethod
    def new(cls, tokens: Tensor) -> Pool:
        none = torch.full(tokens.shape[:2], NEVER, device=tokens.device)
        return cls(tokens, none, none, torch.zeros_like(none, dtype=torch.int64))

    def merged(self, other: Pool, plan: Plan) -> Pool:
        """The best of both; of equally good ones those that were here first."""
        both = self.beside(other, plan)
        return both.of(first(both.scores, self.scores.shape[1]))

    def beside(self, other: Pool, plan: Plan) -> Pool:
        both = Pool(*(torch.cat([getattr(self, f.name), getattr(other, f.name)], 1) for f in fields(self)))
        return both.distinct() if plan.groups > 1 else both

    def distinct(self) -> Pool:
        """Without what is there already: groups may find one and the same."""
        same = (self.tokens[:, :, None] == self.tokens[:, None]).all(-1)
        same = same & (self.lengths[:, :, None] == self.lengths[:, None])
        known = (same.tril(-1) & (self.scores > NEVER)[:, None]).any(-1)
        return Pool(self.tokens, self.sums, self.scores.masked_fill(known, NEVER), self.lengths)

    def of(self, places: Tensor) -> Pool:
        tokens = self.tokens.gather(1, places[:, :, None].expand(-1, -1, self.tokens.shape[2]))
        return Pool(tokens, *(x.gather(1, places) for x in (self.sums, self.scores, self.lengths)))


@dataclass(frozen=True, eq=False)
class Beams:
    """The state of a search for B sources: K beams each, and what has ended."""

    tokens: Tensor  # (B, K, T), the end where nothing is written
    sums: Tensor  # (B, K) of log-probabilities; -inf where a beam is empty
    lengths: Tensor  # (B,) tokens of every beam of a source
    limits: Tensor  # (B,) tokens that they may have, the end counted
    numbers: Tensor  # (B,) what chance depends on
    count: Tensor  # (B,) how many hypotheses have ended
    done: Tensor  # (B,) nothing better can come: all of the above stays as it is
    ended: Pool
    memories: tuple[Tensor, ...]  # (B, K, S) of each rule

    @classmethod
    def new(cls, jobs: Sequence[Job], capacity: int, plan: Plan) -> Beams:
        """The empty beginning, once for each group: if every beam had it, all would stay the same."""
        B, K, device = len(jobs), plan.beams, plan.never.device
        tokens = torch.full((B, K, capacity), plan.end, device=device)
        alone = torch.arange(K, device=device) % (K // plan.groups) == 0
        sums = torch.zeros(B, K, device=device).masked_fill(~(alone | (plan.search.sampling is not None)), NEVER)
        limits = torch.tensor([job.limit for job in jobs], device=device)
        numbers = torch.tensor([job.number for job in jobs], device=device)
        none = torch.zeros_like(limits)
        memories = (rule.begin(jobs).to(device) for rule in plan.all_rules)
        repeated = tuple(memory[:, None].expand(-1, K, -1).contiguous() for memory in memories)
        ended = Pool.new(tokens[:, :1].expand(-1, plan.search.n_best, -1))
        return cls(tokens, sums, none, limits, numbers, none, none.bool(), ended, repeated)

    def reordered(self, rows: Tensor) -> Beams:
        """Source i is what source `rows[i]` was."""
        return self._with(lambda mine, _: mine.index_select(0, rows), self)

    def put(self, rows: Tensor, new: Beams) -> Beams:
        """Rows become those of `new`, which has the same capacity."""
        return self._with(lambda mine, other: mine.index_copy(0, rows, other), new)

    def _with(self, change: Callable[[Tensor, Tensor], Tensor], other: Beams) -> Beams:
        names = [f.name for f in fields(self) if f.name not in ("ended", "memories")]
        plain = {name: change(getattr(self, name), getattr(other, name)) for name in names}
        pool = Pool(*(change(getattr(self.ended, f.name), getattr(other.ended, f.name)) for f in fields(Pool)))
        memories = tuple(change(*two) for two in zip(self.memories, other.memories, strict=True))
        return Beams(**plain, ended=pool, memories=memories)

    def next_read(self, start: int) -> Tensor:
        """(B, K) the token that each beam reads next."""
        before = (self.lengths - 1).clamp(min=0)[:, None, None].expand(-1, self.tokens.shape[1], 1)
        return self.tokens.gather(2, before)[:, :, 0].where(self.lengths[:, None] > 0, start)

    def written(self) -> Written:
        K = self.tokens.shape[1]
        lengths, limits = (x.repeat_interleave(K) for x in (self.lengths, self.limits))
        return Written(self.tokens.flatten(0, 1), lengths, limits)


@torch.no_grad()
def step(model: Writer[State], state: State, beams: Beams, plan: Plan) -> Beams:
    """Every beam of every source one token longer."""
    logits = model.step(beams.next_read(plan.start), state)
    grown, parents = grow(beams, logits, plan)
    if parents is not None:
        state.follow(parents)
    return grown


def grow(beams: Beams, logits: Tensor, plan: Plan) -> tuple[Beams, Tensor | None]:
    """The beams after one more token, and which beam (B, K) each goes on from; None: from itself."""
    logits, total = allowed(logits, beams, plan)
    if plan.search.sampling is not None:
        found = by_chance(beams, logits, total, plan)
    elif plan.groups > 1:
        found = in_groups(beams, logits, total, plan)
    elif plan.demands is not None:
        found = demanded(beams, logits, total, plan)
    else:
        found = the_best(beams, logits, total, plan)
    return advanced(beams, found, plan), found.parents if plan.moves else None


def allowed(logits: Tensor, beams: Beams, plan: Plan) -> tuple[Tensor, Tensor]:
    """Logits (B, K, V) without what may not be written, and (B, K, 1) what to subtract for log-probabilities.

    What is no word at all (`never`) has no share in the probabilities, nor has it in forced decoding; what only this
    search may not write keeps its own. So a score can be checked by reading the text.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = logits.index_fill_(-1, plan.never, NEVER)
    total = logits.logsumexp(-1, keepdim=True)
    if plan.all_rules:
        memories = [memory.flatten(0, 1) for memory in beams.memories]
        logits = apply(plan.all_rules, logits.flatten(0, 1), memories, beams.written(), plan.end).view_as(logits)
    return logits, total


# --- which continuations -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Found:
    """What was chosen at a step: hypotheses that end here, and those that go on; of each its beam, token and sum."""

    ends: tuple[Tensor, Tensor]  # (B, M) beams that end, sums; -inf: none
    parents: Tensor  # (B, K)
    tokens: Tensor  # (B, K)
    sums: Tensor  # (B, K)


def the_best(beams: Beams, logits: Tensor, total: Tensor, plan: Plan) -> Found:
    """The first K of all continuations: those that end are put aside, and as many as do not end go on."""
    K = plan.beams
    tokens, sums = continuations(logits, total, beams.sums, 1 if K == 1 else 2 * K)
    best = first(sums, min(2 * K, sums.shape[1]))
    return split(best // (sums.shape[1] // K), tokens.gather(1, best), sums.gather(1, best), K, plan.end)


def continuations(logits: Tensor, total: Tensor, sums: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n likeliest next tokens of each beam, and the sums with them: (B, K, V) -> (B, K * n) each."""
    gains, tokens = likeliest(logits, n)
    return tokens.flatten(1), (sums[:, :, None] + (gains - total).float()).flatten(1)


def split(parents: Tensor, tokens: Tensor, sums: Tensor, K: int, end: int) -> Found:
    """Continuations, the best first: what of the first K ends, and the first K that go on."""
    is_end = tokens == end
    ends = parents[:, :K], sums[:, :K].masked_fill(~is_end[:, :K], NEVER)
    live = sums.masked_fill(is_end, NEVER)
    going = first(live, K) if live.shape[1] > K else torch.arange(live.shape[1], device=live.device).expand_as(live)
    return Found(ends, *(x.gather(1, going) for x in (parents, tokens, live)))


def in_groups(beams: Beams, logits: Tensor, total: Tensor, plan: Plan) -> Found:
    """Diverse beam search (Vijayakumar et al. 2016): a group pays for tokens that earlier groups take at this step.

    It pays when it chooses; the sums that are kept are the model's.
    """
    size = plan.beams // plan.groups
    taken = torch.zeros_like(logits[:, 0], dtype=torch.float32)
    found = []
    for at in range(0, plan.beams, size):
        mine, cost = slice(at, at + size), plan.search.diversity * taken
        tokens, ranked = continuations(logits[:, mine] - cost[:, None], total[:, mine], beams.sums[:, mine], 2 * size)
        best = first(ranked, min(2 * size, ranked.shape[1]))
        tokens = tokens.gather(1, best)
        one = split(best // (ranked.shape[1] // size) + at, tokens, ranked.gather(1, best), size, plan.end)
        ended = one.ends[1] + cost[:, plan.end, None]
        paid = cost.gather(1, one.tokens)
        found.append(Found((one.ends[0], ended), one.parents, one.tokens, one.sums + paid))
        taken = taken.scatter_add(1, one.tokens, torch.ones_like(paid))
    ends = torch.cat([f.ends[0] for f in found], 1), torch.cat([f.ends[1] for f in found], 1)
    return Found(ends, *(torch.cat([getattr(f, name) for f in found], 1) for name in ("parents", "tokens", "sums")))


def demanded(beams: Beams, logits: Tensor, total: Tensor, plan: Plan) -> Found:
    """Words that must appear (Post and Vilar 2018): what brings one nearer is a continuation too, and the beams are
    shared out among those that have met much and those that have met little."""
    assert plan.demands is not None
    B, K, memory = *beams.sums.shape, beams.memories[-1]
    tokens, sums = continuations(logits, total, beams.sums, 2 * K)
    wanted = plan.demands.wanted(memory.flatten(0, 1)).view(B, K, -1)
    known = (wanted[:, :, :, None] == tokens.view(B, K, 1, -1)).any(-1) | (wanted < 0)
    gains = logits.gather(2, wanted.clamp(min=0)).masked_fill(known, NEVER) - total
    tokens = torch.cat([tokens.view(B, K, -1), wanted.clamp(min=0)], 2)
    sums = torch.cat([sums.view(B, K, -1), beams.sums[:, :, None] + gains.float()], 2)
    n = tokens.shape[2]
    after = plan.demands.advance(memory[:, :, None].expand(-1, -1, n, -1).flatten(0, 2), tokens.flatten())
    banks, full = plan.demands.banks(after).view(B, -1), plan.demands.full(after).view(B, -1)
    tokens, sums = tokens.flatten(1), sums.flatten(1)
    is_end = tokens == plan.end
    best = first(sums.masked_fill(~full, NEVER), K)
    ends = best // n, sums.gather(1, best).masked_fill(~(is_end & full).gather(1, best), NEVER)
    live = sums.masked_fill(is_end, NEVER)
    going = choose(live, banks, K)
    return Found(ends, going // n, tokens.gather(1, going), live.gather(1, going))


def by_chance(beams: Beams, logits: Tensor, total: Tensor, plan: Plan) -> Found:
    """Each beam draws a token for itself."""
    assert plan.search.sampling is not None
    K = plan.beams
    itself = torch.arange(K, device=logits.device).expand_as(beams.sums)
    tokens = drawn(logits, plan.search.sampling, beams.numbers[:, None] * K + itself, beams.lengths)
    sums = beams.sums + (logits.gather(2, tokens[:, :, None]) - total)[:, :, 0].float()
    is_end = tokens == plan.end
    return Found((itself, sums.masked_fill(~is_end, NEVER)), itself, tokens, sums.masked_fill(is_end, NEVER))


# --- what becomes of them ------------------------------------------------------------------------------------------


def advanced(beams: Beams, found: Found, plan: Plan) -> Beams:
    """The chosen continuations are written down. A source that is done stays as it is."""
    here = beams.lengths[:, None, None]
    going = ~beams.done[:, None]
    ended = beams.ended.merged(with_ends(beams, found.ends, plan), plan)
    moved = along(beams.tokens, found.parents) if plan.moves else beams.tokens
    at = here.clamp(max=moved.shape[2] - 1).expand(-1, moved.shape[1], 1)
    written = found.tokens.masked_fill(found.sums == NEVER, plan.end)[:, :, None]
    tokens = kept(going, moved.scatter(2, at, written), beams.tokens)
    sums = kept(going, found.sums, beams.sums)
    lengths = beams.lengths + going[:, 0]
    count = beams.count + ((found.ends[1] > NEVER) & going).sum(1)
    done = beams.done | finished(sums, lengths, beams.limits, count, ended, plan)
    memories = []
    for rule, memory in zip(plan.all_rules, beams.memories, strict=True):
        moved = along(memory, found.parents) if plan.moves else memory
        memories.append(rule.advance(moved.flatten(0, 1), found.tokens.flatten()).view_as(memory))
    return Beams(tokens, sums, lengths, beams.limits, beams.numbers, count, done, ended, tuple(memories))


def with_ends(beams: Beams, ends: tuple[Tensor, Tensor], plan: Plan) -> Pool:
    """What has ended at this step; behind its last token the end is there already."""
    parents, sums = ends[0], ends[1].masked_fill(beams.done[:, None], NEVER)
    lengths = (beams.lengths[:, None] + 1).expand_as(parents)
    return Pool(along(beams.tokens, parents), sums, sums / plan.penalty(lengths), lengths)


def finished(sums: Tensor, lengths: Tensor, limits: Tensor, count: Tensor, ended: Pool, plan: Plan) -> Tensor:
    """(B,) Can nothing that goes on come among the best? A sum only falls, and no length helps it more than the
    limit."""
    hope = sums.amax(1) / plan.penalty(limits)
    done = (lengths >= limits) | (hope <= ended.scores[:, plan.search.n_best - 1])
    if plan.search.patience is not None:
        done = done | (count >= round(plan.search.patience * plan.beams))
    return done


def kept(going: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The new where a source (B, 1) goes on, else the old."""
    return torch.where(going.view(-1, *[1] * (new.dim() - 1)), new, old)


def along(x: Tensor, parents: Tensor) -> Tensor:
    """(B, K, S), (B, M) -> (B, M, S): what each parent has."""
    return x.gather(1, parents[:, :, None].expand(-1, -1, x.shape[2]))


# --- the best of many, told exactly --------------------------------------------------------------------------------


def likeliest(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n greatest of (B, K, V), the greatest first, of equal ones that of the lowest number: values, places."""
    V = logits.shape[-1]
    n = min(n, V)
    if V <= 4 * CHUNK or n >= V // CHUNK:
        place = first(logits, n)
        return logits.gather(-1, place), place
    # The greatest lie in the chunks whose own greatest are the greatest: then few are left to sort.
    whole = V // CHUNK * CHUNK
    chunks = logits[..., :whole].unflatten(-1, (-1, CHUNK))
    best = first(chunks.amax(-1), n).sort(-1).values
    near = torch.arange(CHUNK, device=logits.device)
    places = (best[..., None] * CHUNK + near).flatten(-2)
    rest = torch.arange(whole, V, device=logits.device).expand(*places.shape[:-1], -1)
    places = torch.cat([places, rest], -1)
    values = logits.gather(-1, places)
    chosen = first(values, n)
    return values.gather(-1, chosen), places.gather(-1, chosen)


def first(values: Tensor, n: int) -> Tensor:
    """The places of the n greatest along the last dimension, the greatest first, of equal ones the first.

    `topk` leaves open which of equal ones it takes: it is given whole numbers that say both, value and place.
    """
    bits = (values.float() + 0.0).view(torch.int32)  # the sum has no -0.0, which equals 0.0 but has other bits
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    place = torch.arange(values.shape[-1], device=values.device)
    return (order * PLACES - place).topk(n, -1).indices


# --- whole batches, for those who have ids -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Hypotheses:
    """The best targets of each source, the best first; one that was cut at its limit comes behind all with an end,
    unless the search says otherwise.

    tokens   (B, N, max_length) filled up with `end`
    scores   (B, N) with the length penalty; -inf where there are no more hypotheses
    sums     (B, N) of log-probabilities
    lengths  (B, N) tokens up to the end, with it
    """

    tokens: Tensor
    scores: Tensor
    sums: Tensor
    lengths: Tensor


def results(beams: Beams, plan: Plan) -> Hypotheses:
    """What was found: the hypotheses that ended, then those that were cut, or both by their scores."""
    cut = (beams.lengths >= beams.limits)[:, None]
    lengths = beams.lengths[:, None].expand_as(beams.sums)
    sums = beams.sums.masked_fill(~cut, NEVER)
    live = Pool(beams.tokens, sums, sums / plan.penalty(lengths), lengths)
    live = live.of(first(live.scores, live.scores.shape[1]))
    both = beams.ended.beside(live, plan)
    there = both.scores if plan.search.cut_equals else (both.scores > NEVER).to(torch.uint8)
    best = both.of(there.argsort(dim=1, descending=True, stable=True)[:, : plan.search.n_best])
    return Hypotheses(best.tokens, best.scores, best.sums, best.lengths)


@torch.no_grad()
def beam(
    model: Writer[State],
    source: Tensor,
    lengths: Tensor | None = None,
    *,
    start: int,
    end: int,
    max_length: int,
    search: Search | None = None,
    never: Sequence[int] = (),
) -> Hypotheses:
    """The best targets of a batch of sources (B, Ts), by the search that is asked for. `start` and `never` are not
    written."""
    check(end, max_length)
    search = Search() if search is None else search
    plan = Plan(search=search, start=start, end=end, never=banned(start, end, never, source.device))
    jobs = [Job(source=(), number=i, limit=max_length) for i in range(len(source))]
    beams = Beams.new(jobs, max_length, plan)
    state = model.begin(source, lengths, capacity=max_length, beams=plan.beams)
    for t in range(max_length):
        beams = step(model, state, beams, plan)
        if may_ask(t, source.device) and bool(beams.done.all()):
            break
    return results(beams, plan)


@torch.no_grad()
def greedy(
    model: Writer[State],
    source: Tensor,
    lengths: Tensor | None = None,
    *,
    start: int,
    end: int,
    max_length: int,
    never: Sequence[int] = (),
) -> Tensor:
    """The likeliest next token, again and again: (B, Ts) -> (B, max_length). A finished row is filled up with `end`.

    `start` and the tokens of `never` are not written. `beam` with a beam of one gives the same; this is how it reads.
    """
    check(end, max_length)
    state = model.begin(source, lengths, capacity=max_length)
    token = source.new_full((source.shape[0], 1), start)
    never_written = banned(start, end, never, source.device)
    finished = torch.zeros_like(token, dtype=torch.bool)
    written = []
    for t in range(max_length):
        logits = model.step(token, state)[:, -1:].index_fill_(-1, never_written, NEVER)
        token = logits.argmax(-1).masked_fill(finished, end)
        finished = finished | (token == end)
        written.append(token)
        if may_ask(t, source.device) and bool(finished.all()):
            break
    return F.pad(torch.cat(written, 1), (0, max_length - len(written)), value=end)


def check(end: int, max_length: int) -> None:
    if max_length < 1:
        raise ValueError(f"`max_length` must be 1 or more tokens, but is {max_length}")
    if end < 0:
        raise ValueError(f"`end` must be the id of a token, 0 or more, but is {end}")


def banned(start: int, end: int, never: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(unwritten(start, end, never), dtype=torch.int64, device=device)


def unwritten(start: int, end: int, never: Sequence[int]) -> tuple[int, ...]:
    """No target holds the start, yet published Marian models would often write it."""
    tokens = {token for token in (start, *never) if token >= 0} - {end}  # below 0: a prompt is begun from
    return tuple(sorted(tokens))


def may_ask(t: int, device: torch.device) -> bool:
    """After step t, may the host look at numbers of the device?"""
    if torch.compiler.is_compiling():
        return False
    return device.type == "cpu" or t % STEPS_UNSEEN == STEPS_UNSEEN - 1
