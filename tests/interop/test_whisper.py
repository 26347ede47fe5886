"""Whisper: search with suppressed tokens and timestamps matches `transformers`; round trips, settings and refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from attent.decoding.options import SearchOptions
from attent.decoding.source_search import search_sources
from attent.interop import load, whisper
from attent.interop.export import convert_model
from attent.models import Seq2Seq, Seq2SeqConfig, build
from attent.models.config import mirror_encoder
from attent.nn import AudioConfig, ImageConfig, LearnedConfig, SinusoidalConfig, StackConfig
from attent.storage.errors import FolderError
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_formats import WhisperVocabulary, build_prompt
from tests.interop.families import make_speech_batch, make_whisper, run_hf_whisper, run_whisper, transformers
from tests.interop.folders import assert_rejected, change_json
from tests.interop.parity import exact, same_bits, until, worst
from tests.text.imported_tokenizers import whisper_folder

END, START, NO_TIMESTAMPS, TIMESTAMPS = 300, 301, 310, 40  # of the tokenizer
VOCAB, LENGTH = NO_TIMESTAMPS + 1 + TIMESTAMPS, 30
LANGUAGES, TASKS = {"<|en|>": 302, "<|zh|>": 303, "<|de|>": 304}, {"translate": 305, "transcribe": 306}
GENERATION = {
    "alignment_heads": [[0, 1], [1, 0]],
    "begin_suppress_tokens": [17, END],
    "forced_decoder_ids": [[1, None], [2, 306]],
    "is_multilingual": True,
    "lang_to_id": LANGUAGES,
    "task_to_id": TASKS,
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "return_timestamps": False,
    "suppress_tokens": [1, 2, 7, 8, 9, START, *TASKS.values(), 307, 308, 309],
}
PREPROCESSOR = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "sampling_rate": 16000}
WHISPER_TINY = {  # the keys of a published config.json, at toy size
    "_name_or_path": "openai/whisper-tiny",
    "activation_dropout": 0.0,
    "activation_function": "gelu",
    "architectures": ["WhisperForConditionalGeneration"],
    "attention_dropout": 0.0,
    "begin_suppress_tokens": [220, 50257],
    "bos_token_id": 20,
    "d_model": 12,
    "decoder_attention_heads": 3,
    "decoder_ffn_dim": 24,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 2,
    "decoder_start_token_id": 21,
    "dropout": 0.0,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 24,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 2,
    "eos_token_id": 20,
    "forced_decoder_ids": [[1, 22], [2, 23], [3, 24]],
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "max_length": 9,
    "max_source_positions": 5,
    "max_target_positions": 9,
    "model_type": "whisper",
    "num_hidden_layers": 2,
    "num_mel_bins": 4,
    "pad_token_id": 19,  # in large-v3 not that of generation_config.json
    "scale_embedding": False,
    "suppress_tokens": [1, 2],
    "torch_dtype": "float32",
    "transformers_version": "4.27.0.dev0",
    "use_cache": True,
    "vocab_size": 31,
}


def make_searchable(seed: int, folder: Path) -> Any:
    """Save a random model with a tokenizer; texts and timestamps are equally probable, and transcripts end."""
    tokens = {"pad_token_id": END, "bos_token_id": END, "eos_token_id": END, "decoder_start_token_id": START}
    sizes = {"vocab_size": VOCAB, "max_target_positions": LENGTH, "num_mel_bins": 8, "tie_word_embeddings": False}
    theirs = make_whisper(seed, **tokens, **sizes)
    with torch.no_grad():
        theirs.model.decoder.embed_tokens.weight.mul_(4)  # so that the tokens decide, not the biases
        theirs.proj_out.weight.mul_(2)
        bonus = torch.zeros(VOCAB, dtype=torch.float64)
        bonus[END], bonus[NO_TIMESTAMPS + 1 :] = 2.5, 4 - torch.arange(TIMESTAMPS) / 6
        bias = theirs.model.decoder.layer_norm.bias
        theirs.proj_out.weight += torch.outer(bonus, bias / bias.square().sum())
    theirs.generation_config = transformers.GenerationConfig.from_dict({**GENERATION, **tokens, "max_length": LENGTH})
    theirs.save_pretrained(folder)
    whisper_folder(folder, TIMESTAMPS)
    return theirs


def load_vocabulary(folder: Path) -> WhisperVocabulary:
    vocabulary = Tokenizer.load(folder).target
    assert isinstance(vocabulary, WhisperVocabulary)
    return vocabulary


def transcribe(folder: Path, source: Tensor, language: str, task: Any) -> list[list[int]]:
    model, vocabulary = load(folder), load_vocabulary(folder)
    assert isinstance(model, Seq2Seq)
    settings = whisper.read_settings(folder, vocabulary)
    prompt = build_prompt(vocabulary, language, task)
    options = SearchOptions(beam_size=1, max_length=LENGTH, banned_first=settings.banned_first)  # cut, as there
    hypotheses = search_sources(
        model,
        Tokenizer.load(folder),
        source,
        options=options,
        prefix_ids=prompt,
        suppressed_tokens=settings.suppressed_tokens,
    )
    return [[*x.token_ids, END] if x.is_finished else list(x.token_ids) for x in hypotheses]


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 30))])
def test_greedy_search_matches_transformers(seed: int, tmp_path: Path) -> None:
    theirs = make_searchable(seed, tmp_path)
    source = make_speech_batch(theirs.config, seed).source.repeat(3, 1, 1)
    source = source * torch.linspace(0.3, 2, len(source))[:, None, None]
    language, task = (("de", "transcribe"), ("zh", "translate"))[seed % 2]
    with exact(theirs):
        expected = theirs.generate(
            source.transpose(1, 2),
            language=language,
            task=task,
            return_timestamps=False,
            force_unique_generate_call=True,  # one window
        )
    got = transcribe(tmp_path, source, language, task)
    assert got == [until(row, END) for row in expected[:, 4:].tolist()]


def test_the_cases_of_greedy_search_differ(tmp_path: Path) -> None:
    """Transcripts of random models have different tokens."""
    rows: list[list[int]] = []
    for seed in range(3):
        theirs = make_searchable(seed, tmp_path / str(seed))
        source = make_speech_batch(theirs.config, seed).source
        rows += transcribe(tmp_path / str(seed), source, "de", "transcribe")
    assert len({tuple(row) for row in rows}) > 6


def test_detected_languages_are_those_of_transformers(tmp_path: Path) -> None:
    seen = set()
    for seed in range(3):
        theirs = make_searchable(seed, tmp_path / str(seed))
        ours, vocabulary = load(tmp_path / str(seed)), load_vocabulary(tmp_path / str(seed))
        assert isinstance(ours, Seq2Seq)
        source = make_speech_batch(theirs.config, seed).source
        frames = 2 * theirs.config.max_source_positions
        ids = theirs.detect_language(source.transpose(1, 2), num_segment_frames=frames)
        languages = whisper.detect_languages(ours, source, vocabulary)
        assert [LANGUAGES[f"<|{language}|>"] for language in languages] == ids.tolist()
        seen |= set(languages)
    assert len(seen) > 1


# Settings.


def test_settings_are_read_from_the_generation_config(tmp_path: Path) -> None:
    make_searchable(0, tmp_path)
    vocabulary = load_vocabulary(tmp_path)
    assert whisper.read_settings(tmp_path, vocabulary) == whisper.WhisperSettings(
        suppressed_tokens=(1, 2, 7, 8, 9, START, 305, 306, 307, 308, 309),
        banned_first=(17, END),
        is_multilingual=True,
        default_language=None,
        alignment_heads=((0, 1), (1, 0)),
    )


@pytest.mark.parametrize(
    ("keys", "multilingual", "language"),
    [
        ({}, True, None),
        ({"forced_decoder_ids": [[1, None], [2, 306]]}, True, None),
        ({"forced_decoder_ids": [[1, 304], [2, 306], [3, NO_TIMESTAMPS]]}, True, "de"),
        ({"forced_decoder_ids": [[1, NO_TIMESTAMPS]]}, False, None),  # English only, before `is_multilingual`
        ({"is_multilingual": False}, False, None),
        ({"language": "<|zh|>", "forced_decoder_ids": [[1, 304]]}, True, "zh"),
        ({"language": "de"}, True, "de"),
        ({"language": "german"}, True, None),
    ],
)
def test_default_languages(keys: dict[str, Any], multilingual: bool, language: str | None, tmp_path: Path) -> None:
    vocabulary = load_vocabulary(whisper_folder(tmp_path, TIMESTAMPS))
    for name in ("config.json", "generation_config.json"):  # the oldest folders have the first only
        (tmp_path / name).write_text(json.dumps({"model_type": "whisper", "suppress_tokens": [4, 10**6], **keys}))
        settings = whisper.read_settings(tmp_path, vocabulary)
        assert (settings.is_multilingual, settings.default_language) == (multilingual, language)
        assert (settings.suppressed_tokens, settings.banned_first) == ((4,), ())
        (tmp_path / name).write_text("{}")


def test_settings_of_a_wrong_type_are_rejected(tmp_path: Path) -> None:
    vocabulary = load_vocabulary(whisper_folder(tmp_path, TIMESTAMPS))
    (tmp_path / "generation_config.json").write_text('{"suppress_tokens": ["a"]}')
    with pytest.raises(FolderError, match=r"generation_config.json: `suppress_tokens\[0\]` must be"):
        whisper.read_settings(tmp_path, vocabulary)


@pytest.mark.parametrize(
    ("name", "nested"), [("preprocessor_config.json", False), ("processor_config.json", True)], ids=["one", "nested"]
)
def test_other_features_are_rejected(name: str, nested: bool, tmp_path: Path) -> None:
    make_whisper(0, num_mel_bins=8).save_pretrained(tmp_path)
    for changes in ({}, {"feature_size": 80}, {"sampling_rate": 8000}, {"dither": 0.1}, {"hop_length": 100}):
        data = PREPROCESSOR | changes
        (tmp_path / name).write_text(json.dumps({"feature_extractor": data} if nested else data))
        if changes:
            ((key, value),) = changes.items()
            assert_rejected(tmp_path, name, f"`{key}` must be", f"but is {value}; get the model's own file")
        else:
            load(tmp_path)


# Folders in and out.


def test_a_published_config_loads(tmp_path: Path) -> None:
    theirs = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig.from_dict(WHISPER_TINY)).eval()
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(WHISPER_TINY))
    (tmp_path / "generation_config.json").write_text(json.dumps({"pad_token_id": 20, "eos_token_id": 20}))
    ours, batch = load(tmp_path), make_speech_batch(theirs.config, 0).float()
    assert ours.config.frontend == AudioConfig(mel_bins=4, fixed_frames=10)
    assert (ours.config.start_id, ours.config.end_id) == (21, 20)
    assert worst(run_whisper(ours, batch)["logits"], run_hf_whisper(theirs, batch)["logits"]) < 1e-5


STACK = StackConfig(
    layers=2,
    width=12,
    heads=3,
    ffn_width=20,
    activation="gelu",
    norm_order="pre",
    positions=LearnedConfig(max_length=5),
)
CONFIG = Seq2SeqConfig(
    vocab=31,
    frontend=AudioConfig(mel_bins=4, fixed_frames=10),
    encoder=STACK,
    decoder=replace(mirror_encoder(STACK), positions=LearnedConfig(max_length=9)),
    share_embeddings=False,
    scale_embeddings=False,
    start_id=21,
    end_id=20,
)


def build_random(config: Seq2SeqConfig) -> Seq2Seq:
    model = build(config).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
    return model


@pytest.mark.parametrize("tie", [True, False])
def test_transformers_loads_a_saved_model(tie: bool, tmp_path: Path) -> None:
    """The biases of keys, which Whisper does not have, change nothing and are dropped."""
    ours = build_random(replace(CONFIG, tie_output=tie))
    assert ours.decoder.blocks[0].cross_attn.key.bias.abs().min() > 1e-4
    whisper.save(ours, tmp_path / "out")
    assert not [name for name in load_file(tmp_path / "out/model.safetensors") if name.endswith("k_proj.bias")]
    theirs, info = transformers.WhisperForConditionalGeneration.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info.values()), info
    batch = make_speech_batch(theirs.config, 0)
    expected = run_whisper(ours, batch)["logits"]
    assert worst(run_hf_whisper(theirs.eval(), batch)["logits"], expected) < 1e-10
    assert worst(run_whisper(load(tmp_path / "out"), batch)["logits"], expected) < 1e-10
    assert theirs.generation_config.max_length == 9


def test_features_are_described_as_transformers_does() -> None:
    expected = transformers.WhisperFeatureExtractor(feature_size=128).to_dict()
    described = whisper.to_preprocessor_config(AudioConfig(mel_bins=128, fixed_frames=3000))
    assert described == {name: expected[name] for name in described}
    assert len(described) > 8


def test_conversions_keep_tokenizer_and_settings(tmp_path: Path) -> None:
    theirs = make_searchable(0, tmp_path / "theirs")
    files = {"preprocessor_config.json": PREPROCESSOR, "normalizer.json": {"colour": "color"}}
    for name, data in files.items():
        (tmp_path / "theirs" / name).write_text(json.dumps(data))
    assert convert_model(tmp_path / "theirs", tmp_path / "ours", "attent") == "an attent model, with its tokenizer"
    described = convert_model(tmp_path / "ours", tmp_path / "again", "hf")
    assert described == "WhisperForConditionalGeneration of transformers, with its tokenizer"
    for name in (*files, "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    assert same_bits(load(tmp_path / "again"), load(tmp_path / "theirs"))
    source = make_speech_batch(theirs.config, 0).source
    rows = [transcribe(tmp_path / name, source, "de", "transcribe") for name in ("theirs", "ours", "again")]
    assert rows[0] == rows[1] == rows[2]


def test_settings_of_an_attent_folder_are_verified(tmp_path: Path) -> None:
    make_searchable(0, tmp_path / "theirs")
    convert_model(tmp_path / "theirs", tmp_path / "ours", "attent")
    change_json(tmp_path / "ours/generation_config.json", suppress_tokens=[5])
    with pytest.raises(FolderError, match=r"generation_config\.json"):
        whisper.read_settings(tmp_path / "ours", load_vocabulary(tmp_path / "theirs"))


@pytest.mark.parametrize(
    ("field", "value", "required"),
    [
        ("frontend.fixed_frames", None, "an even number"),  # trained by attent on recordings of any length
        ("frontend.fixed_frames", 9, "an even number"),
        ("encoder.positions", SinusoidalConfig(), "LearnedConfig(max_length=5)"),
        ("encoder.positions", LearnedConfig(max_length=6), "LearnedConfig(max_length=5)"),
        ("decoder.positions", SinusoidalConfig(), "LearnedConfig(max_length=448)"),
        ("encoder.norm_order", "post", "'pre'"),
        ("encoder.norm_eps", 1e-6, "1e-05"),
        ("decoder.bias", False, "True"),
        ("decoder.width", 24, "that of the encoder, 12,"),
        ("decoder.dropout", 0.3, "that of the encoder, 0.1,"),
        ("scale_embeddings", True, "False"),
        ("output_bias", True, "False"),
        ("ctc", True, "False"),
    ],
)
def test_a_model_without_whisper_equivalent(field: str, value: object, required: str, tmp_path: Path) -> None:
    part, _, name = field.rpartition(".")
    changed = replace(getattr(CONFIG, part), **{name: value}) if part else value
    model = build(replace(CONFIG, **{part or name: changed}))
    words = f"`{field}` must be {required} for a Whisper model, but is {value!r}; this model cannot be written as one"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        whisper.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_captioner_is_no_whisper(tmp_path: Path) -> None:
    model = build(replace(CONFIG, frontend=ImageConfig(image_size=4, patch_size=2)))
    with pytest.raises(ValueError, match=r"^`frontend` must be audio for a Whisper model"):
        whisper.save(model, tmp_path / "out")
