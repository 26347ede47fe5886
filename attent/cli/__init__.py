"""The `attent` command: dispatches to one module per command and turns errors into one-line messages.

Commands are imported only when they run, so that `attent --help` does not import torch. Exit codes: 0 done, 1 failed, 2
usage error, 130 Ctrl-C. A command returns None or an exit code.
"""

import errno
import os
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from cyclopts import App, CycloptsError, UnknownCommandError, UnusedCliTokensError

from attent import __version__

# name -> help; the command is the function `name` in the module `attent.cli.name`, imported when it runs.
COMMANDS: dict[str, str] = {
    "average": "Average the weights of several models, or of a run's checkpoints.",
    "caption": "Describe images in words.",
    "classify": "Classify texts or images.",
    "compare": "Train several models on the same data, and write a report.",
    "convert": "Convert a model folder to Hugging Face, CTranslate2 or attent format.",
    "data": "Report on a corpus before training: sizes, problems, test set overlap.",
    "demo": "Train a small model in minutes, translate with it and draw its attention.",
    "distil": "Train a small, fast model on the translations of a large one.",
    "doctor": "Check this machine and the installation.",
    "embed": "Embed texts as vectors.",
    "fill": 'Predict masked words: fill MODEL "The [MASK] sat".',
    "generate": "Continue a text with a language model.",
    "info": "Describe a model folder and its training.",
    "look": "Show the attention of every head on a sentence; measure which heads matter.",
    "models": "List published translation models for a language pair, with sizes and licences.",
    "score": "Score translations: BLEU, chrF, TER, with confidence intervals.",
    "serve": "Serve models over HTTP: a page and APIs.",
    "train": "Train a model; run the same command again to resume.",
    "transcribe": "Transcribe recordings: text, SRT or WebVTT subtitles, JSON.",
    "translate": "Translate text line by line, or documents with their markup: HTML, DOCX, PO, XLIFF, ...",
}
# `-` as an argument is standard input.
STDIN_COMMANDS = ("translate", "transcribe", "generate", "fill", "classify", "embed")
OUTPUT_OPTIONS = ("--output", "-o")  # `-` as the value is standard output
ROOT_OPTIONS = ("--help", "--version")

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 0, 1, 2, 130, 141


def make_app() -> App:
    app = App(
        name="attent",
        help="Train translation models and other Transformers, inspect and score them.",
        version=__version__,
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    for name, help_text in COMMANDS.items():
        app.command(f"attent.cli.{name}:{name}", name=name, help=help_text)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    if _replace_closed_streams():
        return _print_error("standard output is closed; redirect it to a file, or to /dev/null", EXIT_FAILED)
    try:
        result = make_app()(_rewrite_stdin_args(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # here, where a closed pipe is still handled
        return result if isinstance(result, int) else EXIT_OK
    except CycloptsError as error:
        help_command = " ".join(["attent", *(error.command_chain or ()), "--help"])
        return _print_error(f"{format_usage_error(error)} (see: {help_command})", EXIT_USAGE)
    except KeyboardInterrupt:
        return _print_error("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader (`| head`) has closed it: write the rest to the null device, so that shutdown is silent.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich has handled it, and exits with 1
            return EXIT_BROKEN_PIPE
        raise
    except Exception as error:
        message = format_failure(error)
        if message is None or os.environ.get("ATTENT_TRACEBACK") == "1":
            raise
        return _print_error(message, EXIT_FAILED)


def _replace_closed_streams() -> bool:
    """Open the null device for closed standard streams, and return whether stdout was closed.

    Otherwise, the next file that is opened would take their numbers, and messages would be written into it. The null
    device is opened for writing only, so that reading from a closed stdin is an error.
    """
    is_stdout_closed = sys.stdout is None
    if None in (sys.stdin, sys.stdout, sys.stderr):
        while os.open(os.devnull, os.O_WRONLY) < 2:
            pass
        sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - open until the process ends
        sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    return is_stdout_closed


def _rewrite_stdin_args(args: Iterable[str]) -> list[str]:
    """Rewrite `-` for cyclopts, which takes that of `--data -` for an option: as `--data=-`, or as the path `./-`."""
    rewritten: list[str] = []
    option = 0
    for arg in args:
        option = len(rewritten) if arg.startswith("--") else option
        if arg == "-" and rewritten[option : option + 1] == ["--data"]:
            rewritten[option] = "--data=-"
        elif arg == "-" and rewritten[-1:] and rewritten[-1] in OUTPUT_OPTIONS:
            rewritten[-1] = "--output=-"
        elif arg == "-" and rewritten[:1] and rewritten[0] in STDIN_COMMANDS and "--" not in rewritten:
            rewritten.append("./-")
        else:
            rewritten.append(arg)
    return rewritten


def format_usage_error(error: CycloptsError) -> str:
    """Describe a usage error, with the nearest valid name if there is one."""
    unused = error.unused_tokens[0] if error.unused_tokens else ""
    if isinstance(error, UnknownCommandError):
        # Handled here, because cyclopts would import every command.
        kind, known = ("option", ROOT_OPTIONS) if unused.startswith("-") else ("command", tuple(COMMANDS))
        nearest = get_close_matches(unused, known, cutoff=0.5)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"known are: {', '.join(known)}"
        return f"unknown {kind} `{unused}`: {hint}"
    if isinstance(error, UnusedCliTokensError):
        hint = "; put a sentence in quotes" if {"look", "generate"} & set(error.command_chain or ()) else ""
        return f"unexpected argument `{unused}`{hint}"
    message = " ".join(str(error).split())
    return message if message.endswith("...") else message.removesuffix(".")


def format_failure(error: BaseException) -> str | None:
    """Return one sentence for an error of the user or the machine; None for a bug."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            from attent.cli.doctor import install_command

            if command := install_command(cause.name.partition(".")[0]):
                return f"this needs the package `{cause.name}`, which is not installed: {command}"
        cause = cause.__cause__
    if isinstance(error, OSError) and error.errno == errno.EBADF and error.filename is None:
        return "standard input is closed; redirect it from a file, or from /dev/null"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return (str(error) or type(error).__name__) if isinstance(error, (ValueError, OSError)) else None


def _print_error(message: str, code: int) -> int:
    sys.stdout.flush()
    print(f"attent: {'' if code == EXIT_INTERRUPTED else 'error: '}{message}", file=sys.stderr)
    return code
