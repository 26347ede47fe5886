"""What `attent look` does: read the model, look at the sentence, and show it as a page, a picture or text; serve the
live page. What may be asked for is `look`'s; what is seen `attent.look`'s.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attent import settings
from attent.cli.look import LookFlags
from attent.cli.look_models import check_model_flags, create_inspector, load_look_model
from attent.decoding import SearchOptions, Translator
from attent.decoding.options import DeviceOptions
from attent.decoding.translator import load_tokenizer, resolve_target_lang
from attent.inspection import ablate as ablations
from attent.inspection import head_stats
from attent.inspection.head_masking import ModelPart, find_part
from attent.inspection.html_page import build_live_csp, render_page
from attent.inspection.inspectors.base import InspectionError, InspectionRequest, Inspector, LayerFilter
from attent.inspection.inspectors.translation import TranslationInspector
from attent.models import Seq2Seq
from attent.storage.atomic import write_atomic
from attent.training.event_log import LOG_FILE as LOG
from attent.training.event_log import read_events as read_log
from attent.training.events import Validated

if TYPE_CHECKING:
    from attent.inspection.ablate import Ablation
    from attent.serving.request import LookRequest as Asked

CachedT = TypeVar("CachedT")

PAGE_FILE, POSITIONS_FILE = Path("look.html"), Path("positions.html")
RESPONSE_TIMEOUT = 300.0  # seconds that an answer of the live page may take: a long text takes minutes
DEFAULT_WIDTH = 100  # of a picture where there is no terminal


def run_look(folder: Path, sentence: str | None, flags: LookFlags) -> int:
    looking = LookSession.from_folder(folder, sentence, flags)
    if flags.positions:
        return looking.show_positions()
    if sentence is None:
        return looking.serve_live_page()
    return looking.show_sentence(sentence)


def run_look_ablation(folder: Path, flags: LookFlags) -> int:
    """Which heads matter; `--png` and `--svg` draw it."""
    from attent.cli.ablation_run import run_ablation

    if flags.png or flags.svg:
        import matplotlib  # noqa: F401 - a missing package is told now, not after minutes of work

    def draw(ablation: Ablation) -> None:
        from attent.inspection.plots import plot_ablation

        write_figures(flags, lambda: plot_ablation(ablation.to_document()))

    return run_ablation(
        folder,
        flags.data,
        src=flags.src,
        tgt=flags.tgt,
        to=flags.to,
        selection=flags.parts,
        limit=flags.limit,
        prune_to=flags.prune,
        max_bleu_drop=flags.max_bleu_drop,
        search=SearchOptions(beam_size=flags.beam_size),
        machine=DeviceOptions(device=flags.device, dtype=flags.dtype, threads=flags.threads),
        on_done=draw if flags.png or flags.svg else None,
    )


@dataclass(frozen=True, kw_only=True)
class LookSession:
    """A model that is looked at."""

    folder: Path
    inspector: Inspector[Any]
    flags: LookFlags
    to: str | None

    @classmethod
    def from_folder(cls, folder: Path, sentence: str | None, flags: LookFlags) -> LookSession:
        model = load_look_model(folder, flags)
        check_model_flags(model, folder, sentence, flags)
        if not isinstance(model, Seq2Seq):
            return cls(folder=folder, inspector=create_inspector(model, folder), flags=flags, to=None)
        translator = Translator(
            model,
            load_tokenizer(folder.expanduser()),
            folder=folder.expanduser(),
            threads=flags.threads,
            notify=print_status,
        )
        root = folder.expanduser()
        tags = translator.tokenizer.source.tags
        free = flags.positions or (sentence is None and not (flags.to or flags.data))  # the live page lets one choose
        to = None if free else resolve_target_lang(flags.to or (flags.tgt if flags.tgt in tags else None), tags, folder)
        known = measure_head_stats(root, translator, flags, to) or load_cached(head_stats.load_head_stats, root, model)
        effects = load_cached(ablations.load_matching_ablation, root, model)
        looker = TranslationInspector(
            translator,
            name=root.resolve().name,
            languages=read_languages(root),
            head_stats=None if known is None else known.to_document(),
            ablation=None if effects is None else effects.to_document(),
        )
        return cls(folder=folder, inspector=looker, flags=flags, to=to)

    def show_sentence(self, sentence: str) -> int:
        """One sentence, in every form that was asked for; in a page if none was."""
        flags = self.flags
        document = self.inspector.inspect(
            self.build_request(sentence), LayerFilter(kind=flags.kind, layers=flags.layers or None)
        )
        if flags.json:
            write_json(document, flags.json)
        if flags.png or flags.svg:
            from attent.inspection.plots import plot_heads

            kind, heads = self.select_figure_heads(document)
            shown = (
                use_decoder_input(document, document["layers"][0]["path"], heads[0])
                if self.is_single_head(document)
                else document
            )
            write_figures(flags, lambda: plot_heads(shown, kind=kind, heads=heads or None))
        if flags.terminal:
            print(self.render_terminal(document))
        if flags.out or not (flags.json or flags.png or flags.svg or flags.terminal):
            self.write_page(document, PAGE_FILE)
        return 0

    def show_positions(self) -> int:
        """How the model tells places apart."""
        document = self.inspector.build_model_document(f"Positions of {self.inspector.name}")
        if self.flags.png or self.flags.svg:
            from attent.inspection.plots import plot_positions

            write_figures(self.flags, lambda: plot_positions(self.inspector.model))
        if self.flags.json:
            write_json(document, self.flags.json)
        if self.flags.out or not (self.flags.json or self.flags.png or self.flags.svg):
            self.write_page(document, POSITIONS_FILE)
        return 0

    def serve_live_page(self) -> int:
        """The page with a box to type in, until Ctrl-C."""
        from attent.serving.app import create_app
        from attent.serving.limits import Limits
        from attent.serving.server import serve_app

        examples = read_examples(self.folder.expanduser())
        languages: list[str] = []
        if isinstance(self.inspector, TranslationInspector) and not self.to:
            languages = list(self.inspector.translator.tokenizer.source.tags)
        document = self.inspector.build_model_document("") | {
            "live": True,
            "examples": examples,
            "languages": languages,
        }
        about = {"name": self.inspector.name, "summary": document["model"]["summary"]}

        def answer(asked: Asked, stop: Callable[[], bool]) -> dict[str, Any]:
            parts = tuple(map(ModelPart.parse, asked.masked_parts))
            for part in parts:
                find_part(self.inspector.model, part)
            question = InspectionRequest(
                text=asked.text,
                to=asked.to or self.to,
                search=SearchOptions(beam_size=asked.beam_size or self.flags.beam_size),
                prefix=asked.prefix,
                masked_parts=parts,
            )
            return self.inspector.inspect(question, should_stop=stop) | {"live": True}

        limits = Limits(response_timeout=RESPONSE_TIMEOUT)
        app = create_app(
            page=render_page(document), handler=answer, csp=build_live_csp(), model_info=about, limits=limits
        )
        serve_app(app, port=self.flags.port or None, on_ready=self.announce_url)
        return 0

    def announce_url(self, url: str) -> None:
        print(url, flush=True)
        print(f"open it in a browser to look at {self.inspector.name}; Ctrl-C ends it", file=sys.stderr, flush=True)
        if self.flags.open:
            open_in_browser(url)

    # --- parts -------------------------------------------------------------------------------------------------------

    def build_request(self, sentence: str) -> InspectionRequest:
        flags = self.flags
        return InspectionRequest(
            text=sentence,
            text_pair=flags.text_pair,
            to=self.to,
            target=flags.target,
            search=SearchOptions(beam_size=flags.beam_size),
            masked_parts=tuple(map(ModelPart.parse, flags.mask)),
        )

    def is_single_head(self, document: dict[str, Any]) -> bool:
        """Is one head alone asked for?"""
        return len(document["layers"]) == 1 == len(self.flags.heads)

    def select_figure_heads(self, document: dict[str, Any]) -> tuple[Any, list[int]]:
        """What a picture shows: what was asked for; if nothing was, how the translation looks at the source."""
        flags = self.flags
        whole = not (flags.kind or flags.layers or flags.heads)
        crosses = any(layer["kind"] == "cross" for layer in document["layers"])
        return ("cross" if whole and crosses else flags.kind), list(flags.heads)

    def render_terminal(self, document: dict[str, Any]) -> str:
        from attent.inspection.terminal import draw_head, escape_control_characters, summarize_heads

        path, head = self.select_head(document)
        document = use_decoder_input(document, path, head)
        width = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns if sys.stdout.isatty() else DEFAULT_WIDTH
        heads = document["properties"]["heads"]
        said = next((one["says"] for one in heads if (one["path"], one["head"]) == (path, head)), "")
        title = f"{path}, head {head}: {said}".rstrip(": ")
        if self.flags.mask:
            title = f"silenced: {', '.join(self.flags.mask)}\n\n{title}"
        return "\n".join(
            [
                "\n".join(map(escape_control_characters, format_texts(document))) + "\n",
                f"{title}\n",
                draw_head(document, path=path, head=head, width=width),
                "",
                summarize_heads(document),
            ]
        )

    def select_head(self, document: dict[str, Any]) -> tuple[str, int]:
        """The head that was asked for; else, of what was recorded, the one that aligns best."""
        wanted = set(self.flags.heads)
        recorded = {layer["path"] for layer in document["layers"]}
        heads = [one for one in document["properties"]["heads"] if one["path"] in recorded]
        heads = [one for one in heads if not wanted or one["head"] in wanted]

        def worth(one: dict[str, Any]) -> tuple[float, float]:
            values = one["values"]
            sure = values.get("confidence") or 0.0
            aligned = values.get("alignment")
            if len(document["sides"]) == 1:  # what looks at one token, each at another, is what there is to see
                return sure * (1 - (values.get("shared") or 0.0)) * (1 - (values.get("itself") or 0.0)), sure
            return (values.get("same") or 0.0) if aligned is None else aligned * sure, sure

        if not heads:
            raise InspectionError(
                "there must be a head to draw, but there is none of those that are asked for; ask for others"
            )
        best = max(heads, key=worth)
        return best["path"], best["head"]

    def write_page(self, document: dict[str, Any], default_path: Path) -> None:
        path = (self.flags.out or default_path).expanduser()
        write_atomic(path, render_page(document).encode())
        print(path, file=sys.stderr if self.flags.json == "-" else sys.stdout)
        if not (self.flags.open and open_in_browser(path.resolve().as_uri())):
            print_status(f"open {path} in a browser")


def format_texts(document: dict[str, Any]) -> list[str]:
    """What was read, and what came of it, a line each."""
    sides, outcome = document["sides"], document.get("outcome")
    if "target" in sides:
        return [sides["source"]["text"], sides["target"]["text"]]
    lines = [next(iter(sides.values()))["text"]]
    labels = document.get("labels", {}).get("best", ())
    if labels:
        lines.append(", ".join(f"{one['label']} {100 * one['p']:.1f}%" for one in labels[:3]))
    if outcome and outcome["label"] != "label":
        lines.append(f"{outcome['label']}: {outcome['text'].strip()}")
    return lines


def use_decoder_input(document: dict[str, Any], path: str, head: int) -> dict[str, Any]:
    """A head that looks at a word when its translation has just been read is shown by what was read."""
    heads = document["properties"]["heads"]
    values: dict[str, float | None] = next(
        (one["values"] for one in heads if (one["path"], one["head"]) == (path, head)), {}
    )
    if (values.get("read") or 0.0) <= (values.get("written") or 0.0):
        return document
    layers = [layer | {"queries": "read"} if layer["path"] == path else layer for layer in document["layers"]]
    return document | {"layers": layers}


def measure_head_stats(
    root: Path, translator: Translator, flags: LookFlags, to: str | None
) -> head_stats.HeadStatsReport | None:
    """What each head does in the pairs of `--data`; the folder remembers it."""
    if not flags.data:
        return None
    from attent.data.pairs import LanguagePair
    from attent.scoring.pipeline import read_test_set
    from attent.storage.errors import FolderError
    from attent.storage.manifest import explain_save_errors

    texts = read_test_set(flags.data, LanguagePair(flags.src, flags.tgt))
    pairs = [pair for pair in zip(texts.sources, texts.references, strict=True) if all(pair)][: flags.limit]
    assert isinstance(translator.model, Seq2Seq)
    sources, references = [source for source, _ in pairs], [reference for _, reference in pairs]
    print_status(f"measuring what each head does, on {len(pairs):,} pairs ...")
    names = ", ".join(Path(name).name for name in texts.name.split(", "))
    known = head_stats.measure_heads(translator.model, translator.tokenizer, sources, references, to=to, dataset=names)
    before = load_cached(head_stats.load_head_stats, root, translator.model)
    if before is not None and before.sentences > known.sentences:
        print_status(f"{head_stats.HEAD_STATS_FILE} stays as it is: it is of {before.sentences:,} sentences")
        return known
    try:
        with explain_save_errors(root, "what its heads do"):
            head_stats.save_head_stats(root, known)
    except FolderError as error:  # the page is worth more than the memory of it
        print(f"warning: {error}", file=sys.stderr)
    return known


def read_languages(root: Path) -> tuple[str | None, str | None]:
    """As the run says, where there is one."""
    path = root / "run.toml"
    if not path.exists():
        return None, None
    data: dict[str, Any] = settings.read_toml_dict(path).get("data", {})
    return data.get("src"), data.get("tgt")


def load_cached(load: Callable[[Path, Seq2Seq], CachedT | None], root: Path, model: Seq2Seq) -> CachedT | None:
    """What the folder remembers; it can be measured again, so that a damaged file stops nobody."""
    try:
        return load(root, model)
    except settings.SettingsError as error:
        print(f"warning: {error}; it is left out", file=sys.stderr)
        return None


def read_examples(root: Path) -> list[str]:
    """Sentences that training showed last, to begin with."""
    validated = [event for event in read_log(root / LOG) if isinstance(event, Validated)]
    return [sample.source for sample in validated[-1].samples] if validated else []


def write_figures(flags: LookFlags, draw: Callable[[], Any]) -> None:
    from attent.inspection.plots import save_figure

    figure = draw()
    for path in (flags.png, flags.svg):
        if path is not None:
            save_figure(figure, path.expanduser())
            print(path, file=sys.stderr if flags.json == "-" else sys.stdout)


def write_json(document: dict[str, Any], destination: str) -> None:
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    content = f"{text}\n".encode()
    if destination == "-":
        sys.stdout.buffer.write(content)
    else:
        write_atomic(Path(destination).expanduser(), content)
        print(destination)


def open_in_browser(url: str) -> bool:
    """Only where a person sees it: not from a script, nor where there is no screen."""
    seen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return bool(seen) and sys.stderr.isatty() and webbrowser.open(url)


def print_status(text: str) -> None:
    """To a person who waits."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
