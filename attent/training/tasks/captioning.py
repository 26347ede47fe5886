"""`--task caption`: texts of images, by an encoder of image patches (ViT) and a decoder.

`attent.data.captions` reads the files; augmentation and most defaults are those of `image_classification`.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from attent.data import captions as caption_data
from attent.data.arrays import Array
from attent.data.captions import CaptionDataset, CaptionItem, CaptionRows
from attent.data.images import ImageDataConfig, ImageShape, choose_shape, compute_channel_stats
from attent.data.pairs import CorpusError
from attent.data.text_batches import IGNORE_INDEX
from attent.data.text_corpus import find_text_files, list_eval_files
from attent.data.token_store import TokenSequences
from attent.decoding.captioner import Captioner
from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.options import SearchOptions
from attent.decoding.source_search import IMAGE_MAX_LENGTH
from attent.formatting import format_count
from attent.interop import load
from attent.models import ModelConfig, Seq2Seq, Seq2SeqConfig, VisionTransformer, build, build_empty, presets
from attent.models.config import mirror_encoder
from attent.models.weights import assign_weights
from attent.nn import ImageConfig, LearnedConfig, SinusoidalConfig, StackConfig
from attent.nn.frontends import normalize_pixels
from attent.scoring.metrics import CAPTION_METRICS, CorpusScores, format_metrics, score_corpus
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import train_monolingual_tokenizer
from attent.training import autoconfig
from attent.training.autoconfig import describe_schedule, fit_to_tokenizer, look_up
from attent.training.config import RunConfig, Size, TrainConfig, TrainError, UserSettings, build_model_config
from attent.training.events import EventHandler, ValidationSample
from attent.training.loss import linear_cross_entropy, rdrop_loss
from attent.training.objective import Objective
from attent.training.stop_signals import StopRequested
from attent.training.tasks import base
from attent.training.tasks import image_classification as classification
from attent.training.tasks.image_batches import ShuffledLoader, augment_pixels
from attent.training.tasks.text_task import hash_texts

DROPOUT = 0.1
WIDTH_MULTIPLE = 16  # of padded targets, so that there are few shapes to compile
VALID_BATCH_IMAGES = 128
NUM_SAMPLES, NUM_CARD_SAMPLES, NUM_TIMED_IMAGES = 3, 5, 16


# ---- batches and the loss --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaptionBatch:
    """Images as bytes, each with a caption."""

    pixels: Tensor  # (B, C, S, S)
    inputs: Tensor  # (B, T), of the decoder: the start token, the tag of the language if there are several, the text
    labels: Tensor  # (B, T), the next tokens; IGNORE_INDEX: no loss
    example_ids: Array
    num_patches: int  # of an image, with the class token
    num_targets: int

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def row_length(self) -> int:
        return max(self.num_patches, self.labels.shape[1])

    @property
    def num_tokens(self) -> int:
        return len(self) * self.num_patches + self.num_targets

    @property
    def num_padded_tokens(self) -> int:
        return len(self) * self.row_length

    def slice_rows(self, start: int, stop: int) -> CaptionBatch:
        part = self._map_tensors(lambda x: x[start:stop])
        num_targets = int((part.labels != IGNORE_INDEX).sum())
        return replace(part, example_ids=self.example_ids[start:stop], num_targets=num_targets)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CaptionBatch:
        return self._map_tensors(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> CaptionBatch:
        return self._map_tensors(lambda x: x.pin_memory())

    def _map_tensors(self, function: Callable[[Tensor], Tensor]) -> CaptionBatch:
        pixels, inputs, labels = map(function, (self.pixels, self.inputs, self.labels))
        return replace(self, pixels=pixels, inputs=inputs, labels=labels)


class CaptionLoader(ShuffledLoader[CaptionBatch]):
    """Batches of captions with their images."""

    def __init__(
        self,
        captions: CaptionDataset,
        tokenizer: Tokenizer,
        config: ImageDataConfig | None,
        *,
        start_id: int,
        max_tokens: int,
        batch_size: int,
        num_patches: int,
        seed: int = 0,
    ) -> None:
        super().__init__(len(captions), config, batch_size=batch_size, seed=seed)
        self.captions, self.start_id, self.num_patches = captions, start_id, num_patches
        target = tokenizer.target
        self.prefix_length = 1 if target.tags else 0
        tags = {language: [target.get_tag_id(language)] for language in target.tags}
        rows = zip(captions.languages, target.encode(captions.texts), strict=True)
        self.targets = TokenSequences.from_rows(
            [[*tags.get(str(language), []), *row[: max_tokens - 1], target.end] for language, row in rows]
        )

    def build_batch(self, ids: Array, rng: np.random.Generator) -> CaptionBatch:
        pixels, _ = self.captions.images.take(self.captions.image_ids[ids])
        if self.config is not None:
            pixels = augment_pixels(pixels, self.config, rng)
        targets = [self.targets[i] for i in ids]
        width = -(-max(map(len, targets)) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        inputs = np.full((len(ids), width), self.start_id)  # after a text, nothing attends to them
        labels = np.full_like(inputs, IGNORE_INDEX)
        for row, target in enumerate(targets):
            inputs[row, 1 : len(target)] = target[:-1]
            labels[row, self.prefix_length : len(target)] = target[self.prefix_length :]
        tensors = [torch.from_numpy(x) for x in (pixels, inputs, labels)]
        num_targets = int((labels != IGNORE_INDEX).sum())
        return CaptionBatch(tensors[0], tensors[1], tensors[2], ids, self.num_patches, num_targets)


class CaptionObjective(Objective):
    """Label-smoothed cross-entropy of captions; with `rdrop` > 0, the R-Drop loss in training."""

    supports_rdrop = True

    def forward(self, batch: CaptionBatch) -> tuple[Tensor, Tensor]:
        """Return sums over the target tokens: the loss, and the plain cross-entropy in nats, without a gradient."""
        output, labels = self.model.output, batch.labels.flatten()
        pixels = normalize_pixels(batch.pixels, self.model.config.frontend, self.model.target_embedding.weight)
        doubled = self.rdrop > 0 and self.training
        inputs = [torch.cat([x, x]) if doubled else x for x in (pixels, batch.inputs)]
        states = output.prepare_states(self._forward_states(*inputs)).flatten(0, 1)  # (B, T, E) -> (N, E)
        targets = (output.weight, output.bias, labels.clamp(min=0), labels != IGNORE_INDEX, self.smoothing)
        if not doubled:
            return linear_cross_entropy(states, *targets)
        first, second = states.chunk(2)
        return rdrop_loss(first, second, *targets, self.rdrop)

    def compute_states(self, pixels: Tensor, inputs: Tensor) -> Tensor:
        """(B, C, S, S), (B, T) -> (B, T, E)"""
        states: Tensor = self.model.decode(inputs, self.model.encode(pixels))
        return states


# ---- the task --------------------------------------------------------------------------------------------------------


class CaptioningTask(base.Task):
    model_class = Seq2Seq
    pretrained_classes = (VisionTransformer,)
    config_class = Seq2SeqConfig
    objective_class = CaptionObjective
    unit = "caption"
    metrics = (*CAPTION_METRICS, "exact", "loss")
    used_settings = frozenset(
        {"data.images", "data.tokenizer", "data.max_tokens", "train.rdrop", "train.valid_sentences", "decode"}
    )
    default_settings: ClassVar[dict[str, Any]] = {
        "train": classification.ImageClassificationTask.default_settings["train"],
        # Captions name left and right, and objects that would be erased.
        "data": {"images": {"flip": 0.0, "erase": 0.0}},
    }
    cpu_minutes = autoconfig.CPU_MINUTES
    look_example_input = "picture.png"

    def __init__(self, run: RunConfig, tokenizer: Tokenizer | None, context: base.RunContext) -> None:
        """Read the images at the size of the model to resume or to start from, if there is one."""
        self.context, self.image_options, data = context, run.data.images or ImageDataConfig(), run.data
        self.max_tokens, self.is_new_decoder = data.max_tokens, False
        if self.image_options.mixup:
            raise TrainError("`data.images.mixup` must be 0 for captions, which cannot be mixed; leave it out")
        files = find_text_files(data.train, caption_data.SUFFIXES)
        rows = caption_data.read_captions(files.train)
        initial = find_image_config(run.model or (load(run.init_from).config if run.init_from else None))
        self.shape = ImageShape.from_config(initial) if initial else choose_shape(rows.split, self.image_options)
        classification.check_image_shape(self.image_options, self.shape, initial)
        self.files, train = rows.files, self.load_captions(rows)
        valid_files = list_eval_files(data.valid, "valid", caption_data.SUFFIXES) if data.valid else files.valid
        valid = self.load_captions(caption_data.read_captions(valid_files)) if valid_files else None
        self.is_held_out = valid is None and data.hold_out != 0
        if self.is_held_out:
            train, valid = hold_out_images(train, data.hold_out, run.train.seed, context)
        self.train_captions, self.validation = train, valid
        self.tests = []
        for path in list_eval_files(data.test, "test", caption_data.SUFFIXES) if data.test else files.test:
            try:
                self.tests.append(self.load_captions(caption_data.read_captions([path])))
            except CorpusError as error:
                base.reject_or_skip_test_set(str(error), bool(data.test), context)
        for other in [*([valid] if valid and not self.is_held_out else []), *self.tests]:
            if shared := len(set(train.paths) & set(other.paths)):
                context.warn(f"{other.name}: {shared:,} of its images are also trained on, so its scores are too good")
        context.note(
            f"images: {len(train.paths):,} for training, {self.shape.size} x {self.shape.size}, with {len(train):,} "
            "captions"
        )
        self.tokenizer: Tokenizer = tokenizer or self.train_tokenizer(run)
        self.check_languages()

    def load_captions(self, rows: CaptionRows) -> CaptionDataset:
        dataset = caption_data.prepare_captions(rows, self.shape, self.context.data_dir)
        if problem := dataset.describe_skipped():
            self.context.warn(problem)
        return dataset

    def train_tokenizer(self, run: RunConfig) -> Tokenizer:
        """A tag for each language if there are several, as multilingual translators have it."""
        self.context.note("training the tokenizer ...")
        train = self.train_captions
        languages = sorted({language for language in train.languages if language})
        tokenizer = train_monolingual_tokenizer(
            train.texts,
            run.data.tokenizer,
            tags=languages if len(languages) > 1 else (),
            seed=run.train.seed,
        )
        tags = f", {len(languages)} languages" if len(languages) > 1 else ""
        self.context.note(f"tokenizer: {run.data.tokenizer.kind}, {tokenizer.target.size:,} subwords{tags}")
        return tokenizer

    def check_languages(self) -> None:
        """Each caption must be in a language of the model, if it has several."""
        known = self.tokenizer.target.tags
        for dataset in filter(None, (self.train_captions, self.validation, *self.tests)):
            unknown = next((language for language in dataset.languages if known and language not in known), "")
            if unknown != "":
                problem = "but a row has none" if unknown is None else f"but `{unknown}` is another"
                raise TrainError(f"{dataset.name}: its languages must be among {', '.join(known)}, {problem}")

    @property
    def title(self) -> str:
        return "captions"

    @property
    def fingerprints(self) -> Mapping[str, str]:
        keys = {"data": self.train_captions, "validation set": self.validation}
        return {
            name: "" if data is None else f"{data.images.store_key} {hash_texts((*data.texts, *map(str, data.paths)))}"
            for name, data in keys.items()
        } | {"tokenizer": self.tokenizer.fingerprint}

    # ---- model and schedule

    @classmethod
    def placeholder_config(cls, vocab: int, requested: Mapping[str, Any]) -> Seq2SeqConfig:
        image = classification.ImageClassificationTask.placeholder_config(
            vocab, {"model": (requested.get("model") or {}).get("frontend")}
        )
        return build_caption_config("tiny", vocab, ImageConfig(image_size=image.image_size, patch_size=1))

    @classmethod
    def adapt_run(cls, run: RunConfig, requested: UserSettings, config: ModelConfig, report: EventHandler) -> RunConfig:
        if find_image_config(config) is None:
            raise TrainError(
                f"{run.init_from}: must be a caption model or an image encoder for --task caption, but its source is "
                "not an image; give another --from"
            )
        return run

    def choose_model(self, run: RunConfig, requested: UserSettings) -> tuple[Size, Seq2SeqConfig, str]:
        count, on_cpu = len(self.train_captions), self.context.device.type == "cpu"
        size = run.size or ("tiny" if on_cpu else look_up(classification.SIZE_AND_EPOCHS_BY_IMAGES, count)[0])
        reason = "as requested" if run.size else f"for {count:,} captions" + " on a CPU" * on_cpu
        patch = requested.get("model", {}).get("frontend", {}).get("patch_size")
        patch = patch or classification.choose_patch(self.shape.size)
        if self.shape.size % patch:
            raise TrainError(f"`model.frontend.patch_size` must divide {self.shape.size}, the side of the images")
        mean, std = compute_channel_stats(self.train_captions.images)
        image = ImageConfig(
            image_size=self.shape.size,
            channels=self.shape.channels,
            patch_size=patch,
            class_token=False,
            mean=mean,
            std=std,
        )
        preset = fit_to_tokenizer(build_caption_config(size, self.tokenizer.target.size, image), self.tokenizer)
        config = build_model_config(requested, preset)
        if ImageShape.from_config(get_frontend(config)) != self.shape:
            raise TrainError("`model.frontend` follows the images: set `data.images` instead")
        return size, config, reason

    def build_finetune_config(
        self, model: Seq2Seq | VisionTransformer, requested: UserSettings, origin: str
    ) -> Seq2SeqConfig:
        """The config of the model, or that of an image encoder with a new decoder of its shape."""
        size = self.tokenizer.target.size
        self.is_new_decoder = isinstance(model, VisionTransformer)
        if isinstance(model, Seq2Seq):
            return autoconfig.build_finetune_config(model.config, requested, (size, size), origin)
        if requested.get("train", {}).get("lora"):
            raise TrainError(f"`train.lora` needs a caption model, but {origin} has no decoder; leave it out")
        image = ImageConfig(**{field.name: getattr(model.config, field.name) for field in fields(ImageConfig)})
        config = build_caption_config("tiny", size, image)
        encoder = model.config.stack
        config = replace(config, encoder=encoder, decoder=build_decoder_config(encoder))
        tables = {name: table for name, table in requested.items() if name in ("size", "model")}
        return autoconfig.build_finetune_config(fit_to_tokenizer(config, self.tokenizer), tables, (size, size), origin)

    def build_model(self, config: Seq2SeqConfig, pretrained: Seq2Seq | VisionTransformer | None) -> Seq2Seq:
        if isinstance(pretrained, Seq2Seq):
            return assign_weights(build_empty(config), pretrained.state_dict(), "--from").train()
        model = build(config)
        if pretrained is not None:
            model.encoder.load_state_dict(pretrained.encoder.state_dict())
            names = ("patch_embedding.", "class_token")
            weights = {name: x for name, x in pretrained.state_dict().items() if name.startswith(names)}
            model.source_embedding.load_state_dict(weights)
        return model

    def fill_train_config(
        self, run: RunConfig, size: Size | None, config: Seq2SeqConfig, *, finetune: bool
    ) -> TrainConfig:
        num_patches = classification.count_positions(get_frontend(config))
        return classification.fill_image_train_config(
            run.train,
            self.context.device,
            len(self.train_captions),
            num_patches,
            config.encoder.width,
            finetune=finetune and not self.is_new_decoder,
        )

    def describe_choices(self, run: RunConfig, size_reason: str) -> Iterator[str]:
        model = run.model
        assert isinstance(model, Seq2SeqConfig)
        image, batches = get_frontend(model), self.build_train_batches(run)
        yield (
            f"model: {f'{run.size}, ' if run.size else ''}{model.encoder.layers}+{model.decoder.layers} layers, width "
            f"{model.encoder.width}, {image.num_patches} patches of {image.patch_size} x {image.patch_size}, "
            f"vocabulary {model.vocab:,}; {size_reason}"
        )
        sizes = f"batches of {batches.batch_size:,} captions"
        yield from describe_schedule(run.train, batches.num_batches(0), "greedy", batch_text=sizes)
        yield classification.describe_augmentation(self.image_options, self.shape.size)

    # ---- batches and scores

    def build_loader(
        self, captions: CaptionDataset, run: RunConfig, options: ImageDataConfig | None, batch_size: int
    ) -> CaptionLoader:
        assert isinstance(run.model, Seq2SeqConfig)
        return CaptionLoader(
            captions,
            self.tokenizer,
            options,
            start_id=run.model.start_id,
            max_tokens=self.max_tokens,
            batch_size=batch_size,
            num_patches=classification.count_positions(get_frontend(run.model)),
            seed=run.train.seed,
        )

    def build_train_batches(self, run: RunConfig) -> CaptionLoader:
        assert isinstance(run.model, Seq2SeqConfig)
        assert run.train.batch_tokens
        batch_size = max(1, run.train.batch_tokens // classification.count_positions(get_frontend(run.model)))
        return self.build_loader(self.train_captions, run, self.image_options, batch_size)

    def build_valid_batches(self, run: RunConfig) -> CaptionLoader | None:
        return None if self.validation is None else self.build_loader(self.validation, run, None, VALID_BATCH_IMAGES)

    def build_evaluator(self, run: RunConfig) -> base.Evaluator | None:
        """Caption a part of the validation set greedily."""
        valid = self.validation
        if valid is None or not run.train.valid_sentences:
            return None
        items = base.select_evenly(valid.list_items(), run.train.valid_sentences)

        def evaluate(model: Seq2Seq) -> base.EvalResult:
            outputs = self.caption(model, valid, items, SearchOptions(beam_size=1))
            scores = score_captions(outputs, items)
            return base.EvalResult(metrics=scores.metrics, samples=select_samples(valid, items, outputs, NUM_SAMPLES))

        return evaluate

    def caption(
        self,
        model: Seq2Seq,
        captions: CaptionDataset,
        items: Sequence[CaptionItem],
        options: SearchOptions,
        action: str = "",
    ) -> list[str]:
        """Caption images; with an `action`, progress is reported."""
        captioner = Captioner(model, self.tokenizer)
        outputs: dict[CaptionItem, str] = {}
        report = self.context.track_progress(action, "images", len(items))
        for language in dict.fromkeys(item.language for item in items):
            group = [item for item in items if item.language == language]
            for start in range(0, len(group), VALID_BATCH_IMAGES):
                block = group[start : start + VALID_BATCH_IMAGES]
                pixels, _ = captions.images.take(np.array([item.image_id for item in block]))
                try:
                    texts = captioner.caption(
                        list(torch.from_numpy(pixels)),
                        options,
                        to=language if captioner.languages else None,
                        should_stop=self.context.should_stop,
                    )
                except SearchCancelled as cancelled:
                    raise StopRequested from cancelled
                outputs |= {item: hypothesis.text for item, hypothesis in zip(block, texts, strict=True)}
                if action:
                    report(len(outputs))
        return [outputs[item] for item in items]

    def score_model(self, model: Seq2Seq, run: RunConfig) -> Iterator[base.FinalScores]:
        """Score each set and, of a model of several languages, each language of it."""
        options = SearchOptions(beam_size=run.decode.beam_size, length_penalty=run.decode.length_penalty)
        sets: list[tuple[CaptionDataset, base.Split, str]] = [
            (captions, "test", Path(captions.name).name) for captions in self.tests
        ]
        if self.validation is not None:
            name = "held-out part" if self.is_held_out else Path(self.validation.name).name
            sets.insert(0, (self.validation, "validation", name))
        for captions, split, name in sets:
            items = captions.list_items()
            outputs = self.caption(model, captions, items, options, f"scoring {split} {name}")
            yield self.score_outputs(captions, items, outputs, name, split, options)
            languages = dict.fromkeys(item.language for item in items)
            for language in languages if len(languages) > 1 else ():
                indices = [i for i, item in enumerate(items) if item.language == language]
                part = [items[i] for i in indices], [outputs[i] for i in indices]
                yield self.score_outputs(captions, *part, f"{name} ({language})", split, options)

    def score_outputs(
        self,
        captions: CaptionDataset,
        items: Sequence[CaptionItem],
        outputs: Sequence[str],
        name: str,
        split: base.Split,
        options: SearchOptions,
    ) -> base.FinalScores:
        scores, decoding = score_captions(outputs, items), f"beam {options.beam_size}"
        return base.FinalScores(
            name=name,
            split=split,
            num_examples=len(items),
            metrics=scores.metrics,
            summary=f"{format_metrics(scores.metrics)} ({len(items):,} images, {decoding})",
            decoding=f"{decoding}, length penalty {options.length_penalty:g}",
            signatures=scores.signatures,
            samples=select_samples(captions, items, outputs, NUM_CARD_SAMPLES),
        )

    def estimate_scoring_seconds(self, model: Seq2Seq, run: RunConfig) -> float:
        sets = [captions for captions in (self.validation, *self.tests) if captions is not None]
        if not sets:
            return 0.0
        sample = sets[0].list_items()[:NUM_TIMED_IMAGES]
        start = time.monotonic()
        self.caption(model, sets[0], sample, SearchOptions(beam_size=run.decode.beam_size))
        seconds = (time.monotonic() - start) * sum(len(captions.list_items()) for captions in sets) / len(sample)
        # An untrained model generates as many tokens as it may, not as many as a caption has.
        tokens = sum(map(len, self.tokenizer.target.encode(sets[0].texts))) / len(sets[0])
        return seconds * min(1.0, tokens / IMAGE_MAX_LENGTH)

    # ---- the model card

    def describe_data(self) -> base.DataSummary:
        train, valid = self.train_captions, self.validation
        dropped = [("not usable", len(train.skipped))] if train.skipped else []
        dropped += [("held out for validation", len(valid))] if valid is not None and self.is_held_out else []
        corpus = base.CorpusStats(
            name=train.name,
            num_read=len(train) + sum(count for _, count in dropped),
            num_used=len(train),
            dropped=tuple(dropped),
            files=base.hash_files([str(path) for path in self.files], self.files),
        )
        method = "" if valid is None else valid.name
        return base.DataSummary(
            corpora=(corpus,),
            source_tokens=0,
            target_tokens=0,
            data_key=train.images.store_key,
            num_held_out=0 if valid is None else len(valid),
            held_out_method="all captions of images drawn at random" if self.is_held_out else method,
        )

    def describe_model(self, out: Path) -> base.ModelDescription:
        languages = self.tokenizer.target.tags
        flag, to = (f" --to {languages[0]}", f", to={languages[0]!r}") if languages else ("", "")
        command = f"attent caption {shlex.quote(str(out))} picture.png{flag}"
        return base.ModelDescription(
            title="A caption model",
            shell_example=command,
            python_example=base.build_python_example("Captioner", out, f'caption(["picture.png"]{to})[0].text'),
            next_step=f"try it: {command}",
            note="Exact is the share of outputs that equal a reference.",
            samples_title="Sample captions",
            sample_labels=("Image", "References", "Output"),
        )


# ---- helpers ---------------------------------------------------------------------------------------------------------


def find_image_config(config: ModelConfig | None) -> ImageConfig | None:
    """Return the image settings of a caption model or an image encoder."""
    image = config.frontend if isinstance(config, Seq2SeqConfig) else config
    return image if isinstance(image, ImageConfig) else None


def get_frontend(config: Seq2SeqConfig) -> ImageConfig:
    assert isinstance(config.frontend, ImageConfig)
    return config.frontend


def build_caption_config(size: Size, vocab: int, image: ImageConfig) -> Seq2SeqConfig:
    """ViT, and a decoder of half its layers."""
    positions = LearnedConfig(max_length=classification.count_positions(image))
    encoder = replace(presets.VIT, **classification.STACK_BY_SIZE[size], positions=positions, dropout=DROPOUT)
    decoder = build_decoder_config(encoder)
    return Seq2SeqConfig(vocab=vocab, frontend=image, encoder=encoder, decoder=decoder, share_embeddings=False)


def build_decoder_config(encoder: StackConfig) -> StackConfig:
    """Mirror the encoder, with half its layers and positions for any length."""
    decoder = mirror_encoder(replace(encoder, dropout=DROPOUT))
    return replace(decoder, layers=max(1, encoder.layers // 2), positions=SinusoidalConfig())


def hold_out_images(
    captions: CaptionDataset, requested_count: int | None, seed: int, context: base.RunContext
) -> tuple[CaptionDataset, CaptionDataset]:
    """Return (the rest, some images with all of their captions), drawn by the seed."""
    available = len(captions.paths)
    default_count = min(classification.MAX_HELD_OUT, max(1, available // 10))
    count = default_count if requested_count is None else requested_count
    base.check_hold_out(count, available, "images")
    order = np.random.default_rng((seed, 0x1D)).permutation(available)
    held_out = captions.select_images(np.sort(order[:count]))
    context.note(
        f"held out {count:,} of {format_count(available, 'image')} for validation (name your own with --valid)"
    )
    return captions.select_images(np.sort(order[count:])), held_out


def score_captions(outputs: Sequence[str], items: Sequence[CaptionItem]) -> CorpusScores:
    languages = {item.language for item in items}
    language = languages.pop() if len(languages) == 1 else None
    names = (*CAPTION_METRICS, "exact")
    return score_corpus(outputs, [item.references for item in items], language, names=names)


def select_samples(
    captions: CaptionDataset, items: Sequence[CaptionItem], outputs: Sequence[str], max_samples: int
) -> tuple[ValidationSample, ...]:
    return tuple(
        ValidationSample(source=captions.paths[item.image_id].name, reference=" | ".join(item.references), output=text)
        for item, text in base.select_evenly(list(zip(items, outputs, strict=True)), max_samples)
    )
