"""Defaults and limits. A saved model, run or checkpoint without a key is read with the defaults of settings, and the
documentation states them; a changed limit or threshold changes reports, data and models without any error.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from importlib import import_module

import pytest

from attent.data.batch_plan import BatchConfig
from attent.data.encode import EncodingConfig
from attent.data.filters import FilterConfig
from attent.data.images import ImageDataConfig
from attent.data.pairs import ReadOptions
from attent.decoding.alignment import HeadSelection
from attent.decoding.options import GenerationOptions, SamplingOptions, SearchOptions
from attent.decoding.output_format import OutputFormat
from attent.models.config import CausalConfig, EncoderConfig, Seq2SeqConfig, VisionConfig
from attent.nn.config import StackConfig
from attent.nn.positions import LearnedConfig, Llama3Scaling, RelativeConfig, RotaryConfig
from attent.nn.recurrent import LSTMDecoderConfig, LSTMEncoderConfig
from attent.text.tokenizer_training import TokenizerConfig
from attent.text.vocabulary import SentencePieceOptions
from attent.training.run_options import DataConfig, DecodeConfig, TrainConfig
from attent.training.state import TrainState

# False, 0, "" and () are left out.
DEFAULTS: dict[type, dict[str, object]] = {
    BatchConfig: {"batch_tokens": 4_096, "max_tokens": 256, "layout": "packed", "too_long": "drop"},
    EncodingConfig: {"augmentation_seed": (0, 0)},
    FilterConfig: {
        "max_chars": 2_000, "length_ratio": 4.0, "identical": True, "script": True, "control": True, "empty": True,
        "duplicates": True,
    },
    ImageDataConfig: {"flip": 0.5, "shift": 0.1, "erase": 0.25},
    ReadOptions: {},
    HeadSelection: {"shift": True},
    GenerationOptions: {"max_new_tokens": 200, "n": 1, "temperature": 0.8, "top_p": 0.95, "seed": 1},
    SamplingOptions: {"temperature": 1.0, "top_p": 1.0, "seed": 1},
    SearchOptions: {
        "beam_size": 4, "n_best": 1, "length_penalty": 0.6, "length_penalty_type": "avg", "beam_groups": 1,
        "diversity_penalty": 0.5, "prevent_loops": True,
    },
    OutputFormat: {"type": "text", "n_best": 1},
    CausalConfig: {"tie_output": True},
    EncoderConfig: {},
    Seq2SeqConfig: {"share_embeddings": True, "tie_output": True, "scale_embeddings": True, "start_id": 1, "end_id": 2},
    VisionConfig: {
        "image_size": 224, "patch_size": 16, "channels": 3, "class_token": True, "pooling": "class", "mean": (0.5,),
        "std": (0.5,), "fit": "crop", "resample": "bilinear",
    },
    StackConfig: {
        "layers": 6, "width": 512, "heads": 8, "compatibility": "dot", "ffn_width": 2_048, "activation": "relu",
        "norm": "layer", "norm_order": "post", "norm_eps": 1e-5, "bias": True, "dropout": 0.1,
    },
    LearnedConfig: {"max_length": 512},
    Llama3Scaling: {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 8_192},
    RelativeConfig: {"buckets": 32, "max_distance": 128},
    RotaryConfig: {"base": 10_000.0, "order": "halves"},
    LSTMDecoderConfig: {"layers": 4, "width": 512, "dropout": 0.1, "attention": "additive", "input_feeding": True},
    LSTMEncoderConfig: {"layers": 4, "width": 512, "dropout": 0.1},
    TokenizerConfig: {"kind": "bpe", "joint": True},
    SentencePieceOptions: {"add_bos": True},
    DataConfig: {"max_tokens": 256, "too_long": "drop"},
    DecodeConfig: {"beam_size": 4, "length_penalty": 0.6},
    TrainConfig: {
        "seed": 1, "accumulate": 1, "optimizer": "adam", "betas": (0.9, 0.98), "eps": 1e-9, "label_smoothing": 0.1,
        "average": 5, "keep_last": 5, "valid_sentences": 500, "workers": 1,
    },
    TrainState: {},
}  # fmt: skip

# Limits and thresholds that decide about a result; sizes of blocks and caches change the speed only.
CONSTANTS: dict[str, dict[str, object]] = {
    "attent.data.report": {"EXCERPT_CHARS": 200, "MIN_WORDS": 4},
    "attent.data.dates": {"TEST_FRACTION": 0.02, "VALID_FRACTION": 0.01, "TEXTS_PER_DATE": 4},
    "attent.data.filters": {
        "FILTER_SAMPLE_SIZE": 1_000, "RATIO_SMOOTHING": 20, "MAX_TRANSLATION_RATIO": 2.0, "WIDE_CHAR_WEIGHT": 3,
        "MIN_FOREIGN_LETTERS": 12, "MIN_SENTENCE_WORDS": 4, "MIN_SENTENCE_WIDE_CHARS": 12,
    },
    "attent.data.formats.streams": {"MAX_LINE_BYTES": 1_048_576, "EXCERPT_CHARS": 80},
    "attent.data.formats.xml": {"MAX_DEPTH": 256, "MAX_TAG_BYTES": 4_194_304, "MAX_UNIT_CHARS": 4_194_304},
    "attent.data.images": {"PHOTO_SIZE": 224, "MAX_PIXELS": 134_217_728},
    "attent.data.builtin": {"MAX_HELD_OUT_PAIRS": 2_000, "HELD_OUT_DIVISOR": 20, "MAX_COMPRESSION_RATIO": 50},
    "attent.data.report_text": {
        "MIN_TRAINING_PAIRS": 10_000, "MAX_CONTAMINATION": 0.005, "MAX_SHORT_CONTAMINATION": 0.1,
        "PIPE_WIDTH": 80, "MAX_WIDTH": 110, "MAX_NAME_WIDTH": 50,
    },
    "attent.data.split": {
        "BUDGET_DIVISOR": 5, "SOURCE_BUDGET_DIVISOR": 10, "MIN_SOURCE_BUDGET": 3, "CANDIDATES_PER_PAIR": 8,
        "MIN_CANDIDATES": 1_000, "SHARED_TARGETS_DIVISOR": 4,
    },
    "attent.data.text_batches": {
        "MASKED_FRACTION": 0.15, "REPLACE_BY_MASK": 0.8, "REPLACE_BY_RANDOM": 0.1, "MIN_WINDOWS_PER_DOCUMENT": 4,
        "NOISE_DENSITY": 0.15, "MEAN_SPAN_LENGTH": 3.0, "MIN_TEXT_TOKENS": 2,
    },
    "attent.data.text_corpus": {"MAX_HELD_OUT_CHARS": 500_000, "FEW_DOCUMENTS": 20, "MIN_SHARED_CHARS": 20},
    "attent.decoding.alignment": {"MAX_SELECTION_PAIRS": 500, "MIN_SHARPNESS": 0.05},
    "attent.decoding.constraints.token_rules": {"MAX_LOOP_PERIOD": 8, "MIN_LOOP_REPEATS": 4, "MIN_LOOP_TOKENS": 8},
    "attent.decoding.input_lines": {"MAX_LINE_BYTES": 16_777_216},
    "attent.decoding.quality": {"MAX_NGRAM": 6, "BETA": 2},
    "attent.decoding.options": {"MAX_EXTRA_TOKENS": 50},
    "attent.decoding.pipeline": {"MAX_LISTED_SKIPS": 20, "MAX_ALIGNED_WORDS": 2_000},
    "attent.decoding.translator": {"MAX_SEGMENTS": 1_048_576, "MAX_UNSPLIT_TOKENS": 200, "DEFAULT_MAX_TOKENS": 256},
    "attent.inspection.ablation_run": {
        "MIN_USEFUL_BLEU": 1.0, "SIGNIFICANCE_LEVEL": 0.05, "DEFAULT_MAX_BLEU_DROP": 0.2, "MAX_LOSS_PER_BLEU": 0.1,
    },
    "attent.inspection.head_stats": {
        "DEFAULT_MAX_PAIRS": 500, "MAX_TOKENS": 512, "MIN_WORDS": 2, "DOMINANT_SHARE": 0.5, "COMBINED_SHARE": 0.6,
        "ALIGNED_SHARE": 0.7, "LOOSELY_ALIGNED_SHARE": 0.6, "MIN_CONFIDENCE": 0.5,
        "UNIFORM_ENTROPY": 0.9, "DIFFUSE_ENTROPY": 0.8, "SHARP_ENTROPY": 0.15,
    },
    "attent.inspection.inspectors.base": {
        "TOP_K": 10, "LONG_TEXT_TOP_K": 3, "LONG_TEXT_STEPS": 300, "MAX_DENSE_WEIGHTS": 1_500_000,
        "MAX_IMAGE_WEIGHTS": 6_000_000, "MAX_SPARSE_WEIGHTS": 800_000, "MIN_WEIGHTS_PER_ROW": 4,
        "MAX_QKV_VALUES": 1_750_000,
    },
    "attent.inspection.inspectors.text": {"CONTINUATION_TOKENS": 16},
    "attent.models.folder": {"MAX_FILE_BYTES": 134_217_728, "READ_ATTEMPTS": 5},
    "attent.nn.argument_checks": {"MAX_SIZE": 16_777_216, "MAX_LAYERS": 1_000},
    "attent.scoring.evaluate": {"WORD_LIMITS": (10, 20, 30, 40, 50), "CHARACTER_LIMITS": (20, 40, 60, 80, 100)},
    "attent.scoring.metrics": {"NUM_RESAMPLES": 1_000, "SIGNIFICANCE": 0.05, "SCRIPT_SAMPLE": 1_000},
    "attent.settings": {"MAX_BYTES": 16_777_216, "MAX_DEPTH": 64},
    "attent.storage.manifest": {"MAX_MANIFEST_BYTES": 65_536},
    "attent.text.language_id": {
        "MAX_ORDER": 4, "NUM_BUCKETS": 8_192, "SMOOTHING": 0.5, "MAX_LEARNED_CHARS": 2_000_000,
        "MIN_LEARNED_CHARS": 2_000, "MIN_CHARS": 20, "MIN_MARGIN": 0.2, "MIN_SHARE": 0.2, "MAX_EXAMPLES": 3,
        "CLDR_MARGIN": 0.1, "MIN_COMMON_CHARS": 400, "MIN_COMMON_SHARE": 0.8, "MIN_SURPRISE": 0.5,
    },
    "attent.text.scripts": {"MIN_MAIN_SHARE": 0.9, "MIN_LETTERS": 20},
    "attent.text.tokenizer_training": {
        "MAX_SAMPLE_CHARS": {"bpe": 20_000_000, "unigram": 5_000_000, "char": 20_000_000}, "MAX_LINE_CHARS": 1_000,
        "MIN_VOCAB": 512, "MAX_VOCAB": 32_768, "VOCAB_MULTIPLE": 64, "RARE_ONE_IN": 1_000_000,
    },
    "attent.text.vocabulary": {"PAD": 0, "START": 1, "END": 2, "UNKNOWN": 3},
    "attent.training.autoconfig": {
        "CPU_MINUTES": 30.0, "MIN_STEPS": 2_000, "MAX_STEPS": 300_000, "NUM_VALIDATIONS": 50, "DEFAULT_PATIENCE": 10,
        "BATCH_TOKENS_BY_SIZE": {"tiny": 4_096, "small": 8_192, "base": 25_600, "big": 25_600},
        "COMPILE_MIN_STEPS": 10_000, "BUDGET_MARGIN": 0.97, "MAX_SCORING_SHARE": 0.4,
    },
    "attent.training.loop": {"MAX_NONFINITE_STEPS": 10, "MAX_ROLLBACKS": 3, "ROLLBACK_LR_FACTOR": 0.5},
    "attent.training.events": {"EXIT_INTERRUPTED": 130, "EXIT_TERMINATED": 143},
    "attent.training.tasks.base": {
        "MODERN_RECIPE": {
            "optimizer": "adamw", "schedule": "cosine", "betas": [0.9, 0.98], "eps": 1e-8, "weight_decay": 0.1,
            "clip_norm": 1.0, "label_smoothing": 0.0,
        },
    },
    "attent.training.tasks.image_classification": {
        "MAX_ERASED_AREA": 0.2, "MAX_HELD_OUT": 5_000, "GPU_BATCH_IMAGES": 512, "CPU_BATCH_IMAGES": 128,
        "MAX_PATCHES": 196,
        "SIZE_AND_EPOCHS_BY_IMAGES": (
            (0, ("tiny", 200)), (20_000, ("small", 100)), (500_000, ("base", 60)), (5_000_000, ("big", 30)),
        ),
        "CPU_EPOCHS": 20, "MIN_STEPS": 1_000, "FINETUNE_DIVISOR": 10, "BASE_LR": 0.001, "FINETUNE_LR": 0.0001,
    },
    "attent.training.tasks.language_modeling": {
        "PROMPT_TOKENS": 24, "SAMPLE_TOKENS": 64, "NUM_SAMPLES": 2,
        "NUM_SENTINELS": 100, "SMALL_VOCAB": 2_000, "NUM_SENTINELS_SMALL_VOCAB": 32,
    },
    "attent.training.tasks.text_classification": {"NUM_SAMPLES": 3, "NUM_CARD_SAMPLES": 5, "MAX_LISTED_LABELS": 12},
    "attent.training.tasks.text_task": {
        "CPU_SIZE_BY_TOKENS": ((0, "tiny"), (50_000_000, "small")),
        "GPU_SIZE_BY_TOKENS": ((0, "tiny"), (500_000, "small"), (100_000_000, "base")),
        "SIZE_BY_WIDTH": ((0, "tiny"), (200, "small"), (600, "base"), (900, "big")),
    },
    "attent.training.tasks.generation_task": {"NUM_SAMPLES": 3, "NUM_CARD_SAMPLES": 5},
    "attent.training.tasks.translation_data": {"LANGUAGE_SAMPLE_SIZE": 2_000, "MAX_DROPPED_SHARE": 0.01},
}  # fmt: skip

# Layers, width, heads, (width of a head,) width of the feed-forward network.
STACKS: dict[str, dict[str, tuple[int, ...]]] = {
    "attent.training.tasks.image_classification": {
        "tiny": (4, 128, 4, 512), "small": (8, 256, 8, 1_024), "base": (12, 384, 6, 1_536), "big": (12, 768, 12, 3_072),
    },
    "attent.training.tasks.language_modeling": {
        "tiny": (3, 128, 4, 32, 256), "small": (4, 256, 4, 64, 640), "base": (8, 512, 8, 64, 1_024),
        "big": (12, 768, 12, 64, 2_048),
    },
    "attent.training.tasks.text_task": {
        "tiny": (4, 128, 4, 512), "small": (6, 384, 6, 1_536), "base": (12, 768, 12, 3_072),
        "big": (24, 1_024, 16, 4_096),
    },
}  # fmt: skip

# Epochs by tokens, of fine-tuning, minimum of steps; rates, of fine-tuning; dropout by tokens; batches; warm-up.
RECIPES: dict[str, tuple[object, ...]] = {
    "attent.training.tasks.language_modeling.CausalLMTask": (
        ((0, 60), (5_000_000, 20), (50_000_000, 6), (500_000_000, 2)), 3, 2_000, (2e-3, 1e-3, 6e-4, 3e-4),
        (3e-4, 2e-4, 1e-4, 5e-5), ((0, 0.2), (20_000_000, 0.1), (500_000_000, 0.0)), (16_384, 16_384, 32_768, 32_768),
        0.05,
    ),
    "attent.training.tasks.language_modeling.MaskedLMTask": (
        ((0, 100), (5_000_000, 40), (50_000_000, 15), (500_000_000, 4)), 3, 2_000, (1e-3, 5e-4, 2e-4, 1e-4),
        (5e-4, 2e-4, 5e-5, 3e-5), ((0, 0.1),), (16_384, 16_384, 32_768, 32_768), 0.1,
    ),
    "attent.training.tasks.language_modeling.SpanCorruptionTask": (
        ((0, 60), (5_000_000, 30), (50_000_000, 10), (500_000_000, 3)), 3, 2_000, (1e-3, 1e-3, 5e-4, 3e-4),
        (5e-4, 3e-4, 2e-4, 1e-4), ((0, 0.1), (500_000_000, 0.0)), (16_384,) * 4, 0.1,
    ),
    "attent.training.tasks.text_classification.TextClassificationTask": (
        ((0, 15), (1_000_000, 10), (50_000_000, 4)), 4, 300, (5e-4, 3e-4, 1e-4, 5e-5), (3e-4, 1e-4, 3e-5, 2e-5),
        ((0, 0.3), (1_000_000, 0.2), (100_000_000, 0.1)), (4_096,) * 4, 0.1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_of_tasks(name: str) -> None:
    module, _, task = name.rpartition(".")
    recipe = getattr(import_module(module), task).size_defaults
    rates = (tuple(recipe.lr_by_size.values()), tuple(recipe.finetune_lr_by_size.values()))
    batches = tuple(recipe.batch_tokens_by_size.values())
    epochs = (recipe.epochs_by_tokens, recipe.finetune_epochs, recipe.min_steps)
    assert (*epochs, *rates, recipe.dropout_by_tokens, batches, recipe.warmup_ratio) == RECIPES[name]


@pytest.mark.parametrize("module", CONSTANTS)
def test_limits_and_thresholds(module: str) -> None:
    constants = vars(import_module(module))
    assert {name: constants[name] for name in CONSTANTS[module]} == CONSTANTS[module]


@pytest.mark.parametrize("module", STACKS)
def test_sizes_of_models(module: str) -> None:
    constants = vars(import_module(module))
    stacks = constants.get("STACK_BY_SIZE") or constants["SPAN_STACK_BY_SIZE"]
    assert {size: tuple(stack.values()) for size, stack in stacks.items()} == STACKS[module]


@pytest.mark.parametrize("settings_class", DEFAULTS, ids=lambda kind: kind.__name__)
def test_defaults(settings_class: type) -> None:
    defaults = {field.name: field.default for field in fields(settings_class) if field.default is not MISSING}
    assert {name: value for name, value in defaults.items() if value} == DEFAULTS[settings_class]
