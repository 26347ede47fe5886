"""Whisper as `transformers` stores it <-> our Seq2Seq of audio; configs of search and preprocessing are kept."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attent import settings
from attent.interop import conversion, hf_folder, marian
from attent.interop.conversion import ConfigKeys, OpenFolder
from attent.interop.hf_folder import GENERATION_FILE, Device, LazyTensor, StrPath, make_key_error
from attent.models import Seq2Seq, Seq2SeqConfig, build_empty
from attent.models.folder import has_manifest, read_side_file
from attent.models.pruning import restore_heads
from attent.nn import AudioConfig, LearnedConfig, StackConfig
from attent.nn.frontends import FRAME_SAMPLES, HOP_SAMPLES, SAMPLE_RATE
from attent.storage.errors import FolderError
from attent.storage.hub import locate_model
from attent.text.tokenizer_formats import WhisperVocabulary

FAMILY = "Whisper"
PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
KEPT_FILES = (GENERATION_FILE, PREPROCESSOR_FILE, PROCESSOR_FILE, "normalizer.json")  # of a folder, for export

TARGET = "model.decoder.embed_tokens.weight"
OUTPUT = "proj_out.weight"
TENSOR_MAPPINGS = [*conversion.read_mappings("whisper"), *marian.LAYER_MAPPINGS]
KEY_WEIGHT, KEY_BIAS = ".k_proj.weight", ".k_proj.bias"


class ZeroTensor(LazyTensor):
    def read(self) -> Tensor:
        return torch.zeros(self.shape)


def add_key_biases(stored: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Add the biases of keys, which Whisper leaves out, as zeros.

    One adds the same number to all scores of a query, which never changes their softmax: `save` drops it.
    """
    keys = [tensor for name, tensor in stored.items() if name.endswith(KEY_WEIGHT)]
    names = [key.name.removesuffix(KEY_WEIGHT) + KEY_BIAS for key in keys]
    zeros = {
        name: ZeroTensor(key.path, name, torch.Size([key.rows]), key.stored_dtype, None)
        for name, key in zip(names, keys, strict=True)
    }
    return {**zeros, **stored}


@dataclass(frozen=True, kw_only=True)
class WhisperKeys(marian.SharedKeys):
    num_mel_bins: int = 80
    max_source_positions: int = 1500
    max_target_positions: int = 448


CONFIG_KEYS = ConfigKeys.read("whisper", WhisperKeys)


def to_config(keys: WhisperKeys, where: Path) -> Seq2SeqConfig:
    encoder, decoder = (to_stack(keys, side, where) for side in ("encoder", "decoder"))
    with conversion.explain_config_errors(where, CONFIG_KEYS.field_to_key):
        return Seq2SeqConfig(
            vocab=keys.vocab_size,
            frontend=AudioConfig(mel_bins=keys.num_mel_bins, fixed_frames=2 * keys.max_source_positions),
            encoder=encoder,
            decoder=decoder,
            share_embeddings=False,
            tie_output=keys.tie_word_embeddings,
            scale_embeddings=False,
            start_id=conversion.get_start_id(keys.decoder_start_token_id, None, where),
            end_id=conversion.get_end_id(keys.eos_token_id, where),
        )


def to_stack(keys: WhisperKeys, side: str, where: Path) -> StackConfig:
    position_key = "max_target_positions" if side == "decoder" else "max_source_positions"
    with conversion.explain_config_errors(where, {"max_length": position_key}):
        positions = LearnedConfig(max_length=getattr(keys, position_key))
        return marian.build_stack(keys, side, where, norm_order="pre", positions=positions)


def load(folder: StrPath, *, dtype: torch.dtype | None = None, device: Device | None = None) -> Seq2Seq:
    opened = OpenFolder.open(folder, CONFIG_KEYS, ["encoder_layers", "decoder_layers"])
    check_features(opened.root, opened.keys.num_mel_bins)
    config = to_config(opened.keys, opened.config_path)
    groups = [[TARGET, OUTPUT]] if config.tie_output else [[TARGET], [OUTPUT]]
    opened = replace(opened, stored=add_key_biases(opened.stored)).resolve_ties(groups, "`tie_word_embeddings`")
    return opened.load_into(build_empty(config), TENSOR_MAPPINGS, dtype, device)


def check_features(root: Path, mel_bins: int) -> None:
    required = {
        "sampling_rate": SAMPLE_RATE,
        "n_fft": FRAME_SAMPLES,
        "hop_length": HOP_SAMPLES,
        "feature_size": mel_bins,
        "dither": 0,
    }
    for name in (PREPROCESSOR_FILE, PROCESSOR_FILE):
        data = hf_folder.read_json(root / name) if (root / name).is_file() else {}
        features = data.get("feature_extractor", data)
        for key, value in required.items():
            actual = features.get(key, value) if isinstance(features, dict) else None
            if actual != value:
                advice = "; get the model's own file"
                raise make_key_error(root / name, key, str(value), "Whisper model", actual, advice)


def read_kept_files(folder: StrPath) -> dict[str, bytes]:
    """Read the files besides weights and tokenizer of a Whisper folder, or of one made from it, to save them again."""
    root = locate_model(folder)
    if has_manifest(root):
        contents = {name: read_side_file(root, name) for name in KEPT_FILES}
        return {name: content for name, content in contents.items() if content is not None}
    return {name: (root / name).read_bytes() for name in KEPT_FILES if (root / name).is_file()}


@dataclass(frozen=True, kw_only=True)
class GenerationKeys:
    suppress_tokens: tuple[int, ...] | None = None
    begin_suppress_tokens: tuple[int, ...] | None = None
    forced_decoder_ids: tuple[tuple[int, int | None], ...] | None = None  # position and token
    is_multilingual: bool | None = None
    language: str | None = None
    alignment_heads: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class WhisperSettings:
    suppressed_tokens: tuple[int, ...]  # never generated
    banned_first: tuple[int, ...]  # not generated right after the prompt
    is_multilingual: bool  # False: English only; prompts have no language and no task
    default_language: str | None  # of a model for one of its languages; None: to be detected
    alignment_heads: tuple[tuple[int, int], ...]  # (layer, head) whose cross-attention follows the words; (): unknown


def read_settings(folder: StrPath, vocabulary: WhisperVocabulary) -> WhisperSettings:
    """Read generation_config.json of a Whisper folder or one made from it; the oldest folders have only config.json."""
    root, content = locate_model(folder), read_kept_files(folder).get(GENERATION_FILE)
    where = root / (hf_folder.CONFIG_FILE if content is None else GENERATION_FILE)
    try:
        data = hf_folder.read_json(where) if content is None else settings.parse_json(content, str(where))
        known = {field.name: data[field.name] for field in fields(GenerationKeys) if field.name in data}
        keys = settings.from_dict(GenerationKeys, known, where=str(where))
    except settings.SettingsError as error:
        raise FolderError(str(error)) from error
    forced = dict(keys.forced_decoder_ids or ()).get(1)
    by_id: dict[int | None, str] = {vocabulary.get_tag_id(language): language for language in vocabulary.tags}
    declared = (keys.language or "").removeprefix("<|").removesuffix("|>")
    language = declared if declared in vocabulary.tags else by_id.get(forced)
    is_multilingual = bool(vocabulary.tags) and (forced is None or language is not None)  # else another prompt
    return WhisperSettings(
        suppressed_tokens=conversion.drop_invalid_ids(keys.suppress_tokens or (), vocabulary.size),
        banned_first=conversion.drop_invalid_ids(keys.begin_suppress_tokens or (), vocabulary.size),
        is_multilingual=is_multilingual if keys.is_multilingual is None else keys.is_multilingual,
        default_language=language,
        alignment_heads=keys.alignment_heads or (),
    )


def detect_languages(model: Seq2Seq, source: Tensor, vocabulary: WhisperVocabulary) -> list[str]:
    """Return the most probable language of each recording, (B, T, M)."""
    cache = model.init_decoder_state(source, capacity=1)
    start = torch.full((len(source), 1), model.config.start_id, device=source.device)
    ids = torch.tensor([vocabulary.get_tag_id(language) for language in vocabulary.tags], device=source.device)
    best = model.step(start, cache)[:, 0, ids].argmax(-1)
    return [vocabulary.tags[i] for i in best.tolist()]


def save(model: Seq2Seq, folder: StrPath, *, pad: int | None = None) -> None:
    """Write a folder of `transformers`. `pad` is by default the end token, as published; pruned heads become zeros."""
    model = restore_heads(model)
    config = model.config
    frontend = check_expressible(config)
    pad = conversion.choose_pad(pad, config.end_id, config.vocab)
    tokens = {"decoder_start_token_id": config.start_id, "eos_token_id": config.end_id, "pad_token_id": pad}
    tensors = conversion.export_tensors(model, TENSOR_MAPPINGS)
    keys = to_hf_config(config, frontend, conversion.get_dtype_name(model))
    hf_folder.write_folder(
        folder,
        config=keys | tokens,
        extra_files={
            GENERATION_FILE: tokens | {"max_length": keys["max_target_positions"]},
            PREPROCESSOR_FILE: to_preprocessor_config(frontend),
        },
        tensors={name: tensor for name, tensor in tensors.items() if not name.endswith(KEY_BIAS)},
    )


def check_expressible(config: Seq2SeqConfig) -> AudioConfig:
    frontend = config.frontend
    if not isinstance(frontend, AudioConfig):
        conversion.reject_field(FAMILY, "frontend", frontend, "audio")
    if frontend.fixed_frames is None or frontend.fixed_frames % 2:
        # Whisper has no masks: padding has to be part of every recording, also in training.
        conversion.reject_field(FAMILY, "frontend.fixed_frames", frontend.fixed_frames, "an even number")
    encoder, decoder = config.stacks
    length = decoder.positions if isinstance(decoder.positions, LearnedConfig) else LearnedConfig(max_length=448)
    positions = {"encoder": LearnedConfig(max_length=frontend.fixed_frames // 2), "decoder": length}
    for side, stack in (("encoder", encoder), ("decoder", decoder)):
        conversion.check_stack(
            stack,
            FAMILY,
            side=side,
            expressed={"causal", "cross_attention", "activation_dropout"},
            required={"positions": (positions[side],), "norm_order": ("pre",), "norm_eps": (marian.NORM_EPS,)},
        )
    marian.check_equal_sides(config, FAMILY, ("width", *marian.SHARED_STACK_FIELDS))
    names = ("output_bias", "scale_embeddings", "scale_output", "output_transform", "ctc")
    conversion.check_fields(config, FAMILY, dict.fromkeys(names, False))
    return frontend


def to_hf_config(config: Seq2SeqConfig, frontend: AudioConfig, dtype: str) -> dict[str, Any]:
    encoder, decoder = config.stacks
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "is_encoder_decoder": True,
        "vocab_size": config.output_vocab,
        "num_mel_bins": frontend.mel_bins,
        **conversion.write_fields({"max_length": "max_source_positions"}, encoder.positions),
        **conversion.write_fields({"max_length": "max_target_positions"}, decoder.positions),
        **marian.write_stacks(config),
        "scale_embedding": False,
        "tie_word_embeddings": config.tie_output,
        "bos_token_id": config.end_id,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        "dtype": dtype,
    }


def to_preprocessor_config(frontend: AudioConfig) -> dict[str, Any]:
    assert frontend.fixed_frames is not None
    samples = frontend.fixed_frames * HOP_SAMPLES
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": frontend.mel_bins,
        "sampling_rate": SAMPLE_RATE,
        "hop_length": HOP_SAMPLES,
        "n_fft": FRAME_SAMPLES,
        "chunk_length": samples // SAMPLE_RATE,  # transformers has whole seconds only
        "n_samples": samples,
        "nb_max_frames": frontend.fixed_frames,
        "padding_value": 0.0,
        "return_attention_mask": False,
    }
