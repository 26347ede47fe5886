"""A talk with a translator at a terminal: a line is translated as it becomes certain, and then asked about.

The search is `attent.decode`'s; here are the prompt, the few commands that begin with a colon, and what they print.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from attent.cli.search_flags import resolve_target_lang
from attent.decoding.input_lines import InputLine
from attent.decoding.output_format import format_score, get_links, replace_line_breaks
from attent.decoding.translator import MAX_UNSPLIT_TOKENS, add_glossary_terms

if TYPE_CHECKING:
    from attent.decoding.pipeline import TranslationPipeline

PROMPT = "> "
DEFAULT_COUNT = 5  # translations, or ways to go on, unless told otherwise
WELCOME = "Type a sentence to translate it, :help for more, :quit or Ctrl-D to leave."


class SessionEnd(Exception):
    """The talk is over."""


@dataclass(frozen=True)
class SessionCommand:
    """What stands behind a colon."""

    usage: str
    help: str
    run: Callable[[InteractiveSession, str], None]


class InteractiveSession:
    """What was said so far, and how to go on."""

    def __init__(self, pipeline: TranslationPipeline, out: TextIO) -> None:
        self.pipeline, self.out = pipeline, out
        self.to = pipeline.to
        self.prefix, self.required, self.banned = pipeline.flags.prefix, pipeline.flags.require, pipeline.flags.ban
        self.source = self.text = ""  # the last sentence, and its translation

    def handle_input(self, typed: str) -> None:
        """To a line: a command, a sentence, or nothing."""
        typed = typed.strip()
        if typed.startswith(":"):
            name, _, rest = typed[1:].partition(" ")
            self.run_command(name, rest.strip())
        elif typed:
            self.source, self.text = typed, ""
            for piece in self.stream_translation(typed):
                self.out.write(piece)
                self.out.flush()
                self.text += piece
            self.print_line("")

    def run_command(self, name: str, argument: str) -> None:
        if name not in COMMANDS:
            near = get_close_matches(name, COMMANDS, n=1)
            self.print_line(f":{name} is no command; {f'did you mean :{near[0]}?' if near else 'see :help'}")
            return
        try:
            COMMANDS[name].run(self, argument)
        except ValueError as error:
            self.print_line(str(error))

    def print_line(self, line: str) -> None:
        self.out.write(f"{line}\n")
        self.out.flush()

    # --- translating -------------------------------------------------------------------------------------------------

    def stream_translation(self, text: str) -> Iterator[str]:
        """The translation as it becomes certain; as a whole, where that is known only at the end."""
        desk = self.pipeline
        tokens = len(desk.translator.tokenizer.source.encode([text])[0])
        if (
            desk.flags.mbr_candidates
            or desk.options.sampling
            or desk.flags.split_sentences
            or tokens >= MAX_UNSPLIT_TOKENS // 2
        ):
            yield replace_line_breaks(self.configure_pipeline().translate([self.source_line])[0].text)
            return
        control = add_glossary_terms(
            self.configure_pipeline().build_line_constraints(self.source_line), text, desk.glossary
        )
        for piece in desk.translator.stream(text, replace(desk.options, n_best=1), to=self.to, constraints=control):
            yield replace_line_breaks(piece)

    @property
    def source_line(self) -> InputLine:
        return InputLine(text=self.source)

    def configure_pipeline(self, *, n_best: int = 1, alignment: bool = False) -> TranslationPipeline:
        """The desk with what was said in this talk."""
        search = self.pipeline.options
        beam = max(search.beam_size, -(-n_best // search.beam_groups) * search.beam_groups)
        flags = replace(
            self.pipeline.flags,
            prefix=self.prefix,
            require=self.required,
            ban=self.banned,
            alignment="hard" if alignment else None,
            mbr_candidates=max(self.pipeline.flags.mbr_candidates, n_best) if self.pipeline.flags.mbr_candidates else 0,
        )
        return replace(self.pipeline, options=replace(search, n_best=n_best, beam_size=beam), flags=flags, to=self.to)

    # --- commands ----------------------------------------------------------------------------------------------------

    def print_n_best(self, argument: str) -> None:
        """The n best of the last sentence."""
        count = parse_count(argument or str(DEFAULT_COUNT), "the number of translations")
        for one in self.configure_pipeline(n_best=count).translate([self.get_source_line()])[0].n_best:
            self.print_line(f"{format_score(one.score):>9}  {replace_line_breaks(one.text)}")

    def print_continuations(self, argument: str) -> None:
        """How the last translation could go on from one of its words."""
        self.get_source_line()
        words = self.text.split()
        place = parse_count(argument or "1", "the word")
        if place > len(words) + 1:
            raise ValueError(f"the word must be one of the {len(words)} of the translation, but is {place}")
        prefix = " ".join(words[: place - 1])
        search = replace(self.pipeline.options, n_best=1, sampling=None)
        wishes = self.configure_pipeline().build_line_constraints(self.source_line)
        control = replace(wishes, prefix=prefix and f"{prefix} ")
        for one in self.pipeline.translator.suggest_continuations(
            self.source, control, DEFAULT_COUNT, search, to=self.to
        ):
            self.print_line(f"{format_score(one.score):>9}  {replace_line_breaks(one.text)}")

    def print_alignment(self, argument: str) -> None:
        """Which word of the last translation comes from which."""
        (found,) = self.configure_pipeline(alignment=True).translate([self.get_source_line()])
        sources, targets = found.source.split(), found.text.split()
        width = max(map(len, targets), default=0)
        for number, word in enumerate(targets):
            self.print_line(
                f"{word:<{width}}  {' '.join(sources[a] for a, b in get_links(found) if b == number)}".rstrip()
            )

    def add_required(self, argument: str) -> None:
        self.required = (*self.required, argument) if argument else ()
        self.print_line(f"must come: {', '.join(self.required) or 'nothing'}")

    def add_banned(self, argument: str) -> None:
        self.banned = (*self.banned, argument) if argument else ()
        self.print_line(f"must not come: {', '.join(self.banned) or 'nothing'}")

    def set_prefix(self, argument: str) -> None:
        self.prefix = f"{argument} " if argument else ""
        self.print_line(f"begins with: {argument or 'anything'}")

    def set_language(self, argument: str) -> None:
        translator = self.pipeline.translator
        self.to = resolve_target_lang(
            argument or None, translator.tokenizer.source.tags, translator.folder or Path("ensemble")
        )
        self.print_line(f"into {self.to}")

    def print_help(self, argument: str) -> None:
        width = max(len(one.usage) for one in COMMANDS.values())
        for one in COMMANDS.values():
            self.print_line(f"{one.usage:<{width}}  {one.help}")

    def end_session(self, argument: str) -> None:
        raise SessionEnd

    def get_source_line(self) -> InputLine:
        if not self.source:
            raise ValueError("there is no sentence yet: type one")
        return self.source_line


COMMANDS = {
    "n": SessionCommand(":n 5", "the five best translations of the last sentence", InteractiveSession.print_n_best),
    "alt": SessionCommand(
        ":alt 3", "other ways to go on from the third word of its translation", InteractiveSession.print_continuations
    ),
    "align": SessionCommand(":align", "which word of it comes from which", InteractiveSession.print_alignment),
    "must": SessionCommand(
        ":must WORD", "a word that must come from now on; without a word: none must", InteractiveSession.add_required
    ),
    "not": SessionCommand(":not WORD", "a word that must not; without a word: all may", InteractiveSession.add_banned),
    "begin": SessionCommand(
        ":begin WORDS", "what translations begin with; without words: anything", InteractiveSession.set_prefix
    ),
    "to": SessionCommand(
        ":to LANGUAGE", "the language to translate into, for a model of several", InteractiveSession.set_language
    ),
    "help": SessionCommand(":help", "this", InteractiveSession.print_help),
    "quit": SessionCommand(":quit", "leave; so does Ctrl-D", InteractiveSession.end_session),
}


def parse_count(text: str, name: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise ValueError(f"{name} must be a number from 1 to 1,000, but is `{text}`")
    return int(text)


def run_session(
    pipeline: TranslationPipeline, read_line: Callable[[str], str] = input, out: TextIO | None = None
) -> None:
    """Until it is left. Ctrl-C ends the translation that is being written, or the line that is being typed."""
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` takes it for lines that can be edited, and those of before
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    said = InteractiveSession(pipeline, out or sys.stdout)
    print(WELCOME, file=sys.stderr, flush=True)
    with suppress(SessionEnd):
        while True:
            try:
                typed = read_line(PROMPT)
            except EOFError:
                said.print_line("")
                return
            except KeyboardInterrupt:
                said.print_line("")
                continue
            try:
                said.handle_input(typed)
            except KeyboardInterrupt:
                said.print_line(" ...")
            except ValueError as error:
                said.print_line(str(error))
