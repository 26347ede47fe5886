"""Forward and backward pass of the paper's base model, compared with a Marian model of `transformers` of the same size:
the same sentences and loss, with dropout.

    python -m benchmarks.forward_backward                                         on CPU: 16 sentences, float32
    python -m benchmarks.forward_backward --device cuda --rows 800 --compile      on a GPU: bfloat16

Cases: both on the same padded batch; and ours on the same sentences packed into rows of 256, without
padding. Ratios are against `transformers`, within one run, rounds interleaved; above 1 we are faster.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attent
from attent.models import shift_right
from attent.nn import Packing
from benchmarks.timing import describe_machine, interleave, ratio

VOCAB, PAD, START, ROW = 32_000, 0, 1, 256


@dataclass(frozen=True)
class InputBatch:
    """Token ids of both sides with their lengths or packing."""

    source: Tensor
    target: Tensor
    lengths: tuple[Tensor, Tensor] | None = None
    packing: tuple[Packing, Packing] | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=16, help="sentences in the batch")
    parser.add_argument("--mean-length", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile", action="store_true", help="torch.compile both")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    pairs = [
        (random_sentence(arguments.mean_length), random_sentence(arguments.mean_length)) for _ in range(arguments.rows)
    ]
    work = build_cases(pairs, torch.device(arguments.device), arguments.compile)
    tokens = sum(len(target) for _, target in pairs)
    print(f"base, {VOCAB} words, {len(pairs)} pairs, {tokens} target tokens; {describe_machine()}")
    report(interleave(work, arguments.rounds), tokens)


def report(seconds: dict[str, list[float]], tokens: int) -> None:
    theirs = seconds["transformers padded"]
    for name, ours in seconds.items():
        print(
            f"{name:>20}  median {statistics.median(ours):.4f} s   best {min(ours):.4f} s   "
            f"{tokens / statistics.median(ours):>9,.0f} target tokens/s   "
            f"{ratio(ours, theirs):.2f}x (best of each {min(theirs) / min(ours):.2f}x)"
        )


def build_cases(
    pairs: list[tuple[list[int], list[int]]], device: torch.device, compiled: bool
) -> dict[str, Callable[[], None]]:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    ours: nn.Module = attent.build(attent.presets.base(VOCAB)).to(device, dtype).train()
    theirs = build_hf_model().to(device, dtype).train()
    if compiled:
        ours, theirs = torch.compile(ours), torch.compile(theirs)
    padded, packed = pad_pairs(pairs, device), pack_pairs(pairs, device)
    return {
        "transformers padded": lambda: run_hf(theirs, padded),
        "attent padded": lambda: run_attent(ours, padded),
        "attent packed": lambda: run_attent(ours, packed),
    }


# --- the batch -----------------------------------------------------------------------------------------------------


def random_sentence(mean: int) -> list[int]:
    """Return random ids, of 0.5 to 1.5 times the mean length."""
    return torch.randint(3, VOCAB, (int(torch.randint(mean // 2, mean * 3 // 2 + 1, ())),)).tolist()


def pad_pairs(pairs: Sequence[tuple[list[int], list[int]]], device: torch.device) -> InputBatch:
    source, target = (pad_rows([pair[side] for pair in pairs]).to(device) for side in (0, 1))
    lengths = [torch.tensor([len(pair[side]) for pair in pairs], device=device) for side in (0, 1)]
    return InputBatch(source, target, lengths=(lengths[0], lengths[1]))


def pack_pairs(pairs: Sequence[tuple[list[int], list[int]]], device: torch.device) -> InputBatch:
    """Pack pairs into rows, longest first, each into the first row with space on both sides."""
    rows: list[list[tuple[list[int], list[int]]]] = []
    for pair in sorted(pairs, key=lambda pair: -max(map(len, pair))):
        fitting = (row for row in rows if all(sum(len(p[s]) for p in row) + len(pair[s]) <= ROW for s in (0, 1)))
        row = next(fitting, None)
        if row is None:
            rows.append(row := [])
        row.append(pair)
    ids = [pad_rows([[i for pair in row for i in pair[s]] for row in rows], ROW).to(device) for s in (0, 1)]
    source, target = (
        Packing.from_lengths([[len(pair[s]) for pair in row] for row in rows], ROW, device=device) for s in (0, 1)
    )
    return InputBatch(ids[0], ids[1], packing=(source, target))


def pad_rows(rows: list[list[int]], width: int | None = None) -> Tensor:
    width = max(map(len, rows)) if width is None else width
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows])


# --- the models ----------------------------------------------------------------------------------------------------


def build_hf_model() -> nn.Module:
    try:
        from transformers import MarianConfig, MarianMTModel
    except ImportError:
        raise SystemExit("this benchmark compares with transformers: pip install transformers") from None

    config = MarianConfig(
        vocab_size=VOCAB, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, activation_function="relu",
        scale_embedding=True, dropout=0.1, pad_token_id=PAD, eos_token_id=2, decoder_start_token_id=START,
        forced_eos_token_id=None, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    return MarianMTModel(config)


def run_attent(model: nn.Module, batch: InputBatch) -> None:
    lengths = batch.lengths or (None, None)
    target_packing = batch.packing[1] if batch.packing else None
    decoder_input = shift_right(batch.target, START, target_packing)
    backward_loss(model, model(batch.source, decoder_input, *lengths, packing=batch.packing), batch.target)


def run_hf(model: nn.Module, batch: InputBatch) -> None:
    assert batch.lengths is not None
    real = [
        (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()
        for ids, lengths in zip((batch.source, batch.target), batch.lengths, strict=True)
    ]
    logits = model(
        input_ids=batch.source,
        attention_mask=real[0],
        decoder_input_ids=shift_right(batch.target, START),
        decoder_attention_mask=real[1],
    ).logits
    backward_loss(model, logits, batch.target)


def backward_loss(model: nn.Module, logits: Tensor, target: Tensor) -> None:
    F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD).backward()
    model.zero_grad()


if __name__ == "__main__":
    main()
