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

from attent.decoding.options import SearchOptions, TranscriptRules
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
    "max_initial_timestamp_index": 3,
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


def transcribe(folder: Path, source: Tensor, language: str, task: Any, timestamps: bool) -> list[list[int]]:
    model, vocabulary = load(folder), load_vocabulary(folder)
    assert isinstance(model, Seq2Seq)
    settings = whisper.read_settings(folder, vocabulary)
    rules = TranscriptRules(
        banned_first=settings.banned_first,
        first_timestamp=vocabulary.timestamps.start if timestamps else None,
        max_initial_timestamp=settings.max_initial_timestamp,
    )
    prompt = build_prompt(vocabulary, language, task, timestamps)
    options = SearchOptions(beam_size=1, max_length=LENGTH - 1 - len(prompt), transcript_rules=rules)
    hypotheses = search_sources(
        model,
        Tokenizer.load(folder),
        source,
        options=options,
        prefix_ids=prompt,
        suppressed_tokens=settings.suppressed_tokens,
    )
    return [[*x.token_ids, END] if x.is_finished else list(x.token_ids) for x in hypotheses]


@pytest.mark.parametrize("timestamps", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 30))])
def test_greedy_search_matches_transformers(seed: int, timestamps: bool, tmp_path: Path) -> None:
    theirs = make_searchable(seed, tmp_path)
    source = make_speech_batch(theirs.config, seed).source.repeat(3, 1, 1)
    source = source * torch.linspace(0.3, 2, len(source))[:, None, None]
    language, task = (("de", "transcribe"), ("zh", "translate"))[seed % 2]
    with exact(theirs):
        expected = theirs.generate(
            source.transpose(1, 2),
            language=language,
            task=task,
            return_timestamps=timestamps,
            force_unique_generate_call=True,  # one window
        )
    prompt = 3 if timestamps else 4
    got = transcribe(tmp_path, source, language, task, timestamps)
    assert got == [until(row, END) for row in expected[:, prompt:].tolist()]
    assert not timestamps or all(row[0] > NO_TIMESTAMPS for row in got)


def test_the_cases_of_greedy_search_differ(tmp_path: Path) -> None:
    """Transcripts of random models have several segments, of different tokens, and some end before the limit."""
    rows: list[list[int]] = []
    for seed in range(3):
        theirs = make_searchable(seed, tmp_path / str(seed))
        source = make_speech_batch(theirs.config, seed).source
        rows += transcribe(tmp_path / str(seed), source, "de", "transcribe", True)
    assert len({tuple(row) for row in rows}) > 6
    assert any(row[-1] == END for row in rows)
    assert any(sum(i > NO_TIMESTAMPS for i in row) >= 4 for row in rows)
