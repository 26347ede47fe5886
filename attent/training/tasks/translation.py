"""`--task translate`: an encoder-decoder model on pairs of texts, evaluated by translating.

The data are prepared in `translation_data`; defaults are chosen by `attent.training.autoconfig`.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from attent.data.corpus import Corpus
from attent.data.encode import learn_languages
from attent.decoding.alignment import AlignmentError, save_measured_selection, select_by_agreement
from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.options import MAX_EXTRA_TOKENS
from attent.decoding.translator import translate_texts
from attent.inspection import head_stats
from attent.models import Seq2Seq, Seq2SeqConfig, build, build_empty, presets
from attent.models.weights import assign_weights
from attent.nn.eval_mode import eval_mode
from attent.scoring.metrics import DEFAULT_METRIC, SELECTION_METRICS, format_metrics, make_metric, score_corpus
from attent.text.language_id import LANGUAGES_FILE
from attent.text.tokenizer import Tokenizer
from attent.training import autoconfig
from attent.training.config import RunConfig, Size, TrainConfig, UserSettings
from attent.training.objective import Seq2SeqObjective
from attent.training.stop_signals import StopRequested
from attent.training.tasks import base, translation_data
from attent.training.tasks.translation_data import EvalTexts, read_eval_texts

NUM_SAMPLES, NUM_CARD_SAMPLES = 3, 5
SCORED_BLOCK = {"cpu": 64, "cuda": 4_096}  # sentences between two progress notes
NUM_TIMED_SENTENCES = 16  # to estimate the time of the final scores


class TranslationTask(base.Task):
    model_class = Seq2Seq
    config_class = Seq2SeqConfig
    objective_class = Seq2SeqObjective
    unit = "pair"
    metrics = (DEFAULT_METRIC, *(name for name in SELECTION_METRICS if name != DEFAULT_METRIC), "loss")
    used_settings = frozenset(
        {
            "arch", "data.src", "data.tgt", "data.tags", "data.subword_sampling", "data.too_long", "data.filters",
            "data.read_options", "data.tokenizer", "data.tokenizer.joint", "data.max_tokens", "data.layout",
            "train.rdrop", "train.valid_sentences", "decode",
        }
    )  # fmt: skip
    cpu_minutes = autoconfig.CPU_MINUTES

    def __init__(self, run: RunConfig, tokenizer: Tokenizer | None, context: base.RunContext) -> None:
        self.prepared = translation_data.prepare_data(run, tokenizer, context)
        self.tokenizer: Tokenizer = self.prepared.tokenizer
        self.context = context
        if run.train.metric in SELECTION_METRICS:  # report a missing package or language before training
            make_metric(run.train.metric, self.valid_texts.language, self.valid_texts.references)
        languages = learn_languages(self.prepared.splits.train)
        self.extra_files = {} if languages is None else {LANGUAGES_FILE: languages.to_bytes()}

    @property
    def title(self) -> str:
        languages = self.prepared.splits.languages
        return "-".join(filter(None, (languages.source, languages.target)))

    @property
    def fingerprints(self) -> Mapping[str, str]:
        return {"data": self.prepared.store.folder.name, "tokenizer": self.tokenizer.fingerprint}

    @cached_property
    def valid_texts(self) -> EvalTexts:
        return read_eval_texts(self.prepared.splits.valid, self.prepared.splits.use_tags)

    @classmethod
    def placeholder_config(cls, vocab: int, requested: Mapping[str, Any]) -> Seq2SeqConfig:
        return presets.ARCHS[requested.get("arch", "transformer")](vocab, "tiny")

    def choose_model(self, run: RunConfig, requested: UserSettings) -> tuple[Size, Seq2SeqConfig, str]:
        device = self.context.device.type
        return autoconfig.choose_model(run, requested, self.prepared.data_size, self.tokenizer, device)

    def build_finetune_config(self, model: Seq2Seq, requested: UserSettings, origin: str) -> Seq2SeqConfig:
        sizes = (self.tokenizer.source.size, self.tokenizer.target.size)
        return autoconfig.build_finetune_config(model.config, requested, sizes, origin)

    def build_model(self, config: Seq2SeqConfig, pretrained: Seq2Seq | None) -> Seq2Seq:
        if pretrained is None:
            return build(config)
        return assign_weights(build_empty(config), pretrained.state_dict(), "--from").train()

    def fill_train_config(
        self, run: RunConfig, size: Size | None, config: Seq2SeqConfig, *, finetune: bool
    ) -> TrainConfig:
        data_size, device = self.prepared.data_size, self.context.device
        return autoconfig.fill_train_config(run.train, size, config, data_size, device, finetune=finetune)

    def describe_choices(self, run: RunConfig, size_reason: str) -> Iterator[str]:
        return autoconfig.describe_choices(run, size_reason, self.prepared.data_size)

    def build_train_batches(self, run: RunConfig) -> base.BatchLoader:
        return translation_data.build_train_batches(self.prepared, run.data, run.train)

    def build_valid_batches(self, run: RunConfig) -> base.BatchLoader | None:
        store = self.prepared.valid_store
        return None if store is None else translation_data.build_valid_batches(store, run.data.max_tokens)

    def build_evaluator(self, run: RunConfig) -> base.Evaluator | None:
        """Translate a part of the validation set greedily."""
        splits = self.prepared.splits
        if self.prepared.valid_store is None or not run.train.valid_sentences:
            return None
        texts = read_eval_texts(splits.valid, splits.use_tags, run.train.valid_sentences)

        def evaluate(model: Seq2Seq) -> base.EvalResult:
            outputs = self.translate(model, texts, beam_size=1, length_penalty=0.0)
            scores = score_corpus(outputs, texts.references, texts.language, run.train.metric)
            samples = base.select_samples(texts.sources, texts.references, outputs, NUM_SAMPLES)
            return base.EvalResult(metrics=scores.metrics, samples=samples)

        return evaluate

    def translate(
        self, model: Seq2Seq, texts: EvalTexts, *, beam_size: int, length_penalty: float, action: str = ""
    ) -> list[str]:
        """Translate the sources; with an `action`, in blocks, whose progress is reported."""
        outputs = [""] * len(texts.sources)
        report = self.context.track_progress(action, "sentences", len(outputs))
        num_done = 0
        for language in dict.fromkeys(texts.target_languages):
            indices = [i for i, other in enumerate(texts.target_languages) if other == language]
            block_size = SCORED_BLOCK.get(self.context.device.type, 256) if action else len(indices)
            for start in range(0, len(indices), block_size):
                block = indices[start : start + block_size]
                try:
                    translations = translate_texts(
                        model,
                        self.tokenizer,
                        [texts.sources[i] for i in block],
                        to=language,
                        beam_size=beam_size,
                        length_penalty=length_penalty,
                        should_stop=self.context.should_stop,
                    )
                except SearchCancelled as cancelled:
                    raise StopRequested from cancelled
                for i, text in zip(block, translations, strict=True):
                    outputs[i] = text
                num_done += len(block)
                report(num_done)
        return outputs

    def score_model(self, model: Seq2Seq, run: RunConfig) -> Iterator[base.FinalScores]:
        splits = self.prepared.splits
        if splits.valid:
            yield self.score_texts(model, self.valid_texts, "validation", run)
        for corpus in splits.tests:
            yield self.score_texts(model, read_eval_texts([corpus], splits.use_tags), "test", run)

    def estimate_scoring_seconds(self, model: Seq2Seq, run: RunConfig) -> float:
        splits, store = self.prepared.splits, self.prepared.store
        corpora = [*splits.valid, *splits.tests]
        num_sentences = len(read_eval_texts(corpora, splits.use_tags).sources)
        texts = read_eval_texts(corpora, splits.use_tags, NUM_TIMED_SENTENCES)
        if not texts.sources:
            return 0.0
        start = time.monotonic()
        with eval_mode(model):
            self.translate(model, texts, beam_size=run.decode.beam_size, length_penalty=run.decode.length_penalty)
        seconds = (time.monotonic() - start) * num_sentences / len(texts.sources)
        # An untrained model generates as many tokens as it may, not as many as a translation has.
        source, target = (store.meta.token_counts[side] / len(store) for side in ("source", "target"))
        return seconds * min(1.0, target / (source + MAX_EXTRA_TOKENS))

    def score_texts(self, model: Seq2Seq, texts: EvalTexts, split: base.Split, run: RunConfig) -> base.FinalScores:
        beam_size, length_penalty = run.decode.beam_size, run.decode.length_penalty
        action = f"scoring {split} {texts.name}"
        outputs = self.translate(model, texts, beam_size=beam_size, length_penalty=length_penalty, action=action)
        scores = score_corpus(outputs, texts.references, texts.language, run.train.metric)
        return base.FinalScores(
            name=texts.name,
            split=split,
            num_examples=len(outputs),
            metrics=scores.metrics,
            summary=f"{format_metrics(scores.metrics, digits=2)} ({len(outputs):,} sentences, beam {beam_size})",
            decoding=f"beam {beam_size}, length penalty {length_penalty:g}",
            signatures=scores.signatures,
            samples=base.select_samples(texts.sources, texts.references, outputs, NUM_CARD_SAMPLES),
        )

    def write_analysis(self, model: Seq2Seq, out: Path) -> None:
        """Select the heads that align best on the validation pairs (for `translate --alignment`), and measure what each
        head does (for `look`)."""
        if not self.prepared.splits.valid:
            return
        texts = self.valid_texts
        self.context.note("measuring the attention heads ...")
        language = texts.target_languages[0]
        indices = [i for i, other in enumerate(texts.target_languages) if other == language]
        sources, references = ([side[i] for i in indices] for side in (texts.sources, texts.references))
        with suppress(AlignmentError):  # pairs without words
            selection = select_by_agreement(model, self.tokenizer, sources, references, to=language)
            save_measured_selection(out, selection)
        stats = head_stats.measure_heads(
            model, self.tokenizer, sources, references, to=language, dataset="the validation pairs"
        )
        head_stats.save_head_stats(out, stats)

    def describe_data(self) -> base.DataSummary:
        store, splits, valid = self.prepared.store, self.prepared.splits, self.prepared.valid_store
        corpora = [
            base.CorpusStats(
                name=part.name,
                num_read=part.pairs + sum(part.dropped.values()),
                num_used=part.pairs,
                dropped=tuple(part.dropped.items()),
                files=list_files(corpus),
                weight=corpus.weight,
            )
            for corpus, part in zip(splits.train, store.meta.parts, strict=True)
        ]
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
        tag = None if not tags else tags[0] if splits.use_tags else ""
        flag = f" --to {splits.train[0].languages.target}" if splits.use_tags else ""
        next_step = f"try it: attent translate {out}{flag}"
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
        python_example=base.build_python_example("Translator", folder, f'translate(["..."]{to})[0].text'),
        next_step=next_step,
        note="Exact is the share of outputs that equal the reference.",
        samples_title="Sample translations",
        has_two_sides=True,
    )


def list_files(corpus: Corpus) -> tuple[tuple[str, str], ...]:
    """The files with checksums; without, if one has disappeared since it was read."""
    try:
        return base.hash_files(corpus.file_names, [Path(path) for path, *_ in corpus.fingerprint()])
    except OSError:
        return tuple((name, "") for name in corpus.file_names)
