"""Training on a CPU, compared with a plain loop around a Marian model of `transformers` of the same size: tokens of
both sides, without padding, per CPU-second of whole steps (forward, label-smoothed loss, backward, optimizer).

    python -m benchmarks.training_cpu                            synthetic pairs as long as image captions
    python -m benchmarks.training_cpu --data FOLDER              FOLDER contains train.en.gz and train.de.gz
    python -m benchmarks.training_cpu --same-batches             the baseline gets our batches: compares the step alone

Both have the same pairs, ids, sizes and dropout, and batches of up to 4,096 tokens per side, padding included.

    theirs  a careful plain loop: all pairs sorted by source length, then target length, split into full batches, in
            random order; attention masks, `F.cross_entropy` with label smoothing on all logits, `torch.optim.AdamW`
    ours    as in `attent train`: bucketed batches, `Seq2SeqObjective`, fused Adam, micro-batches

They alternate batch by batch; building batches is not timed. CPU-seconds include all threads and system time. Ratios
above 1: we are faster.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import attent
from attent.data.arrays import Array
from attent.data.batch_plan import BatchConfig
from attent.data.corpus import open_corpora
from attent.data.encode import EncodingConfig
from attent.data.loader import PairBatch, PairLoader, TokenBatch
from attent.data.pairs import LanguagePair, Pair
from attent.data.token_store import TokenSequences, TokenStore, prepare_store
from attent.models import shift_right
from attent.models.presets import make_seq2seq
from attent.nn import StackConfig
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer
from attent.training.autoconfig import CPU_MICRO_BATCH_TOKENS
from attent.training.objective import Seq2SeqObjective
from attent.training.state import split_batch
from benchmarks import synthetic_corpus
from benchmarks.timing import describe_machine

PAIRS, VOCAB, MAX_LENGTH, PAD, START, SMOOTHING = 29_000, 8_000, 128, 0, 1, 0.1
BatchStep = Callable[[PairBatch], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="parallel text; by default synthetic")
    parser.add_argument("--src", default="en")
    parser.add_argument("--tgt", default="de")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=4, help="batches of a round")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a side of a batch")
    parser.add_argument(
        "--micro-batch-tokens",
        type=int,
        nargs="*",
        default=[CPU_MICRO_BATCH_TOKENS],
        help="micro-batch sizes of ours in tokens; 0: whole batches",
    )
    parser.add_argument("--same-batches", action="store_true", help="give theirs our batches")
    parser.add_argument("--dropout", type=float, default=0.1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as home:
        store = build_store(Path(home), arguments)
        ours = PairLoader(store, BatchConfig(batch_tokens=arguments.tokens, max_tokens=MAX_LENGTH, layout="bucketed"))
        theirs = iterate_batches(ours) if arguments.same_batches else iterate_sorted_batches(store, arguments.tokens)
        sides = {"transformers": Competitor(theirs, build_hf_step(arguments.dropout))}
        for size in arguments.micro_batch_tokens:
            name = f"attent, {size:,} tokens" if size else "attent, whole"
            sides[name] = Competitor(iterate_batches(ours), build_attent_step(arguments.dropout, size))
        print(f"3 + 3 layers of 256, {VOCAB} words, dropout {arguments.dropout}; {describe_machine()}", flush=True)
        compare_speeds(sides, arguments.rounds, arguments.batches)


@dataclass
class Competitor:
    """Endless batches, the step to run on each, and the totals of the round."""

    batches: Iterator[PairBatch]
    step: BatchStep
    tokens: int = 0
    seconds: float = 0.0

    def run_step(self) -> None:
        batch = next(self.batches)
        start = time.process_time()
        self.step(batch)
        self.seconds += time.process_time() - start
        self.tokens += batch.source.num_tokens + batch.target.num_tokens

    def take_speed(self) -> float:
        """Return tokens per CPU-second since the last call, and reset."""
        speed = self.tokens / self.seconds
        self.tokens, self.seconds = 0, 0.0
        return speed


def compare_speeds(sides: dict[str, Competitor], rounds: int, turns: int) -> None:
    for side in sides.values():
        side.run_step()  # warms up
        side.take_speed()
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for turn in range(turns):
            for name in list(sides)[:: 1 if turn % 2 else -1]:
                sides[name].run_step()
        for name, side in sides.items():
            speeds[name].append(side.take_speed())
        print(f"round {number + 1}: {format_speeds({name: of[-1:] for name, of in speeds.items()})}", flush=True)
    print(f"median:  {format_speeds(speeds)}")


def format_speeds(speeds: dict[str, list[float]]) -> str:
    theirs = speeds["transformers"]
    return "   ".join(
        f"{name} {statistics.median(ours):,.0f} tokens/CPU-s "
        f"({statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.2f}x)"
        for name, ours in speeds.items()
    )


# --- the batches ---------------------------------------------------------------------------------------------------


def build_store(home: Path, arguments: argparse.Namespace) -> TokenStore:
    languages = LanguagePair(arguments.src, arguments.tgt) if arguments.data else LanguagePair()
    if arguments.data is None:
        synthetic_corpus.write_corpus(home / "corpus.tsv", PAIRS)
    corpora = open_corpora([arguments.data or str(home / "corpus.tsv")], languages)
    pairs = [entry for entry in corpora[0] if isinstance(entry, Pair)]
    tokenizer = train_tokenizer([p.source for p in pairs], [p.target for p in pairs], TokenizerConfig(vocab=VOCAB))
    return prepare_store(corpora, EncodingConfig(tokenizer=tokenizer), home / "stores")


def iterate_batches(batches: PairLoader) -> Iterator[PairBatch]:
    for _, batch in batches.iter_batches(workers=0):
        yield batch


def iterate_sorted_batches(store: TokenStore, tokens: int) -> Iterator[PairBatch]:
    """Yield batches sorted by length and split where a side is full, in random order, epoch after epoch.

    Sorting by both lengths favors the baseline: on Multi30k 6% is padding, with the source length alone 23%.
    """
    cuts = batch_by_length(store.source.lengths, store.target.lengths, tokens)
    rng = np.random.default_rng(1)
    while True:
        for number in rng.permutation(len(cuts)):
            pairs = cuts[number]
            yield PairBatch(pad_side(store.source, pairs), pad_side(store.target, pairs), pairs)


def batch_by_length(source: Array, target: Array, tokens: int) -> list[Array]:
    cuts: list[Array] = []
    now: list[int] = []
    widest = 0
    for pair in np.lexsort((target, source)):
        if max(source[pair], target[pair]) > MAX_LENGTH:
            continue
        wider = max(widest, int(source[pair]), int(target[pair]))
        if wider * (len(now) + 1) > tokens:
            cuts.append(np.array(now))
            now, wider = [], int(max(source[pair], target[pair]))
        now.append(int(pair))
        widest = wider
    return [*cuts, np.array(now)]


def pad_side(side: TokenSequences, pairs: Array) -> TokenBatch:
    rows: list[Tensor] = [torch.from_numpy(np.asarray(side[pair], np.int64)) for pair in pairs]
    lengths = torch.tensor([len(row) for row in rows])
    return TokenBatch(pad_sequence(rows, batch_first=True, padding_value=PAD), lengths, None, int(lengths.sum()))


# --- the steps -----------------------------------------------------------------------------------------------------


def build_attent_step(dropout: float, micro_batch_tokens: int) -> BatchStep:
    stack = replace(StackConfig(), layers=3, width=256, ffn_width=1024, heads=4, dropout=dropout)
    objective = Seq2SeqObjective(attent.build(make_seq2seq(VOCAB, stack)), smoothing=SMOOTHING).train()
    optimizer = torch.optim.Adam(objective.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)

    def step(batch: PairBatch) -> None:
        optimizer.zero_grad()
        for piece in split_batch(batch, micro_batch_tokens or None, 1):
            loss, _ = objective(batch.slice_rows(piece.start, piece.stop))
            (loss / batch.target.num_tokens).backward()
        optimizer.step()

    return step


def build_hf_step(dropout: float) -> BatchStep:
    try:
        from transformers import MarianConfig, MarianMTModel
    except ImportError:
        raise SystemExit("this benchmark compares with transformers: pip install transformers") from None

    config = MarianConfig(
        vocab_size=VOCAB, d_model=256, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=1024, decoder_ffn_dim=1024, activation_function="relu",
        scale_embedding=True, dropout=dropout, pad_token_id=PAD, eos_token_id=2, decoder_start_token_id=START,
        forced_eos_token_id=None, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    model = MarianMTModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: PairBatch) -> None:
        optimizer.zero_grad()
        logits = model(
            input_ids=batch.source.ids,
            attention_mask=batch.source.token_mask().long(),
            decoder_input_ids=shift_right(batch.target.ids, START),
            decoder_attention_mask=batch.target.token_mask().long(),
        ).logits
        right = batch.target.ids.flatten()
        F.cross_entropy(logits.flatten(0, 1), right, ignore_index=PAD, label_smoothing=SMOOTHING).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
