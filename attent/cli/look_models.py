"""Which model `attent look` was given, and who looks at it: a translator is `looking`'s own case, a language model, an
encoder of text and a model of images are opened here. What is asked of the wrong kind is told in a sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from attent.cli.look import LookFlags
from attent.decoding.translator import DTYPES, check_model_exists, load_tokenizer
from attent.inspection.inspectors.base import InspectionError, Inspector
from attent.inspection.inspectors.text import CausalLMInspector, EncoderInspector
from attent.inspection.inspectors.vision import VisionInspector
from attent.interop import MODEL_DESCRIPTIONS, load
from attent.models import CausalLM, Model, Seq2Seq, TextEncoder, VisionTransformer
from attent.nn.devices import choose_device


def load_look_model(folder: Path, flags: LookFlags) -> Model:
    """On the machine as it was asked for."""
    check_model_exists(folder)
    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    return load(folder.expanduser(), dtype=DTYPES[flags.dtype], device=choose_device(flags.device))


def create_inspector(model: CausalLM | TextEncoder | VisionTransformer, folder: Path) -> Inspector[Any]:
    root = folder.expanduser()
    name = root.resolve().name
    if isinstance(model, VisionTransformer):
        return VisionInspector(model, name=name)
    tokenizer = load_tokenizer(root)
    if isinstance(model, CausalLM):
        return CausalLMInspector(model, tokenizer.source, name=name)
    return EncoderInspector(model, tokenizer, name=name)


def check_model_flags(model: Model, folder: Path, sentence: str | None, flags: LookFlags) -> None:
    """What is not for a model of this kind."""
    if isinstance(model, Seq2Seq):
        return
    asked = {"--target": flags.target, "--to": flags.to, "--data": flags.data}
    extra = next((name for name, value in asked.items() if value), None)
    if extra is not None:
        raise InspectionError(
            f"{folder}: is {MODEL_DESCRIPTIONS[type(model)][0]}, and {extra} is for translators; leave it out"
        )
    if isinstance(model, VisionTransformer) and sentence is None and not flags.positions:
        raise InspectionError(
            f"{folder}: is {MODEL_DESCRIPTIONS[VisionTransformer][0]}, and the live page has a box for text only; "
            f"name a picture: attent look {folder} picture.png"
        )
