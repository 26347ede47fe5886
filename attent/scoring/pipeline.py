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

from attent.cli.score import ScoreFlags
from attent.cli.search_flags import build_search_options, use_flag_names
from attent.data.corpus import Corpus, open_corpora
from attent.data.pairs import CorpusError, LanguagePair, Pair
from attent.decoding.alignment import MeasuredSelection, save_measured_selection, select_by_agreement
from attent.decoding.forced_decoding import TargetScores, score_targets
from attent.decoding.options import MAX_EXTRA_TOKENS, InputError, SamplingOptions, SearchOptions
from attent.decoding.translator import Translator, load_translator, resolve_dtype, resolve_target_lang
from attent.models import Seq2Seq
from attent.scoring.alignment import (
    AlignmentReport,
    GoldAlignment,
    GoldAlignmentError,
    evaluate_alignment,
    read_gold_alignments,
)
from attent.scoring.evaluate import Evaluation, evaluate
from attent.scoring.metrics import PairedComparison, ScoreError, compare_outputs
from attent.storage.atomic import write_atomic
from attent.storage.manifest import explain_save_errors
from attent.text.tokenizer import Tokenizer

AUTO_ALIGNMENT = "auto"  # --alignment without alignments by hand

CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 4_096, 65_536  # of either side that are read at once


@dataclass(frozen=True, kw_only=True)
class TestSet:
    """A test set."""

    name: str
    sources: list[str]
    references: list[str]
    languages: list[str | None]  # of each reference
    num_skipped: int  # lines that are none, and left out

    @property
    def language(self) -> str | None:
        """Of all references, if they have one."""
        found = set(self.languages)
        return found.pop() if len(found) == 1 else None


@dataclass(frozen=True, kw_only=True)
class ScoreReport:
    """All that was asked for; what was not is None."""

    test_set: str
    num_pairs: int
    num_skipped: int  # lines that are none
    model: str | None = None
    hypotheses: str | None = None
    search: dict[str, Any] | None = None
    search_summary: str | None = None  # the same for a person to read
    evaluation: Evaluation | None = None
    baseline: str | None = None
    comparisons: tuple[PairedComparison, ...] = ()
    forced: tuple[TargetScores, ...] | None = None
    alignment: AlignmentReport | MeasuredSelection | None = None


def score_test_set(model: Path | None, data: Sequence[str], flags: ScoreFlags) -> ScoreReport:
    """All that was asked for; what is given is read first: a wrong name is told before a large model is read."""
    search = parse_search_flags(flags)
    texts = read_test_set(data, LanguagePair(flags.src, flags.tgt))
    given = read_hypotheses(flags.hypotheses, texts) if flags.hypotheses else None
    other = (
        read_hypotheses(flags.baseline, texts) if flags.baseline and not flags.baseline.expanduser().is_dir() else None
    )
    gold = (
        read_gold_alignments(flags.alignment.expanduser())
        if flags.alignment and str(flags.alignment) != AUTO_ALIGNMENT
        else None
    )
    asked = ScoreRequest(
        test_set=texts, flags=flags, search=search, hypotheses=given, baseline_hypotheses=other, gold=gold
    )
    return asked.analyze_model(model) if flags.force_decode or flags.alignment else asked.evaluate_translations(model)


# ---- what is given ---------------------------------------------------------------------------------------------------


def read_test_set(names: Sequence[str], languages: LanguagePair) -> TestSet:
    """Every pair in its order, also one with an empty side: translations in a file have a line for it."""
    parts = [select_test_part(corpus) for corpus in open_corpora(names, languages)]
    entries = [(entry, corpus.languages.target) for corpus in parts for entry in corpus]
    pairs = [(entry, language) for entry, language in entries if isinstance(entry, Pair)]
    if not pairs:
        raise CorpusError(
            f"{', '.join(names)}: there is not one pair in it; a line needs a source and a target; attent data "
            "shows more"
        )
    return TestSet(
        name=", ".join(dict.fromkeys(file for corpus in parts for file in corpus.file_names)),
        sources=[pair.source.strip() for pair, _ in pairs],
        references=[pair.target.strip() for pair, _ in pairs],
        languages=[language for _, language in pairs],
        num_skipped=len(entries) - len(pairs),
    )


def select_test_part(corpus: Corpus) -> Corpus:
    """Of a folder or a built-in corpus what is kept for testing; what is named by its file is taken as it is."""
    path = Path(corpus.name).expanduser()
    named = corpus.name == "-" or path.is_file() or Path(corpus.file_names[0]).parent == path.parent
    return corpus if named else corpus.get_sibling_split("test") or corpus


def read_hypotheses(path: Path, test_set: TestSet) -> list[str]:
    """Translations, a line for each pair."""
    try:
        content = path.expanduser().read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ScoreError(
            f"{path}: must be a file of translations or a model folder, but cannot be read ({error.strerror})"
        ) from error
    rows = content.removesuffix(b"\n").split(b"\n") if content else []
    if len(rows) != len(test_set.references):
        left_out = f" ({test_set.num_skipped:,} of its lines are no pairs)" if test_set.num_skipped else ""
        raise ScoreError(
            f"{path}: must have a line for each of the {len(test_set.references):,} pairs of {test_set.name}{left_out}, but "
            f"has {len(rows):,}; translate that very test set, empty lines too"
        )
    return [decode_line(row, f"{path}:{number}") for number, row in enumerate(rows, 1)]


def decode_line(line: bytes, location: str) -> str:
    try:
        return line.decode().strip()
    except UnicodeDecodeError as error:
        raise ScoreError(
            f"{location}: must be UTF-8, but byte {error.start + 1} is 0x{line[error.start]:02x}; convert the file first"
        ) from error


# ---- the work --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """What to score, read and ready."""

    test_set: TestSet
    flags: ScoreFlags
    search: SearchOptions
    hypotheses: list[str] | None  # --hypotheses
    baseline_hypotheses: list[str] | None  # --baseline, where it is a file
    gold: list[GoldAlignment] | None  # --alignment, where it is one

    def evaluate_translations(self, model: Path | None) -> ScoreReport:
        texts, flags = self.test_set, self.flags
        outputs = self.hypotheses if self.hypotheses is not None else self.translate_sources(model, *flags.ensemble)
        others = (
            self.baseline_hypotheses
            if self.baseline_hypotheses is not None or flags.baseline is None
            else self.translate_sources(flags.baseline)
        )
        if flags.save:
            save_outputs(outputs, flags.save)
        evaluation = evaluate(texts.sources, texts.references, outputs, metrics=flags.metrics, language=texts.language)
        dtype = resolve_dtype(flags) if model else ""
        compared = compare_outputs(outputs, others, texts.references, flags.metrics, texts.language) if others else []
        return ScoreReport(
            test_set=texts.name,
            num_pairs=len(texts.sources),
            num_skipped=texts.num_skipped,
            model=str(model) if model else None,
            hypotheses=str(flags.hypotheses) if flags.hypotheses else None,
            search=search_to_dict(self.search, flags, dtype) if model else None,
            search_summary=describe_search(self.search, flags, dtype) if model else None,
            evaluation=evaluation,
            baseline=str(flags.baseline) if flags.baseline else None,
            comparisons=tuple(compared),
        )

    def translate_sources(self, folder: Path | None, *others: Path) -> list[str]:
        """What the model of a folder, or the ensemble of several, makes of the sources."""
        assert folder is not None
        loaded = LoadedTranslator.from_flags(self.flags, folder, *others)
        report_progress(f"translating {len(self.test_set.sources):,} sentences with {folder} ...")
        outputs = [""] * len(self.test_set.sources)
        for to, places in loaded.group_by_language(self.test_set):
            sources = [self.test_set.sources[i] for i in places]
            written = loaded.translator.translate(sources, self.search, to=to)
            for place, one in zip(places, written, strict=True):
                outputs[place] = " ".join(one.text.splitlines())
        return outputs

    def analyze_model(self, model: Path | None) -> ScoreReport:
        """By the model alone: nothing is translated. What is measured has all its digits, unless it is to be short."""
        assert model is not None
        flags = replace(self.flags, dtype=self.flags.dtype or "float32")  # type: ignore[call-arg]
        loaded = LoadedTranslator.from_flags(flags, model)
        return ScoreReport(
            test_set=self.test_set.name,
            num_pairs=len(self.test_set.sources),
            num_skipped=self.test_set.num_skipped,
            model=str(model),
            hypotheses=str(self.flags.hypotheses) if self.flags.hypotheses else None,
            forced=tuple(self.force_decode(loaded)) if self.flags.force_decode else None,
            alignment=self.select_alignment_heads(loaded) if self.flags.alignment else None,
        )

    def force_decode(self, loaded: LoadedTranslator) -> list[TargetScores]:
        targets = self.test_set.references if self.hypotheses is None else self.hypotheses
        found: dict[int, TargetScores] = {}
        for to, places in loaded.group_by_language(self.test_set):
            sides = [self.test_set.sources[i] for i in places], [targets[i] for i in places]
            some = score_targets(loaded.model, loaded.tokenizer, *sides, to=to, batch_tokens=loaded.batch_tokens)
            found.update(zip(places, some, strict=True))
        return [found[place] for place in range(len(targets))]

    def select_alignment_heads(self, loaded: LoadedTranslator) -> AlignmentReport | MeasuredSelection:
        """The best heads to align by, which are kept in the folder for `attent translate --alignment`."""
        languages = loaded.group_by_language(self.test_set)
        if len(languages) > 1:
            raise GoldAlignmentError(
                f"{self.test_set.name}: must have one target language to be aligned; name it with --tgt"
            )
        sides = self.test_set.sources, self.test_set.references
        to, where = languages[0][0], str(self.flags.alignment)
        found: AlignmentReport | MeasuredSelection
        if self.gold is None:
            found = select_by_agreement(loaded.model, loaded.tokenizer, *sides, to=to)
        else:
            found = evaluate_alignment(loaded.model, loaded.tokenizer, *sides, self.gold, to=to, location=where)
        with explain_save_errors(loaded.folder, "choice of heads"):
            save_measured_selection(loaded.folder, found if isinstance(found, MeasuredSelection) else found.selection)
        return found


@dataclass(frozen=True, kw_only=True)
class LoadedTranslator:
    """A model, ready to work."""

    folder: Path
    translator: Translator
    batch_tokens: int

    @classmethod
    def from_flags(cls, flags: ScoreFlags, folder: Path, *others: Path) -> LoadedTranslator:
        translator = load_translator((folder, *others), flags, report_progress)
        usual = CPU_BATCH_TOKENS if translator.device.type == "cpu" else GPU_BATCH_TOKENS
        return cls(folder=folder.expanduser(), translator=translator, batch_tokens=flags.batch_tokens or usual)

    @property
    def model(self) -> Seq2Seq:
        assert isinstance(self.translator.model, Seq2Seq)  # of one folder
        return self.translator.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self.translator.tokenizer

    def group_by_language(self, test_set: TestSet) -> list[tuple[str | None, list[int]]]:
        """The places of the pairs for each language to ask the model for; None where it has one only."""
        tags = self.tokenizer.source.tags
        wanted = [language if tags else None for language in test_set.languages]
        asked = {language: find_language_tag(language, tags, self.folder) for language in dict.fromkeys(wanted)}
        return [(asked[one], [i for i, other in enumerate(wanted) if other == one]) for one in asked]


def find_language_tag(language: str | None, tags: tuple[str, ...], folder: Path) -> str | None:
    try:
        return resolve_target_lang(language, tags, folder)
    except InputError as error:
        raise InputError(str(error).replace("--to", "--tgt")) from error


def parse_search_flags(flags: ScoreFlags) -> SearchOptions:
    try:
        return build_search_options(flags)
    except ValueError as error:
        raise CycloptsError(msg=use_flag_names(str(error)), command_chain=("score",)) from error


def search_to_dict(search: SearchOptions, flags: ScoreFlags, dtype: str) -> dict[str, Any]:
    """All that the translations depend on besides the model."""
    machine = {"engine": flags.engine, "dtype": dtype, "ensemble": [str(folder) for folder in flags.ensemble]}
    return {**asdict(search), "formula": search.score_formula, **machine}


def describe_search(search: SearchOptions, flags: ScoreFlags, dtype: str) -> str:
    """`beam 4 until no better can come, score = log_prob / length^alpha, alpha = 0.6, at most source + 50 tokens`"""
    most = f"source + {MAX_EXTRA_TOKENS}" if search.max_length is None else f"{search.max_length:,}"
    told = [
        describe_sampling(search.sampling) if search.sampling else describe_beam(search),
        search.score_formula,
        f"at most {most} tokens",
        f"at least {search.min_length:,}" if search.min_length else "",
        f"no {search.no_repeat_ngram_size} tokens twice" if search.no_repeat_ngram_size else "",
        f"engine {flags.engine}" if flags.engine else "",
        dtype if dtype != "float32" else "",
        *(f"with {folder}" for folder in flags.ensemble),
    ]
    return ", ".join(filter(None, told))


def describe_beam(search: SearchOptions) -> str:
    if search.beam_size == 1:
        return "greedy"
    until = "until no better can come" if search.patience is None else f"of patience {search.patience:g}"
    groups = (
        f" in {search.beam_groups} groups of diversity {search.diversity_penalty:g}" if search.beam_groups > 1 else ""
    )
    return f"beam {search.beam_size}{groups} {until}"


def describe_sampling(sampling: SamplingOptions) -> str:
    among = f", top {sampling.top_k:,}" if sampling.top_k else ""
    among += f", top {100 * sampling.top_p:g}%" if sampling.top_p < 1 else ""
    return f"drawn at temperature {sampling.temperature:g}{among}, seed {sampling.seed}"


def report_progress(text: str) -> None:
    """To a person who waits."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def save_outputs(outputs: Sequence[str], path: Path) -> None:
    write_atomic(path.expanduser(), "".join(f"{line}\n" for line in outputs).encode())
