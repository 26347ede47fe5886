"""Keyboard accelerators survive a translation, or the unit is reported."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from attent.data.formats.placeholders import GENERIC, Mnemonic, get_syntax, insert_accelerator, remove_accelerator
from tests.data.pretranslate_cases import pretranslate

LABELS = {
    "_File": "File",
    "Save _As...": "Save As...",
    "E_xit": "Exit",
    "Cu_t": "Cut",
    "_girls": "girls",
    "&File": "File",
    "Save &As": "Save As",
    "E&xit": "Exit",
    "~Open": "Open",
    "(_Show {a_b})": "(Show {a_b})",
    "_Übersicht": "Übersicht",
}
OTHER_TEXTS = [
    *(
        "file_name",
        "The file_name is missing",
        "R&D",
        "AT&T",
        "Tom & Jerry",
        "&amp; so",
        "&&File",
        "__init__",
        "a_b _c",
    ),
    *("GTK_STOCK_OPEN", "%(user_name)s", "~5 files", "snake_", "_", "_File &Edit", "_1", "https://a.example/_b"),
    *("A long sentence that has many more words than a _label", "${x}&old", "{x}_old", "%s~old", "<b>&Old</b>"),
]


@pytest.mark.parametrize("label", LABELS)
def test_mark_is_removed_and_put_back(label: str) -> None:
    (text,), accelerator = remove_accelerator((label,), GENERIC)
    assert text == LABELS[label]
    assert accelerator is not None
    assert insert_accelerator((text,), accelerator, GENERIC) == (label,)


def test_mark_after_a_shell_variable_is_no_accelerator() -> None:
    syntax = get_syntax(("sh",))
    assert remove_accelerator(("$x&old",), syntax) == (("$x&old",), None)
    assert insert_accelerator(("$x\u00e9t\u00e9",), Mnemonic("_", "\u00e9"), syntax) == ("$x\u00e9t_\u00e9",)


@pytest.mark.parametrize("text", OTHER_TEXTS)
def test_other_texts_have_no_accelerator(text: str) -> None:
    assert remove_accelerator((text,), GENERIC) == ((text,), None)


@pytest.mark.parametrize(
    ("accelerator", "translation", "expected"),
    [
        (Mnemonic("_", "A"), "Speichern unter als", "Speichern unter _als"),
        (Mnemonic("_", "x"), "Text", "Te_xt"),
        (Mnemonic("&", "F"), "Datei", "&Datei"),
        (Mnemonic("&", "F"), "%s {f} Datei", "%s {f} &Datei"),
        (Mnemonic("_", "F"), "Файл", "_Файл"),
        (Mnemonic("_", "f"), "ファイル", "ファイル(_F)"),
        (Mnemonic("&", "S"), "保存...", "保存(&S)..."),
        (Mnemonic("_", "F"), "%s 5", None),
    ],
)
def test_mark_is_put_before_a_letter(accelerator: Mnemonic, translation: str, expected: str | None) -> None:
    assert insert_accelerator((translation,), accelerator, GENERIC) == (expected and (expected,))


def test_accelerators_of_documents_are_kept() -> None:
    catalog = 'msgid "_Open"\nmsgstr ""\n\nmsgid "_%s"\nmsgstr ""\n\nmsgid "Cu_t"\nmsgstr ""\n'
    requested: list[str] = []

    def translate(texts: list[str]) -> list[str]:
        requested.extend(texts)
        return ["Öffnen" if text == "Open" else "5" for text in texts]

    result = pretranslate(catalog, "a.po", translate)  # type: ignore[arg-type]
    assert requested == ["Open", "Cut"]
    assert 'msgstr "_Öffnen"' in result.content.decode()
    assert [(unit.source, unit.reason) for unit in result.skipped] == [("Cu_t", "its translation has no letter for _t")]
    xliff = (
        '<xliff version="1.2"><file source-language="en" target-language="de"><body><trans-unit id="1">'
        "<source>&amp;File<x id='1'/></source></trans-unit></body></file></xliff>"
    )
    assert b">(&amp;File)<x id='1'/></target>" in pretranslate(xliff, "a.xlf").content


def test_plain_text_has_no_accelerators() -> None:
    assert pretranslate("_File\n", "a.txt").content == b"(_File)\n"


@pytest.mark.skipif(shutil.which("msgfmt") is None, reason="gettext's tools are not installed")
@pytest.mark.parametrize("mark", "_&~")
def test_msgfmt_finds_every_accelerator(mark: str, tmp_path: Path) -> None:
    labels = [label for label in LABELS if mark in label and "{" not in label]
    header = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\n'
    entries = "\n".join(f'msgid "{label}"\nmsgstr ""\n' for label in labels)
    path = tmp_path / "a.po"
    path.write_bytes(pretranslate(header + entries, "a.po", lambda texts: ["Ein Wort"] * len(texts)).content)
    command = ["msgfmt", f"--check-accelerators={mark}", "--use-fuzzy", "-o", "/dev/null", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
