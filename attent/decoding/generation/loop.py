"""Generate tokens after prompts, greedily or by sampling. Token ids in, token ids out.

A step is one function on a small state. On an NVIDIA GPU it is captured as a CUDA graph that includes the choice of the
token, the cache and the end test, and the host polls only now and then for finished sequences. A graph attends to cache
columns up to the next multiple of GRAPH_COLUMNS, with unused ones masked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from attent.decoding.constraints.base import NEG_INF
from attent.decoding.engines.reference import SearchCancelled, update_tensor
from attent.decoding.options import FinishReason, SamplingOptions, StopCheck
from attent.decoding.sampling import sample_tokens
from attent.decoding.search import map_tensors
from attent.models import CausalLM
from attent.nn import Cache
from attent.nn.devices import get_device
from attent.nn.kernels.cuda_graphs import capture_graph

GRAPH_COLUMNS = 128  # cache columns by which graphs differ
WARMUP_STEPS = 2  # before a capture, which must not include one-time work
POLL_INTERVAL = 16  # steps on an accelerator between polls, which synchronize
COMPACTION_RATIO = 0.75  # finished rows are removed when at most this fraction is left


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    token_ids: Sequence[int]  # at least one
    max_new_tokens: int  # including the end token
    rng_key: int = 0  # sampling depends on it


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    end_ids: tuple[int, ...]
    suppressed_tokens: tuple[int, ...] = ()
    sampling: SamplingOptions | None = None  # its seed is part of the `rng_key`s; None: greedy


@dataclass(frozen=True, kw_only=True)
class FinishedSequence:
    token_ids: tuple[int, ...]  # without the end token
    log_probs: tuple[float, ...]  # of each, and of the end token if there is one
    finish_reason: FinishReason


@dataclass(frozen=True, eq=False)
class GenerationContext:
    options: StepOptions
    end_ids: Tensor
    suppressed_tokens: Tensor

    @classmethod
    def from_options(cls, options: StepOptions, device: torch.device) -> Self:
        end_ids = torch.tensor(options.end_ids, dtype=torch.int64, device=device)
        suppressed_tokens = torch.tensor(options.suppressed_tokens, dtype=torch.int64, device=device)
        return cls(options, end_ids, suppressed_tokens)


@dataclass(frozen=True, eq=False)
class SequenceBatch:
    input_tokens: Tensor  # (B,) input of the next step
    tokens: Tensor  # (B, T + 1) generated; finished rows write to the last column
    log_probs: Tensor  # (B, T + 1)
    lengths: Tensor  # (B,) generated tokens
    max_lengths: Tensor  # (B,)
    rng_keys: Tensor  # (B,)
    is_done: Tensor  # (B,) ended or at its maximum: the row no longer changes

    @classmethod
    def from_prompts(cls, input_tokens: Tensor, prompts: Sequence[EncodedPrompt], max_new_tokens: int) -> Self:
        B, device = len(prompts), input_tokens.device
        max_lengths = torch.tensor([prompt.max_new_tokens for prompt in prompts], device=device)
        rng_keys = torch.tensor([prompt.rng_key for prompt in prompts], device=device)
        tokens = torch.zeros(B, max_new_tokens + 1, dtype=torch.int64, device=device)
        zeros = torch.zeros_like(max_lengths)
        return cls(input_tokens, tokens, tokens.float(), zeros, max_lengths, rng_keys, zeros.bool())

    def select_rows(self, rows: Tensor) -> Self:
        return map_tensors(lambda x: x.index_select(0, rows), self)


@torch.no_grad()
def advance_sequences(
    model: CausalLM, cache: Cache, sequences: SequenceBatch, context: GenerationContext
) -> SequenceBatch:
    row_columns = cache.row_columns
    logits = model.step(sequences.input_tokens[:, None], cache)[:, 0]
    token, log_prob = select_tokens(logits, sequences, context)
    advanced = append_tokens(sequences, token, log_prob, context)
    if row_columns is not None:  # finished rows keep stepping: their cache position stays, so that they never overflow
        cache.row_columns = torch.where(advanced.is_done, row_columns, row_columns + 1)
    return advanced


def select_tokens(logits: Tensor, sequences: SequenceBatch, context: GenerationContext) -> tuple[Tensor, Tensor]:
    """Return the next tokens (B,), and their log-probabilities without sampling, from logits (B, V)."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    options = context.options
    if options.suppressed_tokens:
        logits = logits.index_fill(-1, context.suppressed_tokens, NEG_INF)
    log_total = logits.logsumexp(-1)
    if options.sampling is None:
        token = logits.argmax(-1)
    else:
        rng_keys, lengths = sequences.rng_keys[:, None], sequences.lengths
        token = sample_tokens(logits[:, None], options.sampling, rng_keys, lengths)[:, 0]
    return token, (logits.gather(-1, token[:, None])[:, 0] - log_total).float()


def append_tokens(
    sequences: SequenceBatch, token: Tensor, log_prob: Tensor, context: GenerationContext
) -> SequenceBatch:
    column = torch.where(sequences.is_done, sequences.tokens.shape[1] - 1, sequences.lengths)[:, None]
    lengths = sequences.lengths + ~sequences.is_done
    is_end = (token[:, None] == context.end_ids).any(-1)
    return SequenceBatch(
        input_tokens=token,
        tokens=sequences.tokens.scatter(1, column, token[:, None]),
        log_probs=sequences.log_probs.scatter(1, column, log_prob[:, None]),
        lengths=lengths,
        max_lengths=sequences.max_lengths,
        rng_keys=sequences.rng_keys,
        is_done=sequences.is_done | is_end | (lengths >= sequences.max_lengths),
    )


@torch.no_grad()
def prefill_cache(model: CausalLM, cache: Cache, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Fill an empty cache with all but the last token of each prompt; return those last tokens, (B,)."""
    device = get_device(model)
    lengths = [len(prompt) - 1 for prompt in prompts]
    max_length = max(lengths)
    if max_length:
        rows = [[*prompt[:-1], *[0] * (max_length - length)] for prompt, length in zip(prompts, lengths, strict=True)]
        row_lengths = None if min(lengths) == max_length else torch.tensor(lengths, device=device)
        model.decoder(model.embedding(torch.tensor(rows, device=device)), row_lengths, cache=cache)
    return torch.tensor([prompt[-1] for prompt in prompts], device=device)


class DynamicState:
    """The sequences of one batch with their KV cache, as large as needed."""

    def __init__(self, model: CausalLM, prompts: Sequence[EncodedPrompt], context: GenerationContext) -> None:
        self.model, self.context = model, context
        self.cache = model.init_decoder_state(rows=len(prompts), capacity=compute_cache_columns(prompts))
        last = prefill_cache(model, self.cache, [prompt.token_ids for prompt in prompts])
        max_new_tokens = max(prompt.max_new_tokens for prompt in prompts)
        self.sequences = SequenceBatch.from_prompts(last, prompts, max_new_tokens)

    def advance(self, cached_columns: int) -> None:
        self.cache.used_columns = cached_columns
        self.sequences = advance_sequences(self.model, self.cache, self.sequences, self.context)

    def keep_rows(self, rows: Sequence[int]) -> bool:
        """Drop all other rows; return False if that is not supported."""
        remaining_rows = torch.tensor(rows, device=self.sequences.input_tokens.device)
        self.sequences = self.sequences.select_rows(remaining_rows)
        self.cache.reorder(remaining_rows)
        return True


class StaticState:
    """State at fixed addresses, for batches of one size, with its CUDA graphs; without a GPU, steps run directly."""

    def __init__(self, model: CausalLM, rows: int, capacity: int, context: GenerationContext) -> None:
        self.model, self.context, self.capacity = model, context, capacity
        self.cache = model.init_decoder_state(rows=rows, capacity=capacity)
        device = context.end_ids.device
        self.cache_lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        empty = [EncodedPrompt(token_ids=(0,), max_new_tokens=1)] * rows
        self.sequences = SequenceBatch.from_prompts(self.cache_lengths.clone(), empty, capacity)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.graph_pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.step_count = 0

    def load_prompts(self, prompts: Sequence[EncodedPrompt]) -> None:
        """Start another batch; what earlier ones left in the cache is masked."""
        self.cache.used_columns, self.cache.row_columns = 0, None
        last = prefill_cache(self.model, self.cache, [prompt.token_ids for prompt in prompts])
        map_tensors(update_tensor, self.sequences, SequenceBatch.from_prompts(last, prompts, self.capacity))
        self.cache_lengths.copy_(torch.tensor([len(prompt.token_ids) - 1 for prompt in prompts]))
        self.cache.row_columns = self.cache_lengths

    def advance(self, cached_columns: int) -> None:
        columns = min(-(-(cached_columns + 1) // GRAPH_COLUMNS) * GRAPH_COLUMNS, self.capacity)
        self.step_count += 1
        if self.stream is None or self.step_count <= WARMUP_STEPS:
            self._run_step(columns)
            return
        if columns not in self.graphs:
            self.graphs[columns] = capture_graph(
                lambda: self._run_step(columns), pool=self.graph_pool, stream=self.stream
            )
        self.graphs[columns].replay()

    def keep_rows(self, rows: Sequence[int]) -> bool:
        return False

    def _run_step(self, columns: int) -> None:
        self.cache.used_columns = columns - 1
        advanced = advance_sequences(self.model, self.cache, self.sequences, self.context)
        map_tensors(update_tensor, self.sequences, advanced)
        assert self.cache.row_columns is not None
        self.cache_lengths.copy_(self.cache.row_columns)
        self.cache.row_columns = self.cache_lengths


GenerationState = DynamicState | StaticState


def can_capture_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def get_poll_interval(device: torch.device) -> int:
    return 1 if device.type == "cpu" else POLL_INTERVAL


def compute_cache_columns(prompts: Sequence[EncodedPrompt]) -> int:
    """Return the columns of the longest sequence; its last token is never an input."""
    return max(len(prompt.token_ids) + prompt.max_new_tokens - 1 for prompt in prompts)


class GenerationLoop:
    """Runs a batch of prompts. `row_prompts` are the prompts of the rows; `unfinished` those not yet popped."""

    def __init__(self, prompts: Sequence[EncodedPrompt], state: GenerationState, end_ids: Sequence[int]) -> None:
        self.prompts, self.state, self.end_ids = prompts, state, frozenset(end_ids)
        self.row_prompts = list(range(len(prompts)))
        self.unfinished = set(self.row_prompts)
        self.stopped_prompts: set[int] = set()
        self.step_count = self.reported_steps = 0

    def run_steps(self) -> None:
        longest = max(self.prompts[index].max_new_tokens for index in self.unfinished)
        interval = get_poll_interval(self.state.sequences.input_tokens.device)
        for _ in range(min(interval, longest - self.step_count)):
            prompts = [self.prompts[index] for index in self.row_prompts]
            columns = (len(p.token_ids) - 1 + min(self.step_count, p.max_new_tokens - 1) for p in prompts)
            self.state.advance(max(columns))
            self.step_count += 1

    def pop_new_tokens(self) -> list[tuple[int, list[int]]]:
        """Return (prompt index, tokens since the last call, including the end token) of unfinished sequences."""
        sequences = self.state.sequences
        lengths = sequences.lengths.tolist()
        tokens = sequences.tokens[:, self.reported_steps : self.step_count].tolist()
        new_tokens = [
            (index, row[: length - self.reported_steps])
            for index, length, row in zip(self.row_prompts, lengths, tokens, strict=True)
            if index in self.unfinished
        ]
        self.reported_steps = self.step_count
        return new_tokens

    def stop_prompt(self, index: int) -> None:
        self.stopped_prompts.add(index)
        self.state.sequences.is_done[self.row_prompts.index(index)] = True

    def pop_finished(self) -> list[tuple[int, FinishedSequence]]:
        """Return (prompt index, sequence) once each; their rows are dropped when that saves work."""
        is_done = self.state.sequences.is_done.tolist()
        rows = [row for row, index in enumerate(self.row_prompts) if is_done[row] and index in self.unfinished]
        finished = list(self._collect_finished(rows)) if rows else []
        self.unfinished -= {index for index, _ in finished}
        left = [row for row, index in enumerate(self.row_prompts) if index in self.unfinished]
        if left and len(left) <= COMPACTION_RATIO * len(self.row_prompts) and self.state.keep_rows(left):
            self.row_prompts = [self.row_prompts[row] for row in left]
        return finished

    def _collect_finished(self, rows: list[int]) -> Iterator[tuple[int, FinishedSequence]]:
        done = self.state.sequences.select_rows(torch.tensor(rows, device=self.state.sequences.input_tokens.device))
        columns = (done.lengths.tolist(), done.tokens.tolist(), done.log_probs.tolist())
        for row, length, tokens, log_probs in zip(rows, *columns, strict=True):
            index, has_end = self.row_prompts[row], length > 0 and tokens[length - 1] in self.end_ids
            reason: FinishReason = "stop" if index in self.stopped_prompts else "end" if has_end else "length"
            token_ids = tuple(tokens[: length - has_end])
            yield (
                index,
                FinishedSequence(token_ids=token_ids, log_probs=tuple(log_probs[:length]), finish_reason=reason),
            )


def generate_batch(
    prompts: Sequence[EncodedPrompt],
    state: GenerationState,
    end_ids: Sequence[int],
    should_stop: StopCheck | None = None,
) -> list[FinishedSequence]:
    loop = GenerationLoop(prompts, state, end_ids)
    finished: dict[int, FinishedSequence] = {}
    while loop.unfinished:
        if should_stop is not None and should_stop():
            raise SearchCancelled
        loop.run_steps()
        finished.update(loop.pop_finished())
    return [finished[index] for index in range(len(prompts))]


def generate_greedy(
    model: CausalLM,
    prompt: Sequence[int],
    max_new_tokens: int,
    end_ids: Sequence[int] = (),
    suppressed_tokens: Sequence[int] = (),
    should_stop: StopCheck | None = None,
) -> FinishedSequence:
    """Continue one tokenized prompt with the most likely tokens. The model must be in eval mode."""
    options = StepOptions(end_ids=tuple(end_ids), suppressed_tokens=tuple(suppressed_tokens))
    context = GenerationContext.from_options(options, next(model.parameters()).device)
    prompts = [EncodedPrompt(token_ids=prompt, max_new_tokens=max_new_tokens)]
    return generate_batch(prompts, DynamicState(model, prompts, context), end_ids, should_stop)[0]
