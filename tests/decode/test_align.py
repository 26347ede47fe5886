"""Alignments: the weights are those of the model, tokens become the words of the text, and no other model's choice is
taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attent.decode import align as module
from attent.decode.align import (
    Alignment,
    AlignmentError,
    Choice,
    Measured,
    WordPair,
    agreed,
    align,
    align_rows,
    choice_of,
    choices,
    chosen,
    cross_weights,
    default_choice,
    mark,
    matched,
    remember,
    words_of,
)
from attent.decode.force import ForceError, Row, encoded
from attent.look.record import record
from attent.models import Seq2Seq, Seq2SeqConfig, shift_right
from attent.models.config import decoder_of
from attent.models.heads import without
from attent.nn import StackConfig
from attent.settings import SettingsError
from attent.text.tokenizer import Tokenizer
from attent.train.choose import for_tokenizer
from tests.text.corpus import lines, tokenizer
from tests.text.foreigners import marian_folder

STACK = StackConfig(layers=3, width=16, heads=2, inner=24, dropout=0.5)
SOURCES, TARGETS = (list(side[:8]) for side in lines())
ODD = [
    "A dog.",
    "  two   women\tsinging  ",
    "a\u00a0man \u3000 outside",
    "日本 の 🚲🚲 x",
    "naïve café: %s {name}%s",
    "▁ \x1a0 ▁▁ a",
    "a\u2028b \x85",
    "",
]


def made() -> Seq2Seq:
    return Seq2Seq(for_tokenizer(Seq2SeqConfig(vocab=9, encoder=STACK, decoder=decoder_of(STACK)), tokenizer()))


# ---- the weights -----------------------------------------------------------------------------------------------------


def test_the_weights_are_what_the_model_looks_at() -> None:
    model, of = made().eval(), tokenizer()
    rows = encoded(model, of, SOURCES, TARGETS)
    for place, weights in cross_weights(model, rows, [2, 0], batch_tokens=60):
        source, target = torch.tensor([rows[place].source]), torch.tensor([rows[place].target])
        with record(model, "decoder.*.cross") as trace:
            model(source, shift_right(target, model.config.start))
        for layer, got in zip((2, 0), weights, strict=True):
            wanted = trace[f"decoder.blocks.{layer}.cross"][0][0]
            assert got.shape == (2, target.shape[1], source.shape[1])
            torch.testing.assert_close(got, wanted)


def test_each_pair_is_aligned_as_it_is_alone_and_no_tap_is_left() -> None:
    model, of = made(), tokenizer()
    model.train()
    choice = Choice(layer=1, heads=(1,), shift=False)
    together = align(model, of, SOURCES, TARGETS, choice, batch_tokens=70)
    alone = [align(model, of, [s], [t], choice)[0] for s, t in zip(SOURCES, TARGETS, strict=True)]
    assert [one.links for one in together] == [one.links for one in alone]
    assert len({one.links for one in together}) > 3
    assert model.training
    assert not any(layer.taps for layer in module.cross_layers(model))


def test_a_token_is_looked_up_when_it_is_written_or_one_step_later() -> None:
    weights = torch.rand(2, 4, 5)  # three tokens and the end
    assert torch.equal(chosen(weights, Choice(layer=0, heads=(1,), shift=False)), weights[1, :3])
    assert torch.equal(chosen(weights, Choice(layer=0, heads=(1,), shift=True)), weights[1, 1:])
    assert torch.equal(chosen(weights, Choice(layer=0)), weights.mean(0)[1:])


# ---- tokens to words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char"])
@pytest.mark.parametrize("text", [*ODD, *SOURCES[:3]])
def test_the_tokens_of_a_word_spell_it(kind: Any, text: str) -> None:
    vocabulary = tokenizer(kind).source
    (ids,) = vocabulary.encode([text.strip()])
    words = words_of(vocabulary, ids, text.split())
    assert len(words) == len(ids)
    spelled = [[i for i, word in zip(ids, words, strict=True) if word == place] for place in range(len(text.split()))]
    assert [vocabulary.decode(part).strip() for part in spelled] == text.split()


def test_tags_and_what_was_cut_belong_to_no_word() -> None:
    of = tokenizer()
    (ids,) = of.encode_source(["two women singing"], "de")
    assert words_of(of.source, ids[:-1], ["two", "women", "singing"])[0] is None
    some = words_of(of.source, ids[1:4], ["two", "women", "singing"])
    assert some[0] == 0
    assert set(some) <= {0, 1, 2}


def test_a_word_that_a_vocabulary_cannot_spell_keeps_its_place(tmp_path: Path) -> None:
    of = Tokenizer.load(marian_folder(tmp_path / "marian"))
    text = "a dog 日本 singing … again"
    (ids,) = of.source.encode([text])
    assert of.source.unknown in ids
    words = words_of(of.source, ids, text.split())
    unknown = ids.index(of.source.unknown)
    assert words[unknown] == 2
    assert words[-1] == len(text.split()) - 1
    assert words[:unknown] == sorted(word for word in words[:unknown] if word is not None)
    assert set(words) == set(range(len(text.split())))


def test_words_that_are_spelled_otherwise_are_found_between_those_that_are_not() -> None:
    assert matched(["a", "x", "b", "c"], ["a", "y", "z", "b", "c"]) == [0, 1, 3, 4]
    assert matched(["a", "x", "y", "b"], ["a", "z", "b"]) == [0, 1, 1, 2]
    assert matched(["a", "b"], ["a", "b", "c", "d"]) == [0, 1]  # a text that was cut
    assert matched(["a", "x", "b"], ["a", "b"]) == [0, None, 1]


def test_a_word_sums_what_looks_at_its_tokens_and_looks_as_its_tokens_do_on_average() -> None:
    pair = WordPair(source=[0, 0, 1, None], target=[0, 1, 1], source_words=2, target_words=2)
    weights = torch.tensor([[0.2, 0.3, 0.4, 0.1], [0.0, 0.1, 0.1, 0.8], [0.0, 0.0, 0.6, 0.4]])
    got = pair.alignment(weights)
    assert [list(row) for row in got.weights] == [pytest.approx([0.5, 0.4]), pytest.approx([0.05, 0.35])]
    assert got.links == ((0, 0), (1, 1))


def test_links_are_written_as_pharaoh_wants_them() -> None:
    weights = ((0.1, 0.8, 0.1), (0.7, 0.1, 0.1), (0.1, 0.6, 0.2))
    one = Alignment(links=((1, 0), (0, 1), (1, 2)), weights=weights)
    assert one.pharaoh == "0-1 1-0 1-2"
    assert one.mutual == ((1, 0), (0, 1))  # word 1 was looked at more by word 0 than by word 2


def test_pairs_without_words_have_no_links() -> None:
    model, of = made(), tokenizer()
    got = align(model, of, ["a dog", "", "", "a dog"], ["", "ein Hund", "", "ein Hund"], default_choice(model))
    assert [len(one.links) for one in got] == [0, 0, 0, 2]
    assert [one.mutual for one in got[:3]] == [(), (), ()]
    with pytest.raises(ForceError, match="a target for each source"):
        align(model, of, ["a"], [], default_choice(model))


def test_what_a_search_has_found_is_aligned_by_its_own_ids() -> None:
    """A search may segment a word as the tokenizer never would."""
    model, of = made(), tokenizer()
    source = of.encode_source(["a dog"])[0]
    letters = [i for letter in "▁ein" for i in range(of.target.size) if of.target.pieces([i]) == [letter]]
    assert len(letters) == 4
    row = Row(source=source, target=[*letters, of.target.end], cut=False)
    (got,) = align_rows(model, of, ["a dog"], ["ein"], [row], default_choice(model))
    assert [target for _, target in got.links] == [0]


# ---- choosing --------------------------------------------------------------------------------------------------------


def planted(good: Choice) -> Any:
    """In place of a model's weights: one head follows the words, all others look at the first token."""

    def weights(
        model: nn.Module, rows: Sequence[Row], layers: Sequence[int], _: int = 0
    ) -> Iterator[tuple[int, Tensor]]:
        for place, row in enumerate(rows):
            found = torch.zeros(3, 2, len(row.target), len(row.source))
            found[..., 0] = 1.0
            for token in range(min(len(row.target), len(row.source)) - 1):
                assert good.heads
                found[good.layer, good.heads[0], token + good.shift] = 0.0
                found[good.layer, good.heads[0], token + good.shift, token] = 1.0
            yield place, found[list(layers)]

    return weights


@pytest.mark.parametrize("good", [Choice(layer=2, heads=(1,), shift=True), Choice(layer=0, heads=(0,), shift=False)])
def test_without_alignments_by_hand_the_head_is_found_on_which_words_agree(
    good: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "cross_weights", planted(good))
    found = agreed(made(), tokenizer(), SOURCES, SOURCES)
    assert found.choice == good
    assert found.agreement == pytest.approx(100)
    assert found.sentences == len(SOURCES)
    assert agreed(made(), tokenizer(), SOURCES, SOURCES, most=3).sentences == 3
    with pytest.raises(AlignmentError, match="pairs with words on both sides"):
        agreed(made(), tokenizer(), [" "], ["a"])


def test_every_step_layer_and_head_is_a_choice_once() -> None:
    every = choices(made())
    assert len(every) == len(set(every)) == 2 * 3 * (1 + 2)
    assert default_choice(made()) in every
    assert default_choice(made()) == Choice(layer=1, heads=None, shift=True)


def measured(model: nn.Module, layer: int = 2) -> Measured:
    return Measured(choice=Choice(layer=layer, heads=(1,)), aer=20.5, sentences=50, model=mark(model))


def test_a_folder_remembers_the_choice_for_these_weights_alone(tmp_path: Path) -> None:
    model = made()
    assert choice_of(tmp_path, model) == default_choice(model)
    remember(tmp_path, measured(model))
    assert choice_of(tmp_path, model) == Choice(layer=2, heads=(1,))
    assert choice_of(tmp_path, made()) == default_choice(model)
    with torch.no_grad():
        model.decoder.blocks[0].cross.key.weight.mul_(1.1)
    assert choice_of(tmp_path, model) == default_choice(model)


def test_half_precision_is_the_same_model() -> None:
    model = made()
    before = mark(model)
    assert mark(model.bfloat16()) == before
    assert mark(made()) != before


def test_a_choice_that_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    model = made()
    remember(tmp_path, measured(model, layer=3))
    with pytest.raises(AlignmentError, match=r"alignment.json: the layer to align by must be from 0 to 2, but is 3"):
        choice_of(tmp_path, model)
    for heads in ((2,), (-1,), ()):
        with pytest.raises(AlignmentError, match="heads to align by must be from 0 to 1"):
            align(model, tokenizer(), ["a"], ["b"], Choice(layer=0, heads=heads))
    (tmp_path / module.NAME).write_text("{", encoding="utf-8")
    with pytest.raises(SettingsError, match="is not valid JSON"):
        choice_of(tmp_path, model)


def test_a_model_that_does_not_look_across_is_refused() -> None:
    with pytest.raises(AlignmentError, match="must have cross-attention to align with, but this Linear has none"):
        default_choice(nn.Linear(2, 2))


def test_a_pruned_model_aligns_by_the_heads_that_it_has() -> None:
    stack = StackConfig(layers=3, width=16, heads=2, inner=16, dropout=0.0)
    config = for_tokenizer(Seq2SeqConfig(vocab=9, encoder=stack, decoder=decoder_of(stack)), tokenizer())
    model = without(Seq2Seq(config).eval(), {"decoder.blocks.0.cross": [1], "decoder.blocks.1.cross": [0, 1]})
    sides = lines()[0][:5], lines()[1][:5]
    assert default_choice(model).layer == 0  # the middle one of those with heads
    found = agreed(model, tokenizer(), *sides, to="de")
    assert (found.choice.layer, found.choice.heads) not in [(0, (1,)), (1, None), (1, (0,)), (1, (1,))]
    assert align(model, tokenizer(), *sides, default_choice(model), to="de")[0].links
