"""A translation server with tiny real models: number words from English to German, and a language model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attent.decoding.options import DeviceOptions
from attent.serving.backend import LocalBackend, ServiceConfig
from attent.serving.gateway import ServerOptions
from attent.serving.service import TranslationService
from attent.serving.translation_app import TranslationApp
from tests.decoding.toy_generators import save_model_folder
from tests.serving.toy import Client, serve_in_thread

SAVED_MODEL = Path(__file__).parents[1] / "models" / "saved_model"


@contextmanager
def start_translation_server(
    folder: Path,
    options: ServerOptions = ServerOptions(),  # noqa: B008 - frozen
    *,
    generator: bool = False,
) -> Iterator[Client]:
    """Serve the translator `numbers` and, with `generator`, the language model `letters`; copies are in `folder`."""
    models = [Path(shutil.copytree(SAVED_MODEL, folder / "numbers", dirs_exist_ok=True))]
    if generator:
        models.append(save_model_folder(folder / "letters"))
    config = ServiceConfig(
        folders=tuple(models), device=DeviceOptions(device="cpu"), languages=("en", "de"), limits=options.limits
    )
    service = TranslationService(config)
    with serve_in_thread(TranslationApp(LocalBackend(service), options)) as url:
        yield Client(url)
