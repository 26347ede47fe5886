"""One forward + backward pass of the paper's base model on CPU, beside `transformers`' Marian of the same size: same
padded batch, same loss, dropout on in both.

    python -m benchmarks.forward_backward_cpu [--rows 16] [--rounds 11] [--threads 2]

The ratio is ours over theirs, within one run, rounds interleaved; above 1 we are faster.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attent
from attent.models import Seq2Seq, shift_right
from benchmarks.measure import interleave, machine, ratio

VOCAB, PAD = 32_000, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--mean-length", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    source, source_lengths = sentences(arguments.rows, arguments.mean_length)
    target, target_lengths = sentences(arguments.rows, arguments.mean_length)
    ours, theirs = attent.build(attent.presets.base(VOCAB)).train(), hugging_face().train()
    work = {
        "attent": lambda: our_pass(ours, source, source_lengths, target, target_lengths),
        "transformers": lambda: their_pass(theirs, source, source_lengths, target, target_lengths),
    }
    print(f"base, {VOCAB} words, {tuple(source.shape)} -> {tuple(target.shape)} tokens, float32; {machine()}")
    seconds = interleave(work, arguments.rounds)
    for name, values in seconds.items():
        print(f"{name:>14}  median {statistics.median(values):.3f} s   best {min(values):.3f} s")
    best = min(seconds["transformers"]) / min(seconds["attent"])
    print(
        f"attent is {ratio(seconds['attent'], seconds['transformers']):.2f}x as fast as transformers "
        f"(median of {arguments.rounds} interleaved rounds), {best:.2f}x by the best round of each"
    )


def sentences(rows: int, mean: int) -> tuple[Tensor, Tensor]:
    """Random ids of ragged lengths, padded on the right to the longest."""
    lengths = torch.randint(mean // 2, mean * 3 // 2 + 1, (rows,))
    ids = torch.randint(3, VOCAB, (rows, int(lengths.max())))
    return ids.masked_fill(torch.arange(ids.shape[1]) >= lengths[:, None], PAD), lengths


def hugging_face() -> nn.Module:
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=VOCAB, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, activation_function="relu",
        scale_embedding=True, dropout=0.1, pad_token_id=PAD, eos_token_id=2, decoder_start_token_id=1,
        forced_eos_token_id=None, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    return MarianMTModel(config)


def our_pass(model: Seq2Seq, source: Tensor, source_lengths: Tensor, target: Tensor, target_lengths: Tensor) -> None:
    logits = model(source, shift_right(target, 1), source_lengths, target_lengths)
    F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD).backward()
    model.zero_grad()


def their_pass(
    model: nn.Module, source: Tensor, source_lengths: Tensor, target: Tensor, target_lengths: Tensor
) -> None:
    seen = torch.arange(source.shape[1]) < source_lengths[:, None]
    written = torch.arange(target.shape[1]) < target_lengths[:, None]
    logits = model(
        input_ids=source,
        attention_mask=seen.long(),
        decoder_input_ids=shift_right(target, 1),
        decoder_attention_mask=written.long(),
    ).logits
    F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD).backward()
    model.zero_grad()


if __name__ == "__main__":
    main()
