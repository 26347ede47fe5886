"""Alignment: weights equal the model's attention, tokens map to words, selections hold only for their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attent.decoding import alignment as module
from attent.decoding.alignment import (
    Alignment,
    AlignmentError,
    HeadSelection,
    MeasuredSelection,
    TokenWordMap,
    align_rows,
    compute_cross_weights,
    compute_fingerprint,
    concatenate_alignments,
    get_default_selection,
    list_selections,
    load_selection,
    map_tokens_to_words,
    match_words,
    save_measured_selection,
    select_by_agreement,
    select_weights,
)
from attent.decoding.forced_decoding import BATCH_TOKENS, EncodedPair, encode_pairs
from attent.inspection import record
from attent.models import Seq2Seq, Seq2SeqConfig, shift_right
from attent.models.config import mirror_encoder
from attent.models.pruning import remove_heads
from attent.nn import StackConfig
from attent.settings import SettingsError
from attent.text.tokenizer import Tokenizer
from attent.training.autoconfig import fit_to_tokenizer
from tests.text.corpus import lines, tokenizer
from tests.text.imported_tokenizers import marian_folder


def align_texts(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    selection: HeadSelection,
    **options: Any,
) -> list[Alignment]:
    rows = encode_pairs(model, tokenizer, sources, targets, **options)
    return align_rows(model, tokenizer, sources, targets, rows, selection, options.get("batch_tokens", BATCH_TOKENS))


STACK = StackConfig(layers=3, width=16, heads=2, ffn_width=24, dropout=0.5)
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


def build_model() -> Seq2Seq:
    return Seq2Seq(fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=STACK, decoder=mirror_encoder(STACK)), tokenizer()))


# ---- the weights -----------------------------------------------------------------------------------------------------


def test_weights_equal_the_model_attention() -> None:
    model, of = build_model().eval(), tokenizer()
    rows = encode_pairs(model, of, SOURCES, TARGETS)
    for index, weights in compute_cross_weights(model, rows, [2, 0], batch_tokens=60):
        source, target = torch.tensor([rows[index].source]), torch.tensor([rows[index].target])
        with record(model, "decoder.*.cross_attn") as trace:
            model(source, shift_right(target, model.config.start_id))
        for layer, got in zip((2, 0), weights, strict=True):
            expected = trace[f"decoder.blocks.{layer}.cross_attn"][0][0]
            assert got.shape == (2, target.shape[1], source.shape[1])
            torch.testing.assert_close(got, expected)


def test_batched_alignments_equal_single_ones_and_observers_are_removed() -> None:
    model, of = build_model(), tokenizer()
    model.train()
    choice = HeadSelection(layer=1, heads=(1,), shift=False)
    together = align_texts(model, of, SOURCES, TARGETS, choice, batch_tokens=70)
    alone = [align_texts(model, of, [s], [t], choice)[0] for s, t in zip(SOURCES, TARGETS, strict=True)]
    assert [alignment.all_links for alignment in together] == [alignment.all_links for alignment in alone]
    assert [alignment.links for alignment in together] == [alignment.links for alignment in alone]
    assert len({alignment.all_links for alignment in together}) > 3
    assert model.training
    assert not any(layer.observers for layer in module.find_cross_layers(model))


def test_shift_selects_the_output_step_or_the_next() -> None:
    weights = torch.rand(2, 4, 5)  # three tokens and the end
    assert torch.equal(select_weights(weights, HeadSelection(layer=0, heads=(1,), shift=False)), weights[1, :3])
    assert torch.equal(select_weights(weights, HeadSelection(layer=0, heads=(1,), shift=True)), weights[1, 1:])
    assert torch.equal(select_weights(weights, HeadSelection(layer=0)), weights.mean(0)[1:])


# ---- tokens to words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char"])
@pytest.mark.parametrize("text", [*ODD, *SOURCES[:3]])
def test_tokens_map_to_the_words_that_they_spell(kind: Any, text: str) -> None:
    vocabulary = tokenizer(kind).source
    (ids,) = vocabulary.encode([text.strip()])
    words = map_tokens_to_words(vocabulary, ids, text.split())
    assert len(words) == len(ids)
    spelled = [[i for i, word in zip(ids, words, strict=True) if word == index] for index in range(len(text.split()))]
    assert [vocabulary.decode(part).strip() for part in spelled] == text.split()


def test_tags_and_truncated_text_belong_to_no_word() -> None:
    of = tokenizer()
    (ids,) = of.encode_source(["two women singing"], "de")
    assert map_tokens_to_words(of.source, ids[:-1], ["two", "women", "singing"])[0] is None
    truncated = map_tokens_to_words(of.source, ids[1:4], ["two", "women", "singing"])
    assert truncated[0] == 0
    assert set(truncated) <= {0, 1, 2}


def test_an_unknown_word_keeps_its_index(tmp_path: Path) -> None:
    of = Tokenizer.load(marian_folder(tmp_path / "marian"))
    text = "a dog 日本 singing … again"
    (ids,) = of.source.encode([text])
    assert of.source.unknown in ids
    words = map_tokens_to_words(of.source, ids, text.split())
    unknown = ids.index(of.source.unknown)
    assert words[unknown] == 2
    assert words[-1] == len(text.split()) - 1
    assert words[:unknown] == sorted(word for word in words[:unknown] if word is not None)
    assert set(words) == set(range(len(text.split())))


def test_normalized_words_are_matched_between_equal_ones() -> None:
    assert match_words(["a", "x", "b", "c"], ["a", "y", "z", "b", "c"]) == [0, 1, 3, 4]
    assert match_words(["a", "x", "y", "b"], ["a", "z", "b"]) == [0, 1, 1, 2]
    assert match_words(["a", "b"], ["a", "b", "c", "d"]) == [0, 1]  # a text that was cut
    assert match_words(["a", "x", "b"], ["a", "b"]) == [0, None, 1]


def test_source_tokens_are_summed_and_target_tokens_averaged() -> None:
    pair = TokenWordMap(
        source_word_ids=[0, 0, 1, None], target_word_ids=[0, 1, 1], source_word_count=2, target_word_count=2
    )
    weights = torch.tensor([[0.2, 0.3, 0.4, 0.1], [0.0, 0.1, 0.1, 0.8], [0.0, 0.0, 0.6, 0.4]])
    got = pair.build_alignment(weights)
    assert [list(row) for row in got.weights] == [pytest.approx([0.5, 0.4]), pytest.approx([0.05, 0.35])]
    assert got.all_links == ((0, 0), (1, 1))


def test_links_of_an_even_head_are_unreliable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word of many tokens gets the most attention of an even head, and no word that of one on the end token."""
    words = TokenWordMap(
        source_word_ids=[0, 1, 1, 1, None], target_word_ids=[0, 1, 2, 3], source_word_count=2, target_word_count=4
    )
    even, nearly = [0.2] * 5, [0.19, 0.21, 0.21, 0.2, 0.19]
    at_end, distinct = [0.01, 0.0, 0.0, 0.0, 0.99], [0.6, 0.1, 0.1, 0.1, 0.1]
    alignment = words.build_alignment(torch.tensor([even, nearly, at_end, distinct]))
    assert alignment.links == ((0, 3),)
    assert alignment.unreliable_links == ((1, 0), (1, 1), (0, 2))
    assert alignment.all_links == ((1, 0), (1, 1), (0, 2), (0, 3))
    assert alignment.pharaoh == "0-3"
    assert len(alignment.weights) == 4
    single = TokenWordMap(source_word_ids=[0, None], target_word_ids=[0], source_word_count=1, target_word_count=1)
    for weight, limit, is_reliable in ((0.625, 0.25, True), (0.6249, 0.25, False), (0.55, module.MIN_SHARPNESS, True)):
        monkeypatch.setattr(module, "MIN_SHARPNESS", limit)
        assert bool(single.build_alignment(torch.tensor([[weight, 1 - weight]])).links) == is_reliable


def test_consecutive_alignments_keep_their_unreliable_links() -> None:
    first = Alignment(links=((0, 0),), unreliable_links=((1, 1),), weights=((0.9, 0.1), (0.5, 0.5)))
    second = Alignment(links=(), unreliable_links=((0, 0),), weights=((0.3,),))
    joined = concatenate_alignments([(first, 2), (second, 1)])
    assert (joined.links, joined.unreliable_links) == (((0, 0),), ((1, 1), (2, 2)))
    assert joined.weights == ((0.9, 0.1, 0.0), (0.5, 0.5, 0.0), (0.0, 0.0, 0.3))


def test_links_in_pharaoh_format() -> None:
    weights = ((0.1, 0.8, 0.1), (0.7, 0.1, 0.1), (0.1, 0.6, 0.2))
    alignment = Alignment(links=((1, 0), (0, 1), (1, 2)), weights=weights)
    assert alignment.pharaoh == "0-1 1-0 1-2"
    assert alignment.mutual_links == ((1, 0), (0, 1))  # word 0 attends to word 1 more than word 2 does


def test_pairs_without_words_have_no_links() -> None:
    model, of = build_model(), tokenizer()
    got = align_texts(
        model, of, ["a dog", "", "", "a dog"], ["", "ein Hund", "", "ein Hund"], get_default_selection(model)
    )
    assert [len(alignment.all_links) for alignment in got] == [0, 0, 0, 2]
    assert [alignment.mutual_links for alignment in got[:3]] == [(), (), ()]
    with pytest.raises(ValueError, match="target for each source"):
        select_by_agreement(model, of, ["a"], [])


def test_search_results_are_aligned_by_their_own_tokens() -> None:
    """A search may segment a word as the tokenizer never would."""
    model, of = build_model(), tokenizer()
    source = of.encode_source(["a dog"])[0]
    letters = [i for letter in "▁ein" for i in range(of.target.size) if of.target.to_pieces([i]) == [letter]]
    assert len(letters) == 4
    row = EncodedPair(source=source, target=[*letters, of.target.end], truncated=False)
    (got,) = align_rows(model, of, ["a dog"], ["ein"], [row], get_default_selection(model))
    assert [target for _, target in got.all_links] == [0]


# ---- selection -------------------------------------------------------------------------------------------------------


def plant_weights(good: HeadSelection) -> Any:
    """Replace the weights: one head aligns the words, all others attend to the first token."""

    def weights(
        model: nn.Module, rows: Sequence[EncodedPair], layers: Sequence[int], _: int = 0
    ) -> Iterator[tuple[int, Tensor]]:
        for index, row in enumerate(rows):
            planted = torch.zeros(3, 2, len(row.target), len(row.source))
            planted[..., 0] = 1.0
            for token in range(min(len(row.target), len(row.source)) - 1):
                assert good.heads
                planted[good.layer, good.heads[0], token + good.shift] = 0.0
                planted[good.layer, good.heads[0], token + good.shift, token] = 1.0
            yield index, planted[list(layers)]

    return weights


@pytest.mark.parametrize(
    "good", [HeadSelection(layer=2, heads=(1,), shift=True), HeadSelection(layer=0, heads=(0,), shift=False)]
)
def test_select_by_agreement_finds_the_aligning_head(good: HeadSelection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "compute_cross_weights", plant_weights(good))
    selection = select_by_agreement(build_model(), tokenizer(), SOURCES, SOURCES)
    assert selection.selection == good
    assert selection.agreement == pytest.approx(100)
    assert selection.sentences == len(SOURCES)
    assert select_by_agreement(build_model(), tokenizer(), SOURCES, SOURCES, max_pairs=3).sentences == 3
    with pytest.raises(AlignmentError, match="pairs with words on both sides"):
        select_by_agreement(build_model(), tokenizer(), [" "], ["a"])


def test_list_selections_has_each_step_layer_and_head_once() -> None:
    every = list_selections(build_model())
    assert len(every) == len(set(every)) == 2 * 3 * (1 + 2)
    assert get_default_selection(build_model()) in every
    assert get_default_selection(build_model()) == HeadSelection(layer=1, heads=None, shift=True)


def build_measured(model: nn.Module, layer: int = 2) -> MeasuredSelection:
    return MeasuredSelection(
        selection=HeadSelection(layer=layer, heads=(1,)), aer=20.5, sentences=50, fingerprint=compute_fingerprint(model)
    )


def test_a_saved_selection_holds_only_for_its_weights(tmp_path: Path) -> None:
    model = build_model()
    assert load_selection(tmp_path, model) == get_default_selection(model)
    save_measured_selection(tmp_path, build_measured(model))
    assert load_selection(tmp_path, model) == HeadSelection(layer=2, heads=(1,))
    assert load_selection(tmp_path, build_model()) == get_default_selection(model)
    with torch.no_grad():
        model.decoder.blocks[0].cross_attn.key.weight.mul_(1.1)
    assert load_selection(tmp_path, model) == get_default_selection(model)


def test_half_precision_has_the_same_fingerprint() -> None:
    model = build_model()
    before = compute_fingerprint(model)
    assert compute_fingerprint(model.bfloat16()) == before
    assert compute_fingerprint(build_model()) != before


def test_invalid_selections_are_rejected(tmp_path: Path) -> None:
    model = build_model()
    save_measured_selection(tmp_path, build_measured(model, layer=3))
    with pytest.raises(
        AlignmentError,
        match=r"alignment.json: the heads for alignment must .* but are layer 3",
    ):
        load_selection(tmp_path, model)
    for heads in ((2,), (-1,), ()):
        with pytest.raises(AlignmentError, match="the heads for alignment must be in one of"):
            align_texts(model, tokenizer(), ["a"], ["b"], HeadSelection(layer=0, heads=heads))
    (tmp_path / module.ALIGNMENT_FILE).write_text("{", encoding="utf-8")
    with pytest.raises(SettingsError, match="is not valid JSON"):
        load_selection(tmp_path, model)


def test_a_model_without_cross_attention_is_rejected() -> None:
    with pytest.raises(AlignmentError, match="must have cross-attention to align words, but this Linear has none"):
        get_default_selection(nn.Linear(2, 2))


def test_a_pruned_model_aligns_with_its_remaining_heads() -> None:
    stack = StackConfig(layers=3, width=16, heads=2, ffn_width=16, dropout=0.0)
    config = fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=stack, decoder=mirror_encoder(stack)), tokenizer())
    model = remove_heads(
        Seq2Seq(config).eval(), {"decoder.blocks.0.cross_attn": [1], "decoder.blocks.1.cross_attn": [0, 1]}
    )
    sides = lines()[0][:5], lines()[1][:5]
    assert get_default_selection(model).layer == 0  # the middle one of those with heads
    selection = select_by_agreement(model, tokenizer(), *sides, to="de")
    assert (selection.selection.layer, selection.selection.heads) not in [(0, (1,)), (1, None), (1, (0,)), (1, (1,))]
    assert align_texts(model, tokenizer(), *sides, get_default_selection(model), to="de")[0].all_links
