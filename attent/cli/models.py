"""`attent models`: list well-known published translation models for a language pair."""

from typing import Annotated

from cyclopts import Parameter


def models(
    src: Annotated[str | None, Parameter(help="source language, such as en")] = None,
    tgt: Annotated[str | None, Parameter(help="target language, such as tw")] = None,
    /,
) -> None:
    """List published translation models that attent loads, with their size and licence: attent models en tw."""
    from attent.formatting import format_short
    from attent.interop.published_models import find_models

    for model in find_models(src, tgt):
        print(f"{model.name:42}{format_short(model.parameters) + ' parameters':24}{model.license:45}{model.note}")
