"""A model folder written by attent 0.1.0 loads and translates in every later version.

It was trained on ten number words. Never regenerate it: a change that breaks it breaks the models of users.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import attent

SOURCES = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
TRANSLATIONS = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy, since a translator may cache a conversion in the folder."""
    return Path(shutil.copytree(Path(__file__).parent / "saved_model", tmp_path / "model"))


def test_saved_model_translates_as_recorded(folder: Path) -> None:
    translations = attent.Translator.load(folder).translate(SOURCES)
    assert [translation.text for translation in translations] == TRANSLATIONS
    assert [round(translation.log_prob, 2) for translation in translations] == [-0.01] * len(SOURCES)


def test_saved_model_loads_as_a_module(folder: Path) -> None:
    model = attent.load(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == 10_080
