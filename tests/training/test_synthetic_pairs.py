"""Back-translation, self-training and distillation: which pairs are made, and that an interrupted run loses none."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import attent
from attent.data.filters import FilterConfig
from attent.data.pairs import LanguagePair
from attent.decoding import pipeline
from attent.decoding.options import SearchOptions
from attent.storage.errors import AttentError
from attent.text.tokenizer import Tokenizer
from attent.training import synthetic_pairs
from attent.training.events import Event, Note
from attent.training.run_options import TrainError
from attent.training.synthetic_pairs import BACK_TRANSLATION_TAG, Candidate, TranslationJob
from tests.training.runs import ForkServer, Kill, command, fingerprint, reverse, sentences, write_corpus

TINY: dict[str, Any] = {
    "src": "en", "tgt": "xx", "size": "tiny", "batch_tokens": 256, "hold_out": 10, "steps": 2, "valid_sentences": 4,
    "beam_size": 1, "threads": 1, "progress": False,
    "settings": {"model.width": 32, "model.ffn_width": 64, "model.layers": 1},
}  # fmt: skip
NUM_TEXTS = 100


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs, text of both sides, and untrained models in both directions, whose translations end early."""
    home = tmp_path_factory.mktemp("synthetic")
    write_corpus(home / "pairs.tsv", 100)
    texts = sentences(200)[100:]
    (home / "mono.xx").write_text("".join(f"{reverse(text)}\n" for text in texts), encoding="utf-8")
    (home / "mono.en").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    lines = (home / "pairs.tsv").read_text(encoding="utf-8").splitlines()
    swapped = "".join("\t".join(line.split("\t")[::-1]) + "\n" for line in lines)
    (home / "swapped.tsv").write_text(swapped, encoding="utf-8")
    attent.train(home / "pairs.tsv", out=home / "forward", **TINY | {"steps": 40})
    attent.train(home / "swapped.tsv", out=home / "reverse", **TINY | {"steps": 40, "src": "xx", "tgt": "en"})
    return home


def back_translate(home: Path, out: Path, **options: Any) -> list[str]:
    """Train with back-translation and return the notes."""
    notes: list[str] = []

    def collect(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    given = {"mono_target": (str(home / "mono.xx"),), "reverse": (str(home / "reverse"),), **options}
    attent.train(home / "pairs.tsv", out=out, callbacks=collect, **TINY | given)
    return notes


def read_pairs(out: Path) -> list[dict[str, str]]:
    folder = out / "state/data/synthetic"
    file = folder / json.loads((folder / "0.json").read_text(encoding="utf-8"))["pairs_file"]
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


# ---- which pairs are made --------------------------------------------------------------------------------------------


def test_back_translation_makes_tagged_sources_for_the_text(home: Path, tmp_path: Path) -> None:
    back_translate(home, tmp_path / "run", mono_weight=0.5)
    pairs = read_pairs(tmp_path / "run")
    targets = (home / "mono.xx").read_text(encoding="utf-8").splitlines()
    assert NUM_TEXTS // 2 < len(pairs) < NUM_TEXTS  # without those of low probability
    assert [pair["tgt"] for pair in pairs] == [text for text in targets if text in {pair["tgt"] for pair in pairs}]
    tag, translation = pairs[0]["src"].split(" ", 1)
    assert tag == BACK_TRANSLATION_TAG
    assert translation == attent.Translator.load(home / "reverse", device="cpu")(pairs[0]["tgt"]).text
    tokenizer = Tokenizer.load(tmp_path / "run")
    assert BACK_TRANSLATION_TAG in tokenizer.source.to_pieces(tokenizer.source.encode([f"{tag} the cat"])[0])
    assert not tokenizer.source.tags  # it is no language
    card = (tmp_path / "run" / "card.md").read_text(encoding="utf-8")
    assert f"mono.xx (translated back by {home / 'reverse'}, beam 4) | {NUM_TEXTS} |" in card
    assert "0.5 |" in card
    assert "low probability" in card
    assert "`mono.xx`" in card


def test_a_model_of_the_wrong_direction_is_refused(home: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="forward: must translate xx to en, but translates en to xx; give"):
        back_translate(home, tmp_path / "run", reverse=(str(home / "forward"),))


def test_sampled_sources_depend_on_the_seed(home: Path, tmp_path: Path) -> None:
    options = {"mono_sampling": True, "steps": 1}
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        back_translate(home, tmp_path / name, seed=seed, hold_out=0, **options)
    first, again, other = (
        [pair["src"] for pair in read_pairs(tmp_path / name)] for name in ("first", "again", "other")
    )
    assert first == again
    assert first != other


def test_forward_translation_makes_untagged_targets(home: Path, tmp_path: Path) -> None:
    mono = {"mono_source": (str(home / "mono.en"),), "forward": (str(home / "forward"), str(home / "forward"))}
    attent.train(home / "pairs.tsv", out=tmp_path / "run", **TINY | mono)
    assert {pair["src"] for pair in read_pairs(tmp_path / "run")} <= set(sentences(200)[100:])


def test_no_validation_text_becomes_a_pair(home: Path, tmp_path: Path) -> None:
    valid = tmp_path / "valid.tsv"
    valid.write_text("".join(f"{s}\t{reverse(s).upper()}.\n" for s in sentences(200)[100:150]), encoding="utf-8")
    notes = back_translate(home, tmp_path / "run", valid=(str(valid),))
    assert any("50 validation or test text" in note for note in notes)
    assert {pair["tgt"] for pair in read_pairs(tmp_path / "run")} <= {reverse(s) for s in sentences(200)[150:]}


def test_candidate_closest_to_the_reference_is_chosen() -> None:
    line = json.dumps([["a red cat", -0.1, True], ["the red bird", -0.2, True], ["red", -0.3, True]]).encode()
    assert [each.text for each in synthetic_pairs.choose_closest([line], ["the red birds"])] == ["the red bird"]


def test_certain_translations_are_not_the_least_probable() -> None:
    """Log probabilities are rounded in the JSON output."""
    certain, impossible = (
        json.dumps({"hyp": "yes", "log_prob": value, "tokens": ["yes"], "finished": True}) for value in (0.0, None)
    )
    read = [Candidate(*json.loads(synthetic_pairs.encode_candidates(line))[0]) for line in (certain, impossible)]
    assert [candidate.log_prob for candidate in read] == [0.0, -50.0]


def test_translations_are_filtered() -> None:
    good, copied = "one two three four five six", "this is a sentence that was copied"
    texts = [*[f"{number} {good}" for number in range(20)], copied, "short", "cut off"]
    chosen = [Candidate(text.upper(), -0.1, True) for text in texts]
    chosen[0] = Candidate("UNLIKELY", -9.0, True)
    chosen[-3], chosen[-2] = Candidate(copied, -0.1, True), Candidate("long " * 50, -0.1, True)
    chosen[-1] = Candidate("CUT", -0.1, False)
    job = TranslationJob(
        text=("text",),
        models=("model",),
        languages=LanguagePair("en", "xx"),
        options=SearchOptions(),
        filters=FilterConfig(),
        drop_share=0.01,
    )
    reasons = list(synthetic_pairs.find_drop_reasons(job, texts, chosen, []))
    assert reasons == ["low probability", *[None] * 19, "identical", "length_ratio", "unfinished"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"mono_target": ("mono.xx",)}, "`mono_target` and `reverse` must be given together"),
        ({"forward": ("model",)}, "`mono_source` and `forward` must be given together"),
        ({"mono_weight": 0.0}, "`mono_weight` must be greater than 0"),
        ({"mono_target": ("nowhere.xx",), "reverse": ("REVERSE",)}, "nowhere.xx: there is no such file"),
        ({"mono_target": ("pairs.tsv",), "reverse": ("REVERSE",)}, "is a file of pairs"),
        ({"mono_target": ("empty.xx",), "reverse": ("REVERSE",)}, "there is no text"),
        ({"mono_target": ("mono.xx",), "reverse": ("REVERSE",), "tgt": "xx,yy"}, "one source and one target language"),
        ({"init_from": "REVERSE", "tokenizer_from": "REVERSE"}, "`data.tokenizer_from` has no effect with --from"),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, Any], problem: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    Path("empty.xx").write_text("\n", encoding="utf-8")
    given = json.loads(json.dumps(options).replace("REVERSE", str(home / "reverse")))
    columns = "en\txx\tyy\n" + "".join(f"{s}\t{reverse(s)}\t{s}\n" for s in sentences(50))
    Path("columns.tsv").write_text(columns, encoding="utf-8")
    with pytest.raises(AttentError, match=problem):
        attent.train("columns.tsv", out=tmp_path / "run", **{**TINY, **given})


# ---- interruptions ---------------------------------------------------------------------------------------------------


class Interruption(Exception):
    """As Ctrl-C, at one place."""


def test_interrupted_translation_continues_where_it_stopped(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "CPU_BLOCK_LINES", 16)
    back_translate(home, tmp_path / "unbroken")
    encode, count = synthetic_pairs.encode_candidates, 0

    def interrupt(line: str) -> bytes:
        nonlocal count
        count += 1
        if count == 40:  # in the third block
            raise Interruption
        return encode(line)

    with monkeypatch.context() as patch:
        patch.setattr(synthetic_pairs, "encode_candidates", interrupt)
        with pytest.raises(Interruption):
            back_translate(home, tmp_path / "run")
    (partial,) = (tmp_path / "run/state/data/synthetic").glob("*.translations.jsonl")
    done = partial.read_bytes().count(b"\n")
    assert 32 <= done < 40
    partial.write_bytes(partial.read_bytes() + b'[["cut off')  # a block that was being written
    notes = back_translate(home, tmp_path / "run")
    assert any(f"resumed after {done}" in note for note in notes)
    assert read_pairs(tmp_path / "run") == read_pairs(tmp_path / "unbroken")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "unbroken")]
    assert weights[0] == weights[1]


def test_text_that_changed_before_the_first_step_is_translated_again(home: Path, tmp_path: Path) -> None:
    text = tmp_path / "mono.xx"
    shutil.copy(home / "mono.xx", text)

    def stop(event: Event) -> None:
        if isinstance(event, Note) and "synthetic pairs" in event.text:
            raise Interruption

    given = {"mono_target": (str(text),), "reverse": (str(home / "reverse"),)}
    with pytest.raises(Interruption):
        attent.train(home / "pairs.tsv", out=tmp_path / "run", callbacks=stop, **TINY | given)
    text.write_text("eht eno wen ecnetnes\n" * 2, encoding="utf-8")
    notes = back_translate(home, tmp_path / "run", mono_target=(str(text),))
    assert any("1 sentence, translated" in note for note in notes)


def test_other_filters_need_no_other_translations(home: Path, tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, Note) and "synthetic pairs" in event.text:
            raise Interruption

    given = {"mono_target": (str(home / "mono.xx"),), "reverse": (str(home / "reverse"),)}
    with pytest.raises(Interruption):
        attent.train(home / "pairs.tsv", out=tmp_path / "run", callbacks=stop, **TINY | given)
    notes = back_translate(
        home, tmp_path / "run", settings={**TINY["settings"], "data.synthetic.drop_share": 0.5}, hold_out=5
    )
    assert not any("translated back" in note for note in notes)
    assert len(read_pairs(tmp_path / "run")) <= NUM_TEXTS // 2


def test_run_with_a_checkpoint_needs_neither_text_nor_model(home: Path, tmp_path: Path) -> None:
    shutil.copy(home / "mono.xx", tmp_path / "mono.xx")
    shutil.copytree(home / "reverse", tmp_path / "reverse")
    given = {"mono_target": (str(tmp_path / "mono.xx"),), "reverse": (str(tmp_path / "reverse"),)}
    back_translate(home, tmp_path / "run", **given)
    shutil.rmtree(tmp_path / "reverse")
    (tmp_path / "mono.xx").unlink()
    result = attent.train(out=tmp_path / "run", steps=4, progress=False)
    assert result.step == 4


@pytest.fixture(scope="module")
def fork_server(home: Path) -> Iterator[ForkServer]:
    if not hasattr(os, "fork"):
        pytest.skip("there is no SIGKILL here")
    fork_server = ForkServer(home / "cache")
    yield fork_server
    fork_server.close()


@pytest.mark.slow
def test_killed_runs_end_with_the_same_bits(fork_server: ForkServer, home: Path, tmp_path: Path) -> None:
    """Kills during the translation, between it and the first checkpoint, and during training."""
    texts = [reverse(text) for text in sentences(1_500, seed=5)]
    (home / "many.xx").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")

    def run(out: Path, kill: Kill | None = None) -> int:
        mono = ["--mono-target", str(home / "many.xx"), "--reverse", str(home / "reverse"), "--threads", "1"]
        return fork_server.run(command(home / "pairs.tsv", out, *mono), kill)

    assert run(tmp_path / "unbroken") == 0, fork_server.stderr
    expected = fingerprint(tmp_path / "unbroken")
    rng, kills = random.Random(4), 0
    for number in range(4):
        out = tmp_path / f"run-{number}"
        for after in (*(rng.uniform(0.3, 3) for _ in range(5)), None):
            code = run(out, None if after is None else Kill(after=after))
            if code == 0:
                break
            assert code == -signal.SIGKILL, fork_server.stderr
            kills += 1
        assert fingerprint(out) == expected
    assert kills > 4


def test_wrong_weight_names_the_option() -> None:
    with pytest.raises(TrainError, match="mono_weight"):
        attent.train("pairs.tsv", out="run", mono_weight=-1.0)
