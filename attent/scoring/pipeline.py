"""Score a model on a test set: read the files, translate or force-decode, evaluate."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Unpack, cast

from attent.data.audio import AudioError, Recording, choose_text_columns, find_recordings, has_translations
from attent.data.captions import SUFFIXES, find_columns, read_captions
from attent.data.corpus import open_corpora
from attent.data.images import IMAGE_SUFFIXES, ImageError
from attent.data.in_memory import CorpusInput, InMemoryCorpus, is_in_memory
from attent.data.pairs import BadLine, CorpusError, LanguagePair, Pair, ReasonTally
from attent.data.text_corpus import list_eval_files
from attent.decoding.alignment import MeasuredSelection, save_measured_selection, select_by_agreement
from attent.decoding.ensemble import Ensemble
from attent.decoding.forced_decoding import TargetScores, score_targets
from attent.decoding.input_lines import decode_line
from attent.decoding.loading import read_data_settings, resolve_target_lang
from attent.decoding.options import (
    MAX_EXTRA_TOKENS,
    DeviceOptions,
    Hypothesis,
    InputError,
    SearchKeywords,
    SearchOptions,
    list_search_keywords,
)
from attent.decoding.source_search import IMAGE_MAX_LENGTH, Captioner
from attent.decoding.transcriber import Transcriber, Transcript
from attent.decoding.translator import Translator
from attent.formatting import format_count
from attent.interop import detect_frontend
from attent.interop.conversion import get_dtype_name
from attent.models import Seq2Seq
from attent.nn import AudioConfig
from attent.scoring.alignment import AlignmentReport, GoldAlignment, evaluate_alignment, read_gold_alignments
from attent.scoring.evaluate import RobustnessScore, evaluate, measure_robustness
from attent.scoring.metrics import (
    CAPTION_METRICS,
    DEFAULT_SCORE_METRICS,
    SPEECH_METRICS,
    Reference,
    ScoreError,
    check_metrics,
    compare_outputs,
    make_metric,
)
from attent.scoring.report import ScoreReport
from attent.storage.atomic import write_output
from attent.storage.hub import find_origin, locate_model
from attent.storage.manifest import check_outputs, explain_save_errors
from attent.text.language_tags import is_same_language

AUTO_ALIGNMENT = "auto"  # select heads by agreement, without gold alignments
CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 4_096, 65_536  # of forced decoding
MAX_CHECKED_LINES = 2_000  # that are compared with the languages of the model

Notify = Callable[[str], None]
LanguageGroups = Sequence[tuple[str | None, list[int]]]  # target language, indices of its sources
SearchResult = Hypothesis | ImageError


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    metrics: Sequence[str] = DEFAULT_SCORE_METRICS
    search: SearchOptions = field(default_factory=SearchOptions)
    ensemble: Sequence[Path] = ()  # models that translate together with the model
    hypotheses: Path | None = None  # a file of translations to score instead of translating
    baseline: Translator | Path | None = None  # a model or a file of translations to compare with
    force_decode: bool = False  # score the references (or `hypotheses`) by forced decoding
    alignment: Path | None = None  # a file of gold alignments, or `auto`
    robust: bool = False  # also score the test set with capitals, typos, tags and the like
    save: Path | None = None  # a file for the translations
    device: DeviceOptions = field(default_factory=DeviceOptions)


@dataclass(frozen=True, kw_only=True)
class TestSet:
    name: str
    sources: list[str]
    references: list[str]
    languages: list[str | None]  # of each reference
    skipped: ReasonTally[str]  # lines that are no pairs
    files: list[Path]
    locations: Sequence[str] = ()  # of recordings and images: corpus.tsv:17
    recordings: tuple[Recording, ...] = ()  # whose texts are the references; `sources` has their names
    contexts: tuple[str, ...] = ()  # preceding sources, for a model that was trained with them
    captions: tuple[tuple[str, ...], ...] = ()  # of images: all references of each; `sources` has the names of files

    @property
    def language(self) -> str | None:
        languages = set(self.languages)
        return languages.pop() if len(languages) == 1 else None

    @property
    def default_limit(self) -> str:
        if self.captions:
            return f"{IMAGE_MAX_LENGTH} tokens"
        return "25 tokens per second" if self.recordings else f"source + {MAX_EXTRA_TOKENS} tokens"


@list_search_keywords
def score(
    model: Translator | str | Path | None,
    data: CorpusInput,
    *,
    src: str | None = None,
    tgt: str | None = None,
    metrics: Sequence[str] = DEFAULT_SCORE_METRICS,
    baseline: Translator | str | Path | None = None,
    hypotheses: str | Path | None = None,
    ensemble: Sequence[str | Path] = (),
    force_decode: bool = False,
    alignment: str | Path | None = None,
    robust: bool = False,
    save: str | Path | None = None,
    search: SearchOptions | None = None,
    device: str | DeviceOptions | None = None,
    notify: Notify = lambda _: None,
    warn: Notify = warnings.warn,
    **keywords: Unpack[SearchKeywords],
) -> ScoreReport:
    """Translate (transcribe, caption) a test set with a model and score it; the report prints as a table.

    >>> report = attent.score(translator, "test.tsv", beam_size=1)
    >>> round(report["bleu"].value, 2)
    100.0
    >>> pairs = [("A man sings.", "Ein Mann singt."), ("A dog sleeps.", "Der Hund schläft.")]
    >>> attent.score("runs/en-de", pairs, baseline=translator, metrics=["chrf"]).comparisons[0].p_value
    1.0

    model         a translator, or a model folder; None with `hypotheses`
    data          the test set: files, of a folder or a built-in corpus its test part; or pairs, a data frame, a Dataset
    src, tgt      languages of the sources and references, as tags: en, de
    metrics       by default bleu, chrf and ter; of transcripts wer and cer
    baseline      another translator, model folder or file of translations, for a paired test of the difference
    hypotheses    a file of translations to score, one line for each pair
    ensemble      folders of models that translate together with the model
    force_decode  perplexity of the references, or `hypotheses`, under the model
    alignment     error rate of every head against a file of gold alignments; or auto: select the heads on which both
                  directions agree most. The best heads are saved in the folder
    robust        score the test set also with capitals, typos, tags and the like, each alone (`attent.data.augment`)
    save          a file for the translations
    search        search options as an object; keyword arguments change them
    device        of the models that are loaded: cuda, cuda:1, mps or cpu; or device and engine as an object
    notify, warn  receive progress, and doubts about the test set
    """
    if robust and (force_decode or alignment):
        raise ScoreError("`robust` translates, but `force_decode` and `alignment` do not; leave one out")
    if not isinstance(model, Translator | str | Path | None):
        raise ScoreError(f"`model` must be a translator or a model folder, but is of type {type(model).__name__}")
    device = DeviceOptions(device=device) if isinstance(device, str) else device
    options = ScoreOptions(
        metrics=check_metrics([metrics] if isinstance(metrics, str) else metrics),
        search=(search or SearchOptions()).change(**keywords),
        ensemble=[locate_model(folder) for folder in ensemble],
        hypotheses=None if hypotheses is None else Path(hypotheses),
        baseline=locate_model(baseline) if isinstance(baseline, str | Path) else baseline,
        force_decode=force_decode,
        alignment=None if alignment is None else Path(alignment),
        robust=robust,
        save=None if save is None else Path(save),
        device=device or DeviceOptions(engine=model.engine if isinstance(model, Translator) else None),
    )
    model = locate_model(model) if isinstance(model, str | Path) else model
    languages = LanguagePair(src, tgt)
    paths = [data] if isinstance(data, str | Path) else cast(Sequence[str | Path], data)
    names = [] if is_in_memory(data) else [str(path) for path in paths]
    source_kind = detect_sources(model, names) if names else "memory"
    if source_kind == "memory":
        test_set = read_pairs_in_memory(data, languages, warn)
    elif source_kind == "speech":
        data_settings = read_data_settings(model.expanduser()) if isinstance(model, Path) else {}
        languages = LanguagePair(src or data_settings.get("src"), tgt or data_settings.get("tgt"))
        defaults = DEFAULT_SCORE_METRICS if has_translations(languages.source, languages.target) else SPEECH_METRICS
        test_set, options = read_speech_test_set(names, languages), adapt_options(options, "speech", defaults)
    elif source_kind == "caption":
        test_set, options = read_caption_test_set(names, tgt), adapt_options(options, "caption", CAPTION_METRICS)
    else:
        context = (
            read_data_settings(model).get("context", 0) if isinstance(model, Path) else getattr(model, "context", 0)
        )
        test_set = read_test_set(names, languages, warn, context)
    if test_set.skipped.counts:
        warn(f"{test_set.name}: lines without a pair are not scored: {test_set.skipped.describe()}")
    baseline_file = options.baseline if isinstance(options.baseline, Path) else None
    baseline_file = None if baseline_file is None or baseline_file.expanduser().is_dir() else baseline_file
    gold_file = options.alignment if str(options.alignment) != AUTO_ALIGNMENT else None
    folders = [item.folder if isinstance(item, Translator) else item for item in (model, options.baseline)]
    check_outputs([options.save], [*test_set.files, *folders, options.hypotheses, gold_file])
    scorer = _Scorer(
        test_set=test_set,
        options=options,
        model=model,
        hypotheses=read_hypotheses(options.hypotheses, test_set) if options.hypotheses else None,
        baseline_outputs=read_hypotheses(baseline_file, test_set) if baseline_file else None,
        gold=read_gold_alignments(gold_file.expanduser()) if gold_file else None,
        notify=notify,
        warn=warn,
        languages=languages,
    )
    return scorer.analyze_model() if force_decode or alignment else scorer.evaluate_translations()


# ---- files -----------------------------------------------------------------------------------------------------------


def detect_sources(model: Translator | Path | None, names: Sequence[str]) -> Literal["speech", "caption", "text"]:
    """Return what a model reads; without one, what a .tsv file lists according to its header and first line."""
    if isinstance(model, Translator):
        return "text"
    if model is not None:
        frontend = detect_frontend(model)
        return "text" if frontend is None else "speech" if frontend is AudioConfig else "caption"
    path = Path(names[0]).expanduser()
    if path.suffix.lower() not in SUFFIXES or not path.is_file():
        return "text"
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        header, cells = (file.readline().split("\t") for _ in range(2))
    is_image = any(Path(cell.strip().lower()).suffix in IMAGE_SUFFIXES for cell in cells)
    return "text" if not find_columns(header) else "caption" if is_image else "speech"


def read_test_set(
    names: Sequence[str], languages: LanguagePair, warn: Notify = warnings.warn, context: int = 0
) -> TestSet:
    """Read every pair, also those with an empty side: a file of translations has a line for them."""
    corpora = []
    for corpus in open_corpora(names, languages, warn=warn):
        path = Path(corpus.name).expanduser()
        is_file = corpus.name == "-" or path.is_file() or Path(corpus.file_names[0]).parent == path.parent
        # Of a folder or a built-in corpus, the test part; a file that was named is taken as it is.
        corpora.append(corpus if is_file else corpus.get_sibling_split("test") or corpus)
    corpora = [replace(corpus, context=context) for corpus in corpora]
    entries = [(entry, corpus.languages.target) for corpus in corpora for entry in corpus]
    pairs = [(entry, language) for entry, language in entries if isinstance(entry, Pair)]
    skipped = ReasonTally[str]()
    for entry, _ in entries:
        if isinstance(entry, BadLine):
            skipped.add(entry.reason, f"{entry.file}:{entry.line}")
    if not pairs:
        reasons = skipped.describe() or "a line needs a source and a target"
        raise CorpusError(f"{', '.join(names)}: contains no sentence pairs: {reasons}; attent data shows more")
    return TestSet(
        name=", ".join(dict.fromkeys(file for corpus in corpora for file in corpus.file_names)),
        sources=[pair.source.strip() for pair, _ in pairs],
        references=[pair.target.strip() for pair, _ in pairs],
        contexts=tuple(pair.context for pair, _ in pairs) if context else (),
        languages=[language for _, language in pairs],
        skipped=skipped,
        files=[file.path for corpus in corpora for file in corpus.input_files if file.path is not None],
    )


def read_pairs_in_memory(data: CorpusInput, languages: LanguagePair, warn: Notify) -> TestSet:
    corpus = InMemoryCorpus(data, "data", (languages.source, languages.target))
    if not len(cast(Sequence[Any], data)):
        raise CorpusError("`data` must have at least one pair, but is empty")
    with TemporaryDirectory() as folder:
        path = Path(folder, corpus.name)
        corpus.write(path)
        return replace(read_test_set([str(path)], languages, warn), name="data", files=[])


def read_speech_test_set(names: Sequence[str], languages: LanguagePair) -> TestSet:
    recordings: list[Recording] = []
    for name in names:
        splits = find_recordings(name, choose_text_columns(languages.source, languages.target))
        recordings += splits.get("test") or [recording for part in splits.values() for recording in part]
    recordings = [recording for recording in recordings if recording.text]
    if not recordings:
        raise CorpusError(f"{', '.join(names)}: contains no recordings with texts")
    return TestSet(
        name=", ".join(names),
        sources=[str(recording.file) for recording in recordings],
        references=[recording.text for recording in recordings],
        languages=[languages.target or languages.source] * len(recordings),
        skipped=ReasonTally[str](),
        files=[path for name in names if (path := Path(name).expanduser()).is_file()],
        locations=[recording.location for recording in recordings],
        recordings=tuple(recordings),
    )


def read_caption_test_set(names: Sequence[str], language: str | None) -> TestSet:
    rows = read_captions(list_eval_files(names, "test", SUFFIXES), check_images=False)
    items = [item for item in rows.list_items() if language is None or item.language == language]
    if not items:
        known = ", ".join(sorted(filter(None, set(rows.languages)))) or "none"
        raise ScoreError(f"{rows.name}: must have captions in `{language}`, but its languages are {known}")
    skipped = ReasonTally[str]()
    for problem in rows.skipped:
        skipped.add("no image or no text", problem)
    return TestSet(
        name=rows.name,
        sources=[str(rows.paths[item.image_id]) for item in items],
        references=[item.references[0] for item in items],
        languages=[item.language for item in items],
        skipped=skipped,
        files=list(rows.files),
        locations=[rows.locations[item.image_id] for item in items],
        captions=tuple(item.references for item in items),
    )


def adapt_options(options: ScoreOptions, model_kind: str, metrics: Sequence[str]) -> ScoreOptions:
    """Refuse what only translators can do, and score by these metrics unless others are named."""
    for name in ("force_decode", "alignment", "ensemble", "robust"):
        if getattr(options, name):
            raise ScoreError(f"`{name}` is for translators, but this is a {model_kind} model; leave it out")
    return replace(options, metrics=metrics) if tuple(options.metrics) == DEFAULT_SCORE_METRICS else options


def read_hypotheses(path: Path, test_set: TestSet) -> list[str]:
    try:
        content = path.expanduser().read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ScoreError(
            f"{path}: must be a file of translations or a model folder, but cannot be read ({error.strerror})"
        ) from error
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    if len(lines) != len(test_set.references):
        num_skipped = test_set.skipped.counts.total()
        skipped = f" ({num_skipped:,} of its lines are no pairs)" if num_skipped else ""
        raise ScoreError(
            f"{path}: must have a line for each of the {len(test_set.references):,} pairs of {test_set.name}{skipped}, "
            f"but has {len(lines):,}; translate this test set, including its empty lines"
        )
    return [decode_line(line, f"{path}:{number}").strip() for number, line in enumerate(lines, 1)]


# ---- scoring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Scorer:
    test_set: TestSet
    options: ScoreOptions
    model: Translator | Path | None
    hypotheses: list[str] | None  # None: translate
    baseline_outputs: list[str] | None  # where the baseline is a file
    gold: list[GoldAlignment] | None
    notify: Notify
    warn: Notify
    languages: LanguagePair  # as requested
    unreadable: set[int] = field(default_factory=set)  # indices of recordings or images; they are not scored

    def evaluate_translations(self) -> ScoreReport:
        test_set, options = self.test_set, self.options
        for name in options.metrics:  # before the time to translate is spent
            make_metric(name, test_set.language, test_set.references)
        outputs, dtype, model = self.hypotheses, None, self.model
        if options.robust:
            model = self.load(self.model, *options.ensemble)
        if outputs is None:
            outputs, dtype = self.produce_outputs(model, *(options.ensemble if model is self.model else ()))
        baseline = self.baseline_outputs
        if baseline is None and options.baseline is not None:
            baseline, _ = self.produce_outputs(options.baseline)
        if options.save:
            write_output(options.save, "".join(f"{line}\n" for line in outputs).encode())
        readable = [i for i in range(len(outputs)) if i not in self.unreadable]
        if not readable:
            raise ScoreError(f"{test_set.name}: must have files that can be read, but of {len(outputs):,} has none")
        sources = [test_set.sources[i] for i in readable]
        references: Sequence[Reference] = [(test_set.captions or test_set.references)[i] for i in readable]
        outputs, baseline = [outputs[i] for i in readable], baseline and [baseline[i] for i in readable]
        by_length, metrics, language = not test_set.locations, options.metrics, test_set.language
        compared = compare_outputs(outputs, baseline, references, metrics, language) if baseline else []
        evaluation = evaluate(sources, references, outputs, metrics=metrics, language=language, by_length=by_length)
        robustness: Iterable[RobustnessScore] = ()
        if options.robust:

            def translate(sources: list[str]) -> list[str]:
                changed = replace(self, test_set=replace(test_set, sources=sources))
                return changed.produce_outputs(model)[0]

            robustness = measure_robustness(translate, sources, test_set.references, evaluation.scores, language)
        return replace(
            self.start_report(),
            search=search_to_dict(options, dtype) if dtype else None,
            search_summary=describe_search(options, dtype, test_set.default_limit) if dtype else None,
            evaluation=evaluation,
            robustness=tuple(robustness),
            baseline=describe_model(options.baseline),
            comparisons=tuple(compared),
        )

    def analyze_model(self) -> ScoreReport:
        options, device = self.options, self.options.device
        options = replace(options, device=replace(device, dtype=device.dtype or "float32"))
        translator = replace(self, options=options).load(self.model)
        if not isinstance(translator.model, Seq2Seq):
            raise ScoreError("forced decoding and alignment need one model, but this is an ensemble; give one of them")
        return replace(
            self.start_report(),
            forced=tuple(self.force_decode(translator)) if options.force_decode else None,
            alignment=self.select_alignment_heads(translator) if options.alignment else None,
        )

    def start_report(self) -> ScoreReport:
        hypotheses = self.options.hypotheses
        return ScoreReport(
            test_set=self.test_set.name,
            num_pairs=len(self.test_set.sources) - len(self.unreadable),
            num_skipped=self.test_set.skipped.counts.total() + len(self.unreadable),
            num_unreadable=len(self.unreadable),
            model=describe_model(self.model),
            hypotheses=str(hypotheses) if hypotheses else None,
        )

    def load(self, model: Translator | Path | None, *others: Path) -> Translator:
        if model is None:
            raise ScoreError("there is nothing to score: give a model, or a file of hypotheses")
        if isinstance(model, Translator) and others:
            raise ScoreError("an ensemble is loaded from folders, but the model is a translator; give its folder")
        if not isinstance(model, Translator):
            src, tgt, device = self.languages.source, self.languages.target, vars(self.options.device)
            model = Translator.load(model, *others, **device, src=src, tgt=tgt, notify=self.notify)
        if problem := describe_wrong_direction(model, self.languages, self.test_set):
            self.warn(problem)
        return model

    def produce_outputs(self, model: Translator | Path | None, *others: Path) -> tuple[list[str], str]:
        device, num_sources = self.options.device, len(self.test_set.sources)
        folder = model if isinstance(model, Path) else None
        if folder is not None and self.test_set.recordings:
            transcriber = Transcriber.load(folder, device=device.device, dtype=device.dtype)
            self.notify(f"transcribing {format_count(num_sources, 'recording')} ...")
            files = (recording.file for recording in self.test_set.recordings)
            sources = (file if isinstance(file, Path) else file.open() for file in files)
            results = transcriber.transcribe_all(sources, self.options.search, word_times=False)
            return [self.get_text(i, result) for i, result in enumerate(results)], get_dtype_name(transcriber.model)
        if folder is not None and self.test_set.captions:
            captioner = Captioner.load(folder, device=device.device, dtype=device.dtype)
            self.notify(f"captioning {num_sources:,} images with {folder} ...")
            groups = group_languages(self.test_set, captioner.languages, folder)
            return self.search_all(captioner.caption_all, groups), get_dtype_name(captioner.model)
        translator = self.load(model, *others)
        self.notify(f"translating {num_sources:,} sentences with {describe_model(model)} ...")
        scorer = replace(self, test_set=replace(self.test_set, sources=self.list_sources(translator)))
        outputs = scorer.search_all(translator.translate, self.group_by_tag(translator))
        return outputs, get_dtype_name(translator.model)

    def list_sources(self, translator: Translator) -> list[str]:
        """Return the sources, with those before them if the model was trained with context."""
        test_set = self.test_set
        if not (test_set.contexts and translator.context):
            return test_set.sources
        return [context + source for context, source in zip(test_set.contexts, test_set.sources, strict=True)]

    def group_by_tag(self, translator: Translator) -> LanguageGroups:
        return group_languages(self.test_set, translator.tokenizer.source.tags, translator.folder or Path("ensemble"))

    def search_all(self, search: Callable[..., Iterable[SearchResult]], groups: LanguageGroups) -> list[str]:
        outputs = [""] * len(self.test_set.sources)
        for language, indices in groups:
            results = search([self.test_set.sources[i] for i in indices], self.options.search, to=language)
            for i, result in zip(indices, results, strict=True):
                outputs[i] = self.get_text(i, result)
        return outputs

    def get_text(self, i: int, result: SearchResult | Transcript | AudioError) -> str:
        if not isinstance(result, AudioError | ImageError):
            return " ".join(result.text.splitlines())
        if i not in self.unreadable:
            self.warn(": ".join(filter(None, (self.test_set.locations[i], str(result)))))
        self.unreadable.add(i)
        return ""

    def force_decode(self, translator: Translator) -> list[TargetScores]:
        model = translator.model
        assert isinstance(model, Seq2Seq)  # not an ensemble
        targets = self.test_set.references if self.hypotheses is None else self.hypotheses
        default_tokens = CPU_BATCH_TOKENS if translator.device.type == "cpu" else GPU_BATCH_TOKENS
        batch_tokens = translator.batch_tokens or default_tokens
        scores: dict[int, TargetScores] = {}
        sources = self.list_sources(translator)
        for language, indices in self.group_by_tag(translator):
            sides = [sources[i] for i in indices], [targets[i] for i in indices]
            group = score_targets(model, translator.tokenizer, *sides, to=language, batch_tokens=batch_tokens)
            scores.update(zip(indices, group, strict=True))
        return [scores[i] for i in range(len(targets))]

    def select_alignment_heads(self, translator: Translator) -> AlignmentReport | MeasuredSelection:
        """Select the heads that align best and save them in the folder, for `attent translate --alignment`."""
        model, tokenizer, folder = translator.model, translator.tokenizer, translator.folder
        assert isinstance(model, Seq2Seq)  # not an ensemble
        if folder is None:
            raise ScoreError("the selected heads are saved in the model folder, but this model has none; save it first")
        languages = self.group_by_tag(translator)
        if len(languages) > 1:
            raise ScoreError(f"{self.test_set.name}: must have one target language to be aligned; name it with --tgt")
        sides, language = (self.test_set.sources, self.test_set.references), languages[0][0]
        result: AlignmentReport | MeasuredSelection
        if self.gold is None:
            result = select_by_agreement(model, tokenizer, *sides, to=language)
        else:
            location = str(self.options.alignment)
            result = evaluate_alignment(model, tokenizer, *sides, self.gold, to=language, location=location)
        with explain_save_errors(folder, "choice of heads"):
            selection = result if isinstance(result, MeasuredSelection) else result.selection
            save_measured_selection(folder, selection)
        return result


def describe_model(model: Translator | Path | None) -> str | None:
    """Return the folder of a model, or its name on the hub; a translator may have none."""
    if isinstance(model, Translator):
        if model.folder is None:
            return "an ensemble" if isinstance(model.model, Ensemble) else "a model in memory"
        model = model.folder
    return None if model is None else find_origin(model) or str(model)


def describe_wrong_direction(translator: Translator, requested: LanguagePair, test_set: TestSet) -> str | None:
    """Describe a test set that is read in another direction than the model translates, or is in other languages."""
    known = translator.language_identifier
    if known is None:
        return None
    for tag, tags in ((requested.source, known.sources), (requested.target, known.targets)):
        if tag and not any(is_same_language(tag, other) for other in tags):
            sides = f"{requested.source or '?'} to {requested.target or '?'}"
            direction = f"{', '.join(known.sources)} to {', '.join(known.targets)}"
            flags = f"--src {','.join(known.sources)} --tgt {','.join(known.targets)}"
            return (
                f"the test set is read from {sides}, but {translator.folder} translates from {direction}; give {flags}"
            )
    problem = translator.describe_wrong_language(test_set.sources[:MAX_CHECKED_LINES])
    mismatch = known.find_mismatch(test_set.references[:MAX_CHECKED_LINES], known.targets)
    if problem and mismatch:
        return f"{test_set.name}: the two sides look swapped, exchange them: of the sources, {problem}"
    if problem:
        return f"{test_set.name}: of the sources, {problem}"
    if mismatch:
        targets = ", ".join(known.targets)
        return f"{test_set.name}: of the references, {mismatch}, but {translator.folder} translates into {targets}"
    return None


def group_languages(test_set: TestSet, tags: tuple[str, ...], folder: Path) -> LanguageGroups:
    languages = [language if tags else None for language in test_set.languages]
    tag_by_language = {language: find_language_tag(language, tags, folder) for language in dict.fromkeys(languages)}
    return [(tag, [i for i, other in enumerate(languages) if other == name]) for name, tag in tag_by_language.items()]


def find_language_tag(language: str | None, tags: tuple[str, ...], folder: Path) -> str | None:
    try:
        return resolve_target_lang(language, tags, folder)
    except InputError as error:
        raise ScoreError(str(error).replace("--to", "--tgt")) from error


# ---- the search in words ---------------------------------------------------------------------------------------------


def search_to_dict(options: ScoreOptions, dtype: str) -> dict[str, Any]:
    ensemble = [str(folder) for folder in options.ensemble]
    device = {"engine": options.device.engine, "dtype": dtype, "ensemble": ensemble}
    return {**asdict(options.search), "formula": options.search.score_formula, **device}


# Options that the first words of the description tell, or that the caller sets.
DESCRIBED_OPTIONS = {
    "beam_size", "n_best", "length_penalty", "length_penalty_type", "max_length", "sampling", "rank_truncated_equally",
}  # fmt: skip


def describe_search(
    options: ScoreOptions, dtype: str, default_limit: str = f"source + {MAX_EXTRA_TOKENS} tokens"
) -> str:
    """`beam 4, score = log_prob / length^alpha, alpha = 0.6, at most source + 50 tokens, min_length 2`"""
    search = options.search
    method = "greedy" if search.beam_size == 1 else f"beam {search.beam_size}"
    if search.sampling:
        method = f"sampling ({', '.join(f'{name} {value:g}' for name, value in asdict(search.sampling).items())})"
    limit = default_limit if search.max_length is None else f"{search.max_length:,} tokens"
    changed = [field.name for field in fields(search) if getattr(search, field.name) != field.default]
    parts = [
        method,
        search.score_formula,
        f"at most {limit}",
        *(f"{name} {getattr(search, name)}" for name in changed if name not in DESCRIBED_OPTIONS),
        f"engine {options.device.engine}" if options.device.engine else "",
        dtype if dtype != "float32" else "",
        *(f"with {folder}" for folder in options.ensemble),
    ]
    return ", ".join(filter(None, parts))
