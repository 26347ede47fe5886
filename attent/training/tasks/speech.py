"""`--task speech`: recognize speech, or translate it, with an encoder-decoder of log-mel frames."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from attent.data import audio as audio_data
from attent.data.audio import AudioDataConfig, Recording, RecordingDataset, has_translations
from attent.data.batch_plan import WIDTH_MULTIPLE
from attent.decoding.options import SearchOptions
from attent.decoding.source_search import FRAMES_PER_TOKEN, MIN_MAX_LENGTH
from attent.decoding.transcriber import Transcriber
from attent.interop.whisper import WhisperSettings, read_kept_files, read_settings
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import AudioConfig, StackConfig
from attent.nn.frontends import HOP_SAMPLES, SAMPLE_RATE
from attent.scoring.metrics import NUM_RESAMPLES, SELECTION_METRICS, SPEECH_METRICS, VALIDATION_METRICS, make_metric
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_formats import WhisperVocabulary, build_prompt
from attent.text.tokenizer_training import MAX_VOCAB, MIN_VOCAB, TokenizerConfig
from attent.training import autoconfig
from attent.training.autoconfig import fill_defaults, fit_to_tokenizer, look_up
from attent.training.config import RunConfig, Size, TrainError, UserSettings, build_model_config
from attent.training.events import EventHandler, Note
from attent.training.run_options import DataConfig, TrainConfig
from attent.training.tasks import base
from attent.training.tasks.generation_task import EvalSet, GenerationTask, draw_held_out
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
# 400 and 41 seconds of audio. On a CPU small batches give more steps in the same time.
GPU_BATCH_STATES, CPU_BATCH_STATES = 20_000, 2_048
EVAL_BATCH_STATES = {"cpu": 8_192, "cuda": 32_768}
MAX_FRAMES_QUANTILE = 0.95  # of the lengths of training recordings: `AudioConfig.max_frames`
DEFAULT_CTC = 0.3  # as in ESPnet's recipes; 0 for translations, whose words are in another order
MAX_HELD_OUT = 1_000
MIN_SUBWORD_CHARS = 1_000_000  # with less text, some 20 hours of speech, the tokens are characters


class SpeechTask(GenerationTask):
    objective_class = SpeechObjective
    unit, source_noun = "recording", "recordings"
    resamples = NUM_RESAMPLES
    metrics = (*SPEECH_METRICS, *SELECTION_METRICS, "loss")
    used_settings = frozenset(
        {"data.src", "data.tgt", "data.tokenizer", "data.audio", "train.ctc", "train.valid_sentences", "decode"}
    )
    default_settings: ClassVar[dict[str, Any]] = {
        "train": base.MODERN_RECIPE
        | {"weight_decay": 0.01, "label_smoothing": 0.1, "patience": 0, "valid_sentences": 200},
        "data": {"audio": {}},
    }
    look_example_input = "recording.wav"
    held_out_method = "drawn at random"

    def __init__(self, run: RunConfig, tokenizer: Tokenizer | None, context: base.RunContext) -> None:
        data, self.audio_options, self.context = run.data, run.data.audio or AudioDataConfig(), context
        self.languages = (data.src, data.tgt)
        self.is_translation, self.text_language = has_translations(data.src, data.tgt), data.tgt or data.src
        self.whisper: WhisperSettings | None = None
        self.prefix_ids: tuple[int, ...] = ()  # that tell Whisper, unless it is of English only, the language and task
        if tokenizer and isinstance(vocabulary := tokenizer.target, WhisperVocabulary) and run.init_from:
            self.whisper, self.extra_files = read_settings(run.init_from, vocabulary), read_kept_files(run.init_from)
            language = data.src if self.whisper.is_multilingual else None
            if self.whisper.is_multilingual and language is None:
                raise TrainError("the language of the recordings must be given to fine-tune this model: --src en")
            self.prefix_ids = build_prompt(vocabulary, language, "translate" if self.is_translation else "transcribe")
        splits = find_splits(data)
        (train,) = self.load_recordings(splits["train"])
        valid, self.tests = self.load_recordings(splits["valid"]), self.load_recordings(splits["test"])
        self.is_held_out = not valid and data.hold_out != 0
        if self.is_held_out:
            rest, held_out = draw_held_out(
                len(train), data.hold_out, MAX_HELD_OUT, run.train.seed, self.source_noun, context
            )
            train, valid = train.select(rest), [train.select(held_out)]
        self.train_data, self.validation = train, valid[0] if valid else None
        self.data_files = [path for path in map(Path, data.train) if path.expanduser().is_file()]
        context.note(f"recordings: {len(train):,} for training, {format_hours(train)}")
        self.tokenizer: Tokenizer = tokenizer or self.train_tokenizer(run)
        if run.train.metric in SELECTION_METRICS:  # report a missing package or language before training
            make_metric(run.train.metric, self.text_language, train.texts)

    def load_recordings(self, splits: Sequence[tuple[str, list[Recording]]]) -> list[RecordingDataset]:
        datasets = []
        for name, recordings in splits:
            report = self.context.track_progress(f"reading {name}", "recordings", len(recordings))
            data_dir = self.context.data_dir
            dataset = audio_data.prepare_recordings(recordings, name, self.audio_options, data_dir, progress=report)
            self.context.warn_of_skipped(dataset)
            datasets.append(dataset)
        return datasets

    def train_tokenizer(self, run: RunConfig) -> Tokenizer:
        """Characters where there is little text, unless the user has chosen a kind or a size."""
        config, texts = run.data.tokenizer, self.train_data.texts
        if config == replace(TokenizerConfig(), symbols=config.symbols):
            config = choose_tokenizer(config, sum(map(len, texts)))
        return base.train_text_tokenizer(texts, config, self.context, run.train.seed)

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
        parts = [self.train_data, *([self.validation] if self.validation else [])]
        data = " ".join(f"{part.store_key} {len(part)}" for part in parts)
        return {"data": data, "tokenizer": self.tokenizer.fingerprint}

    @classmethod
    def placeholder_config(cls, vocab: int, requested: Mapping[str, Any]) -> Seq2SeqConfig:
        return build_speech_config("tiny", vocab)

    @classmethod
    def choose_metric(cls, run: RunConfig) -> str:
        return "chrf" if has_translations(run.data.src, run.data.tgt) else "wer"

    @classmethod
    def adapt_run(cls, run: RunConfig, requested: UserSettings, config: Any, report: EventHandler) -> RunConfig:
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
        reason = "as requested" if run.size else f"for {format_hours(self.train_data)}" + " on a CPU" * on_cpu
        preset = fit_to_tokenizer(build_speech_config(size, self.tokenizer.target.size), self.tokenizer)
        samples = np.quantile(self.train_data.num_samples, MAX_FRAMES_QUANTILE)
        frontend = replace(get_frontend(preset), max_frames=math.ceil(samples / HOP_SAMPLES))
        ctc = not self.is_translation if run.train.ctc is None else run.train.ctc > 0
        preset = replace(preset, ctc=ctc, frontend=frontend)
        return size, build_model_config(requested, preset), reason

    def choose_size_and_epochs(self) -> tuple[Size, int]:
        minutes = int(self.train_data.num_samples.sum()) // (60 * SAMPLE_RATE)
        return look_up(CPU_SIZE_AND_EPOCHS if self.context.device.type == "cpu" else GPU_SIZE_AND_EPOCHS, minutes)

    def fill_train_config(self, run: RunConfig) -> TrainConfig:
        train, config, device, finetune = run.train, run.model, self.context.device, run.init_from is not None
        assert isinstance(config, Seq2SeqConfig)
        if train.ctc and not config.ctc:
            raise TrainError(f"`train.ctc` must be 0 for a model without a CTC layer, but is {train.ctc}; leave it out")
        if train.compile:
            raise TrainError("`train.compile` must be false for --task speech, whose batches differ in shape")
        ctc = DEFAULT_CTC * (config.ctc and not self.is_translation) if train.ctc is None else train.ctc
        train = replace(train, compile=False, ctc=ctc)
        batch = train.batch_tokens or (CPU_BATCH_STATES if device.type == "cpu" else GPU_BATCH_STATES)
        epochs, divisor = self.choose_size_and_epochs()[1], FINETUNE_DIVISOR if finetune else 1
        estimate = math.ceil(epochs / divisor * self.count_epoch_states(config) / (batch * train.accumulate))
        steps = train.steps or min(autoconfig.MAX_STEPS, max(MIN_STEPS // divisor, estimate))
        warmup = max(1, min(4_000, steps // 10)) if train.warmup is None else train.warmup
        lr = train.lr or (FINETUNE_LR if finetune else LR_BY_SIZE[run.size or "small"])
        return fill_defaults(train, device, batch_tokens=batch, steps=steps, warmup=warmup, lr=lr)

    def count_epoch_states(self, config: Seq2SeqConfig) -> int:
        return int(count_states(self.train_data.num_samples, get_frontend(config).fixed_frames).sum())

    def describe_choices(self, run: RunConfig, size_reason: str) -> Iterator[str]:
        model, train, options = run.model, run.train, self.audio_options
        assert isinstance(model, Seq2SeqConfig)
        assert train.batch_tokens
        yield autoconfig.describe_model(run, size_reason)
        num_batches = math.ceil(self.count_epoch_states(model) / train.batch_tokens)
        seconds = train.batch_tokens * 2 * HOP_SAMPLES / SAMPLE_RATE
        sizes = f"batches of {seconds:,.0f} s of audio, CTC {train.ctc:g}"
        yield from autoconfig.describe_schedule(train, num_batches, "greedy", sizes)
        speeds = ", ".join(f"{speed:g}" for speed in options.speed_perturbation)
        masks = f"{options.time_masks} masks of time and {options.frequency_masks} of frequency"
        yield f"augmentation: speeds {speeds}; {masks} (--set data.audio.speed_perturbation=[1] and so on)"

    def build_batches(
        self,
        recordings: RecordingDataset,
        run: RunConfig,
        batch_tokens: int,
        options: AudioDataConfig | None = None,
        *,
        drop_long: bool = True,
    ) -> SpeechLoader:
        """Batches with the augmentation of `options`; texts longer than the decoder's learned positions are dropped."""
        assert isinstance(run.model, Seq2SeqConfig)
        frontend, decoder = get_frontend(run.model), run.model.decoder
        assert isinstance(decoder, StackConfig)
        return SpeechLoader(
            recordings,
            self.encode_texts(recordings.texts),
            self.tokenizer.target.pad,
            options,
            batch_tokens=batch_tokens,
            mel_bins=frontend.mel_bins,
            fixed_frames=frontend.fixed_frames,
            prefix_length=len(self.prefix_ids),
            max_target_length=getattr(decoder.positions, "max_length", None) if drop_long else None,
            seed=run.train.seed,
        )

    def build_train_batches(self, run: RunConfig) -> SpeechLoader:
        assert run.train.batch_tokens
        return self.build_batches(self.train_data, run, run.train.batch_tokens, self.audio_options)

    def build_valid_batches(self, run: RunConfig) -> SpeechLoader | None:
        return None if self.validation is None else self.build_batches(self.validation, run, base.VALID_BATCH_TOKENS)

    def get_objective_factory(self, run: RunConfig) -> base.ObjectiveFactory:
        return partial(SpeechObjective, ctc=run.train.ctc or 0.0)

    @property
    def metric_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return VALIDATION_METRICS if self.is_translation else (*SPEECH_METRICS, "exact")

    def build_eval_set(self, data: RecordingDataset, split: base.Split) -> EvalSet:
        return EvalSet(
            name=data.name,
            split=split,
            data=data,
            ids=np.arange(len(data)),
            languages=(self.text_language,) * len(data),
            references=data.texts,
            titles=tuple(f"{count / SAMPLE_RATE:.1f} s" for count in data.num_samples),
        )

    def search_texts(
        self, model: Seq2Seq, examples: EvalSet, run: RunConfig, options: SearchOptions
    ) -> Iterator[dict[int, str]]:
        device, objective = self.context.device, SpeechObjective(model)
        transcriber, should_stop = Transcriber(model, self.tokenizer, whisper=self.whisper), self.context.should_stop
        recordings = examples.data.select(examples.ids)
        batches = self.build_batches(recordings, run, EVAL_BATCH_STATES.get(device.type, 4_096), drop_long=False)
        for batch_index in range(batches.num_batches(0)):
            batch = batches.get_batch(0, batch_index).to(device)
            frames, lengths = objective.compute_frames(batch)
            hypotheses = transcriber.search(frames, lengths, self.prefix_ids, options, should_stop=should_stop)
            yield {int(i): hypothesis.text for i, hypothesis in zip(batch.example_ids, hypotheses, strict=True)}

    def compute_max_tokens(self, examples: EvalSet) -> float:
        num_frames = float(examples.data.num_samples[examples.ids].mean()) / HOP_SAMPLES
        return MIN_MAX_LENGTH + num_frames / FRAMES_PER_TOKEN

    def describe_train_data(self) -> str:
        return f"{self.train_data.name}, {format_hours(self.train_data)}"

    def describe_model(self, out: Path) -> base.ModelDescription:
        noun = "speech translator" if self.is_translation else "speech recognizer"
        return base.ModelDescription(
            title=" ".join(["-".join(filter(None, self.languages)), noun]).strip(),
            shell_example=f"attent transcribe {shlex.quote(str(out))} recording.wav",
            python_example=base.build_python_example("Transcriber", out, '.transcribe("recording.wav").text'),
            note="Exact is the share of outputs that equal the reference.",
            samples_title="Sample transcripts",
            sample_labels=("Recording", "Reference", "Output"),
            has_two_sides=True,
        )


def find_splits(data: DataConfig) -> dict[str, list[tuple[str, list[Recording]]]]:
    columns = audio_data.choose_text_columns(data.src, data.tgt)
    splits = base.find_splits(data, lambda path: audio_data.find_recordings(path, columns), "recordings")
    for split in ("train", "valid"):
        if parts := splits[split]:
            joined = [entry for _, part in parts for entry in part]
            splits[split] = [(", ".join(path for path, _ in parts), joined)]
    return splits


def format_hours(recordings: RecordingDataset) -> str:
    minutes = int(recordings.num_samples.sum()) / SAMPLE_RATE / 60
    return f"{minutes / 60:,.1f} hours of audio" if minutes >= 60 else f"{minutes:.2g} minutes of audio"


def choose_tokenizer(config: TokenizerConfig, num_chars: int) -> TokenizerConfig:
    """Characters, or as many subwords as the square root of the characters of the texts."""
    if num_chars < MIN_SUBWORD_CHARS:
        return replace(config, kind="char")
    size = round(num_chars**0.5 / WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    return replace(config, vocab=min(max(size, MIN_VOCAB), MAX_VOCAB))


def build_speech_config(size: Size, vocab: int) -> Seq2SeqConfig:
    """Pre-norm stacks; the encoder, which reads many more states, is deeper."""
    decoder_layers, encoder_changes = STACKS_BY_SIZE[size]
    encoder = replace(StackConfig(), norm_order="pre", activation="gelu", **encoder_changes)
    decoder = replace(mirror_encoder(encoder), layers=decoder_layers)
    return Seq2SeqConfig(
        vocab=vocab, frontend=AudioConfig(), encoder=encoder, decoder=decoder, share_embeddings=False, ctc=True
    )
