"""`attent demo`: train a small model on the built-in corpus `dates`, then show translations and an attention map."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.cells import cell_len
from rich.console import Console

if TYPE_CHECKING:
    from attent.models import Seq2Seq
    from attent.text.tokenizer import Tokenizer

# Of the test set: no training text, in whatever language, means one of these days.
TEST_DATES = (
    ("22 de enero de 1964", "1964-01-22"),
    ("Sa., 13. März 1954", "1954-03-13"),
    ("२७ नवंबर १९६०", "1960-11-27"),
    ("ቅዳሜ 26 ኤፕሪል 1969", "1969-04-26"),
    ("1969年4月26日(土)", "1969-04-26"),
    ("neljapäev, 25. juuni 1903", "1903-06-25"),
    ("1921. 4. 27. (수)", "1921-04-27"),
    ("Thứ Hai, 13 tháng 8, 2057", "2057-08-13"),
    ("20 Δεκεμβρίου 1991", "1991-12-20"),
    ("౧౩ మార్చి, ౧౯౫౪", "1954-03-13"),
)
PLOTTED_INDEX = 1
SHADES = " ░▒▓█"
MAX_OUTPUT_CHARS = 20  # an untrained model does not stop
WELCOME = """[bold]attent demo[/]: train a small Transformer to read dates in 50 languages, from scratch.
Ctrl-C saves and exits; [bold]attent demo[/] resumes.
"""
NEXT_COMMANDS = (
    ("attent translate {out}", "translate dates from the keyboard or a file"),
    ('attent look {out} "Sa., 13. März 1954"', "a page with every attention head; without a date, a live page"),
    ("attent info {out}", "what is in the folder; see also card.md there"),
    ("attent data yours.tsv", "a report on your own corpus"),
    ("attent train --data yours.tsv --src en --tgt de --out runs/en-de", ""),
)


def demo(
    *,
    steps: Annotated[int, Parameter(help="training steps; the default takes about two minutes on one core")] = 800,
    seed: Annotated[int, Parameter(help="random seed")] = 1,
    out: Annotated[Path, Parameter(help="folder for the trained model")] = Path("runs/demo"),
) -> int:
    """Train a small Transformer to read dates, test it on unseen ones, and show its attention."""
    from attent.cli.train import limit_thread_waiting

    limit_thread_waiting()
    from attent.interop import load_as
    from attent.models import Seq2Seq
    from attent.text.tokenizer import Tokenizer
    from attent.training.run import train

    if steps < 1:
        raise ValueError(f"`--steps` must be 1 or more, but is {steps}")
    Console(stderr=True, highlight=False).print(WELCOME)
    result = train(out=out, settings=demo_overrides(steps, seed), force_exit=True)
    if result.exit_code:
        return result.exit_code
    model, tokenizer = load_as(out, Seq2Seq), Tokenizer.load(out)
    test = result.scores[-1]
    print(f"\n{test['metrics']['exact']:.1f}% of {test['num_examples']:,} unseen dates are translated exactly. Some:\n")
    print_translations(model, tokenizer)
    print_attention(model, tokenizer, *TEST_DATES[PLOTTED_INDEX])
    print(f"\nThe model is in {out}. Next:\n")
    width = max(len(command.format(out=out)) for command, purpose in NEXT_COMMANDS if purpose)
    for command, purpose in NEXT_COMMANDS:
        print(f"    {command.format(out=out).ljust(width)}   {purpose}".rstrip())
    return 0


def demo_overrides(steps: int, seed: int) -> dict[str, object]:
    """The settings that learn this task fastest on a CPU: single digits, rotary positions, no dropout."""
    from attent.data.dates import NATIVE_ZEROS

    every = max(1, steps // 8)
    return {
        "data.train": ("dates",),
        "data.augment": ("none",),  # an ISO date with other numbers or a typo is another date
        "data.tokenizer.vocab": 1_500,
        "data.tokenizer.symbols": tuple(
            chr(ord(zero) + i) for zero in ("0", *NATIVE_ZEROS.values()) for i in range(10)
        ),
        "size": "tiny",
        "model.layers": 2,
        "model.ffn_width": 512,
        "model.norm_order": "pre",
        "model.positions": {"kind": "rotary"},
        "model.dropout": 0.0,
        "train.steps": steps,
        "train.seed": seed,
        "train.batch_tokens": 1_024,
        "train.lr": 4e-3,
        "train.warmup": 100,
        "train.schedule": "cosine",
        "train.label_smoothing": 0.0,
        "train.metric": "exact",
        "train.valid_every": every,
        "train.save_every": every,
        "train.valid_sentences": 100,
        "train.patience": 0,
        "train.threads": 1,  # the matrices are too small for a second thread
        "train.average": 0,
        "decode.beam_size": 1,
    }


def print_translations(model: "Seq2Seq", tokenizer: "Tokenizer") -> None:
    from attent.decoding.translator import translate_texts

    width = max(cell_len(text) for text, _ in TEST_DATES)
    outputs = translate_texts(model, tokenizer, [text for text, _ in TEST_DATES], beam_size=1)
    for (text, date), output in zip(TEST_DATES, outputs, strict=True):
        verdict = "" if output == date else f"   WRONG: it is {date}"
        print(f"  {text}{' ' * (width - cell_len(text))}   {output[:MAX_OUTPUT_CHARS]}{verdict}")


def print_attention(model: "Seq2Seq", tokenizer: "Tokenizer", text: str, date: str) -> None:
    import torch

    from attent.inspection import record
    from attent.models import shift_right

    source = torch.tensor(tokenizer.encode_source([text]))
    target = torch.tensor(tokenizer.encode_target([date]))
    with record(model, "decoder.*.cross_attn") as trace, torch.no_grad():
        model(source, shift_right(target, model.config.start_id))
    weights = torch.stack([trace[path][0][0] for path in trace]).flatten(0, 1)  # (layers x heads, Tq, Tk)
    tokens, digits = format_tokens(tokenizer.source.to_pieces(source[0].tolist())), list(date)
    same = torch.tensor([[token == digit for token in tokens] for digit in digits])
    head = (weights[:, : len(digits)] * same).sum((1, 2)).argmax()
    print(f"\nCross-attention of one head while it writes {date}:\n")
    for line in render_heatmap(tokens, digits, weights[head].tolist()):
        print(line)


def format_tokens(tokens: Sequence[str]) -> list[str]:
    return [token.replace("▁", "") or "space" for token in tokens[:-1]] + ["end"]


def render_heatmap(rows: Sequence[str], columns: Sequence[str], weights: Sequence[Sequence[float]]) -> Iterator[str]:
    """Yield a line for each row; `weights[column][row]` from 0 to 1 become shades."""
    width = max(map(cell_len, rows))
    yield "  " + " " * width + "".join(f"  {column} " for column in columns)
    for i, row in enumerate(rows):
        cells = (min(int(weights[column][i] * len(SHADES)), len(SHADES) - 1) for column in range(len(columns)))
        line = "".join(f" {SHADES[cell] * 3}" for cell in cells)
        yield f"  {' ' * (width - cell_len(row))}{row}{line}".rstrip()
