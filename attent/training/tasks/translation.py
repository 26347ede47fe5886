"""`--task translate`: an encoder-decoder on pairs of texts, with the data of `translation_data`."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from attent.data.corpus import Corpus
from attent.data.encode import learn_languages
from attent.data.token_store import CorpusPart
from attent.decoding.alignment import AlignmentError, save_measured_selection, select_by_agreement
from attent.decoding.options import MAX_EXTRA_TOKENS, SearchOptions
from attent.decoding.translator import Translator, translate_texts
from attent.inspection import head_stats
from attent.interop import load_as
from attent.models import Seq2Seq, Seq2SeqConfig, presets
from attent.models.folder import write_side_settings
from attent.scoring.metrics import DEFAULT_METRIC, SELECTION_METRICS, make_metric
from attent.storage.errors import AttentError
from attent.storage.hub import locate_model
from attent.text.language_id import LANGUAGES_FILE
from attent.text.tokenizer import Tokenizer
from attent.training import autoconfig
from attent.training.config import TASK_SETTINGS, RunConfig, Size, TrainConfig, UserSettings
from attent.training.objective import Seq2SeqObjective
from attent.training.synthetic_pairs import SyntheticCorpus
from attent.training.tasks import base, translation_data
from attent.training.tasks.generation_task import EvalSet, GenerationTask
from attent.training.tasks.translation_data import SAMPLE_FILE, encode_sample, read_eval_set

SCORED_BLOCK = {"cpu": 256, "cuda": 4_096}  # sentences between two progress notes


class TranslationTask(GenerationTask):
    objective_class = Seq2SeqObjective
    unit, source_noun = "pair", "sentences"
    metrics = (DEFAULT_METRIC, *(name for name in SELECTION_METRICS if name != DEFAULT_METRIC), "loss")
    used_settings = TASK_SETTINGS - {"data.images", "data.audio", "train.ctc"}

    def __init__(self, run: RunConfig, tokenizer: Tokenizer | None, context: base.RunContext) -> None:
        self.prepared = translation_data.prepare_data(run, tokenizer, context)
        self.tokenizer: Tokenizer = self.prepared.tokenizer
        self.context, splits = context, self.prepared.splits
        self.is_held_out = splits.held_out
        self.validation, self.replay_validation = (
            read_eval_set(corpora, splits.use_tags, "validation") if corpora else None
            for corpora in (splits.valid, splits.replay_valid)
        )
        self.tests = [read_eval_set([corpus], splits.use_tags, "test") for corpus in splits.tests]
        if run.train.metric in SELECTION_METRICS:  # report a missing package or language before training
            texts = self.validation
            make_metric(run.train.metric, texts and texts.language, texts.references if texts else ())
        texts = [corpus for corpus in splits.train if not isinstance(corpus, SyntheticCorpus)]  # without a tag
        languages = learn_languages(texts or splits.train)
        self.extra_files = {} if languages is None else {LANGUAGES_FILE: languages.to_bytes()}
        if run.data.store_sample:
            sample = encode_sample(splits.train, run.data.store_sample, run.train.seed)
            self.extra_files[SAMPLE_FILE] = sample

    @property
    def title(self) -> str:
        languages = self.prepared.splits.languages
        return "-".join(filter(None, (languages.source, languages.target)))

    @property
    def fingerprints(self) -> Mapping[str, str]:
        return {"data": self.prepared.store.folder.name, "tokenizer": self.tokenizer.fingerprint}

    @classmethod
    def placeholder_config(cls, vocab: int, requested: Mapping[str, Any]) -> Seq2SeqConfig:
        return presets.ARCHS[requested.get("arch", "transformer")](vocab, "tiny")

    def choose_model(self, run: RunConfig, requested: UserSettings) -> tuple[Size, Seq2SeqConfig, str]:
        device = self.context.device.type
        return autoconfig.choose_model(run, requested, self.prepared.data_size, self.tokenizer, device)

    def fill_train_config(self, run: RunConfig) -> TrainConfig:
        assert isinstance(run.model, Seq2SeqConfig)
        data_size, device, finetune = self.prepared.data_size, self.context.device, run.init_from is not None
        return autoconfig.fill_train_config(run.train, run.size, run.model, data_size, device, finetune=finetune)

    def describe_choices(self, run: RunConfig, size_reason: str) -> Iterator[str]:
        yield autoconfig.describe_model(run, size_reason)
        num_batches = autoconfig.count_batches(run.train, self.prepared.data_size)
        yield from autoconfig.describe_schedule(run.train, num_batches, "greedy")
        if rates := run.data.augment_rates:
            yield f"augmentation: {', '.join(rates)} (--augment none: off)"

    def build_train_batches(self, run: RunConfig) -> base.BatchLoader:
        return translation_data.build_train_batches(self.prepared, run.data, run.train)

    def build_valid_batches(self, run: RunConfig) -> base.BatchLoader | None:
        store = self.prepared.valid_store
        return None if store is None else translation_data.build_valid_batches(store, run.data.max_tokens)

    def build_eval_set(self, data: EvalSet, split: base.Split) -> EvalSet:
        return data

    @property
    def validations(self) -> list[EvalSet]:
        """Those of the new and of the general text: the best model is the one with the best mean of both scores."""
        return [examples for examples in (self.validation, self.replay_validation) if examples is not None]

    def score_model(self, model: Seq2Seq, run: RunConfig) -> Iterator[base.FinalScores]:
        """Score the model, and with general text the model before fine-tuning too."""
        yield from super().score_model(model, run)
        if not self.prepared.splits.has_replay or run.init_from is None:
            return
        try:
            before = load_as(locate_model(run.init_from), Seq2Seq).to(self.context.device)
        except (AttentError, OSError) as error:
            self.context.warn(f"the scores before fine-tuning are missing: {error}")
            return
        for scores in super().score_model(before, run):
            yield replace(scores, name=f"{scores.name}, before", weights=run.init_from)

    def estimate_scoring_seconds(self, model: Seq2Seq, run: RunConfig) -> float:
        return super().estimate_scoring_seconds(model, run) * (2 if self.prepared.splits.has_replay else 1)

    def search_texts(
        self, model: Seq2Seq, examples: EvalSet, run: RunConfig, options: SearchOptions
    ) -> Iterator[dict[int, str]]:
        block_size = SCORED_BLOCK.get(self.context.device.type, 256)
        for language in dict.fromkeys(examples.languages):
            indices = [i for i, other in enumerate(examples.languages) if other == language]
            for start in range(0, len(indices), block_size):
                block = indices[start : start + block_size]
                translations = translate_texts(
                    model,
                    self.tokenizer,
                    [examples.titles[i] for i in block],
                    to=language if self.prepared.splits.use_tags else None,
                    beam_size=options.beam_size,
                    length_penalty=options.length_penalty,
                    should_stop=self.context.should_stop,
                )
                yield dict(zip(block, translations, strict=True))

    def compute_max_tokens(self, examples: EvalSet) -> float:
        return sum(map(len, self.tokenizer.encode_source(examples.titles))) / len(examples) + MAX_EXTRA_TOKENS

    def write_analysis(self, model: Seq2Seq, out: Path) -> None:
        """Select the heads that align best (for `translate --alignment`), and measure what each does (for `look`)."""
        texts = self.validation
        if texts is None:
            return
        self.context.note("measuring the attention heads ...")
        first = texts.select([i for i, language in enumerate(texts.languages) if language == texts.languages[0]])
        sources, references = first.titles, [str(reference) for reference in first.references]
        to = first.language if self.prepared.splits.use_tags else None
        with suppress(AlignmentError):  # pairs without words
            save_measured_selection(out, select_by_agreement(model, self.tokenizer, sources, references, to=to))
        translator, pairs = Translator(model, self.tokenizer), zip(sources, references, strict=True)
        stats = head_stats.measure_heads(translator, pairs, to=to, dataset="the validation pairs")
        write_side_settings(out, head_stats.HEAD_STATS_FILE, stats)

    def describe_data(self) -> base.DataSummary:
        store, splits, valid = self.prepared.store, self.prepared.splits, self.prepared.valid_store
        corpora = [describe_corpus(corpus, part) for corpus, part in zip(splits.train, store.meta.parts, strict=True)]
        method = "" if valid is None else ", ".join(file for corpus in splits.valid for file in corpus.file_names)
        if splits.held_out:
            method = "selected by a hash of the source; pairs that share a side with one of them were not trained on"
        return base.DataSummary(
            corpora=tuple(corpora),
            source_tokens=store.meta.token_counts["source"],
            target_tokens=store.meta.token_counts["target"],
            data_key=store.folder.name,
            num_held_out=0 if valid is None else len(valid),
            held_out_method=method,
        )

    def describe_model(self, out: Path) -> base.ModelDescription:
        splits, tags = self.prepared.splits, self.tokenizer.source.tags
        # An example for --to; "" where the tokenizer has tags that this model was not trained with.
        tag = None if not tags else splits.train[0].languages.target if splits.use_tags else ""
        next_step = f"try it: attent translate {out}" + (f" --to {tag}" if tag else "")
        return describe_translator(str(out), splits.languages.source, splits.languages.target, tag, next_step)


def describe_translator(
    folder: str, source: str | None, target: str | None, target_tag: str | None, next_step: str = ""
) -> base.ModelDescription:
    """`target_tag` is an example for `--to`; None where there is only one target language."""
    flag = "" if target_tag is None else f" --to {shlex.quote(target_tag)}"
    to = f", to={target_tag!r}" if target_tag else ""
    return base.ModelDescription(
        title=f"{source}-{target} translator" if source and target else "A text-to-text model",
        shell_example=f"attent translate {shlex.quote(folder)}{flag} < input.txt > output.txt",
        python_example=base.build_python_example("Translator", folder, f'("..."{to})'),
        next_step=next_step,
        note="Exact is the share of outputs that equal the reference.",
        samples_title="Sample translations",
        has_two_sides=True,
    )


def describe_corpus(corpus: Corpus, part: CorpusPart) -> base.CorpusStats:
    summary = corpus.summary if isinstance(corpus, SyntheticCorpus) else None
    dropped = Counter(part.dropped) + Counter(summary.dropped if summary else {})
    files = base.hash_files(corpus.file_names, [file.path for file in corpus.input_files if file.path])
    return base.CorpusStats(
        name=part.name,
        num_read=part.pairs + dropped.total(),
        num_used=part.pairs,
        dropped=tuple(dropped.items()),
        files=(*((name, digest) for name, digest in (summary.files if summary else ())), *files),
        weight=corpus.weight,
    )
