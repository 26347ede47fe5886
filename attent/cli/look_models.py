"""Which model `attent look` was given, and who looks at it: a translator is `looking`'s own case, a language model, an
encoder of text and a model of images are opened here. What is asked of the wrong kind is told in a sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from attent.cli.look import Flags
from attent.cli.searching import check_run, device_of, tokenizer_of
from attent.decode.translator import DTYPES, best_device
from attent.interop import WORDS, load
from attent.look.images import ImageLooker
from attent.look.reading import LookError, Reading
from attent.look.texts import CausalLooker, EncoderLooker
from attent.models import CausalLM, Encoder, Model, Seq2Seq, Vision


def read_model(folder: Path, flags: Flags) -> Model:
    """On the machine as it was asked for."""
    check_run(folder)
    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    return load(folder.expanduser(), dtype=DTYPES[flags.dtype], device=device_of(flags.device) or best_device())


def reading_of(model: CausalLM | Encoder | Vision, folder: Path) -> Reading[Any]:
    root = folder.expanduser()
    name = root.resolve().name
    if isinstance(model, Vision):
        return ImageLooker(model, name=name)
    tokenizer = tokenizer_of(root)
    if isinstance(model, CausalLM):
        return CausalLooker(model, tokenizer.source, name=name)
    return EncoderLooker(model, tokenizer, name=name)


def check_flags(model: Model, folder: Path, sentence: str | None, flags: Flags) -> None:
    """What is not for a model of this kind."""
    if isinstance(model, Seq2Seq):
        return
    asked = {"--target": flags.target, "--to": flags.to, "--data": flags.data}
    extra = next((name for name, value in asked.items() if value), None)
    if extra is not None:
        raise LookError(f"{folder}: is {WORDS[type(model)][0]}, and {extra} is for translators; leave it out")
    if isinstance(model, Vision) and sentence is None and not flags.positions:
        raise LookError(
            f"{folder}: is {WORDS[Vision][0]}, and the live page has a box for text only; "
            f"name a picture: attent look {folder} picture.png"
        )
