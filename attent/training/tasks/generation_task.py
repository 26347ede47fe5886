"""Common parts of translation, speech and captions: evaluation by generating the texts of a set."""

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, ClassVar

import numpy as np

from attent.data.arrays import Array, select_evenly
from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.options import SearchOptions
from attent.formatting import format_count
from attent.models import Seq2Seq, Seq2SeqConfig, build, build_empty
from attent.models.weights import assign_weights
from attent.nn.eval_mode import eval_mode
from attent.scoring import metrics as scoring_metrics
from attent.scoring.metrics import MetricScore, Reference, compute_metrics, format_metrics, list_references
from attent.text.tokenizer import Tokenizer
from attent.training import autoconfig
from attent.training.config import RunConfig, UserSettings
from attent.training.events import StopRequested, ValidationSample
from attent.training.tasks import base

NUM_SAMPLES, NUM_CARD_SAMPLES = 3, 5
NUM_TIMED_SOURCES = 16  # to estimate the time of the final scores


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    name: str
    split: base.Split
    data: Any  # the dataset
    ids: Array  # of the sources in it
    languages: tuple[str | None, ...]
    references: tuple[Reference, ...]
    titles: tuple[str, ...]  # of the sources, in samples

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def language(self) -> str | None:
        return self.languages[0] if len(set(self.languages)) == 1 else None

    def select(self, indices: Sequence[int]) -> "EvalSet":
        return replace(
            self,
            ids=self.ids[list(indices)],
            languages=tuple(self.languages[i] for i in indices),
            references=tuple(self.references[i] for i in indices),
            titles=tuple(self.titles[i] for i in indices),
        )

    def select_evenly(self, count: int) -> "EvalSet":
        return self.select(select_evenly(range(len(self)), count))

    def select_samples(self, outputs: Sequence[str], count: int) -> tuple[ValidationSample, ...]:
        references = [" | ".join(list_references(reference)) for reference in self.references]
        return base.select_samples(self.titles, references, outputs, count)


class GenerationTask(base.Task):
    model_class = Seq2Seq
    config_class = Seq2SeqConfig
    cpu_minutes = autoconfig.CPU_MINUTES
    source_noun: ClassVar[str]  # "images"
    resamples: ClassVar[int] = 0  # for the confidence intervals of the final scores

    context: base.RunContext
    tokenizer: Tokenizer
    metric_names: tuple[str, ...] = scoring_metrics.VALIDATION_METRICS  # of validations and final scores
    tests: list[Any]

    def build_finetune_config(self, model: Any, requested: UserSettings, origin: str) -> Seq2SeqConfig:
        sizes = (self.tokenizer.source.size, self.tokenizer.target.size)
        return autoconfig.build_finetune_config(model.config, requested, sizes, origin)

    def build_model(self, config: Seq2SeqConfig, pretrained: Any) -> Seq2Seq:
        if pretrained is None:
            return build(config)
        return assign_weights(build_empty(config), pretrained.state_dict(), "--from").train()

    @abstractmethod
    def build_eval_set(self, data: Any, split: base.Split) -> EvalSet: ...

    @abstractmethod
    def search_texts(
        self, model: Seq2Seq, examples: EvalSet, run: RunConfig, options: SearchOptions
    ) -> Iterator[dict[int, str]]:
        """Yield the texts of some examples at a time, by their index."""

    @abstractmethod
    def compute_max_tokens(self, examples: EvalSet) -> float:
        """Return the mean of the largest number of tokens that may be generated."""

    @property
    def validations(self) -> list[Any]:
        """The validation sets; the best model is the one with the best mean of their scores."""
        return [] if self.validation is None else [self.validation]

    def list_eval_sets(self) -> list[EvalSet]:
        valid = [self.build_eval_set(data, "validation") for data in self.validations]
        if self.is_held_out:
            valid[0] = replace(valid[0], name="held-out part")
        return [*valid, *(self.build_eval_set(data, "test") for data in self.tests)]

    def generate(
        self, model: Seq2Seq, examples: EvalSet, run: RunConfig, options: SearchOptions, action: str = ""
    ) -> list[str]:
        outputs: dict[int, str] = {}
        report = self.context.track_progress(action, f"{self.unit}s", len(examples))
        try:
            for texts in self.search_texts(model, examples, run, options):
                outputs |= texts
                if action:
                    report(len(outputs))
        except SearchCancelled as cancelled:
            raise StopRequested from cancelled
        return [outputs[i] for i in range(len(examples))]

    def build_evaluator(self, run: RunConfig) -> base.Evaluator | None:
        """Generate the texts of a part of each validation set greedily."""
        if not self.validations or not run.train.valid_sentences:
            return None
        count = run.train.valid_sentences
        sets = [self.build_eval_set(data, "validation").select_evenly(count) for data in self.validations]

        def evaluate(model: Seq2Seq) -> base.EvalResult:
            results = [self.evaluate_examples(model, examples, run) for examples in sets]
            if len(results) == 1:
                return results[0]
            each = zip(sets, results, strict=True)
            self.context.note("; ".join(f"{examples.name}: {format_metrics(r.metrics)}" for examples, r in each))
            means = {name: fmean(result.metrics[name] for result in results) for name in results[0].metrics}
            return replace(results[0], metrics=means)

        return evaluate

    def evaluate_examples(self, model: Seq2Seq, examples: EvalSet, run: RunConfig) -> base.EvalResult:
        outputs = self.generate(model, examples, run, SearchOptions(beam_size=1, length_penalty=0.0))
        names = scoring_metrics.add_selected_metric(self.metric_names, run.train.metric)
        scores = compute_metrics(outputs, examples.references, names, examples.language, resamples=0)
        metrics = {score.metric: score.value for score in scores}
        return base.EvalResult(metrics=metrics, samples=examples.select_samples(outputs, NUM_SAMPLES))

    def score_model(self, model: Seq2Seq, run: RunConfig) -> Iterator[base.FinalScores]:
        """Score each set and, of a model of several languages, each language of it."""
        options = get_search_options(run)
        for examples in self.list_eval_sets():
            outputs = self.generate(model, examples, run, options, f"scoring {examples.split} {examples.name}")
            yield self.score_outputs(outputs, examples, run)
            languages = dict.fromkeys(examples.languages)
            for language in languages if len(languages) > 1 else ():
                indices = [i for i, other in enumerate(examples.languages) if other == language]
                part = replace(examples.select(indices), name=f"{examples.name} ({language})")
                yield self.score_outputs([outputs[i] for i in indices], part, run)

    def score_outputs(self, outputs: Sequence[str], examples: EvalSet, run: RunConfig) -> base.FinalScores:
        selected = (run.train.metric,) if run.train.metric in self.metrics[:-1] else ()
        names = tuple(dict.fromkeys((*self.metric_names, *selected)))
        scores = compute_metrics(outputs, examples.references, names, examples.language, resamples=self.resamples)
        metrics, beam = {score.metric: score.value for score in scores}, f"beam {run.decode.beam_size}"
        summary = format_intervals(scores) if self.resamples else format_metrics(metrics, digits=2)
        num_sources = len(np.unique(examples.ids))
        counted = format_count(num_sources, self.source_noun[:-1])
        captions = f"{format_count(len(examples), self.unit)} of " if num_sources < len(examples) else ""
        return base.FinalScores(
            name=examples.name,
            split=examples.split,
            num_examples=len(examples),
            metrics=metrics,
            summary=f"{summary} ({captions}{counted}, {beam})",
            extra_columns=(("95% interval", format_intervals(scores[:1])),) if self.resamples else (),
            decoding=f"{beam}, length penalty {run.decode.length_penalty:g}",
            signatures=tuple(score.signature for score in scores if score.metric != "exact"),
            samples=examples.select_samples(outputs, NUM_CARD_SAMPLES),
        )

    def estimate_scoring_seconds(self, model: Seq2Seq, run: RunConfig) -> float:
        sets = self.list_eval_sets()
        if not sets:
            return 0.0
        sample = sets[-1].select_evenly(NUM_TIMED_SOURCES)
        start = time.monotonic()
        with eval_mode(model):
            self.generate(model, sample, run, get_search_options(run))
        seconds = (time.monotonic() - start) * sum(map(len, sets)) / len(sample)
        # An untrained model generates as many tokens as it may, not as many as a text has.
        texts = [text for reference in sample.references for text in list_references(reference)]
        num_tokens = sum(map(len, self.tokenizer.encode_target(texts))) / len(texts)
        return seconds * min(1.0, num_tokens / self.compute_max_tokens(sample))


def get_search_options(run: RunConfig) -> SearchOptions:
    return SearchOptions(beam_size=run.decode.beam_size, length_penalty=run.decode.length_penalty)


def format_intervals(scores: Sequence[MetricScore]) -> str:
    return ", ".join(
        f"{score.title} {score.value:.2f}" + ("" if score.ci_half_width is None else f" ± {score.ci_half_width:.2f}")
        for score in scores
    )


def draw_held_out(
    available: int,
    requested_count: int | None,
    max_count: int,
    seed: int | tuple[int, ...],
    noun: str,
    context: base.RunContext,
) -> tuple[Array, Array]:
    count = min(max_count, max(1, available // 10)) if requested_count is None else requested_count
    base.check_hold_out(count, available, noun)
    order = np.random.default_rng(seed).permutation(available)
    context.note(f"held out {count:,} of {available:,} {noun} for validation (name your own with --valid)")
    return np.sort(order[count:]), np.sort(order[:count])
