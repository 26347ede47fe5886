"""Ablation: effects, resuming, storage, reports and pruning of model folders."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from attent.cli.shared import print_message
from attent.data.pairs import CorpusError, LanguagePair, ReasonTally
from attent.decoding.ensemble import Ensemble
from attent.decoding.forced_decoding import score_targets
from attent.decoding.options import SearchOptions
from attent.decoding.translator import Translator
from attent.inspection import ablate as ablations
from attent.inspection import ablation_run
from attent.inspection.ablate import (
    Ablation,
    AblationData,
    AblationEffect,
    AblationMeasurement,
    AblationMeter,
    ModelPart,
    list_parts,
    load_ablation,
    mask_heads,
)
from attent.inspection.ablation_run import AblationJob, AblationResult, PruneSelection
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.models.folder import write_side_file, write_side_settings
from attent.nn import StackConfig
from attent.scoring import pipeline
from attent.scoring.metrics import MetricScore
from attent.scoring.pipeline import read_test_set
from attent.storage.errors import FolderError
from attent.training.autoconfig import fit_to_tokenizer
from attent.training.loop import write_model
from tests.text.corpus import lines, tokenizer

STACK = StackConfig(layers=2, width=16, heads=2, ffn_width=24, dropout=0.0)
SEARCH = SearchOptions(beam_size=2, max_length=8, prevent_loops=False)
SAMPLE = AblationData(name="toy", sources=lines()[0][:4], references=lines()[1][:4], to="de")
HEAD = ModelPart("decoder.blocks.1.cross_attn", 1)


def closeness(outputs: Sequence[str], references: Sequence[str]) -> float:
    """A letter-based stand-in for BLEU, which is 0 for random models."""
    pairs = zip(outputs, references, strict=True)
    return 100 * sum(len({*a} & {*b}) / max(1, len({*a} | {*b})) for a, b in pairs) / len(outputs)


@pytest.fixture
def letter_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score by letters instead of BLEU."""

    def score(outputs: Sequence[str], references: Sequence[str], *arguments: Any, **more: Any) -> list[MetricScore]:
        return [
            MetricScore(
                metric="bleu", value=closeness(outputs, references), mean=None, ci_half_width=None, signature="letters"
            )
        ]

    monkeypatch.setattr(ablations, "compute_metrics", score)


@pytest.fixture
def model() -> Seq2Seq:
    config = fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=STACK, decoder=mirror_encoder(STACK)), tokenizer())
    created = Seq2Seq(config)
    with torch.no_grad():
        for parameter in created.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return created.eval()


@pytest.fixture
def translator(model: Seq2Seq) -> Translator:
    return Translator(model, tokenizer())


def measure_ablation(translator: Translator, parts: Sequence[ModelPart], previous: Ablation | None = None) -> Ablation:
    *_, ablation = AblationMeter(translator=translator, data=SAMPLE, search=SEARCH).ablate(parts, previous)
    return ablation


# --- effects ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("letter_scores")
def test_effects_equal_manual_measurements(translator: Translator, model: Seq2Seq) -> None:
    parts = [HEAD, ModelPart("encoder.blocks.0.feedforward"), ModelPart("decoder.blocks.1")]
    ablation = measure_ablation(translator, parts)
    for part, effect in zip([None, *parts], [None, *ablation.effects], strict=True):
        with mask_heads(model, *[] if part is None else [part]):
            outputs = [item.text for item in translator.translate(SAMPLE.sources, SEARCH, to="de", prevent_loops=False)]
            scored = score_targets(model, tokenizer(), SAMPLE.sources, SAMPLE.references, to="de")
        tokens = sum(item.length for item in scored)
        figures = ablation if effect is None else effect
        assert figures.bleu == closeness(outputs, SAMPLE.references)
        assert figures.loss == pytest.approx(-sum(item.log_prob for item in scored) / tokens)
    assert ablation.num_tokens == tokens
    assert [effect.part for effect in ablation.effects] == [str(part) for part in parts]
    assert [effect.kind for effect in ablation.effects] == ["head", "sublayer", "layer"]
    assert len({effect.loss for effect in ablation.effects} | {ablation.loss}) == 4  # each has an effect


def test_ablation_restores_the_weights(translator: Translator, model: Seq2Seq) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure_ablation(translator, list_parts(model, "head")[:3])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_head_with_zero_output_has_no_effect(translator: Translator, model: Seq2Seq) -> None:
    with torch.no_grad():
        model.get_parameter("decoder.blocks.1.cross_attn.output.weight")[:, 8:] = 0
    ablation = measure_ablation(translator, [HEAD, ModelPart("decoder.blocks.1.cross_attn", 0)])
    idle, busy = ablation.effects
    assert (idle.bleu, idle.loss, idle.num_changed) == (ablation.bleu, ablation.loss, 0)
    assert busy.loss != ablation.loss


def test_ctranslate2_is_used_on_cpu_and_conversions_are_removed(
    model: Seq2Seq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ctranslate2")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engines: list[object] = []
    real = Translator.translate

    def translate(self: Translator, *arguments: object, **more: object) -> object:
        created = real(self, *arguments, **more)  # type: ignore[arg-type]
        engines.append(self._ctranslate2_engine)
        return created

    monkeypatch.setattr(Translator, "translate", translate)
    ablation = measure_ablation(Translator(model, tokenizer(), engine=None), [HEAD])
    assert ablation.conditions.engine == "CTranslate2, int8"
    assert len(set(engines)) == 2
    assert None not in engines
    assert list(tmp_path.iterdir()) == []


def test_torch_is_used_if_ctranslate2_does_not_support_the_model(tmp_path: Path) -> None:
    windowed = replace(STACK, window=(3, 3))
    config = fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=windowed, decoder=mirror_encoder(STACK)), tokenizer())
    messages: list[str] = []
    translator = Translator(Seq2Seq(config).eval(), tokenizer(), engine=None, notify=messages.append)
    assert measure_ablation(translator, [HEAD]).conditions.engine == "torch, float32 on cpu"
    assert "encoder.window" in messages[0]


# --- resuming --------------------------------------------------------------------------------------------------------


def test_interrupted_ablation_resumes(
    translator: Translator, model: Seq2Seq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = list_parts(model, "head")[:4]
    measured_parts: list[tuple[ModelPart, ...]] = []
    without = AblationMeter.measure_without
    monkeypatch.setattr(
        AblationMeter,
        "measure_without",
        lambda self, subset: measured_parts.append(tuple(subset)) or without(self, subset),
    )

    for unfinished in AblationMeter(translator=translator, data=SAMPLE, search=SEARCH).ablate(parts):
        write_side_settings(tmp_path, ablations.ABLATION_FILE, unfinished)
        if len(unfinished.effects) == 2:
            break
    assert measured_parts == [(), (parts[0],), (parts[1],)]
    measured_parts.clear()
    ablation = measure_ablation(translator, parts, previous=load_ablation(tmp_path))
    assert measured_parts == [(), (parts[2],), (parts[3],)]
    measured_parts.clear()
    assert (
        measure_ablation(translator, parts, previous=ablation) is ablation
    )  # complete: not even the baseline is measured
    assert measured_parts == []
    assert ablation == measure_ablation(translator, parts)  # without interruption


@pytest.mark.parametrize("change", ["weights", "pairs", "search", "score"])
def test_results_under_other_conditions_are_not_reused(translator: Translator, model: Seq2Seq, change: str) -> None:
    done = measure_ablation(translator, [HEAD])
    wrong = replace(done, effects=(replace(done.effects[0], bleu=-1.0),))
    sample, search = SAMPLE, SEARCH
    match change:
        case "weights":
            with torch.no_grad():
                model.get_parameter("encoder.blocks.0.self_attn.query.bias").add_(0.5)
        case "pairs":
            sample = replace(SAMPLE, references=(*SAMPLE.references[:-1], "x"))
        case "search":
            search = replace(SEARCH, beam_size=1)
        case "score":
            sample = replace(SAMPLE, language="zh")  # tokenized otherwise
    *_, ablation = AblationMeter(translator=translator, data=sample, search=search).ablate([HEAD], previous=wrong)
    assert ablation.effects[0].bleu >= 0
    assert measure_ablation(translator, [HEAD], previous=wrong).effects[0].bleu >= (0 if change == "weights" else -1)


def test_folder_stores_ablation_of_these_weights(translator: Translator, model: Seq2Seq, tmp_path: Path) -> None:
    assert ablations.load_matching_ablation(tmp_path, model) is None
    ablation = measure_ablation(translator, [HEAD])
    write_side_settings(tmp_path, ablations.ABLATION_FILE, ablation)
    assert ablations.load_matching_ablation(tmp_path, model) == ablation
    with torch.no_grad():
        model.get_parameter("encoder.blocks.0.self_attn.query.bias").add_(0.5)
    assert ablations.load_matching_ablation(tmp_path, model) is None
    assert load_ablation(tmp_path) == ablation


# --- errors ----------------------------------------------------------------------------------------------------------


def test_invalid_parts_are_rejected_before_translating(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Translator, "translate", None)
    with pytest.raises(ValueError, match="has no part"):
        measure_ablation(translator, [HEAD, ModelPart("decoder.blocks.9.cross_attn", 0)])
    with pytest.raises(ValueError, match="at least one part to mask"):
        measure_ablation(translator, [])


def test_ensembles_are_rejected(model: Seq2Seq) -> None:
    with pytest.raises(ValueError, match="ensemble"):
        measure_ablation(Translator(Ensemble([model, model]), tokenizer()), [HEAD])


# --- report ----------------------------------------------------------------------------------------------------------


def ablation_of(*effects: AblationEffect) -> Ablation:
    conditions = ablations.AblationConditions(
        dataset="toy|set",
        pairs_digest="",
        sentences=50,
        to=None,
        search=SEARCH,
        engine="torch",
        signature="sig",
        weights_digest="",
    )
    return Ablation(conditions=conditions, bleu=30.0, loss=1.0, num_tokens=9, effects=effects)


def effect(part: str, bleu: float, loss: float = 1.0, p: float = 0.01) -> AblationEffect:
    return AblationEffect(part=part, kind=ModelPart.parse(part).kind, bleu=bleu, loss=loss, num_changed=5, p_value=p)


MIXED = ablation_of(
    effect("decoder.blocks.10.cross_attn:1", 20.0),
    effect("decoder.blocks.2.cross_attn:0", 29.0, p=0.2),
    effect("decoder.blocks.2.cross_attn:1", 30.5),
    effect("encoder.blocks.0.self_attn:0", 10.0, p=0.001),
    effect("decoder.blocks.2", 1.0),
    effect("encoder.blocks.0.feedforward", 5.0),
)


def test_document_section() -> None:
    document = MIXED.to_document()
    assert {key: document[key] for key in ("sentences", "bleu", "loss")} == {"sentences": 50, "bleu": 30.0, "loss": 1.0}
    assert document["parts"][0] == {"part": "encoder.blocks.0.self_attn:0", "kind": "head", "bleu": 10.0, "loss": 1.0}
    parts = [part["part"] for part in document["parts"]]
    assert parts[1:4] == [
        "decoder.blocks.2.cross_attn:0",
        "decoder.blocks.2.cross_attn:1",
        "decoder.blocks.10.cross_attn:1",
    ]
    json.dumps(document, allow_nan=False)


def test_report_lists_parts_worst_first() -> None:
    result = AblationResult(folder=Path("m"), ablation=MIXED, kinds=["head"])
    page = "\n".join(line.plain for line in ablation_run.render_ablation(result))
    names = re.findall(r"^(\S+:\d) ", page, re.MULTILINE)
    assert names == [
        "encoder.blocks.0.self_attn:0",
        "decoder.blocks.10.cross_attn:1",
        "decoder.blocks.2.cross_attn:0",
        "decoder.blocks.2.cross_attn:1",
    ]
    assert "decoder.blocks.2 " not in page  # a layer, not requested
    assert "-20.00" in page
    assert "not significant" in page
    assert "Of 4 heads, 1 cost at most 0.2 BLEU when masked alone; for 1 the difference is not significant" in page


def test_report_has_the_conditions_and_every_column() -> None:
    result = AblationResult(folder=Path("m"), ablation=MIXED, kinds=["head", "layer"])
    lines = "\n".join(line.plain for line in ablation_run.render_ablation(result)).split("\n")
    page = [" ".join(line.split()) for line in lines]
    assert page[:5] == [
        "pairs toy|set: 50",
        f"search beam size 2, {SEARCH.score_formula}, no loop prevention",
        "engine torch",
        "baseline 30.00 BLEU, loss 1.0000 on 9 tokens",
        "BLEU sig",
    ]
    assert page[6:9] == [
        "Without each head lowest BLEU first; p of a paired bootstrap",
        "BLEU difference loss difference changed p",
        "encoder.blocks.0.self_attn:0 10.00 -20.00 1.0000 +0.0000 10.0% 0.001",
    ]
    greedy = replace(MIXED.conditions, search=replace(SEARCH, beam_size=1))
    shown = [line.plain for line in ablation_run.render_header(replace(MIXED, conditions=greedy))]
    assert shown[1].split(maxsplit=1)[1].startswith("greedy search, ")


@pytest.mark.parametrize(("p", "shown"), [(0.0499, "0.050"), (0.05, "not significant")])
def test_p_values_at_the_significance_level(p: float, shown: str) -> None:
    one = ablation_of(effect("encoder.blocks.0.self_attn:0", 29.8, p=p))
    assert ablation_run.format_effect(one.effects[0], one)[-1] == shown
    summary = " ".join(ablation_run.summarize_ablation(one, "head"))
    assert f"for {int(shown == 'not significant')} the difference" in summary
    assert "Of 1 head, 1 cost at most 0.2 BLEU" in summary  # exactly the bound
    below = ablation_of(effect("encoder.blocks.0.self_attn:0", 29.79))
    assert "Of 1 head, 0 cost" in " ".join(ablation_run.summarize_ablation(below, "head"))


@pytest.mark.parametrize("bleu", [1.0, 0.99])
def test_low_bleu_is_said_to_be_uninformative(bleu: float) -> None:
    ablation = replace(ablation_of(effect("a.blocks.0.x:0", 0.1)), bleu=bleu)
    summary = " ".join(ablation_run.summarize_ablation(ablation, "head"))
    assert ("too low to be informative" in summary) == (bleu < 1)


# --- folders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(model: Seq2Seq, tmp_path: Path) -> Path:
    write_model(tmp_path / "model", model, tokenizer())
    (tmp_path / "model" / "card.md").write_text("# A toy\n\n## Scores\n\nNone.\n\n## Limits\n\nMany.\n")
    write_side_file(tmp_path / "model", "run.toml", b'size = "tiny"\n')
    rows = zip(lines()[0][:6], lines()[1][:6], strict=True)
    (tmp_path / "valid.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in rows))
    return tmp_path / "model"


def run(
    folder: Path,
    *,
    data: str = "valid.tsv",
    tgt: str = "de",
    limit: int = 3,
    **more: Any,
) -> AblationResult:
    """Run as the command does, with the torch engine and a short search."""
    test_set = read_test_set([str(folder.parent / data)], LanguagePair("en", tgt))
    translator = Translator.load(folder, device="cpu", engine="torch")
    pairs = AblationData.from_test_set(test_set, translator, folder, to=None, limit=limit)
    meter = AblationMeter(translator=translator, data=pairs, search=SEARCH)
    result = AblationJob(folder=folder, meter=meter, notify=print_message).run(
        **{"selection": "heads", "prune_to": None, "max_bleu_drop": 0.2} | more
    )
    for line in ablation_run.render_ablation(result):
        print(line.plain)
    return result


def test_run_saves_and_reports(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder, selection="layers")
    shown = capsys.readouterr()
    assert "Without each layer" in shown.out
    assert "ablating 4 parts" in shown.err
    assert "4 of 4: without decoder.blocks.1 " in shown.err
    stored = load_ablation(folder)
    assert stored is not None
    assert (stored.conditions.sentences, len(stored.effects)) == (3, 4)
    assert stored.conditions.signature.startswith("nrefs:1|")
    assert all(item.p_value is not None for item in stored.effects)
    run(folder, selection="all")  # earlier results are reused
    shown = capsys.readouterr()
    assert "ablation.json has 4 parts already" in shown.err
    both = load_ablation(folder)
    assert both is not None
    assert both.effects[:4] == stored.effects
    assert len(both.effects) == 4 + 10 + 12


def test_interrupted_run_is_saved(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, measured_parts = AblationMeter.measure_effect, []

    def measure(self: AblationMeter, part: ModelPart) -> AblationEffect:
        measured_parts.append(part)
        if len(measured_parts) == 2:
            raise KeyboardInterrupt
        return real(self, part)

    monkeypatch.setattr(AblationMeter, "measure_effect", measure)
    with pytest.raises(KeyboardInterrupt):
        run(folder, selection="layers")
    assert "run the same command again to resume" in capsys.readouterr().err
    stored = load_ablation(folder)
    assert stored is not None
    assert len(stored.effects) == 1


def test_damaged_ablation_file_is_refused(folder: Path) -> None:
    run(folder, selection="layers")
    (folder / "ablation.json").write_text('{"format": "attent-abl')
    with pytest.raises(FolderError, match=r"ablation\.json: is damaged"):
        run(folder, selection="layers")


def test_pruned_model_is_a_complete_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.parent / "pruned"
    run(folder, prune_to=out, max_bleu_drop=100.0)
    shown = capsys.readouterr()
    assert "Without 12 of 12 heads" in shown.out
    assert "without 12 heads" in shown.err
    pruned = Translator.load(out, device="cpu", engine="torch")
    assert isinstance(pruned.model, Seq2Seq)
    assert pruned.model.config.encoder.remaining_heads == (((),), ((),))
    assert pruned.translate(["a dog"], SEARCH, to="de")[0].tokens is not None
    assert (out / "run.toml").read_text() == 'size = "tiny"\n'
    card = (out / "card.md").read_text()
    assert card.startswith("# A toy, pruned\n")
    assert re.search(
        r"Without 12 of 12 heads: [\d.]+ BLEU \(before: [\d.]+\), loss [\d.]+ \([\d.]+\), [\d,]+ param", card
    )
    assert "`decoder.blocks.0.self_attn`: 0 1, " in card
    assert card.index("Removed heads") < card.index("## Scores\n") < card.index("## Limits\n")
    assert ", pruned" not in (folder / "card.md").read_text()
    run(out, selection="layers")  # can be ablated in turn
    assert (out / "card.md").read_text() == card


def test_pruned_card_keeps_a_card_without_a_title() -> None:
    selection = PruneSelection(lambda _: (0.0, 0.0), 29.9, 1.0, 29.8, 1.1, heads=[HEAD])
    sizes = {"parameters": 90, "parameters_before": 100}
    pruned = ablation_run.PruneResult(folder=Path("out"), max_bleu_drop=0.2, selection=selection, **sizes)
    card = ablation_run.build_pruned_card(Path("runs/toy"), "My notes.\n\n## Data\n\nMuch.\n", MIXED, pruned)
    assert card.startswith("# toy, pruned\n\n`runs/toy`, pruned by attent; ")
    assert (
        "Without 1 of 4 heads: 29.90 BLEU (before: 30.00), loss 1.000 (1.000), 90 parameters (100, 10.0% fewer)" in card
    )
    assert card.endswith("in their place.\n\nMy notes.\n\n## Data\n\nMuch.\n")


@pytest.mark.usefixtures("letter_scores")
def test_pruned_model_itself_meets_the_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In int8 it may differ from the model with masked heads."""
    monkeypatch.setattr(AblationMeter, "measure_without", forbid_joint_masking(AblationMeter.measure_without))
    result = run(folder, prune_to=folder.parent / "pruned", max_bleu_drop=8.0)
    ablation, pruned = result.ablation, result.pruned
    assert pruned is not None
    assert pruned.selection.bleu >= ablation.bleu - 8.0
    assert pruned.selection.heads


def forbid_joint_masking(
    without: Callable[[AblationMeter, Sequence[ModelPart]], AblationMeasurement],
) -> Callable[[AblationMeter, Sequence[ModelPart]], AblationMeasurement]:
    """Fail if several parts are masked together."""

    def measure_one_part(self: AblationMeter, parts: Sequence[ModelPart]) -> AblationMeasurement:
        assert len(parts) < 2
        return without(self, parts)

    return measure_one_part


def test_nothing_is_written_if_no_head_can_be_pruned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ablation_run,
        "select_heads",
        lambda *_, **__: PruneSelection(lambda _: (0.0, 0.0), 0.0, 0.0, 0.0, 0.0),
    )
    with pytest.raises(ValueError, match="allow more with --max-bleu-drop"):
        run(folder, prune_to=folder.parent / "pruned")
    assert not (folder.parent / "pruned").exists()


def test_invalid_input_is_rejected_before_measuring(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Translator, "translate", None)
    with pytest.raises(ValueError, match="must be a new or an empty folder"):
        run(folder, prune_to=folder)
    with pytest.raises(ValueError, match="nowhere"):
        run(folder, data="nowhere.tsv")
    (folder.parent / "empty.tsv").write_text("")
    with pytest.raises(CorpusError, match="no sentence pairs"):
        run(folder, data="empty.tsv")
    with pytest.raises(ValueError, match="--tgt must be one of its target languages"):
        run(folder, tgt="fr")
    with pytest.raises(ValueError, match="no-such-model"):
        run(folder.parent / "no-such-model")


@pytest.mark.parametrize("languages", [["de", "pt-BR"], ["de", "pt-BR", "de", "en"]])
def test_test_set_in_several_languages_needs_one(languages: list[str], translator: Translator, tmp_path: Path) -> None:
    texts = [str(number) for number in range(len(languages))]
    test_set = pipeline.TestSet(
        name="mixed",
        sources=texts,
        references=texts,
        languages=list(languages),
        skipped=ReasonTally(),
        files=[],
    )
    make = partial(AblationData.from_test_set, test_set, translator, tmp_path, limit=None)
    with pytest.raises(ValueError, match="mixed: must have one target language; name it with --tgt"):
        make(to=None)
    assert make(to="pt-BR").to == "pt-BR"
