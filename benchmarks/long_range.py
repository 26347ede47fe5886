"""Accuracy against length and distance on generated tasks, for each architecture and position scheme.

    python -m benchmarks.long_range --out DIR [--quick] [--jobs 6] [--models LSTM rotary] [--tasks copy]

copy, reverse  a sequence of random symbols, as it is or in reverse; trained up to 20 symbols, tested up to 80
agreement      "near the doors the key of the tables behind the lamps <walk>" -> "key walks": find the only noun that
               follows no preposition, and inflect the verb; trained with up to 10 phrases after the subject, tested
               with up to 40. Without the subject in the answer, models need many more steps to find the rule.

Symbols of copy and reverse are generated greedily; a symbol is right if it stands at the right place. Results are
written to results.json after each model, and a second call trains only what is missing there.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attent
from attent.formatting import markdown_table
from attent.inspection.plots import create_figure, plot_context, save_figure
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.presets import make_seq2seq
from attent.models.seq2seq import shift_right
from attent.nn import AlibiConfig, LearnedConfig, RelativeConfig, RotaryConfig, SinusoidalConfig, StackConfig
from attent.nn.convolution import ConvDecoderConfig, ConvEncoderConfig
from attent.nn.recurrent import LSTMDecoderConfig, LSTMEncoderConfig, RecurrentAttention
from attent.storage.atomic import write_atomic
from benchmarks.timing import describe_machine

START, END, FIRST_WORD = 0, 1, 2
SYMBOLS, NOUNS, VERBS, PREPOSITIONS = 24, 5, 4, 3
ARTICLE = FIRST_WORD + SYMBOLS
FIRST_PREPOSITION = ARTICLE + 1
FIRST_NOUN = FIRST_PREPOSITION + PREPOSITIONS  # a singular, its plural, the next singular ...
FIRST_VERB = FIRST_NOUN + 2 * NOUNS  # a stem, its singular, its plural ...
VOCAB = FIRST_VERB + 3 * VERBS
MAX_LENGTH = 160  # of learned positions
MAX_PHRASES_BEFORE = 3


@dataclass(frozen=True)
class TaskSpec:
    """A task whose batches have one length each, so that nothing is padded."""

    make_batch: Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]]  # rows, length -> source, target
    trained: tuple[int, int]  # lengths in training
    tested: tuple[int, ...]
    unit: str


@dataclass(frozen=True)
class Budget:
    steps: int
    rows: int
    width: int
    layers: int
    test_rows: int


FULL = Budget(steps=2500, rows=256, width=128, layers=2, test_rows=512)
QUICK = Budget(steps=150, rows=32, width=64, layers=1, test_rows=32)


# ---- tasks -----------------------------------------------------------------------------------------------------------


def make_copy(rows: int, length: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    symbols = draw(FIRST_WORD, SYMBOLS, (rows, length), rng)
    return append_end(symbols), append_end(symbols)


def make_reverse(rows: int, length: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    symbols = draw(FIRST_WORD, SYMBOLS, (rows, length), rng)
    return append_end(symbols), append_end(symbols.flip(1))


def make_agreement(rows: int, length: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """`length` counts the prepositional phrases between subject and verb, of three words each."""
    before = int(torch.randint(MAX_PHRASES_BEFORE + 1, (), generator=rng, device=rng.device))
    subject, verb = draw(0, 2 * NOUNS, (rows, 1), rng), draw(0, VERBS, (rows, 1), rng)
    article = torch.full_like(subject, ARTICLE)
    phrases = [make_phrases(rows, count, rng) for count in (before, length)]
    source = torch.cat([phrases[0], article, FIRST_NOUN + subject, phrases[1], FIRST_VERB + 3 * verb], 1)
    is_plural = subject % 2
    return append_end(source), append_end(torch.cat([FIRST_NOUN + subject, FIRST_VERB + 3 * verb + 1 + is_plural], 1))


def make_phrases(rows: int, count: int, rng: torch.Generator) -> Tensor:
    """`count` times preposition, article, noun of either number."""
    prepositions = draw(FIRST_PREPOSITION, PREPOSITIONS, (rows, count), rng)
    nouns = draw(FIRST_NOUN, 2 * NOUNS, (rows, count), rng)
    return torch.stack([prepositions, torch.full_like(nouns, ARTICLE), nouns], 2).flatten(1)


def draw(first: int, count: int, shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    return torch.randint(first, first + count, shape, generator=rng, device=rng.device)


def append_end(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, 1), value=END)


LENGTHS = (5, 10, 15, 20, 25, 30, 40, 60, 80)
TASKS = {
    "copy": TaskSpec(make_copy, (1, 20), LENGTHS, "symbols"),
    "reverse": TaskSpec(make_reverse, (1, 20), LENGTHS, "symbols"),
    "agreement": TaskSpec(make_agreement, (0, 10), (0, 2, 5, 10, 15, 20, 30, 40), "phrases between subject and verb"),
}


# ---- models ----------------------------------------------------------------------------------------------------------


def build_transformer(positions: Any) -> Callable[[Budget], Seq2SeqConfig]:
    def build(budget: Budget) -> Seq2SeqConfig:
        stack = StackConfig(
            layers=budget.layers,
            width=budget.width,
            heads=4,
            ffn_width=4 * budget.width,
            positions=positions,
            norm_order="pre",
            dropout=0.0,
        )
        return make_seq2seq(VOCAB, stack)

    return build


def build_lstm(attention: RecurrentAttention) -> Callable[[Budget], Seq2SeqConfig]:
    """Wider, with as many parameters as the Transformer."""

    def build(budget: Budget) -> Seq2SeqConfig:
        width = budget.width * (10 if attention == "none" else 9) // 8
        shape = LSTMEncoderConfig(layers=budget.layers, width=width, dropout=0.0)
        decoder = LSTMDecoderConfig(**vars(shape), attention=attention, input_feeding=attention != "none")
        return Seq2SeqConfig(vocab=VOCAB, encoder=shape, decoder=decoder)

    return build


def build_conv(budget: Budget) -> Seq2SeqConfig:
    """Twice the layers, which have about half the weights of a Transformer's."""
    width = budget.width * 15 // 16
    shape = ConvEncoderConfig(layers=2 * budget.layers, width=width, max_length=MAX_LENGTH, dropout=0.0)
    return Seq2SeqConfig(vocab=VOCAB, encoder=shape, decoder=ConvDecoderConfig(**vars(shape)))


MODELS: dict[str, Callable[[Budget], Seq2SeqConfig]] = {
    "sinusoidal": build_transformer(SinusoidalConfig()),
    "learned": build_transformer(LearnedConfig(max_length=MAX_LENGTH)),
    "rotary": build_transformer(RotaryConfig()),
    "T5 relative": build_transformer(RelativeConfig()),
    "ALiBi": build_transformer(AlibiConfig()),
    "LSTM": build_lstm("additive"),
    "LSTM without attention": build_lstm("none"),
    "convolutional": build_conv,
}


# ---- training and testing --------------------------------------------------------------------------------------------


def run_model(name: str, task_name: str, budget: Budget, device: str, seed: int) -> dict[str, Any]:
    """Train one model on one task and return its accuracy at each tested length."""
    torch.manual_seed(seed)
    task, rng = TASKS[task_name], torch.Generator(device).manual_seed(seed)
    config = replace(MODELS[name](budget), start_id=START, end_id=END)
    model = attent.build(config).to(device).train()
    start = time.perf_counter()
    loss = train(model, task, budget, rng)
    seconds = time.perf_counter() - start
    test_rng = torch.Generator(device).manual_seed(1_000_000)  # the same examples for all models
    accuracy = {length: test(model.eval(), task, length, budget.test_rows, test_rng) for length in task.tested}
    return {
        "model": name,
        "task": task_name,
        "seed": seed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(seconds, 1),
        "loss": round(loss, 4),
        "tokens": {length: round(tokens, 4) for length, (tokens, _) in accuracy.items()},
        "sequences": {length: round(sequences, 4) for length, (_, sequences) in accuracy.items()},
    }


def train(model: Seq2Seq, task: TaskSpec, budget: Budget, rng: torch.Generator) -> float:
    """Train with Adam (linear warm-up, cosine decay) and return the last loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), fused=rng.device.type == "cuda")
    warmup = budget.steps // 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / budget.steps))
    )
    lengths = torch.randint(
        task.trained[0],
        task.trained[1] + 1,
        (budget.steps,),
        generator=torch.Generator().manual_seed(rng.initial_seed()),
    )
    for length in lengths.tolist():
        source, target = task.make_batch(budget.rows, length, rng)
        logits = model(source, shift_right(target, START))
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return loss.item()


@torch.no_grad()
def test(model: Seq2Seq, task: TaskSpec, length: int, rows: int, rng: torch.Generator) -> tuple[float, float]:
    """Generate greedily; return the shares of right tokens and of sequences without an error, end token included."""
    source, target = task.make_batch(rows, length, rng)
    cache = model.init_decoder_state(source, capacity=target.shape[1])
    token = torch.full((rows, 1), START, device=source.device)
    outputs = []
    for _ in range(target.shape[1]):
        token = model.step(token, cache)[:, -1:].argmax(-1)
        outputs.append(token)
    right = torch.cat(outputs, 1) == target
    scored = right[:, :-1]  # of every length the same: the end token is one more
    return scored.float().mean().item(), right.all(1).float().mean().item()


# ---- report ----------------------------------------------------------------------------------------------------------


def write_report(results: Sequence[dict[str, Any]], out: Path) -> None:
    tasks = [name for name in TASKS if any(result["task"] == name for result in results)]
    machines = dict.fromkeys(result["machine"] for result in results)
    parts = [
        "# Long-range dependencies",
        f"{'; '.join(machines)}. Means over the seeds, with the lowest and the highest.",
    ]
    for task in tasks:
        spec = TASKS[task]
        lengths = [f"{length}{'' if length <= spec.trained[1] else ' *'}" for length in spec.tested]
        header, rows = ["", "parameters", "seeds", *lengths], []
        for name in MODELS:
            if runs := select_runs(results, name, task):
                cells = [format_shares([run["tokens"][str(length)] for run in runs]) for length in spec.tested]
                rows.append([name, f"{runs[0]['parameters']:,}", str(len(runs)), *cells])
        parts += [
            f"## {task}",
            f"Share of right tokens by the number of {spec.unit}; * is beyond training.",
            markdown_table(header, rows, right_aligned=range(1, len(header))),
        ]
    if find_spec("matplotlib"):
        with plot_context(MODELS):
            save_figure(plot(results, tasks), out / "long-range.svg")
        parts.append("![Accuracy against length](long-range.svg)")
    write_atomic(out / "long-range.md", ("\n\n".join(parts) + "\n").encode())


def select_runs(results: Sequence[dict[str, Any]], name: str, task: str) -> list[dict[str, Any]]:
    return [result for result in results if (result["model"], result["task"]) == (name, task)]


def format_shares(shares: Sequence[float]) -> str:
    """75%, or of several seeds 75% (60-91)."""
    spread = f" ({100 * min(shares):.0f}-{100 * max(shares):.0f})" if len(shares) > 1 else ""
    return f"{100 * fmean(shares):.0f}%{spread}"


def plot(results: Sequence[dict[str, Any]], tasks: Sequence[str]) -> Any:
    import matplotlib

    figure = create_figure(5 * len(tasks), 4)
    colors = dict(zip(MODELS, matplotlib.color_sequences["tab10"], strict=False))
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        spec = TASKS[task]
        for number, name in enumerate(MODELS):
            if not (runs := select_runs(results, name, task)):
                continue
            axes.plot(
                spec.tested,
                [100 * fmean(run["tokens"][str(length)] for run in runs) for length in spec.tested],
                label=name,
                color=colors[name],
                marker="osD^vPX*"[number % 8],
                markersize=4,
            )
        axes.axvspan(0, spec.trained[1], color="#f0f0f0", zorder=0, label="lengths in training")
        axes.set(title=task, xlabel=spec.unit, ylim=(-3, 103))
        axes.grid(color="#e4e7eb")
    figure.axes[0].set_ylabel("right tokens (%)")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/long-range"), help="folder of results and report")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--quick", action="store_true", help="tiny models and few steps, for a CPU")
    parser.add_argument("--jobs", type=int, default=1, help="models that train at the same time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    budget = QUICK if arguments.quick else FULL
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "results.json"
    stored: dict[str, Any] = {"budget": asdict(budget), "results": []}
    stored = json.loads(path.read_text()) if path.exists() else stored
    if stored["budget"] != asdict(budget):
        sys.exit(f"{path}: has results of another budget; give another --out")
    results, machine, num_failed = stored["results"], describe_machine(), 0
    complete = {(result["model"], result["task"], result["seed"]) for result in results}
    pending = [
        (name, task, seed)
        for seed in arguments.seeds
        for name in arguments.models
        for task in arguments.tasks
        if (name, task, seed) not in complete
    ]
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        futures = {pool.submit(run_model, *each[:2], budget, arguments.device, each[2]): each for each in pending}
        for number, future in enumerate(as_completed(futures), 1):
            if error := future.exception():
                num_failed += 1
                name, task, seed = futures[future]
                print(f"[{number}/{len(pending)}] {name}, {task}, seed {seed}: failed: {error}", flush=True)
                continue
            result = json.loads(json.dumps(future.result() | {"machine": machine}))  # keys as strings
            results.append(result)
            write_atomic(path, json.dumps(stored, indent=1).encode())
            longest = list(result["tokens"].items())[-1]
            print(
                f"[{number}/{len(pending)}] {result['model']}, {result['task']}: loss {result['loss']:.3f}, "
                f"{100 * longest[1]:.0f}% right at {longest[0]}, {result['seconds']} s",
                flush=True,
            )
    write_report(results, arguments.out)
    print(f"report: {arguments.out / 'long-range.md'}" + (f"; {num_failed} failed" if num_failed else ""))
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
