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

from attent.data.cache import cache_folder
from attent.decode.options import Hypothesis, Job, Search
from attent.interop import ctranslate2 as conversion
from attent.models import Seq2Seq
from attent.models.folder import FolderError

if TYPE_CHECKING:
    from attent.text.tokenizer import Tokenizer

# Source tokens, filled up, that are searched for at once, and times beams: of 512 to 8,192 the quickest at base size.
BATCH_TOKENS, BATCH_BEAM_TOKENS = 2048, 4096
# Batches that wait for CTranslate2 while Python is busy with others: only while one takes less than so many seconds,
# since what it was asked for it does to the end, however soon a person has had enough; and slow ones gain nothing.
AHEAD, SLOW = 2, 0.25
LOOK = 0.002  # seconds between looks at whether a batch is done: while waiting inside CTranslate2, Ctrl-C is not heard
# For `patience=None`: until no better hypothesis can come, which CTranslate2 does not know. With 1 it misses a better
# one for 9 of 1,000 captions and 5 of 300 long sentences, with 2 for none; 2 takes up to a fifth more time than 1, and
# 4 three quarters more.
PATIENCE = 2.0
NO_PENALTY = 1e-12  # told as 0, CTranslate2 would stop otherwise
NO_GUARD = "has no guard against loops"
IMPOSSIBLE = -1e3  # a bias from which on a token has no probability at all


class QuickEngine:
    """Searches with CTranslate2. Made by `open`."""

    def __init__(
        self,
        folder: Path,
        model: Seq2Seq,
        names: tuple[list[str], list[str]],
        *,
        never: Sequence[int],
        compute_type: str,
        threads: int,
    ) -> None:
        """`folder` holds the conversion of the model, `names` what its source and target ids are called there."""
        self.folder, self.config = folder, model.config
        self._sources, targets = names
        self._targets, self._ids = targets, {name: i for i, name in enumerate(targets)}
        self._choice = model.config.targets - len(never)
        self._longest = conversion.longest(model.config)
        bias = model.output.bias
        self._ends = bias is None or float(bias.detach()[model.config.end]) > IMPOSSIBLE
        self._translator = conversion.package().Translator(
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
        never: Iterable[int] | None = None,
    ) -> QuickEngine:
        """The engine of a model, from the conversion in its folder, which is made there if need be.

        folder   the model's; None, or one that cannot be written to: the conversion is kept in the user's cache
        threads  None: as many as torch would take
        never    target ids that are not written; None: the start, padding, and those that are no pieces
        """
        import torch

        banned = conversion.never_written(model.config, tokenizer) if never is None else sorted(set(never))
        kept = keep(folder, model, tokenizer, compute_type, banned)
        names = conversion.vocabularies(model.config, tokenizer)
        threads = threads or torch.get_num_threads()
        return cls(kept, model, names, never=banned, compute_type=compute_type, threads=threads)

    def refuses(self, search: Search, jobs: Sequence[Job]) -> str | None:
        """Why it cannot do this just as our own engine, as the end of a sentence; None: it can."""
        refused = refused_of_any(search) or (refused_of_beams(search) if search.beam_size > 1 else None)
        if refused is not None:
            return refused
        if search.beam_size > 1 and 2 * search.beam_size > self._choice:
            return f"chooses among 2 x {search.beam_size} tokens, and this model has {self._choice}"
        reasons = (self._refused_job(job, search) for job in jobs)
        return next((reason for reason in reasons if reason is not None), None)

    def _refused_job(self, job: Job, search: Search) -> str | None:
        if job.no_loops:
            return NO_GUARD
        if job.demanded or job.forbidden:
            return "has no words that must or must not come"
        if job.prefix and job.whole_words:
            return "may go on with the last word of a prefix"
        if job.prefix and search.beam_size > 1:
            return "leaves the probability of a prefix out of the scores by which beams are ranked"
        for length, longest in zip((len(job.source), job.limit), self._longest, strict=True):
            if longest is not None and length > longest:
                return f"was given {longest:,} positions, and one text needs {length:,}"
        return None

    def search(self, jobs: Sequence[Job], search: Search) -> Iterator[tuple[int, list[Hypothesis]]]:
        """For each job its place among `jobs` and its best hypotheses, the best first; in the order of finishing."""
        again: list[int] = []
        call = Call.first(search)
        for places, found in self._calls(batches(jobs, search.beam_size), jobs, call):
            for place, result in zip(places, found, strict=True):
                best = self._settled(self._hypotheses(result, search), jobs[place].limit, search)
                if best is None:
                    again.append(place)
                else:
                    yield place, self._rescored(jobs[place], best, search)
        for places, found in self._calls(by_limit(again, jobs, search.beam_size), jobs, call.patient()):
            for place, result in zip(places, found, strict=True):
                best = ranked(self._hypotheses(result, search))[: search.n_best]
                yield place, self._rescored(jobs[place], best, search)

    def _calls(
        self, lots: Iterable[list[int]], jobs: Sequence[Job], call: Call
    ) -> Iterator[tuple[list[int], list[Any]]]:
        """The results of each batch; some are asked for ahead, once it is seen how quick they are."""
        waiting: deque[tuple[list[int], list[Any]]] = deque()
        ahead, before = 0, time.monotonic()
        for places in lots:
            waiting.append((places, self._ask([jobs[place] for place in places], call)))
            while len(waiting) > ahead:
                done = given(*waiting.popleft())
                now = time.monotonic()
                ahead, before = AHEAD if now - before < SLOW else 0, now
                yield done
        while waiting:
            yield given(*waiting.popleft())

    def _ask(self, jobs: list[Job], call: Call) -> list[Any]:
        limit = max(job.limit for job in jobs)
        prefixes = [self._named(job.prefix, self._targets) for job in jobs]
        return self._translator.translate_batch(
            [self._named(job.source, self._sources) for job in jobs],
            prefixes if any(prefixes) else None,
            max_batch_size=0,
            asynchronous=True,
            beam_size=call.beam_size,
            patience=call.patience,
            num_hypotheses=call.hypotheses,
            length_penalty=call.length_penalty,
            no_repeat_ngram_size=call.no_repeat_ngram_size,
            max_input_length=0,
            max_decoding_length=limit,
            min_decoding_length=min(call.min_length, limit),
            return_scores=True,
            return_end_token=True,
        )

    def _named(self, ids: Sequence[int], names: list[str]) -> list[str]:
        return [names[i] for i in ids]

    def _hypotheses(self, result: Any, search: Search) -> list[Hypothesis]:
        """What CTranslate2 found, in ids, with our scores. Sums beyond all measure are of tokens never written."""
        found = []
        for tokens, theirs in zip(result.hypotheses, result.scores, strict=True):
            ids = [self._ids[token] for token in tokens]
            log_prob = theirs * len(ids) ** told_penalty(search)
            if log_prob > conversion.NEVER / 2:
                ended = bool(ids) and ids[-1] == self.config.end
                score = log_prob / search.penalty(len(ids))
                found.append(
                    Hypothesis(ids=tuple(ids[:-1] if ended else ids), log_prob=log_prob, score=score, ended=ended)
                )
        return found

    def _settled(self, found: list[Hypothesis], own: int, search: Search) -> list[Hypothesis] | None:
        """The best of a job whose own limit may be below that of its call; None: it must be searched for anew.

        The longest of `found` tells when the search stopped. Up to its own limit it went the same way; and if anything
        was cut there, all that had ended must have been shown, as it comes before, however low its score.
        """
        if max((len(one.ids) + one.ended for one in found), default=0) > own:
            return None
        shown = search.beam_size == 1 or not self._ends or all(one.ended for one in found[: search.n_best])
        return ranked(found)[: search.n_best] if shown else None

    def _rescored(self, job: Job, best: list[Hypothesis], search: Search) -> list[Hypothesis]:
        """With the model's own sums, where CTranslate2's are not."""
        if not (job.prefix or search.min_length or search.no_repeat_ngram_size):
            return best
        sources = [self._named(job.source, self._sources)] * len(best)
        targets = [self._named(one.ids, self._targets) for one in best]
        results = self._translator.score_batch(sources, targets, max_input_length=0)
        return [with_sum(one, result.log_probs, search) for one, result in zip(best, results, strict=True)]


# --- what is asked of CTranslate2 ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Call:
    """The options of one call, in its terms."""

    beam_size: int
    hypotheses: int
    length_penalty: float
    min_length: int
    no_repeat_ngram_size: int

    @classmethod
    def first(cls, search: Search) -> Call:
        """All that must have ended before it stops is asked for: the longest of them tells when that was."""
        return cls(
            beam_size=search.beam_size,
            hypotheses=1 if search.beam_size == 1 else round((search.patience or PATIENCE) * search.beam_size),
            length_penalty=told_penalty(search),
            min_length=search.min_length,
            no_repeat_ngram_size=search.no_repeat_ngram_size,
        )

    @property
    def patience(self) -> float:
        return self.hypotheses / self.beam_size

    def patient(self) -> Call:
        """For a search that met its limit: by then fewer than `hypotheses` had ended. Asked for so many more, it goes
        the same way, and shows everything that has ended or was cut."""
        more = 0 if self.beam_size == 1 else self.beam_size
        return Call(**{**vars(self), "hypotheses": self.hypotheses + more})


def told_penalty(search: Search) -> float:
    """The exponent. With a beam of one it changes nothing but the score, which is ours."""
    if search.beam_size == 1 or search.length_penalty_type != "avg":
        return NO_PENALTY
    return max(search.length_penalty, NO_PENALTY)


def refused_of_any(search: Search) -> str | None:
    if search.sampling is not None:
        return "draws by chance of its own, not by our seed"
    if search.no_loops:
        return NO_GUARD
    return None


def refused_of_beams(search: Search) -> str | None:
    """What a beam of one does the same, and a wider one does not."""
    if search.groups > 1:
        return "has no groups of beams"
    if search.cut_equals:
        return "ranks what was cut behind all that has ended"
    if search.length_penalty_type == "wu":
        return "has no length penalty of Wu et al."
    if search.min_length or search.no_repeat_ngram_size:
        return "shares the probability of what must not come next among the rest, and ranks beams by that"
    return None


def batches(jobs: Sequence[Job], beams: int) -> Iterator[list[int]]:
    """Jobs of like length together, the longest first."""
    return lots(sorted(range(len(jobs)), key=lambda i: (-len(jobs[i].source), -jobs[i].limit)), jobs, beams)


def by_limit(places: list[int], jobs: Sequence[Job], beams: int) -> Iterator[list[int]]:
    """Jobs of one limit together."""
    limits: dict[int, list[int]] = {}
    for place in places:
        limits.setdefault(jobs[place].limit, []).append(place)
    for alike in limits.values():
        yield from lots(alike, jobs, beams)


def lots(places: list[int], jobs: Sequence[Job], beams: int) -> Iterator[list[int]]:
    room = min(BATCH_TOKENS, BATCH_BEAM_TOKENS // beams)
    lot: list[int] = []
    longest = 0
    for place in places:
        longest = max(longest, len(jobs[place].source))
        if lot and (len(lot) + 1) * longest > room:
            yield lot
            lot, longest = [], len(jobs[place].source)
        lot.append(place)
    if lot:
        yield lot


def given(places: list[int], results: list[Any]) -> tuple[list[int], list[Any]]:
    while not results[-1].done():
        time.sleep(LOOK)
    return places, [result.result() for result in results]


# --- what it found -------------------------------------------------------------------------------------------------


def ranked(found: list[Hypothesis]) -> list[Hypothesis]:
    """The best first; one that was cut at its limit comes behind all with an end."""
    return sorted(found, key=lambda one: (not one.ended, -one.score))


def with_sum(one: Hypothesis, log_probs: list[float], search: Search) -> Hypothesis:
    """`log_probs` are those of its tokens and of the end, which it may not have."""
    log_prob = math.fsum(log_probs if one.ended else log_probs[:-1])
    score = log_prob / search.penalty(len(one.ids) + one.ended)
    return Hypothesis(ids=one.ids, log_prob=log_prob, score=score, ended=one.ended)


# --- the conversion ------------------------------------------------------------------------------------------------


def keep(
    folder: Path | None, model: Seq2Seq, tokenizer: Tokenizer | None, quantization: str, never: Sequence[int]
) -> Path:
    """Where the conversion of just this model stands, whole; made if need be. A stale or damaged one is replaced."""
    mark = conversion.fingerprint(model, tokenizer, quantization, never)
    beside = [] if folder is None else [folder / f"ctranslate2-{quantization}"]
    cached = cache_folder() / "ctranslate2" / f"{mark[:32]}-{quantization}"
    places = [*beside, cached]
    there = next((place for place in places if conversion.is_whole(place, mark)), None)
    if there is not None:
        return there
    for place in places:
        try:
            conversion.write(model, tokenizer, place, quantization=quantization, never=never)
            return place
        except FolderError as error:  # it cannot be written to: a model may be shared, or the disk be full
            if conversion.is_whole(place, mark):  # another process was quicker
                return place
            problem = error
    raise problem
