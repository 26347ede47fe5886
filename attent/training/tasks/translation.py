"""Translation as a task of `attent train`: pairs of texts, a model of encoder and decoder, judged by what it writes.

It stands here and not in `attent.train`, since it needs the search and the scores beside the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from attent.data.corpus import Corpus
from attent.decoding.alignment import AlignmentError, save_measured_selection, select_by_agreement
from attent.decoding.in_memory import SearchCancelled, translate_texts
from attent.inspection import head_stats
from attent.models import Seq2Seq, Seq2SeqConfig, build, build_empty
from attent.models.weights import assign_weights
from attent.scoring.metrics import score_corpus
from attent.text.tokenizer import Tokenizer
from attent.training import autoconfig, model_card
from attent.training.config import Run, Size, TrainConfig, UserSettings
from attent.training.events import ValidationSample
from attent.training.loop import StopRequested
from attent.training.objective import Seq2SeqObjective
from attent.training.tasks import translation_data as pairs
from attent.training.tasks.base import BatchLoader, EvalResult, Evaluator, FinalScores, ObjectiveFactory, RunContext
from attent.training.tasks.translation_data import EvalTexts, PreparedData, read_eval_texts

NUM_SAMPLES, NUM_CARD_SAMPLES = 3, 5


def prepare_translation(run: Run, tokenizer: Tokenizer | None, context: RunContext) -> TranslationTask:
    found = pairs.load_corpora(run.data, context.data_dir, run.train.seed, context.report)
    return TranslationTask(
        pairs.prepare_tokens(found, tokenizer, run.data, context.data_dir, run.train.seed, context.report), context
    )


@dataclass(frozen=True)
class TranslationTask:
    """See `attent.train.task.Material`."""

    prepared: PreparedData
    context: RunContext
    model_class: type[Any] = Seq2Seq
    objective_class: ObjectiveFactory = Seq2SeqObjective

    @property
    def tokenizer(self) -> Tokenizer:
        return self.prepared.tokenizer

    @property
    def title(self) -> str:
        languages = self.prepared.splits.languages
        return "-".join(filter(None, (languages.source, languages.target)))

    @property
    def fingerprints(self) -> Mapping[str, str]:
        return {"data": self.prepared.store.folder.name, "tokenizer": self.tokenizer.fingerprint}

    # ---- the model and the recipe ------------------------------------------------------------------------------------

    def choose_model(self, run: Run, requested: UserSettings) -> tuple[Size, Seq2SeqConfig, str]:
        return autoconfig.choose_model(
            run, requested, self.prepared.data_size, self.tokenizer, self.context.device.type
        )

    def build_finetune_config(self, model: Seq2Seq, requested: UserSettings, origin: str) -> Seq2SeqConfig:
        return autoconfig.build_finetune_config(
            model.config, requested, (self.tokenizer.source.size, self.tokenizer.target.size), origin
        )

    def build_model(self, config: Seq2SeqConfig, pretrained: Seq2Seq | None) -> Seq2Seq:
        return (
            build(config)
            if pretrained is None
            else assign_weights(build_empty(config), pretrained.state_dict(), "--from").train()
        )

    def fill_train_config(self, run: Run, size: Size | None, config: Seq2SeqConfig, *, finetune: bool) -> TrainConfig:
        return autoconfig.fill_train_config(
            run.train, size, config, self.prepared.data_size, self.context.device, finetune=finetune
        )

    def describe_choices(self, run: Run, size_reason: str) -> Iterator[str]:
        return autoconfig.describe_choices(run, size_reason, self.prepared.data_size, self.context.device)

    # ---- batches -----------------------------------------------------------------------------------------------------

    def build_train_batches(self, run: Run) -> BatchLoader:
        return pairs.build_train_batches(self.prepared, run.data, run.train)

    def build_valid_batches(self, run: Run) -> BatchLoader | None:
        return (
            None
            if self.prepared.valid_store is None
            else pairs.build_valid_batches(self.prepared.valid_store, run.data.max_tokens)
        )

    # ---- judging -----------------------------------------------------------------------------------------------------

    def build_evaluator(self, run: Run) -> Evaluator | None:
        """How the model is judged on the way: a part of the validation set, translated word by likeliest word."""
        found = self.prepared.splits
        if self.prepared.valid_store is None or not run.train.valid_sentences:
            return None
        texts = read_eval_texts(found.valid, found.use_tags, run.train.valid_sentences)

        def judge(model: Seq2Seq) -> EvalResult:
            outputs = self.translate_texts(model, texts, beam_size=1, length_penalty=0.0)
            found = score_corpus(outputs, texts.references, texts.language)
            figures = {"bleu": found.bleu, "chrf": found.chrf, "exact": found.exact}
            return EvalResult(metrics=figures, samples=select_samples(texts, outputs))

        return judge

    def translate_texts(self, model: Seq2Seq, texts: EvalTexts, *, beam_size: int, length_penalty: float) -> list[str]:
        outputs = [""] * len(texts.sources)
        for to in dict.fromkeys(texts.target_languages):
            places = [i for i, other in enumerate(texts.target_languages) if other == to]
            try:
                written = translate_texts(
                    model,
                    self.tokenizer,
                    [texts.sources[i] for i in places],
                    to=to,
                    beam_size=beam_size,
                    length_penalty=length_penalty,
                    should_stop=self.context.should_stop,
                )
            except SearchCancelled as stopped:
                raise StopRequested from stopped
            for i, text in zip(places, written, strict=True):
                outputs[i] = text
        return outputs

    def score_model(self, model: Seq2Seq, run: Run) -> Iterator[FinalScores]:
        """Every set of sentences, translated and scored."""
        found, decode = self.prepared.splits, run.decode
        sets = [(read_eval_texts(found.valid, found.use_tags), "validation")] if found.valid else []
        sets += [(read_eval_texts([corpus], found.use_tags), "test") for corpus in found.tests]
        for texts, part in sets:
            outputs = self.translate_texts(
                model, texts, beam_size=decode.beam_size, length_penalty=decode.length_penalty
            )
            result = score_corpus(outputs, texts.references, texts.language)
            figures = f"BLEU {result.bleu:.2f}, chrF {result.chrf:.2f}, exact {result.exact:.1f}%"
            yield FinalScores(
                name=texts.name,
                split="validation" if part == "validation" else "test",
                num_examples=len(outputs),
                metrics=asdict(result),
                summary=f"{figures} ({len(outputs):,} sentences, beam {decode.beam_size})",
                decoding=f"beam {decode.beam_size}, length penalty {decode.length_penalty:g}",
                signatures=(result.bleu_signature, result.chrf_signature),
                samples=select_samples(texts, outputs, NUM_CARD_SAMPLES),
            )

    def write_analysis(self, model: Seq2Seq, out: Path) -> None:
        """Which heads tell best which word comes from which, by the validation pairs: for `translate --alignment`; and
        what each head does: for `look`."""
        found = self.prepared.splits
        if not found.valid:
            return
        texts = read_eval_texts(found.valid, found.use_tags)
        places = [place for place, to in enumerate(texts.target_languages) if to == texts.target_languages[0]]
        sources, references = ([side[place] for place in places] for side in (texts.sources, texts.references))
        with suppress(AlignmentError):  # pairs without words have nothing to tell
            measured = select_by_agreement(model, self.tokenizer, sources, references, to=texts.target_languages[0])
            save_measured_selection(out, measured)
        habits = head_stats.measure_heads(
            model, self.tokenizer, sources, references, to=texts.target_languages[0], dataset="the validation pairs"
        )
        head_stats.save_head_stats(out, habits)

    # ---- the card ----------------------------------------------------------------------------------------------------

    def describe_data(self) -> model_card.DataSummary:
        prepared = self.prepared
        store, found = prepared.store, prepared.splits
        origins = []
        for corpus, part in zip(found.train, store.meta.parts, strict=True):
            dropped = tuple(part.dropped.items())
            read = part.pairs + sum(count for _, count in dropped)
            origins.append(
                model_card.CardCorpus(
                    name=part.name,
                    read=read,
                    used=part.pairs,
                    dropped=dropped,
                    files=_list_files(corpus),
                    weight=corpus.weight,
                )
            )
        how = (
            ""
            if prepared.valid_store is None
            else ", ".join(file for corpus in found.valid for file in corpus.file_names)
        )
        if found.held_out:
            how = "chosen from the corpus by a hash of the source; no pair that shares a side with one of them was "
            how += "trained on"
        return model_card.DataSummary(
            corpora=tuple(origins),
            source_tokens=store.meta.token_counts["source"],
            target_tokens=store.meta.token_counts["target"],
            data_key=store.folder.name,
            num_held_out=0 if prepared.valid_store is None else len(prepared.valid_store),
            held_out_method=how,
        )

    def describe_model(self, out: Path) -> model_card.ModelDescription:
        found = self.prepared.splits
        tags = self.tokenizer.source.tags
        # An example for --to; "" where the tokenizer has tags that this model has not been trained with.
        to = None if not tags else tags[0] if found.use_tags else ""
        languages = found.languages
        words = model_card.describe_translator(str(out), languages.source or "", languages.target or "", to)
        flag = f" --to {found.train[0].languages.target}" if found.use_tags else ""
        return replace(words, next_step=f"try it: attent translate {out}{flag}")


def _list_files(corpus: Corpus) -> tuple[tuple[str, str], ...]:
    """With checksums; one that has gone since it was read has none, and a model that is done does not fail by it."""
    try:
        return model_card.hash_files(corpus.file_names, [Path(path) for path, *_ in corpus.fingerprint()])
    except OSError:
        return tuple((name, "") for name in corpus.file_names)


def select_samples(
    texts: EvalTexts, outputs: Sequence[str], max_samples: int = NUM_SAMPLES
) -> tuple[ValidationSample, ...]:
    count = min(max_samples, len(outputs))
    places = [len(outputs) * i // count for i in range(count)]
    return tuple(
        ValidationSample(source=texts.sources[i], reference=texts.references[i], output=outputs[i]) for i in places
    )
