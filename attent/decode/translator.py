"""Text in, text out: sentences to ids, ids through an engine, ids to text, in the order in which they came.

    translator = Translator.load("runs/en-de")
    translator.translate(["A man rides a bike."])[0].text

The search is `search`'s, batches are `engine`'s, what CTranslate2 does is `quick`'s. Here is what a text needs before
and after: long ones are cut into sentences and joined again, words that are demanded become tokens, nothing may run in
circles, and of many candidates the one is taken that the others agree with.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from attent import settings
from attent.data.scripts import UNSPACED, letters
from attent.decode import mbr
from attent.decode.align import Alignment, align_rows, choice_of, default_choice
from attent.decode.control import FREE, Control, Ruler
from attent.decode.engine import Session, Stopped, TorchEngine
from attent.decode.ensemble import Ensemble, check_tokenizers
from attent.decode.force import Row, Shared, evaluating
from attent.decode.glossary import Glossary
from attent.decode.lots import Found, Lot, No
from attent.decode.options import Engine, Hypothesis, Job, Search
from attent.decode.rules import looping
from attent.decode.search import NEVER, Plan, Writer, banned
from attent.decode.spelling import BYTE
from attent.interop import load_as
from attent.interop.ctranslate2 import never_written
from attent.models import Seq2Seq
from attent.models.folder import MANIFEST, read_files
from attent.text.sample import SPACE
from attent.text.split import Piece, joined, split, windows
from attent.text.tokenizer import Tokenizer, Vocabulary, framed

EngineName = Literal["torch", "ctranslate2"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPACES = "\t\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
HIDDEN = "\u00ad\u200b\u2060\ufeff"  # soft hyphen, zero-width space, word joiner, byte order mark
MOST_PARTS = 2**20  # of a text
LONG = 200  # tokens of a text beyond which it is cut into sentences: hardly any model has seen longer ones
USUAL = 256  # of the longest text to train on, where nobody said another number; a model with more was meant for it
# Beams searched for at once: on a CPU more are no faster; on an accelerator, if half of its free memory holds them.
CPU_ROWS, CPU_BYTES = 128, 2**30
MOST_ROWS, SHARE, UNKNOWN_BYTES = 4_096, 0.5, 4 * 2**30


class TranslationError(ValueError):
    """What cannot be translated as it was asked for, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A text that a search has found."""

    text: str
    score: float  # with the length penalty: `Search.formula`
    log_prob: float  # the sum of the model's log-probabilities, that of the end included
    tokens: tuple[str, ...]
    ended: bool  # False: cut at the length limit


@dataclass(frozen=True, kw_only=True)
class Translation(Candidate):
    """The best candidate of a source, and what else was found."""

    source: str
    n_best: tuple[Candidate, ...]  # all that were asked for, the best first
    alignment: Alignment | None = None
    parts: int = 1  # that a long text was cut into


@dataclass(frozen=True)
class Unit:
    """A text or a part of one, as it is searched for."""

    text: str
    control: Control
    number: int = field(default=0, compare=False)  # what chance depends on: its place among all


class Threads:
    """What threads that share a translator hold."""

    def __init__(self, translator: Translator) -> None:
        self.turn = threading.RLock()  # to have the device: others get ready meanwhile, or read and write texts
        self.once = threading.Lock()  # to open an engine
        self.saying = threading.Lock()
        self.evaluating = Shared(lambda: evaluating(translator.model))


class Translator:
    """A model, or several that write together, with their tokenizer, ready to translate."""

    def __init__(
        self,
        model: Seq2Seq | Ensemble,
        tokenizer: Tokenizer,
        *,
        folder: Path | None = None,
        engine: EngineName | None = "torch",
        threads: int | None = None,
        batch_tokens: int | None = None,
        record: bool = True,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """
        folder        where the model comes from: what was made of it is kept there
        engine        None: CTranslate2 on a CPU, where it is installed and can do what is asked; else our own
        batch_tokens  source tokens, filled up and times the beams, searched for at once; None: what suits the device
        record        let an NVIDIA GPU repeat steps by itself, which is many times as quick; it then keeps some of its
                      memory for the next call
        say           is told what a person may want to know, such as that another engine had to be taken
        """
        check_tokenizer(model, tokenizer)
        if batch_tokens is not None and batch_tokens < 1:
            raise TranslationError(f"`batch_tokens` must be 1 or more, but is {batch_tokens}")
        self.model, self.tokenizer, self.folder = model, tokenizer, folder
        self.writer: Writer[Any] = model
        self.engine, self.threads, self.batch_tokens = engine, threads, batch_tokens
        self.record = record
        self.said: set[str] = set()
        self._say = say
        self._threads = Threads(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_threads"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _threads=Threads(self))

    @classmethod
    def load(
        cls,
        *folders: str | Path,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        engine: EngineName | None = None,
        threads: int | None = None,
        batch_tokens: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> Translator:
        """The translator of a folder, ours or a Hugging Face Marian or T5 one; of several folders, an ensemble.

        `dtype` None: bfloat16 for our own engine on an NVIDIA GPU that computes in it, else float32.
        """
        if not folders:
            raise TranslationError("there must be a model to translate with, but none is named; give its folder")
        if engine not in (None, *get_args(EngineName)):
            raise TranslationError(f"`engine` must be one of {', '.join(get_args(EngineName))}, but is {engine!r}")
        paths = [Path(folder).expanduser() for folder in folders]
        models = [load_as(path, Seq2Seq) for path in paths]
        tokenizers = [tokenizer_of(path) for path in paths]
        check_tokenizers(tokenizers, [str(path) for path in paths])
        where = best_device() if device is None else torch.device(device)
        if dtype is None:  # CTranslate2 has formats of its own, and is made from the weights as they are
            dtype = "float32" if engine == "ctranslate2" else usual_dtype(where)
        if dtype not in DTYPES:
            raise TranslationError(f"`dtype` must be one of {', '.join(DTYPES)}, but is {dtype!r}")
        model = models[0] if len(models) == 1 else Ensemble(models)
        model = model.to(device=where, dtype=DTYPES[dtype]).eval()
        home = paths[0] if len(paths) == 1 else None
        return cls(
            model, tokenizers[0], folder=home, engine=engine, threads=threads, batch_tokens=batch_tokens, say=say
        )

    # --- what people call ----------------------------------------------------------------------------------------

    def translate(
        self,
        texts: Sequence[str],
        search: Search | None = None,
        *,
        beam_size: int | None = None,
        n_best: int | None = None,
        to: str | None = None,
        control: Control | Sequence[Control] = FREE,
        glossary: Glossary | Mapping[str, str] | None = None,
        alignment: bool = False,
        risk: int = 0,
        sentences: bool = False,
        language: str | None = None,
        guard: bool = True,
        first: int = 0,
        stop: Callable[[], bool] | None = None,
    ) -> list[Translation]:
        """The best translation of each text; of a text that is nothing but space, nothing.

        search     how to look for it; `beam_size` and `n_best` alone can be given as they are
        to         the language to translate into, for a model that was trained with tags
        control    what must and must not come, for all texts or for each
        glossary   terms whose translation must come wherever they do
        alignment  tell which word comes from which
        risk       of so many candidates (the n best, or samples) take the one most like the others: minimum Bayes risk
        sentences  cut every text into sentences, not only those that are very long; `language` is that of the source
        guard      let no translation run in circles, unless its source does
        first      the place of the first text among all that there are, where they come in parts: chance depends on it
        stop       asked again and again; if it answers True, `Stopped` is raised
        """
        check_texts(texts)
        search = with_changes(search or Search(), beam_size, n_best)
        controls = one_for_each(control, len(texts))
        pieces, read = self._pieces(texts, controls, to, sentences, language)
        units = units_of(pieces, controls, Glossary.of(glossary) if isinstance(glossary, Mapping) else glossary, first)
        for wishes in {id(unit.control): unit.control for unit in units}.values():
            check_control(wishes, search)
        rows = self._read([unit.text for unit in units], to, read)
        with self._threads.evaluating:
            found = iter(self._found(units, rows, search, risk, guard, stop, frame(to)))
            groups = [[next(found) for _ in some] for some in pieces]
            links = self._links(units, rows, groups) if alignment else [None] * len(texts)
        written = self._written(groups)
        return [
            self._joined(text, some, group, search, link)
            for text, some, group, link in zip(texts, pieces, written, links, strict=True)
        ]

    def stream(
        self, text: str, search: Search | None = None, *, to: str | None = None, control: Control = FREE
    ) -> Iterator[str]:
        """The translation piece by piece, as soon as it is certain: what all beams agree on."""
        search = search or Search()
        check_control(control, search)
        (pieces,), _ = self._pieces([text], [control], to, False, None)
        for piece in pieces:
            yield from self._streamed(Unit(piece.text, control), search, to)
            if piece.gap:
                yield piece.gap

    def _streamed(self, unit: Unit, search: Search, to: str | None) -> Iterator[str]:
        job = self._job(unit, self.tokenizer.encode_source([unit.text], to)[0], search, frame(to))
        given = certain = ""
        with evaluating(self.model):
            for ids in self._certain(unit, job, search):
                certain = self.tokenizer.target.decode(ids)
                # What is half a character now may be a whole one soon.
                if len(certain) > len(given) and certain.startswith(given) and not certain.endswith("\ufffd"):
                    yield certain[len(given) :]
                    given = certain
        if len(certain) > len(given):
            yield certain[len(given) :]

    def alternatives(
        self, text: str, prefix: str | Control, count: int = 5, search: Search | None = None, *, to: str | None = None
    ) -> list[Translation]:
        """How else it could go on behind a beginning: the likeliest next tokens, each with the best end."""
        search = replace(search or Search(), n_best=1)
        row = self.tokenizer.encode_source([text.strip()], to)[0]
        control = Control(prefix=prefix) if isinstance(prefix, str) else prefix
        check_control(control, search)
        job = self._job(Unit(text.strip(), control), row, search, frame(to))
        with evaluating(self.model):
            tokens = self._next_tokens(job, count)
            jobs = [replace(job, prefix=(*job.prefix, token), whole_words=False) for token in tokens]
            found = dict(self.torch_engine(None).search(jobs, search))
        made = [made_of(some, text, 1) for (some,) in self._written([[some[:1]] for some in found.values() if some])]
        kept = [one for one in made if not any(has_word(one.text, word) for word in control.forbidden)]
        return sorted(kept, key=lambda one: -one.score)

    # --- before the search ---------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def end(self) -> int:
        return self.model.config.end

    @cached_property
    def _limits(self) -> tuple[int | None, int | None]:
        """Tokens that the model has positions for, on each side; None: any number."""
        if isinstance(self.model, Ensemble):
            return self.model.source_limit, self.model.target_limit
        return self.model.encoder.positions.max_length, self.model.decoder.positions.max_length

    @property
    def _long(self) -> int:
        """Tokens of a text that is read whole: a summary, for one, is of all of a text."""
        return max(LONG, self._trained_on)

    @cached_property
    def _trained_on(self) -> int:
        """`data.longest` of the run that made this model, if it was raised; else 0."""
        path = None if self.folder is None else self.folder / "run.toml"
        with suppress(settings.SettingsError, OSError, KeyError, AttributeError):  # a folder made otherwise
            longest = 0 if path is None or not path.is_file() else settings.read_tables(path)["data"].get("longest", 0)
            return longest if isinstance(longest, int) and longest > USUAL else 0
        return 0

    def _pieces(
        self, texts: Sequence[str], controls: Sequence[Control], to: str | None, sentences: bool, language: str | None
    ) -> tuple[list[list[Piece]], dict[str, list[int]]]:
        """The texts as they are translated: whole, or cut into sentences; space around them is not kept. And the ids of
        those that had to be encoded to know."""
        limit = min(self._long, self._limits[0] or self._long) - frame(to)
        clean = [self.cleaned(text) for text in texts]
        counted = [] if sentences else [text for text in clean if most_tokens(text) > limit]
        read = dict(zip(counted, self.tokenizer.source.encode(counted), strict=True))
        whole = [not sentences and len(read.get(text, ())) <= limit for text in clean]
        pieces = [
            ([Piece(text)] if text else []) if one else self._cut(text, control, limit, language)
            for text, control, one in zip(clean, controls, whole, strict=True)
        ]
        return pieces, read

    def _cut(self, text: str, control: Control, limit: int, language: str | None) -> list[Piece]:
        if not text:
            return []
        pieces = windows(split(text, language), self._count, limit)
        if len(pieces) > 1 and (control.prefix or control.demanded):
            raise TranslationError(
                f"a text with a prefix or with words that must come must be one sentence of at most {limit} tokens, "
                f"but this one has {len(pieces)} sentences or parts: {text[:60]!r}; give them one by one"
            )
        return pieces

    def cleaned(self, text: str) -> str:
        """As the model reads it."""
        found, plain = self._strange
        return (text.translate(plain) if found.search(text) else text).strip()

    @cached_property
    def _strange(self) -> tuple[re.Pattern[str], dict[int, str | None]]:
        """Spaces that the model has never met become plain ones, and signs that nobody sees go; what it has a piece for
        it knows. A pattern that finds them is many times as quick as what replaces them."""
        source = self.tokenizer.source
        odd = [*SPACES, *HIDDEN]
        rows = source.encode([f"a{one}a" for one in odd])
        plain = source.encode(["aa"])[0]
        strange = [one for one, row in zip(odd, rows, strict=True) if spelled_out(source, row) or row == plain]
        return re.compile(f"[{''.join(strange)}]" if strange else "(?!)"), {
            ord(one): " " if one in SPACES else None for one in strange
        }

    def _count(self, texts: Sequence[str]) -> list[int]:
        return [len(row) for row in self.tokenizer.source.encode(texts)]

    def _read(self, texts: Sequence[str], to: str | None, read: dict[str, list[int]]) -> list[list[int]]:
        """As `encode_source` has it, without encoding again what was."""
        new = [text for text in texts if text not in read]
        read.update(zip(new, self.tokenizer.source.encode(new), strict=True))
        return framed([[*read[text]] for text in texts], self.tokenizer.source, to)

    def _job(self, unit: Unit, row: Sequence[int], search: Search, framing: int, guard: bool = False) -> Job:
        """`guard`: it may not go in circles, unless its source does; a text with wishes may have to."""
        limit = search.limit(len(row) - framing)
        limit = min(limit, self._limits[1] or limit)
        if unit.control is FREE:
            return Job(source=row, number=unit.number, limit=limit, no_loops=guard and not looping(row))
        wanted = [unit.control.prefix.strip(), *unit.control.demanded]
        prefix, *demanded = self.tokenizer.target.encode(wanted) if any(wanted) else ([], *([] for _ in wanted[1:]))
        return Job(
            source=row,
            prefix=tuple(prefix),
            demanded=tuple(tuple(self._inside(ids)) for ids in demanded),
            forbidden=unit.control.forbidden,
            whole_words=unit.control.ends_word,
            number=unit.number,
            limit=limit,
        )

    def _inside(self, ids: list[int]) -> list[int]:
        """A word as it stands inside a text. Where words have no spaces between them, the one before it is left out; as
        it is before a sign, such as that of a placeholder, which need not stand alone."""
        target = self.tokenizer.target
        if len(ids) < 2 or target.pieces(ids[:1]) != [SPACE]:
            return ids
        first = target.decode(ids).strip()[:1]
        return ids if first.isalnum() and not letters(UNSPACED).match(first) else ids[1:]

    # --- the search ----------------------------------------------------------------------------------------------

    def _found(
        self,
        units: Sequence[Unit],
        rows: Sequence[Sequence[int]],
        search: Search,
        risk: int,
        guard: bool,
        stop: Callable[[], bool] | None,
        framing: int,
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each unit, each different unit searched for once; by chance, each by itself."""
        asked = with_risk(search, risk)
        alike = all(unit.control is units[0].control for unit in units)
        same: list[object] = [unit.text for unit in units] if alike else list(units)
        keys = list(range(len(units))) if search.sampling else same
        places = {key: place for place, key in reversed(list(enumerate(keys)))}
        at_once = guard and not asked.no_loops and asked.sampling is None and self.guards_at_once
        jobs = {key: self._job(units[place], rows[place], asked, framing, at_once) for key, place in places.items()}
        found = dict(zip(jobs, self._searched(list(jobs.values()), asked, stop), strict=True))
        for key, some in found.items():
            check_found(some, units[places[key]], jobs[key])
        if guard and not asked.no_loops:
            loose = [(key, some[0]) for key, some in found.items() if not jobs[key].no_loops]
            circling = [key for key, best in loose if looping(best.ids) and not looping(jobs[key].source)]
            again = self.torch_engine(stop).search([jobs[key] for key in circling], replace(asked, no_loops=True))
            found.update((circling[place], some) for place, some in again if some)  # what must come may go in circles
        if risk:
            found = {key: self._least_risk(some, search) for key, some in found.items()}
        return [found[key] for key in keys]

    @property
    def guards_at_once(self) -> bool:
        """Are loops forbidden from the start? In the lane of a GPU that costs nothing, and to look again much."""
        return self.device.type != "cpu" and self.engine != "ctranslate2" and isinstance(self.model, Seq2Seq)

    def search(
        self, jobs: Sequence[Job], search: Search, stop: Callable[[], bool] | None = None
    ) -> list[list[Hypothesis]]:
        """For whoever has text and ids elsewhere."""
        with self._threads.evaluating:
            return self._searched(jobs, search, stop)

    def search_lot(self, lot: Lot, search: Search, stop: Callable[[], bool] | None = None) -> Found | No:
        """The same for a lot of jobs without wishes, where our own engine has a fast lane."""
        with self._threads.evaluating:
            return self.torch_engine(stop).search_lot(lot, search)

    def _searched(self, jobs: Sequence[Job], search: Search, stop: Callable[[], bool] | None) -> list[list[Hypothesis]]:
        results: list[list[Hypothesis]] = [[] for _ in jobs]
        for engine, places in self._shared(jobs, search, stop):
            with nullcontext() if isinstance(engine, TorchEngine) else self._threads.turn:  # ours takes it by itself
                for place, found in engine.search([jobs[place] for place in places], search):
                    results[places[place]] = found
                    if stop is not None and stop():
                        raise Stopped
        return results

    def _shared(
        self, jobs: Sequence[Job], search: Search, stop: Callable[[], bool] | None
    ) -> Iterator[tuple[Engine, list[int]]]:
        """Which engine takes which jobs: the quick one all that it can do."""
        with self._threads.once:
            quick = self._quick
        left = list(range(len(jobs)))
        if quick is not None and jobs:
            reasons = {place: quick.refuses(search, [jobs[place]]) for place in left}
            able = [place for place, reason in reasons.items() if reason is None]
            left = [place for place, reason in reasons.items() if reason is not None]
            if able:
                yield quick, able
            for reason in dict.fromkeys(reasons[place] for place in left):
                self.say(f"CTranslate2 {reason}: this is left to the torch engine, which is slower")
        demanding = [place for place in left if jobs[place].demanded]
        for places in (demanding, [place for place in left if not jobs[place].demanded]):
            if places:
                yield self.torch_engine(stop), places

    def torch_engine(self, stop: Callable[[], bool] | None = None) -> TorchEngine[Any]:
        """Our own engine with this model."""
        config = self.model.config
        return TorchEngine[Any](
            model=self.writer,
            start=config.start,
            end=config.end,
            never=tuple(never_written(config, self.tokenizer)),
            pad=self.tokenizer.source.pad,
            device=self.device,
            batch_size=self._batch_size,
            make_rules=self._ruler.rules,
            stop=stop,
            record=self.record,
            say=self.say,
            turn=self._threads.turn,
        )

    @cached_property
    def _ruler(self) -> Ruler:
        return Ruler(self.tokenizer.target, self.model.config.targets, self.end, self.device)

    @cached_property
    def _quick(self) -> Engine | None:
        """CTranslate2, where it is to be taken; it is an error only for who has asked for it by name."""
        if self.engine == "torch" or (self.engine is None and self.device.type != "cpu"):
            return None
        from attent.decode.quick import QuickEngine

        try:
            if isinstance(self.model, Ensemble):
                raise TranslationError("CTranslate2 has no ensembles of models")
            return QuickEngine.open(self.folder, self.model, self.tokenizer, threads=self.threads)
        except (ValueError, ImportError) as error:
            if self.engine is not None:
                raise
            self.say(f"{error}; the torch engine is taken, which is slower")
            return None

    def _batch_size(self, source: int, target: int, beams: int) -> int:
        if self.batch_tokens is not None:
            return max(1, self.batch_tokens // (source * beams))
        return max(1, self._rows(source, target) // beams)

    def _rows(self, source: int, target: int) -> int:
        """Beams that fit into memory: their logits, and what their layers keep."""
        config = self.model.config
        members = len(self.model.members) if isinstance(self.model, Ensemble) else 1
        width = config.decoder.width * config.decoder.layers * members * next(self.model.parameters()).element_size()
        each = 16 * config.targets + 4 * width * (source + target)
        if self.device.type == "cpu":
            return min(CPU_ROWS, CPU_BYTES // each)
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else UNKNOWN_BYTES
        return min(MOST_ROWS, int(SHARE * free / each))

    def say(self, sentence: str) -> None:
        """Once each."""
        with self._threads.saying:
            if self._say is not None and sentence not in self.said:
                self._say(sentence)
            self.said.add(sentence)

    # --- after the search ----------------------------------------------------------------------------------------

    def _least_risk(self, found: list[Hypothesis], search: Search) -> list[Hypothesis]:
        texts = [self.tokenizer.target.decode(one.ids) for one in found]
        shares = None if search.sampling else mbr.probabilities([one.log_prob for one in found])
        worth = mbr.expected(texts, shares)
        order = sorted(range(len(found)), key=lambda place: -float(worth[place]))
        return [found[place] for place in order[: search.n_best]]

    def _joined(
        self,
        text: str,
        pieces: Sequence[Piece],
        groups: Sequence[list[Candidate]],
        search: Search,
        alignment: Alignment | None,
    ) -> Translation:
        """The translation of a text from those of its parts."""
        if len(groups) == 1:
            return made_of(groups[0], text, 1, alignment)
        best = [group[0] for group in groups]
        log_prob = sum(one.log_prob for one in best)
        length = sum(len(one.tokens) + one.ended for one in best)
        whole = Candidate(
            text=joined([Piece(one.text, piece.gap) for one, piece in zip(best, pieces, strict=True)]).strip(),
            score=log_prob / search.penalty(length),
            log_prob=log_prob,
            tokens=tuple(token for one in best for token in one.tokens),
            ended=all(one.ended for one in best),
        )
        return made_of([whole], text, len(groups), alignment)

    def _written(self, groups: Sequence[Sequence[Sequence[Hypothesis]]]) -> list[list[list[Candidate]]]:
        """The hypotheses of each part of each text, as text."""
        target = self.tokenizer.target
        texts = iter(target.decode_all([one.ids for parts in groups for some in parts for one in some]))

        def candidate(found: Hypothesis) -> Candidate:
            return Candidate(
                text=next(texts).strip(),
                score=found.score,
                log_prob=found.log_prob,
                tokens=tuple(target.pieces(found.ids)),
                ended=found.ended,
            )

        return [[[candidate(one) for one in some] for some in parts] for parts in groups]

    def _links(
        self,
        units: Sequence[Unit],
        rows: Sequence[Sequence[int]],
        groups: Sequence[Sequence[list[Hypothesis]]],
    ) -> list[Alignment]:
        """Which word comes from which: the cross-attention, when the model reads its own translation."""
        model = self.model.members[0] if isinstance(self.model, Ensemble) else self.model
        choice = default_choice(model) if self.folder is None else choice_of(self.folder, model)
        best = [group[0] for some in groups for group in some]
        pairs = [
            Row(source=list(row), target=[*one.ids, self.end], cut=False) for row, one in zip(rows, best, strict=True)
        ]
        targets = [self.tokenizer.target.decode(one.ids) for one in best]
        sources = [unit.text for unit in units]
        with self._threads.turn:
            found = iter(align_rows(model, self.tokenizer, sources, targets, pairs, choice))
        words = iter(len(source.split()) for source in sources)
        return [in_a_row([(next(found), next(words)) for _ in some]) for some in groups]

    # --- step by step --------------------------------------------------------------------------------------------

    def _certain(self, unit: Unit, job: Job, search: Search) -> Iterator[list[int]]:
        """The beginning of the target that no beam will change any more, again and again; at last, the whole."""
        session = Session(self.torch_engine(None), [job], [0], self._plan(job, search))
        while session.rows:
            session.step()
            found = list(session.finished())
            if found:
                check_found(found[0][1], unit, job)
                yield list(found[0][1][0].ids)
                return
            yield agreed(session.candidates())

    def _plan(self, job: Job, search: Search) -> Plan:
        engine = self.torch_engine(None)
        rules, demands = engine.make_rules(search, [job])
        never = banned(engine.start, engine.end, engine.never, self.device)
        return Plan(search=search, start=engine.start, end=engine.end, never=never, rules=rules, demands=demands)

    def _next_tokens(self, job: Job, count: int) -> list[int]:
        """The likeliest tokens behind a prefix, other than the end."""
        engine = self.torch_engine(None)
        source, lengths = engine.sources([job])
        state = self.writer.begin(source, lengths, capacity=len(job.prefix) + 1)
        read = torch.tensor([[engine.start, *job.prefix]], device=self.device)
        logits = self.writer.step(read, state)[0, -1].float()
        logits[banned(engine.start, engine.end, engine.never, self.device)] = NEVER
        logits[self.end] = NEVER
        if job.whole_words:
            logits = logits.masked_fill(self._ruler.continues, NEVER)
        likely = logits.topk(min(count, len(logits)))
        there = zip(likely.values.tolist(), likely.indices.tolist(), strict=True)
        return [token for value, token in there if value > NEVER]


# --- small things --------------------------------------------------------------------------------------------------


def check_texts(texts: Sequence[str]) -> None:
    if isinstance(texts, str):
        raise TranslationError(f"`texts` must be a list of texts, but is one: {texts[:60]!r}; put it in [ ]")
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise TranslationError(f"`texts` must be texts, but one is a {type(wrong[0]).__name__}; leave it out")


def one_for_each(control: Control | Sequence[Control], count: int) -> list[Control]:
    controls = [control] * count if isinstance(control, Control) else list(control)
    if len(controls) != count:
        raise TranslationError(f"there must be a control for each text, but there are {len(controls)}")
    return controls


def units_of(
    pieces: Sequence[Sequence[Piece]], controls: Sequence[Control], glossary: Glossary | None, first: int
) -> list[Unit]:
    """The pieces of all texts in a row, each with what it must have."""
    return [
        Unit(piece.text, with_terms(control, piece.text, glossary), place * MOST_PARTS + part)
        for place, (some, control) in enumerate(zip(pieces, controls, strict=True), first)
        for part, piece in enumerate(some)
    ]


def with_changes(search: Search, beam_size: int | None, n_best: int | None) -> Search:
    n_best = search.n_best if n_best is None else n_best
    return replace(search, n_best=n_best, beam_size=search.beam_size if beam_size is None else beam_size)


def with_terms(control: Control, text: str, glossary: Glossary | None) -> Control:
    terms = () if glossary is None else glossary.matching(text)
    return replace(control, demanded=(*control.demanded, *terms)) if terms else control


def most_tokens(text: str) -> int:
    """A character has at most four bytes, and a token at least one; ASCII stays what it is, behind a space."""
    return len(text) + 1 if text.isascii() else 4 * len(text)


def spelled_out(vocabulary: Vocabulary, row: Sequence[int]) -> bool:
    """Is there a character in it that has no piece of its own?"""
    return vocabulary.unknown in row or any(BYTE.fullmatch(piece) for piece in vocabulary.pieces(row))


def check_found(found: Sequence[Hypothesis], unit: Unit, job: Job) -> None:
    if not found:
        raise TranslationError(
            f"no translation of {unit.text[:60]!r} can have all that must come and nothing that must not within "
            f"{job.limit} tokens; ask for less, or allow a greater `max_length`"
        )


def has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def check_control(control: Control, search: Search) -> None:
    """What must come must not be what must not, and must be looked for."""
    if control.demanded and (search.sampling is not None or search.groups > 1):
        raise TranslationError(
            "words that must come, and terms of a glossary, are looked for by plain beam search only: leave out "
            "sampling and groups of beams"
        )
    for word in control.demanded:
        if not word.strip():
            raise TranslationError("what must come must be a word, but is empty; leave it out")
        for other in control.forbidden:
            if has_word(word, other):
                raise TranslationError(f"`{word}` must come, but must not, since `{other}` is forbidden; leave one out")


def with_risk(search: Search, risk: int) -> Search:
    """As many candidates as the choice is made among."""
    if not risk:
        return search
    if risk < search.n_best:
        raise TranslationError(f"`risk` must be at least `n_best`={search.n_best} candidates, but is {risk}")
    return replace(search, n_best=risk, beam_size=search.beam_size if search.sampling else max(search.beam_size, risk))


def frame(to: str | None) -> int:
    """Tokens of a source that are no text: the end and, where there is one, the tag of the language."""
    return 1 if to is None else 2


def made_of(
    candidates: Sequence[Candidate], source: str, parts: int, alignment: Alignment | None = None
) -> Translation:
    best = candidates[0] if candidates else NOTHING
    return Translation(
        source=source,
        text=best.text,
        score=best.score,
        log_prob=best.log_prob,
        tokens=best.tokens,
        ended=best.ended,
        n_best=tuple(candidates),
        alignment=alignment,
        parts=parts,
    )


NOTHING = Candidate(text="", score=0.0, log_prob=0.0, tokens=(), ended=True)


def in_a_row(parts: Sequence[tuple[Alignment, int]]) -> Alignment:
    """One alignment from those of sentences that follow one another, each with the number of its source words."""
    links: list[tuple[int, int]] = []
    weights: list[tuple[float, ...]] = []
    before, behind = 0, sum(words for _, words in parts)
    for part, words in parts:
        behind -= words
        links += [(source + before, target + len(weights)) for source, target in part.links]
        weights += [(*[0.0] * before, *row, *[0.0] * behind) for row in part.weights]
        before += words
    return Alignment(links=tuple(links), weights=tuple(weights))


def agreed(rows: Sequence[Sequence[int]]) -> list[int]:
    """What all begin with."""
    same: list[int] = []
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        same.append(column[0])
    return same


def check_tokenizer(model: Seq2Seq | Ensemble, tokenizer: Tokenizer) -> None:
    for side, size, vocab in (
        ("source", tokenizer.source.size, model.config.vocab),
        ("target", tokenizer.target.size, model.config.targets),
    ):
        if size > vocab:
            raise ValueError(
                f"the tokenizer must be the model's, of {vocab} pieces at most on the {side} side, but has {size}; "
                f"load both from the same folder"
            )


def tokenizer_of(folder: Path) -> Tokenizer:
    """Of the same save as the weights, where the folder can tell."""
    files = read_files(folder) if (folder / MANIFEST).exists() else {}
    return Tokenizer.from_files(files, f"{folder}/") if files else Tokenizer.load(folder)


def best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def usual_dtype(device: torch.device) -> str:
    """Half of the bytes and many times the speed, where there are units for it; the numbers then have three digits."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return "bfloat16" if nvidia and torch.cuda.get_device_capability(device) >= (8, 0) else "float32"
