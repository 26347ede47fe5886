"""`--task caption`: texts of images, by an encoder of image patches (ViT) and a decoder."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from attent.data import captions as caption_data
from attent.data.arrays import Array
from attent.data.captions import CaptionDataset, CaptionRows
from attent.data.images import ImageDataConfig, ImageShape, choose_shape
from attent.data.text_batches import IGNORE_INDEX
from attent.data.text_corpus import find_text_files
from attent.data.token_store import TokenSequences
from attent.decoding.options import SearchOptions
from attent.decoding.source_search import IMAGE_MAX_LENGTH, Captioner
from attent.interop import load
from attent.models import ModelConfig, Seq2Seq, Seq2SeqConfig, VisionTransformer, build, presets
from attent.models.config import mirror_encoder
from attent.nn import ImageConfig, SinusoidalConfig, StackConfig
from attent.nn.frontends import normalize_pixels
from attent.scoring.metrics import CAPTION_METRICS, METRICS
from attent.text.tokenizer import Tokenizer
from attent.training import autoconfig
from attent.training.autoconfig import describe_schedule, fit_to_tokenizer, look_up
from attent.training.config import RunConfig, Size, TrainConfig, TrainError, UserSettings, build_model_config
from attent.training.events import EventHandler
from attent.training.objective import Objective
from attent.training.tasks import base
from attent.training.tasks import image_classification as classification
from attent.training.tasks.generation_task import EvalSet, GenerationTask, draw_held_out
from attent.training.tasks.image_classification import ShuffledLoader, augment_pixels
from attent.training.tasks.text_task import get_stack, hash_texts

DROPOUT = 0.1
WIDTH_MULTIPLE = 16  # of padded targets, so that there are few shapes to compile
VALID_BATCH_IMAGES = 128


@dataclass(frozen=True)
class CaptionBatch(base.RowBatch):
    pixels: Tensor  # (B, C, S, S)
    inputs: Tensor  # (B, T), of the decoder: the start token, the tag of the language if there are several, the text
    labels: Tensor  # (B, T), the next tokens; IGNORE_INDEX: no loss
    num_patches: int  # of an image, with the class token
    target_counts: Array  # labels of each row

    @property
    def row_length(self) -> int:
        return max(self.num_patches, self.labels.shape[1])

    @property
    def num_targets(self) -> int:
        return int(self.target_counts.sum())

    @property
    def num_tokens(self) -> int:
        return len(self) * self.num_patches + self.num_targets


class CaptionLoader(ShuffledLoader[CaptionBatch]):
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

    def take_batch(self, ids: Array, rng: np.random.Generator) -> CaptionBatch:
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
        tensors = (torch.from_numpy(pixels), torch.from_numpy(inputs), torch.from_numpy(labels))
        target_counts = (labels != IGNORE_INDEX).sum(1)
        return CaptionBatch(*tensors, self.num_patches, target_counts, example_ids=ids)


class CaptionObjective(Objective):
    supports_rdrop = True

    def forward(self, batch: CaptionBatch) -> tuple[Tensor, Tensor]:
        pixels = normalize_pixels(batch.pixels, self.model.config.frontend, self.model.target_embedding.weight)
        doubled = self.rdrop > 0 and self.training
        inputs = [torch.cat([x, x]) if doubled else x for x in (pixels, batch.inputs)]
        states, labels = self._forward_states(*inputs), batch.labels
        return self.compute_token_loss(states, labels.clamp(min=0), labels != IGNORE_INDEX, doubled)

    def compute_states(self, pixels: Tensor, inputs: Tensor) -> Tensor:
        return self.model.decode(inputs, self.model.encode(pixels))


class CaptioningTask(GenerationTask):
    pretrained_classes = (VisionTransformer,)
    objective_class = CaptionObjective
    unit, source_noun = "caption", "images"
    metrics = (*CAPTION_METRICS, "exact", "loss")
    metric_names = tuple(name for name in METRICS if name in (*CAPTION_METRICS, "exact"))
    used_settings = frozenset(
        {"data.images", "data.tokenizer", "data.max_tokens", "train.rdrop", "train.valid_sentences", "decode"}
    )
    default_settings: ClassVar[dict[str, Any]] = {
        "train": classification.ImageClassificationTask.default_settings["train"],
        # Captions name left and right, and objects that would be erased.
        "data": {"images": {"flip": 0.0, "erase": 0.0}},
    }
    look_example_input = "picture.png"
    held_out_method = "all captions of images drawn at random"

    def __init__(self, run: RunConfig, tokenizer: Tokenizer | None, context: base.RunContext) -> None:
        self.context, self.image_options, data = context, run.data.images or ImageDataConfig(), run.data
        self.max_tokens, self.is_new_decoder = data.max_tokens, False
        files = find_text_files(data.train, caption_data.SUFFIXES)
        rows = caption_data.read_captions(files.train)
        initial = find_image_config(run.model or (load(run.init_from).config if run.init_from else None))
        self.shape = ImageShape.from_config(initial) if initial else choose_shape(rows.split, self.image_options)
        classification.check_image_shape(self.image_options, self.shape, initial)
        self.data_files, train = rows.files, self.load_captions(rows)
        valid, self.tests = base.load_eval_sets(
            data,
            files,
            caption_data.SUFFIXES,
            lambda paths: self.load_captions(caption_data.read_captions(paths)),
            context,
        )
        self.is_held_out = valid is None and data.hold_out != 0
        if self.is_held_out:
            train, valid = hold_out_images(train, data.hold_out, run.train.seed, context)
        self.train_data, self.validation = train, valid
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
        self.context.warn_of_skipped(dataset)
        return dataset

    def train_tokenizer(self, run: RunConfig) -> Tokenizer:
        """A tag for each language if there are several, as multilingual translators have it."""
        languages = sorted(set(filter(None, self.train_data.languages)))
        tags, texts = languages if len(languages) > 1 else (), self.train_data.texts
        return base.train_text_tokenizer(texts, run.data.tokenizer, self.context, run.train.seed, tags=tags)

    def check_languages(self) -> None:
        known = self.tokenizer.target.tags
        for dataset in filter(None, (self.train_data, self.validation, *self.tests)):
            unknown = next((language for language in dataset.languages if known and language not in known), "")
            if unknown != "":
                problem = "but a row has none" if unknown is None else f"but `{unknown}` is another"
                raise TrainError(f"{dataset.name}: its languages must be among {', '.join(known)}, {problem}")

    @property
    def title(self) -> str:
        return "captions"

    @property
    def fingerprints(self) -> Mapping[str, str]:
        keys = {"data": self.train_data, "validation set": self.validation}
        return {
            name: "" if data is None else f"{data.images.store_key} {hash_texts((*data.texts, *map(str, data.paths)))}"
            for name, data in keys.items()
        } | {"tokenizer": self.tokenizer.fingerprint}

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
        count, on_cpu = len(self.train_data), self.context.device.type == "cpu"
        size = run.size or ("tiny" if on_cpu else look_up(classification.SIZE_AND_EPOCHS_BY_IMAGES, count)[0])
        reason = "as requested" if run.size else f"for {count:,} captions" + " on a CPU" * on_cpu
        patch = requested.get("model", {}).get("frontend", {}).get("patch_size")
        patch = patch or classification.choose_patch(self.shape.size)
        vision = classification.build_vision_config(size, self.shape, patch, self.train_data.images)
        image = classification.extract_image_config(vision)
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
            return super().build_finetune_config(model, requested, origin)
        if requested.get("train", {}).get("lora"):
            raise TrainError(f"`train.lora` needs a caption model, but {origin} has no decoder; leave it out")
        config = build_caption_config("tiny", size, classification.extract_image_config(model.config))
        encoder = model.config.stack
        config = replace(config, encoder=encoder, decoder=build_decoder_config(encoder))
        tables = {name: table for name, table in requested.items() if name in ("size", "model")}
        return autoconfig.build_finetune_config(fit_to_tokenizer(config, self.tokenizer), tables, (size, size), origin)

    def build_model(self, config: Seq2SeqConfig, pretrained: Seq2Seq | VisionTransformer | None) -> Seq2Seq:
        if not isinstance(pretrained, VisionTransformer):
            return super().build_model(config, pretrained)
        model = build(config)
        model.encoder.load_state_dict(pretrained.encoder.state_dict())
        names = ("patch_embedding.", "class_token")
        weights = {name: x for name, x in pretrained.state_dict().items() if name.startswith(names)}
        model.source_embedding.load_state_dict(weights)
        return model

    def fill_train_config(self, run: RunConfig) -> TrainConfig:
        num_patches, width = classification.count_positions(get_frontend(run.model)), get_stack(run.model).width
        finetune, device = bool(run.init_from) and not self.is_new_decoder, self.context.device
        sizes = len(self.train_data), num_patches, width
        return classification.fill_image_train_config(run.train, device, *sizes, finetune=finetune)

    def describe_choices(self, run: RunConfig, size_reason: str) -> Iterator[str]:
        batches = self.build_train_batches(run)
        yield autoconfig.describe_model(run, size_reason)
        sizes = f"batches of {batches.batch_size:,} captions"
        yield from describe_schedule(run.train, batches.num_batches(0), "greedy", batch_text=sizes)
        yield classification.describe_augmentation(self.image_options, self.shape.size)

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
        assert run.train.batch_tokens
        batch_size = max(1, run.train.batch_tokens // classification.count_positions(get_frontend(run.model)))
        return self.build_loader(self.train_data, run, self.image_options, batch_size)

    def build_valid_batches(self, run: RunConfig) -> CaptionLoader | None:
        return None if self.validation is None else self.build_loader(self.validation, run, None, VALID_BATCH_IMAGES)

    def build_eval_set(self, data: CaptionDataset, split: base.Split) -> EvalSet:
        items = data.list_items()
        return EvalSet(
            name=Path(data.name).name,
            split=split,
            data=data,
            ids=np.array([item.image_id for item in items]),
            languages=tuple(item.language for item in items),
            references=tuple(item.references for item in items),
            titles=tuple(data.paths[item.image_id].name for item in items),
        )

    def search_texts(
        self, model: Seq2Seq, examples: EvalSet, run: RunConfig, options: SearchOptions
    ) -> Iterator[dict[int, str]]:
        captioner = Captioner(model, self.tokenizer)
        for language in dict.fromkeys(examples.languages):
            group = [i for i, other in enumerate(examples.languages) if other == language]
            for start in range(0, len(group), VALID_BATCH_IMAGES):
                block = group[start : start + VALID_BATCH_IMAGES]
                pixels, _ = examples.data.images.take(examples.ids[block])
                texts = captioner.caption(
                    list(torch.from_numpy(pixels)),
                    options,
                    to=language if captioner.languages else None,
                    should_stop=self.context.should_stop,
                )
                yield {i: hypothesis.text for i, hypothesis in zip(block, texts, strict=True)}

    def compute_max_tokens(self, examples: EvalSet) -> float:
        return IMAGE_MAX_LENGTH

    def describe_model(self, out: Path) -> base.ModelDescription:
        languages = self.tokenizer.target.tags
        flag, to = (f" --to {languages[0]}", f", to={languages[0]!r}") if languages else ("", "")
        return base.ModelDescription(
            title="A caption model",
            shell_example=f"attent caption {shlex.quote(str(out))} picture.png{flag}",
            python_example=base.build_python_example("Captioner", out, f'.caption(["picture.png"]{to})[0].text'),
            note="Exact is the share of outputs that equal a reference.",
            samples_title="Sample captions",
            sample_labels=("Image", "References", "Output"),
        )


def find_image_config(config: ModelConfig | None) -> ImageConfig | None:
    image = config.frontend if isinstance(config, Seq2SeqConfig) else config
    return image if isinstance(image, ImageConfig) else None


def get_frontend(config: Any) -> ImageConfig:
    frontend = config.frontend
    assert isinstance(frontend, ImageConfig)
    return frontend


def build_caption_config(size: Size, vocab: int, image: ImageConfig) -> Seq2SeqConfig:
    """ViT, with sinusoids (learned positions start small: places are learned late); a decoder of half the layers."""
    stack = replace(presets.VIT, **classification.STACK_BY_SIZE[size])
    encoder = replace(stack, positions=SinusoidalConfig(), dropout=DROPOUT)
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
    rest, held_out = draw_held_out(
        len(captions.paths), requested_count, classification.MAX_HELD_OUT, (seed, 0x1D), "images", context
    )
    return captions.select_images(rest), captions.select_images(held_out)
