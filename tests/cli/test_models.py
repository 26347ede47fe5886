"""`attent models`: the table of published models is complete, and lists those of a language pair."""

from __future__ import annotations

import pytest

from attent.cli import main
from attent.interop.published_models import find_models
from attent.text.tokenizer_formats import M2M_LANGUAGES
from tests.interop.families import transformers


def test_models_of_a_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "en", "tw"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == [
        "Helsinki-NLP/opus-mt-en-tw",
        "facebook/nllb-200-distilled-600M",
        "facebook/nllb-200-distilled-1.3B",
        "facebook/nllb-200-1.3B",
        "facebook/nllb-200-3.3B",
    ]
    assert rows[1].endswith(" eng_Latn, twi_Latn")
    assert "CC-BY-NC-4.0" in rows[1]
    assert "615 million parameters" in rows[1]


@pytest.mark.parametrize(("name", "code"), [("german", "de for German"), ("fr1", "fr for French")])
def test_a_name_is_no_language_code(name: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "en", name]) == 1
    printed = capsys.readouterr()
    assert printed.err == f"attent: error: `{name}` must be a language code, such as {code}\n"
    assert not printed.out


def test_codes_that_no_table_knows_may_be_published() -> None:
    assert [model.name for model in find_models(">>bem<<", "zne")] == ["Helsinki-NLP/opus-mt-bem-zne"]


def test_all_models_know_their_languages() -> None:
    models = {model.name: model for model in find_models()}
    assert models["Helsinki-NLP/opus-mt-{src}-{tgt}"].license.startswith("Apache-2.0 or CC-BY-4.0")
    assert models["facebook/m2m100_418M"].note == f"{len(M2M_LANGUAGES.split())} languages"
    nllb = transformers.models.nllb.tokenization_nllb.FAIRSEQ_LANGUAGE_CODES
    assert models["facebook/nllb-200-3.3B"].note == f"{len(nllb)} languages"
    mbart = transformers.models.mbart50.tokenization_mbart50.FAIRSEQ_LANGUAGE_CODES
    assert models["facebook/mbart-large-50-many-to-many-mmt"].note == f"{len(mbart)} languages"
    for code in (*nllb, *mbart, *M2M_LANGUAGES.split()):
        assert any(code in model.note for model in find_models(code)), code
