"""`attent demo`: the model at work in a minute, from nothing to a picture of what it looks at.

Until `attent train` exists, this teaches a small Transformer one task that needs no data from anywhere, English number
words to digits, with a plain loop of its own; then writes numbers that it never saw, checks them, and draws the
attention of one of them. Everything else is the library: build, greedy search, record, save, load.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

if TYPE_CHECKING:
    from torch import Tensor

    from attent.models import Seq2Seq

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
PAD, START, END = 0, 1, 2
TOKENS = ["<pad>", "<start>", "<end>", *"0123456789", *ONES, *TENS, "hundred", "thousand", "and"]
ID = {token: i for i, token in enumerate(TOKENS)}
SHOWN = (815, 1_969, 30_004, 60_512, 200_090, 314_159, 700_007, 990_000)
SHADES = " ░▒▓█"
NEXT = """
The model is in {out}. Look inside it from Python (. .venv/bin/activate first):

    import attent
    from attent.cli.demo import sources, targets

    model = attent.load("{out}")
    with attent.record(model) as trace:
        model(sources([1969])[0], targets([1969])[0])
    print(trace["decoder.blocks.1.cross"][0].shape)  # heads, digits, words"""


def demo(
    *,
    steps: Annotated[int, Parameter(help="training steps; the default takes about a minute")] = 500,
    seed: Annotated[int, Parameter(help="a number that fixes every random choice")] = 1,
    out: Annotated[Path, Parameter(help="folder for the trained model")] = Path("runs/demo"),
) -> None:
    """Teach a small Transformer to read number words, test it on unseen ones, and show what it looks at."""
    import torch

    import attent

    if steps < 1:
        raise ValueError(f"`--steps` must be 1 or more, but is {steps}")
    torch.set_num_threads(1)  # the matrices are tiny: a second thread would wait more than it works
    torch.manual_seed(seed)
    log = Console(stderr=True, highlight=False)
    model = new_model()
    size = sum(p.numel() for p in model.parameters())
    log.print(f"[bold]attent demo[/]: a Transformer of {size:,} parameters learns to read number words.")
    log.print("(A task made on the spot. Training on your own text is still to come.)\n")
    model.save(out)  # a folder that cannot be written to is told now, not after a minute of work
    train(model, steps, random.Random(seed), log)
    model.save(out)
    model = attent.load(out)
    report(model, random.Random(seed + 1))
    picture(model, 200_090)
    print(NEXT.format(out=out))


# --- the task ------------------------------------------------------------------------------------------------------


def words(n: int) -> list[str]:
    """1969 -> one thousand nine hundred and sixty nine"""
    if n >= 1000:
        rest = n % 1000
        joint = ["and"] if 0 < rest < 100 else []
        return [*words(n // 1000), "thousand", *joint, *(words(rest) if rest else [])]
    if n >= 100:
        return [ONES[n // 100], "hundred", *(["and", *words(n % 100)] if n % 100 else [])]
    if n >= 20:
        return [TENS[n // 10 - 2], *([ONES[n % 10]] if n % 10 else [])]
    return [ONES[n]]


def unseen(n: int) -> bool:
    """A tenth of the numbers from 100 on, scattered, and those that the demo shows, are never trained on."""
    return n >= 100 and (n * 2_654_435_761 % 2**32 < 2**32 // 10 or n in SHOWN)


def draw(count: int, rng: random.Random, wanted: Callable[[int], bool]) -> list[int]:
    """Different numbers of all lengths alike and with many zeros, so that rare forms (700007) are not drowned."""
    numbers: dict[int, None] = {}
    while len(numbers) < count:
        n = int("".join(rng.choice("000123456789") for _ in range(rng.randint(1, 6))))
        if wanted(n):
            numbers[n] = None
    return list(numbers)


def batch(rows: list[list[str]]) -> tuple[Tensor, Tensor]:
    """Token ids, padded on the right, and the length of each row."""
    import torch

    longest = max(len(row) for row in rows)
    ids = [[ID[token] for token in row] + [PAD] * (longest - len(row)) for row in rows]
    return torch.tensor(ids), torch.tensor([len(row) for row in rows])


def sources(numbers: list[int]) -> tuple[Tensor, Tensor]:
    return batch([[*words(n), "<end>"] for n in numbers])


def targets(numbers: list[int]) -> tuple[Tensor, Tensor]:
    return batch([[*str(n), "<end>"] for n in numbers])


# --- learning and showing ------------------------------------------------------------------------------------------


def new_model() -> Seq2Seq:
    import attent
    from attent.models.presets import seq2seq
    from attent.nn import RotaryConfig, StackConfig

    # It has to count digits, and learns that in fewer steps from distances (rotary) than from places (sinusoids).
    stack = StackConfig(
        layers=2, width=128, heads=4, inner=256, dropout=0.0, norm_order="pre", positions=RotaryConfig()
    )
    return attent.build(replace(seq2seq(len(TOKENS), stack), start=START, end=END))


def train(model: Seq2Seq, steps: int, rng: random.Random, log: Console) -> None:
    import torch

    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=2e-3, total_steps=max(steps, 2), pct_start=0.1)
    began = time.monotonic()
    with log.status("learning ...") as status:
        for step in range(1, steps + 1):
            loss = learn(model, draw(96, rng, lambda n: not unseen(n)))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
            line = progress(step, steps, loss.item(), time.monotonic() - began)
            status.update(line)
            if step % max(steps // 10, 1) == 0:
                log.print(line)


def learn(model: Seq2Seq, numbers: list[int]) -> Tensor:
    """The cross-entropy of the right digits, padding left out."""
    import torch.nn.functional as F

    from attent.models import shift_right

    (source, source_lengths), (target, target_lengths) = sources(numbers), targets(numbers)
    logits = model(source, shift_right(target, START), source_lengths, target_lengths)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)


def progress(step: int, steps: int, loss: float, seconds: float) -> str:
    left = seconds / step * (steps - step)
    return f"step {step:>4}/{steps}   loss {loss:.4f}   {96 * step / seconds:,.0f} numbers/s   {left:.0f} s left"


def write(model: Seq2Seq, numbers: list[int]) -> list[str]:
    """What the model writes for each number's words, token by token."""
    from attent.decode import greedy

    source, lengths = sources(numbers)
    ids = greedy(model, source, lengths, start=START, end=END, max_length=8)
    return ["".join(TOKENS[i] for i in row).split("<end>")[0] for row in ids.tolist()]


def report(model: Seq2Seq, rng: random.Random) -> None:
    numbers = draw(1000, rng, unseen)
    right = sum(text == str(n) for text, n in zip(write(model, numbers), numbers, strict=True))
    print(f"\n{right / 10:.1f}% of 1,000 numbers that it never saw are right to the last digit. Some:\n")
    for n, text in zip(SHOWN, write(model, list(SHOWN)), strict=True):
        print(f"  {text:>7} {'right' if text == str(n) else 'WRONG'}  {' '.join(words(n))}")


def picture(model: Seq2Seq, n: int) -> None:
    """Draw which word each digit was written from: the encoder-decoder attention of the last layer."""
    import torch

    import attent
    from attent.models import shift_right

    last = f"decoder.blocks.{model.config.decoder.layers - 1}.cross"
    source, target = sources([n])[0], targets([n])[0]
    with attent.record(model, last) as trace, torch.no_grad():
        model(source, shift_right(target, START))
    weights = trace[last][0][0].mean(0)  # (H, Tq, Tk) -> (Tq, Tk)
    rows, columns = [*words(n), "end"], [*str(n), "."]
    print(f"\nWhat it looks at while it writes {n} (last layer, mean of heads):\n")
    print(" " * 12 + " ".join(f" {digit} " for digit in columns))
    for k, word in enumerate(rows):
        cells = (SHADES[min(int(weights[q, k] * len(SHADES)), len(SHADES) - 1)] * 3 for q in range(len(columns)))
        print(f"{word:>10}  {' '.join(cells)}")
