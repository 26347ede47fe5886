"""What a config.json leaves out is what `transformers` takes."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import pytest
import transformers

from attent.interop import bert, gpt2, llama, t5, vit

ELSEWHERE = {"rope_theta", "rope_scaling", "rope_parameters"}  # transformers fills one from another


@pytest.mark.parametrize(
    ("facts", "theirs"),
    [
        (gpt2.GPT2Keys, transformers.GPT2Config),
        (llama.LlamaKeys, transformers.LlamaConfig),
        (bert.BertKeys, transformers.BertConfig),
        (vit.ViTKeys, transformers.ViTConfig),
        (t5.T5Keys, transformers.T5Config),
    ],
    ids=["gpt2", "llama", "bert", "vit", "t5"],
)
def test_defaults_are_theirs(facts: type[Any], theirs: Any) -> None:
    usual = theirs()
    ours = {field.name: field.default for field in fields(facts) if field.default is not MISSING}
    told = {name: value for name, value in ours.items() if value is not None and name not in ELSEWHERE}
    assert len(told) > 5
    assert told == {name: getattr(usual, name) for name in told}
