"""`attent data`: report on a corpus before training."""

import json as json_module
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import partial
from typing import Annotated

from cyclopts import CycloptsError, Parameter

from attent.cli.shared import ProgressDisplay, print_message
from attent.data.builtin import BUILTIN_CORPORA
from attent.data.corpus import ReadOptions, open_corpora
from attent.data.pairs import CorpusError, LanguagePair

EXIT_FAILED = 1


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    src: Annotated[str | None, Parameter(help="source language tag: en")] = None
    tgt: Annotated[str | None, Parameter(help="target language tag: de, or pt-BR")] = None
    against: Annotated[
        tuple[str, ...],
        Parameter(help="test set to check for overlap, besides those in the corpus folder; repeatable", negative=""),
    ] = ()
    json: Annotated[bool, Parameter(help="print the report as JSON", negative="")] = False
    keep_all: Annotated[bool, Parameter(help="report as if the filters were disabled", negative="")] = False
    fuzzy: Annotated[bool, Parameter(help="read PO and XLIFF entries marked fuzzy too", negative="")] = False
    obsolete: Annotated[bool, Parameter(help="read obsolete PO entries too", negative="")] = False


def data(
    *corpus: Annotated[
        str,
        Parameter(
            help=f"files, folders, - for stdin, or built in: {', '.join(BUILTIN_CORPORA)}", allow_leading_hyphen=True
        ),
    ],
    flags: Annotated[DataFlags, Parameter(name="*", show_default=False)] = DataFlags(),
) -> int:
    """Report on a corpus before training: sizes, problems with their lines, test set overlap."""
    from attent.data.report import find_test_sets, survey_corpora
    from attent.data.report_text import render_report, to_json

    _check_names(corpus)
    languages, options = LanguagePair(flags.src, flags.tgt), ReadOptions(fuzzy=flags.fuzzy, obsolete=flags.obsolete)
    corpora = open_corpora(corpus, languages, options, print_message)
    test_sets = find_test_sets(corpora, open_corpora(flags.against, languages, options, print_message))
    with ProgressDisplay(sys.stderr) as display:
        display.start(None, quiet=False)
        progress = partial(display.update, done_bytes=0)
        survey, unread, error = survey_corpora(corpora, test_sets, keep_all=flags.keep_all, progress=progress)
    if error and not survey.pairs_read:
        raise error
    report = survey.build_report(str(error) if error else None, unread)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals that cannot show a character
    print(json_module.dumps(to_json(report), indent=2) if flags.json else render_report(report))
    if error:
        raise error
    return 0 if report.pairs else EXIT_FAILED


def _check_names(names: Sequence[str]) -> None:
    if not names:
        raise CorpusError(f"name a corpus: a file, a folder, - for stdin, or one of {', '.join(BUILTIN_CORPORA)}")
    unknown = next((name for name in names if name.startswith("-") and name != "-"), None)
    if unknown is not None:
        options = [f"--{option.name.replace('_', '-')}" for option in fields(DataFlags)]
        nearest = get_close_matches(unknown, options)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        raise CycloptsError(msg=f"Unknown option: {unknown}.{hint}", command_chain=("data",))
