"""Small models learn to copy, to reverse, and to reproduce twenty sentence pairs, with greedy decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attent.models import Seq2Seq, Seq2SeqConfig, shift_right
from attent.models.config import mirror_encoder
from attent.nn import ConvDecoderConfig, ConvEncoderConfig, LSTMDecoderConfig, LSTMEncoderConfig, StackConfig
from tests.greedy import greedy_search

PAD, START, END, FIRST = 0, 1, 2, 3  # ids; words begin at FIRST
LONGEST = 6  # words in a sentence to copy or reverse

PAIRS = """
the dog sleeps | der Hund schläft
the cat sleeps | die Katze schläft
the dog does not sleep | der Hund schläft nicht
the child eats an apple | das Kind isst einen Apfel
the man eats bread | der Mann isst Brot
the woman drinks water | die Frau trinkt Wasser
the woman drinks no water | die Frau trinkt kein Wasser
I see the dog | ich sehe den Hund
I do not see the dog | ich sehe den Hund nicht
the dog sees me | der Hund sieht mich
we go home | wir gehen nach Hause
today we go home | heute gehen wir nach Hause
he reads the book | er liest das Buch
she has read the book | sie hat das Buch gelesen
he gives the child the book | er gibt dem Kind das Buch
where is the cat | wo ist die Katze
the cat is in the house | die Katze ist im Haus
the house is old and small | das Haus ist alt und klein
it is raining | es regnet
good morning | guten Morgen
"""


def small(vocab: int) -> Seq2Seq:
    """Two pre-norm layers, which train without warmup and reliably with every seed."""
    encoder = StackConfig(layers=2, width=64, heads=4, ffn_width=256, norm_order="pre", dropout=0.0)
    return Seq2Seq(
        Seq2SeqConfig(vocab=vocab, encoder=encoder, decoder=mirror_encoder(encoder), start_id=START, end_id=END)
    )


def lstm(vocab: int) -> Seq2Seq:
    encoder, decoder = (kind(layers=2, width=64, dropout=0.0) for kind in (LSTMEncoderConfig, LSTMDecoderConfig))
    return Seq2Seq(Seq2SeqConfig(vocab=vocab, encoder=encoder, decoder=decoder, start_id=START, end_id=END))


def conv(vocab: int) -> Seq2Seq:
    encoder, decoder = (kind(layers=3, width=64, dropout=0.0) for kind in (ConvEncoderConfig, ConvDecoderConfig))
    return Seq2Seq(Seq2SeqConfig(vocab=vocab, encoder=encoder, decoder=decoder, start_id=START, end_id=END))


def make_batch(sentences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Padded ids with END after each sentence, and the lengths."""
    rows = [[*sentence, END] for sentence in sentences]
    width = max(map(len, rows))
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows]), torch.tensor([len(row) for row in rows])


def train(model: Seq2Seq, batches: Iterator[tuple[list[list[int]], list[list[int]]]], steps: int, lr: float) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min((step + 1) / 20, 1 - step / steps))
    model.train()
    for _, (sources, targets) in zip(range(steps), batches, strict=False):
        (source, source_lengths), (target, target_lengths) = make_batch(sources), make_batch(targets)
        logits = model(source, shift_right(target, START), source_lengths, target_lengths)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    model.eval()


def translate(model: Seq2Seq, sources: list[list[int]], max_length: int) -> list[list[int]]:
    ids = greedy_search(model, *make_batch(sources), start_id=START, end_id=END, max_length=max_length).tolist()
    return [row[: row.index(END)] if END in row else row for row in ids]


def random_sentences(count: int, words: int, generator: torch.Generator) -> list[list[int]]:
    lengths = torch.randint(1, LONGEST + 1, (count,), generator=generator).tolist()
    return [torch.randint(FIRST, FIRST + words, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "task"),
    [
        pytest.param(small, list, marks=pytest.mark.slow),
        (small, lambda sentence: sentence[::-1]),
        (lstm, list),
        pytest.param(conv, lambda sentence: sentence[::-1], marks=pytest.mark.slow),
    ],
    ids=["copy", "reverse", "lstm-copy", "conv-reverse"],
)
def test_a_model_learns_to_copy_and_to_reverse(
    build: Callable[[int], Seq2Seq], task: Callable[[list[int]], list[int]]
) -> None:
    """All of 200 unseen sentences of 1 to 6 words, from a vocabulary of eight."""
    words, generator = 8, torch.Generator().manual_seed(1)
    unseen = random_sentences(200, words, generator)
    known = {
        tuple(sentence) for sentence in unseen if len(sentence) > 2
    }  # there are too few short ones for a separate test set

    def batches() -> Iterator[tuple[list[list[int]], list[list[int]]]]:
        while True:
            sources = [s for s in random_sentences(64, words, generator) if tuple(s) not in known]
            yield sources, [task(source) for source in sources]

    model = build(FIRST + words)
    steps, lr = {small: (280, 4e-3), lstm: (160, 1e-2), conv: (280, 2e-3)}[build]
    train(model, batches(), steps=steps, lr=lr)
    assert translate(model, unseen, LONGEST + 1) == [task(source) for source in unseen]


def test_a_model_overfits_twenty_pairs() -> None:
    pairs = [[side.split() for side in line.split("|")] for line in PAIRS.strip().splitlines()]
    assert len(pairs) == 20
    vocabulary = sorted({word for pair in pairs for side in pair for word in side})
    number = {word: i for i, word in enumerate(vocabulary, FIRST)}
    sources, targets = ([[number[word] for word in pair[side]] for pair in pairs] for side in (0, 1))

    def batches() -> Iterator[tuple[list[list[int]], list[list[int]]]]:
        while True:
            yield sources, targets

    model = small(FIRST + len(vocabulary))
    train(model, batches(), steps=60, lr=3e-3)
    written = translate(model, sources, max_length=8)
    assert [" ".join(vocabulary[i - FIRST] for i in row) for row in written] == [" ".join(pair[1]) for pair in pairs]
