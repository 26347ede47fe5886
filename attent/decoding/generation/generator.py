"""Continue prompts with a decoder-only model: tokens are generated in `loop`, and detokenized as they come.

Text is released as soon as later tokens cannot change it, never with half a character. A stop string is not part of the
text and may span tokens.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.generation import loop
from attent.decoding.loading import check_tokenizer_size, compute_max_rows, load_tokenizer, resolve_device_and_dtype
from attent.decoding.options import Generation, GenerationOptions, StopCheck
from attent.decoding.translator import check_list_of_strings
from attent.interop import load_as
from attent.models import CausalLM
from attent.nn.devices import get_device
from attent.nn.eval_mode import eval_mode
from attent.storage.errors import AttentError
from attent.storage.hub import locate_model
from attent.storage.machine import measure_memory
from attent.text.tokenizer import Tokenizer
from attent.text.vocabulary import ESCAPE, Vocabulary

CPU_MAX_ROWS, MAX_ROWS = 64, 1024  # sequences per batch, see `compute_max_rows`
CONTEXT_TOKENS = 8  # prompt tokens that the first new ones are decoded with: the first of a text loses its space
INCOMPLETE_ENDINGS = ("\ufffd", ESCAPE)  # half a character; in our vocabularies, half of an escaped one


def decode_continuation(vocabulary: Vocabulary, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
    """Return the text of `token_ids` after a prompt, with the space before its first word if there is one."""
    context = get_context(vocabulary, prompt)
    return decode_after_context(vocabulary, context, vocabulary.decode(context), token_ids)


def get_context(vocabulary: Vocabulary, prompt: Sequence[int]) -> list[int]:
    """Return the last tokens of a prompt, not starting inside a run of byte tokens, which are decoded together."""
    start = max(0, len(prompt) - CONTEXT_TOKENS)
    while start and prompt[start] in vocabulary.byte_ids:
        start -= 1
    return list(prompt[start:])


def decode_after_context(
    vocabulary: Vocabulary, context: Sequence[int], context_text: str, token_ids: Sequence[int]
) -> str:
    text = vocabulary.decode([*context, *token_ids])
    # Invalid bytes can change the text before them, which has been released already.
    return text[len(context_text) :] if text.startswith(context_text) else vocabulary.decode(token_ids)


class IncrementalDetokenizer:
    """Turns the tokens after a prompt into text; the pieces from `add_token` and `flush` make up the whole."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.vocabulary, self.stop_words = vocabulary, tuple(stop)
        self.context = get_context(vocabulary, prompt)  # released tokens, needed to decode the next
        self.context_text = vocabulary.decode(self.context)
        self.pending_tokens: list[int] = []  # not decoded yet
        self.held_text = ""  # may be the start of a stop string
        self.text = ""  # released so far
        self.token_count = 0  # added before it stopped
        self.is_stopped = False

    def add_token(self, token: int) -> str:
        if self.is_stopped:
            return ""
        self.token_count += 1
        self.pending_tokens.append(token)
        # The next token may belong to the same run of byte tokens; tokens without text do not end a run.
        byte_ids, decode = self.vocabulary.byte_ids, self.vocabulary.decode
        with_text = (token for token in reversed(self.pending_tokens) if token in byte_ids or decode([token]))
        if byte_ids and next(with_text, None) in byte_ids:
            return ""
        text = self._decode_pending()
        if not text or text.endswith(INCOMPLETE_ENDINGS):
            return ""
        self._commit_pending()
        return self._release_text(text, last=False)

    def flush(self) -> str:
        if self.is_stopped:
            return ""
        text = self._decode_pending()
        self._commit_pending()
        return self._release_text(text, last=True)

    def _decode_pending(self) -> str:
        return decode_after_context(self.vocabulary, self.context, self.context_text, self.pending_tokens)

    def _commit_pending(self) -> None:
        self.context, self.pending_tokens = self.pending_tokens or self.context, []
        self.context_text = self.vocabulary.decode(self.context)

    def _release_text(self, text: str, *, last: bool) -> str:
        self.held_text += text
        # The match that ends first, so that the result does not depend on the tokenization.
        starts = [(self.held_text.find(word), word) for word in self.stop_words if word in self.held_text]
        if starts:
            self.is_stopped, end = True, min((start + len(word), start) for start, word in starts)[1]
        else:
            end = len(self.held_text) - (0 if last else count_partial_match(self.held_text, self.stop_words))
        released, self.held_text = self.held_text[:end], self.held_text[end:]
        self.text += released
        return released


def count_partial_match(text: str, words: Sequence[str]) -> int:
    """Return how many characters at the end of a text may start one of the words."""
    longest = min(len(text), max(map(len, words), default=1) - 1)
    sizes = range(longest, 0, -1)
    return next((n for n in sizes if any(word.startswith(text[-n:]) and len(word) > n for word in words)), 0)


class GenerationError(AttentError):
    """The request cannot be fulfilled."""


class PromptTooLongError(GenerationError):
    """A prompt leaves no room to generate: the one at `index` of those given."""

    def __init__(self, index: int, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.index, self.problem = index, problem


class Generator:
    """A decoder-only model with its tokenizer. Not thread-safe.

    >>> generator = attent.Generator.load("runs/lm")
    >>> texts = generator.generate(["A man", "A dog"], n=2, max_new_tokens=5)  # a list for each prompt
    >>> texts[0][1].text
    '...'
    >>> "".join(generator.stream("A man", max_new_tokens=5))  # pieces, as soon as they are known
    '...'
    """

    def __init__(self, model: CausalLM, tokenizer: Tokenizer, *, notify: Callable[[str], None] | None = None) -> None:
        """`notify` receives messages for the user, such as that fewer tokens than requested are generated."""
        vocabulary, vocab = tokenizer.target, model.config.vocab
        # Tokens beyond the model's vocabulary must have no text: some folders add one for padding.
        if any(vocabulary.decode([token]) for token in range(vocab, vocabulary.size)):
            check_tokenizer_size(vocabulary.size, vocab)
        self.model, self.tokenizer, self.vocabulary = model, tokenizer, vocabulary
        self._notify = notify
        self._static_state: tuple[tuple[int, int, loop.StepOptions], loop.StaticState] | None = None

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> Self:
        """Load a model folder, ours or Hugging Face's (GPT-2, LLaMA); `dtype` None: as stored."""
        path = locate_model(folder)
        placed, precision = resolve_device_and_dtype(device, dtype)
        model = load_as(path, CausalLM, dtype=precision, device=placed)
        return cls(model, load_tokenizer(path), notify=notify)

    def generate(
        self,
        prompts: Sequence[str],
        options: GenerationOptions | None = None,
        *,
        first_index: int = 0,
        should_stop: StopCheck | None = None,
        **overrides: Any,
    ) -> list[list[Generation]]:
        """Return the `n` texts of each prompt.

        options      see `GenerationOptions`; `overrides` are fields of it
        first_index  index of the first prompt in the whole input, on which sampling depends
        should_stop  polled during generation; True raises `SearchCancelled`
        """
        check_list_of_strings(prompts, "prompts")
        options = override_options(options, overrides)
        rows = [self.encode_prompt(prompt) for prompt in prompts]
        limits = self._compute_max_new_tokens(rows, options, first_index)
        with eval_mode(self.model):
            return self._generate_sequences(prompts, rows, limits, options, first_index, should_stop)

    def stream(self, prompt: str, options: GenerationOptions | None = None, **overrides: Any) -> Iterator[str]:
        """Yield the text in pieces, as soon as later tokens cannot change them."""
        check_list_of_strings([prompt], "prompt")
        options = replace(override_options(options, overrides), n=1)
        row = self.encode_prompt(prompt)
        limit = self._compute_max_new_tokens([row], options, 0)[0]
        key = derive_rng_key(options.seed, 0, 0)
        encoded = loop.EncodedPrompt(token_ids=row, max_new_tokens=limit, rng_key=key)
        detokenizer = IncrementalDetokenizer(self.vocabulary, row, options.stop)
        with eval_mode(self.model):
            running = self._start_loop([encoded], self._build_step_options(options))
            while running.unfinished and not detokenizer.is_stopped:
                running.run_steps()
                for _, tokens in running.pop_new_tokens():
                    pieces = (detokenizer.add_token(token) for token in tokens if token not in running.end_ids)
                    yield from filter(None, pieces)
                running.pop_finished()
        if rest := detokenizer.flush():
            yield rest

    # --- prompts -------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return get_device(self.model)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        vocab = self.model.config.vocab
        return self.model.config.end_ids or tuple(end for end in (self.vocabulary.end,) if end < vocab)

    def encode_prompt(self, prompt: str) -> list[int]:
        token_ids = [*self.vocabulary.prefix_ids, *self.vocabulary.encode([prompt])[0]]
        start = self.model.config.start_id
        return token_ids or [next(iter(self.end_ids), 0) if start is None else start]

    def _compute_max_new_tokens(
        self, rows: Sequence[Sequence[int]], options: GenerationOptions, first_index: int
    ) -> list[int]:
        """Return the requested number, or what the model has positions for; the last token generated needs none."""
        max_positions = self.model.decoder.positions.max_length
        limits = [options.max_new_tokens] * len(rows)
        if max_positions is not None:
            limits = [min(limit, max_positions + 1 - len(row)) for limit, row in zip(limits, rows, strict=True)]
            for index, (row, limit) in enumerate(zip(rows, limits, strict=True)):
                if limit < 1:
                    problem = (
                        f"must have at most the model's {max_positions:,} tokens, but has {len(row):,}; shorten it"
                    )
                    raise PromptTooLongError(index, f"prompt {first_index + index + 1:,}", problem)
            reduced = [limit for limit in limits if limit < options.max_new_tokens]
            if reduced and self._notify is not None:
                which = "the prompt" if len(rows) == 1 else f"{len(reduced):,} of {len(rows):,} prompts"
                self._notify(
                    f"fewer than {options.max_new_tokens:,} tokens (at least {min(reduced):,}) are generated after "
                    f"{which}: prompt and text have at most {max_positions:,} tokens in this model"
                )
        longest = max((len(row) + limit for row, limit in zip(rows, limits, strict=True)), default=0)
        is_cuda, needed = self.device.type == "cuda", self._compute_sequence_bytes(longest)
        total = torch.cuda.mem_get_info(self.device)[1] if is_cuda else measure_memory()[0]
        if needed > total:
            raise GenerationError(
                f"`max_new_tokens` must be small enough for one text to fit into {total / 2**30:,.1f} GiB of memory, "
                f"but is {options.max_new_tokens:,}, which takes {needed / 2**30:,.1f} GiB; lower it"
            )
        return limits

    # --- sequences ------------------------------------------------------------------------------

    def _generate_sequences(
        self,
        prompts: Sequence[str],
        rows: Sequence[list[int]],
        max_new_tokens: Sequence[int],
        options: GenerationOptions,
        first_index: int,
        should_stop: StopCheck | None,
    ) -> list[list[Generation]]:
        n = options.n
        encoded = [
            loop.EncodedPrompt(token_ids=row, max_new_tokens=limit, rng_key=derive_rng_key(options.seed, index, sample))
            for index, (row, limit) in enumerate(zip(rows, max_new_tokens, strict=True), first_index)
            for sample in range(n)
        ]
        generations: dict[int, Generation] = {}
        # Prompts of similar length, longest first: too little memory then shows at once.
        order = sorted(range(len(encoded)), key=lambda index: (-len(encoded[index].token_ids), index))
        while order:
            row_bytes = self._compute_sequence_bytes(loop.compute_cache_columns([encoded[index] for index in order]))
            size = max(1, compute_max_rows(row_bytes, self.device, CPU_MAX_ROWS, MAX_ROWS))
            indices, order = order[:size], order[size:]
            batch = [encoded[index] for index in indices]
            for i, finished, detokenizer in self._run_batch(batch, options, should_stop):
                token_ids, log_probs, reason = finished.token_ids, finished.log_probs, finished.finish_reason
                if detokenizer is None:
                    text = decode_continuation(self.vocabulary, batch[i].token_ids, token_ids)
                else:
                    detokenizer.flush()
                    text = detokenizer.text
                    if detokenizer.is_stopped:  # an accelerator may have generated a few tokens more
                        count = detokenizer.token_count
                        token_ids, log_probs, reason = token_ids[:count], log_probs[:count], "stop"
                generations[indices[i]] = Generation(
                    prompt=prompts[indices[i] // n],
                    prompt_tokens=len(batch[i].token_ids),
                    text=text,
                    token_ids=token_ids,
                    log_prob=math.fsum(log_probs),
                    finish_reason=reason,
                )
        return [[generations[index * n + sample] for sample in range(n)] for index in range(len(prompts))]

    def _run_batch(
        self, prompts: Sequence[loop.EncodedPrompt], options: GenerationOptions, should_stop: StopCheck | None
    ) -> Iterator[tuple[int, loop.FinishedSequence, IncrementalDetokenizer | None]]:
        """Yield (index, sequence, its detokenizer); texts are decoded on the way only to find stop strings."""
        running = self._start_loop(prompts, self._build_step_options(options))
        stop = options.stop
        detokenizers = [IncrementalDetokenizer(self.vocabulary, p.token_ids, stop) for p in prompts] if stop else []
        while running.unfinished:
            if should_stop is not None and should_stop():
                raise SearchCancelled
            running.run_steps()
            for index, tokens in running.pop_new_tokens() if detokenizers else ():
                for token in tokens:
                    if token not in running.end_ids:
                        detokenizers[index].add_token(token)
                if detokenizers[index].is_stopped:
                    running.stop_prompt(index)
            for index, finished in running.pop_finished():
                yield index, finished, detokenizers[index] if detokenizers else None

    def _build_step_options(self, options: GenerationOptions) -> loop.StepOptions:
        sampling = None if options.sampling is None else replace(options.sampling, seed=0)
        return loop.StepOptions(end_ids=self.end_ids, suppressed_tokens=self._suppressed_tokens, sampling=sampling)

    @property
    def _suppressed_tokens(self) -> tuple[int, ...]:
        """Ids without a token: output matrices are often wider than vocabularies."""
        unnamed = range(self.vocabulary.size, self.model.config.vocab)
        return tuple(token for token in unnamed if token not in self.end_ids)

    def _start_loop(self, prompts: Sequence[loop.EncodedPrompt], options: loop.StepOptions) -> loop.GenerationLoop:
        context = loop.GenerationContext.from_options(options, self.device)
        state: loop.GenerationState
        if loop.can_capture_graphs(self.device):
            state = self._get_static_state(len(prompts), loop.compute_cache_columns(prompts), context)
            state.load_prompts(prompts)
        else:
            state = loop.DynamicState(self.model, prompts, context)
        return loop.GenerationLoop(prompts, state, options.end_ids)

    def _get_static_state(self, rows: int, columns: int, context: loop.GenerationContext) -> loop.StaticState:
        max_columns = self.model.decoder.positions.max_length or columns + loop.GRAPH_COLUMNS
        capacity = min(-(-columns // loop.GRAPH_COLUMNS) * loop.GRAPH_COLUMNS, max_columns)
        key = (rows, capacity, context.options)
        if self._static_state is None or self._static_state[0] != key:
            self._static_state = None  # frees its memory before more is allocated
            self._static_state = (key, loop.StaticState(self.model, rows, capacity, context))
        return self._static_state[1]

    def _compute_sequence_bytes(self, columns: int) -> int:
        config, self_attn = self.model.config, self.model.decoder.blocks[0].self_attn
        key_bytes_per_token = self_attn.kv_heads * self_attn.head_width * config.stack.layers
        key_bytes_per_token *= next(self.model.parameters()).element_size()
        return 16 * config.vocab + (2 * key_bytes_per_token + 12) * columns


def override_options(options: GenerationOptions | None, overrides: dict[str, Any]) -> GenerationOptions:
    if isinstance(stop := overrides.get("stop"), str):
        overrides["stop"] = (stop,)
    elif stop is not None:
        overrides["stop"] = tuple(stop)
    return replace(options or GenerationOptions(), **overrides)


def derive_rng_key(seed: int, index: int, sample: int) -> int:
    """Return 64 bits that identify one sample, independent of the rest of the request."""
    digest = hashlib.sha256(f"{seed}/{index}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
