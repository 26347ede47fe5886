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

from attent.decoding.causal_adapter import prefill_cache
from attent.decoding.constraints.base import (
    Constraint,
    GeneratedTokens,
    MinLength,
    NoLoops,
    NoRepeatNgram,
    apply_constraints,
)
from attent.decoding.options import SamplingOptions, SearchRequest
from attent.decoding.sampling import sample_tokens
from attent.models import CausalLM
from attent.nn import Cache

FinishReason = Literal["end", "stop", "length"]
NEG_INF = float("-inf")
GRAPH_COLUMNS = 128  # columns of a cache that one recording more looks at
WARMUP_STEPS = 2  # steps before one is recorded: what is only done once must not be part of it
POLL_INTERVAL = 16  # steps on an accelerator before the host asks who is done: to ask is to wait
COMPACTION_RATIO = 0.75  # texts that are done are cleared away when no more than this share is left


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """What a text is to go on from, in ids."""

    token_ids: Sequence[int]  # one at least
    max_new_tokens: int  # tokens that may be written, the end counted
    rng_key: int = 0  # what chance depends on


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How the next token is chosen, the same for all texts."""

    end_ids: tuple[int, ...]  # each ends a text
    suppressed_tokens: tuple[int, ...] = ()  # ids that are not written
    sampling: SamplingOptions | None = None  # None: the likeliest; its seed is part of a prompt's number
    min_length: int = 0
    no_repeat_ngram_size: int = 0
    forbid_loops: bool = False

    @property
    def is_capturable(self) -> bool:
        """Rules that look things up in what is written are left as they are."""
        return not self.no_repeat_ngram_size and not self.forbid_loops


@dataclass(frozen=True, kw_only=True)
class FinishedSequence:
    """What was written behind one prompt."""

    token_ids: tuple[int, ...]  # without the end
    log_probs: tuple[float, ...]  # of each of them, and of the end where there is one
    finish_reason: FinishReason


@dataclass(frozen=True, eq=False)
class GenerationContext:
    """A manner, on a device."""

    options: StepOptions
    end_ids: Tensor
    suppressed_tokens: Tensor
    constraints: tuple[Constraint, ...]

    @classmethod
    def from_options(cls, options: StepOptions, device: torch.device) -> GenerationContext:
        ends, never = (
            torch.tensor(ids, dtype=torch.int64, device=device) for ids in (options.end_ids, options.suppressed_tokens)
        )
        return cls(options, ends, never, tuple(build_step_constraints(options, device)))


def build_step_constraints(options: StepOptions, device: torch.device) -> Iterator[Constraint]:
    if options.min_length:
        yield from (MinLength(options.min_length, end, device) for end in options.end_ids)
    if options.no_repeat_ngram_size:
        yield NoRepeatNgram(options.no_repeat_ngram_size, device)
    if options.forbid_loops:
        yield NoLoops(device)


# --- the state, and one step ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SequenceBatch:
    """B texts under way."""

    input_tokens: Tensor  # (B,) the token that each reads next
    tokens: Tensor  # (B, T + 1) what is written; in the last column, what those write who are done
    log_probs: Tensor  # (B, T + 1)
    lengths: Tensor  # (B,) tokens that are written
    max_lengths: Tensor  # (B,) tokens that may be
    rng_keys: Tensor  # (B,)
    is_done: Tensor  # (B,) it has ended, or reached its limit: it stays as it is
    constraint_states: tuple[Tensor, ...]  # (B, S) of each rule

    @classmethod
    def from_prompts(
        cls, input_tokens: Tensor, prompts: Sequence[EncodedPrompt], width: int, context: GenerationContext
    ) -> SequenceBatch:
        B, device = len(prompts), input_tokens.device
        limits = torch.tensor([prompt.max_new_tokens for prompt in prompts], device=device)
        numbers = torch.tensor([prompt.rng_key for prompt in prompts], device=device)
        tokens = torch.zeros(B, width + 1, dtype=torch.int64, device=device)
        memories = tuple(
            rule.build_initial_state([SearchRequest(source_ids=())] * B).to(device) for rule in context.constraints
        )
        none = torch.zeros_like(limits)
        return cls(input_tokens, tokens, tokens.float(), none, limits, numbers, none.bool(), memories)

    def select_rows(self, rows: Tensor) -> SequenceBatch:
        plain = {
            f.name: getattr(self, f.name).index_select(0, rows) for f in fields(self) if f.name != "constraint_states"
        }
        return SequenceBatch(
            **plain, constraint_states=tuple(memory.index_select(0, rows) for memory in self.constraint_states)
        )

    def iterate_tensors(self) -> Iterator[Tensor]:
        yield from (getattr(self, f.name) for f in fields(self) if f.name != "constraint_states")
        yield from self.constraint_states


@torch.no_grad()
def advance_sequences(
    model: CausalLM, cache: Cache, sequences: SequenceBatch, context: GenerationContext
) -> SequenceBatch:
    """Every text that is not done one token longer."""
    held = cache.lengths
    logits = model.step(sequences.input_tokens[:, None], cache)[:, 0]
    token, log_prob = select_tokens(logits, sequences, context)
    after = append_tokens(sequences, token, log_prob, context)
    if held is not None:  # who is done stays where it is, and never runs out of room
        cache.lengths = torch.where(after.is_done, held, held + 1)
    return after


def select_tokens(logits: Tensor, sequences: SequenceBatch, context: GenerationContext) -> tuple[Tensor, Tensor]:
    """(B, V) -> the next token of each, (B,), and its log-probability by the model, whatever rules and chance do."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if context.options.suppressed_tokens:
        logits = logits.index_fill(-1, context.suppressed_tokens, NEG_INF)
    total = logits.logsumexp(-1)
    if context.constraints:
        end = context.options.end_ids[0] if context.options.end_ids else 0
        so_far = GeneratedTokens(sequences.tokens[:, :-1], sequences.lengths, sequences.max_lengths)
        logits = apply_constraints(context.constraints, logits, sequences.constraint_states, so_far, end)
    if context.options.sampling is None:
        token = logits.argmax(-1)
    else:
        token = sample_tokens(
            logits[:, None], context.options.sampling, sequences.rng_keys[:, None], sequences.lengths
        )[:, 0]
    return token, (logits.gather(-1, token[:, None])[:, 0] - total).float()


def append_tokens(
    sequences: SequenceBatch, token: Tensor, log_prob: Tensor, context: GenerationContext
) -> SequenceBatch:
    at = torch.where(sequences.is_done, sequences.tokens.shape[1] - 1, sequences.lengths)[:, None]
    counts = sequences.lengths + ~sequences.is_done
    ended = (token[:, None] == context.end_ids).any(-1)
    memories = zip(context.constraints, sequences.constraint_states, strict=True)
    return SequenceBatch(
        input_tokens=token,
        tokens=sequences.tokens.scatter(1, at, token[:, None]),
        log_probs=sequences.log_probs.scatter(1, at, log_prob[:, None]),
        lengths=counts,
        max_lengths=sequences.max_lengths,
        rng_keys=sequences.rng_keys,
        is_done=sequences.is_done | ended | (counts >= sequences.max_lengths),
        constraint_states=tuple(rule.advance_state(memory, token) for rule, memory in memories),
    )


# --- where it is kept -------------------------------------------------------------------------------------------------


class GenerationState(Protocol):
    """Texts and what the model keeps of them."""

    @property
    def sequences(self) -> SequenceBatch: ...

    def advance(self, cached_columns: int) -> None:
        """One token more; no row of the cache holds more than `held` columns before."""

    def keep_rows(self, rows: Sequence[int]) -> bool:
        """Go on with these rows alone. False: all stay."""


class DynamicState:
    """Memory for one batch, as large as it needs."""

    def __init__(self, model: CausalLM, prompts: Sequence[EncodedPrompt], context: GenerationContext) -> None:
        self.model, self.context = model, context
        self.cache = model.begin(rows=len(prompts), capacity=compute_cache_columns(prompts))
        last = prefill_cache(model, self.cache, [prompt.token_ids for prompt in prompts])
        self.sequences = SequenceBatch.from_prompts(
            last, prompts, max(prompt.max_new_tokens for prompt in prompts), context
        )

    def advance(self, cached_columns: int) -> None:
        self.cache.used_columns = cached_columns
        self.sequences = advance_sequences(self.model, self.cache, self.sequences, self.context)

    def keep_rows(self, rows: Sequence[int]) -> bool:
        kept = torch.tensor(rows, device=self.sequences.input_tokens.device)
        self.sequences = self.sequences.select_rows(kept)
        self.cache.reorder(kept)
        return True


class StaticState:
    """Memory that stays in its place, for batches of so many texts one after the other, and the recordings of steps
    that read and write it. Without a GPU each step is done instead of recorded, which shows that it is the same."""

    def __init__(self, model: CausalLM, rows: int, capacity: int, context: GenerationContext) -> None:
        self.model, self.context, self.capacity = model, context, capacity
        self.cache = model.begin(rows=rows, capacity=capacity)
        self.cache_lengths = torch.zeros(rows, dtype=torch.int64, device=context.end_ids.device)
        empty = [EncodedPrompt(token_ids=(0,), max_new_tokens=1)] * rows
        self.sequences = SequenceBatch.from_prompts(self.cache_lengths.clone(), empty, capacity, context)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.graph_pool = torch.cuda.graph_pool_handle() if self.cache_lengths.is_cuda else None
        self.step_count = 0

    def load_prompts(self, prompts: Sequence[EncodedPrompt]) -> None:
        """Other texts in the same place; what is left of earlier ones is hidden, as all later columns are."""
        self.cache.used_columns, self.cache.lengths = 0, None
        last = prefill_cache(self.model, self.cache, [prompt.token_ids for prompt in prompts])
        self._copy_from(SequenceBatch.from_prompts(last, prompts, self.capacity, self.context))
        self.cache_lengths.copy_(torch.tensor([len(prompt.token_ids) - 1 for prompt in prompts]))
        self.cache.lengths = self.cache_lengths

    def advance(self, cached_columns: int) -> None:
        upto = min(-(-(cached_columns + 1) // GRAPH_COLUMNS) * GRAPH_COLUMNS, self.capacity)
        self.step_count += 1
        if self.graph_pool is None or self.step_count <= WARMUP_STEPS:
            self._run_step(upto)
            return
        if upto not in self.graphs:
            self.graphs[upto] = self._capture_graph(upto)
        self.graphs[upto].replay()

    def keep_rows(self, rows: Sequence[int]) -> bool:
        return False

    def _capture_graph(self, columns: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on with work of their own.
        with torch.cuda.graph(graph, pool=self.graph_pool, capture_error_mode="thread_local"):
            self._run_step(columns)
        return graph

    def _run_step(self, columns: int) -> None:
        self.cache.used_columns = columns - 1
        self._copy_from(advance_sequences(self.model, self.cache, self.sequences, self.context))
        assert self.cache.lengths is not None
        self.cache_lengths.copy_(self.cache.lengths)
        self.cache.lengths = self.cache_lengths

    def _copy_from(self, new: SequenceBatch) -> None:
        for mine, other in zip(self.sequences.iterate_tensors(), new.iterate_tensors(), strict=True):
            if mine is not other:
                mine.copy_(other)


def can_capture_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def get_poll_interval(device: torch.device) -> int:
    """Steps between questions who is done."""
    return 1 if device.type == "cpu" else POLL_INTERVAL


def compute_cache_columns(prompts: Sequence[EncodedPrompt]) -> int:
    """Columns for the longest, whose last token is never read; one that is done writes its last column again."""
    return max(len(prompt.token_ids) + prompt.max_new_tokens - 1 for prompt in prompts)


# --- a batch at work --------------------------------------------------------------------------------------------------


class GenerationLoop:
    """A batch of prompts. `rows` are their places among those given; `live` those of which nothing is known yet."""

    def __init__(self, prompts: Sequence[EncodedPrompt], state: GenerationState, end_ids: Sequence[int]) -> None:
        self.prompts, self.state, self.end_ids = prompts, state, frozenset(end_ids)
        self.row_prompts = list(range(len(prompts)))
        self.unfinished = set(self.row_prompts)
        self.stopped_prompts: set[int] = set()
        self.step_count = self.reported_steps = 0

    def run_steps(self) -> None:
        """As many steps as may go by without asking."""
        most = max(self.prompts[place].max_new_tokens for place in self.unfinished)
        for _ in range(min(get_poll_interval(self.state.sequences.input_tokens.device), most - self.step_count)):
            self.state.advance(max(self._count_cached_columns(place) for place in self.row_prompts))
            self.step_count += 1

    def _count_cached_columns(self, index: int) -> int:
        """Columns of the cache that a row may hold."""
        prompt = self.prompts[index]
        return len(prompt.token_ids) - 1 + min(self.step_count, prompt.max_new_tokens - 1)

    def pop_new_tokens(self) -> list[tuple[int, list[int]]]:
        """What live texts have written since this was last asked: their places, and tokens, the end among them."""
        texts = self.state.sequences
        counts, tokens = texts.lengths.tolist(), texts.tokens[:, self.reported_steps : self.step_count].tolist()
        found = [
            (place, new[: count - self.reported_steps])
            for place, count, new in zip(self.row_prompts, counts, tokens, strict=True)
            if place in self.unfinished
        ]
        self.reported_steps = self.step_count
        return found

    def stop_prompt(self, index: int) -> None:
        """Its text is not wanted any further."""
        self.stopped_prompts.add(index)
        self.state.sequences.is_done[self.row_prompts.index(index)] = True

    def pop_finished(self) -> list[tuple[int, FinishedSequence]]:
        """What is done, each once; its rows are given up where that saves work."""
        done = self.state.sequences.is_done.tolist()
        over = [row for row, place in enumerate(self.row_prompts) if done[row] and place in self.unfinished]
        found = list(self._collect_finished(over)) if over else []
        self.unfinished -= {place for place, _ in found}
        left = [row for row, place in enumerate(self.row_prompts) if place in self.unfinished]
        if left and len(left) <= COMPACTION_RATIO * len(self.row_prompts) and self.state.keep_rows(left):
            self.row_prompts = [self.row_prompts[row] for row in left]
        return found

    def _collect_finished(self, rows: list[int]) -> Iterator[tuple[int, FinishedSequence]]:
        some = self.state.sequences.select_rows(torch.tensor(rows, device=self.state.sequences.input_tokens.device))
        columns = (some.lengths.tolist(), some.tokens.tolist(), some.log_probs.tolist())
        for row, count, tokens, log_probs in zip(rows, *columns, strict=True):
            place, ended = self.row_prompts[row], count > 0 and tokens[count - 1] in self.end_ids
            reason: FinishReason = "stop" if place in self.stopped_prompts else "end" if ended else "length"
            ids = tuple(tokens[: count - ended])
            yield place, FinishedSequence(token_ids=ids, log_probs=tuple(log_probs[:count]), finish_reason=reason)


def generate_batch(
    prompts: Sequence[EncodedPrompt], state: GenerationState, end_ids: Sequence[int]
) -> list[FinishedSequence]:
    """All texts of a batch, for those who have ids."""
    flow = GenerationLoop(prompts, state, end_ids)
    found: dict[int, FinishedSequence] = {}
    while flow.unfinished:
        flow.run_steps()
        found.update(flow.pop_finished())
    return [found[place] for place in range(len(prompts))]
