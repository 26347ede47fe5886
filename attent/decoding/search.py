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

from attent.decoding.constraints.base import Constraint, GeneratedTokens, apply_constraints
from attent.decoding.constraints.required_phrases import RequiredPhrases, allocate_beams
from attent.decoding.options import SearchOptions, SearchRequest
from attent.decoding.sampling import sample_tokens

NEG_INF = float("-inf")
POLL_INTERVAL = 8  # on an accelerator the host asks no more often than this who is done: to ask is to wait
TOPK_CHUNK = 256  # tokens of a vocabulary that are first looked at by their best alone
INDEX_RANGE = 2**24  # more than any vocabulary, or number of continuations, has


class DecoderState(Protocol):
    """What a model keeps between steps, for K beams of each source."""

    def reorder_beams(self, parents: Tensor) -> None:
        """(B, K): beam k of source b goes on from what its beam `beams[b, k]` has written."""

    def reorder(self, rows: Tensor) -> None:
        """Source i becomes what source `rows[i]` was; there may be fewer."""

    def replace_rows(self, rows: Tensor, new: Self) -> None:
        """Sources `rows` are replaced by those of `new`, none of which is longer than the longest here was."""

    def rewind(self, lengths: Sequence[int]) -> None:
        """How many tokens each source's beams have read: all of them, or 0 where they begin anew."""


State = TypeVar("State", bound=DecoderState)


class StepModel(Protocol[State]):
    """What search asks of a model: begin from sources, then logits (B, K, V) behind the next tokens (B, K)."""

    def begin(self, source: Tensor, lengths: Tensor | None = None, *, capacity: int, beams: int = 1) -> State: ...

    def step(self, target: Tensor, state: State, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class SearchContext:
    """What stays the same in a whole search."""

    options: SearchOptions
    start: int
    end: int
    suppressed_tokens: Tensor  # tokens that are not written: the start, padding
    constraints: tuple[Constraint, ...] = ()
    required_phrases: RequiredPhrases | None = None

    @property
    def num_beams(self) -> int:
        return self.options.beam_size if self.options.sampling is None else self.options.n_best

    @property
    def beam_groups(self) -> int:
        """Beams that draw by chance know nothing of one another."""
        return self.options.beam_groups if self.options.sampling is None else 1

    @property
    def can_reorder_beams(self) -> bool:
        """May a beam go on from another?"""
        return self.num_beams > 1 and self.options.sampling is None

    @property
    def all_constraints(self) -> tuple[Constraint, ...]:
        return self.constraints if self.required_phrases is None else (*self.constraints, self.required_phrases)

    def compute_length_penalty(self, lengths: Tensor) -> Tensor:
        """What sums of log-probabilities are divided by: `Search.penalty` of many."""
        # On a CPU a power in float32 may differ in its last bit with the number's place among the others.
        exact = lengths.double() if lengths.device.type == "cpu" else lengths.float()
        match self.options.length_penalty_type:
            case "avg":
                return (exact.clamp(min=1) ** self.options.length_penalty).float()
            case "wu":
                return (((5 + exact) / 6) ** self.options.length_penalty).float()
            case "none":
                return torch.ones_like(lengths, dtype=torch.float32)


@dataclass(frozen=True, eq=False)
class FinishedHypotheses:
    """The best N hypotheses of each source that are finished, the best first; score -inf where there is none."""

    tokens: Tensor  # (B, N, T), the end where nothing is written
    log_probs: Tensor  # (B, N) of log-probabilities
    scores: Tensor  # (B, N) with the length penalty
    lengths: Tensor  # (B, N) with the end

    @classmethod
    def empty(cls, tokens: Tensor) -> FinishedHypotheses:
        none = torch.full(tokens.shape[:2], NEG_INF, device=tokens.device)
        return cls(tokens, none, none, torch.zeros_like(none, dtype=torch.int64))

    def merge(self, other: FinishedHypotheses, context: SearchContext) -> FinishedHypotheses:
        """The best of both; of equally good ones those that were here first."""
        both = self.concat(other, context)
        return both.select(stable_topk_indices(both.scores, self.scores.shape[1]))

    def concat(self, other: FinishedHypotheses, context: SearchContext) -> FinishedHypotheses:
        both = FinishedHypotheses(
            *(torch.cat([getattr(self, f.name), getattr(other, f.name)], 1) for f in fields(self))
        )
        return both.deduplicate() if context.beam_groups > 1 else both

    def deduplicate(self) -> FinishedHypotheses:
        """Without what is there already: groups may find one and the same."""
        same = (self.tokens[:, :, None] == self.tokens[:, None]).all(-1)
        same = same & (self.lengths[:, :, None] == self.lengths[:, None])
        known = (same.tril(-1) & (self.scores > NEG_INF)[:, None]).any(-1)
        return FinishedHypotheses(self.tokens, self.log_probs, self.scores.masked_fill(known, NEG_INF), self.lengths)

    def select(self, indices: Tensor) -> FinishedHypotheses:
        tokens = self.tokens.gather(1, indices[:, :, None].expand(-1, -1, self.tokens.shape[2]))
        return FinishedHypotheses(tokens, *(x.gather(1, indices) for x in (self.log_probs, self.scores, self.lengths)))


@dataclass(frozen=True, eq=False)
class BeamState:
    """The state of a search for B sources: K beams each, and what has ended."""

    tokens: Tensor  # (B, K, T), the end where nothing is written
    log_probs: Tensor  # (B, K) of log-probabilities; -inf where a beam is empty
    lengths: Tensor  # (B,) tokens of every beam of a source
    max_lengths: Tensor  # (B,) tokens that they may have, the end counted
    rng_keys: Tensor  # (B,) what chance depends on
    finished_counts: Tensor  # (B,) how many hypotheses have ended
    done: Tensor  # (B,) nothing better can come: all of the above stays as it is
    finished: FinishedHypotheses
    constraint_states: tuple[Tensor, ...]  # (B, K, S) of each rule

    @classmethod
    def from_requests(cls, requests: Sequence[SearchRequest], capacity: int, context: SearchContext) -> BeamState:
        """The empty beginning, once for each group: if every beam had it, all would stay the same."""
        B, K, device = len(requests), context.num_beams, context.suppressed_tokens.device
        tokens = torch.full((B, K, capacity), context.end, device=device)
        alone = torch.arange(K, device=device) % (K // context.beam_groups) == 0
        sums = torch.zeros(B, K, device=device).masked_fill(~(alone | (context.options.sampling is not None)), NEG_INF)
        limits = torch.tensor([job.max_length for job in requests], device=device)
        numbers = torch.tensor([job.rng_key for job in requests], device=device)
        none = torch.zeros_like(limits)
        memories = (rule.build_initial_state(requests).to(device) for rule in context.all_constraints)
        repeated = tuple(memory[:, None].expand(-1, K, -1).contiguous() for memory in memories)
        ended = FinishedHypotheses.empty(tokens[:, :1].expand(-1, context.options.n_best, -1))
        return cls(tokens, sums, none, limits, numbers, none, none.bool(), ended, repeated)

    def select_rows(self, rows: Tensor) -> BeamState:
        """Source i is what source `rows[i]` was."""
        return self._map_tensors(lambda mine, _: mine.index_select(0, rows), self)

    def replace_rows(self, rows: Tensor, new: BeamState) -> BeamState:
        """Rows become those of `new`, which has the same capacity."""
        return self._map_tensors(lambda mine, other: mine.index_copy(0, rows, other), new)

    def _map_tensors(self, change: Callable[[Tensor, Tensor], Tensor], other: BeamState) -> BeamState:
        names = [f.name for f in fields(self) if f.name not in ("finished", "constraint_states")]
        plain = {name: change(getattr(self, name), getattr(other, name)) for name in names}
        pool = FinishedHypotheses(
            *(
                change(getattr(self.finished, f.name), getattr(other.finished, f.name))
                for f in fields(FinishedHypotheses)
            )
        )
        memories = tuple(change(*two) for two in zip(self.constraint_states, other.constraint_states, strict=True))
        return BeamState(**plain, finished=pool, constraint_states=memories)

    def get_next_inputs(self, start: int) -> Tensor:
        """(B, K) the token that each beam reads next."""
        before = (self.lengths - 1).clamp(min=0)[:, None, None].expand(-1, self.tokens.shape[1], 1)
        return self.tokens.gather(2, before)[:, :, 0].where(self.lengths[:, None] > 0, start)

    def flatten_beams(self) -> GeneratedTokens:
        K = self.tokens.shape[1]
        lengths, limits = (x.repeat_interleave(K) for x in (self.lengths, self.max_lengths))
        return GeneratedTokens(self.tokens.flatten(0, 1), lengths, limits)


@torch.no_grad()
def search_step(model: StepModel[State], state: State, beams: BeamState, context: SearchContext) -> BeamState:
    """Every beam of every source one token longer."""
    logits = model.step(beams.get_next_inputs(context.start), state)
    grown, parents = advance_beams(beams, logits, context)
    if parents is not None:
        state.reorder_beams(parents)
    return grown


def advance_beams(beams: BeamState, logits: Tensor, context: SearchContext) -> tuple[BeamState, Tensor | None]:
    """The beams after one more token, and which beam (B, K) each goes on from; None: from itself."""
    logits, total = mask_logits(logits, beams, context)
    if context.options.sampling is not None:
        found = select_sampled(beams, logits, total, context)
    elif context.beam_groups > 1:
        found = select_diverse(beams, logits, total, context)
    elif context.required_phrases is not None:
        found = select_with_required(beams, logits, total, context)
    else:
        found = select_best(beams, logits, total, context)
    return append_selection(beams, found, context), found.parents if context.can_reorder_beams else None


def mask_logits(logits: Tensor, beams: BeamState, context: SearchContext) -> tuple[Tensor, Tensor]:
    """Logits (B, K, V) without what may not be written, and (B, K, 1) what to subtract for log-probabilities.

    What is no word at all (`never`) has no share in the probabilities, nor has it in forced decoding; what only this
    search may not write keeps its own. So a score can be checked by reading the text.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = logits.index_fill_(-1, context.suppressed_tokens, NEG_INF)
    total = logits.logsumexp(-1, keepdim=True)
    if context.all_constraints:
        memories = [memory.flatten(0, 1) for memory in beams.constraint_states]
        logits = apply_constraints(
            context.all_constraints, logits.flatten(0, 1), memories, beams.flatten_beams(), context.end
        ).view_as(logits)
    return logits, total


# --- which continuations -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StepSelection:
    """What was chosen at a step: hypotheses that end here, and those that go on; of each its beam, token and sum."""

    finished: tuple[Tensor, Tensor]  # (B, M) beams that end, sums; -inf: none
    parents: Tensor  # (B, K)
    tokens: Tensor  # (B, K)
    log_probs: Tensor  # (B, K)


def select_best(beams: BeamState, logits: Tensor, log_norm: Tensor, context: SearchContext) -> StepSelection:
    """The first K of all continuations: those that end are put aside, and as many as do not end go on."""
    K = context.num_beams
    tokens, sums = expand_beams(logits, log_norm, beams.log_probs, 1 if K == 1 else 2 * K)
    best = stable_topk_indices(sums, min(2 * K, sums.shape[1]))
    return split_finished(best // (sums.shape[1] // K), tokens.gather(1, best), sums.gather(1, best), K, context.end)


def expand_beams(logits: Tensor, log_norm: Tensor, log_probs: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n likeliest next tokens of each beam, and the sums with them: (B, K, V) -> (B, K * n) each."""
    gains, tokens = stable_topk(logits, n)
    return tokens.flatten(1), (log_probs[:, :, None] + (gains - log_norm).float()).flatten(1)


def split_finished(parents: Tensor, tokens: Tensor, log_probs: Tensor, K: int, end: int) -> StepSelection:
    """Continuations, the best first: what of the first K ends, and the first K that go on."""
    is_end = tokens == end
    ends = parents[:, :K], log_probs[:, :K].masked_fill(~is_end[:, :K], NEG_INF)
    live = log_probs.masked_fill(is_end, NEG_INF)
    going = (
        stable_topk_indices(live, K)
        if live.shape[1] > K
        else torch.arange(live.shape[1], device=live.device).expand_as(live)
    )
    return StepSelection(ends, *(x.gather(1, going) for x in (parents, tokens, live)))


def select_diverse(beams: BeamState, logits: Tensor, log_norm: Tensor, context: SearchContext) -> StepSelection:
    """Diverse beam search (Vijayakumar et al. 2016): a group pays for tokens that earlier groups take at this step.

    It pays when it chooses; the sums that are kept are the model's.
    """
    size = context.num_beams // context.beam_groups
    taken = torch.zeros_like(logits[:, 0], dtype=torch.float32)
    found = []
    for at in range(0, context.num_beams, size):
        mine, cost = slice(at, at + size), context.options.diversity_penalty * taken
        tokens, ranked = expand_beams(
            logits[:, mine] - cost[:, None], log_norm[:, mine], beams.log_probs[:, mine], 2 * size
        )
        best = stable_topk_indices(ranked, min(2 * size, ranked.shape[1]))
        tokens = tokens.gather(1, best)
        one = split_finished(best // (ranked.shape[1] // size) + at, tokens, ranked.gather(1, best), size, context.end)
        ended = one.finished[1] + cost[:, context.end, None]
        paid = cost.gather(1, one.tokens)
        found.append(StepSelection((one.finished[0], ended), one.parents, one.tokens, one.log_probs + paid))
        taken = taken.scatter_add(1, one.tokens, torch.ones_like(paid))
    ends = torch.cat([f.finished[0] for f in found], 1), torch.cat([f.finished[1] for f in found], 1)
    return StepSelection(
        ends, *(torch.cat([getattr(f, name) for f in found], 1) for name in ("parents", "tokens", "log_probs"))
    )


def select_with_required(beams: BeamState, logits: Tensor, log_norm: Tensor, context: SearchContext) -> StepSelection:
    """Words that must appear (Post and Vilar 2018): what brings one nearer is a continuation too, and the beams are
    shared out among those that have met much and those that have met little."""
    assert context.required_phrases is not None
    B, K, memory = *beams.log_probs.shape, beams.constraint_states[-1]
    tokens, sums = expand_beams(logits, log_norm, beams.log_probs, 2 * K)
    wanted = context.required_phrases.get_next_tokens(memory.flatten(0, 1)).view(B, K, -1)
    known = (wanted[:, :, :, None] == tokens.view(B, K, 1, -1)).any(-1) | (wanted < 0)
    gains = logits.gather(2, wanted.clamp(min=0)).masked_fill(known, NEG_INF) - log_norm
    tokens = torch.cat([tokens.view(B, K, -1), wanted.clamp(min=0)], 2)
    sums = torch.cat([sums.view(B, K, -1), beams.log_probs[:, :, None] + gains.float()], 2)
    n = tokens.shape[2]
    after = context.required_phrases.advance_state(
        memory[:, :, None].expand(-1, -1, n, -1).flatten(0, 2), tokens.flatten()
    )
    banks, full = (
        context.required_phrases.compute_banks(after).view(B, -1),
        context.required_phrases.is_satisfied(after).view(B, -1),
    )
    tokens, sums = tokens.flatten(1), sums.flatten(1)
    is_end = tokens == context.end
    best = stable_topk_indices(sums.masked_fill(~full, NEG_INF), K)
    ends = best // n, sums.gather(1, best).masked_fill(~(is_end & full).gather(1, best), NEG_INF)
    live = sums.masked_fill(is_end, NEG_INF)
    going = allocate_beams(live, banks, K)
    return StepSelection(ends, going // n, tokens.gather(1, going), live.gather(1, going))


def select_sampled(beams: BeamState, logits: Tensor, log_norm: Tensor, context: SearchContext) -> StepSelection:
    """Each beam draws a token for itself."""
    assert context.options.sampling is not None
    K = context.num_beams
    itself = torch.arange(K, device=logits.device).expand_as(beams.log_probs)
    tokens = sample_tokens(logits, context.options.sampling, beams.rng_keys[:, None] * K + itself, beams.lengths)
    sums = beams.log_probs + (logits.gather(2, tokens[:, :, None]) - log_norm)[:, :, 0].float()
    is_end = tokens == context.end
    return StepSelection(
        (itself, sums.masked_fill(~is_end, NEG_INF)), itself, tokens, sums.masked_fill(is_end, NEG_INF)
    )


# --- what becomes of them ------------------------------------------------------------------------------------------


def append_selection(beams: BeamState, selection: StepSelection, context: SearchContext) -> BeamState:
    """The chosen continuations are written down. A source that is done stays as it is."""
    here = beams.lengths[:, None, None]
    going = ~beams.done[:, None]
    ended = beams.finished.merge(collect_finished(beams, selection.finished, context), context)
    moved = gather_beams(beams.tokens, selection.parents) if context.can_reorder_beams else beams.tokens
    at = here.clamp(max=moved.shape[2] - 1).expand(-1, moved.shape[1], 1)
    written = selection.tokens.masked_fill(selection.log_probs == NEG_INF, context.end)[:, :, None]
    tokens = update_active(going, moved.scatter(2, at, written), beams.tokens)
    sums = update_active(going, selection.log_probs, beams.log_probs)
    lengths = beams.lengths + going[:, 0]
    count = beams.finished_counts + ((selection.finished[1] > NEG_INF) & going).sum(1)
    done = beams.done | find_done_sources(sums, lengths, beams.max_lengths, count, ended, context)
    memories = []
    for rule, memory in zip(context.all_constraints, beams.constraint_states, strict=True):
        moved = gather_beams(memory, selection.parents) if context.can_reorder_beams else memory
        memories.append(rule.advance_state(moved.flatten(0, 1), selection.tokens.flatten()).view_as(memory))
    return BeamState(tokens, sums, lengths, beams.max_lengths, beams.rng_keys, count, done, ended, tuple(memories))


def collect_finished(beams: BeamState, finished: tuple[Tensor, Tensor], context: SearchContext) -> FinishedHypotheses:
    """What has ended at this step; behind its last token the end is there already."""
    parents, sums = finished[0], finished[1].masked_fill(beams.done[:, None], NEG_INF)
    lengths = (beams.lengths[:, None] + 1).expand_as(parents)
    return FinishedHypotheses(
        gather_beams(beams.tokens, parents), sums, sums / context.compute_length_penalty(lengths), lengths
    )


def find_done_sources(
    log_probs: Tensor,
    lengths: Tensor,
    max_lengths: Tensor,
    finished_counts: Tensor,
    finished: FinishedHypotheses,
    context: SearchContext,
) -> Tensor:
    """(B,) Can nothing that goes on come among the best? A sum only falls, and no length helps it more than the
    limit."""
    hope = log_probs.amax(1) / context.compute_length_penalty(max_lengths)
    done = (lengths >= max_lengths) | (hope <= finished.scores[:, context.options.n_best - 1])
    if context.options.patience is not None:
        done = done | (finished_counts >= round(context.options.patience * context.num_beams))
    return done


def update_active(active: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The new where a source (B, 1) goes on, else the old."""
    return torch.where(active.view(-1, *[1] * (new.dim() - 1)), new, old)


def gather_beams(x: Tensor, parents: Tensor) -> Tensor:
    """(B, K, S), (B, M) -> (B, M, S): what each parent has."""
    return x.gather(1, parents[:, :, None].expand(-1, -1, x.shape[2]))


# --- the best of many, told exactly --------------------------------------------------------------------------------


def stable_topk(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n greatest of (B, K, V), the greatest first, of equal ones that of the lowest number: values, places."""
    V = logits.shape[-1]
    n = min(n, V)
    if V <= 4 * TOPK_CHUNK or n >= V // TOPK_CHUNK:
        place = stable_topk_indices(logits, n)
        return logits.gather(-1, place), place
    # The greatest lie in the chunks whose own greatest are the greatest: then few are left to sort.
    whole = V // TOPK_CHUNK * TOPK_CHUNK
    chunks = logits[..., :whole].unflatten(-1, (-1, TOPK_CHUNK))
    best = stable_topk_indices(chunks.amax(-1), n).sort(-1).values
    near = torch.arange(TOPK_CHUNK, device=logits.device)
    places = (best[..., None] * TOPK_CHUNK + near).flatten(-2)
    rest = torch.arange(whole, V, device=logits.device).expand(*places.shape[:-1], -1)
    places = torch.cat([places, rest], -1)
    values = logits.gather(-1, places)
    chosen = stable_topk_indices(values, n)
    return values.gather(-1, chosen), places.gather(-1, chosen)


def stable_topk_indices(values: Tensor, n: int) -> Tensor:
    """The places of the n greatest along the last dimension, the greatest first, of equal ones the first.

    `topk` leaves open which of equal ones it takes: it is given whole numbers that say both, value and place.
    """
    bits = (values.float() + 0.0).view(torch.int32)  # the sum has no -0.0, which equals 0.0 but has other bits
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    place = torch.arange(values.shape[-1], device=values.device)
    return (order * INDEX_RANGE - place).topk(n, -1).indices


# --- whole batches, for those who have ids -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SearchOutput:
    """The best targets of each source, the best first; one that was cut at its limit comes behind all with an end,
    unless the search says otherwise.

    tokens   (B, N, max_length) filled up with `end`
    scores   (B, N) with the length penalty; -inf where there are no more hypotheses
    sums     (B, N) of log-probabilities
    lengths  (B, N) tokens up to the end, with it
    """

    tokens: Tensor
    scores: Tensor
    log_probs: Tensor
    lengths: Tensor


def collect_output(beams: BeamState, context: SearchContext) -> SearchOutput:
    """What was found: the hypotheses that ended, then those that were cut, or both by their scores."""
    cut = (beams.lengths >= beams.max_lengths)[:, None]
    lengths = beams.lengths[:, None].expand_as(beams.log_probs)
    sums = beams.log_probs.masked_fill(~cut, NEG_INF)
    live = FinishedHypotheses(beams.tokens, sums, sums / context.compute_length_penalty(lengths), lengths)
    live = live.select(stable_topk_indices(live.scores, live.scores.shape[1]))
    both = beams.finished.concat(live, context)
    there = both.scores if context.options.rank_truncated_equally else (both.scores > NEG_INF).to(torch.uint8)
    best = both.select(there.argsort(dim=1, descending=True, stable=True)[:, : context.options.n_best])
    return SearchOutput(best.tokens, best.scores, best.log_probs, best.lengths)


@torch.no_grad()
def beam_search(
    model: StepModel[State],
    source: Tensor,
    lengths: Tensor | None = None,
    *,
    start: int,
    end: int,
    max_length: int,
    options: SearchOptions | None = None,
    suppressed_tokens: Sequence[int] = (),
) -> SearchOutput:
    """The best targets of a batch of sources (B, Ts), by the search that is asked for. `start` and `never` are not
    written."""
    check_search_arguments(end, max_length)
    options = SearchOptions() if options is None else options
    plan = SearchContext(
        options=options,
        start=start,
        end=end,
        suppressed_tokens=make_suppressed_tensor(start, end, suppressed_tokens, source.device),
    )
    jobs = [SearchRequest(source_ids=(), rng_key=i, max_length=max_length) for i in range(len(source))]
    beams = BeamState.from_requests(jobs, max_length, plan)
    state = model.begin(source, lengths, capacity=max_length, beams=plan.num_beams)
    for t in range(max_length):
        beams = search_step(model, state, beams, plan)
        if can_poll_device(t, source.device) and bool(beams.done.all()):
            break
    return collect_output(beams, plan)


@torch.no_grad()
def greedy_search(
    model: StepModel[State],
    source: Tensor,
    lengths: Tensor | None = None,
    *,
    start: int,
    end: int,
    max_length: int,
    suppressed_tokens: Sequence[int] = (),
) -> Tensor:
    """The likeliest next token, again and again: (B, Ts) -> (B, max_length). A finished row is filled up with `end`.

    `start` and the tokens of `never` are not written. `beam` with a beam of one gives the same; this is how it reads.
    """
    check_search_arguments(end, max_length)
    state = model.begin(source, lengths, capacity=max_length)
    token = source.new_full((source.shape[0], 1), start)
    never_written = make_suppressed_tensor(start, end, suppressed_tokens, source.device)
    finished = torch.zeros_like(token, dtype=torch.bool)
    written = []
    for t in range(max_length):
        logits = model.step(token, state)[:, -1:].index_fill_(-1, never_written, NEG_INF)
        token = logits.argmax(-1).masked_fill(finished, end)
        finished = finished | (token == end)
        written.append(token)
        if can_poll_device(t, source.device) and bool(finished.all()):
            break
    return F.pad(torch.cat(written, 1), (0, max_length - len(written)), value=end)


def check_search_arguments(end: int, max_length: int) -> None:
    if max_length < 1:
        raise ValueError(f"`max_length` must be 1 or more tokens, but is {max_length}")
    if end < 0:
        raise ValueError(f"`end` must be the id of a token, 0 or more, but is {end}")


def make_suppressed_tensor(start: int, end: int, suppressed_tokens: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list_suppressed_tokens(start, end, suppressed_tokens), dtype=torch.int64, device=device)


def list_suppressed_tokens(start: int, end: int, suppressed_tokens: Sequence[int]) -> tuple[int, ...]:
    """No target holds the start, yet published Marian models would often write it."""
    tokens = {token for token in (start, *suppressed_tokens) if token >= 0} - {end}  # below 0: a prompt is begun from
    return tuple(sorted(tokens))


def can_poll_device(step: int, device: torch.device) -> bool:
    """After step t, may the host look at numbers of the device?"""
    if torch.compiler.is_compiling():
        return False
    return device.type == "cpu" or step % POLL_INTERVAL == POLL_INTERVAL - 1
