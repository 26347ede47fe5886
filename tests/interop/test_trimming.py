"""A trimmed translator finds the same tokens on text that its pieces cover, and transformers loads it."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pytest
import sentencepiece
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models as tokenizer_models

import attent
from attent.cli import main
from attent.decoding.options import SearchOptions
from attent.decoding.translator import Translator
from attent.interop.export import convert_model
from attent.interop.trimming import choose_ids, encode_sides, iter_fields, rewrite_file
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.models.pruning import remove_heads, remove_layers
from attent.nn import StackConfig
from attent.storage.errors import AttentError
from attent.text.tokenizer import Tokenizer, TokenizerError
from attent.training.loop import write_model
from benchmarks.phrases import generate_pairs
from tests.interop.families import transformers
from tests.interop.folders import change_tensors
from tests.interop.test_m2m_100 import LIMIT, TOKENIZERS, WORDS, every_tokenizer, save_model
from tests.laws.helpers import randomize
from tests.text.corpus import lines, tokenizer
from tests.text.imported_tokenizers import marian_folder, sentencepiece_model

COVERED = [" ".join(random.Random(seed).choices(WORDS[:12], k=1 + seed % 9)) for seed in range(100)]


def write_lines(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def search_pieces(folder: Path, texts: Sequence[str], beam_size: int, *pair: str) -> list[tuple[str, ...]]:
    languages = dict(zip(("src", "tgt"), pair, strict=False))
    translator = Translator.load(folder, engine="torch", **languages)
    options, to = (
        SearchOptions(beam_size=beam_size, max_length=LIMIT),
        next(iter(translator.tokenizer.source.tags), None),
    )
    return [tuple(found.tokens) for found in translator.translate(texts, options, to=to, prevent_loops=False)]


def count_equal(before: Path, after: Path, texts: Sequence[str], beam_size: int, *pair: str) -> tuple[int, int]:
    """Return how many translations consist of kept pieces, and how many of these are found again."""
    target = Tokenizer.load(after).target
    known = set(target.to_pieces(range(target.size)))
    found, again = (search_pieces(folder, texts, beam_size, *pair) for folder in (before, after))
    covered = [(old, new) for old, new in zip(found, again, strict=True) if known.issuperset(old)]
    return len(covered), sum(old == new for old, new in covered)


@every_tokenizer
def test_search_finds_the_same_tokens(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, corpus = tmp_path / "model", write_lines(tmp_path / "corpus.txt", COVERED)
    _, tokenizer = save_model(name, folder)
    pair = TOKENIZERS[name][1:]
    command = ["convert", str(folder), "--keep-languages", "en,de", "--corpus", str(corpus)]
    convert_model(folder, tmp_path / "first", corpus=corpus, languages=["en", "de"])
    target = Tokenizer.load(tmp_path / "first").target
    kept = tokenizer.convert_tokens_to_ids(target.to_pieces(range(target.size)))
    mask = torch.zeros(attent.load(folder).config.vocab, 1).index_fill(0, torch.tensor(kept), 1)
    change_tensors(folder, lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"] * mask})
    assert main([*command[:2], str(tmp_path / "small"), *command[2:]]) == 0
    report = capsys.readouterr().out
    assert "100 of 100 lines" in report
    assert f"-> {target.size:,}\n" in report

    covered, equal = count_equal(folder, tmp_path / "small", COVERED, 1, *pair)
    assert covered == equal > 90
    covered, equal = count_equal(folder, tmp_path / "small", COVERED, 4, *pair)
    assert covered > 90
    assert equal > 0.7 * covered  # a fifth of the probability was that of dropped tokens: the normalizer differs

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "small")
    theirs.src_lang, theirs.tgt_lang = pair
    ours = Tokenizer.load(tmp_path / "small").bind_languages(*pair)
    assert ours.encode_source(COVERED) == theirs(COVERED)["input_ids"]
    assert ours.encode_target(COVERED) == theirs(text_target=COVERED)["input_ids"]
    remaining = len(ours.source.language_ids)
    assert remaining == 100 if name == "m2m_100" else remaining == 2
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "small")
    assert model.config.vocab_size == ours.source.size


@pytest.mark.parametrize("to", ["attent", "hf"])  # our BPE, and Marian with a segmentation model per side
def test_models_of_attent_and_marian(to: Literal["attent", "hf"], tmp_path: Path) -> None:
    texts = [text for text in (*lines()[0], *lines()[1]) if "ark" in text]
    corpus, words = write_lines(tmp_path / "corpus.txt", texts[:60]), tokenizer()
    encoder = StackConfig(layers=1, width=16, heads=2, ffn_width=24)
    config = Seq2SeqConfig(vocab=words.source.size, encoder=encoder, decoder=mirror_encoder(encoder), output_bias=True)
    model = randomize(Seq2Seq(config))
    kept, _ = choose_ids(words, words.files, corpus, [], None)
    with torch.no_grad():  # dropped tokens have no probability, so the normalizer does not change
        model.output.bias.fill_(-1e4).index_fill_(0, torch.tensor(kept), 0)
    write_model(tmp_path / "own", model, words)
    convert_model(tmp_path / "own", tmp_path / "model", to)
    convert_model(tmp_path / "model", tmp_path / "small", corpus=corpus)
    assert (tmp_path / "small" / "manifest.json").exists() == (to == "attent")
    before, after = (Tokenizer.load(tmp_path / name).source for name in ("model", "small"))
    assert after.size == len(kept) < before.size
    assert after.tags == before.tags
    for beam_size in (1, 4):
        assert count_equal(tmp_path / "model", tmp_path / "small", texts[:100], beam_size) == (100, 100)


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_covered_text_is_segmented_as_before(model_type: str, tmp_path: Path) -> None:
    content = sentencepiece_model(0, model_type, (0, 1, 2, 3), ("<x>",))
    before = Tokenizer.from_files({"tokenizer.model": content})
    rng = random.Random(1)
    corpus = write_lines(tmp_path / "corpus.txt", [line for line in lines()[0] if "dog" in line][:5])
    ids, dropped = choose_ids(before, before.files, corpus, ["en"], None)
    new_ids = {old: new for new, old in enumerate(ids)}
    after = Tokenizer.from_files({name: rewrite_file(name, c, dropped, new_ids) for name, c in before.files.items()})
    letters = "".join(lines()[0][:20])
    texts = ["".join(rng.choices(letters + "é日", k=rng.randrange(1, 12))) for _ in range(3000)]
    pairs = list(zip(encode_sides(before, texts), encode_sides(after, texts), strict=True))
    covered = [([new_ids[i] for i in old], new) for old, new in pairs if new_ids.keys() >= set(old)]
    assert len(ids) < before.source.size
    assert 100 < len(covered) < len(texts)
    assert [old for old, _ in covered] == [new for _, new in covered]
    assert "<x>" in after.source.to_pieces(range(after.source.size))


def test_letters_of_other_scripts_are_dropped(tmp_path: Path) -> None:
    model = io.BytesIO()
    texts = ["привет мир", "hello world 123", "γειά σου", "日本 ๑"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, model_type="char", vocab_size=60, hard_vocab_limit=False,
        minloglevel=4, character_coverage=1.0, self_test_sample_size=10,
    )  # fmt: skip
    before = Tokenizer.from_files({"tokenizer.model": model.getvalue()})
    corpus = write_lines(tmp_path / "corpus.txt", ["мир γ"])
    ids, dropped = choose_ids(before, before.files, corpus, ["ru"], None)
    kept = set(before.source.to_pieces(ids))
    assert kept >= set("приветмhelloworld123γ▁")
    assert dropped == set("ειάσου日本")
    new_ids = {old: new for new, old in enumerate(ids)}
    after = Tokenizer.from_files({name: rewrite_file(name, c, dropped, new_ids) for name, c in before.files.items()})
    assert after.source.decode(*after.source.encode(["привет world"])) == "привет world"


def test_unknown_text_costs_as_much_as_before(tmp_path: Path) -> None:
    pieces = {"</s>": 0.0, "<unk>": 0.0, "ab": -12.0, "cd": -12.0, "bcd": -0.1, "never": -30.0, "rare": -20.0}
    trained = FastTokenizer(tokenizer_models.Unigram(list(pieces.items()), unk_id=1))
    trained.add_special_tokens(["</s>", "<unk>"])
    before = Tokenizer.from_files({"tokenizer.json": trained.to_str().encode()})
    assert before.source.to_pieces(before.source.encode(["abcd"])[0]) == ["ab", "cd"]  # not unknown and bcd
    corpus = write_lines(tmp_path / "corpus.txt", ["abcd", "bcd"])
    ids, dropped = choose_ids(before, before.files, corpus, [], None)
    assert dropped == {"rare"}
    assert before.source.to_pieces(ids)[-1] == "never"  # the lowest score, from which that of unknown text is computed


def test_the_size_of_the_vocabulary(tmp_path: Path) -> None:
    before, corpus = Tokenizer.load(marian_folder(tmp_path / "m")), write_lines(tmp_path / "corpus.txt", lines()[0])
    needed = len(choose_ids(before, before.files, corpus, [], None)[0])
    ids, _ = choose_ids(before, before.files, corpus, [], needed - 9)
    assert len(ids) == needed - 9
    with pytest.raises(AttentError, match="`vocab` must be at least"):
        choose_ids(before, before.files, corpus, [], 20)
    separate = Tokenizer.load(marian_folder(tmp_path / "separate", separate=True))
    with pytest.raises(AttentError, match="with one vocabulary"):
        choose_ids(separate, separate.files, corpus, [], None)


def test_protobuf_fields_are_read_and_joined_again() -> None:
    content = sentencepiece_model(0, "unigram")
    assert b"".join(encoded for _, _, encoded in iter_fields(content)) == content
    pieces = [
        {number: value for number, value, _ in iter_fields(value)} for n, value, _ in iter_fields(content) if n == 1
    ]
    processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    assert [piece[1].decode() for piece in pieces] == processor.id_to_piece(list(range(len(processor))))


def test_layers_are_evenly_spaced() -> None:
    encoder = StackConfig(layers=5, width=8, heads=2, ffn_width=8)
    config = Seq2SeqConfig(vocab=10, encoder=encoder, decoder=mirror_encoder(encoder))
    model = remove_heads(randomize(Seq2Seq(config)).eval(), {"decoder.blocks.4.cross_attn": [1]})
    smaller = remove_layers(model, 3, 2)
    assert smaller.config.stacks[1].remaining_heads is not None
    for side, layers in (("encoder", [0, 2, 4]), ("decoder", [0, 4])):
        for new, old in enumerate(layers):
            before, after = (
                m.get_submodule(f"{side}.blocks.{i}").state_dict() for m, i in ((model, old), (smaller, new))
            )
            assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert smaller(torch.ones(1, 2).long(), torch.ones(1, 2).long()).isfinite().all()
    assert len(remove_layers(model, None, 1).decoder.blocks) == 1
    for count in (0, 6):
        with pytest.raises(AttentError, match="`encoder_layers` must be from 1 to the model's 5"):
            remove_layers(model, count, None)


def test_refusals(tmp_path: Path) -> None:
    save_model("nllb", tmp_path / "model")
    corpus = write_lines(tmp_path / "corpus.txt", COVERED)
    with pytest.raises(AttentError, match="--corpus"):
        convert_model(tmp_path / "model", tmp_path / "out", languages=["en"])
    with pytest.raises(TokenizerError, match="no language `qq`"):
        convert_model(tmp_path / "model", tmp_path / "out", corpus=corpus, languages=["en", "qq"])
    with pytest.raises(AttentError, match="`decoder_layers` must be"):
        convert_model(tmp_path / "model", tmp_path / "out", decoder_layers=0)
    corpus.write_bytes(b"caf\xe9\n")
    with pytest.raises(AttentError, match="must be UTF-8"):
        convert_model(tmp_path / "model", tmp_path / "out", corpus=corpus)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_trained_model_translates_1000_sentences_as_before(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"size": "tiny", "steps": 200, "batch_tokens": 2000}
    attent.train("phrases", out=tmp_path / "run", src="en", tgt="de", device="cpu", **sizes)
    pairs = [(en, de) for en, de in islice(generate_pairs(), 4000) if not {"dog", "dogs", "church"} & set(en.split())]
    texts = [en for en, _ in pairs[:1000]]
    corpus = write_lines(tmp_path / "corpus.txt", [text for pair in pairs[:1000] for text in pair])
    convert_model(tmp_path / "run", tmp_path / "small", corpus=corpus)
    before, after = (Tokenizer.load(tmp_path / name).source.size for name in ("run", "small"))
    assert after < before
    covered, equal = count_equal(tmp_path / "run", tmp_path / "small", texts, 1)
    assert covered == equal > 950
    covered, equal = count_equal(tmp_path / "run", tmp_path / "small", texts, 4)
    assert covered > 950
    assert equal > 0.99 * covered
