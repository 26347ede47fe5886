"""What `attent score` does: read the test set and what is given besides, translate it or ask the model, gather figures.

What was asked for is `score`'s, how it is shown `score_page`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cyclopts import CycloptsError

from attent import settings
from attent.cli.score import Flags
from attent.cli.searching import TranslateError, asked_language, dtype_of, in_flags, search_of, translator_of
from attent.data.corpus import Corpus, corpora
from attent.data.pairs import CorpusError, Languages, Pair
from attent.decode.align import Measured, agreed, remember
from attent.decode.force import Forced, forced
from attent.decode.options import MORE, Sampling, Search
from attent.decode.translator import Translator
from attent.models import Seq2Seq
from attent.models.folder import explained
from attent.score.alignment import AlignmentReport, Gold, GoldError, measure, read_gold
from attent.score.evaluate import Evaluation, evaluate
from attent.score.metrics import Paired, ScoreError, paired
from attent.text.tokenizer import Tokenizer

AUTO = "auto"  # --alignment without alignments by hand

CPU_TOKENS, GPU_TOKENS = 4_096, 65_536  # of either side that are read at once


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A test set."""

    name: str
    sources: list[str]
    references: list[str]
    languages: list[str | None]  # of each reference
    no_pairs: int  # lines that are none, and left out

    @property
    def language(self) -> str | None:
        """Of all references, if they have one."""
        found = set(self.languages)
        return found.pop() if len(found) == 1 else None


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was asked for; what was not is None."""

    data: str
    pairs: int
    no_pairs: int  # lines that are none
    model: str | None = None
    hypotheses: str | None = None
    search: dict[str, Any] | None = None
    searched: str | None = None  # the same for a person to read
    evaluation: Evaluation | None = None
    against: str | None = None
    paired: tuple[Paired, ...] = ()
    forced: tuple[Forced, ...] | None = None
    alignment: AlignmentReport | Measured | None = None


def scored(model: Path | None, data: Sequence[str], flags: Flags) -> Results:
    """All that was asked for; what is given is read first: a wrong name is told before a large model is read."""
    search = asked_search(flags)
    texts = read_texts(data, Languages(flags.src, flags.tgt))
    given = read_lines(flags.hypotheses, texts) if flags.hypotheses else None
    other = read_lines(flags.against, texts) if flags.against and not flags.against.expanduser().is_dir() else None
    gold = read_gold(flags.alignment.expanduser()) if flags.alignment and str(flags.alignment) != AUTO else None
    asked = Asked(texts=texts, flags=flags, search=search, given=given, other=other, gold=gold)
    return asked.measured(model) if flags.force or flags.alignment else asked.evaluated(model)


# ---- what is given ---------------------------------------------------------------------------------------------------


def read_texts(names: Sequence[str], languages: Languages) -> Texts:
    """Every pair in its order, also one with an empty side: translations in a file have a line for it."""
    parts = [part_to_score(corpus) for corpus in corpora(names, languages)]
    entries = [(entry, corpus.languages.target) for corpus in parts for entry in corpus]
    pairs = [(entry, language) for entry, language in entries if isinstance(entry, Pair)]
    if not pairs:
        raise CorpusError(
            f"{', '.join(names)}: there is not one pair in it; a line needs a source and a target; attent data "
            "shows more"
        )
    return Texts(
        name=", ".join(dict.fromkeys(file for corpus in parts for file in corpus.files)),
        sources=[pair.source.strip() for pair, _ in pairs],
        references=[pair.target.strip() for pair, _ in pairs],
        languages=[language for _, language in pairs],
        no_pairs=len(entries) - len(pairs),
    )


def part_to_score(corpus: Corpus) -> Corpus:
    """Of a folder or a built-in corpus what is kept for testing; what is named by its file is taken as it is."""
    path = Path(corpus.name).expanduser()
    named = corpus.name == "-" or path.is_file() or Path(corpus.files[0]).parent == path.parent
    return corpus if named else corpus.beside("test") or corpus


def read_lines(path: Path, texts: Texts) -> list[str]:
    """Translations, a line for each pair."""
    try:
        content = path.expanduser().read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ScoreError(
            f"{path}: must be a file of translations or a model folder, but cannot be read ({error.strerror})"
        ) from error
    rows = content.removesuffix(b"\n").split(b"\n") if content else []
    if len(rows) != len(texts.references):
        left_out = f" ({texts.no_pairs:,} of its lines are no pairs)" if texts.no_pairs else ""
        raise ScoreError(
            f"{path}: must have a line for each of the {len(texts.references):,} pairs of {texts.name}{left_out}, but "
            f"has {len(rows):,}; translate that very test set, empty lines too"
        )
    return [decoded(row, f"{path}:{number}") for number, row in enumerate(rows, 1)]


def decoded(row: bytes, where: str) -> str:
    try:
        return row.decode().strip()
    except UnicodeDecodeError as error:
        raise ScoreError(
            f"{where}: must be UTF-8, but byte {error.start + 1} is 0x{row[error.start]:02x}; convert the file first"
        ) from error


# ---- the work --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to score, read and ready."""

    texts: Texts
    flags: Flags
    search: Search
    given: list[str] | None  # --hypotheses
    other: list[str] | None  # --against, where it is a file
    gold: list[Gold] | None  # --alignment, where it is one

    def evaluated(self, model: Path | None) -> Results:
        texts, flags = self.texts, self.flags
        outputs = self.given if self.given is not None else self.translated(model, *flags.ensemble)
        others = self.other if self.other is not None or flags.against is None else self.translated(flags.against)
        if flags.save:
            save(outputs, flags.save)
        evaluation = evaluate(texts.sources, texts.references, outputs, names=flags.metrics, language=texts.language)
        dtype = dtype_of(flags) if model else ""
        compared = paired(outputs, others, texts.references, flags.metrics, texts.language) if others else []
        return Results(
            data=texts.name,
            pairs=len(texts.sources),
            no_pairs=texts.no_pairs,
            model=str(model) if model else None,
            hypotheses=str(flags.hypotheses) if flags.hypotheses else None,
            search=search_facts(self.search, flags, dtype) if model else None,
            searched=in_words(self.search, flags, dtype) if model else None,
            evaluation=evaluation,
            against=str(flags.against) if flags.against else None,
            paired=tuple(compared),
        )

    def translated(self, folder: Path | None, *others: Path) -> list[str]:
        """What the model of a folder, or the ensemble of several, makes of the sources."""
        assert folder is not None
        loaded = Loaded.of(self.flags, folder, *others)
        tell(f"translating {len(self.texts.sources):,} sentences with {folder} ...")
        outputs = [""] * len(self.texts.sources)
        for to, places in loaded.by_language(self.texts):
            sources = [self.texts.sources[i] for i in places]
            written = loaded.translator.translate(sources, self.search, to=to)
            for place, one in zip(places, written, strict=True):
                outputs[place] = " ".join(one.text.splitlines())
        return outputs

    def measured(self, model: Path | None) -> Results:
        """By the model alone: nothing is translated. What is measured has all its digits, unless it is to be short."""
        assert model is not None
        loaded = Loaded.of(replace(self.flags, dtype=self.flags.dtype or "float32"), model)
        return Results(
            data=self.texts.name,
            pairs=len(self.texts.sources),
            no_pairs=self.texts.no_pairs,
            model=str(model),
            hypotheses=str(self.flags.hypotheses) if self.flags.hypotheses else None,
            forced=tuple(self.forced(loaded)) if self.flags.force else None,
            alignment=self.aligned(loaded) if self.flags.alignment else None,
        )

    def forced(self, loaded: Loaded) -> list[Forced]:
        targets = self.texts.references if self.given is None else self.given
        found: dict[int, Forced] = {}
        for to, places in loaded.by_language(self.texts):
            sides = [self.texts.sources[i] for i in places], [targets[i] for i in places]
            some = forced(loaded.model, loaded.tokenizer, *sides, to=to, batch_tokens=loaded.batch_tokens)
            found.update(zip(places, some, strict=True))
        return [found[place] for place in range(len(targets))]

    def aligned(self, loaded: Loaded) -> AlignmentReport | Measured:
        """The best heads to align by, which are kept in the folder for `attent translate --alignment`."""
        languages = loaded.by_language(self.texts)
        if len(languages) > 1:
            raise GoldError(f"{self.texts.name}: must have one target language to be aligned; name it with --tgt")
        sides = self.texts.sources, self.texts.references
        to, where = languages[0][0], str(self.flags.alignment)
        found: AlignmentReport | Measured
        if self.gold is None:
            found = agreed(loaded.model, loaded.tokenizer, *sides, to=to)
        else:
            found = measure(loaded.model, loaded.tokenizer, *sides, self.gold, to=to, where=where)
        with explained(loaded.folder, "choice of heads"):
            remember(loaded.folder, found if isinstance(found, Measured) else found.measured)
        return found


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model, ready to work."""

    folder: Path
    translator: Translator
    batch_tokens: int

    @classmethod
    def of(cls, flags: Flags, folder: Path, *others: Path) -> Loaded:
        translator = translator_of((folder, *others), flags, tell)
        usual = CPU_TOKENS if translator.device.type == "cpu" else GPU_TOKENS
        return cls(folder=folder.expanduser(), translator=translator, batch_tokens=flags.batch_tokens or usual)

    @property
    def model(self) -> Seq2Seq:
        assert isinstance(self.translator.model, Seq2Seq)  # of one folder
        return self.translator.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self.translator.tokenizer

    def by_language(self, texts: Texts) -> list[tuple[str | None, list[int]]]:
        """The places of the pairs for each language to ask the model for; None where it has one only."""
        tags = self.tokenizer.source.tags
        wanted = [language if tags else None for language in texts.languages]
        asked = {language: asked_of(language, tags, self.folder) for language in dict.fromkeys(wanted)}
        return [(asked[one], [i for i, other in enumerate(wanted) if other == one]) for one in asked]


def asked_of(language: str | None, tags: tuple[str, ...], folder: Path) -> str | None:
    try:
        return asked_language(language, tags, folder)
    except TranslateError as error:
        raise TranslateError(str(error).replace("--to", "--tgt")) from error


def asked_search(flags: Flags) -> Search:
    try:
        return search_of(flags)
    except ValueError as error:
        raise CycloptsError(msg=in_flags(str(error)), command_chain=("score",)) from error


def search_facts(search: Search, flags: Flags, dtype: str) -> dict[str, Any]:
    """All that the translations depend on besides the model."""
    machine = {"engine": flags.engine, "dtype": dtype, "ensemble": [str(folder) for folder in flags.ensemble]}
    return {**asdict(search), "formula": search.formula, **machine}


def in_words(search: Search, flags: Flags, dtype: str) -> str:
    """`beam 4 until no better can come, score = log_prob / length^alpha, alpha = 0.6, at most source + 50 tokens`"""
    most = f"source + {MORE}" if search.max_length is None else f"{search.max_length:,}"
    told = [
        drawn(search.sampling) if search.sampling else followed(search),
        search.formula,
        f"at most {most} tokens",
        f"at least {search.min_length:,}" if search.min_length else "",
        f"no {search.no_repeat_ngram_size} tokens twice" if search.no_repeat_ngram_size else "",
        f"engine {flags.engine}" if flags.engine else "",
        dtype if dtype != "float32" else "",
        *(f"with {folder}" for folder in flags.ensemble),
    ]
    return ", ".join(filter(None, told))


def followed(search: Search) -> str:
    if search.beam_size == 1:
        return "greedy"
    until = "until no better can come" if search.patience is None else f"of patience {search.patience:g}"
    groups = f" in {search.groups} groups of diversity {search.diversity:g}" if search.groups > 1 else ""
    return f"beam {search.beam_size}{groups} {until}"


def drawn(sampling: Sampling) -> str:
    among = f", top {sampling.top_k:,}" if sampling.top_k else ""
    among += f", top {100 * sampling.top_p:g}%" if sampling.top_p < 1 else ""
    return f"drawn at temperature {sampling.temperature:g}{among}, seed {sampling.seed}"


def tell(text: str) -> None:
    """To a person who waits."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def save(outputs: Sequence[str], path: Path) -> None:
    settings.write_aside(path.expanduser(), "".join(f"{line}\n" for line in outputs).encode())
