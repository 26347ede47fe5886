"""Beam search, diverse beam search and sampling as one step function on a state of tensors.

It knows no architecture, only `StepModel`: initialize a state from sources, step by one token of each beam, reorder
beams. Text is `translator`'s business, batching `engines.reference`'s; options and scores are defined in `options`.

Each source has K beams. Of all their continuations the best 2K are considered: those among the first K that end are
finished hypotheses, the first K that do not end are the next beams, as in fairseq, Hugging Face and CTranslate2. A beam
of one is greedy search; with `sampling` each beam draws its own tokens. No step waits for the device: `BeamState.done`
says which sources cannot improve any more, to a caller that wants to know.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from attent.decoding.constraints.base import NEG_INF, Constraint, GeneratedTokens, apply_constraints
from attent.decoding.constraints.required_phrases import RequiredPhrases, allocate_beams
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest
from attent.decoding.sampling import sample_tokens

POLL_INTERVAL = 8  # steps between reads of `done` from an accelerator: reading synchronizes
TOPK_CHUNK = 256  # tokens of the vocabulary that are first compared by their maximum alone
INDEX_RANGE = 2**24  # above any vocabulary size or number of continuations

T = TypeVar("T")


class DecoderState(Protocol):
    """The state of a model between steps, for K beams of each source."""

    def reorder_beams(self, parents: Tensor) -> None:
        """Let beam k of source b continue its beam `parents[b, k]`; (B, K)."""

    def reorder(self, rows: Tensor) -> None:
        """Let row i be what row `rows[i]` was; there may be fewer."""

    def replace_sources(self, rows: Tensor, new: Self) -> None:
        """Replace the sources in `rows` by those of `new`, which are no longer than the longest source here."""

    def set_row_lengths(self, lengths: Sequence[int]) -> None:
        """Set how many tokens each row has read: the current count, or 0 for a new source."""


State = TypeVar("State", bound=DecoderState)


class StepModel(Protocol[State]):
    """A model that can be searched: from sources to a state, then from tokens (B, K) to logits (B, K, V)."""

    def init_decoder_state(
        self, source: Tensor, lengths: Tensor | None = None, *, capacity: int, beams: int = 1
    ) -> State: ...

    def step(self, target: Tensor, state: State, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class SearchContext:
    """Everything that is constant during a search."""

    options: SearchOptions
    start_id: int
    end_id: int
    suppressed_tokens: Tensor  # never generated: the start, padding
    num_given: int = 0  # tokens at the start of each prefix that have no share in the scores: the target's language
    constraints: tuple[Constraint, ...] = ()
    required_phrases: RequiredPhrases | None = None

    @property
    def device(self) -> torch.device:
        return self.suppressed_tokens.device

    @property
    def num_beams(self) -> int:
        return self.options.beam_size if self.options.sampling is None else self.options.n_best

    @property
    def beam_groups(self) -> int:
        return self.options.beam_groups if self.options.sampling is None else 1

    @property
    def can_reorder_beams(self) -> bool:
        """Sampled beams are independent."""
        return self.num_beams > 1 and self.options.sampling is None

    @property
    def all_constraints(self) -> tuple[Constraint, ...]:
        return self.constraints if self.required_phrases is None else (*self.constraints, self.required_phrases)

    def compute_score_divisor(self, lengths: Tensor) -> Tensor:
        """`SearchOptions.compute_score_divisor` of many lengths."""
        # On a CPU a power in float32 may differ in its last bit depending on the element's position in the tensor.
        exact = lengths.double() if lengths.device.type == "cpu" else lengths.float()
        match self.options.length_penalty_type:
            case "avg":
                return (exact.clamp(min=1) ** self.options.length_penalty).float()
            case "wu":
                return (((5 + exact) / 6) ** self.options.length_penalty).float()
            case "none":
                return torch.ones_like(lengths, dtype=torch.float32)


# --- state ---------------------------------------------------------------------------------------------------------


def map_tensors(change: Callable[..., Tensor], state: T, *others: T) -> T:
    """Apply `change` to each tensor of a dataclass or tuple, together with the same tensor of the `others`."""
    states: tuple[Any, ...] = (state, *others)
    if isinstance(state, Tensor):
        return change(*states)  # type: ignore[return-value]
    if isinstance(state, tuple):
        return tuple(map_tensors(change, *parts) for parts in zip(*states, strict=True))  # type: ignore[return-value]
    parts = ((getattr(each, field.name) for each in states) for field in fields(state))  # type: ignore[arg-type]
    return type(state)(*(map_tensors(change, *each) for each in parts))


@dataclass(frozen=True, eq=False)
class HypothesisTensors:
    """The N best hypotheses of each source, best first; score -inf where there are fewer."""

    tokens: Tensor  # (B, N, T), padded with the end token
    log_probs: Tensor  # (B, N)
    scores: Tensor  # (B, N) with the length penalty
    lengths: Tensor  # (B, N) with the end token

    @classmethod
    def empty(cls, tokens: Tensor) -> Self:
        none = torch.full(tokens.shape[:2], NEG_INF, device=tokens.device)
        return cls(tokens, none, none, torch.zeros_like(none, dtype=torch.int64))

    def merge(self, other: Self, context: SearchContext) -> Self:
        """Return the N best of both; on ties, those of `self`."""
        both = self.concat(other, context)
        return both.select(stable_topk_indices(both.scores, self.scores.shape[1]))

    def concat(self, other: Self, context: SearchContext) -> Self:
        both = map_tensors(lambda *parts: torch.cat(parts, 1), self, other)
        if context.beam_groups == 1:
            return both
        # Several groups may find the same hypothesis: drop repetitions.
        same = (both.tokens[:, :, None] == both.tokens[:, None]).all(-1)
        same = same & (both.lengths[:, :, None] == both.lengths[:, None])
        repeated = (same.tril(-1) & (both.scores > NEG_INF)[:, None]).any(-1)
        return replace(both, scores=both.scores.masked_fill(repeated, NEG_INF))

    def select(self, indices: Tensor) -> Self:
        columns = (x.gather(1, indices) for x in (self.log_probs, self.scores, self.lengths))
        return type(self)(gather_beams(self.tokens, indices), *columns)

    def to_hypotheses(self, end_id: int) -> list[list[Hypothesis]]:
        rows = zip(*(x.tolist() for x in (self.tokens, self.scores, self.log_probs, self.lengths)), strict=True)
        return [[make_hypothesis(end_id, *x) for x in zip(*row, strict=True) if x[1] > NEG_INF] for row in rows]


def make_hypothesis(end_id: int, tokens: list[int], score: float, log_prob: float, length: int) -> Hypothesis:
    is_finished = tokens[length - 1] == end_id
    token_ids = tuple(tokens[: length - 1 if is_finished else length])
    return Hypothesis(token_ids=token_ids, log_prob=log_prob, score=score, is_finished=is_finished)


@dataclass(frozen=True, eq=False)
class BeamState:
    tokens: Tensor  # (B, K, T), padded with the end token
    log_probs: Tensor  # (B, K) summed over tokens; -inf for an empty beam
    lengths: Tensor  # (B,) tokens of each beam of a source
    max_lengths: Tensor  # (B,) with the end token
    rng_keys: Tensor  # (B,)
    finished_counts: Tensor  # (B,)
    done: Tensor  # (B,) no better hypothesis can come: the row stays as it is
    finished: HypothesisTensors
    constraint_states: tuple[Tensor, ...]  # (B, K, S) of each constraint

    @classmethod
    def from_requests(cls, requests: Sequence[SearchRequest], capacity: int, context: SearchContext) -> Self:
        """Return empty beams. Only one of each group is live: equal beams would stay equal."""
        B, K, device = len(requests), context.num_beams, context.device
        tokens = torch.full((B, K, capacity), context.end_id, device=device)
        is_first = torch.arange(K, device=device) % (K // context.beam_groups) == 0
        is_live = is_first | (context.options.sampling is not None)
        max_lengths = torch.tensor([request.max_length for request in requests], device=device)
        zeros = torch.zeros_like(max_lengths)
        constraint_states = (c.build_initial_state(requests).to(device) for c in context.all_constraints)
        return cls(
            tokens=tokens,
            log_probs=torch.zeros(B, K, device=device).masked_fill(~is_live, NEG_INF),
            lengths=zeros,
            max_lengths=max_lengths,
            rng_keys=torch.tensor([request.rng_key for request in requests], device=device),
            finished_counts=zeros,
            done=zeros.bool(),
            finished=HypothesisTensors.empty(tokens[:, :1].expand(-1, context.options.n_best, -1)),
            constraint_states=tuple(x[:, None].expand(-1, K, -1).contiguous() for x in constraint_states),
        )

    def select_rows(self, rows: Tensor) -> Self:
        return map_tensors(lambda x: x.index_select(0, rows), self)

    def replace_rows(self, rows: Tensor, new: Self) -> Self:
        """Replace `rows` by those of `new`, which has the same capacity."""
        return map_tensors(lambda x, y: x.index_copy(0, rows, y), self, new)

    def get_next_inputs(self, start_id: int) -> Tensor:
        last = (self.lengths - 1).clamp(min=0)[:, None, None].expand(-1, self.tokens.shape[1], 1)
        return self.tokens.gather(2, last)[:, :, 0].where(self.lengths[:, None] > 0, start_id)

    def flatten_beams(self) -> GeneratedTokens:
        K = self.tokens.shape[1]
        lengths, max_lengths = (x.repeat_interleave(K) for x in (self.lengths, self.max_lengths))
        return GeneratedTokens(self.tokens.flatten(0, 1), lengths, max_lengths)


# --- one step ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def search_step(model: StepModel[State], state: State, beams: BeamState, context: SearchContext) -> BeamState:
    logits = model.step(beams.get_next_inputs(context.start_id), state)
    beams, parents = advance_beams(beams, logits, context)
    if parents is not None:
        state.reorder_beams(parents)
    return beams


def advance_beams(beams: BeamState, logits: Tensor, context: SearchContext) -> tuple[BeamState, Tensor | None]:
    """Return the beams after one more token, and the beam (B, K) that each continues; None: itself."""
    logits, log_norm = mask_logits(logits, beams, context)
    if context.options.sampling is not None:
        selection = select_sampled(beams, logits, log_norm, context)
    elif context.beam_groups > 1:
        selection = select_diverse(beams, logits, log_norm, context)
    elif context.required_phrases is not None:
        selection = select_with_required(beams, logits, log_norm, context)
    else:
        K = context.num_beams
        tokens, log_probs = expand_beams(logits, log_norm, beams.log_probs, 1 if K == 1 else 2 * K)
        selection = split_finished(*rank_continuations(tokens, log_probs, K), K, context.end_id)
    return append_selection(beams, selection, context), selection.parents if context.can_reorder_beams else None


def mask_logits(logits: Tensor, beams: BeamState, context: SearchContext) -> tuple[Tensor, Tensor]:
    """Return logits (B, K, V) with -inf at forbidden tokens, and their log-normalizer (B, K, 1).

    Suppressed tokens have no share in the probabilities, as in forced decoding. Tokens that only a constraint forbids
    keep theirs, so that forced decoding gives a hypothesis the same score.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = logits.index_fill_(-1, context.suppressed_tokens, NEG_INF)
    log_norm = logits.logsumexp(-1, keepdim=True)
    if context.all_constraints:
        states = [state.flatten(0, 1) for state in beams.constraint_states]
        rows = logits.flatten(0, 1)
        rows = apply_constraints(context.all_constraints, rows, states, beams.flatten_beams(), context.end_id)
        logits = rows.view_as(logits)
    if context.num_given:  # a given token is the only one allowed, so that its log-probability becomes 0
        is_given = (beams.lengths < context.num_given)[:, None, None]
        log_norm = torch.where(is_given, logits.amax(-1, keepdim=True), log_norm)
    return logits, log_norm


# --- which continuations -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StepSelection:
    finished_parents: Tensor  # (B, M)
    finished_log_probs: Tensor  # (B, M); -inf: none
    parents: Tensor  # (B, K) of those that stay live
    tokens: Tensor  # (B, K)
    log_probs: Tensor  # (B, K)


def expand_beams(logits: Tensor, log_norm: Tensor, log_probs: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the n most probable next tokens of each beam and the summed log-probabilities, (B, K * n) each."""
    values, tokens = stable_topk(logits, n)
    return tokens.flatten(1), (log_probs[:, :, None] + (values - log_norm).float()).flatten(1)


def rank_continuations(tokens: Tensor, log_probs: Tensor, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return parents, tokens and log-probabilities of the best 2K among (B, K * n), best first."""
    best = stable_topk_indices(log_probs, min(2 * K, log_probs.shape[1]))
    return best // (log_probs.shape[1] // K), tokens.gather(1, best), log_probs.gather(1, best)


def split_finished(parents: Tensor, tokens: Tensor, log_probs: Tensor, K: int, end_id: int) -> StepSelection:
    """Finish the ranked continuations among the first K that end, and keep the first K that do not."""
    is_end = tokens == end_id
    finished = parents[:, :K], log_probs[:, :K].masked_fill(~is_end[:, :K], NEG_INF)
    live = log_probs.masked_fill(is_end, NEG_INF)
    if live.shape[1] > K:
        indices = stable_topk_indices(live, K)
    else:
        indices = torch.arange(live.shape[1], device=live.device).expand_as(live)
    return StepSelection(*finished, *(x.gather(1, indices) for x in (parents, tokens, live)))


def select_diverse(beams: BeamState, logits: Tensor, log_norm: Tensor, context: SearchContext) -> StepSelection:
    """Diverse beam search (Vijayakumar et al. 2016): a penalty, of the ranking only, for tokens of earlier groups."""
    size = context.num_beams // context.beam_groups
    token_counts = torch.zeros_like(logits[:, 0], dtype=torch.float32)
    selections = []
    for first in range(0, context.num_beams, size):
        group, penalty = slice(first, first + size), context.options.diversity_penalty * token_counts
        penalized = logits[:, group] - penalty[:, None]
        tokens, ranks = expand_beams(penalized, log_norm[:, group], beams.log_probs[:, group], 2 * size)
        parents, tokens, ranks = rank_continuations(tokens, ranks, size)
        selection = split_finished(parents + first, tokens, ranks, size, context.end_id)
        finished_log_probs = selection.finished_log_probs + penalty[:, context.end_id, None]
        paid = penalty.gather(1, selection.tokens)
        live_columns = (selection.parents, selection.tokens, selection.log_probs + paid)
        selections.append(StepSelection(selection.finished_parents, finished_log_probs, *live_columns))
        token_counts = token_counts.scatter_add(1, selection.tokens, torch.ones_like(paid))
    return map_tensors(lambda *parts: torch.cat(parts, 1), *selections)


def select_with_required(beams: BeamState, logits: Tensor, log_norm: Tensor, context: SearchContext) -> StepSelection:
    """Dynamic beam allocation (Post and Vilar 2018): tokens that advance a required phrase are candidates too, and the
    beams are shared among hypotheses by how much of the phrases they contain."""
    phrases = context.required_phrases
    assert phrases is not None
    B, K, states = *beams.log_probs.shape, beams.constraint_states[-1]
    tokens, log_probs = expand_beams(logits, log_norm, beams.log_probs, 2 * K)
    required = phrases.get_next_tokens(states.flatten(0, 1)).view(B, K, -1)
    is_known = (required[:, :, :, None] == tokens.view(B, K, 1, -1)).any(-1) | (required < 0)
    gains = logits.gather(2, required.clamp(min=0)).masked_fill(is_known, NEG_INF) - log_norm
    tokens = torch.cat([tokens.view(B, K, -1), required.clamp(min=0)], 2)
    log_probs = torch.cat([log_probs.view(B, K, -1), beams.log_probs[:, :, None] + gains.float()], 2)
    n = tokens.shape[2]
    states = phrases.advance_state(states[:, :, None].expand(-1, -1, n, -1).flatten(0, 2), tokens.flatten())
    banks, satisfied = phrases.compute_banks(states).view(B, -1), phrases.is_satisfied(states).view(B, -1)
    tokens, log_probs = tokens.flatten(1), log_probs.flatten(1)
    is_end = tokens == context.end_id
    best = stable_topk_indices(log_probs.masked_fill(~satisfied, NEG_INF), K)
    finished_log_probs = log_probs.gather(1, best).masked_fill(~(is_end & satisfied).gather(1, best), NEG_INF)
    live = log_probs.masked_fill(is_end, NEG_INF)
    indices = allocate_beams(live, banks, K)
    live_columns = (indices // n, tokens.gather(1, indices), live.gather(1, indices))
    return StepSelection(best // n, finished_log_probs, *live_columns)


def select_sampled(beams: BeamState, logits: Tensor, log_norm: Tensor, context: SearchContext) -> StepSelection:
    assert context.options.sampling is not None
    K = context.num_beams
    beam = torch.arange(K, device=logits.device).expand_as(beams.log_probs)
    tokens = sample_tokens(logits, context.options.sampling, beams.rng_keys[:, None] * K + beam, beams.lengths)
    log_probs = beams.log_probs + (logits.gather(2, tokens[:, :, None]) - log_norm)[:, :, 0].float()
    is_end = tokens == context.end_id
    finished_log_probs = log_probs.masked_fill(~is_end, NEG_INF)
    return StepSelection(beam, finished_log_probs, beam, tokens, log_probs.masked_fill(is_end, NEG_INF))


# --- the next state ------------------------------------------------------------------------------------------------


def append_selection(beams: BeamState, selection: StepSelection, context: SearchContext) -> BeamState:
    """Return the beams with the selected tokens; rows that are done do not change."""
    active = ~beams.done[:, None]
    finished = beams.finished.merge(collect_finished(beams, selection, context), context)
    tokens = gather_beams(beams.tokens, selection.parents) if context.can_reorder_beams else beams.tokens
    position = beams.lengths[:, None, None].clamp(max=tokens.shape[2] - 1).expand(-1, tokens.shape[1], 1)
    new_tokens = selection.tokens.masked_fill(selection.log_probs == NEG_INF, context.end_id)[:, :, None]
    log_probs = update_active(active, selection.log_probs, beams.log_probs)
    lengths = beams.lengths + active[:, 0]
    constraint_states = []
    for constraint, state in zip(context.all_constraints, beams.constraint_states, strict=True):
        moved = gather_beams(state, selection.parents) if context.can_reorder_beams else state
        advanced = constraint.advance_state(moved.flatten(0, 1), selection.tokens.flatten())
        constraint_states.append(advanced.view_as(state))
    counts = beams.finished_counts + ((selection.finished_log_probs > NEG_INF) & active).sum(1)
    return BeamState(
        tokens=update_active(active, tokens.scatter(2, position, new_tokens), beams.tokens),
        log_probs=log_probs,
        lengths=lengths,
        max_lengths=beams.max_lengths,
        rng_keys=beams.rng_keys,
        finished_counts=counts,
        done=beams.done | find_done_sources(log_probs, lengths, beams.max_lengths, counts, finished, context),
        finished=finished,
        constraint_states=tuple(constraint_states),
    )


def collect_finished(beams: BeamState, selection: StepSelection, context: SearchContext) -> HypothesisTensors:
    """Return the hypotheses that end at this step; the end token is already there as padding."""
    parents = selection.finished_parents
    log_probs = selection.finished_log_probs.masked_fill(beams.done[:, None], NEG_INF)
    lengths = (beams.lengths[:, None] + 1).expand_as(parents)
    scores = log_probs / context.compute_score_divisor(lengths)
    return HypothesisTensors(gather_beams(beams.tokens, parents), log_probs, scores, lengths)


def find_done_sources(
    log_probs: Tensor,
    lengths: Tensor,
    max_lengths: Tensor,
    finished_counts: Tensor,
    finished: HypothesisTensors,
    context: SearchContext,
) -> Tensor:
    """True (B,) where no live beam can enter the n best, even at the maximum length, the most favorable one."""
    best_possible = log_probs.amax(1) / context.compute_score_divisor(max_lengths)
    done = (lengths >= max_lengths) | (best_possible <= finished.scores[:, context.options.n_best - 1])
    if context.options.patience is not None:
        done = done | (finished_counts >= round(context.options.patience * context.num_beams))
    return done


def update_active(active: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(active.view(-1, *[1] * (new.dim() - 1)), new, old)


def gather_beams(x: Tensor, parents: Tensor) -> Tensor:
    """(B, K, S), (B, M) -> (B, M, S)"""
    return x.gather(1, parents[:, :, None].expand(-1, -1, x.shape[2]))


# --- top-k with defined ties ---------------------------------------------------------------------------------------


def stable_topk(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return values and indices of the n greatest of (B, K, V), greatest first; on ties, the lowest index."""
    V = logits.shape[-1]
    n = min(n, V)
    if V <= 4 * TOPK_CHUNK or n >= V // TOPK_CHUNK:
        indices = stable_topk_indices(logits, n)
        return logits.gather(-1, indices), indices
    # The n greatest lie in the n chunks with the greatest maxima: few candidates are left to sort.
    whole = V // TOPK_CHUNK * TOPK_CHUNK
    chunks = logits[..., :whole].unflatten(-1, (-1, TOPK_CHUNK))
    best_chunks = stable_topk_indices(chunks.amax(-1), n).sort(-1).values
    offsets = torch.arange(TOPK_CHUNK, device=logits.device)
    indices = (best_chunks[..., None] * TOPK_CHUNK + offsets).flatten(-2)
    rest = torch.arange(whole, V, device=logits.device).expand(*indices.shape[:-1], -1)
    indices = torch.cat([indices, rest], -1)
    values = logits.gather(-1, indices)
    best = stable_topk_indices(values, n)
    return values.gather(-1, best), indices.gather(-1, best)


def stable_topk_indices(values: Tensor, n: int) -> Tensor:
    """Return indices of the n greatest along the last dimension, greatest first; on ties, the lowest index.

    `topk` does not define which of equal values it takes, so it gets integers that contain value and index.
    """
    bits = (values.float() + 0.0).view(torch.int32)  # adding 0.0 turns -0.0 into 0.0, which has other bits
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    indices = torch.arange(values.shape[-1], device=values.device)
    return (order * INDEX_RANGE - indices).topk(n, -1).indices


# --- whole batches of ids ------------------------------------------------------------------------------------------


def select_n_best(beams: BeamState, context: SearchContext) -> HypothesisTensors:
    """Return the best finished hypotheses, then the truncated ones, unless the options rank both equally."""
    is_truncated = (beams.lengths >= beams.max_lengths)[:, None]
    lengths = beams.lengths[:, None].expand_as(beams.log_probs)
    log_probs = beams.log_probs.masked_fill(~is_truncated, NEG_INF)
    scores = log_probs / context.compute_score_divisor(lengths)
    truncated = HypothesisTensors(beams.tokens, log_probs, scores, lengths)
    truncated = truncated.select(stable_topk_indices(scores, scores.shape[1]))
    both = beams.finished.concat(truncated, context)
    ranks = both.scores if context.options.rank_truncated_equally else (both.scores > NEG_INF).to(torch.uint8)
    return both.select(ranks.argsort(dim=1, descending=True, stable=True)[:, : context.options.n_best])


@torch.no_grad()
def search_requests(
    model: StepModel[State],
    source: Tensor,
    lengths: Tensor | None,
    requests: Sequence[SearchRequest],
    context: SearchContext,
    *,
    prompt_ids: Sequence[int] = (),
    check_cancelled: Callable[[], None] | None = None,
) -> HypothesisTensors:
    """Search a batch of sources, each with the constraints and the maximum length of its request.

    prompt_ids       tokens that the decoder reads before `context.start_id`; they have no share in the scores
    check_cancelled  called at every step; may raise an exception
    """
    beams, state = start_search(model, source, lengths, requests, context, prompt_ids)
    for step in range(max(request.max_length for request in requests)):
        if check_cancelled is not None:
            check_cancelled()
        beams = search_step(model, state, beams, context)
        if is_poll_step(step, source.device) and bool(beams.done.all()):
            break
    return select_n_best(beams, context)


def start_search(
    model: StepModel[State],
    source: Tensor,
    lengths: Tensor | None,
    requests: Sequence[SearchRequest],
    context: SearchContext,
    prompt_ids: Sequence[int] = (),
) -> tuple[BeamState, State]:
    """Return beams without tokens, and the decoder's state after the prompt."""
    capacity = max(request.max_length for request in requests)
    beams = BeamState.from_requests(requests, capacity, context)
    state = model.init_decoder_state(source, lengths, capacity=capacity + len(prompt_ids), beams=context.num_beams)
    for token in prompt_ids:
        model.step(torch.full_like(beams.tokens[:, :, 0], token), state)
    return beams, state


def make_suppressed_tensor(
    start_id: int, end_id: int, suppressed_tokens: Sequence[int], device: torch.device
) -> Tensor:
    return torch.tensor(list_suppressed_tokens(start_id, end_id, suppressed_tokens), dtype=torch.int64, device=device)


def list_suppressed_tokens(start_id: int, end_id: int, suppressed_tokens: Sequence[int]) -> tuple[int, ...]:
    """Include the start, which published Marian models would often generate. Ids below 0 stand for a prompt."""
    tokens = {token for token in (start_id, *suppressed_tokens) if token >= 0} - {end_id}
    return tuple(sorted(tokens))


def is_poll_step(step: int, device: torch.device) -> bool:
    if torch.compiler.is_compiling():
        return False
    return device.type == "cpu" or step % POLL_INTERVAL == POLL_INTERVAL - 1
