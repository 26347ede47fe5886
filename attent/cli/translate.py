"""`attent translate`: text line by line, or documents in their format."""

from __future__ import annotations

import gc
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, TextIO

from cyclopts import CycloptsError, Parameter

from attent.cli import shared
from attent.cli.shared import DeviceFlags, SearchFlags, flag, use_flag_names
from attent.decoding.options import InputError, PhraseConstraints, SearchOptions
from attent.decoding.output_format import AlignmentFormat, OutputFormat, OutputType

if TYPE_CHECKING:
    from attent.decoding.input_lines import LineSource
    from attent.decoding.pipeline import TranslationPipeline

STDIN = Path("-")
SRC_FLAGS, TGT_FLAGS = ("--src", "-s", "--source-lang", "--from-lang"), ("--tgt", "-t", "--target-lang", "--to-lang")


@dataclass(frozen=True, kw_only=True)
class TranslateFlags(SearchFlags, DeviceFlags):  # type: ignore[misc]  # derived from the options
    output: Annotated[Path | None, flag("Common", "output file; by default stdout", "--output", "-o")] = None
    to: Annotated[str | None, flag("Common", "target language, for a multilingual model")] = None
    adapter: Annotated[Path | None, flag("Common", "adapter of the model: a folder from train --keep-adapter")] = None
    ray: Annotated[bool, flag("Common", "use the Ray cluster at $RAY_ADDRESS, or a new one here")] = False
    prefix: Annotated[str, flag("Constraints", "start every translation with this text")] = ""
    require: Annotated[tuple[str, ...], flag("Constraints", "phrase that must occur; may be repeated")] = ()
    ban: Annotated[tuple[str, ...], flag("Constraints", "phrase that must not occur; may be repeated")] = ()
    glossary: Annotated[
        Path | None, flag("Constraints", "terms to enforce: lines of `term<TAB>translation|translation`, or TBX")
    ] = None
    ensemble: Annotated[tuple[Path, ...], flag("Search", "another model with the same tokenizer; may be repeated")] = ()
    mbr_candidates: Annotated[int, flag("Search", "candidates to choose from by minimum Bayes risk", "--mbr")] = 0
    context: Annotated[
        int | None, flag("Search", "preceding sentences given with each [default: as many as in training]")
    ] = None
    split_sentences: Annotated[bool, flag("Search", "split every line into sentences, not only long ones")] = False
    output_type: Annotated[OutputType, flag("Output", "text, json (objects) or tsv (source, translation)")] = "text"
    with_score: Annotated[bool, flag("Output", "print the score before the text")] = False
    quality: Annotated[bool, flag("Output", "with json or tsv: log-probability, agreement of the n-best list")] = False
    reverse: Annotated[
        Path | None, flag("Output", "model that translates back: --quality also compares that with the source")
    ] = None
    alignment: Annotated[AlignmentFormat | None, flag("Output", "of words: hard (0-0 1-2); soft: JSON weights")] = None
    input_type: Annotated[
        Literal["auto", "lines"],
        flag("Output", "auto: by the name and the first bytes; lines: text, whatever it looks like"),
    ] = "auto"
    src: Annotated[
        str | None, flag("Documents", "source language, if the model or the document has several", *SRC_FLAGS)
    ] = None
    tgt: Annotated[
        str | None, flag("Documents", "target language, if the model or the document has several", *TGT_FLAGS)
    ] = None
    fields: Annotated[
        tuple[str, ...],
        flag("Documents", "column of a table or key of JSON or YAML to translate; may be repeated", "--field"),
    ] = ()
    consistent_terms: Annotated[
        bool, flag("Documents", "translate a rare word or name in the same way in the whole document; slower")
    ] = False
    in_place: Annotated[bool, flag("Documents", "overwrite the document")] = False
    report: Annotated[
        Path | None, flag("Documents", "JSON or .tsv file: what was translated, skipped or is to review, and why")
    ] = None
    bilingual: Annotated[Path | None, flag("Documents", "XLIFF file of sources and translations for a CAT tool")] = None


def translate(
    model: Annotated[Path, Parameter(help="a model folder of attent or Hugging Face, or a name on its hub")],
    file: Annotated[
        Path | None,
        Parameter(
            help="text with one sentence per line, or a document that keeps its format (.html, .docx, .md, .po, .xlf, "
            ".tmx, .srt, .json, .csv, ...); by default, or with -, standard input"
        ),
    ] = None,
    /,
    *,
    flags: Annotated[TranslateFlags, Parameter(name="*", show_default=False)] = TranslateFlags(),
) -> None:
    """Translate text line by line, or documents with their markup.

    cat text.txt | attent translate runs/en-de > translated.txt
    """
    file = None if file == STDIN else file
    check_usage(file, flags)
    try:
        run_translate(model, file, flags)
    except InputError as error:
        raise InputError(use_flag_names(str(error))) from error


def check_usage(file: Path | None, flags: TranslateFlags) -> None:
    problem = None
    if flags.ray and (file is None or flags.output is None or is_document(file, flags)):
        problem = "--ray translates a text file line by line into another file: name FILE and --output"
    elif flags.in_place and (file is None or flags.output is not None):
        problem = f"--in-place overwrites FILE: {'leave --output out' if file else 'name one'}"
    elif flags.alignment == "soft" and flags.output_type != "json":
        problem = "--alignment soft needs --output-type json: add it, or use --alignment hard"
    elif flags.alignment and flags.n_best > 1 and flags.output_type != "json":
        problem = "--alignment is for the best translation only: leave --n-best out, or add --output-type json"
    elif flags.quality and flags.n_best > 1:
        problem = "--quality is for the best translation only: leave --n-best out"
    elif flags.quality and flags.output_type == "text":
        problem = "--quality needs --output-type json or tsv, and text instead of a document"
    elif flags.reverse and not flags.quality:
        problem = "--reverse is for --quality: add it"
    elif flags.ray and (flags.reverse or flags.context):
        problem = f"--ray translates blocks of lines alone: leave {'--reverse' if flags.reverse else '--context'} out"
    elif flags.mbr_candidates and flags.mbr_candidates < flags.n_best:
        problem = f"--mbr must be at least --n-best, {flags.n_best}, but is {flags.mbr_candidates}"
    if problem:
        raise CycloptsError(msg=problem, command_chain=("translate",))
    shared.check_positive("translate", threads=flags.threads, batch_tokens=flags.batch_tokens)


def run_translate(model: Path, file: Path | None, flags: TranslateFlags) -> None:
    from attent.decoding.input_lines import build_line_source, open_input
    from attent.decoding.pipeline import translate_lines, warn_of_requested_languages
    from attent.storage.manifest import check_outputs

    shared.use_utf8(sys.stdout)
    with open_input(file, sys.stdin.buffer) as stream, shared.ProgressDisplay(sys.stderr) as progress:
        check_files(file, stream, flags)
        inputs = [model, *flags.ensemble, flags.glossary, flags.reverse]
        check_outputs([flags.output], inputs)
        if flags.report or flags.bilingual:
            check_outputs([flags.output, flags.report, flags.bilingual], [*inputs, file])
        with shared.raise_usage_errors("translate"):
            options = shared.build_search_options(flags, flags.mbr_candidates if not flags.sample else 1)
        content = stream.read() if is_document(file, flags) else b""
        source = build_line_source(stream, file, text_only=flags.input_type == "auto" and not content)
        if file is not None and flags.ray:
            run_on_ray(model, file, source, options, flags, progress)
            return
        pipeline = build_pipeline(model, options, flags, progress)
        warn_of_requested_languages(pipeline, flags.tgt, progress)
        if file is not None and is_document(file, flags):
            write_document(pipeline, content, file, flags, progress)
        else:
            if file is None and stream.isatty():
                progress.print_message("type one sentence per line; end with Ctrl-D")
            with select_output(flags.output, progress) as out:
                progress.start(source.total_bytes, quiet=out.isatty())
                translate_lines(pipeline, source, out, progress)


def build_pipeline(
    model: Path, options: SearchOptions, flags: TranslateFlags, progress: shared.ProgressDisplay | None
) -> TranslationPipeline:
    from attent.decoding.glossary import Glossary
    from attent.decoding.loading import read_data_settings, resolve_target_lang
    from attent.decoding.pipeline import TranslationPipeline, choose_context
    from attent.decoding.translator import Translator, check_can_require, check_constraints
    from attent.storage.hub import locate_model

    constraints = PhraseConstraints(prefix=flags.prefix, require=flags.require, ban=flags.ban)
    check_constraints(constraints, options)
    if flags.consistent_terms:
        check_can_require(options)
    own = read_data_settings(locate_model(model)) if flags.glossary else {}
    languages = flags.src or own.get("src"), flags.to or flags.tgt or own.get("tgt")
    glossary = Glossary.from_file(flags.glossary, *languages) if flags.glossary else None
    notify = None if progress is None else progress.print_message
    device, folders = shared.build_device_options(flags), (model, *flags.ensemble)
    translator = Translator.load(*folders, **vars(device), src=flags.src, tgt=flags.tgt, notify=notify)
    translator = translator.with_adapter(flags.adapter) if flags.adapter else translator
    tags = translator.tokenizer.source.tags
    to = resolve_target_lang(flags.tgt if tags and flags.to is None else flags.to, tags, model)
    translator.translate([], options)  # loads the engine, so that its errors are not reported for a line
    gc.freeze()  # scanning the model for garbage again and again takes as long as the translation
    return TranslationPipeline(
        translator=translator,
        options=options,
        to=to,
        source_lang=flags.src,
        glossary=glossary,
        constraints=constraints,
        mbr_candidates=flags.mbr_candidates,
        reverse=Translator.load(flags.reverse, **vars(device), notify=notify) if flags.reverse else None,
        context=choose_context(translator, flags.context),
        split_sentences=flags.split_sentences,
        consistent_terms=flags.consistent_terms,
        output_format=OutputFormat(
            type=flags.output_type,
            n_best=flags.n_best,
            with_score=flags.with_score,
            with_quality=flags.quality,
            alignment=flags.alignment,
            score_formula=options.score_formula,
        ),
    )


def run_on_ray(
    model: Path,
    file: Path,
    lines: LineSource,
    options: SearchOptions,
    flags: TranslateFlags,
    progress: shared.ProgressDisplay,
) -> None:
    from attent.decoding.ray_translate import compute_fingerprint, translate_with_ray
    from attent.storage.atomic import is_stream
    from attent.storage.hub import locate_model

    output = (flags.output or STDIN).expanduser()
    if lines.total_bytes is None or is_stream(output):
        raise InputError(f"--ray needs files, but {file} or {output} is compressed, a pipe or a device")
    # Workers have another working directory.
    model, *ensemble = (locate_model(path).absolute() for path in (model, *flags.ensemble))
    glossary = flags.glossary and flags.glossary.expanduser().absolute()
    adapter = flags.adapter and flags.adapter.expanduser().absolute()
    changes: Any = {"output": None, "ensemble": tuple(ensemble), "glossary": glossary, "threads": flags.threads or 1}
    flags = replace(flags, adapter=adapter, **changes)
    inputs = [path for path in (file.expanduser(), model, *ensemble, glossary, adapter) if path]
    fingerprint = compute_fingerprint(inputs, repr((options, flags)))
    progress.start(lines.total_bytes, quiet=False)
    build = partial(build_pipeline, model, options, flags, None)
    translate_with_ray(build, lines, output, fingerprint, shared.build_device_options(flags), progress)


def is_document(file: Path | None, flags: TranslateFlags) -> bool:
    from attent.data.formats.registry import detect_document_format

    key = detect_document_format(file.name) if file is not None and flags.input_type != "lines" else None
    return key not in (None, "text")


def check_files(file: Path | None, stream: BinaryIO, flags: TranslateFlags) -> None:
    """Refuse flags that do not fit the kind of the input, and outputs that cannot be written."""
    from attent.storage.atomic import is_same_file

    for_documents = {
        "--in-place": flags.in_place, "--field": flags.fields, "--report": flags.report, "--bilingual": flags.bilingual,
        "--consistent-terms": flags.consistent_terms,
    }  # fmt: skip
    for_lines = {
        "--n-best": flags.n_best > 1, "--output-type": flags.output_type != "text", "--with-score": flags.with_score,
        "--quality": flags.quality, "--alignment": flags.alignment,
    }  # fmt: skip
    if is_document(file, flags):
        if given := [name for name, value in for_lines.items() if value]:
            problem = f"{file} is a document and keeps its format: leave {given[0]} out"
            raise CycloptsError(msg=problem, command_chain=("translate",))
    elif given := [name for name, value in for_documents.items() if value]:
        subject = f"{file or 'standard input'} is text, and {given[0]}"
        raise InputError(f"{subject} is for documents such as PO, HTML and DOCX; leave it out")
    if STDIN in (flags.report, flags.bilingual):
        raise InputError("what --report or --bilingual names must be a file, but is standard output; name one")
    for output in (flags.output, flags.report, flags.bilingual):
        path = output and output.expanduser()
        if path and path != STDIN and (not path.absolute().parent.is_dir() or path.is_dir()):
            raise InputError(f"{output}: must be a file in an existing folder, but is not; create the folder first")
    if flags.output is not None and flags.output != STDIN:
        if is_same_file(flags.output.expanduser(), stream):
            raise InputError(f"{flags.output}: must not be the input file; use another name, or --in-place")
    elif not flags.in_place:
        if is_same_file(stream, sys.stdout):
            raise InputError("standard output must not be the input file; redirect it to another one")
        if file is not None and file.suffix.lower() == ".docx" and sys.stdout.isatty():
            raise InputError(f"{file}: its translation is no text for a terminal; name a file with --output")


def select_output(path: Path | None, progress: shared.ProgressDisplay) -> AbstractContextManager[TextIO]:
    from attent.storage.atomic import is_same_file, open_output

    if path is None or path == STDIN or is_same_file(path.expanduser(), sys.stdout):  # /dev/stdout as well
        return nullcontext(sys.stdout)
    return open_output(path, progress.print_message)


def write_document(
    pipeline: TranslationPipeline, content: bytes, file: Path, flags: TranslateFlags, progress: shared.ProgressDisplay
) -> None:
    from attent.data.pairs import LanguagePair
    from attent.data.pretranslate import format_bilingual, format_report
    from attent.decoding.pipeline import pretranslate_document, report_pretranslation
    from attent.storage.atomic import write_output

    progress.start(None, quiet=sys.stdout.isatty() and flags.output is None)
    result = pretranslate_document(pipeline, content, file, flags.tgt, progress, fields=flags.fields)
    progress.clear()
    path = file if flags.in_place else flags.output
    if path is None or path == STDIN:
        sys.stdout.flush()
        sys.stdout.buffer.write(result.content)
    else:
        write_output(path, result.content)
    if flags.report:
        is_tsv = flags.report.suffix.lower() == ".tsv"
        write_output(flags.report, format_report(result, str(file), is_tsv=is_tsv))
    if flags.bilingual:
        source, target = pipeline.languages
        languages = LanguagePair(flags.src or source, flags.tgt or target)
        write_output(flags.bilingual, format_bilingual(result, file.name, languages))
    report_pretranslation(result, file, progress.print_message)
