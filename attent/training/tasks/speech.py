"""`--task speech`: recognize speech, or translate it, with an encoder-decoder of log-mel frames.

Batches, augmentation and the loss are in `speech_batches`; `attent.data.audio` reads the recordings.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from attent.data.audio import (
    AudioDataConfig,
    Recording,
    RecordingDataset,
    choose_text_columns,
    find_recordings,
    has_translations,
    prepare_recordings,
)
from attent.data.batch_plan import WIDTH_MULTIPLE
from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.source_search import FRAMES_PER_TOKEN, MIN_MAX_LENGTH, search_sources
from attent.formatting import format_count
from attent.interop.whisper import read_kept_files
from attent.models import Seq2Seq, Seq2SeqConfig, build, build_empty
from attent.models.config import mirror_encoder
from attent.models.weights import assign_weights
from attent.nn import AudioConfig, StackConfig
from attent.nn.eval_mode import eval_mode
from attent.nn.frontends import HOP_SAMPLES, SAMPLE_RATE
from attent.scoring.metrics import (
    SELECTION_METRICS,
    SPEECH_METRICS,
    VALIDATION_METRICS,
    MetricScore,
    compute_metrics,
    make_metric,
    score_corpus,
)
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_formats import WhisperTask, WhisperVocabulary, build_prompt
from attent.text.tokenizer_training import MAX_VOCAB, MIN_VOCAB, TokenizerConfig, train_monolingual_tokenizer
from attent.training import autoconfig
from attent.training.autoconfig import fill_defaults, fit_to_tokenizer, look_up
from attent.training.config import (
    DataConfig,
    RunConfig,
    Size,
    TrainConfig,
    TrainError,
    UserSettings,
    build_model_config,
)
from attent.training.events import EventHandler, Note, ValidationSample
from attent.training.stop_signals import StopRequested
from attent.training.tasks import base
from attent.training.tasks.speech_batches import SpeechLoader, SpeechObjective, count_states, get_frontend

STACKS_BY_SIZE: dict[Size, tuple[int, dict[str, Any]]] = {  # layers of the decoder; the encoder
    "tiny": (2, {"layers": 4, "width": 128, "heads": 4, "ffn_width": 512}),
    "small": (4, {"layers": 8, "width": 256, "heads": 4, "ffn_width": 1024}),
    "base": (6, {"layers": 12, "width": 512, "heads": 8, "ffn_width": 2048}),
    "big": (8, {"layers": 16, "width": 768, "heads": 12, "ffn_width": 3072}),
}
GPU_SIZE_AND_EPOCHS: tuple[tuple[int, tuple[Size, int]], ...] = (  # by minutes of audio
    (0, ("small", 100)),
    (50 * 60, ("base", 40)),
    (500 * 60, ("base", 20)),
    (5_000 * 60, ("big", 8)),
)
CPU_SIZE_AND_EPOCHS: tuple[tuple[int, tuple[Size, int]], ...] = ((0, ("tiny", 60)), (50 * 60, ("small", 20)))
LR_BY_SIZE: dict[Size, float] = {"tiny": 1.5e-3, "small": 1e-3, "base": 5e-4, "big": 3e-4}
FINETUNE_LR, FINETUNE_DIVISOR = 1e-4, 10  # fine-tuning takes a tenth of the epochs and of `MIN_STEPS`
MIN_STEPS = 4_000
# 400 and 41 seconds of audio. On a CPU small batches give more steps: the 1,477 steps of 12 minutes with 4,096 states
# were too few for the decoder to learn to attend (WER 103% on spoken digits).
GPU_BATCH_STATES, CPU_BATCH_STATES = 20_000, 2_048
EVAL_BATCH_STATES = {"cpu": 8_192, "cuda": 32_768}
MAX_FRAMES_QUANTILE = 0.95  # of the lengths of training recordings: `AudioConfig.max_frames`
DEFAULT_CTC = 0.3  # as in ESPnet's recipes
MAX_HELD_OUT = 1_000
MIN_SUBWORD_CHARS = 1_000_000  # with less text, some 20 hours of speech, the tokens are characters
NUM_SAMPLES, NUM_CARD_SAMPLES = 3, 5
NUM_TIMED_RECORDINGS = 16  # to estimate the time of the final scores


class SpeechTask(base.Task):
    model_class = Seq2Seq
    config_class = Seq2SeqConfig
    objective_class = SpeechObjective
    unit = "recording"
    metrics = (*SPEECH_METRICS, *SELECTION_METRICS, "loss")
    used_settings = frozenset(
        {"data.src", "data.tgt", "data.tokenizer", "data.audio", "train.ctc", "train.valid_sentences", "decode"}
    )
    default_settings: ClassVar[dict[str, Any]] = {
        "train": base.MODERN_RECIPE
        | {"weight_decay": 0.01, "label_smoothing": 0.1, "patience": 0, "valid_sentences": 200},
        "data": {"audio": {}},
    }
    cpu_minutes = autoconfig.CPU_MINUTES
    look_example_input = "recording.wav"

    def __init__(self, run: RunConfig, tokenizer: Tokenizer | None, context: base.RunContext) -> None:
        data, self.audio_options, self.context = run.data, run.data.audio or AudioDataConfig(), context
        self.languages = (data.src, data.tgt)
        self.is_translation, self.text_language = has_translations(data.src, data.tgt), data.tgt or data.src
        splits = find_splits(data)
        (train,) = self.load_recordings(splits["train"])
        valid, self.tests = self.load_recordings(splits["valid"]), self.load_recordings(splits["test"])
        self.num_skipped = len(train.skipped)
        self.is_held_out = not valid and data.hold_out != 0
        if self.is_held_out:
            train, held_out = hold_out_recordings(train, data.hold_out, run.train.seed, context)
            valid = [held_out]
        self.train_recordings, self.validation = train, valid[0] if valid else None
        self.corpora = data.train
        context.note(f"recordings: {len(train):,} for training, {format_hours(train)}")
        self.tokenizer: Tokenizer = tokenizer or self.train_tokenizer(run)
        self.prefix_ids = self.build_prefix()
        if self.prefix_ids and run.init_from:  # how transcripts of this Whisper model are searched
            self.extra_files = read_kept_files(run.init_from)
        if run.train.metric in SELECTION_METRICS:  # report a missing package or language before training
            make_metric(run.train.metric, self.text_language, train.texts)

    def load_recordings(self, splits: Sequence[tuple[str, list[Recording]]]) -> list[RecordingDataset]:
        datasets = []
        for name, recordings in splits:
            report = self.context.track_progress(f"reading {name}", "recordings", len(recordings))
            data_dir = self.context.data_dir
            dataset = prepare_recordings(recordings, name, self.audio_options, data_dir, progress=report)
            if dataset.skipped:
                count = format_count(len(dataset.skipped), "recording")
                self.context.warn(f"{name}: skipped {count}, such as {'; '.join(dataset.skipped[:3])}")
            datasets.append(dataset)
        return datasets

    def train_tokenizer(self, run: RunConfig) -> Tokenizer:
        """Characters where there is little text, unless the user has chosen a kind or a size."""
        self.context.note("training the tokenizer ...")
        config, texts = run.data.tokenizer, self.train_recordings.texts
        if config == replace(TokenizerConfig(), symbols=config.symbols):
            config = choose_tokenizer(config, sum(map(len, texts)))
        tokenizer = train_monolingual_tokenizer(texts, config, seed=run.train.seed)
        pieces = "characters and bytes" if config.kind == "char" else "subwords"
        self.context.note(f"tokenizer: {config.kind}, {tokenizer.target.size:,} {pieces}")
        return tokenizer

    def build_prefix(self) -> tuple[int, ...]:
        """Return the tokens before each text that tell Whisper the language and the task."""
        vocabulary, language = self.tokenizer.target, self.languages[0]
        if not isinstance(vocabulary, WhisperVocabulary):
            return ()
        if vocabulary.tags and language is None:
            raise TrainError("the language of the recordings must be given to fine-tune this model: --src en")
        task: WhisperTask = "translate" if self.is_translation else "transcribe"
        return build_prompt(vocabulary, language if vocabulary.tags else None, task)

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids with the end token; of Whisper with its prompt, after which texts start with a space."""
        if not self.prefix_ids:
            return self.tokenizer.encode_target(texts)
        return [[*self.prefix_ids, *ids] for ids in self.tokenizer.encode_target([f" {text}" for text in texts])]

    @property
    def title(self) -> str:
        return "-".join(filter(None, self.languages)) or "speech"

    @property
    def fingerprints(self) -> Mapping[str, str]:
        parts = [self.train_recordings, *([self.validation] if self.validation else [])]
        data = " ".join(f"{part.store_key} {len(part)}" for part in parts)
        return {"data": data, "tokenizer": self.tokenizer.fingerprint}

    # ---- model and schedule

    @classmethod
    def placeholder_config(cls, vocab: int, requested: Mapping[str, Any]) -> Seq2SeqConfig:
        return build_speech_config("tiny", vocab)

    @classmethod
    def choose_metric(cls, run: RunConfig) -> str:
        return "chrf" if has_translations(run.data.src, run.data.tgt) else "wer"

    @classmethod
    def adapt_run(cls, run: RunConfig, requested: UserSettings, config: Any, report: EventHandler) -> RunConfig:
        """Limit recordings to the window of the model, if it has one."""
        if not isinstance(config.frontend, AudioConfig):
            raise TrainError(
                f"{run.init_from}: must be a model of speech for --task speech, but its source is "
                f"{'text' if config.frontend is None else 'images'}; give another --from"
            )
        audio = run.data.audio or AudioDataConfig()
        seconds = (config.frontend.fixed_frames or math.inf) * HOP_SAMPLES / SAMPLE_RATE
        if audio.max_seconds <= seconds:
            return run
        report(Note(text=f"recordings are limited to {seconds:g} seconds, the window of {run.init_from}"))
        return replace(run, data=replace(run.data, audio=replace(audio, max_seconds=seconds)))

    def choose_model(self, run: RunConfig, requested: UserSettings) -> tuple[Size, Seq2SeqConfig, str]:
        on_cpu = self.context.device.type == "cpu"
        size = run.size or self.choose_size_and_epochs()[0]
        hours = format_hours(self.train_recordings)
        reason = "as requested" if run.size else f"for {hours}" + " on a CPU" * on_cpu
        preset = fit_to_tokenizer(build_speech_config(size, self.tokenizer.target.size), self.tokenizer)
        samples = np.quantile(self.train_recordings.num_samples, MAX_FRAMES_QUANTILE)
        frontend = replace(get_frontend(preset), max_frames=math.ceil(samples / HOP_SAMPLES))
        preset = replace(preset, ctc=run.train.ctc is None or run.train.ctc > 0, frontend=frontend)
        return size, build_model_config(requested, preset), reason

    def choose_size_and_epochs(self) -> tuple[Size, int]:
        minutes = int(count_seconds(self.train_recordings)) // 60
        return look_up(CPU_SIZE_AND_EPOCHS if self.context.device.type == "cpu" else GPU_SIZE_AND_EPOCHS, minutes)

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
        train, device = run.train, self.context.device
        if train.ctc and not config.ctc:
            raise TrainError(f"`train.ctc` must be 0 for a model without a CTC layer, but is {train.ctc}; leave it out")
        if train.compile:
            raise TrainError("`train.compile` must be false for --task speech, whose batches differ in shape")
        train = replace(train, compile=False, ctc=DEFAULT_CTC * config.ctc if train.ctc is None else train.ctc)
        batch = train.batch_tokens or (CPU_BATCH_STATES if device.type == "cpu" else GPU_BATCH_STATES)
        epochs, divisor = self.choose_size_and_epochs()[1], FINETUNE_DIVISOR if finetune else 1
        estimate = math.ceil(epochs / divisor * self.count_epoch_states(config) / (batch * train.accumulate))
        steps = train.steps or min(autoconfig.MAX_STEPS, max(MIN_STEPS // divisor, estimate))
        warmup = max(1, min(4_000, steps // 10)) if train.warmup is None else train.warmup
        lr = train.lr or (FINETUNE_LR if finetune else LR_BY_SIZE[size or "small"])
        return fill_defaults(train, device, batch_tokens=batch, steps=steps, warmup=warmup, lr=lr)

    def count_epoch_states(self, config: Seq2SeqConfig) -> int:
        return int(count_states(self.train_recordings.num_samples, get_frontend(config).fixed_frames).sum())

    def describe_choices(self, run: RunConfig, size_reason: str) -> Iterator[str]:
        model, train, options = run.model, run.train, self.audio_options
        assert isinstance(model, Seq2SeqConfig)
        assert train.batch_tokens
        yield (
            f"model: {f'{run.size}, ' if run.size else ''}{model.encoder.layers}+{model.decoder.layers} layers, width "
            f"{model.encoder.width}, vocabulary {model.output_vocab:,}; {size_reason}"
        )
        num_batches = math.ceil(self.count_epoch_states(model) / train.batch_tokens)
        seconds = train.batch_tokens * 2 * HOP_SAMPLES / SAMPLE_RATE
        sizes = f"batches of {seconds:,.0f} s of audio, CTC {train.ctc:g}"
        yield from autoconfig.describe_schedule(train, num_batches, "greedy", sizes)
        speeds = ", ".join(f"{speed:g}" for speed in options.speed_perturbation)
        masks = f"{options.time_masks} masks of time and {options.frequency_masks} of frequency"
        yield f"augmentation: speeds {speeds}; {masks} (--set data.audio.speed_perturbation=[1] and so on)"

    # ---- batches and scores

    def build_batches(
        self,
        recordings: RecordingDataset,
        run: RunConfig,
        batch_tokens: int,
        options: AudioDataConfig | None = None,
        max_target_length: int | None = None,
    ) -> SpeechLoader:
        """Batches of some recordings, with the augmentation of `options`."""
        assert isinstance(run.model, Seq2SeqConfig)
        frontend = get_frontend(run.model)
        return SpeechLoader(
            recordings,
            self.encode_texts(recordings.texts),
            self.tokenizer.target.pad,
            options,
            batch_tokens=batch_tokens,
            mel_bins=frontend.mel_bins,
            fixed_frames=frontend.fixed_frames,
            prefix_length=len(self.prefix_ids),
            max_target_length=max_target_length,
            seed=run.train.seed,
        )

    def build_train_batches(self, run: RunConfig) -> SpeechLoader:
        assert run.train.batch_tokens
        positions = get_max_positions(run.model)
        return self.build_batches(
            self.train_recordings, run, run.train.batch_tokens, self.audio_options, max_target_length=positions
        )

    def build_valid_batches(self, run: RunConfig) -> SpeechLoader | None:
        if self.validation is None:
            return None
        positions = get_max_positions(run.model)
        return self.build_batches(self.validation, run, base.VALID_BATCH_TOKENS, max_target_length=positions)

    def get_objective_factory(self, run: RunConfig) -> base.ObjectiveFactory:
        return partial(SpeechObjective, ctc=run.train.ctc or 0.0)

    def build_evaluator(self, run: RunConfig) -> base.Evaluator | None:
        """Transcribe a part of the validation set greedily."""
        if self.validation is None or not run.train.valid_sentences:
            return None
        recordings = select_recordings(self.validation, run.train.valid_sentences)

        def evaluate(model: Seq2Seq) -> base.EvalResult:
            outputs = self.transcribe(model, recordings, run, beam_size=1, length_penalty=0.0)
            scores = score_corpus(
                outputs, recordings.texts, self.text_language, run.train.metric, names=self.metric_names
            )
            return base.EvalResult(metrics=scores.metrics, samples=select_samples(recordings, outputs, NUM_SAMPLES))

        return evaluate

    @property
    def metric_names(self) -> tuple[str, ...]:
        return VALIDATION_METRICS if self.is_translation else (*SPEECH_METRICS, "exact")

    def transcribe(
        self,
        model: Seq2Seq,
        recordings: RecordingDataset,
        run: RunConfig,
        *,
        beam_size: int,
        length_penalty: float,
        action: str = "",
    ) -> list[str]:
        """Return the text of each recording; with an `action`, progress is reported."""
        device = self.context.device
        batches = self.build_batches(recordings, run, EVAL_BATCH_STATES.get(device.type, 4_096))
        objective, outputs = SpeechObjective(model), [""] * len(recordings)
        report, num_done = self.context.track_progress(action, "recordings", len(recordings)), 0
        for batch_index in range(batches.num_batches(0)):
            batch = batches.get_batch(0, batch_index).to(device)
            frames, lengths = objective.compute_frames(batch)
            try:
                hypotheses = search_sources(
                    model,
                    self.tokenizer,
                    frames,
                    lengths,
                    beam_size=beam_size,
                    length_penalty=length_penalty,
                    prefix_ids=self.prefix_ids,
                    should_stop=self.context.should_stop,
                )
            except SearchCancelled as cancelled:
                raise StopRequested from cancelled
            for index, hypothesis in zip(batch.example_ids, hypotheses, strict=True):
                outputs[index] = hypothesis.text
            num_done += len(batch)
            if action:
                report(num_done)
        return outputs

    def score_model(self, model: Seq2Seq, run: RunConfig) -> Iterator[base.FinalScores]:
        if self.validation is not None:
            name = "held-out part" if self.is_held_out else self.validation.name
            yield self.score_recordings(model, self.validation, name, "validation", run)
        for recordings in self.tests:
            yield self.score_recordings(model, recordings, recordings.name, "test", run)

    def score_recordings(
        self, model: Seq2Seq, recordings: RecordingDataset, name: str, split: base.Split, run: RunConfig
    ) -> base.FinalScores:
        beam_size, length_penalty = run.decode.beam_size, run.decode.length_penalty
        outputs = self.transcribe(
            model,
            recordings,
            run,
            beam_size=beam_size,
            length_penalty=length_penalty,
            action=f"scoring {split} {name}",
        )
        selected = (run.train.metric,) if run.train.metric in self.metrics[:-1] else ()
        names = tuple(dict.fromkeys((*self.metric_names, *selected)))
        scores = compute_metrics(outputs, recordings.texts, names, self.text_language)
        return base.FinalScores(
            name=name,
            split=split,
            num_examples=len(recordings),
            metrics={score.metric: score.value for score in scores},
            summary=f"{format_intervals(scores)} ({len(outputs):,} recordings, beam {beam_size})",
            extra_columns=(("95% interval", format_intervals(scores[:1])),),
            decoding=f"beam {beam_size}, length penalty {length_penalty:g}",
            signatures=tuple(score.signature for score in scores if score.metric != "exact"),
            samples=select_samples(recordings, outputs, NUM_CARD_SAMPLES),
        )

    def estimate_scoring_seconds(self, model: Seq2Seq, run: RunConfig) -> float:
        parts = [*([self.validation] if self.validation else []), *self.tests]
        if not parts:
            return 0.0
        sample = select_recordings(parts[-1], NUM_TIMED_RECORDINGS)
        start = time.monotonic()
        with eval_mode(model):
            self.transcribe(
                model, sample, run, beam_size=run.decode.beam_size, length_penalty=run.decode.length_penalty
            )
        seconds = (time.monotonic() - start) * sum(map(len, parts)) / len(sample)
        # An untrained model generates as many tokens as it may, not as many as a text has.
        num_tokens = sum(map(len, self.tokenizer.encode_target(sample.texts))) / len(sample)
        num_frames = float(sample.num_samples.mean()) / HOP_SAMPLES
        return seconds * min(1.0, num_tokens / (MIN_MAX_LENGTH + num_frames / FRAMES_PER_TOKEN))

    # ---- the model card

    def describe_data(self) -> base.DataSummary:
        train, valid = self.train_recordings, self.validation
        num_held_out = 0 if valid is None else len(valid)
        dropped = [("not usable", self.num_skipped)] if self.num_skipped else []
        dropped += [("held out for validation", num_held_out)] if self.is_held_out else []
        files = [path for path in map(Path, self.corpora) if path.expanduser().is_file()]
        corpus = base.CorpusStats(
            name=f"{train.name}, {format_hours(train)}",
            num_read=len(train) + sum(count for _, count in dropped),
            num_used=len(train),
            dropped=tuple(dropped),
            files=base.hash_files([str(path) for path in files], [path.expanduser() for path in files]),
        )
        method = "" if valid is None else "drawn at random" if self.is_held_out else valid.name
        return base.DataSummary(
            corpora=(corpus,),
            source_tokens=0,
            target_tokens=0,
            data_key=train.store_key,
            num_held_out=num_held_out,
            held_out_method=method,
        )

    def describe_model(self, out: Path) -> base.ModelDescription:
        command = f"attent transcribe {shlex.quote(str(out))} recording.wav"
        noun = "speech translator" if self.is_translation else "speech recognizer"
        return base.ModelDescription(
            title=" ".join(["-".join(filter(None, self.languages)), noun]).strip(),
            shell_example=command,
            python_example=base.build_python_example("Transcriber", out, 'transcribe("recording.wav").text'),
            next_step=f"try it: {command}",
            note="Exact is the share of outputs that equal the reference.",
            samples_title="Sample transcripts",
            sample_labels=("Recording", "Reference", "Output"),
            has_two_sides=True,
        )


# ---- data ------------------------------------------------------------------------------------------------------------


def find_splits(data: DataConfig) -> dict[str, list[tuple[str, list[Recording]]]]:
    """Return (name, recordings) of the training set, the validation set and each test set."""
    columns = choose_text_columns(data.src, data.tgt)
    available = [(path, find_recordings(path, columns)) for path in data.train]
    if not available:
        raise TrainError("recordings must be named: --data corpus.tsv")
    splits: dict[str, list[tuple[str, list[Recording]]]] = {}
    for split, named in (("train", ()), ("valid", data.valid), ("test", data.test)):
        parts = [(path, select_part(find_recordings(path, columns), split)) for path in named]
        if not named:
            parts = [(path, parts[split]) for path, parts in available if split in parts]
        if split != "test" and parts:
            parts = [(", ".join(path for path, _ in parts), [entry for _, part in parts for entry in part])]
        splits[split] = parts
    if not splits["train"]:
        names = ", ".join(available[0][1])
        raise TrainError(f"{data.train[0]}: must have training recordings, but has only its {names} part")
    return splits


def select_part(parts: Mapping[str, list[Recording]], split: str) -> list[Recording]:
    """The part for a purpose, else the only one."""
    return parts.get(split) or parts.get("train") or next(iter(parts.values()))


def hold_out_recordings(
    recordings: RecordingDataset, requested_count: int | None, seed: int, context: base.RunContext
) -> tuple[RecordingDataset, RecordingDataset]:
    default_count = min(MAX_HELD_OUT, max(1, len(recordings) // 10))
    count = default_count if requested_count is None else requested_count
    base.check_hold_out(count, len(recordings), "recordings")
    order = np.random.default_rng(seed).permutation(len(recordings))
    context.note(f"held out {count:,} of {len(recordings):,} recordings for validation (name your own with --valid)")
    return recordings.select(np.sort(order[count:])), recordings.select(np.sort(order[:count]))


def select_recordings(recordings: RecordingDataset, count: int) -> RecordingDataset:
    """At most `count` recordings, evenly spaced."""
    return recordings.select(np.array(base.select_evenly(range(len(recordings)), count)))


def count_seconds(recordings: RecordingDataset) -> float:
    return int(recordings.num_samples.sum()) / SAMPLE_RATE


def format_hours(recordings: RecordingDataset) -> str:
    """`3.2 hours of audio`, `12 minutes of audio`"""
    minutes = count_seconds(recordings) / 60
    return f"{minutes / 60:,.1f} hours of audio" if minutes >= 60 else f"{minutes:.2g} minutes of audio"


def choose_tokenizer(config: TokenizerConfig, num_chars: int) -> TokenizerConfig:
    """Characters, or as many subwords as the square root of the characters of the texts."""
    if num_chars < MIN_SUBWORD_CHARS:
        return replace(config, kind="char")
    size = round(num_chars**0.5 / WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    return replace(config, vocab=min(max(size, MIN_VOCAB), MAX_VOCAB))


# ---- the model and its scores ----------------------------------------------------------------------------------------


def build_speech_config(size: Size, vocab: int) -> Seq2SeqConfig:
    """Pre-norm stacks; the encoder, which reads many more states, is deeper."""
    decoder_layers, encoder_changes = STACKS_BY_SIZE[size]
    encoder = replace(StackConfig(), norm_order="pre", activation="gelu", **encoder_changes)
    decoder = replace(mirror_encoder(encoder), layers=decoder_layers)
    return Seq2SeqConfig(
        vocab=vocab, frontend=AudioConfig(), encoder=encoder, decoder=decoder, share_embeddings=False, ctc=True
    )


def get_max_positions(config: Any) -> int | None:
    """The number of learned positions of the decoder; None where any length will do."""
    positions: int | None = getattr(config.decoder.positions, "max_length", None)
    return positions


def format_intervals(scores: Sequence[MetricScore]) -> str:
    """`WER 3.21% ± 0.40, CER 1.10% ± 0.21`"""
    return ", ".join(
        f"{score.title} {score.value:.2f}" + ("" if score.ci_half_width is None else f" ± {score.ci_half_width:.2f}")
        for score in scores
    )


def select_samples(
    recordings: RecordingDataset, outputs: Sequence[str], max_samples: int
) -> tuple[ValidationSample, ...]:
    rows = list(zip(recordings.num_samples, recordings.texts, outputs, strict=True))
    return tuple(
        ValidationSample(source=f"{count / SAMPLE_RATE:.1f} s", reference=reference, output=output)
        for count, reference, output in base.select_evenly(rows, max_samples)
    )
