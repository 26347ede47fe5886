"""The quick engine on a CPU: CTranslate2 (int8), searching with a conversion that is made on first use and kept beside
the model. It does what it does just as our own engine (`engine`) would; whatever it cannot do so, it `refuses`.

How CTranslate2 searches, as its results show:

- Of all continuations of the K beams it looks at the 2K best. Those among the first K that end are put aside, with
  score = sum / length^alpha; the first K others go on. It stops once round(K * patience) have ended, however good what
  goes on may be; with alpha = 0 it would also stop as soon as the best of all ends, so alpha is then told as 1e-12.
  It cannot wait until no better one can come (`patience=None`), but can for long enough: see PATIENCE.
- At the limit what has not ended is put aside beside the rest, and ranked by score. We rank it behind all that ended.
- The length counts the end only if the end is asked for (`return_end_token`), as it is here, and counts a prefix.
- A token that must not be written (`min_decoding_length`, n-grams) is taken out before the softmax, so that the others
  become likelier than the model says; a prefix adds nothing to the sum. With a beam of one that chooses the same tokens
  and the sum is found anew, by forced decoding; with more it would rank otherwise, and is refused.
- There is one limit for a whole call, and sources of more than 1,024 tokens are cut unless told otherwise.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest
from attent.interop import ctranslate2 as conversion
from attent.models import Seq2Seq
from attent.storage.cache import get_cache_folder
from attent.storage.errors import FolderError

if TYPE_CHECKING:
    from attent.text.tokenizer import Tokenizer

# Source tokens, filled up, that are searched for at once, and times beams: of 512 to 8,192 the quickest at base size.
BATCH_TOKENS, BATCH_BEAM_TOKENS = 2048, 4096
# Batches that wait for CTranslate2 while Python is busy with others: only while one takes less than so many seconds,
# since what it was asked for it does to the end, however soon a person has had enough; and slow ones gain nothing.
PREFETCH_BATCHES, SLOW_BATCH_SECONDS = 2, 0.25
POLL_SECONDS = (
    0.002  # seconds between looks at whether a batch is done: while waiting inside CTranslate2, Ctrl-C is not heard
)
# For `patience=None`: until no better hypothesis can come, which CTranslate2 does not know. With 1 it misses a better
# one for 9 of 1,000 captions and 5 of 300 long sentences, with 2 for none; 2 takes up to a fifth more time than 1, and
# 4 three quarters more.
DEFAULT_PATIENCE = 2.0
ZERO_LENGTH_PENALTY = 1e-12  # told as 0, CTranslate2 would stop otherwise
NO_LOOP_GUARD = "has no guard against loops"
IMPOSSIBLE_BIAS = -1e3  # a bias from which on a token has no probability at all


class CTranslate2Engine:
    """Searches with CTranslate2. Made by `open`."""

    def __init__(
        self,
        folder: Path,
        model: Seq2Seq,
        names: tuple[list[str], list[str]],
        *,
        suppressed_tokens: Sequence[int],
        compute_type: str,
        threads: int,
    ) -> None:
        """`folder` holds the conversion of the model, `names` what its source and target ids are called there."""
        self.folder, self.config = folder, model.config
        self._source_names, targets = names
        self._target_names, self._target_ids = targets, {name: i for i, name in enumerate(targets)}
        self._num_writable_tokens = model.config.output_vocab - len(suppressed_tokens)
        self._max_lengths = conversion.get_max_lengths(model.config)
        bias = model.output.bias
        self._can_end = bias is None or float(bias.detach()[model.config.end_id]) > IMPOSSIBLE_BIAS
        self._translator = conversion.import_ctranslate2().Translator(
            str(folder), device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=threads
        )

    @classmethod
    def open(
        cls,
        folder: Path | None,
        model: Seq2Seq,
        tokenizer: Tokenizer | None,
        *,
        compute_type: str = "int8",
        threads: int | None = None,
        suppressed_tokens: Iterable[int] | None = None,
    ) -> CTranslate2Engine:
        """The engine of a model, from the conversion in its folder, which is made there if need be.

        folder   the model's; None, or one that cannot be written to: the conversion is kept in the user's cache
        threads  None: as many as torch would take
        never    target ids that are not written; None: the start, padding, and those that are no pieces
        """
        import torch

        banned = (
            conversion.find_suppressed_tokens(model.config, tokenizer)
            if suppressed_tokens is None
            else sorted(set(suppressed_tokens))
        )
        kept = ensure_conversion(folder, model, tokenizer, compute_type, banned)
        names = conversion.build_vocabularies(model.config, tokenizer)
        threads = threads or torch.get_num_threads()
        return cls(kept, model, names, suppressed_tokens=banned, compute_type=compute_type, threads=threads)

    def find_unsupported_reason(self, options: SearchOptions, requests: Sequence[SearchRequest]) -> str | None:
        """Why it cannot do this just as our own engine, as the end of a sentence; None: it can."""
        refused = find_unsupported_option(options) or (
            find_unsupported_beam_option(options) if options.beam_size > 1 else None
        )
        if refused is not None:
            return refused
        if options.beam_size > 1 and 2 * options.beam_size > self._num_writable_tokens:
            return f"chooses among 2 x {options.beam_size} tokens, and this model has {self._num_writable_tokens}"
        reasons = (self._find_unsupported_request(job, options) for job in requests)
        return next((reason for reason in reasons if reason is not None), None)

    def _find_unsupported_request(self, request: SearchRequest, options: SearchOptions) -> str | None:
        if request.forbid_loops:
            return NO_LOOP_GUARD
        if request.required_phrases or request.banned_phrases:
            return "has no words that must or must not come"
        if request.prefix_ids and request.prefix_ends_word:
            return "may go on with the last word of a prefix"
        if request.prefix_ids and options.beam_size > 1:
            return "leaves the probability of a prefix out of the scores by which beams are ranked"
        for length, longest in zip((len(request.source_ids), request.max_length), self._max_lengths, strict=True):
            if longest is not None and length > longest:
                return f"was given {longest:,} positions, and one text needs {length:,}"
        return None

    def search(
        self, requests: Sequence[SearchRequest], options: SearchOptions
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        """For each job its place among `jobs` and its best hypotheses, the best first; in the order of finishing."""
        again: list[int] = []
        call = TranslateCall.from_options(options)
        for places, found in self._run_batches(batch_by_length(requests, options.beam_size), requests, call):
            for place, result in zip(places, found, strict=True):
                best = self._accept_hypotheses(
                    self._convert_hypotheses(result, options), requests[place].max_length, options
                )
                if best is None:
                    again.append(place)
                else:
                    yield place, self._rescore(requests[place], best, options)
        for places, found in self._run_batches(
            batch_by_max_length(again, requests, options.beam_size), requests, call.with_more_hypotheses()
        ):
            for place, result in zip(places, found, strict=True):
                best = rank_hypotheses(self._convert_hypotheses(result, options))[: options.n_best]
                yield place, self._rescore(requests[place], best, options)

    def _run_batches(
        self, batches: Iterable[list[int]], requests: Sequence[SearchRequest], call: TranslateCall
    ) -> Iterator[tuple[list[int], list[Any]]]:
        """The results of each batch; some are asked for ahead, once it is seen how quick they are."""
        waiting: deque[tuple[list[int], list[Any]]] = deque()
        ahead, before = 0, time.monotonic()
        for places in batches:
            waiting.append((places, self._submit([requests[place] for place in places], call)))
            while len(waiting) > ahead:
                done = wait_for_results(*waiting.popleft())
                now = time.monotonic()
                ahead, before = PREFETCH_BATCHES if now - before < SLOW_BATCH_SECONDS else 0, now
                yield done
        while waiting:
            yield wait_for_results(*waiting.popleft())

    def _submit(self, requests: list[SearchRequest], call: TranslateCall) -> list[Any]:
        limit = max(job.max_length for job in requests)
        prefixes = [self._to_names(job.prefix_ids, self._target_names) for job in requests]
        return self._translator.translate_batch(
            [self._to_names(job.source_ids, self._source_names) for job in requests],
            prefixes if any(prefixes) else None,
            max_batch_size=0,
            asynchronous=True,
            beam_size=call.beam_size,
            patience=call.patience,
            num_hypotheses=call.num_hypotheses,
            length_penalty=call.length_penalty,
            no_repeat_ngram_size=call.no_repeat_ngram_size,
            max_input_length=0,
            max_decoding_length=limit,
            min_decoding_length=min(call.min_length, limit),
            return_scores=True,
            return_end_token=True,
        )

    def _to_names(self, ids: Sequence[int], names: list[str]) -> list[str]:
        return [names[i] for i in ids]

    def _convert_hypotheses(self, result: Any, options: SearchOptions) -> list[Hypothesis]:
        """What CTranslate2 found, in ids, with our scores. Sums beyond all measure are of tokens never written."""
        found = []
        for tokens, theirs in zip(result.hypotheses, result.scores, strict=True):
            ids = [self._target_ids[token] for token in tokens]
            log_prob = theirs * len(ids) ** get_length_penalty(options)
            if log_prob > conversion.SUPPRESSED_LOGIT / 2:
                ended = bool(ids) and ids[-1] == self.config.end_id
                score = log_prob / options.compute_length_penalty(len(ids))
                found.append(
                    Hypothesis(
                        token_ids=tuple(ids[:-1] if ended else ids), log_prob=log_prob, score=score, is_finished=ended
                    )
                )
        return found

    def _accept_hypotheses(
        self, hypotheses: list[Hypothesis], max_length: int, options: SearchOptions
    ) -> list[Hypothesis] | None:
        """The best of a job whose own limit may be below that of its call; None: it must be searched for anew.

        The longest of `found` tells when the search stopped. Up to its own limit it went the same way; and if anything
        was cut there, all that had ended must have been shown, as it comes before, however low its score.
        """
        if max((len(one.token_ids) + one.is_finished for one in hypotheses), default=0) > max_length:
            return None
        shown = (
            options.beam_size == 1 or not self._can_end or all(one.is_finished for one in hypotheses[: options.n_best])
        )
        return rank_hypotheses(hypotheses)[: options.n_best] if shown else None

    def _rescore(
        self, request: SearchRequest, hypotheses: list[Hypothesis], options: SearchOptions
    ) -> list[Hypothesis]:
        """With the model's own sums, where CTranslate2's are not."""
        if not (request.prefix_ids or options.min_length or options.no_repeat_ngram_size):
            return hypotheses
        sources = [self._to_names(request.source_ids, self._source_names)] * len(hypotheses)
        targets = [self._to_names(one.token_ids, self._target_names) for one in hypotheses]
        results = self._translator.score_batch(sources, targets, max_input_length=0)
        return [
            replace_log_prob(one, result.log_probs, options) for one, result in zip(hypotheses, results, strict=True)
        ]


# --- what is asked of CTranslate2 ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TranslateCall:
    """The options of one call, in its terms."""

    beam_size: int
    num_hypotheses: int
    length_penalty: float
    min_length: int
    no_repeat_ngram_size: int

    @classmethod
    def from_options(cls, options: SearchOptions) -> TranslateCall:
        """All that must have ended before it stops is asked for: the longest of them tells when that was."""
        return cls(
            beam_size=options.beam_size,
            num_hypotheses=1
            if options.beam_size == 1
            else round((options.patience or DEFAULT_PATIENCE) * options.beam_size),
            length_penalty=get_length_penalty(options),
            min_length=options.min_length,
            no_repeat_ngram_size=options.no_repeat_ngram_size,
        )

    @property
    def patience(self) -> float:
        return self.num_hypotheses / self.beam_size

    def with_more_hypotheses(self) -> TranslateCall:
        """For a search that met its limit: by then fewer than `hypotheses` had ended. Asked for so many more, it goes
        the same way, and shows everything that has ended or was cut."""
        more = 0 if self.beam_size == 1 else self.beam_size
        return TranslateCall(**{**vars(self), "num_hypotheses": self.num_hypotheses + more})


def get_length_penalty(options: SearchOptions) -> float:
    """The exponent. With a beam of one it changes nothing but the score, which is ours."""
    if options.beam_size == 1 or options.length_penalty_type != "avg":
        return ZERO_LENGTH_PENALTY
    return max(options.length_penalty, ZERO_LENGTH_PENALTY)


def find_unsupported_option(options: SearchOptions) -> str | None:
    if options.sampling is not None:
        return "draws by chance of its own, not by our seed"
    if options.forbid_loops:
        return NO_LOOP_GUARD
    return None


def find_unsupported_beam_option(options: SearchOptions) -> str | None:
    """What a beam of one does the same, and a wider one does not."""
    if options.beam_groups > 1:
        return "has no groups of beams"
    if options.rank_truncated_equally:
        return "ranks what was cut behind all that has ended"
    if options.length_penalty_type == "wu":
        return "has no length penalty of Wu et al."
    if options.min_length or options.no_repeat_ngram_size:
        return "shares the probability of what must not come next among the rest, and ranks beams by that"
    return None


def batch_by_length(requests: Sequence[SearchRequest], num_beams: int) -> Iterator[list[int]]:
    """Jobs of like length together, the longest first."""
    return split_batches(
        sorted(range(len(requests)), key=lambda i: (-len(requests[i].source_ids), -requests[i].max_length)),
        requests,
        num_beams,
    )


def batch_by_max_length(indices: list[int], requests: Sequence[SearchRequest], num_beams: int) -> Iterator[list[int]]:
    """Jobs of one limit together."""
    limits: dict[int, list[int]] = {}
    for place in indices:
        limits.setdefault(requests[place].max_length, []).append(place)
    for alike in limits.values():
        yield from split_batches(alike, requests, num_beams)


def split_batches(indices: list[int], requests: Sequence[SearchRequest], num_beams: int) -> Iterator[list[int]]:
    room = min(BATCH_TOKENS, BATCH_BEAM_TOKENS // num_beams)
    lot: list[int] = []
    longest = 0
    for place in indices:
        longest = max(longest, len(requests[place].source_ids))
        if lot and (len(lot) + 1) * longest > room:
            yield lot
            lot, longest = [], len(requests[place].source_ids)
        lot.append(place)
    if lot:
        yield lot


def wait_for_results(indices: list[int], results: list[Any]) -> tuple[list[int], list[Any]]:
    while not results[-1].done():
        time.sleep(POLL_SECONDS)
    return indices, [result.result() for result in results]


# --- what it found -------------------------------------------------------------------------------------------------


def rank_hypotheses(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """The best first; one that was cut at its limit comes behind all with an end."""
    return sorted(hypotheses, key=lambda one: (not one.is_finished, -one.score))


def replace_log_prob(hypothesis: Hypothesis, log_probs: list[float], options: SearchOptions) -> Hypothesis:
    """`log_probs` are those of its tokens and of the end, which it may not have."""
    log_prob = math.fsum(log_probs if hypothesis.is_finished else log_probs[:-1])
    score = log_prob / options.compute_length_penalty(len(hypothesis.token_ids) + hypothesis.is_finished)
    return Hypothesis(
        token_ids=hypothesis.token_ids, log_prob=log_prob, score=score, is_finished=hypothesis.is_finished
    )


# --- the conversion ------------------------------------------------------------------------------------------------


def ensure_conversion(
    folder: Path | None,
    model: Seq2Seq,
    tokenizer: Tokenizer | None,
    quantization: str,
    suppressed_tokens: Sequence[int],
) -> Path:
    """Where the conversion of just this model stands, whole; made if need be. A stale or damaged one is replaced."""
    mark = conversion.compute_fingerprint(model, tokenizer, quantization, suppressed_tokens)
    beside = [] if folder is None else [folder / f"ctranslate2-{quantization}"]
    cached = get_cache_folder() / "ctranslate2" / f"{mark[:32]}-{quantization}"
    places = [*beside, cached]
    there = next((place for place in places if conversion.is_intact(place, mark)), None)
    if there is not None:
        return there
    for place in places:
        try:
            conversion.write_conversion(
                model, tokenizer, place, quantization=quantization, suppressed_tokens=suppressed_tokens
            )
            return place
        except FolderError as error:  # it cannot be written to: a model may be shared, or the disk be full
            if conversion.is_intact(place, mark):  # another process was quicker
                return place
            problem = error
    raise problem
