"""Text that goes on: a prompt in, what a decoder-only model writes behind it out.

    generator = Generator.load("runs/shakespeare")
    generator.generate(["O Romeo,"], max_new_tokens=50)[0][0].text

Which token comes next is `flow`'s, or for beams `search`'s; ids become text in `spool`. Here prompts become ids that
fit the model, batches are made, and everything is given back in the order in which it came.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from attent.decoding.causal_adapter import LAST_PROMPT_TOKEN, CausalStepModel, PromptCache
from attent.decoding.constraints.builder import ConstraintBuilder
from attent.decoding.engines.reference import SearchCancelled, TorchEngine
from attent.decoding.forced_decoding import eval_mode
from attent.decoding.generation import loop
from attent.decoding.generation.detokenizer import IncrementalDetokenizer, decode_continuation
from attent.decoding.generation.loop import (
    GRAPH_COLUMNS,
    DynamicState,
    EncodedPrompt,
    FinishedSequence,
    FinishReason,
    GenerationContext,
    GenerationLoop,
    GenerationState,
    StaticState,
    StepOptions,
    compute_cache_columns,
)
from attent.decoding.options import GenerationOptions, Hypothesis, SearchRequest
from attent.decoding.translator import DTYPES, choose_device, load_tokenizer
from attent.interop import load_as
from attent.models import CausalLM
from attent.nn import RotaryConfig
from attent.text.tokenizer import Tokenizer

# Texts at once: on a CPU more are no faster; on an accelerator, if half of its free memory holds them.
CPU_MAX_ROWS, CPU_MAX_BYTES = 64, 2**30
MAX_ROWS, FREE_MEMORY_FRACTION, DEFAULT_FREE_BYTES = 1024, 0.5, 4 * 2**30


class GenerationError(ValueError):
    """What cannot be gone on with as it was asked for, in a sentence."""


class PromptTooLongError(GenerationError):
    """A prompt that leaves no room to write: the one at `place` among those given."""

    def __init__(self, index: int, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.index, self.problem = index, problem


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One text behind a prompt."""

    prompt: str
    text: str  # what was written behind the prompt, up to the end or the word that it stops at
    token_ids: tuple[
        int, ...
    ]  # its tokens without the end; where it stops at a word, up to the one that completes the word
    log_prob: float  # the sum of the model's log-probabilities of these tokens and of the end, where it came
    finish_reason: FinishReason  # end: the model ended it; stop: a word to stop at came; length: it was cut


class Generator:
    """A decoder-only model with its tokenizer, ready to write. Not for two threads at once."""

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        *,
        batch_size: int | None = None,
        use_cuda_graphs: bool = True,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """
        batch_rows  texts written at once; None: what suits the device
        record      let an NVIDIA GPU repeat steps by itself, which is quicker; nothing else may use it meanwhile
        say         is told what a person may want to know, such as that less is written than was asked for
        """
        check_tokenizer(tokenizer, model.config.vocab)
        self.model, self.tokenizer, self.vocabulary = model, tokenizer, tokenizer.target
        self.batch_size, self.use_cuda_graphs, self._notify = batch_size, use_cuda_graphs, notify
        self._static_state: tuple[tuple[int, int, StepOptions], StaticState] | None = None
        self._warned_about_length = False

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        batch_size: int | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> Generator:
        """The generator of a folder, ours or a Hugging Face GPT-2 or LLaMA one; `dtype` None: as it is stored."""
        if dtype is not None and dtype not in DTYPES:
            raise GenerationError(f"`dtype` must be one of {', '.join(DTYPES)}, but is {dtype!r}")
        path = Path(folder).expanduser()
        place, kind = choose_device() if device is None else device, None if dtype is None else DTYPES[dtype]
        model = load_as(path, CausalLM, dtype=kind, device=place)
        return cls(model, load_tokenizer(path), batch_size=batch_size, notify=notify)

    # --- what people call ----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str],
        options: GenerationOptions | None = None,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        n: int | None = None,
        stop: Sequence[str] | None = None,
        beam_size: int | None = None,
        length_penalty: float | None = None,
        min_new_tokens: int | None = None,
        no_repeat_ngram_size: int | None = None,
        first_index: int = 0,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[list[Generation]]:
        """For each prompt its `n` texts; of beams the best first.

        writing  how to write, see `Writing`; what is given beside it comes before it
        first    the place of the first prompt among all that there are, where they come in parts: chance depends on it
        cancel   asked again and again; if it answers True, `Stopped` is raised
        """
        given = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
            "n": n,
            "stop": as_stop_words(stop),
            "beam_size": beam_size,
            "length_penalty": length_penalty,
            "min_new_tokens": min_new_tokens,
            "no_repeat_ngram_size": no_repeat_ngram_size,
        }
        check_prompts(prompts)
        asked = override_options(options or GenerationOptions(), given)
        rows = [self.encode_prompt(prompt) for prompt in prompts]
        limits = self._compute_max_new_tokens(rows, asked, first_index)
        with eval_mode(self.model):
            if asked.beam_size > 1:
                return self._search_beams(prompts, rows, limits, asked, should_stop)
            return self._generate_sequences(prompts, rows, limits, asked, first_index, should_stop)

    def stream(
        self,
        prompt: str,
        options: GenerationOptions | None = None,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] | None = None,
        first_index: int = 0,
    ) -> Iterator[str]:
        """The text behind a prompt piece by piece, as soon as it is certain; with beams, at last the whole."""
        given = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
            "stop": as_stop_words(stop),
        }
        check_prompts([prompt])
        asked = replace(override_options(options or GenerationOptions(), given), n=1)
        if asked.beam_size > 1:
            yield self.generate([prompt], asked)[0][0].text
            return
        row = self.encode_prompt(prompt)
        one = EncodedPrompt(
            token_ids=row,
            max_new_tokens=self._compute_max_new_tokens([row], asked, first_index)[0],
            rng_key=derive_rng_key(asked.seed, first_index, 0),
        )
        spool = IncrementalDetokenizer(self.vocabulary, row, asked.stop)
        with eval_mode(self.model):
            work = self._start_loop([one], self._build_step_options(asked))
            while work.unfinished and not spool.is_stopped:
                work.run_steps()
                for _, tokens in work.pop_new_tokens():
                    yield from filter(None, (spool.add_token(token) for token in tokens if token not in work.end_ids))
                work.pop_finished()
        if rest := spool.flush():
            yield rest

    # --- prompts -------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a text, as the model says, or its tokenizer."""
        vocab = self.model.config.vocab
        return self.model.config.end_ids or tuple(end for end in (self.vocabulary.end,) if end < vocab)

    def encode_prompt(self, prompt: str) -> list[int]:
        """As the model reads it; of nothing, what a text begins with."""
        ids = [*self.vocabulary.prefix_ids, *self.vocabulary.encode([prompt])[0]]
        start = self.model.config.start_id
        return ids or [next(iter(self.end_ids), 0) if start is None else start]

    def _compute_max_new_tokens(
        self, rows: Sequence[Sequence[int]], options: GenerationOptions, first_index: int
    ) -> list[int]:
        """Tokens that may be written behind each prompt: those asked for, or as many as the model has places for. The
        last that is written is not read any more, and needs none."""
        most = self.model.decoder.positions.max_length
        if most is None:
            limits = [options.max_new_tokens] * len(rows)
        else:
            limits = [min(options.max_new_tokens, most + 1 - len(row)) for row in rows]
            self._check_prompt_lengths(rows, limits, options, most, first_index)
        self._check_memory(rows, limits, options)
        self._warn_beyond_trained_length(rows, limits)
        return limits

    def _check_prompt_lengths(
        self,
        rows: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        options: GenerationOptions,
        max_positions: int,
        first_index: int,
    ) -> None:
        for place, (row, limit) in enumerate(zip(rows, max_new_tokens, strict=True)):
            if limit < 1:
                raise PromptTooLongError(
                    place,
                    f"prompt {first_index + place + 1:,}",
                    f"must have at most {max_positions:,} tokens, as many as the model reads, but has {len(row):,}; shorten it",
                )
        fewer = [limit for limit in max_new_tokens if limit < options.max_new_tokens]
        if fewer and self._notify is not None:
            whom = "of the prompt" if len(rows) == 1 else f"of {len(fewer):,} of {len(rows):,} prompts"
            self._notify(
                f"fewer than {options.max_new_tokens:,} tokens are written ({min(fewer):,} at the least) behind the end "
                f"{whom}, since the model reads {max_positions:,} in all, prompt and text"
            )

    def _check_memory(
        self, rows: Sequence[Sequence[int]], max_new_tokens: Sequence[int], options: GenerationOptions
    ) -> None:
        """What can never fit is told before it is tried."""
        there = get_total_memory(self.device)
        columns = max((len(row) + limit for row, limit in zip(rows, max_new_tokens, strict=True)), default=0)
        needed = self._compute_sequence_bytes(columns) * options.beam_size
        if there is not None and needed > there:
            raise GenerationError(
                f"`max_new_tokens` must be so few that one text fits into memory, {there / 2**30:,.1f} GiB, but is "
                f"{options.max_new_tokens:,}, which take {needed / 2**30:,.1f} GiB; ask for fewer"
            )

    def _warn_beyond_trained_length(self, rows: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> None:
        """Rotary positions have no last one; but a model may have been trained on shorter texts alone."""
        positions = self.model.config.stack.positions
        length = positions.trained_length if isinstance(positions, RotaryConfig) else None
        longest = max((len(row) + limit for row, limit in zip(rows, max_new_tokens, strict=True)), default=0)
        if length is not None and longest > length and self._notify is not None and not self._warned_about_length:
            self._warned_about_length = True
            self._notify(
                f"prompt and text may have {longest:,} tokens, but the model was trained on at most {length:,}: behind "
                f"those it may write nonsense"
            )

    # --- one token after the other -------------------------------------------------------------------------------

    def _generate_sequences(
        self,
        prompts: Sequence[str],
        rows: Sequence[list[int]],
        max_new_tokens: Sequence[int],
        options: GenerationOptions,
        first_index: int,
        should_stop: Callable[[], bool] | None,
    ) -> list[list[Generation]]:
        jobs = [
            EncodedPrompt(
                token_ids=row, max_new_tokens=limit, rng_key=derive_rng_key(options.seed, first_index + place, sample)
            )
            for place, (row, limit) in enumerate(zip(rows, max_new_tokens, strict=True))
            for sample in range(options.n)
        ]
        texts = [prompts[place] for place in range(len(prompts)) for _ in range(options.n)]
        found: dict[int, Generation] = {}
        for places in self._plan_batches(jobs):
            some = [jobs[place] for place in places]
            for at, finished, spool in self._run_batch(some, options, should_stop):
                found[places[at]] = self._build_generation(texts[places[at]], some[at], finished, spool)
        each = [found[place] for place in range(len(jobs))]
        return [each[at : at + options.n] for at in range(0, len(each), options.n)]

    def _run_batch(
        self, prompts: Sequence[EncodedPrompt], options: GenerationOptions, should_stop: Callable[[], bool] | None
    ) -> Iterator[tuple[int, FinishedSequence, IncrementalDetokenizer | None]]:
        """One batch; texts are looked at on the way only where they are to stop at words."""
        work = self._start_loop(prompts, self._build_step_options(options))
        spools = (
            [IncrementalDetokenizer(self.vocabulary, one.token_ids, options.stop) for one in prompts]
            if options.stop
            else []
        )
        while work.unfinished:
            if should_stop is not None and should_stop():
                raise SearchCancelled
            work.run_steps()
            if spools:
                detokenize_new_tokens(work, spools)
            for place, finished in work.pop_finished():
                yield place, finished, spools[place] if spools else None

    def _build_generation(
        self,
        prompt: str,
        encoded: EncodedPrompt,
        finished: FinishedSequence,
        detokenizer: IncrementalDetokenizer | None,
    ) -> Generation:
        ids, log_probs, reason = finished.token_ids, finished.log_probs, finished.finish_reason
        if detokenizer is None:
            text = decode_continuation(self.vocabulary, encoded.token_ids, ids)
        else:
            detokenizer.flush()
            text = detokenizer.text
            if detokenizer.is_stopped:  # an accelerator may have written a little more
                ids, log_probs, reason = ids[: detokenizer.token_count], log_probs[: detokenizer.token_count], "stop"
        return Generation(prompt=prompt, text=text, token_ids=ids, log_prob=math.fsum(log_probs), finish_reason=reason)

    def _build_step_options(self, options: GenerationOptions) -> StepOptions:
        return StepOptions(
            end_ids=self.end_ids,
            suppressed_tokens=self._suppressed_tokens,
            sampling=None if options.sampling is None else replace(options.sampling, seed=0),
            min_length=options.min_new_tokens,
            no_repeat_ngram_size=options.no_repeat_ngram_size,
        )

    @property
    def _suppressed_tokens(self) -> tuple[int, ...]:
        """Ids that the tokenizer has no piece for: matrices are often wider than vocabularies. What ends a text needs
        none."""
        nameless = range(self.vocabulary.size, self.model.config.vocab)
        return tuple(token for token in nameless if token not in self.end_ids)

    def _start_loop(self, prompts: Sequence[EncodedPrompt], options: StepOptions) -> GenerationLoop:
        return GenerationLoop(prompts, self._build_state(prompts, options), options.end_ids)

    def _build_state(self, prompts: Sequence[EncodedPrompt], options: StepOptions) -> GenerationState:
        plan = GenerationContext.from_options(options, self.device)
        if not (self.use_cuda_graphs and options.is_capturable and loop.can_capture_graphs(self.device)):
            return DynamicState(self.model, prompts, plan)
        desk = self._get_static_state(len(prompts), compute_cache_columns(prompts), plan)
        desk.load_prompts(prompts)
        return desk

    def _get_static_state(self, rows: int, columns: int, context: GenerationContext) -> StaticState:
        """The desk of the last batch where it fits, with all its recordings; else another in its place."""
        most = self.model.decoder.positions.max_length or columns + GRAPH_COLUMNS
        key = (rows, min(-(-columns // GRAPH_COLUMNS) * GRAPH_COLUMNS, most), context.options)
        if self._static_state is None or self._static_state[0] != key:
            self._static_state = None  # its memory is free before more is taken
            self._static_state = (key, StaticState(self.model, rows, key[1], context))
        return self._static_state[1]

    # --- batches -------------------------------------------------------------------------------------------------

    def _plan_batches(self, prompts: Sequence[EncodedPrompt]) -> Iterator[list[int]]:
        """Places of prompts of like length, the longest first: if memory is short, that is known at once."""
        order = sorted(range(len(prompts)), key=lambda place: (-len(prompts[place].token_ids), place))
        while order:
            size = self._compute_batch_size(max(compute_cache_columns([prompts[place]]) for place in order))
            yield order[:size]
            order = order[size:]

    def _compute_batch_size(self, columns: int) -> int:
        """Texts that fit into memory: their logits, and what their layers keep."""
        if self.batch_size is not None:
            return max(1, self.batch_size)
        each = self._compute_sequence_bytes(columns)
        if self.device.type == "cpu":
            return max(1, min(CPU_MAX_ROWS, CPU_MAX_BYTES // each))
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else DEFAULT_FREE_BYTES
        return max(1, min(MAX_ROWS, int(FREE_MEMORY_FRACTION * free / each)))

    def _compute_sequence_bytes(self, columns: int) -> int:
        """Memory of one text: its logits, what its layers keep, its tokens."""
        config = self.model.config
        own = self.model.decoder.blocks[0].self_attn
        width = own.kv_heads * own.head_width * config.stack.layers * next(self.model.parameters()).element_size()
        return 16 * config.vocab + (2 * width + 12) * columns

    # --- beams ---------------------------------------------------------------------------------------------------

    def _search_beams(
        self,
        prompts: Sequence[str],
        rows: Sequence[list[int]],
        max_new_tokens: Sequence[int],
        options: GenerationOptions,
        should_stop: Callable[[], bool] | None,
    ) -> list[list[Generation]]:
        writer = CausalStepModel(self.model, self.end_ids)
        engine = self._build_engine(writer, options, should_stop)
        found: list[list[Hypothesis]] = [[] for _ in rows]
        # A prompt behind which little fits would share its columns with others, for which there must be room.
        whole = [place for place, limit in enumerate(max_new_tokens) if limit == options.max_new_tokens]
        for places in ([whole] if whole else []) + [[p] for p in range(len(rows)) if p not in set(whole)]:
            jobs = [
                SearchRequest(source_ids=rows[place], rng_key=place, max_length=max_new_tokens[place])
                for place in places
            ]
            for at, some in engine.search(jobs, options.search_options):
                found[places[at]] = some
        return [
            [self._build_searched_generation(prompt, row, one, options) for one in some]
            for prompt, row, some in zip(prompts, rows, found, strict=True)
        ]

    def _build_engine(
        self, step_model: CausalStepModel, options: GenerationOptions, should_stop: Callable[[], bool] | None
    ) -> TorchEngine[PromptCache]:
        ruler = ConstraintBuilder(self.vocabulary, self.model.config.vocab, step_model.end_id, self.device)
        return TorchEngine[PromptCache](
            model=step_model,
            start=LAST_PROMPT_TOKEN,
            end=step_model.end_id,
            suppressed_tokens=self._suppressed_tokens,
            pad=0,
            device=self.device,
            choose_batch_size=lambda source, target, beams: max(
                1, self._compute_batch_size((source + target) * beams) // beams
            ),
            build_constraints=ruler.build_constraints,
            should_stop=should_stop,
        )

    def _build_searched_generation(
        self, prompt: str, row: Sequence[int], hypothesis: Hypothesis, options: GenerationOptions
    ) -> Generation:
        reason: FinishReason = "end" if hypothesis.is_finished else "length"
        spool = IncrementalDetokenizer(self.vocabulary, row, options.stop)
        for token in hypothesis.token_ids:
            spool.add_token(token)
        spool.flush()
        ids, log_prob = hypothesis.token_ids, hypothesis.log_prob
        if spool.is_stopped:
            ids, reason = ids[: spool.token_count], "stop"
            log_prob = self._score_tokens(row, ids)
        return Generation(prompt=prompt, text=spool.text, token_ids=ids, log_prob=log_prob, finish_reason=reason)

    @torch.no_grad()
    def _score_tokens(self, row: Sequence[int], token_ids: Sequence[int]) -> float:
        """The sum of the log-probabilities of ids behind a prompt."""
        read = torch.tensor([[*row, *token_ids[:-1]]], device=self.device)
        logits = self.model(read)[0, len(row) - 1 :].double()
        logits[:, list(self._suppressed_tokens)] = float("-inf")
        chosen = torch.tensor(token_ids, device=self.device)[:, None]
        return float(logits.log_softmax(-1).gather(1, chosen).sum())


# --- small things --------------------------------------------------------------------------------------------------


def detokenize_new_tokens(loop: GenerationLoop, detokenizers: Sequence[IncrementalDetokenizer]) -> None:
    """What was written becomes text; a text that has come to a word to stop at is stopped."""
    for place, tokens in loop.pop_new_tokens():
        for token in tokens:
            if token not in loop.end_ids:
                detokenizers[place].add_token(token)
        if detokenizers[place].is_stopped:
            loop.stop_prompt(place)


def check_tokenizer(tokenizer: Tokenizer, vocab: int) -> None:
    """Pieces that the model does not have must be such as come in no text: some folders name one more, for padding."""
    words = tokenizer.target
    if any(words.decode([token]) for token in range(vocab, words.size)):
        raise GenerationError(
            f"the tokenizer must be the model's, of {vocab} pieces at most, but has {words.size}; load both from the "
            f"same folder"
        )


def get_total_memory(device: torch.device) -> int | None:
    """Bytes that there are in all, where that can be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def check_prompts(prompts: Sequence[str]) -> None:
    if isinstance(prompts, str):
        raise GenerationError(f"`prompts` must be a list of texts, but is one: {prompts[:60]!r}; put it in [ ]")
    if wrong := [prompt for prompt in prompts if not isinstance(prompt, str)]:
        raise GenerationError(f"`prompts` must be texts, but one is a {type(wrong[0]).__name__}; leave it out")


def as_stop_words(stop: Sequence[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    return (stop,) if isinstance(stop, str) else tuple(stop)


def override_options(options: GenerationOptions, overrides: Mapping[str, object]) -> GenerationOptions:
    return replace(options, **{name: value for name, value in overrides.items() if value is not None})  # type: ignore[arg-type]


def derive_rng_key(seed: int, index: int, sample: int) -> int:
    """A number of 64 bits that tells one text apart from all others, whatever else is asked for."""
    digest = hashlib.sha256(f"{seed}/{index}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
