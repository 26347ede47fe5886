"""The fast engine on a CPU: CTranslate2 (int8), with a conversion that is made on first use, in the user's cache.

It is used only where it gives what the reference engine would give; `find_unsupported_reason` says why not otherwise.
How CTranslate2 searches, as its results show:

- Of all continuations of the K beams it considers the best 2K. Those among the first K that end are finished, with
  score = log_prob / length^alpha; the first K others stay live. It stops once round(K * patience) have finished,
  however good the live ones are; with alpha = 0 it would also stop when the best of all finishes, so alpha is set to
  1e-12 then. It cannot wait until no better hypothesis is possible (`patience=None`): see DEFAULT_PATIENCE.
- At the maximum length, live hypotheses are ranked with the finished ones by score. We rank them behind.
- The length counts the end token only with `return_end_token`, as used here, and counts a prefix.
- A forbidden token (`min_decoding_length`, n-grams) is masked before the softmax, so that the others become likelier
  than the model says; a prefix adds nothing to the log-probability. So these are refused.
- There is one maximum length for a whole call, and sources of more than 1,024 tokens are truncated by default.
"""

import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from attent.decoding.loading import split_batches
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest, find_unsupported_field
from attent.interop import ctranslate2 as converter
from attent.models import Seq2Seq
from attent.models.seq2seq import find_suppressed_tokens
from attent.storage.cache import get_cache_folder, hold_lock
from attent.storage.errors import FolderError
from attent.text.tokenizer import Tokenizer

SUPPORTED_OPTIONS = frozenset({
    "beam_size", "length_penalty", "length_penalty_type", "n_best", "max_length", "patience", "diversity_penalty",
    "prevent_loops",
})  # fmt: skip
SUPPORTED_REQUEST_FIELDS = frozenset({"source_ids", "rng_key", "max_length", "prefix_ids", "prefix_ends_word"})
REASONS = {
    "sampling": "does not sample with our seeds",
    "forbid_loops": "has no guard against loops",
    "beam_groups": "has no diverse beam search",
    "rank_truncated_equally": "ranks truncated hypotheses behind finished ones",
    "min_length": "renormalizes probabilities under a minimum length",
    "no_repeat_ngram_size": "renormalizes probabilities without repeated n-grams",
    "required_phrases": "cannot enforce required phrases or glossary terms",
    "banned_phrases": "cannot exclude banned phrases",
}
# Source tokens of a batch of one thread, with padding, and times beams: of 512 to 8,192 the fastest at base size.
BATCH_TOKENS, BATCH_BEAM_TOKENS = 2048, 4096
# Batches submitted ahead of those that the threads work on, so that CTranslate2 works while Python does. Only while a
# batch takes less than SLOW_BATCH_SECONDS: submitted batches cannot be cancelled, and slow ones gain nothing.
PREFETCH_BATCHES, SLOW_BATCH_SECONDS = 2, 0.25
POLL_SECONDS = 0.002  # waiting inside CTranslate2 would block Ctrl-C
# For `patience=None`. With 1 CTranslate2 misses a better hypothesis for 9 of 1,000 captions and 5 of 300 long
# sentences, with 2 for none; 2 takes up to a fifth more time than 1, and 4 three quarters more.
DEFAULT_PATIENCE = 2.0
ZERO_LENGTH_PENALTY = 1e-12  # at 0 CTranslate2 stops earlier
MAX_UNUSED_SECONDS = 30 * 24 * 3600  # then a conversion is removed from the cache
IMPOSSIBLE_BIAS = -1e3  # at or below it, a token has probability 0


class CTranslate2Engine:
    def __init__(
        self,
        model: Seq2Seq,
        tokenizer: Tokenizer | None,
        *,
        use_cache: bool = True,
        compute_type: str = "int8",
        threads: int | None = None,
    ) -> None:
        """Open the conversion of the model in the user's cache; convert first if there is none.

        use_cache  False: convert again, and keep nothing
        threads    None: as many as torch uses
        """
        suppressed = find_suppressed_tokens(model.config, tokenizer)
        self.config = model.config
        # Tokens at the start of each request's prefix that have no share in the scores.
        self._num_given = 0 if tokenizer is None else len(tokenizer.target_prefix)
        self._source_names, self._target_names = converter.build_vocabularies(model.config, tokenizer)
        self._target_ids = {name: i for i, name in enumerate(self._target_names)}
        self._num_writable_tokens = model.config.output_vocab - len(suppressed)
        self._max_lengths = [converter.get_max_length(side) for side in model.config.stacks]
        bias = model.output.bias
        self._can_end = bias is None or float(bias.detach()[model.config.end_id]) > IMPOSSIBLE_BIAS
        self._num_threads = threads or torch.get_num_threads()
        with open_conversion(model, tokenizer, compute_type, suppressed, use_cache) as path:
            # A batch for each thread: two threads that share a batch wait for each other at every layer. They share
            # the weights.
            self._translator = converter.import_ctranslate2().Translator(
                str(path), device="cpu", compute_type=compute_type, inter_threads=self._num_threads, intra_threads=1
            )

    # --- what it supports --------------------------------------------------------------------------------------------

    def find_unsupported_reason(self, options: SearchOptions, requests: Sequence[SearchRequest]) -> str | None:
        """Return why the results would differ from the reference engine's, as the end of a sentence; None: equal."""
        if reason := explain_unsupported_field(options, SUPPORTED_OPTIONS):
            return reason
        if options.beam_size > 1 and options.length_penalty_type == "wu":
            return "has no length penalty of Wu et al."
        if options.beam_size > 1 and 2 * options.beam_size > self._num_writable_tokens:
            return f"needs 2 x {options.beam_size} candidate tokens, but this model has {self._num_writable_tokens}"
        return next(filter(None, map(self._find_unsupported_request, requests)), None)

    def _find_unsupported_request(self, request: SearchRequest) -> str | None:
        if reason := explain_unsupported_field(request, SUPPORTED_REQUEST_FIELDS):
            return reason
        if len(request.prefix_ids) > self._num_given:
            return "leaves the probability of a prefix out of the scores"
        lengths = len(request.source_ids), request.max_length
        for length, max_length in zip(lengths, self._max_lengths, strict=True):
            if max_length is not None and length > max_length:
                return f"has {max_length:,} positions, and a text needs {length:,}"
        return None

    # --- search ------------------------------------------------------------------------------------------------------

    def search(
        self, requests: Sequence[SearchRequest], options: SearchOptions
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        # Request all hypotheses that must finish before it stops: the longest of them shows when that was.
        count, more = round((options.patience or DEFAULT_PATIENCE) * options.beam_size), options.beam_size
        if options.beam_size == 1:
            count, more = 1, 0
        lengths = [len(request.source_ids) for request in requests]
        # One search takes all threads, a second one at the same time at least half of them.
        num_threads = max(1, self._num_threads // 2, self._num_threads - self._translator.num_active_batches)
        batch_tokens = min(BATCH_TOKENS, BATCH_BEAM_TOKENS // options.beam_size, sum(lengths) // num_threads + 1)
        order = sorted(range(len(requests)), key=lambda i: (-lengths[i], -requests[i].max_length))
        again: dict[int, list[int]] = {}  # by the maximum target length
        batches: Iterator[list[int]] = split_batches(order, lengths, batch_tokens)
        for index, hypotheses in self._run_batches(batches, requests, options, count):
            # The request's own maximum length may be below that of the call. If no hypothesis is longer, a search with
            # that maximum gives the same. If one of the n best is truncated, finished ones before it may be missing.
            max_length = requests[index].max_length
            longest = max((len(each.token_ids) + each.is_finished for each in hypotheses), default=0)
            all_finished = all(each.is_finished for each in hypotheses[: options.n_best])
            is_complete = options.beam_size == 1 or not self._can_end or all_finished
            if longest > max_length or not is_complete:
                again.setdefault(max_length, []).append(index)
            else:
                yield index, select_n_best(hypotheses, options)
        # A search that reaches its maximum length has fewer finished hypotheses than `count`. With K more it is the
        # same search, and returns every hypothesis that finished or was truncated.
        batches = chain.from_iterable(split_batches(group, lengths, batch_tokens) for group in again.values())
        for index, hypotheses in self._run_batches(batches, requests, options, count + more):
            yield index, select_n_best(hypotheses, options)

    def _run_batches(
        self,
        batches: Iterable[list[int]],
        requests: Sequence[SearchRequest],
        options: SearchOptions,
        num_hypotheses: int,
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        pending: deque[tuple[list[int], list[Any]]] = deque()
        prefetch, last_time = self._num_threads - 1, time.monotonic()
        for indices in batches:
            pending.append((indices, self._submit([requests[index] for index in indices], options, num_hypotheses)))
            while len(pending) > prefetch:
                yield from self._collect_results(*pending.popleft(), options)
                now = time.monotonic()
                ahead, last_time = PREFETCH_BATCHES if now - last_time < SLOW_BATCH_SECONDS else 0, now
                prefetch = self._num_threads - 1 + ahead
        while pending:
            yield from self._collect_results(*pending.popleft(), options)

    def _submit(self, requests: list[SearchRequest], options: SearchOptions, num_hypotheses: int) -> list[Any]:
        max_length = max(request.max_length for request in requests)
        prefixes = [to_names(request.prefix_ids, self._target_names) for request in requests]
        return self._translator.translate_batch(
            [to_names(request.source_ids, self._source_names) for request in requests],
            prefixes if any(prefixes) else None,
            max_batch_size=0,
            asynchronous=True,
            beam_size=options.beam_size,
            patience=num_hypotheses / options.beam_size,
            num_hypotheses=num_hypotheses,
            length_penalty=get_length_exponent(options),
            max_input_length=0,
            max_decoding_length=max_length,
            min_decoding_length=0,
            return_scores=True,
            return_end_token=True,
        )

    def _collect_results(
        self, indices: list[int], results: list[Any], options: SearchOptions
    ) -> list[tuple[int, list[Hypothesis]]]:
        while not results[-1].done():
            time.sleep(POLL_SECONDS)
        hypotheses = [self._convert_hypotheses(result.result(), options) for result in results]
        return list(zip(indices, hypotheses, strict=True))

    def _convert_hypotheses(self, result: Any, options: SearchOptions) -> list[Hypothesis]:
        """Return ids with our scores; hypotheses with suppressed tokens, of a vast negative score, are left out."""
        hypotheses = []
        for tokens, ct2_score in zip(result.hypotheses, result.scores, strict=True):
            ids = [self._target_ids[token] for token in tokens]
            log_prob = ct2_score * len(ids) ** get_length_exponent(options)
            if log_prob > converter.SUPPRESSED_LOGIT / 2:
                is_finished = bool(ids) and ids[-1] == self.config.end_id
                token_ids = tuple(ids[:-1] if is_finished else ids)
                score = log_prob / options.compute_score_divisor(len(ids))
                hypotheses.append(
                    Hypothesis(token_ids=token_ids, log_prob=log_prob, score=score, is_finished=is_finished)
                )
        return hypotheses


def select_n_best(hypotheses: list[Hypothesis], options: SearchOptions) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda each: (not each.is_finished, -each.score))[: options.n_best]


def explain_unsupported_field(value: SearchOptions | SearchRequest, supported: frozenset[str]) -> str | None:
    name = find_unsupported_field(value, supported)
    return None if name is None else REASONS.get(name, f"does not support `{name}`")


def to_names(ids: Sequence[int], names: list[str]) -> list[str]:
    return [names[i] for i in ids]


# --- calls of CTranslate2 ------------------------------------------------------------------------------------------


def get_length_exponent(options: SearchOptions) -> float:
    """Return the exponent of the length. With a beam of one it only affects the score, which we compute ourselves."""
    if options.beam_size == 1 or options.length_penalty_type != "avg":
        return ZERO_LENGTH_PENALTY
    return max(options.length_penalty, ZERO_LENGTH_PENALTY)


# --- the conversion ------------------------------------------------------------------------------------------------


@contextmanager
def open_conversion(
    model: Seq2Seq, tokenizer: Tokenizer | None, quantization: str, suppressed_tokens: Sequence[int], use_cache: bool
) -> Iterator[Path]:
    """Yield a conversion of exactly this model: in the user's cache, by a hash, or a temporary one.

    A conversion that comes with a model folder is never used: nothing shows that it was made from these weights.
    """
    options: dict[str, Any] = {"quantization": quantization, "suppressed_tokens": suppressed_tokens}
    if use_cache:
        fingerprint = converter.compute_fingerprint(model, tokenizer, quantization, suppressed_tokens)
        cached = get_cache_folder() / "ctranslate2" / f"{fingerprint}-{quantization}"
        is_intact = converter.is_intact(cached, fingerprint)
        if not is_intact:
            with suppress(FolderError, OSError):  # a read-only or full cache
                cached.parent.mkdir(parents=True, exist_ok=True)
                with hold_lock(cached.parent.with_name(".ctranslate2.lock")):
                    if not converter.is_intact(cached, fingerprint):
                        converter.write_conversion(model, tokenizer, cached, **options)
                        remove_unused_conversions(cached.parent)
            is_intact = converter.is_intact(cached, fingerprint)
        if is_intact:
            with suppress(OSError):
                os.utime(cached)
            yield cached
            return
    with tempfile.TemporaryDirectory(prefix="attent-", ignore_cleanup_errors=True) as scratch:
        converter.write_conversion(model, tokenizer, Path(scratch) / "conversion", **options)
        yield Path(scratch) / "conversion"


def remove_unused_conversions(folder: Path) -> None:
    for path in folder.iterdir():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > MAX_UNUSED_SECONDS:
                shutil.rmtree(path)
