"""Defaults of settings: a saved model, run or checkpoint without a key is read with them, and the documentation states
them. A change of one is a change of what old files mean.
"""

from __future__ import annotations

from dataclasses import MISSING, fields

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
from attent.text.vocabulary import SentencePieceOptions, SubwordSampling
from attent.training.run_options import DataConfig, DecodeConfig, TrainConfig
from attent.training.state import TrainState

# False, 0, "" and () are left out.
DEFAULTS: dict[type, dict[str, object]] = {
    BatchConfig: {"batch_tokens": 4_096, "max_tokens": 256, "layout": "packed", "too_long": "drop"},
    EncodingConfig: {"sampling_seed": (0, 0)},
    FilterConfig: {
        "max_chars": 2_000, "length_ratio": 4.0, "identical": True, "script": True, "control": True, "empty": True,
        "duplicates": True,
    },
    ImageDataConfig: {"flip": 0.5, "shift": 0.1, "erase": 0.25},
    ReadOptions: {},
    HeadSelection: {"shift": True},
    GenerationOptions: {
        "max_new_tokens": 200, "n": 1, "temperature": 0.8, "top_p": 0.95, "seed": 1, "beam_size": 1,
        "length_penalty": 1.0,
    },
    SamplingOptions: {"temperature": 1.0, "top_p": 1.0, "seed": 1},
    SearchOptions: {
        "beam_size": 4, "n_best": 1, "length_penalty": 0.6, "length_penalty_type": "avg", "beam_groups": 1,
        "diversity_penalty": 0.5,
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
    SubwordSampling: {"rate": 0.1},
    DataConfig: {"max_tokens": 256, "too_long": "drop"},
    DecodeConfig: {"beam_size": 4, "length_penalty": 0.6},
    TrainConfig: {
        "seed": 1, "accumulate": 1, "optimizer": "adam", "betas": (0.9, 0.98), "eps": 1e-9, "label_smoothing": 0.1,
        "average": 5, "keep_last": 5, "valid_sentences": 500, "workers": 1,
    },
    TrainState: {},
}  # fmt: skip


@pytest.mark.parametrize("settings_class", DEFAULTS, ids=lambda kind: kind.__name__)
def test_defaults(settings_class: type) -> None:
    defaults = {field.name: field.default for field in fields(settings_class) if field.default is not MISSING}
    assert {name: value for name, value in defaults.items() if value} == DEFAULTS[settings_class]
