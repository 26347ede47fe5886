"""Synthetic training pairs: a model translates the text of one side, and the result is an ordinary corpus.

Back-translation makes sources for text in the target language (Sennrich et al. 2016), tagged so that the model can tell
them from human ones (Caswell et al. 2019). Self-training makes targets for text in the source language. Sequence-level
distillation replaces the targets of the training pairs (Kim and Rush 2016), by the hypothesis closest to the old one.

The files are in `state/data/synthetic`. Each block of translations is appended and synced to disk, so that a killed run
translates only what is missing.
"""

import gc
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice, starmap
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from attent import settings
from attent.data.corpus import Corpus, open_corpora
from attent.data.file_hashes import hash_file
from attent.data.filters import FilterConfig, PairFilter
from attent.data.formats.jsonl import ROLE_KEYS
from attent.data.pairs import LanguagePair, Pair
from attent.data.process_pool import count_free_workers, map_in_order
from attent.data.split import hash_folded_texts
from attent.data.text_corpus import find_text_files, read_texts
from attent.data.token_store import identify_corpus
from attent.decoding.engines.gpu.eligibility import drop_cached_searches
from attent.decoding.input_lines import LineSource
from attent.decoding.loading import resolve_target_lang
from attent.decoding.options import SamplingOptions, SearchOptions
from attent.decoding.output_format import OutputFormat
from attent.decoding.pipeline import TranslationPipeline, iterate_translated_blocks
from attent.decoding.quality import compute_pairwise_chrf
from attent.decoding.translator import Translator
from attent.formatting import format_count
from attent.models import Seq2Seq
from attent.storage.atomic import atomic_path
from attent.storage.hub import locate_model
from attent.storage.manifest import MANIFEST_FILE
from attent.text.language_tags import is_same_language
from attent.training.config import DataConfig, TrainError
from attent.training.run_options import SyntheticConfig
from attent.training.tasks.base import RunContext, hash_files

BACK_TRANSLATION_TAG = "<BT>"  # begins a synthetic source; one token in a tokenizer that is trained for it
FOLDER, HASHES_FILE = "synthetic", "hashes.json"  # in `state/data`
CHUNK_TEXTS = 1_000  # whose hypotheses are compared with their references in one task of a worker
MAX_SERIAL_TEXTS = 20_000
IMPOSSIBLE_LOG_PROB = -100.0
LANGUAGE_SAMPLE_SIZE = 2_000


class Candidate(NamedTuple):
    """A translation as it is stored."""

    text: str
    log_prob: float  # per token
    is_finished: bool


@dataclass(frozen=True, kw_only=True)
class SyntheticSummary:
    """How the pairs were made, for the model card."""

    pairs_file: str
    key: str  # a hash of the text, the models, the options and the texts that are excluded
    description: str  # "translated back by runs/de-en, beam 4"
    dropped: dict[str, int]  # by reason
    files: list[list[str]]  # of the text: name, SHA-256


@dataclass(frozen=True, kw_only=True)
class SyntheticCorpus(Corpus):
    summary: SyntheticSummary

    @property
    def file_names(self) -> tuple[str, ...]:
        """Names that do not depend on the folder of the run."""
        return (self.summary.pairs_file,)


class JobKeys(NamedTuple):
    """Hashes of all that determines the translations of a job, and of all that determines its pairs."""

    translations: str
    pairs: str


@dataclass(frozen=True, kw_only=True)
class TranslationJob:
    """A text to translate, and what makes pairs of its translations."""

    text: Corpus | tuple[str, ...]  # pairs, whose targets are references, or names of text files
    models: tuple[str, ...]  # several: an ensemble
    languages: LanguagePair  # from that of the text to that of its translation
    options: SearchOptions
    filters: FilterConfig
    drop_share: float = 0.0
    is_target: bool = False  # the text becomes the targets, and its translations the sources
    weight: float = 1.0

    @property
    def name(self) -> str:
        return self.text.name if isinstance(self.text, Corpus) else ", ".join(Path(name).name for name in self.text)

    @property
    def description(self) -> str:
        best = f"closest to the reference of {self.options.n_best}, " if self.options.n_best > 1 else ""
        search = "sampled" if self.options.sampling else f"{best}beam {self.options.beam_size}"
        return f"translated {'back ' if self.is_target else ''}by {', '.join(self.models)}, {search}"

    def list_files(self) -> list[Path]:
        if isinstance(self.text, Corpus):
            return [Path(path) for path, *_ in self.text.fingerprint()]
        return [*find_text_files(self.text).train]

    def read_texts(self) -> dict[str, str]:
        """Each text once, with its reference or ""."""
        if isinstance(self.text, Corpus):
            texts = {pair.source: pair.target for pair in self.text if isinstance(pair, Pair)}
        else:
            texts = dict.fromkeys(read_texts(self.list_files(), "lines").texts, "")
        # Each as one line that can be written as UTF-8.
        lines = {text: text.strip().replace("\n", " ").encode(errors="replace").decode() for text in texts}
        cleaned = {lines[text]: reference for text, reference in texts.items() if text.strip()}
        if not cleaned:
            raise TrainError(f"{self.name}: there is no text to translate; give another")
        return cleaned

    def compute_keys(self, held_out: Sequence[Corpus], root: Path) -> JobKeys:
        models = [hash_model(locate_model(model), root) for model in self.models]
        if isinstance(self.text, Corpus):
            content: object = identify_corpus(self.text, root)
        else:
            content = [hash_file(path, root / HASHES_FILE) for path in self.list_files()]
        translated = (content, models, self.languages, self.options)
        chosen = (self.name, self.models, self.filters, self.drop_share, self.is_target)
        excluded = [identify_corpus(corpus, root) for corpus in held_out]
        inputs = translated, (translated, chosen, excluded)
        return JobKeys(*(hashlib.sha256(repr(each).encode()).hexdigest()[:24] for each in inputs))


def add_synthetic_corpora(
    config: DataConfig, train: list[Corpus], held_out: Sequence[Corpus], seed: int, context: RunContext
) -> list[Corpus]:
    """Return the training corpora, their targets replaced if requested, and those made from monolingual text."""
    if config.synthetic is None:
        return train
    root = context.data_dir / FOLDER
    root.mkdir(parents=True, exist_ok=True)
    jobs = enumerate(_plan_jobs(config, config.synthetic, train, seed))
    made: list[Corpus] = [make_corpus(job, root / f"{number}.json", held_out, context) for number, job in jobs]
    return made if config.synthetic.replace_targets else [*train, *made]


def _plan_jobs(
    config: DataConfig, options: SyntheticConfig, train: Sequence[Corpus], seed: int
) -> Iterator[TranslationJob]:
    job = partial(TranslationJob, filters=config.filters, drop_share=options.drop_share, weight=options.mono_weight)
    languages = LanguagePair(config.src, config.tgt)
    has_text = options.mono_source or options.mono_target
    if has_text and (languages.is_open or any("," in tag for tag in languages.tags)):
        raise TrainError("text in one language needs one source and one target language; give --src and --tgt")
    for corpus in train if options.replace_targets else ():
        search, weight = SearchOptions(n_best=options.n_best), corpus.weight
        yield job(text=corpus, models=options.forward, languages=corpus.languages, options=search, weight=weight)
    search = SearchOptions()
    if options.mono_source:
        yield job(text=options.mono_source, models=options.forward, languages=languages, options=search)
    if options.mono_target:
        job = partial(job, text=options.mono_target, models=options.reverse, languages=languages.swap(), is_target=True)
        if options.mono_sampling:  # for the sake of unlikely sources
            yield job(options=SearchOptions(beam_size=1, sampling=SamplingOptions(seed=seed)), drop_share=0.0)
        else:
            yield job(options=search)


def make_corpus(job: TranslationJob, record: Path, held_out: Sequence[Corpus], context: RunContext) -> SyntheticCorpus:
    """Return the corpus of a job, which a run makes once: a run with a checkpoint needs neither text nor model."""
    summary = SyntheticSummary(**settings.read_json(record)) if record.exists() else None
    if summary is None or context.is_new:
        keys = job.compute_keys(held_out, record.parent)
        if summary is None or summary.key != keys.pairs:
            summary = build_pairs(job, held_out, record.parent, keys, context)
            settings.write_json(asdict(summary), record)
    languages = job.languages.swap() if job.is_target else job.languages
    (corpus,) = open_corpora([str(record.with_name(summary.pairs_file))], languages)
    fields = {**vars(corpus), "name": f"{job.name} ({summary.description})", "weight": job.weight}
    return SyntheticCorpus(**fields, summary=summary)


def hash_model(folder: Path, root: Path) -> list[str]:
    """Hash the manifest, which has the hash of each file that matters, or all files of another tool's folder."""
    manifest = folder / MANIFEST_FILE
    files = [manifest] if manifest.exists() else sorted(path for path in folder.iterdir() if path.is_file())
    return [hash_file(path, root / HASHES_FILE) for path in files]


def build_pairs(
    job: TranslationJob, held_out: Sequence[Corpus], root: Path, keys: JobKeys, context: RunContext
) -> SyntheticSummary:
    """Translate the text of a job, choose and filter the pairs, and write them."""
    texts, references = map(list, zip(*job.read_texts().items(), strict=True))
    translations, pairs = root / f"{keys.translations}.translations.jsonl", root / f"{keys.pairs}.jsonl"
    done = count_complete_lines(translations)
    if done < len(texts):
        resumed = f", resumed after {done:,}" if done else ""
        context.note(f"{job.name}: {format_count(len(texts), 'sentence')}, {job.description}{resumed} ...")
        translate_missing(job, texts, done, translations, context)
        gc.collect()
        if torch.cuda.is_available():  # training needs the memory
            torch.cuda.empty_cache()
    with open(translations, "rb") as lines:
        starts = range(0, len(texts), CHUNK_TEXTS)
        chunks = ((list(islice(lines, CHUNK_TEXTS)), references[start : start + CHUNK_TEXTS]) for start in starts)
        is_long = job.options.n_best > 1 and len(texts) > MAX_SERIAL_TEXTS
        workers = count_free_workers()
        results = map_in_order(choose_closest, chunks, workers) if is_long else starmap(choose_closest, chunks)
        chosen = list(chain.from_iterable(results))
    dropped = Counter[str]()
    with atomic_path(pairs) as temporary, open(temporary, "wb") as file:
        for text, candidate, reason in zip(texts, chosen, find_drop_reasons(job, texts, chosen, held_out), strict=True):
            if reason is not None:
                dropped[reason] += 1
                continue
            pair = (f"{BACK_TRANSLATION_TAG} {candidate.text}", text) if job.is_target else (text, candidate.text)
            file.write((json.dumps(dict(zip(ROLE_KEYS[0], pair, strict=True)), ensure_ascii=False) + "\n").encode())
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.most_common())
    context.note(
        f"{job.name}: {len(texts) - dropped.total():,} synthetic pairs" + (f"; dropped: {reasons}" if reasons else "")
    )
    return SyntheticSummary(
        pairs_file=pairs.name,
        key=keys.pairs,
        description=job.description,
        dropped=dict(dropped),
        files=[list(item) for item in hash_files([path.name for path in job.list_files()], job.list_files())],
    )


def count_complete_lines(path: Path) -> int:
    """Count the translations of a run that was killed, and cut off a line that is not complete."""
    path.touch()
    with open(path, "rb+") as file:
        sizes = [len(line) for line in file if line.endswith(b"\n")]
        file.truncate(sum(sizes))
    return len(sizes)


def translate_missing(job: TranslationJob, texts: Sequence[str], done: int, path: Path, context: RunContext) -> None:
    """Append the candidates of each text after the first `done`, a line for each."""
    source, target = job.languages.source, job.languages.target
    translator = Translator.load(*job.models, src=source, tgt=target, device=context.device, notify=context.note)
    if problem := translator.describe_wrong_language(texts[:LANGUAGE_SAMPLE_SIZE]):
        context.warn(problem)
    tags = translator.tokenizer.source.tags
    to = resolve_target_lang(target if tags else None, tags, Path(job.models[0]))
    output = OutputFormat(type="json", n_best=job.options.n_best)
    pipeline = TranslationPipeline(translator=translator, options=job.options, to=to, output_format=output)
    model_source, model_target = pipeline.languages
    for requested, known in ((source, model_source), (target, None if to else model_target)):
        if requested and known and not is_same_language(requested, known):
            actual = f"{model_source or '?'} to {model_target or '?'}"
            problem = f"must translate {source} to {target}, but translates {actual}; give another model"
            raise TrainError(f"{job.models[0]}: {problem}")
    content = "\n".join(texts[done:]).replace("\0", "").encode()
    lines = LineSource(
        name=job.name, chunks=[content], has_more=lambda: True, total_bytes=len(content), first_index=done
    )
    report = context.track_progress(f"translating {job.name}", "sentences", len(texts))
    with open(path, "ab") as file, closing(iterate_translated_blocks(pipeline, lines)) as blocks:
        for block, (text, _, error) in blocks:
            if error is not None:
                raise TrainError(error)
            file.writelines(encode_candidates(line) for line in text.removesuffix("\n").split("\n"))
            file.flush()
            os.fsync(file.fileno())
            done += len(block.lines)
            report(done)
    if isinstance(translator.model, Seq2Seq):
        drop_cached_searches(translator.model)


def encode_candidates(line: str) -> bytes:
    """Shorten a line of JSON output to its candidates."""
    fields = json.loads(line)
    candidates = []
    for each in fields.get("n_best", [fields]):
        log_prob = IMPOSSIBLE_LOG_PROB if each["log_prob"] is None else each["log_prob"]
        per_token = round(log_prob / max(1, len(each["tokens"]) + each["finished"]), 4)
        candidates.append(Candidate(each["hyp"], per_token, each["finished"]))
    return (json.dumps(candidates, ensure_ascii=False) + "\n").encode()


def choose_closest(lines: Sequence[bytes], references: Sequence[str]) -> list[Candidate]:
    """Choose the candidate of each line with the highest chrF to its reference; the first of equally good ones."""
    chosen = []
    for line, reference in zip(lines, references, strict=True):
        candidates = json.loads(line)
        texts = [text for text, *_ in candidates]
        best = int(compute_pairwise_chrf([*texts, reference])[:-1, -1].argmax()) if len(texts) > 1 else 0
        chosen.append(Candidate(*candidates[best]))
    return chosen


def find_drop_reasons(
    job: TranslationJob, texts: Sequence[str], chosen: Sequence[Candidate], held_out: Sequence[Corpus]
) -> Iterator[str | None]:
    """Yield why each pair is not used, or None: the filters of a corpus, and those of translations."""
    sample = [Pair(text, candidate.text, "", 0) for text, candidate in zip(texts, chosen, strict=True)]
    pair_filter = PairFilter.from_sample(job.filters, job.languages, sample)
    min_log_prob = float(np.quantile([candidate.log_prob for candidate in chosen], job.drop_share))
    pairs = (entry for corpus in held_out for entry in corpus if isinstance(entry, Pair))
    excluded = hash_folded_texts([side for pair in pairs for side in (pair.source, pair.target)] or [""])
    is_excluded = np.isin(hash_folded_texts(texts), excluded)
    for text, candidate, is_held_out in zip(texts, chosen, is_excluded, strict=True):
        if is_held_out:
            yield "validation or test text"
        elif not candidate.is_finished:
            yield "unfinished"
        elif candidate.log_prob < min_log_prob:
            yield "low probability"
        else:
            yield pair_filter.drop_reason(text, candidate.text)
