"""`attent look`: show the attention of every head as a page, a figure or JSON; measure which heads matter."""

import os
import sys
import webbrowser
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import CycloptsError, Group, Parameter

from attent.cli.shared import DEFAULT_BEAM_SIZE, print_message, print_status
from attent.decoding.options import DeviceOptions, DtypeName

if TYPE_CHECKING:
    from attent.inspection.inspectors.base import Inspector
    from attent.inspection.session import Inspection

AttentionKind = Literal["self", "cross"]
Indices = tuple[int, ...]
PartSelection = Literal["heads", "sublayers", "layers", "all"]
input_flag, output_flag, server_flag, ablation_flag, device_flag = (
    partial(Parameter, group=Group(name, sort_key=number))
    for number, name in enumerate(("Input", "Output", "Live page", "Head statistics and ablation", "Device"), 1)
)
SWITCH, LIST = Parameter(negative=""), Parameter(consume_multiple=True, negative_iterable="")
BEAM_FLAGS = ("--beam-size", "-b", "--beam")
PAGE_FILE = Path("look.html")
PARTS_HELP = (
    "switch off a head (decoder.blocks.3.cross_attn:2), a sub-layer (decoder.blocks.3.cross_attn) or a layer "
    "(decoder.blocks.3); may be repeated"
)


@dataclass(frozen=True, kw_only=True)
class LookFlags:
    target: Annotated[str | None, input_flag(help="inspect this output instead of searching for one")] = None
    text_pair: Annotated[str | None, input_flag(help="second segment, for text encoders (BERT)")] = None
    to: Annotated[str | None, input_flag(help="target language of a multilingual model")] = None
    beam_size: Annotated[int, input_flag(name=BEAM_FLAGS, help=f"default {DEFAULT_BEAM_SIZE}")] = DEFAULT_BEAM_SIZE
    mask: Annotated[tuple[str, ...], input_flag(negative_iterable="", help=PARTS_HELP)] = ()
    kind: Annotated[AttentionKind | None, input_flag(help="only this kind of attention")] = None
    layers: Annotated[Indices, LIST, input_flag(name=["--layers", "--layer"], help="only these layers, from 0")] = ()
    head: Annotated[int | None, input_flag(help="of a figure, from 0; by default the one that aligns best")] = None

    out: Annotated[Path | None, output_flag(name=["--output", "-o"], help=f"HTML page, default {PAGE_FILE}")] = None
    open: Annotated[bool, output_flag(help="open the page in a browser")] = True
    png: Annotated[Path | None, output_flag(help="write a figure of one head (needs attent[viz])")] = None
    svg: Annotated[Path | None, output_flag(help="write a vector figure of one head, .svg or .pdf")] = None
    json: Annotated[str | None, output_flag(allow_leading_hyphen=True, help="JSON of all weights; -: stdout")] = None

    port: Annotated[int, server_flag(help="default: the first free port from 8017")] = 0

    data: Annotated[tuple[str, ...], LIST, ablation_flag(help="parallel text, as for attent score")] = ()
    src: Annotated[str | None, ablation_flag(help="source language tag, such as en")] = None
    tgt: Annotated[str | None, ablation_flag(help="target language tag, such as de")] = None
    ablate: Annotated[bool, SWITCH, ablation_flag(help="measure BLEU and loss with each part masked")] = False
    parts: Annotated[PartSelection, ablation_flag(help="parts to ablate")] = "heads"
    limit: Annotated[int | None, ablation_flag(help="use only the first N pairs")] = None
    prune: Annotated[Path | None, ablation_flag(help="folder for a model without the dispensable heads")] = None
    max_bleu_drop: Annotated[float, ablation_flag(help="BLEU that pruning may cost at most, default 0.2")] = 0.2

    device: Annotated[str | None, device_flag(help="cuda, cuda:1, mps or cpu; default: the fastest available")] = None
    dtype: Annotated[DtypeName, device_flag(help="of the weights")] = "float32"
    threads: Annotated[int | None, device_flag(help="CPU threads, default: all cores")] = None

    @property
    def output_paths(self) -> list[Path]:
        json = Path(self.json) if self.json and self.json != "-" else None
        return [path for path in (self.out, self.png, self.svg, json) if path is not None]

    @property
    def device_options(self) -> DeviceOptions:
        return DeviceOptions(device=self.device, dtype=self.dtype, threads=self.threads)


def look(
    model: Annotated[Path, Parameter(help="model folder, of attent or Hugging Face transformers")],
    sentence: Annotated[
        str | None, Parameter(help="sentence, or a file of an image or a recording; without it, serve the live page")
    ] = None,
    /,
    *,
    flags: Annotated[LookFlags, Parameter(name="*", show_default=False)] = LookFlags(),
) -> int | None:
    """Show the attention of every head in one page that works offline.

    attent look runs/en-de "A man rides a bike."
    attent look runs/gpt "The cat sat on the"
    attent look runs/bert "The [MASK] sat on the mat."
    attent look runs/vit picture.png
    attent look runs/asr recording.wav
    """
    problem = find_usage_problem(sentence, flags) or find_value_problem(flags)
    if problem:
        raise CycloptsError(msg=problem, command_chain=("look",))
    from attent.storage.manifest import check_outputs

    check_outputs(flags.output_paths, [model])
    if flags.ablate or flags.prune:
        return run_ablation_command(model, flags)
    from attent.inspection import session

    inspector, to = open_model(model, sentence, flags)
    if sentence is None:
        return serve_live_page(model, inspector, to, flags)
    names = ("text_pair", "target", "beam_size", "mask", "kind")
    options = {name: getattr(flags, name) for name in names} | {"to": to, "layers": flags.layers or None}
    return write_outputs(session.look(inspector, sentence, **options), flags)


def find_usage_problem(sentence: str | None, flags: LookFlags) -> str | None:
    outputs = {"--output": flags.out, "--png": flags.png, "--svg": flags.svg, "--json": flags.json}
    inputs = {"--target": flags.target, "--mask": flags.mask, "--text-pair": flags.text_pair}
    selection = {"--kind": flags.kind, "--layers": flags.layers, "--head": flags.head is not None}
    given = find_given(outputs | inputs | selection)
    if flags.ablate or flags.prune:
        if sentence is not None or given:
            superfluous = given if sentence is None else "the sentence"
            return f"--ablate and --prune run on the pairs of --data: leave {superfluous} out"
        return None if flags.data else "--ablate and --prune need parallel text: add --data valid.tsv"
    if sentence is not None:
        return None if sentence.strip() else "the sentence must not be empty; leave it out for the live page"
    return f'{given} needs a sentence: attent look MODEL "A man rides a bike."' if given else None


def find_given(flags: dict[str, Any]) -> str | None:
    return next((name for name, value in flags.items() if value), None)


def find_value_problem(flags: LookFlags) -> str | None:
    for flag, path, suffixes in (("--png", flags.png, (".png",)), ("--svg", flags.svg, (".svg", ".pdf"))):
        if path is not None and path.suffix.lower() not in suffixes:
            return f"{flag} must be a file that ends in {' or '.join(suffixes)}, but is {path}"
    for path in flags.output_paths:
        if path.expanduser().is_dir() or not path.expanduser().absolute().parent.is_dir():
            return f"{path}: must be a file in an existing folder, but is not; create the folder first"
    for name, value in (("--beam-size", flags.beam_size), ("--limit", flags.limit), ("--threads", flags.threads)):
        if value is not None and value < 1:
            return f"{name} must be 1 or more, but is {value}"
    if not 0 <= flags.port <= 65_535:
        return f"--port must be from 0 to 65535, but is {flags.port}"
    return None if flags.max_bleu_drop >= 0 else f"--max-bleu-drop must be 0 or more, but is {flags.max_bleu_drop}"


def open_model(folder: Path, sentence: str | None, flags: LookFlags) -> "tuple[Inspector[Any], str | None]":
    """Return the inspector and the target language; with --data, head statistics are measured first."""
    from attent.data.pairs import LanguagePair
    from attent.decoding.loading import check_model_exists, resolve_target_lang
    from attent.inspection import session
    from attent.inspection.inspectors.seq2seq import TranslationInspector

    check_model_exists(folder)
    languages, notify, warn = LanguagePair(flags.src, flags.tgt), print_status, print_warning
    inspector = session.open_inspector(folder, flags.device_options, languages=languages, notify=notify, warn=warn)
    if not isinstance(inspector, TranslationInspector):
        translator_flags = {"--target": flags.target, "--to": flags.to, "--data": flags.data}
        extra = find_given({f: v for f, v in translator_flags.items() if f[2:] not in inspector.supported_options})
        if extra is not None:
            raise ValueError(f"{folder}: {extra} is for translators, but this is {inspector.model_kind}; leave it out")
        file = inspector.example_file
        if file and sentence is None:
            raise ValueError(f"{folder}: the live page takes text only; name a file: attent look {folder} {file}")
        return inspector, flags.to
    tags = inspector.translator.tokenizer.source.tags
    if sentence is None and not (flags.to or flags.data):
        return inspector, None  # the live page has a language menu
    to = resolve_target_lang(flags.to or (flags.tgt if flags.tgt in tags else None), tags, folder)
    if flags.data:
        limit = flags.limit
        session.measure_head_stats(inspector, folder, flags.data, languages, to, limit, notify=notify, warn=warn)
    return inspector, to


def serve_live_page(folder: Path, inspector: "Inspector[Any]", to: str | None, flags: LookFlags) -> int:
    """Serve the page with a text box until Ctrl-C; its examples are the sources of the last validation."""
    from attent.serving.live_page import create_live_app
    from attent.serving.run import serve_app
    from attent.training.events import LOG_FILE, Validated, read_events

    def announce(url: str) -> None:
        print(url, flush=True)
        print(f"open it in a browser to inspect {inspector.name}; stop with Ctrl-C", file=sys.stderr, flush=True)
        if flags.open:
            open_in_browser(url)

    log = folder.expanduser() / LOG_FILE
    validated = [event for event in read_events(log) if isinstance(event, Validated)]
    examples = [sample.source for sample in validated[-1].samples] if validated else []
    app = create_live_app(inspector, to=to, beam_size=flags.beam_size, examples=examples)
    serve_app(app, port=flags.port or None, on_ready=announce)
    return 0


def run_ablation_command(folder: Path, flags: LookFlags) -> int:
    from rich.console import Console

    from attent.data.pairs import LanguagePair
    from attent.inspection.ablation_run import ablate_folder, render_ablation

    result = ablate_folder(
        folder,
        flags.data,
        LanguagePair(flags.src, flags.tgt),
        to=flags.to,
        limit=flags.limit,
        selection=flags.parts,
        prune_to=flags.prune,
        max_bleu_drop=flags.max_bleu_drop,
        beam_size=flags.beam_size,
        device=flags.device_options,
        notify=print_message,
    )
    console = Console(highlight=False)
    for line in render_ablation(result):
        console.print(line, soft_wrap=True)
    return 0


def write_outputs(inspection: "Inspection", flags: LookFlags) -> int:
    if flags.json == "-":
        sys.stdout.buffer.write(f"{inspection.to_json()}\n".encode())
    elif flags.json:
        from attent.storage.atomic import write_output

        write_output(Path(flags.json), f"{inspection.to_json()}\n".encode())
        print(flags.json)
    if flags.png or flags.svg:
        from attent.inspection.plots import save_figure

        figure = inspection.plot(head=flags.head, kind=flags.kind)
        for path in (flags.png, flags.svg):
            if path is not None:
                save_figure(figure, path.expanduser())
                print_path(path, flags)
    if flags.out or not (flags.json or flags.png or flags.svg):
        path = (flags.out or PAGE_FILE).expanduser()
        inspection.save_html(path)
        print_path(path, flags)
        if not (flags.open and open_in_browser(path.resolve().as_uri())):
            print_status(f"open {path} in a browser")
    return 0


def print_path(path: Path, flags: LookFlags) -> None:
    print(path, file=sys.stderr if flags.json == "-" else sys.stdout)


def open_in_browser(url: str) -> bool:
    """Open a URL if there is a terminal and a display; return whether it was opened."""
    has_display = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return bool(has_display) and sys.stderr.isatty() and webbrowser.open(url)


def print_warning(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
