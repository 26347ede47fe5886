"""`attent embed`: texts or images as vectors, in a NumPy file or as JSON lines."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import CycloptsError, Parameter

from attent.cli import shared
from attent.cli.shared import TextInputFlags, check_positive, flag, print_message
from attent.formatting import format_count

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class EmbedFlags(TextInputFlags):
    output: Annotated[Path | None, flag("Output", "NumPy file (.npy) for the vectors", "--output", "-o")] = None
    pooling: Annotated[Literal["mean", "class"], Parameter(help="mean of all tokens, or the first, [CLS]")] = "mean"
    normalize: Annotated[bool, Parameter(negative="", help="scale to length 1: dot products are cosines")] = False


def embed(
    model: Annotated[Path, Parameter(help="an encoder of texts or images, ours or Hugging Face's")],
    texts: Annotated[list[str] | None, Parameter(help=f"{shared.TEXTS_HELP}; for an image model, image files")] = None,
    /,
    *,
    flags: Annotated[EmbedFlags, Parameter(name="*", show_default=False)] = EmbedFlags(),
) -> None:
    """Turn texts into vectors for comparison and search.

    attent embed runs/mlm lines.txt --output vectors.npy
    """
    check_usage(flags)
    import torch

    from attent.storage.manifest import check_outputs

    check_outputs([flags.output], [model, *map(Path, texts or [])])
    predictor = shared.load_predictor(model, flags)
    vectors = [torch.empty(0, predictor.width)]
    for items in shared.read_inputs(predictor, texts or []):
        embedded = predictor.embed(items, flags.pooling, flags.normalize)
        if flags.json:
            for text, vector in zip(items, embedded.tolist(), strict=True):
                rounded = {"text": text, "vector": [round(x, 6) for x in vector]}
                shared.print_result(json.dumps(rounded, ensure_ascii=False))
        if flags.output is not None:
            vectors.append(embedded)
    if flags.output is not None:
        matrix = torch.cat(vectors)
        save_vectors(matrix, flags.output)
        print_message(f"wrote {format_count(len(matrix), 'vector')} of width {matrix.shape[1]:,} to {flags.output}")


def check_usage(flags: EmbedFlags) -> None:
    check_positive("embed", threads=flags.threads)
    problem = None
    if flags.output is None and not flags.json:
        problem = "there is no output: name a file with --output vectors.npy, or add --json"
    elif flags.output is not None and flags.output.suffix != ".npy":
        problem = f"--output must end in .npy, but is {flags.output}"
    elif flags.output is not None and not flags.output.expanduser().absolute().parent.is_dir():
        problem = f"{flags.output}: must be in an existing folder, but is not; create the folder first"
    if problem:
        raise CycloptsError(msg=problem, command_chain=("embed",))


def save_vectors(vectors: "Tensor", path: Path) -> None:
    import numpy as np

    from attent.storage.atomic import output_path

    # To a path without .npy, the end of a link, numpy would append it.
    with output_path(path) as temporary, open(temporary, "wb") as file:
        np.save(file, vectors.numpy(), allow_pickle=False)
