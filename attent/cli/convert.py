"""`attent convert`: write a model in the format of attent, Hugging Face or CTranslate2, or a smaller model."""

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
    to: Annotated[
        TargetFormat | None, Parameter(help="hf: transformers; ctranslate2: translators [default: as is]")
    ] = None,
    dtype: Annotated[Dtype | None, Parameter(help="precision of the weights [default: unchanged]")] = None,
    quantization: Annotated[
        Quantization | None, Parameter(help="of the weights, with --to ctranslate2 [default: int8]")
    ] = None,
    corpus: Annotated[Path | None, Parameter(help="drop the pieces that this text file does not need")] = None,
    keep_languages: Annotated[str, Parameter(help="with --corpus: en,tw; drop other languages and scripts")] = "",
    vocab: Annotated[int | None, Parameter(help="with --corpus: maximum size of the vocabulary")] = None,
    encoder_layers: Annotated[int | None, Parameter(help="number of encoder layers to keep, evenly spaced")] = None,
    decoder_layers: Annotated[int | None, Parameter(help="number of decoder layers to keep, evenly spaced")] = None,
) -> None:
    """Convert a model folder to another format, or make a translation model smaller."""
    from attent.interop.export import convert_model

    languages = [language for language in keep_languages.split(",") if language]
    sizes = (vocab, encoder_layers, decoder_layers)
    print(f"{out}: {convert_model(model, out, to, dtype, quantization, corpus, languages, *sizes)}")
