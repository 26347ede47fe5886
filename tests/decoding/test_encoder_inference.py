"""What readers say is what `transformers` says of the same weights; it depends on a text alone, not on its neighbours;
and what cannot be is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attent
from attent.decoding.encoder_inference import Predictor, PredictorError
from attent.decoding.mask_tokens import MaskedText, MaskTokens
from attent.models import Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import StackConfig
from attent.text.tokenizer import Tokenizer
from attent.text.vocabulary import SentencePieceVocabulary
from tests.decoding.encoder_models import bert_folder, causal_lm, encoder, sentencepiece, span_model, vision_model
from tests.text.imported_tokenizers import sentencepiece_model

TEXTS = ["The [MASK] sat.", "A dog [MASK] in the [MASK], and the bird sang!", "un[MASK]", "[MASK]", "the dog ([MASK])"]
PAIRS = [("the cat sat", "a dog ran in the park ."), ("a", "b"), ("the bird sang on the tree", "!")]


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return sentencepiece()


# ---- beside transformers ---------------------------------------------------------------------------------------------


def test_masks_are_filled_as_transformers_would(tmp_path: Path) -> None:
    import transformers

    folder = bert_folder(tmp_path / "bert", "MaskedLM")
    theirs = transformers.BertForMaskedLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reader = Predictor.load(folder, device="cpu")
    for text, found in zip(TEXTS, reader.fill(TEXTS, top_k=3), strict=True):
        row = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            likely = theirs(**row).logits[0].softmax(-1)
        places = (row.input_ids[0] == tokenizer.mask_token_id).nonzero()[:, 0].tolist()
        assert len(found.masks) == len(places)
        for place, guesses in zip(places, found.masks, strict=True):
            words = likely[place, 5:]  # the special ones are no words
            best = words.topk(3)
            assert [guess.probability for guess in guesses] == pytest.approx(best.values.tolist(), abs=1e-5)
            names = [tokenizer.convert_ids_to_tokens(i + 5) for i in best.indices.tolist()]
            assert [guess.word for guess in guesses] == [name.removeprefix("##") for name in names]


@pytest.mark.parametrize("texts", [["the cat sat", "a", "a dog ran in the park , and sang"], PAIRS])
def test_texts_and_pairs_are_classified_as_transformers_would(tmp_path: Path, texts: list[str]) -> None:
    import transformers

    names = {0: "bad", 1: "good", 2: "odd"}
    folder = bert_folder(tmp_path / "bert", "SequenceClassification", id2label=names)
    theirs = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text, found in zip(texts, Predictor.load(folder, device="cpu").classify(texts), strict=True):
        row = tokenizer(*([text] if isinstance(text, str) else text), return_tensors="pt")
        with torch.no_grad():
            likely = theirs(**row).logits[0].softmax(-1)
        assert found.probabilities == pytest.approx({names[i]: float(likely[i]) for i in names}, abs=1e-5)
        assert found.label == names[int(likely.argmax())]


def test_vectors_are_the_mean_or_the_first_of_transformers_states(tmp_path: Path) -> None:
    import transformers

    folder = bert_folder(tmp_path / "bert", "MaskedLM")
    theirs = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reader = Predictor.load(folder, device="cpu")
    texts = ["the cat sat on the mat .", "a", ""]
    means, firsts = reader.embed(texts), reader.embed(texts, pooling="class", normalize=True)
    for text, mean, first in zip(texts, means, firsts, strict=True):
        with torch.no_grad():
            states = theirs(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        assert torch.allclose(mean, states.mean(0), atol=1e-5)
        assert torch.allclose(first, states[0] / states[0].norm(), atol=1e-5)


# ---- our own ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("The [MASK] sat.", ["▁The", "<mask>", "▁sat", "."]),
        ("The <mask>.", ["▁The", "<mask>", "."]),
        ("[MASK] sat", ["<mask>", "▁sat"]),
        ("the c[MASK]", ["▁the", "▁c", "<mask>"]),
        ("[MASK][MASK] cat", ["<mask>", "<mask>", "▁cat"]),
    ],
)
def test_a_mask_stands_for_a_word_and_its_space(ours: Tokenizer, text: str, pieces: list[str]) -> None:
    reader = Predictor(encoder(ours), ours)
    row = reader._encode_masked_text(reader.mask_tokens.parse(text), 1)
    assert ours.source.to_pieces(row.token_ids) == ["<s>", *pieces, "</s>"]


def test_what_stands_around_a_mask_is_as_with_a_word_in_its_place(ours: Tokenizer) -> None:
    reader = Predictor(encoder(ours), ours)
    whole = ours.source.encode(["The cat sat on the mat."])[0]
    row = reader._encode_masked_text(reader.mask_tokens.parse("The [MASK] sat on the mat."), 1)
    assert row.mask_positions == (2,)
    assert [*row.token_ids[1:2], whole[1], *row.token_ids[3:-1]] == whole


def test_where_every_letter_is_a_piece_a_mask_is_a_letter() -> None:
    letters = sentencepiece("char")
    reader = Predictor(encoder(letters), letters)
    row = reader._encode_masked_text(reader.mask_tokens.parse("a c[MASK]t"), 1)
    assert letters.source.to_pieces(row.token_ids) == ["<s>", "▁", "a", "▁", "c", "<mask>", "t", "</s>"]


@pytest.mark.parametrize(
    ("piece", "text", "filled"),
    [
        ("▁cat", "The [MASK] sat", "The cat sat"),
        ("▁cat", "[MASK] sat", "cat sat"),
        (".", "The dog [MASK]", "The dog."),
        ("▁cat", "The c[MASK]", "The c cat"),
    ],
)
def test_words_are_written_into_the_text_as_they_decode(ours: Tokenizer, piece: str, text: str, filled: str) -> None:
    reader = Predictor(encoder(ours), ours)
    token = next(i for i in range(ours.source.size) if ours.source.to_pieces([i]) == [piece])
    words = reader.mask_tokens.parse(text)
    assert words.fill_masks([reader._make_word(token)]) == filled
    row = reader._encode_masked_text(words, 1)
    assert ours.source.decode([token if i == ours.source.mask else i for i in row.token_ids]) == filled


def test_no_guess_is_the_frame_or_the_mask_itself(ours: Tokenizer) -> None:
    model = encoder(ours)
    assert model.masked_lm is not None
    assert model.masked_lm.output.bias is not None
    with torch.no_grad():
        model.masked_lm.output.bias[[*range(5), ours.source.mask]] = 100.0
    found = Predictor(model, ours).fill(["The [MASK]"], top_k=4)[0]
    assert not {guess.word for guess in found.masks[0]} & {"<s>", "</s>", "<mask>", "<pad>", "<unk>"}
    assert all(guess.probability < 1e-6 for guess in found.masks[0])  # those have all the rest


def test_what_is_said_of_a_text_does_not_depend_on_its_neighbours(ours: Tokenizer) -> None:
    model = encoder(ours, labels=("good", "bad"))
    texts = ["The cat sat.", "A", "A dog ran in the park, and the bird sang.", "", "the mat"]
    alone, together = Predictor(model, ours, batch_tokens=1), Predictor(model, ours)
    for one, other in zip(alone.classify(texts), together.classify(texts), strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)
    assert torch.allclose(alone.embed(texts), together.embed(texts), atol=1e-5)
    assert torch.allclose(together.embed(texts[::-1]), together.embed(texts).flip(0), atol=1e-5)
    masked = ["The [MASK] sat.", "[MASK]", "A dog [MASK] in the [MASK] and sang"]
    for one, other in zip(alone.fill(masked), together.fill(masked), strict=True):
        assert [[guess.word for guess in mask] for mask in one.masks] == [
            [guess.word for guess in mask] for mask in other.masks
        ]


def test_long_texts_are_cut_and_told_once(ours: Tokenizer) -> None:
    said: list[str] = []
    reader = Predictor(encoder(ours, labels=("good", "bad")), ours, notify=said.append)
    long = "The cat sat on the mat. " * 20
    assert len(reader.classify([long, "A cat"])) == 2
    assert len(reader.classify([long, "A cat"])) == 2
    assert reader.embed([long]).shape == (1, 16)
    assert said[0] == "truncated 1 of 2 texts to the model's 32 positions"
    assert len(said) == 2
    cut = reader._encode_pair(*ours.source.encode([long, "A dog ran in the park."]))[1]
    assert len(cut.token_ids) == 32
    assert ours.source.decode(cut.token_ids).endswith("A dog ran in the park.")
    reader.fill(["A [MASK] ran. " + long])
    with pytest.raises(PredictorError, match="text 2 must have its masks among the first 32 tokens"):
        reader.fill(["A [MASK]", long + "[MASK]"])


def test_any_model_of_text_gives_vectors(ours: Tokenizer) -> None:
    model = causal_lm(ours)
    vectors = Predictor(model, ours).embed(["The cat sat.", "a"])
    ids = torch.tensor([[*ours.source.prefix_ids, *ours.source.encode(["The cat sat."])[0]]])
    assert torch.allclose(vectors[0], model.compute_states(ids)[0].mean(0), atol=1e-5)
    with pytest.raises(PredictorError, match="has no class token"):
        Predictor(model, ours).embed(["a"], pooling="class")
    stack = StackConfig(layers=1, width=16, heads=2, ffn_width=32)
    config = Seq2SeqConfig(vocab=ours.source.size, encoder=stack, decoder=mirror_encoder(stack))
    translator = attent.build(config).eval()
    assert Predictor(translator, ours).embed(["The cat sat.", "a"]).shape == (2, 16)
    assert Predictor(translator, ours).embed([]).shape == (0, 16)


# ---- images ----------------------------------------------------------------------------------------------------------


def test_images_are_classified_from_files_and_from_bytes(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    model = vision_model()
    model.save(tmp_path / "vision")
    reader = attent.Predictor.load(tmp_path / "vision", device="cpu")
    pixels = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    for number, one in enumerate(pixels):
        image.fromarray(one.permute(1, 2, 0).numpy()).save(tmp_path / f"{number}.png")
    found = reader.classify([str(tmp_path / "0.png"), tmp_path / "1.png", pixels[2]])
    likely = model(model.normalize(pixels)).softmax(-1)
    for one, row in zip(found, likely.tolist(), strict=True):
        assert one.probabilities == pytest.approx(dict(zip(("cat", "dog", "bird"), row, strict=True)), abs=1e-5)
    vectors = reader.embed([pixels[0]], pooling="class")
    assert torch.allclose(vectors, model.compute_states(model.normalize(pixels[:1]))[:, 0], atol=1e-5)
    with pytest.raises(PredictorError, match="an image must be a path"):
        reader.classify([pixels[0].float()])


# ---- what cannot be --------------------------------------------------------------------------------------------------


def test_a_model_without_the_head_says_how_to_get_one(ours: Tokenizer) -> None:
    bare = Predictor(encoder(ours, masked=False), ours, name="runs/bare")
    with pytest.raises(PredictorError, match=r"runs/bare: must be a masked language model.*--task mlm"):
        bare.fill(["The [MASK]"])
    with pytest.raises(
        PredictorError, match=r"runs/bare: must have learned to choose.*--task classify --from runs/bare"
    ):
        bare.classify(["The cat"])
    with pytest.raises(PredictorError, match="must have learned to tell masked words"):
        Predictor(vision_model(), None).fill(["The [MASK]"])
    with pytest.raises(PredictorError, match="must have learned to choose"):
        Predictor(causal_lm(ours), ours).classify(["The cat"])


def test_texts_that_are_none_are_told(ours: Tokenizer) -> None:
    reader = Predictor(encoder(ours, labels=("a", "b")), ours)
    with pytest.raises(PredictorError, match="text 2 must have a mask"):
        reader.fill(["The [MASK]", "The cat"])
    with pytest.raises(PredictorError, match="item 1 must be a text, or a pair of texts, but is a PosixPath"):
        reader.classify([Path("x.png")])
    with pytest.raises(PredictorError, match="`top` must be 1 or more"):
        reader.fill(["The [MASK]"], top_k=0)
    with pytest.raises(PredictorError, match="`pooling` must be mean or class"):
        reader.embed(["a"], pooling="max")  # type: ignore[arg-type]
    with pytest.raises(PredictorError, match="must be an encoder to read pairs"):
        Predictor(causal_lm(ours), ours).embed([("a", "b")])
    assert MaskedText(("a",)).fill_masks([]) == "a"


# ---- spans -----------------------------------------------------------------------------------------------------------


SENTINELS = ("<extra_id_0>", "<extra_id_1>", "<extra_id_2>")


@pytest.fixture(scope="module")
def spanned() -> Tokenizer:
    return sentencepiece(controls=SENTINELS)


@pytest.mark.parametrize(
    "text",
    ["The <extra_id_0> sat on the <extra_id_1>.", "The [MASK] sat on the <mask>.", " The [MASK] sat on the [MASK]. "],
)
def test_a_model_of_spans_fills_them_by_writing(spanned: Tokenizer, text: str) -> None:
    found = Predictor(span_model(spanned), spanned).fill([text], top_k=2)[0]
    assert found.text == "The cat sat on the mat."
    assert [guesses[0].word for guesses in found.masks] == ["cat", "mat"]
    assert found.masks[0][0].probability > 0.5


def test_sentinels_are_read_as_in_training(spanned: Tokenizer) -> None:
    """A span that is taken out of the ids of a text takes its space along."""
    reader, of = Predictor(span_model(spanned), spanned), spanned.source
    whole = of.encode(["The cat sat on the mat."])[0]
    place = of.to_pieces(whole).index("▁cat")
    assert reader.encode_masked("The <extra_id_2> sat on the mat.") == [
        *whole[:place], of.sentinels[2], *whole[place + 1 :]
    ]  # fmt: skip
    assert reader.encode_masked("The [MASK] <extra_id_0> [MASK]")[1:] == [of.sentinels[i] for i in (1, 0, 2)]
    with pytest.raises(ValueError, match="must have at most 3 masks.*but has 4"):
        reader.fill(["[MASK]" * 4])


def test_what_others_have_trained_is_cut_at_its_marks() -> None:
    """An unknown letter is no mark, though a vocabulary may have one piece for all that it does not know."""
    vocabulary = SentencePieceVocabulary(sentencepiece_model(), extra_ids=2)
    ids = MaskTokens(vocabulary).encode(MaskTokens(vocabulary).parse("☃ <extra_id_0> ☃"))
    assert ids.count(vocabulary.sentinels[0]) == 1
    assert ids.count(vocabulary.unknown) == 2


# ---- spaces around ---------------------------------------------------------------------------------------------------


def test_spaces_around_a_text_change_nothing_as_training_has_met_none(ours: Tokenizer) -> None:
    reader = Predictor(encoder(ours, labels=("good", "bad")), ours)
    wide, plain = "  The cat [MASK]\t", "The cat [MASK]"
    assert torch.equal(reader.embed([wide]), reader.embed([plain]))
    assert reader.classify([wide, (wide, wide)]) == reader.classify([plain, (plain, plain)])
    assert reader.fill([wide])[0].masks == reader.fill([plain])[0].masks
    language = Predictor(causal_lm(ours), ours)
    assert not torch.equal(language.embed([wide]), language.embed([plain]))  # to a writer, spaces are text


def test_one_text_is_not_taken_for_its_letters(ours: Tokenizer) -> None:
    reader = Predictor(encoder(ours, labels=("bad", "good")), ours)
    for use in (reader.classify, reader.embed):
        with pytest.raises(PredictorError, match=r"must be a list of texts or images.*put it in \[ \]"):
            use("my lord")
