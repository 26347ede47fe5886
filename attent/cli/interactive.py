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

from attent.cli.output import links_of, one_line, rounded
from attent.cli.reading import Line
from attent.cli.searching import asked_language
from attent.decode.translator import LONG, with_terms

if TYPE_CHECKING:
    from attent.cli.translating import Desk

PROMPT = "> "
MORE = 5  # translations, or ways to go on, unless told otherwise
WELCOME = "Type a sentence to translate it, :help for more, :quit or Ctrl-D to leave."


class Leave(Exception):
    """The talk is over."""


@dataclass(frozen=True)
class Command:
    """What stands behind a colon."""

    form: str
    help: str
    run: Callable[[Talk, str], None]


class Talk:
    """What was said so far, and how to go on."""

    def __init__(self, desk: Desk, out: TextIO) -> None:
        self.desk, self.out = desk, out
        self.to = desk.to
        self.prefix, self.must, self.must_not = desk.flags.prefix, desk.flags.must, desk.flags.must_not
        self.source = self.text = ""  # the last sentence, and its translation

    def answer(self, typed: str) -> None:
        """To a line: a command, a sentence, or nothing."""
        typed = typed.strip()
        if typed.startswith(":"):
            name, _, rest = typed[1:].partition(" ")
            self.command(name, rest.strip())
        elif typed:
            self.source, self.text = typed, ""
            for piece in self.pieces(typed):
                self.out.write(piece)
                self.out.flush()
                self.text += piece
            self.say("")

    def command(self, name: str, rest: str) -> None:
        if name not in COMMANDS:
            near = get_close_matches(name, COMMANDS, n=1)
            self.say(f":{name} is no command; {f'did you mean :{near[0]}?' if near else 'see :help'}")
            return
        try:
            COMMANDS[name].run(self, rest)
        except ValueError as error:
            self.say(str(error))

    def say(self, line: str) -> None:
        self.out.write(f"{line}\n")
        self.out.flush()

    # --- translating -------------------------------------------------------------------------------------------------

    def pieces(self, text: str) -> Iterator[str]:
        """The translation as it becomes certain; as a whole, where that is known only at the end."""
        desk = self.desk
        tokens = len(desk.translator.tokenizer.source.encode([text])[0])
        if desk.flags.risk or desk.search.sampling or desk.flags.sentences or tokens >= LONG // 2:
            yield one_line(self.asked().translate([self.line])[0].text)
            return
        control = with_terms(self.asked().control_of(self.line), text, desk.glossary)
        for piece in desk.translator.stream(text, replace(desk.search, n_best=1), to=self.to, control=control):
            yield one_line(piece)

    @property
    def line(self) -> Line:
        return Line(text=self.source)

    def asked(self, *, n_best: int = 1, alignment: bool = False) -> Desk:
        """The desk with what was said in this talk."""
        search = self.desk.search
        beam = max(search.beam_size, -(-n_best // search.groups) * search.groups)
        flags = replace(
            self.desk.flags,
            prefix=self.prefix,
            must=self.must,
            must_not=self.must_not,
            alignment="hard" if alignment else None,
            risk=max(self.desk.flags.risk, n_best) if self.desk.flags.risk else 0,
        )
        return replace(self.desk, search=replace(search, n_best=n_best, beam_size=beam), flags=flags, to=self.to)

    # --- commands ----------------------------------------------------------------------------------------------------

    def n_best(self, rest: str) -> None:
        """The n best of the last sentence."""
        count = whole(rest or str(MORE), "the number of translations")
        for one in self.asked(n_best=count).translate([self.last()])[0].n_best:
            self.say(f"{rounded(one.score):>9}  {one_line(one.text)}")

    def alternatives(self, rest: str) -> None:
        """How the last translation could go on from one of its words."""
        self.last()
        words = self.text.split()
        place = whole(rest or "1", "the word")
        if place > len(words) + 1:
            raise ValueError(f"the word must be one of the {len(words)} of the translation, but is {place}")
        prefix = " ".join(words[: place - 1])
        search = replace(self.desk.search, n_best=1, sampling=None)
        wishes = self.asked().control_of(self.line)
        control = replace(wishes, prefix=prefix and f"{prefix} ")
        for one in self.desk.translator.alternatives(self.source, control, MORE, search, to=self.to):
            self.say(f"{rounded(one.score):>9}  {one_line(one.text)}")

    def align(self, rest: str) -> None:
        """Which word of the last translation comes from which."""
        (found,) = self.asked(alignment=True).translate([self.last()])
        sources, targets = found.source.split(), found.text.split()
        width = max(map(len, targets), default=0)
        for number, word in enumerate(targets):
            self.say(f"{word:<{width}}  {' '.join(sources[a] for a, b in links_of(found) if b == number)}".rstrip())

    def set_must(self, rest: str) -> None:
        self.must = (*self.must, rest) if rest else ()
        self.say(f"must come: {', '.join(self.must) or 'nothing'}")

    def set_must_not(self, rest: str) -> None:
        self.must_not = (*self.must_not, rest) if rest else ()
        self.say(f"must not come: {', '.join(self.must_not) or 'nothing'}")

    def set_prefix(self, rest: str) -> None:
        self.prefix = f"{rest} " if rest else ""
        self.say(f"begins with: {rest or 'anything'}")

    def set_language(self, rest: str) -> None:
        translator = self.desk.translator
        self.to = asked_language(rest or None, translator.tokenizer.source.tags, translator.folder or Path("ensemble"))
        self.say(f"into {self.to}")

    def help(self, rest: str) -> None:
        width = max(len(one.form) for one in COMMANDS.values())
        for one in COMMANDS.values():
            self.say(f"{one.form:<{width}}  {one.help}")

    def quit(self, rest: str) -> None:
        raise Leave

    def last(self) -> Line:
        if not self.source:
            raise ValueError("there is no sentence yet: type one")
        return self.line


COMMANDS = {
    "n": Command(":n 5", "the five best translations of the last sentence", Talk.n_best),
    "alt": Command(":alt 3", "other ways to go on from the third word of its translation", Talk.alternatives),
    "align": Command(":align", "which word of it comes from which", Talk.align),
    "must": Command(":must WORD", "a word that must come from now on; without a word: none must", Talk.set_must),
    "not": Command(":not WORD", "a word that must not; without a word: all may", Talk.set_must_not),
    "begin": Command(":begin WORDS", "what translations begin with; without words: anything", Talk.set_prefix),
    "to": Command(":to LANGUAGE", "the language to translate into, for a model of several", Talk.set_language),
    "help": Command(":help", "this", Talk.help),
    "quit": Command(":quit", "leave; so does Ctrl-D", Talk.quit),
}


def whole(text: str, what: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise ValueError(f"{what} must be a number from 1 to 1,000, but is `{text}`")
    return int(text)


def talk(desk: Desk, read: Callable[[str], str] = input, out: TextIO | None = None) -> None:
    """Until it is left. Ctrl-C ends the translation that is being written, or the line that is being typed."""
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` takes it for lines that can be edited, and those of before
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    said = Talk(desk, out or sys.stdout)
    print(WELCOME, file=sys.stderr, flush=True)
    with suppress(Leave):
        while True:
            try:
                typed = read(PROMPT)
            except EOFError:
                said.say("")
                return
            except KeyboardInterrupt:
                said.say("")
                continue
            try:
                said.answer(typed)
            except KeyboardInterrupt:
                said.say(" ...")
            except ValueError as error:
                said.say(str(error))
