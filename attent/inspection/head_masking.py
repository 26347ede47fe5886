"""Mask heads, sub-layers or layers, so that they add nothing to the residual stream.

The output weights of a part are set to zero and restored afterwards: the columns of W^O for a head, W^O and its bias
for an attention layer, the second matrix and its bias for a feed-forward layer. So the mask holds for every engine that
reads the weights meanwhile.
"""

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, Self, get_args

import torch
from torch import Tensor, nn

from attent.decoding.translator import Translator
from attent.formatting import format_count
from attent.nn import Attention, get_attention_layers
from attent.nn.attention import COMPILED_PREFIX
from attent.nn.block import Block
from attent.nn.feedforward import FeedForward
from attent.storage.errors import AttentError

PartKind = Literal["head", "sublayer", "layer"]
PART_KINDS: tuple[PartKind, ...] = get_args(PartKind)
PART_PATTERN = re.compile(r"(?P<path>[\w.]+)(?::(?P<head>\d{1,6}))?")


@dataclass(frozen=True, order=True)
class ModelPart:
    """A head `decoder.blocks.3.cross_attn:2`, sub-layer `decoder.blocks.3.cross_attn` or layer `decoder.blocks.3`."""

    path: str
    head: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        match = PART_PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise AttentError(f"a part must be like decoder.blocks.0.cross_attn:2, but is {str(text)[:80]!r}")
        return cls(match["path"], None if match["head"] is None else int(match["head"]))

    def __str__(self) -> str:
        return self.path if self.head is None else f"{self.path}:{self.head}"

    @property
    def kind(self) -> PartKind:
        if self.head is not None:
            return "head"
        return "layer" if self.path.rpartition(".")[2].isdigit() else "sublayer"


def list_parts(model: nn.Module, kind: PartKind) -> list[ModelPart]:
    """List a model's heads, sub-layers or layers in module order."""
    if kind == "head":
        return [ModelPart(path, h) for path, layer in get_attention_layers(model).items() for h in range(layer.heads)]
    classes = Block if kind == "layer" else (Attention, FeedForward)
    return [
        ModelPart(path.replace(COMPILED_PREFIX, ""))
        for path, module in model.named_modules()
        if isinstance(module, classes)
    ]


@contextmanager
def mask_heads(model: nn.Module | Translator, *parts: str | ModelPart) -> Iterator[None]:
    """Mask heads, sub-layers or layers inside the `with` block, for every call of the model.

    A masked part adds nothing to the residual stream. Its weights are restored bit-exactly.

    parts  heads such as "decoder.blocks.3.cross_attn:2", sub-layers ("decoder.blocks.3.cross_attn") or layers
           ("decoder.blocks.3")

    >>> translator = attent.Translator.load("runs/en-de")
    >>> with attent.mask_heads(translator, "decoder.blocks.0.cross_attn:0", "decoder.blocks.0.cross_attn:1"):
    ...     print(translator.translate(["A man sings."])[0].text == "Ein Mann singt.")
    False
    >>> print(translator.translate(["A man sings."])[0].text)
    Ein Mann singt.
    """
    module = model.model if isinstance(model, Translator) else model
    if not isinstance(module, nn.Module):
        raise AttentError(f"`model` must be a model or a Translator, but is of type {type(model).__name__}")
    chosen = [part if isinstance(part, ModelPart) else ModelPart.parse(part) for part in parts]
    views = [view for part in chosen for view in iter_output_weights(module, part)]
    saved = [(view, view.clone()) for view in views]
    # CTranslate2 translates with its own copy of the weights.
    engines = model.use_torch_engine() if isinstance(model, Translator) else nullcontext()
    try:
        with torch.no_grad():
            for view in views:
                view.zero_()
        with engines:
            yield
    finally:
        with torch.no_grad():
            for view, values in saved:
                view.copy_(values)


def iter_output_weights(model: nn.Module, part: ModelPart) -> Iterator[Tensor]:
    """Yield views of the weights through which a part writes to the residual stream."""
    module = find_part(model, part)
    match module:
        case Attention() if part.head is not None:
            width = module.head_width
            yield module.output.weight.data[:, part.head * width : (part.head + 1) * width]
        case Attention():
            yield from iter_linear_weights(module.output)
        case FeedForward():
            yield from iter_linear_weights(module.contract)
        case Block():
            yield from iter_linear_weights(module.self_attn.output)
            if module.cross_attn is not None:
                yield from iter_linear_weights(module.cross_attn.output)
            yield from iter_linear_weights(module.feedforward.contract)


def iter_linear_weights(linear: nn.Linear) -> Iterator[Tensor]:
    yield linear.weight.data
    if linear.bias is not None:
        yield linear.bias.data


def find_part(model: nn.Module, part: ModelPart) -> Attention | FeedForward | Block:
    kinds = (Attention, FeedForward, Block)
    modules = {path.replace(COMPILED_PREFIX, ""): m for path, m in model.named_modules() if isinstance(m, kinds)}
    module = modules.get(part.path)
    if module is None:
        near = difflib.get_close_matches(part.path, modules)
        hint = f"did you mean {near[0]}?" if near else f"its parts are {', '.join(list(modules)[-3:])}"
        raise AttentError(f"the model has no part {part.path!r}; {hint}")
    if part.head is not None:
        if not isinstance(module, Attention):
            raise AttentError(f"{part}: only attention layers have heads; leave out the number of the head")
        if part.head >= module.heads:
            count = format_count(module.heads, "head")
            raise AttentError(f"{part}: {part.path} has {count}, numbered from 0; give another")
    return module
