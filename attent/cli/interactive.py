"""The interactive session of `attent translate`: a sentence is translated as beams agree, then queried by commands."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TextIO

from attent.decoding.loading import resolve_target_lang
from attent.decoding.options import Hypothesis, PhraseConstraints
from attent.decoding.output_format import OutputFormat, format_score, get_links, replace_line_breaks
from attent.decoding.pipeline import TranslationPipeline
from attent.decoding.translator import MAX_UNSPLIT_TOKENS

PROMPT = "> "
DEFAULT_COUNT = 5  # translations or continuations
WELCOME = "Type a sentence to translate it, :help for more, :quit or Ctrl-D to leave."


class SessionEnd(Exception):
    """Raised by :quit."""


@dataclass(frozen=True)
class SessionCommand:
    usage: str
    help: str
    run: Callable[[InteractiveSession, str], None]


class InteractiveSession:
    """The settings of a session, and the last sentence with its translation."""

    def __init__(self, pipeline: TranslationPipeline, out: TextIO) -> None:
        self.pipeline, self.out = pipeline, out
        self.to = pipeline.to
        constraints = pipeline.constraints
        self.prefix, self.required, self.banned = constraints.prefix, constraints.required, constraints.banned
        self.source = self.text = ""

    def handle_input(self, typed: str) -> None:
        typed = typed.strip()
        if typed.startswith(":"):
            name, _, argument = typed[1:].partition(" ")
            self.run_command(name, argument.strip())
        elif typed:
            self.source, self.text = typed, ""
            for piece in self.stream_translation(typed):
                self.out.write(piece)
                self.out.flush()
                self.text += piece
            self.print_line("")
            if problem := self.pipeline.translator.describe_wrong_language([typed]):
                self.print_line(f"({problem})")

    def run_command(self, name: str, argument: str) -> None:
        if name not in COMMANDS:
            near = get_close_matches(name, COMMANDS)
            self.print_line(f"unknown command :{name}; {f'did you mean :{near[0]}?' if near else 'see :help'}")
            return
        try:
            COMMANDS[name].run(self, argument)
        except ValueError as error:
            self.print_line(str(error))

    def print_line(self, line: str) -> None:
        self.out.write(f"{line}\n")
        self.out.flush()

    def stream_translation(self, text: str) -> Iterator[str]:
        """Yield the translation in pieces, or whole where it is known only at the end."""
        pipeline = self.configure_pipeline()
        tokens = len(pipeline.translator.tokenizer.source.encode([text])[0])
        is_long = pipeline.split_sentences or tokens >= MAX_UNSPLIT_TOKENS // 2
        if pipeline.mbr_candidates or pipeline.options.sampling or is_long:
            yield replace_line_breaks(pipeline.translate([text])[0].text)
            return
        terms = pipeline.glossary.find_translations(text) if pipeline.glossary else ()
        constraints = pipeline.constraints.extend(required=terms)
        options = replace(self.pipeline.options, n_best=1)
        for piece in pipeline.translator.stream(text, options, to=self.to, constraints=constraints):
            yield replace_line_breaks(piece)

    def configure_pipeline(self, *, n_best: int = 1, alignment: bool = False) -> TranslationPipeline:
        """Return the pipeline with the settings of this session."""
        pipeline, options = self.pipeline, self.pipeline.options
        beam_size = max(options.beam_size, -(-n_best // options.beam_groups) * options.beam_groups)
        return replace(
            pipeline,
            options=replace(options, n_best=n_best, beam_size=beam_size),
            to=self.to,
            constraints=PhraseConstraints(prefix=self.prefix, required=self.required, banned=self.banned),
            mbr_candidates=max(pipeline.mbr_candidates, n_best) if pipeline.mbr_candidates else 0,
            output_format=OutputFormat(alignment="hard" if alignment else None),
        )

    def print_n_best(self, argument: str) -> None:
        count = parse_count(argument or str(DEFAULT_COUNT), "the number of translations")
        for hypothesis in self.configure_pipeline(n_best=count).translate([self.get_source()])[0].n_best:
            self.print_hypothesis(hypothesis)

    def print_continuations(self, argument: str) -> None:
        self.get_source()
        words = self.text.split()
        number = parse_count(argument or "1", "the word")
        if number > len(words) + 1:
            raise ValueError(f"the word must be one of the {len(words)} of the translation, but is {number}")
        prefix = " ".join(words[: number - 1])
        pipeline = self.configure_pipeline()
        options = replace(self.pipeline.options, n_best=1, sampling=None)
        constraints = replace(pipeline.constraints, prefix=prefix and f"{prefix} ")
        for translation in pipeline.translator.suggest_continuations(
            self.source, constraints, DEFAULT_COUNT, options, to=self.to
        ):
            self.print_hypothesis(translation)

    def print_hypothesis(self, hypothesis: Hypothesis) -> None:
        self.print_line(f"{format_score(hypothesis.score):>9}  {replace_line_breaks(hypothesis.text)}")

    def print_alignment(self, argument: str) -> None:
        (translation,) = self.configure_pipeline(alignment=True).translate([self.get_source()])
        source_words, target_words = translation.source.split(), translation.text.split()
        width = max(map(len, target_words), default=0)
        for i, word in enumerate(target_words):
            aligned = " ".join(source_words[source] for source, target in get_links(translation) if target == i)
            self.print_line(f"{word:<{width}}  {aligned}".rstrip())

    def add_required(self, argument: str) -> None:
        self.required = (*self.required, argument) if argument else ()
        self.print_line(f"required: {', '.join(self.required) or 'nothing'}")

    def add_banned(self, argument: str) -> None:
        self.banned = (*self.banned, argument) if argument else ()
        self.print_line(f"banned: {', '.join(self.banned) or 'nothing'}")

    def set_prefix(self, argument: str) -> None:
        self.prefix = f"{argument} " if argument else ""
        self.print_line(f"prefix: {argument or 'none'}")

    def set_language(self, argument: str) -> None:
        translator = self.pipeline.translator
        tags, folder = translator.tokenizer.source.tags, translator.folder or Path("ensemble")
        self.to = resolve_target_lang(argument or None, tags, folder)
        self.print_line(f"into {self.to}")

    def print_help(self, argument: str) -> None:
        width = max(len(command.usage) for command in COMMANDS.values())
        for command in COMMANDS.values():
            self.print_line(f"{command.usage:<{width}}  {command.help}")

    def end_session(self, argument: str) -> None:
        raise SessionEnd

    def get_source(self) -> str:
        if not self.source:
            raise ValueError("there is no sentence yet: type one")
        return self.source


COMMANDS = {
    "n": SessionCommand(":n 5", "the five best translations of the last sentence", InteractiveSession.print_n_best),
    "alt": SessionCommand(
        ":alt 3", "alternatives from the third word of its translation on", InteractiveSession.print_continuations
    ),
    "align": SessionCommand(":align", "its word alignment", InteractiveSession.print_alignment),
    "require": SessionCommand(
        ":require PHRASE", "require a phrase from now on; without one: none", InteractiveSession.add_required
    ),
    "ban": SessionCommand(":ban PHRASE", "ban a phrase from now on; without one: none", InteractiveSession.add_banned),
    "prefix": SessionCommand(
        ":prefix WORDS", "start translations with these words; without any: no prefix", InteractiveSession.set_prefix
    ),
    "to": SessionCommand(":to LANGUAGE", "target language, for a multilingual model", InteractiveSession.set_language),
    "help": SessionCommand(":help", "this list", InteractiveSession.print_help),
    "quit": SessionCommand(":quit", "leave; so does Ctrl-D", InteractiveSession.end_session),
}


def parse_count(text: str, name: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise ValueError(f"{name} must be a number from 1 to 1,000, but is `{text}`")
    return int(text)


def run_session(
    pipeline: TranslationPipeline, read_line: Callable[[str], str] = input, out: TextIO | None = None
) -> None:
    """Read and handle lines until the session ends. Ctrl-C cancels the current translation or line."""
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` then has line editing and history
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    session = InteractiveSession(pipeline, out or sys.stdout)
    print(WELCOME, file=sys.stderr, flush=True)
    with suppress(SessionEnd):
        while True:
            try:
                typed = read_line(PROMPT)
            except EOFError:
                session.print_line("")
                return
            except KeyboardInterrupt:
                session.print_line("")
                continue
            try:
                session.handle_input(typed)
            except KeyboardInterrupt:
                session.print_line(" ...")
            except ValueError as error:
                session.print_line(str(error))
