"""M2M-100, NLLB, mBART and BART: tokenizers, language tokens, search and fine-tuning match `transformers`."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models as tokenizer_models
from tokenizers import pre_tokenizers, trainers

import attent
from attent.cli import main
from attent.decoding.engines.ctranslate2 import CTranslate2Engine
from attent.decoding.forced_decoding import score_targets
from attent.decoding.loading import load_tokenizer
from attent.decoding.options import SearchOptions, SearchRequest
from attent.decoding.translator import Translator
from attent.models import Seq2Seq
from attent.text.language_tags import find_language, find_nearest_languages
from attent.text.tokenizer import TokenizerError
from tests.interop.families import BART_CLASSES, transformers

WORDS = "the a man dog rides bike old girl der Hund fährt Rad ein alter Mann Straße 123 , . ! ? über schön Haus".split()
SENTENCES = [" ".join(random.Random(seed).choices(WORDS, k=1 + seed % 12)) for seed in range(300)]
NASTY = [
    "", " ", "  two  spaces ", "a\tb\nc", "naïve café", "ﬁne ①", "中文 한국어", "\u200bzero\u00a0width",
    "👩\u200d👧 emoji", "a" * 300, "▁underscore", "ÀÉÎ", "\u0301combining", "1,234.50 %", "RTL שלום",
]  # fmt: skip
MADE_UP = 8  # ids without a piece at the end of M2M-100's vocabulary
LIMIT = 16


def save_m2m_tokenizer(folder: Path) -> Any:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, vocab_size=120, model_type="bpe", minloglevel=2
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *map(processor.id_to_piece, range(3, processor.get_piece_size()))]
    folder.mkdir()
    (folder / "sentencepiece.bpe.model").write_bytes(model.getvalue())
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    tokenizer = transformers.M2M100Tokenizer(folder / "vocab.json", folder / "sentencepiece.bpe.model")
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_nllb_tokenizer(folder: Path) -> Any:
    trained = FastTokenizer(tokenizer_models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trained.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=150, special_tokens=special))
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = transformers.NllbTokenizer(vocab=model["vocab"], merges=merges)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_mbart_tokenizer(folder: Path) -> Any:
    pieces = sorted({f"▁{word}" for word in WORDS} | set("".join(WORDS)) | {"▁"})
    scored = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((piece, -float(len(piece))) for piece in pieces)]
    tokenizer = transformers.MBart50Tokenizer(vocab=scored)
    tokenizer.save_pretrained(folder)
    return tokenizer


TOKENIZERS = {
    "m2m_100": (save_m2m_tokenizer, "en", "de"),
    "nllb": (save_nllb_tokenizer, "eng_Latn", "deu_Latn"),
    "mbart": (save_mbart_tokenizer, "en_XX", "de_DE"),
}
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def save_model(name: str, folder: Path, seed: int = 0) -> tuple[Any, Any]:
    """Save a random model with its tokenizer, as `transformers` does."""
    tokenizer = TOKENIZERS[name][0](folder)
    config_class, model_class = BART_CLASSES["m2m_100" if name == "nllb" else name]
    torch.manual_seed(seed)
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48)
    size = len(tokenizer) + MADE_UP + (100 if name == "m2m_100" else 0)
    config = config_class(
        vocab_size=size,
        d_model=32,
        max_position_embeddings=64,
        decoder_start_token_id=2,
        dropout=0.0,
        tie_word_embeddings=False,
        **sizes,
    )
    model = model_class(config).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.copy_(3 * torch.randn(weight.shape) * weight.shape[1] ** -0.5)
        model.lm_head.weight[2] *= 3  # so that some targets end
    model.save_pretrained(folder)
    return model, tokenizer


@every_tokenizer
def test_token_ids_match_transformers(name: str, tmp_path: Path) -> None:
    save, src, tgt = TOKENIZERS[name]
    theirs, folder = save(tmp_path / "model"), tmp_path / "model"
    ours = load_tokenizer(folder, src, tgt)
    texts = [*SENTENCES[:50], *NASTY]
    theirs.src_lang, theirs.tgt_lang = src, tgt
    assert ours.encode_source(texts) == theirs(texts)["input_ids"]
    assert ours.encode_target(texts) == theirs(text_target=texts)["input_ids"]
    rows = [row[1:] for row in ours.encode_target(SENTENCES[:50])]  # M2M100Tokenizer would print the language
    assert ours.target.decode_batch(rows) == theirs.batch_decode(rows, skip_special_tokens=True)


def save_mbart_pieces(folder: Path, **config: Any) -> Any:
    """Save what mBART-50 is published with, its SentencePiece model; return transformers' tokenizer of it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, vocab_size=60, normalization_rule_name="identity",
        minloglevel=2,
    )  # fmt: skip
    folder.mkdir()
    (folder / "sentencepiece.bpe.model").write_bytes(model.getvalue())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(len(processor))]
    return transformers.MBart50Tokenizer(vocab=pieces, src_lang="en_XX", tgt_lang="de_DE")


def test_mbart_is_read_from_its_sentencepiece_model(tmp_path: Path) -> None:
    theirs, ours = save_mbart_pieces(tmp_path / "model"), load_tokenizer(tmp_path / "model", "en", "deu_Latn")
    texts = [*SENTENCES[:50], *(text for text in NASTY if text == text.strip() and "▁" not in text)]
    assert ours.source.size == len(theirs)
    assert ours.encode_source(texts) == theirs(texts)["input_ids"]
    assert ours.encode_target(texts) == theirs(text_target=texts)["input_ids"]
    assert ours.target.decode_batch(ours.encode_target(SENTENCES[:50])) == SENTENCES[:50]
    save_mbart_pieces(tmp_path / "old", tokenizer_class="MBartTokenizer")
    with pytest.raises(TokenizerError, match="mBART-25"):
        load_tokenizer(tmp_path / "old", "en", "de")
    save_mbart_pieces(tmp_path / "m2m", additional_special_tokens=["__en__"])
    with pytest.raises(TokenizerError, match=r"vocab\.json: is missing"):
        load_tokenizer(tmp_path / "m2m", "en", "de")


@every_tokenizer
def test_special_tokens_in_a_text_are_text(name: str, tmp_path: Path) -> None:
    save, src, tgt = TOKENIZERS[name]
    save(tmp_path / "model")
    ours = load_tokenizer(tmp_path / "model", src, tgt)
    (row,) = ours.encode_source(["</s> __de__ deu_Latn de_DE"])
    assert row.count(ours.source.end) == 1
    assert ours.target_prefix[0] not in row


@every_tokenizer
@pytest.mark.parametrize("beam_size", [1, 4])
def test_search_with_a_given_language_matches_generate(name: str, beam_size: int, tmp_path: Path) -> None:
    model, tokenizer = save_model(name, tmp_path / "model")
    _, src, tgt = TOKENIZERS[name]
    translator = Translator.load(tmp_path / "model", src=src, tgt=tgt, engine="torch")
    translator.model.double()
    tokenizer.src_lang = src
    unused = range(translator.tokenizer.target.size, model.config.vocab_size)
    options: dict[str, Any] = {"early_stopping": "never", "length_penalty": 1.0} if beam_size > 1 else {}
    expected = []
    for text in SENTENCES[:25]:
        generated = model.generate(
            **tokenizer(text, return_tensors="pt"),
            forced_bos_token_id=translator.tokenizer.target_prefix[0],
            num_beams=beam_size,
            do_sample=False,
            max_new_tokens=LIMIT,
            forced_eos_token_id=None,
            renormalize_logits=True,
            bad_words_ids=[[1], [3], *([i] for i in unused)],  # padding, unknown
            **options,
        )
        expected.append([token for token in generated[0, 1:].tolist() if token != 1])
    search = SearchOptions(beam_size=beam_size, length_penalty=1.0, max_length=LIMIT - 1)
    found = translator.translate(SENTENCES[:25], search, prevent_loops=False)
    rows = [[*each.token_ids, *([2] if each.is_finished else [])] for each in found]
    # At the maximum length `transformers` ranks truncated hypotheses among finished ones, attent ranks them last.
    comparable = [i for i, row in enumerate(expected) if row[-1] == 2 or beam_size == 1]
    assert [rows[i] for i in comparable] == [expected[i] for i in comparable]
    assert len(comparable) >= 3
    assert len({tuple(row) for row in rows}) > 10


def test_a_score_leaves_the_given_language_out(tmp_path: Path) -> None:
    save_model("nllb", tmp_path / "model")
    translator = Translator.load(tmp_path / "model", src="en", tgt="de", engine="torch")
    (found,) = translator.translate(SENTENCES[:1])
    assert isinstance(translator.model, Seq2Seq)
    (scores,) = score_targets(translator.model, translator.tokenizer, SENTENCES[:1], [found.text])
    if [*found.tokens[1:]] == [*scores.tokens[:-1]]:  # the text may be segmented otherwise
        assert sum(scores.log_probs) == pytest.approx(found.log_prob, abs=1e-3)
    assert scores.tokens[0] != "deu_Latn"


@every_tokenizer
def test_ctranslate2_finds_the_same_translations(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path / "model")
    translator = Translator.load(tmp_path / "model", src="en", tgt="de", engine="torch")
    tokenizer, options = translator.tokenizer, SearchOptions(beam_size=4, max_length=LIMIT)
    assert isinstance(translator.model, Seq2Seq)
    engine = CTranslate2Engine(translator.model, tokenizer, use_cache=False, compute_type="float32")
    requests = [
        SearchRequest(source_ids=row, prefix_ids=tokenizer.target_prefix, max_length=LIMIT)
        for row in tokenizer.encode_source(SENTENCES[:30])
    ]
    assert engine.find_unsupported_reason(options, requests) is None
    found, expected = dict(engine.search(requests, options)), translator.search(requests, options)
    finished = [i for i, hypotheses in enumerate(expected) if hypotheses[0].is_finished]
    assert len(finished) >= 5
    for i in finished:
        assert found[i][0].token_ids == expected[i][0].token_ids
        assert found[i][0].score == pytest.approx(expected[i][0].score, abs=1e-3)


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ("en", ["eng_Latn"]), ("eng", ["eng_Latn"]), ("eng_Latn", ["eng_Latn"]), ("en-Latn", ["eng_Latn"]),
        ("tw", ["twi_Latn"]), ("ak", ["aka_Latn"]), ("zh", ["zho_Hans", "zho_Hant"]), ("zh-Hant", ["zho_Hant"]),
        ("xx", []), ("ar", ["arb_Arab"]), ("en_XX", ["eng_Latn"]), ("en-US", ["eng_Latn"]), (">>deu<<", ["deu_Latn"]),
        ("zh-TW", ["zho_Hant"]), ("zh-CN", ["zho_Hans"]), ("de-Cyrl", []),
    ],
)  # fmt: skip
def test_languages_in_any_notation(requested: str, expected: list[str]) -> None:
    known = ["aka_Latn", "arb_Arab", "deu_Latn", "eng_Latn", "twi_Latn", "zho_Hans", "zho_Hant"]
    assert find_language(requested, known) == expected


@pytest.mark.parametrize(
    ("known", "requested", "expected"),
    [
        (["de", "en", "no", "ns", "ps"], ["eng_Latn", "de_DE", ">>deu<<", "nb", "nso", "pbt_Arab"],
         ["en", "de", "de", "no", "ns", "ps"]),
        (["de_DE", "pt_XX", "zh_CN"], ["deu_Latn", "de-AT", "pt-BR", "zho_Hans"], ["de_DE", "de_DE", "pt_XX", "zh_CN"]),
        (["pt_PT", "pt_BR"], ["pt-BR", "por_PT"], ["pt_BR", "pt_PT"]),
    ],
)  # fmt: skip
def test_languages_of_models_with_other_notations(known: list[str], requested: list[str], expected: list[str]) -> None:
    assert [find_language(tag, known) for tag in requested] == [[tag] for tag in expected]
    assert find_language("zh-TW", known) == []


def test_nearest_languages_are_those_of_the_language_or_of_a_similar_name() -> None:
    known = ["deu_Latn", "eng_Latn", "srp_Cyrl", "twi_Latn"]
    assert find_nearest_languages("sr-Latn", known) == ["srp_Cyrl"]
    assert find_nearest_languages("German", known)[0] == "deu_Latn"
    assert find_nearest_languages("twii", known)[0] == "twi_Latn"


@pytest.mark.parametrize(
    ("src", "tgt", "words"),
    [(None, None, ("languages", "--src")), ("en", "qq", ("`qq`",)), ("en", "zh", ("zho_Hans or zho_Hant",))],
)
def test_missing_and_unknown_languages_are_refused(
    src: str | None, tgt: str | None, words: tuple[str, ...], tmp_path: Path
) -> None:
    save_nllb_tokenizer(tmp_path / "model")
    with pytest.raises(TokenizerError) as error:
        load_tokenizer(tmp_path / "model", src, tgt)
    assert all(word in str(error.value) for word in words)


def test_fine_tuning_keeps_the_languages(tmp_path: Path) -> None:
    save_model("nllb", tmp_path / "model")
    corpus = tmp_path / "corpus.tsv"
    corpus.write_text("".join(f"{a}\t{b}\n" for a, b in zip(SENTENCES[:120], SENTENCES[120:240], strict=True)))
    attent.train(
        corpus, out=tmp_path / "run", src="en", tgt="de", init_from=str(tmp_path / "model"), steps=2, device="cpu"
    )
    tokenizer = load_tokenizer(tmp_path / "run")
    assert tokenizer.languages == ("eng_Latn", "deu_Latn")
    assert Translator.load(tmp_path / "run").translate(["the man"])[0].token_ids[:1] == tokenizer.target_prefix


def test_bart_texts_begin_with_its_start_token(tmp_path: Path) -> None:
    trained = FastTokenizer(tokenizer_models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=150, special_tokens=special))
    model = json.loads(trained.to_str())["model"]
    theirs = transformers.BartTokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    texts = [*SENTENCES[:20], *NASTY]
    assert ours.encode_source(texts) == theirs(texts)["input_ids"]
    assert ours.target_prefix == (theirs.bos_token_id,)


def test_commands_take_the_languages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model("nllb", tmp_path / "model")
    source, test_set = tmp_path / "source.txt", tmp_path / "test.tsv"
    source.write_text("the man\n")
    test_set.write_text("the man\tder Mann\n")
    languages, model = ["--src", "en", "--tgt", "de"], str(tmp_path / "model")
    assert main(["translate", model, str(source), *languages]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert main(["score", model, "--data", str(test_set), *languages]) == 0
    assert main(["look", model, "the man", *languages, "--output", str(tmp_path / "look.html")]) == 0
    assert "deu_Latn" in (tmp_path / "look.html").read_text()
    assert main(["convert", model, str(tmp_path / "own"), "--to", "attent"]) == 0
    assert main(["convert", str(tmp_path / "own"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    capsys.readouterr()
    assert main(["translate", str(tmp_path / "hf"), str(source), *languages]) == 0
    assert main(["translate", model, str(source)]) == 1
    assert "--src" in capsys.readouterr().err
