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

from attent.decode import flow
from attent.decode.control import Ruler
from attent.decode.engine import Stopped, TorchEngine
from attent.decode.flow import STRETCH, Desk, Finished, Flow, Manner, Memory, Plan, Prompt, Reason, Sheet, room
from attent.decode.force import evaluating
from attent.decode.options import Hypothesis, Job, Writing
from attent.decode.prompts import FIRST, Begun, Prompted
from attent.decode.spool import Spool, behind
from attent.decode.translator import DTYPES, best_device, tokenizer_of
from attent.interop import load_as
from attent.models import CausalLM
from attent.nn import RotaryConfig
from attent.text.tokenizer import Tokenizer

# Texts at once: on a CPU more are no faster; on an accelerator, if half of its free memory holds them.
CPU_ROWS, CPU_BYTES = 64, 2**30
MOST_ROWS, SHARE, UNKNOWN_BYTES = 1024, 0.5, 4 * 2**30


class GenerationError(ValueError):
    """What cannot be gone on with as it was asked for, in a sentence."""


class TooLong(GenerationError):
    """A prompt that leaves no room to write: the one at `place` among those given."""

    def __init__(self, place: int, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.place, self.problem = place, problem


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One text behind a prompt."""

    prompt: str
    text: str  # what was written behind the prompt, up to the end or the word that it stops at
    ids: tuple[int, ...]  # its tokens without the end; where it stops at a word, up to the one that completes the word
    log_prob: float  # the sum of the model's log-probabilities of these tokens and of the end, where it came
    reason: Reason  # end: the model ended it; stop: a word to stop at came; length: it was cut


class Generator:
    """A decoder-only model with its tokenizer, ready to write. Not for two threads at once."""

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        *,
        batch_rows: int | None = None,
        record: bool = True,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """
        batch_rows  texts written at once; None: what suits the device
        record      let an NVIDIA GPU repeat steps by itself, which is quicker; nothing else may use it meanwhile
        say         is told what a person may want to know, such as that less is written than was asked for
        """
        check_tokenizer(tokenizer, model.config.vocab)
        self.model, self.tokenizer, self.vocabulary = model, tokenizer, tokenizer.target
        self.batch_rows, self.record, self._say = batch_rows, record, say
        self._desk: tuple[tuple[int, int, Manner], Desk] | None = None
        self._told_strange = False

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        batch_rows: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> Generator:
        """The generator of a folder, ours or a Hugging Face GPT-2 or LLaMA one; `dtype` None: as it is stored."""
        if dtype is not None and dtype not in DTYPES:
            raise GenerationError(f"`dtype` must be one of {', '.join(DTYPES)}, but is {dtype!r}")
        path = Path(folder).expanduser()
        place, kind = best_device() if device is None else device, None if dtype is None else DTYPES[dtype]
        model = load_as(path, CausalLM, dtype=kind, device=place)
        return cls(model, tokenizer_of(path), batch_rows=batch_rows, say=say)

    # --- what people call ----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str],
        writing: Writing | None = None,
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
        first: int = 0,
        cancel: Callable[[], bool] | None = None,
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
            "stop": words_of(stop),
            "beam_size": beam_size,
            "length_penalty": length_penalty,
            "min_new_tokens": min_new_tokens,
            "no_repeat_ngram_size": no_repeat_ngram_size,
        }
        check_prompts(prompts)
        asked = changed(writing or Writing(), given)
        rows = [self.encoded(prompt) for prompt in prompts]
        limits = self._limits(rows, asked, first)
        with evaluating(self.model):
            if asked.beam_size > 1:
                return self._searched(prompts, rows, limits, asked, cancel)
            return self._flown(prompts, rows, limits, asked, first, cancel)

    def stream(
        self,
        prompt: str,
        writing: Writing | None = None,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] | None = None,
        first: int = 0,
    ) -> Iterator[str]:
        """The text behind a prompt piece by piece, as soon as it is certain; with beams, at last the whole."""
        given = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
            "stop": words_of(stop),
        }
        check_prompts([prompt])
        asked = replace(changed(writing or Writing(), given), n=1)
        if asked.beam_size > 1:
            yield self.generate([prompt], asked)[0][0].text
            return
        row = self.encoded(prompt)
        one = Prompt(ids=row, limit=self._limits([row], asked, first)[0], number=chance(asked.seed, first, 0))
        spool = Spool(self.vocabulary, row, asked.stop)
        with evaluating(self.model):
            work = self._flow([one], self._manner(asked))
            while work.live and not spool.stopped:
                work.run()
                for _, tokens in work.news():
                    yield from filter(None, (spool.add(token) for token in tokens if token not in work.ends))
                work.finished()
        if rest := spool.rest():
            yield rest

    # --- prompts -------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Ids that end a text, as the model says, or its tokenizer."""
        vocab = self.model.config.vocab
        return self.model.config.ends or tuple(end for end in (self.vocabulary.end,) if end < vocab)

    def encoded(self, prompt: str) -> list[int]:
        """As the model reads it; of nothing, what a text begins with."""
        ids = [*self.vocabulary.before, *self.vocabulary.encode([prompt])[0]]
        start = self.model.config.start
        return ids or [next(iter(self.ends), 0) if start is None else start]

    def _limits(self, rows: Sequence[Sequence[int]], asked: Writing, first: int) -> list[int]:
        """Tokens that may be written behind each prompt: those asked for, or as many as the model has places for. The
        last that is written is not read any more, and needs none."""
        most = self.model.decoder.positions.max_length
        if most is None:
            limits = [asked.max_new_tokens] * len(rows)
        else:
            limits = [min(asked.max_new_tokens, most + 1 - len(row)) for row in rows]
            self._check_room(rows, limits, asked, most, first)
        self._check_memory(rows, limits, asked)
        self._tell_strange(rows, limits)
        return limits

    def _check_room(
        self, rows: Sequence[Sequence[int]], limits: Sequence[int], asked: Writing, most: int, first: int
    ) -> None:
        for place, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            if limit < 1:
                raise TooLong(
                    place,
                    f"prompt {first + place + 1:,}",
                    f"must have at most {most:,} tokens, as many as the model reads, but has {len(row):,}; shorten it",
                )
        fewer = [limit for limit in limits if limit < asked.max_new_tokens]
        if fewer and self._say is not None:
            whom = "of the prompt" if len(rows) == 1 else f"of {len(fewer):,} of {len(rows):,} prompts"
            self._say(
                f"fewer than {asked.max_new_tokens:,} tokens are written ({min(fewer):,} at the least) behind the end "
                f"{whom}, since the model reads {most:,} in all, prompt and text"
            )

    def _check_memory(self, rows: Sequence[Sequence[int]], limits: Sequence[int], asked: Writing) -> None:
        """What can never fit is told before it is tried."""
        there = memory_of(self.device)
        columns = max((len(row) + limit for row, limit in zip(rows, limits, strict=True)), default=0)
        needed = self._bytes(columns) * asked.beam_size
        if there is not None and needed > there:
            raise GenerationError(
                f"`max_new_tokens` must be so few that one text fits into memory, {there / 2**30:,.1f} GiB, but is "
                f"{asked.max_new_tokens:,}, which take {needed / 2**30:,.1f} GiB; ask for fewer"
            )

    def _tell_strange(self, rows: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        """Rotary positions have no last one; but a model may have been trained on shorter texts alone."""
        positions = self.model.config.stack.positions
        length = positions.length if isinstance(positions, RotaryConfig) else None
        longest = max((len(row) + limit for row, limit in zip(rows, limits, strict=True)), default=0)
        if length is not None and longest > length and self._say is not None and not self._told_strange:
            self._told_strange = True
            self._say(
                f"prompt and text may have {longest:,} tokens, but the model was trained on at most {length:,}: behind "
                f"those it may write nonsense"
            )

    # --- one token after the other -------------------------------------------------------------------------------

    def _flown(
        self,
        prompts: Sequence[str],
        rows: Sequence[list[int]],
        limits: Sequence[int],
        asked: Writing,
        first: int,
        cancel: Callable[[], bool] | None,
    ) -> list[list[Generation]]:
        jobs = [
            Prompt(ids=row, limit=limit, number=chance(asked.seed, first + place, sample))
            for place, (row, limit) in enumerate(zip(rows, limits, strict=True))
            for sample in range(asked.n)
        ]
        texts = [prompts[place] for place in range(len(prompts)) for _ in range(asked.n)]
        found: dict[int, Generation] = {}
        for places in self._batches(jobs):
            some = [jobs[place] for place in places]
            for at, finished, spool in self._written(some, asked, cancel):
                found[places[at]] = self._generation(texts[places[at]], some[at], finished, spool)
        each = [found[place] for place in range(len(jobs))]
        return [each[at : at + asked.n] for at in range(0, len(each), asked.n)]

    def _written(
        self, prompts: Sequence[Prompt], asked: Writing, cancel: Callable[[], bool] | None
    ) -> Iterator[tuple[int, Finished, Spool | None]]:
        """One batch; texts are looked at on the way only where they are to stop at words."""
        work = self._flow(prompts, self._manner(asked))
        spools = [Spool(self.vocabulary, one.ids, asked.stop) for one in prompts] if asked.stop else []
        while work.live:
            if cancel is not None and cancel():
                raise Stopped
            work.run()
            if spools:
                listen(work, spools)
            for place, finished in work.finished():
                yield place, finished, spools[place] if spools else None

    def _generation(self, prompt: str, one: Prompt, finished: Finished, spool: Spool | None) -> Generation:
        ids, log_probs, reason = finished.ids, finished.log_probs, finished.reason
        if spool is None:
            text = behind(self.vocabulary, one.ids, ids)
        else:
            spool.rest()
            text = spool.text
            if spool.stopped:  # an accelerator may have written a little more
                ids, log_probs, reason = ids[: spool.count], log_probs[: spool.count], "stop"
        return Generation(prompt=prompt, text=text, ids=ids, log_prob=math.fsum(log_probs), reason=reason)

    def _manner(self, asked: Writing) -> Manner:
        return Manner(
            ends=self.ends,
            never=self._never,
            sampling=None if asked.sampling is None else replace(asked.sampling, seed=0),
            min_length=asked.min_new_tokens,
            no_repeat_ngram_size=asked.no_repeat_ngram_size,
        )

    @property
    def _never(self) -> tuple[int, ...]:
        """Ids that the tokenizer has no piece for: matrices are often wider than vocabularies. What ends a text needs
        none."""
        nameless = range(self.vocabulary.size, self.model.config.vocab)
        return tuple(token for token in nameless if token not in self.ends)

    def _flow(self, prompts: Sequence[Prompt], manner: Manner) -> Flow:
        return Flow(prompts, self._memory(prompts, manner), manner.ends)

    def _memory(self, prompts: Sequence[Prompt], manner: Manner) -> Memory:
        plan = Plan.of(manner, self.device)
        if not (self.record and manner.recordable and flow.can_record(self.device)):
            return Sheet(self.model, prompts, plan)
        desk = self._same_desk(len(prompts), room(prompts), plan)
        desk.begin(prompts)
        return desk

    def _same_desk(self, rows: int, needed: int, plan: Plan) -> Desk:
        """The desk of the last batch where it fits, with all its recordings; else another in its place."""
        most = self.model.decoder.positions.max_length or needed + STRETCH
        key = (rows, min(-(-needed // STRETCH) * STRETCH, most), plan.manner)
        if self._desk is None or self._desk[0] != key:
            self._desk = None  # its memory is free before more is taken
            self._desk = (key, Desk(self.model, rows, key[1], plan))
        return self._desk[1]

    # --- batches -------------------------------------------------------------------------------------------------

    def _batches(self, prompts: Sequence[Prompt]) -> Iterator[list[int]]:
        """Places of prompts of like length, the longest first: if memory is short, that is known at once."""
        order = sorted(range(len(prompts)), key=lambda place: (-len(prompts[place].ids), place))
        while order:
            size = self._rows(max(room([prompts[place]]) for place in order))
            yield order[:size]
            order = order[size:]

    def _rows(self, columns: int) -> int:
        """Texts that fit into memory: their logits, and what their layers keep."""
        if self.batch_rows is not None:
            return max(1, self.batch_rows)
        each = self._bytes(columns)
        if self.device.type == "cpu":
            return max(1, min(CPU_ROWS, CPU_BYTES // each))
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else UNKNOWN_BYTES
        return max(1, min(MOST_ROWS, int(SHARE * free / each)))

    def _bytes(self, columns: int) -> int:
        """Memory of one text: its logits, what its layers keep, its tokens."""
        config = self.model.config
        own = self.model.decoder.blocks[0].own
        width = own.kv_heads * own.head_width * config.stack.layers * next(self.model.parameters()).element_size()
        return 16 * config.vocab + (2 * width + 12) * columns

    # --- beams ---------------------------------------------------------------------------------------------------

    def _searched(
        self,
        prompts: Sequence[str],
        rows: Sequence[list[int]],
        limits: Sequence[int],
        asked: Writing,
        cancel: Callable[[], bool] | None,
    ) -> list[list[Generation]]:
        writer = Prompted(self.model, self.ends)
        engine = self._engine(writer, asked, cancel)
        found: list[list[Hypothesis]] = [[] for _ in rows]
        # A prompt behind which little fits would share its columns with others, for which there must be room.
        whole = [place for place, limit in enumerate(limits) if limit == asked.max_new_tokens]
        for places in ([whole] if whole else []) + [[p] for p in range(len(rows)) if p not in set(whole)]:
            jobs = [Job(source=rows[place], number=place, limit=limits[place]) for place in places]
            for at, some in engine.search(jobs, asked.search):
                found[places[at]] = some
        return [
            [self._found(prompt, row, one, asked) for one in some]
            for prompt, row, some in zip(prompts, rows, found, strict=True)
        ]

    def _engine(self, writer: Prompted, asked: Writing, cancel: Callable[[], bool] | None) -> TorchEngine[Begun]:
        ruler = Ruler(self.vocabulary, self.model.config.vocab, writer.end, self.device)
        return TorchEngine[Begun](
            model=writer,
            start=FIRST,
            end=writer.end,
            never=self._never,
            pad=0,
            device=self.device,
            batch_size=lambda source, target, beams: max(1, self._rows((source + target) * beams) // beams),
            make_rules=ruler.rules,
            stop=cancel,
        )

    def _found(self, prompt: str, row: Sequence[int], one: Hypothesis, asked: Writing) -> Generation:
        reason: Reason = "end" if one.ended else "length"
        spool = Spool(self.vocabulary, row, asked.stop)
        for token in one.ids:
            spool.add(token)
        spool.rest()
        ids, log_prob = one.ids, one.log_prob
        if spool.stopped:
            ids, reason = ids[: spool.count], "stop"
            log_prob = self._read_aloud(row, ids)
        return Generation(prompt=prompt, text=spool.text, ids=ids, log_prob=log_prob, reason=reason)

    @torch.no_grad()
    def _read_aloud(self, row: Sequence[int], ids: Sequence[int]) -> float:
        """The sum of the log-probabilities of ids behind a prompt."""
        read = torch.tensor([[*row, *ids[:-1]]], device=self.device)
        logits = self.model(read)[0, len(row) - 1 :].double()
        logits[:, list(self._never)] = float("-inf")
        chosen = torch.tensor(ids, device=self.device)[:, None]
        return float(logits.log_softmax(-1).gather(1, chosen).sum())


# --- small things --------------------------------------------------------------------------------------------------


def listen(work: Flow, spools: Sequence[Spool]) -> None:
    """What was written becomes text; a text that has come to a word to stop at is stopped."""
    for place, tokens in work.news():
        for token in tokens:
            if token not in work.ends:
                spools[place].add(token)
        if spools[place].stopped:
            work.stop(place)


def check_tokenizer(tokenizer: Tokenizer, vocab: int) -> None:
    """Pieces that the model does not have must be such as come in no text: some folders name one more, for padding."""
    words = tokenizer.target
    if any(words.decode([token]) for token in range(vocab, words.size)):
        raise GenerationError(
            f"the tokenizer must be the model's, of {vocab} pieces at most, but has {words.size}; load both from the "
            f"same folder"
        )


def memory_of(device: torch.device) -> int | None:
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


def words_of(stop: Sequence[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    return (stop,) if isinstance(stop, str) else tuple(stop)


def changed(writing: Writing, given: Mapping[str, object]) -> Writing:
    return replace(writing, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def chance(seed: int, place: int, sample: int) -> int:
    """A number of 64 bits that tells one text apart from all others, whatever else is asked for."""
    digest = hashlib.sha256(f"{seed}/{place}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
