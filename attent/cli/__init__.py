"""The `attent` command: finds what was asked for, runs it, and turns what went wrong into a sentence.

Each command lives in its own module of this package and is imported only when it runs, so that
`attent --help` never waits for torch. The work itself is left to the packages that a command imports.

Results go to stdout, messages to stderr. Exit codes: 0 done, 1 failed, 2 the command was wrong, 130 Ctrl-C.
A command is a plain function that returns nothing, or its exit code.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

from cyclopts import App, CycloptsError, UnknownCommandError, UnusedCliTokensError

from attent import __version__

# name -> (where it lives, what --help says). The help text stands here so that listing imports no command.
COMMANDS: dict[str, tuple[str, str]] = {
    "average": ("attent.cli.average:average", "The mean of the weights of several models, or of a run's checkpoints."),
    "classify": ("attent.cli.classify:classify", "Which label a text or an image gets, and how sure the model is."),
    "convert": ("attent.cli.convert:convert", "A model folder as one of Hugging Face's, CTranslate2's or ours."),
    "data": ("attent.cli.data:data", "What is in a corpus, what is wrong with it, and how long training would take."),
    "demo": ("attent.cli.demo:demo", "Train a small model in minutes, and see what it has learned and looks at."),
    "doctor": ("attent.cli.doctor:doctor", "Say whether this machine is ready, and what is installed."),
    "embed": ("attent.cli.embed:embed", "Texts as vectors, to compare and to search with."),
    "fill": ("attent.cli.fill:fill", 'Which word stands behind a mask: fill MODEL "The [MASK] sat".'),
    "generate": ("attent.cli.generate:generate", "Go on with a text, word by word, as it is written."),
    "info": ("attent.cli.info:info", "What a model folder holds, and how its training went."),
    "look": ("attent.cli.look:look", "See every head at work on a sentence, in a page; which heads matter."),
    "score": ("attent.cli.score:score", "How good translations are: BLEU, chrF, TER, with confidence intervals."),
    "train": ("attent.cli.train:train", "From text to a translator or another model; run again, it goes on."),
    "translate": (
        "attent.cli.translate:translate",
        "Translate text, one line in, one line out, or fill files of translators.",
    ),
}
STDIN_COMMANDS = ("translate", "generate", "fill", "classify", "embed")  # - as an argument: standard input
OUTPUT_OPTIONS = ("--output", "-o")  # or - instead of its name
ROOT_OPTIONS = ("--help", "--version")

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 0, 1, 2, 130, 141


def make_app() -> App:
    """The command line as cyclopts sees it; nothing is printed or exited by cyclopts itself, except help."""
    app = App(
        name="attent",
        help="Train a translator from parallel text, or another Transformer; look inside it, trust it.",
        version=__version__,
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    for name, (path, help_text) in COMMANDS.items():
        app.command(path, name=name, help=help_text)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: what the shell gave) and return the exit code."""
    try:
        result = make_app()(_rewrite_stdin_args(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # here, where a closed pipe is still ours to handle
        return result if isinstance(result, int) else EXIT_OK
    except CycloptsError as error:
        return _print_error(f"{format_usage_error(error)} (see: {_format_help_command(error)})", EXIT_USAGE)
    except KeyboardInterrupt:
        return _print_error("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        _discard_stdout()
        return EXIT_BROKEN_PIPE
    except Exception as error:
        message = format_failure(error)
        if message is None or os.environ.get("ATTENT_TRACEBACK") == "1":
            raise
        return _print_error(message, EXIT_FAILED)


def _rewrite_stdin_args(args: Iterable[str]) -> list[str]:
    """A `-` as cyclopts understands it: it takes that of `--data -` for an option, and that of `--data=-` for a value.

    One that follows no such option is the argument itself, which is told by a path that is the same.
    """
    found: list[str] = []
    option = 0
    for token in args:
        option = len(found) if token.startswith("--") else option
        if token == "-" and found[option : option + 1] == ["--data"]:
            found[option] = "--data=-"
        elif token == "-" and found[-1:] and found[-1] in OUTPUT_OPTIONS:
            found[-1] = "--output=-"
        elif token == "-" and found[:1] and found[0] in STDIN_COMMANDS and "--" not in found:
            found.append("./-")
        else:
            found.append(token)
    return found


def format_usage_error(error: CycloptsError) -> str:
    """What was wrong with the command, with the nearest real name where there is one."""
    given = error.unused_tokens[0] if error.unused_tokens else ""
    if isinstance(error, UnknownCommandError):
        # Answered here, because cyclopts would import every command to answer it.
        is_option = given.startswith("-")
        return _describe_unknown_name(
            "option" if is_option else "command", given, ROOT_OPTIONS if is_option else COMMANDS
        )
    if isinstance(error, UnusedCliTokensError):
        quotes = "; put a sentence in quotes" if {"look", "generate"} & set(error.command_chain or ()) else ""
        return f"unexpected argument `{given}`{quotes}"
    return " ".join(str(error).split()).rstrip(".")


def format_failure(error: BaseException) -> str | None:
    """One clear sentence for a mistake of the person or the machine; None for a mistake of ours, a bug."""
    package = next((e.name for e in _iter_causes(error) if isinstance(e, ModuleNotFoundError) and e.name), None)
    told = None if package is None else _describe_missing_package(package)
    if told is not None:
        return told
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or type(error).__name__}"
    ours = type(error).__module__.partition(".")[0] == "attent"
    if ours or isinstance(error, (ValueError, OSError)):
        return str(error) or type(error).__name__
    return None


def _describe_missing_package(module: str) -> str | None:
    from attent.cli.system_info import install_command

    command = install_command(module.partition(".")[0])
    return f"this needs the package `{module}`, which is not installed: {command}" if command else None


def _describe_unknown_name(kind: str, given: str, known: Iterable[str]) -> str:
    nearest = get_close_matches(given, list(known), n=1, cutoff=0.5)
    hint = f"did you mean `{nearest[0]}`?" if nearest else f"there are: {', '.join(known)}"
    return f"unknown {kind} `{given}`: {hint}"


def _format_help_command(error: CycloptsError) -> str:
    return " ".join(["attent", *(error.command_chain or ()), "--help"])


def _iter_causes(error: BaseException) -> Iterator[BaseException]:
    while error is not None:
        yield error
        if error.__cause__ is None:
            return
        error = error.__cause__


def _print_error(message: str, code: int) -> int:
    sys.stdout.flush()
    print(f"attent: {'' if code == EXIT_INTERRUPTED else 'error: '}{message}", file=sys.stderr)
    return code


def _discard_stdout() -> None:
    """The reader went away (`| head`): the rest goes nowhere, or Python would complain as it shuts down."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
