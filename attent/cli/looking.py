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
from attent.cli.look import Flags
from attent.cli.look_models import check_flags, read_model, reading_of
from attent.cli.searching import MachineFlags, asked_language, tokenizer_of
from attent.decode import Search, Translator
from attent.look import ablate as ablations
from attent.look import properties as habits
from attent.look.html import live_policy, page
from attent.look.reading import Filter, LookError, Question, Reading
from attent.look.silence import Part, found
from attent.look.view import Looker
from attent.models import Seq2Seq
from attent.train.events import Validated
from attent.train.log import NAME as LOG
from attent.train.log import read as read_log

if TYPE_CHECKING:
    from attent.look.ablate import Ablation
    from attent.serve.question import Question as Asked

Known = TypeVar("Known")

PAGE, POSITIONS = Path("look.html"), Path("positions.html")
PATIENCE = 300.0  # seconds that an answer of the live page may take: a long text takes minutes
WIDTH = 100  # of a picture where there is no terminal


def start(folder: Path, sentence: str | None, flags: Flags) -> int:
    looking = Looking.of(folder, sentence, flags)
    if flags.positions:
        return looking.at_positions()
    if sentence is None:
        return looking.live()
    return looking.at(sentence)


def ablate(folder: Path, flags: Flags) -> int:
    """Which heads matter; `--png` and `--svg` draw it."""
    from attent.cli.ablating import run_ablation

    if flags.png or flags.svg:
        import matplotlib  # noqa: F401 - a missing package is told now, not after minutes of work

    def draw(ablation: Ablation) -> None:
        from attent.look.plots import ablation_figure

        write_figures(flags, lambda: ablation_figure(ablation.document()))

    return run_ablation(
        folder,
        flags.data,
        src=flags.src,
        tgt=flags.tgt,
        to=flags.to,
        what=flags.parts,
        limit=flags.limit,
        prune_to=flags.prune,
        within=flags.within,
        search=Search(beam_size=flags.beam_size),
        machine=MachineFlags(device=flags.device, dtype=flags.dtype, threads=flags.threads),
        then=draw if flags.png or flags.svg else None,
    )


@dataclass(frozen=True, kw_only=True)
class Looking:
    """A model that is looked at."""

    folder: Path
    looker: Reading[Any]
    flags: Flags
    to: str | None

    @classmethod
    def of(cls, folder: Path, sentence: str | None, flags: Flags) -> Looking:
        model = read_model(folder, flags)
        check_flags(model, folder, sentence, flags)
        if not isinstance(model, Seq2Seq):
            return cls(folder=folder, looker=reading_of(model, folder), flags=flags, to=None)
        translator = Translator(
            model, tokenizer_of(folder.expanduser()), folder=folder.expanduser(), threads=flags.threads, say=tell
        )
        root = folder.expanduser()
        tags = translator.tokenizer.source.tags
        free = flags.positions or (sentence is None and not (flags.to or flags.data))  # the live page lets one choose
        to = None if free else asked_language(flags.to or (flags.tgt if flags.tgt in tags else None), tags, folder)
        known = measured(root, translator, flags, to) or recalled(habits.remembered, root, model)
        effects = recalled(ablations.remembered, root, model)
        looker = Looker(
            translator,
            name=root.resolve().name,
            languages=languages_of(root),
            properties=None if known is None else known.document(),
            ablation=None if effects is None else effects.document(),
        )
        return cls(folder=folder, looker=looker, flags=flags, to=to)

    def at(self, sentence: str) -> int:
        """One sentence, in every form that was asked for; in a page if none was."""
        flags = self.flags
        document = self.looker.look(self.question(sentence), Filter(kind=flags.kind, layers=flags.layers or None))
        if flags.json:
            write_json(document, flags.json)
        if flags.png or flags.svg:
            from attent.look.plots import heads_figure

            kind, heads = self.drawn(document)
            shown = when_read(document, document["layers"][0]["path"], heads[0]) if self.is_one(document) else document
            write_figures(flags, lambda: heads_figure(shown, kind=kind, heads=heads or None))
        if flags.terminal:
            print(self.in_terminal(document))
        if flags.out or not (flags.json or flags.png or flags.svg or flags.terminal):
            self.write_page(document, PAGE)
        return 0

    def at_positions(self) -> int:
        """How the model tells places apart."""
        document = self.looker.empty(f"Positions of {self.looker.name}")
        if self.flags.png or self.flags.svg:
            from attent.look.plots import positions_figure

            write_figures(self.flags, lambda: positions_figure(self.looker.model))
        if self.flags.json:
            write_json(document, self.flags.json)
        if self.flags.out or not (self.flags.json or self.flags.png or self.flags.svg):
            self.write_page(document, POSITIONS)
        return 0

    def live(self) -> int:
        """The page with a box to type in, until Ctrl-C."""
        from attent.serve.app import make_app
        from attent.serve.limits import Limits
        from attent.serve.run import serve

        examples = examples_of(self.folder.expanduser())
        languages: list[str] = []
        if isinstance(self.looker, Looker) and not self.to:
            languages = list(self.looker.translator.tokenizer.source.tags)
        document = self.looker.empty("") | {"live": True, "examples": examples, "languages": languages}
        about = {"name": self.looker.name, "summary": document["model"]["summary"]}

        def answer(asked: Asked, stop: Callable[[], bool]) -> dict[str, Any]:
            parts = tuple(map(Part.parse, asked.silence))
            for part in parts:
                found(self.looker.model, part)
            question = Question(
                text=asked.text,
                to=asked.to or self.to,
                search=Search(beam_size=asked.beam_size or self.flags.beam_size),
                prefix=asked.prefix,
                silence=parts,
            )
            return self.looker.look(question, stop=stop) | {"live": True}

        limits = Limits(answer_seconds=PATIENCE)
        app = make_app(page=page(document), look=answer, csp=live_policy(), about=about, limits=limits)
        serve(app, port=self.flags.port or None, ready=self.at_work)
        return 0

    def at_work(self, url: str) -> None:
        print(url, flush=True)
        print(f"open it in a browser to look at {self.looker.name}; Ctrl-C ends it", file=sys.stderr, flush=True)
        if self.flags.open:
            open_in_browser(url)

    # --- parts -------------------------------------------------------------------------------------------------------

    def question(self, sentence: str) -> Question:
        flags = self.flags
        return Question(
            text=sentence,
            pair=flags.pair,
            to=self.to,
            target=flags.target,
            search=Search(beam_size=flags.beam_size),
            silence=tuple(map(Part.parse, flags.silence)),
        )

    def is_one(self, document: dict[str, Any]) -> bool:
        """Is one head alone asked for?"""
        return len(document["layers"]) == 1 == len(self.flags.heads)

    def drawn(self, document: dict[str, Any]) -> tuple[Any, list[int]]:
        """What a picture shows: what was asked for; if nothing was, how the translation looks at the source."""
        flags = self.flags
        whole = not (flags.kind or flags.layers or flags.heads)
        crosses = any(layer["kind"] == "cross" for layer in document["layers"])
        return ("cross" if whole and crosses else flags.kind), list(flags.heads)

    def in_terminal(self, document: dict[str, Any]) -> str:
        from attent.look.terminal import harmless, picture, summary

        path, head = self.best(document)
        document = when_read(document, path, head)
        width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
        heads = document["properties"]["heads"]
        said = next((one["says"] for one in heads if (one["path"], one["head"]) == (path, head)), "")
        title = f"{path}, head {head}: {said}".rstrip(": ")
        if self.flags.silence:
            title = f"silenced: {', '.join(self.flags.silence)}\n\n{title}"
        return "\n".join(
            [
                "\n".join(map(harmless, said_of(document))) + "\n",
                f"{title}\n",
                picture(document, path=path, head=head, width=width),
                "",
                summary(document),
            ]
        )

    def best(self, document: dict[str, Any]) -> tuple[str, int]:
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
            raise LookError(
                "there must be a head to draw, but there is none of those that are asked for; ask for others"
            )
        best = max(heads, key=worth)
        return best["path"], best["head"]

    def write_page(self, document: dict[str, Any], usual: Path) -> None:
        path = (self.flags.out or usual).expanduser()
        settings.write_aside(path, page(document).encode())
        print(path, file=sys.stderr if self.flags.json == "-" else sys.stdout)
        if not (self.flags.open and open_in_browser(path.resolve().as_uri())):
            tell(f"open {path} in a browser")


def said_of(document: dict[str, Any]) -> list[str]:
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


def when_read(document: dict[str, Any], path: str, head: int) -> dict[str, Any]:
    """A head that looks at a word when its translation has just been read is shown by what was read."""
    heads = document["properties"]["heads"]
    values: dict[str, float | None] = next(
        (one["values"] for one in heads if (one["path"], one["head"]) == (path, head)), {}
    )
    if (values.get("read") or 0.0) <= (values.get("written") or 0.0):
        return document
    layers = [layer | {"queries": "read"} if layer["path"] == path else layer for layer in document["layers"]]
    return document | {"layers": layers}


def measured(root: Path, translator: Translator, flags: Flags, to: str | None) -> habits.Properties | None:
    """What each head does in the pairs of `--data`; the folder remembers it."""
    if not flags.data:
        return None
    from attent.cli.scoring import read_texts
    from attent.data.pairs import Languages
    from attent.models.folder import FolderError, explained

    texts = read_texts(flags.data, Languages(flags.src, flags.tgt))
    pairs = [pair for pair in zip(texts.sources, texts.references, strict=True) if all(pair)][: flags.limit]
    assert isinstance(translator.model, Seq2Seq)
    sources, references = [source for source, _ in pairs], [reference for _, reference in pairs]
    tell(f"measuring what each head does, on {len(pairs):,} pairs ...")
    names = ", ".join(Path(name).name for name in texts.name.split(", "))
    known = habits.measure(translator.model, translator.tokenizer, sources, references, to=to, of=names)
    before = recalled(habits.remembered, root, translator.model)
    if before is not None and before.sentences > known.sentences:
        tell(f"{habits.NAME} stays as it is: it is of {before.sentences:,} sentences")
        return known
    try:
        with explained(root, "what its heads do"):
            habits.remember(root, known)
    except FolderError as error:  # the page is worth more than the memory of it
        print(f"warning: {error}", file=sys.stderr)
    return known


def languages_of(root: Path) -> tuple[str | None, str | None]:
    """As the run says, where there is one."""
    path = root / "run.toml"
    if not path.exists():
        return None, None
    data: dict[str, Any] = settings.read_tables(path).get("data", {})
    return data.get("src"), data.get("tgt")


def recalled(remembered: Callable[[Path, Seq2Seq], Known | None], root: Path, model: Seq2Seq) -> Known | None:
    """What the folder remembers; it can be measured again, so that a damaged file stops nobody."""
    try:
        return remembered(root, model)
    except settings.SettingsError as error:
        print(f"warning: {error}; it is left out", file=sys.stderr)
        return None


def examples_of(root: Path) -> list[str]:
    """Sentences that training showed last, to begin with."""
    validated = [event for event in read_log(root / LOG) if isinstance(event, Validated)]
    return [sample.source for sample in validated[-1].samples] if validated else []


def write_figures(flags: Flags, make: Callable[[], Any]) -> None:
    from attent.look.plots import save

    figure = make()
    for path in (flags.png, flags.svg):
        if path is not None:
            save(figure, path.expanduser())
            print(path, file=sys.stderr if flags.json == "-" else sys.stdout)


def write_json(document: dict[str, Any], where: str) -> None:
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    content = f"{text}\n".encode()
    if where == "-":
        sys.stdout.buffer.write(content)
    else:
        settings.write_aside(Path(where).expanduser(), content)
        print(where)


def open_in_browser(url: str) -> bool:
    """Only where a person sees it: not from a script, nor where there is no screen."""
    seen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return bool(seen) and sys.stderr.isatty() and webbrowser.open(url)


def tell(text: str) -> None:
    """To a person who waits."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
