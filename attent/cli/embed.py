"""`attent embed`: texts as vectors, into a file of numbers or as lines of JSON. The vectors are
`attent.decode.reader`'s."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import CycloptsError, Parameter

from attent.cli.input_texts import (
    OUTPUT_GROUP,
    TEXTS_HELP,
    TextInputFlags,
    check_flags,
    load_predictor,
    print_message,
    print_result,
    read_text_blocks,
)

if TYPE_CHECKING:
    from torch import Tensor

FILE_SUFFIXES = (".npy", ".safetensors")


@dataclass(frozen=True, kw_only=True)
class EmbedFlags(TextInputFlags):
    """What may be asked for; each field is a flag of the command."""

    output: Annotated[
        Path | None,
        Parameter(
            name=["--output", "-o"], group=OUTPUT_GROUP, help="a file for the vectors, (N, width): .npy or .safetensors"
        ),
    ] = None
    pooling: Annotated[Literal["mean", "class"], Parameter(help="the mean of all tokens, or the first one, [CLS]")] = (
        "mean"
    )
    normalize: Annotated[
        bool, Parameter(name=["--normalize", "--normalize"], negative="", help="to length 1: products are cosines")
    ] = False


def embed(
    model: Annotated[Path, Parameter(help="a model folder, ours or Hugging Face's")],
    texts: Annotated[list[str] | None, Parameter(help=f"{TEXTS_HELP}; of a model of images, their files")] = None,
    /,
    *,
    flags: Annotated[EmbedFlags, Parameter(name="*", show_default=False)] = EmbedFlags(),  # noqa: B008 - frozen
) -> None:
    """Turn texts into vectors, to compare and to search with.

    attent embed runs/mlm lines.txt --output vectors.npy
    """
    check_usage(flags)
    import torch

    from attent.models import VisionTransformer

    reader = load_predictor(model, flags)
    vectors = [torch.empty(0, reader.width)]
    texts = texts or []
    for block in (
        [texts]
        if isinstance(reader.model, VisionTransformer) and texts
        else (one.texts for one in read_text_blocks(texts))
    ):
        found = reader.embed(block, flags.pooling, flags.normalize)
        if flags.json:
            for text, vector in zip(block, found.tolist(), strict=True):
                print_result(json.dumps({"text": text, "vector": [round(x, 6) for x in vector]}, ensure_ascii=False))
        if flags.output is not None:
            vectors.append(found)
    if flags.output is not None:
        whole = torch.cat(vectors)
        save_vectors(whole, flags.output.expanduser())
        count = f"{len(whole):,} vector{'' if len(whole) == 1 else 's'}"
        print_message(f"{count} of {whole.shape[1]:,} numbers {'is' if len(whole) == 1 else 'are'} in {flags.output}")


def check_usage(flags: EmbedFlags) -> None:
    check_flags(flags, "embed")
    problem = None
    if flags.output is None and not flags.json:
        problem = "vectors are for a file: name one with --output vectors.npy, or ask for --json"
    elif flags.output is not None and flags.output.suffix not in FILE_SUFFIXES:
        problem = f"--output must end in {' or '.join(FILE_SUFFIXES)}, but is {flags.output}"
    elif flags.output is not None and not flags.output.expanduser().absolute().parent.is_dir():
        problem = f"{flags.output}: must be in a folder that is there, but is not; make the folder first"
    if problem:
        raise CycloptsError(msg=problem, command_chain=("embed",))


def save_vectors(vectors: Tensor, path: Path) -> None:
    """Write the vectors as .npy or .safetensors, atomically."""
    import numpy as np
    from safetensors.torch import save_file

    from attent.storage.atomic import atomic_path

    with atomic_path(path) as temporary:
        if path.suffix == ".npy":
            np.save(temporary, vectors.numpy(), allow_pickle=False)
        else:
            save_file({"vectors": vectors.contiguous()}, temporary)
