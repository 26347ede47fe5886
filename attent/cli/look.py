"""`attent look`: show the attention of every head as a page, a figure or text; measure which heads matter."""

from __future__ import annotations

import os
import shutil
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import CycloptsError, Group, Parameter

from attent.cli.search_flags import DEFAULT_BEAM_SIZE
from attent.decoding.options import DtypeName

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from attent.decoding.translator import Translator
    from attent.inspection.ablate import AblationData, BleuScorer
    from attent.inspection.inspectors.base import Inspector
    from attent.inspection.inspectors.translation import TranslationInspector
    from attent.inspection.session import Inspection
    from attent.scoring.metrics import MetricScore
    from attent.scoring.pipeline import TestSet

AttentionKind = Literal["self", "cross"]
PartSelection = Literal["heads", "sublayers", "layers", "all"]
INPUT_GROUP, OUTPUT_GROUP, SERVER_GROUP, ABLATION_GROUP, DEVICE_GROUP = (
    Group(name, sort_key=number)
    for number, name in enumerate(("Input", "Output", "Live page", "Head statistics and ablation", "Device"), 1)
)
PAGE_FILE, POSITIONS_FILE = Path("look.html"), Path("positions.html")
DEFAULT_WIDTH = 100  # columns without a terminal


@dataclass(frozen=True, kw_only=True)
class LookFlags:
    """The flags of the command."""

    target: Annotated[
        str | None, Parameter(group=INPUT_GROUP, help="inspect this translation instead of searching for one")
    ] = None
    text_pair: Annotated[str | None, Parameter(group=INPUT_GROUP, help="second segment, for text encoders (BERT)")] = (
        None
    )
    to: Annotated[str | None, Parameter(group=INPUT_GROUP, help="target language of a multilingual model")] = None
    beam_size: Annotated[
        int,
        Parameter(name=["--beam-size", "-b", "--beam"], group=INPUT_GROUP, help=f"default {DEFAULT_BEAM_SIZE}"),
    ] = DEFAULT_BEAM_SIZE
    mask: Annotated[
        tuple[str, ...],
        Parameter(
            group=INPUT_GROUP,
            negative_iterable="",
            help="switch off a head (decoder.blocks.3.cross_attn:2), a sub-layer (decoder.blocks.3.cross_attn) or a "
            "layer (decoder.blocks.3); may be repeated",
        ),
    ] = ()
    kind: Annotated[AttentionKind | None, Parameter(group=INPUT_GROUP, help="only this kind of attention")] = None
    layers: Annotated[
        tuple[int, ...],
        Parameter(
            name=["--layers", "--layer"],
            group=INPUT_GROUP,
            consume_multiple=True,
            negative_iterable="",
            help="only these layers of each stack, from 0",
        ),
    ] = ()
    heads: Annotated[
        tuple[int, ...],
        Parameter(
            name=["--heads", "--head"],
            group=INPUT_GROUP,
            consume_multiple=True,
            negative_iterable="",
            help="only these heads in figures, from 0",
        ),
    ] = ()
    positions: Annotated[
        bool, Parameter(group=INPUT_GROUP, negative="", help="show the positional encoding; needs no sentence")
    ] = False

    out: Annotated[
        Path | None, Parameter(name=["--output", "-o"], group=OUTPUT_GROUP, help=f"HTML page, default {PAGE_FILE}")
    ] = None
    open: Annotated[bool, Parameter(group=OUTPUT_GROUP, help="open the page in a browser")] = True
    terminal: Annotated[
        bool, Parameter(group=OUTPUT_GROUP, negative="", help="print the head with the best alignment as text")
    ] = False
    png: Annotated[Path | None, Parameter(group=OUTPUT_GROUP, help="write a figure (needs attent[viz])")] = None
    svg: Annotated[Path | None, Parameter(group=OUTPUT_GROUP, help="write a vector figure, .svg or .pdf")] = None
    json: Annotated[
        str | None,
        Parameter(group=OUTPUT_GROUP, allow_leading_hyphen=True, help="write all weights as JSON; -: to stdout"),
    ] = None

    port: Annotated[int, Parameter(group=SERVER_GROUP, help="default: the first free port from 8017")] = 0

    data: Annotated[
        tuple[str, ...],
        Parameter(
            group=ABLATION_GROUP,
            consume_multiple=True,
            negative_iterable="",
            help="parallel text to measure heads on, as for attent score",
        ),
    ] = ()
    src: Annotated[str | None, Parameter(group=ABLATION_GROUP, help="source language tag, such as en")] = None
    tgt: Annotated[str | None, Parameter(group=ABLATION_GROUP, help="target language tag, such as de")] = None
    ablate: Annotated[
        bool,
        Parameter(
            group=ABLATION_GROUP,
            negative="",
            help="measure BLEU and loss with each part masked; resumes if interrupted",
        ),
    ] = False
    parts: Annotated[PartSelection, Parameter(group=ABLATION_GROUP, help="parts to ablate")] = "heads"
    limit: Annotated[int | None, Parameter(group=ABLATION_GROUP, help="use only the first N pairs")] = None
    prune: Annotated[
        Path | None, Parameter(group=ABLATION_GROUP, help="write a model without the dispensable heads to this folder")
    ] = None
    max_bleu_drop: Annotated[
        float, Parameter(group=ABLATION_GROUP, help="BLEU that pruning may cost at most, default 0.2")
    ] = 0.2

    device: Annotated[
        str | None, Parameter(group=DEVICE_GROUP, help="cuda, cuda:1, mps or cpu; default: the fastest available")
    ] = None
    dtype: Annotated[DtypeName, Parameter(group=DEVICE_GROUP, help="of the weights")] = "float32"
    threads: Annotated[int | None, Parameter(group=DEVICE_GROUP, help="CPU threads, default: all cores")] = None


def look(
    model: Annotated[Path, Parameter(help="model folder, of attent or Hugging Face transformers")],
    sentence: Annotated[
        str | None,
        Parameter(help="sentence to inspect, or an image file for vision models; without it, serve the live page"),
    ] = None,
    /,
    *,
    flags: Annotated[LookFlags, Parameter(name="*", show_default=False)] = LookFlags(),  # noqa: B008 - frozen
) -> int | None:
    """Show the attention of every head in one page that works offline.

    attent look runs/en-de "A man rides a bike."
    attent look runs/gpt "The cat sat on the"
    attent look runs/bert "The [MASK] sat on the mat."
    attent look runs/vit picture.png
    """
    problem = find_usage_problem(sentence, flags) or find_value_problem(flags)
    if problem:
        raise CycloptsError(msg=problem, command_chain=("look",))
    if flags.ablate or flags.prune:
        return run_ablation_command(model, flags)
    inspector, to = open_model(model, sentence, flags)
    if flags.positions:
        return show_positions(inspector, flags)
    if sentence is None:
        return serve_live_page(model, inspector, to, flags)
    return show_sentence(inspector, sentence, to, flags)


# ---- usage -----------------------------------------------------------------------------------------------------------


def find_usage_problem(sentence: str | None, flags: LookFlags) -> str | None:
    """Return why the flags cannot be combined, or None."""
    outputs = {"--output": flags.out, "--png": flags.png, "--svg": flags.svg, "--json": flags.json}
    inputs = {"--terminal": flags.terminal, "--target": flags.target, "--mask": flags.mask}
    given_flags = find_given({**outputs, **inputs, "--text-pair": flags.text_pair})
    selection = find_given({"--kind": flags.kind, "--layers": flags.layers, "--heads": flags.heads})
    if flags.ablate or flags.prune:
        extra = (
            "the sentence" if sentence is not None else given_flags if given_flags not in ("--png", "--svg") else None
        )
        if extra:
            return f"--ablate and --prune run on the pairs of --data: leave {extra} out"
        if not flags.data:
            return "--ablate and --prune need parallel text: add --data valid.tsv"
        return (
            f"--ablate and --prune mask every part: leave {selection} out (--parts selects the kind)"
            if selection
            else None
        )
    if flags.positions and sentence is not None:
        return "--positions does not depend on a sentence: leave it out"
    if sentence is not None:
        return None if sentence.strip() else "the sentence must not be empty; leave it out for the live page"
    if selection and not flags.positions:
        return f"{selection} needs a sentence; on the live page heads are selected in the page: leave it out"
    if given_flags and not (flags.positions and given_flags in outputs):
        return f'{given_flags} needs a sentence: attent look MODEL "A man rides a bike."'
    return None


def find_given(flags: dict[str, Any]) -> str | None:
    return next((name for name, value in flags.items() if value), None)


def find_value_problem(flags: LookFlags) -> str | None:
    """Return which flag has an invalid value, or None."""
    for flag, path, suffixes in (("--png", flags.png, (".png",)), ("--svg", flags.svg, (".svg", ".pdf"))):
        if path is not None and path.suffix.lower() not in suffixes:
            return f"{flag} must be a file that ends in {' or '.join(suffixes)}, but is {path}"
    json_path = Path(flags.json) if flags.json and flags.json != "-" else None
    for path in (flags.out, flags.png, flags.svg, json_path):
        if path is not None and path.expanduser().is_dir():
            return f"{path}: must be a file, but is a folder; name a file in it"
        if path is not None and not path.expanduser().absolute().parent.is_dir():
            return f"{path}: its folder does not exist; create it first"
    for name, value in (("--beam-size", flags.beam_size), ("--limit", flags.limit), ("--threads", flags.threads)):
        if value is not None and value < 1:
            return f"{name} must be 1 or more, but is {value}"
    if not 0 <= flags.port <= 65_535:
        return f"--port must be from 0 to 65535, but is {flags.port}"
    return None if flags.max_bleu_drop >= 0 else f"--max-bleu-drop must be 0 or more, but is {flags.max_bleu_drop}"


# ---- one sentence ----------------------------------------------------------------------------------------------------


def open_model(folder: Path, sentence: str | None, flags: LookFlags) -> tuple[Inspector[Any], str | None]:
    """Return the inspector and the target language; with --data, head statistics are measured first."""
    from attent.decoding.translator import check_model_exists, resolve_target_lang
    from attent.inspection.inspectors.base import InspectionError
    from attent.inspection.inspectors.translation import TranslationInspector
    from attent.inspection.inspectors.vision import VisionInspector
    from attent.inspection.session import open_inspector

    check_model_exists(folder)
    inspector = open_inspector(
        folder, device=flags.device, dtype=flags.dtype, threads=flags.threads, notify=print_status, warn=print_warning
    )
    if not isinstance(inspector, TranslationInspector):
        extra = find_given({"--target": flags.target, "--to": flags.to, "--data": flags.data})
        if extra is not None:
            raise InspectionError(
                f"{folder}: {extra} is for translators, but this is {inspector.model_kind}; leave it out"
            )
        if isinstance(inspector, VisionInspector) and sentence is None and not flags.positions:
            raise InspectionError(
                f"{folder}: the live page takes text only; name an image: attent look {folder} image.png"
            )
        return inspector, None
    tags = inspector.translator.tokenizer.source.tags
    if flags.positions or (sentence is None and not (flags.to or flags.data)):
        return inspector, None  # the live page has a language menu
    to = resolve_target_lang(flags.to or (flags.tgt if flags.tgt in tags else None), tags, folder)
    if flags.data:
        measure_head_stats(inspector, folder, to, flags)
    return inspector, to


def measure_head_stats(inspector: TranslationInspector, folder: Path, to: str | None, flags: LookFlags) -> None:
    """Measure head statistics on --data; the folder keeps those of the most sentences."""
    from attent.data.pairs import LanguagePair
    from attent.inspection.head_stats import HEAD_STATS_FILE, measure_heads, save_head_stats
    from attent.scoring.pipeline import read_test_set
    from attent.storage.errors import FolderError
    from attent.storage.manifest import explain_save_errors

    test_set = read_test_set(flags.data, LanguagePair(flags.src, flags.tgt))
    pairs = [pair for pair in zip(test_set.sources, test_set.references, strict=True) if all(pair)][: flags.limit]
    print_status(f"measuring head statistics on {len(pairs):,} pairs ...")
    stored = (inspector.head_stats or {}).get("sentences", 0)
    names = ", ".join(Path(name).name for name in test_set.name.split(", "))
    sources, references = [source for source, _ in pairs], [reference for _, reference in pairs]
    tokenizer = inspector.translator.tokenizer
    stats = measure_heads(inspector.model, tokenizer, sources, references, to=to, dataset=names)
    inspector.head_stats = stats.to_document()
    if stored > stats.sentences:
        print_status(f"{HEAD_STATS_FILE} was measured on {stored:,} sentences and is not replaced")
        return
    try:
        with explain_save_errors(folder.expanduser(), "head statistics"):
            save_head_stats(folder.expanduser(), stats)
    except FolderError as error:  # a read-only folder must not prevent the page
        print_warning(str(error))


def show_sentence(inspector: Inspector[Any], sentence: str, to: str | None, flags: LookFlags) -> int:
    from attent.inspection.session import look as inspect_text

    inspection = inspect_text(
        inspector,
        sentence,
        text_pair=flags.text_pair,
        target=flags.target,
        to=to,
        beam_size=flags.beam_size,
        mask=flags.mask,
        kind=flags.kind,
        layers=flags.layers or None,
    )
    if flags.json:
        write_json(inspection, flags.json)
    if flags.png or flags.svg:
        selected = flags.kind or flags.layers or flags.heads
        save_figures(inspection.plot(kind=flags.kind, heads=flags.heads, all_kinds=bool(selected)), flags)
    if flags.terminal:
        width = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns if sys.stdout.isatty() else DEFAULT_WIDTH
        print(inspection.render_terminal(heads=flags.heads, width=width))
    if flags.out or not (flags.json or flags.png or flags.svg or flags.terminal):
        write_page(inspection, PAGE_FILE, flags)
    return 0


def show_positions(inspector: Inspector[Any], flags: LookFlags) -> int:
    from attent.inspection.session import Inspection

    inspection = Inspection(inspector.build_model_document(f"Positions of {inspector.name}"))
    if flags.png or flags.svg:
        from attent.inspection.plots import plot_positions

        save_figures(plot_positions(inspector.model), flags)
    if flags.json:
        write_json(inspection, flags.json)
    if flags.out or not (flags.json or flags.png or flags.svg):
        write_page(inspection, POSITIONS_FILE, flags)
    return 0


def serve_live_page(folder: Path, inspector: Inspector[Any], to: str | None, flags: LookFlags) -> int:
    """Serve the page with a text box until Ctrl-C."""
    from attent.serving.live_page import create_live_app
    from attent.serving.server import serve_app

    def announce(url: str) -> None:
        print(url, flush=True)
        print(f"open it in a browser to inspect {inspector.name}; stop with Ctrl-C", file=sys.stderr, flush=True)
        if flags.open:
            open_in_browser(url)

    app = create_live_app(inspector, to=to, beam_size=flags.beam_size, examples=read_examples(folder.expanduser()))
    serve_app(app, port=flags.port or None, on_ready=announce)
    return 0


def read_examples(folder: Path) -> list[str]:
    """Return the sample sources of the last validation in the training log."""
    from attent.training.event_log import LOG_FILE, read_events
    from attent.training.events import Validated

    validated = [event for event in read_events(folder / LOG_FILE) if isinstance(event, Validated)]
    return [sample.source for sample in validated[-1].samples] if validated else []


# ---- ablation --------------------------------------------------------------------------------------------------------


def run_ablation_command(folder: Path, flags: LookFlags) -> int:
    """Ablate the model, and prune it with --prune; print the report."""
    from rich.console import Console

    from attent.data.pairs import LanguagePair
    from attent.decoding.options import DeviceOptions, SearchOptions
    from attent.decoding.translator import load_translator
    from attent.inspection.ablation_report import render_ablation
    from attent.inspection.ablation_run import AblationReporter, check_output_folder, run_ablation
    from attent.scoring.pipeline import read_test_set

    if flags.png or flags.svg:
        import matplotlib  # noqa: F401 - fail before minutes of work
    if flags.prune is not None:
        check_output_folder(flags.prune)
    test_set = read_test_set(flags.data, LanguagePair(flags.src, flags.tgt))
    reporter = AblationReporter(sys.stderr)
    device_options = DeviceOptions(device=flags.device, dtype=flags.dtype, threads=flags.threads)
    translator = load_translator((folder,), device_options, reporter.say)
    result = run_ablation(
        translator,
        folder,
        build_ablation_data(test_set, translator, folder, flags),
        build_bleu_scorer(test_set, flags),
        selection=flags.parts,
        prune_to=flags.prune,
        max_bleu_drop=flags.max_bleu_drop,
        search=SearchOptions(beam_size=flags.beam_size),
        reporter=reporter,
    )
    console = Console(highlight=False)
    for line in render_ablation(result.ablation, result.kinds, result.pruned, folder, saved=result.saved):
        console.print(line, soft_wrap=True)
    if flags.png or flags.svg:
        from attent.inspection.plots import plot_ablation

        save_figures(plot_ablation(result.ablation.to_document()), flags)
    return 0


def build_ablation_data(test_set: TestSet, translator: Translator, folder: Path, flags: LookFlags) -> AblationData:
    from attent.decoding.translator import resolve_target_lang
    from attent.inspection.ablate import AblationData, AblationError
    from attent.scoring.pipeline import find_language_tag

    tags = translator.tokenizer.source.tags
    if flags.to is None and tags and len(set(test_set.languages)) > 1:
        raise AblationError(f"{test_set.name}: must have one target language; name it with --tgt")
    if flags.to:
        to = resolve_target_lang(flags.to, tags, folder)
    else:
        to = find_language_tag(test_set.languages[0] if tags else None, tags, folder)
    return AblationData(
        name=test_set.name,
        sources=tuple(test_set.sources[: flags.limit]),
        references=tuple(test_set.references[: flags.limit]),
        to=to,
    )


def build_bleu_scorer(test_set: TestSet, flags: LookFlags) -> BleuScorer:
    """sacreBLEU, with a paired bootstrap for p-values."""
    from attent.inspection.ablate import BleuScorer
    from attent.scoring.metrics import compare_outputs, compute_metrics

    language, references = flags.to or test_set.language, test_set.references[: flags.limit]

    def score(outputs: Sequence[str], references: Sequence[str]) -> MetricScore:
        return compute_metrics(outputs, references, ("bleu",), language, resamples=0)[0]

    return BleuScorer(
        compute_bleu=lambda outputs, references: score(outputs, references).value,
        signature=score(references, references).signature,
        compute_p_value=lambda outputs, baseline, references: (
            compare_outputs(outputs, baseline, references, ("bleu",), language)[0].p_value
        ),
    )


# ---- output ----------------------------------------------------------------------------------------------------------


def write_page(inspection: Inspection, default_path: Path, flags: LookFlags) -> None:
    path = (flags.out or default_path).expanduser()
    inspection.save_html(path)
    print_path(path, flags)
    if not (flags.open and open_in_browser(path.resolve().as_uri())):
        print_status(f"open {path} in a browser")


def save_figures(figure: Figure, flags: LookFlags) -> None:
    from attent.inspection.plots import save_figure

    for path in (flags.png, flags.svg):
        if path is not None:
            save_figure(figure, path.expanduser())
            print_path(path, flags)


def write_json(inspection: Inspection, destination: str) -> None:
    from attent.storage.atomic import write_atomic

    content = f"{inspection.to_json()}\n".encode()
    if destination == "-":
        sys.stdout.buffer.write(content)
    else:
        write_atomic(Path(destination).expanduser(), content)
        print(destination)


def print_path(path: Path, flags: LookFlags) -> None:
    print(path, file=sys.stderr if flags.json == "-" else sys.stdout)


def open_in_browser(url: str) -> bool:
    """Open a URL if there is a terminal and a display; return whether it was opened."""
    has_display = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return bool(has_display) and sys.stderr.isatty() and webbrowser.open(url)


def print_status(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def print_warning(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
