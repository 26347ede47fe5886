"""translate_texts keeps the order, batches change nothing, and the model stays unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.translator import translate_texts
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import LearnedConfig, StackConfig
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer
from attent.text.vocabulary import PAD

TEXTS = ["a man rides", "", "bad dad", "a", "the red car is here", " \t", "a man rides", "zzz", "  bad dad "]
STACK = StackConfig(layers=1, width=16, heads=2, ffn_width=16, dropout=0.5)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(
        ["a man rides the red car"] * 9, ["ein Mann faehrt"] * 9, TokenizerConfig(kind="char"), ["de", "fr"]
    )


@pytest.fixture
def model(tokenizer: Tokenizer) -> Seq2Seq:
    return build_random_model(tokenizer, STACK)


def build_random_model(tokenizer: Tokenizer, stack: StackConfig) -> Seq2Seq:
    """A random float64 model with large weights: targets differ by source, and rounding decides nothing."""
    config = Seq2SeqConfig(vocab=tokenizer.source.size, encoder=stack, decoder=mirror_encoder(stack))
    model = Seq2Seq(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    return model


def test_batched_translations_equal_single_ones(model: Seq2Seq, tokenizer: Tokenizer) -> None:
    together = translate_texts(model, tokenizer, TEXTS, max_length=12)
    assert together == [translate_texts(model, tokenizer, [text], max_length=12)[0] for text in TEXTS]
    assert together[0] == together[6] != together[2] == together[8]
    assert len(set(together)) >= 4


@pytest.mark.parametrize("batch_tokens", [40, 100, 10_000])
@pytest.mark.parametrize("beam_size", [1, 3])
def test_the_batch_size_changes_nothing(
    model: Seq2Seq, tokenizer: Tokenizer, batch_tokens: int, beam_size: int
) -> None:
    expected = translate_texts(model, tokenizer, TEXTS, max_length=12, beam_size=beam_size)
    kinds = {"max_length": 12, "beam_size": beam_size, "batch_tokens": batch_tokens}
    assert translate_texts(model, tokenizer, TEXTS, **kinds) == expected


def test_empty_texts_never_reach_the_model(tokenizer: Tokenizer) -> None:
    assert translate_texts(Unused(tokenizer), tokenizer, ["", "  ", "\n"], to="de") == ["", "", ""]
    assert translate_texts(Unused(tokenizer), tokenizer, []) == []


class Unused(Seq2Seq):
    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(Seq2SeqConfig(vocab=tokenizer.source.size, encoder=STACK, decoder=mirror_encoder(STACK)))

    def init_decoder_state(self, *arguments: object, **more: object) -> object:  # type: ignore[override]
        raise AssertionError("not needed")


def test_batches_respect_batch_tokens(model: Seq2Seq, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    init_decoder_state = model.init_decoder_state
    monkeypatch.setattr(
        model,
        "init_decoder_state",
        lambda source, *a, **k: [shapes.append(tuple(source.shape)), init_decoder_state(source, *a, **k)][1],
    )
    texts = ["a man"[: 1 + n % 5] * (1 + n % 7) + " car" * (n % 3) for n in range(60)]
    translate_texts(model, tokenizer, texts, batch_tokens=200, beam_size=2, max_length=3)
    assert sum(rows for rows, _ in shapes) == len({text.strip() for text in texts})
    assert all(rows * width * 2 <= 200 for rows, width in shapes)
    assert len(shapes) < 40
    assert [width for _, width in shapes] == sorted((width for _, width in shapes), reverse=True)


def test_the_model_is_unchanged(model: Seq2Seq, tokenizer: Tokenizer) -> None:
    model.train()
    model.decoder.eval()  # a part that is not trained
    before = {name: part.training for name, part in model.named_modules()}
    first = translate_texts(model, tokenizer, TEXTS, max_length=9)
    assert translate_texts(model, tokenizer, TEXTS, max_length=9) == first  # no dropout
    assert {name: part.training for name, part in model.named_modules()} == before
    with pytest.raises(SearchCancelled):
        translate_texts(model, tokenizer, TEXTS, should_stop=lambda: True)
    assert {name: part.training for name, part in model.named_modules()} == before
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_should_stop_is_polled(model: Seq2Seq, tokenizer: Tokenizer) -> None:
    calls = []
    with pytest.raises(SearchCancelled):
        translate_texts(
            model,
            tokenizer,
            TEXTS,
            batch_tokens=2,
            max_length=2,
            should_stop=lambda: bool(calls.append(0)) or len(calls) == 3,
        )
    assert len(calls) == 3


def test_a_source_longer_than_the_positions_is_split_and_each_part_has_tag_and_end(tokenizer: Tokenizer) -> None:
    model = build_random_model(tokenizer, replace(STACK, positions=LearnedConfig(max_length=10)))
    read: list[list[int]] = []
    model.source_embedding.register_forward_pre_hook(lambda part, arguments: read.extend(arguments[0].tolist()))
    translate_texts(model, tokenizer, ["a man rides the red car"], to="fr")
    of = tokenizer.source
    sources = [list(row) for row in {tuple(row) for row in read} if row[0] == of.get_tag_id("fr")]
    assert len(sources) > 2
    assert all(len(row) <= 10 and of.end in row for row in sources)
    letters = sorted("".join(of.decode(row[1 : row.index(of.end)]) for row in sources).replace(" ", ""))
    assert letters == sorted("amanridestheredcar")


def test_the_target_language_is_an_input(model: Seq2Seq, tokenizer: Tokenizer) -> None:
    german, french = (translate_texts(model, tokenizer, TEXTS, to=to, max_length=12) for to in ("de", "fr"))
    assert german != french


def test_padding_is_never_generated(tokenizer: Tokenizer) -> None:
    config = Seq2SeqConfig(
        vocab=tokenizer.source.size, encoder=STACK, decoder=mirror_encoder(STACK), tie_output=False, output_bias=True
    )
    model, letter = Seq2Seq(config), tokenizer.target.encode(["a"])[0][-1]
    with torch.no_grad():
        model.output.weight.zero_()
        model.output.bias[letter] = 50
        model.output.bias[[PAD, config.start_id]] = 60  # likelier than anything else
    assert translate_texts(model, tokenizer, ["man"], max_length=4, beam_size=1) == ["aaaa"]
    assert translate_texts(model, tokenizer, ["man"], max_length=4, beam_size=2) == ["aaa"]  # and its end


def test_translation_works_under_autocast(model: Seq2Seq, tokenizer: Tokenizer) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert len(translate_texts(model.float(), tokenizer, TEXTS, max_length=9)) == len(TEXTS)


def test_a_tokenizer_of_another_model_is_rejected(tokenizer: Tokenizer) -> None:
    config = Seq2SeqConfig(vocab=tokenizer.source.size - 1, encoder=STACK, decoder=mirror_encoder(STACK))
    with pytest.raises(ValueError, match=r"the tokenizer of the source must have at most the model's"):
        translate_texts(Seq2Seq(config), tokenizer, ["a"])


@pytest.mark.parametrize("changes", [{"max_length": 0}, {"beam_size": 0}])
def test_invalid_options_are_rejected(model: Seq2Seq, tokenizer: Tokenizer, changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        translate_texts(model, tokenizer, ["a"], **changes)
