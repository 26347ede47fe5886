"""`attent convert`: write a model in the format of attent, Hugging Face or CTranslate2."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

TargetFormat = Literal["attent", "hf", "ctranslate2"]
Quantization = Literal["int8", "int16", "float16", "bfloat16", "float32"]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]


def convert(
    model: Annotated[Path, Parameter(help="a model folder of attent or Hugging Face")],
    out: Annotated[Path, Parameter(help="the folder to write; new or empty")],
    /,
    *,
    to: Annotated[TargetFormat, Parameter(help="attent; hf: transformers; ctranslate2: translation models only")],
    dtype: Annotated[Dtype | None, Parameter(help="precision of the weights [default: unchanged]")] = None,
    quantization: Annotated[Quantization, Parameter(help="of the weights, with --to ctranslate2")] = "int8",
) -> None:
    """Convert a model folder to another format."""
    from attent.interop.export import convert_model

    print(f"{out}: {convert_model(model, out, to, dtype, quantization)}")
