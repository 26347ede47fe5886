"""Defaults of missing config.json keys equal those of `transformers`."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import pytest
import transformers

from attent.interop import bert, gpt2, llama, t5, vit, whisper

ELSEWHERE = {"rope_theta", "rope_scaling", "rope_parameters"}  # transformers derives one from another


@pytest.mark.parametrize(
    ("keys", "hf_config"),
    [
        (gpt2.GPT2Keys, transformers.GPT2Config),
        (llama.LlamaKeys, transformers.LlamaConfig),
        (bert.BertKeys, transformers.BertConfig),
        (vit.ViTKeys, transformers.ViTConfig),
        (t5.T5Keys, transformers.T5Config),
        (whisper.WhisperKeys, transformers.WhisperConfig),
    ],
    ids=["gpt2", "llama", "bert", "vit", "t5", "whisper"],
)
def test_defaults_match_transformers(keys: type[Any], hf_config: Any) -> None:
    reference = hf_config()
    ours = {field.name: field.default for field in fields(keys) if field.default is not MISSING}
    defaults = {name: value for name, value in ours.items() if value is not None and name not in ELSEWHERE}
    assert len(defaults) > 5
    assert defaults == {name: getattr(reference, name) for name in defaults}
