"""`attent info`: what a model folder is, on one page: the model, its tokenizer, how far its training has come.

It reads and changes nothing. Every checksum of the model is verified on the way; checkpoints are only counted, since
training verifies those itself when it goes on.
"""

from __future__ import annotations

import json as json_module
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from attent.models import Model
    from attent.nn import StackConfig
    from attent.text import Tokenizer
    from attent.train.events import Event, Validated

FAILED = 1
LABEL = 14  # columns of the names on the left
WIDTH = 80
STATE, RUN, FINISHED = "state", "run.toml", "finished.json"
# What a person asks about a run first; run.toml has the rest.
MAIN = (
    "task", "size", "start", "data.train", "data.src", "data.tgt", "data.valid", "train.steps", "train.batch_tokens",
    "train.lr", "train.warmup", "train.schedule", "train.label_smoothing", "model.encoder.dropout",
    "model.stack.dropout", "train.ema", "train.seed",
)  # fmt: skip
PARTS = {
    "source_embedding": "source embedding",
    "target_embedding": "target embedding",
    "embedding": "embedding",
    "segment_embedding": "kinds of text",
    "patches": "patches",
    "class_token": "class token",
    "encoder": "encoder",
    "decoder": "decoder",
    "masked": "masked words",
    "pooler": "pooler",
    "classifier": "classifier",
    "output": "output",
}
KINDS = {
    "seq2seq": "encoder-decoder Transformer",
    "causal": "decoder-only Transformer, a language model",
    "encoder": "encoder-only Transformer, a reader of text",
    "vision": "encoder-only Transformer, a reader of images",
}
LABELS = 8  # that are named
UNITS = {"lm": "document", "mlm": "text", "spans": "text", "classify": "text", "images": "image"}  # of a task's scores
OF_SPANS = ("train --from", "fill", "look")  # what a model is made for that has learned to fill spans


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    kind: str
    saved_by: str  # "attent", "Hugging Face"
    encoder: dict[str, Any] | None
    decoder: dict[str, Any] | None
    vocabulary: int | None
    target_vocabulary: int | None
    images: str  # what it reads, where that is no text
    labels: tuple[str, ...]  # that it chooses among
    commands: tuple[str, ...]  # that it is made for
    parameters: int
    parts: dict[str, int]  # what is shared counts once, where it comes first
    precision: str
    checked: bool  # against checksums; a Hugging Face folder has none


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    kind: str
    joint: bool
    source_size: int
    target_size: int
    languages: tuple[str, ...]  # that have a tag
    sha256: str


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    settings: dict[str, Any]  # the main ones of run.toml, by their path
    checkpoints: tuple[int, ...]  # steps
    step: int | None  # that the log has come to
    ended: str | None  # why, when it has
    last: dict[str, Any] | None  # validation
    best: dict[str, Any] | None
    weights: str | None  # which of all were kept at the end
    scores: tuple[dict[str, Any], ...]  # of those, once the run is complete


@dataclass(frozen=True, kw_only=True)
class Facts:
    folder: str
    bytes: int
    state_bytes: int  # of it, what only resuming needs
    model: ModelFacts | None
    tokenizer: TokenizerFacts | None
    training: TrainingFacts | None
    problems: tuple[str, ...]


def info(
    model: Annotated[Path, Parameter(help="a model folder, attent's or Hugging Face's")],
    *,
    json: Annotated[bool, Parameter(help="print everything as one JSON object", negative="")] = False,
) -> int:
    """Say what a model folder holds, whether it is whole, and how far its training has come."""
    facts = look(model)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a console that cannot show a letter shows its number
    print(
        json_module.dumps(asdict(facts), indent=2, ensure_ascii=False, default=str) if json else "\n".join(page(facts))
    )
    return FAILED if facts.problems else 0


# ---- looking ---------------------------------------------------------------------------------------------------------


def look(folder: Path) -> Facts:
    """All that can be said. What is damaged is a problem among the facts; what is no model at all is an error."""
    from attent.models.folder import FolderError

    root = folder.expanduser()
    problems: list[str] = []
    training = look_at_training(root, problems)
    model = None
    try:
        model = look_at_model(root, str(folder))
    except FolderError as error:
        if training is None:
            raise
        if not _not_saved_yet(root):
            problems.append(str(error))
    if model is not None and training is not None and training.settings.get("task") == "spans":
        model = replace(model, commands=OF_SPANS)
    tokenizer = look_at_tokenizer(root, problems)
    sizes = _sizes(root)
    return Facts(
        folder=str(folder),
        bytes=sum(sizes.values()),
        state_bytes=sizes[STATE],
        model=model,
        tokenizer=tokenizer,
        training=training,
        problems=tuple(problems),
    )


def _not_saved_yet(root: Path) -> bool:
    from attent.models.folder import CONFIG, MANIFEST, WEIGHTS

    return not any((root / name).exists() for name in (CONFIG, MANIFEST, WEIGHTS))


def look_at_model(root: Path, given: str) -> ModelFacts:
    from attent import interop
    from attent.interop import files

    model = interop.load(given)  # verifies every checksum of ours
    ours = files.is_ours(root)
    encoder, decoder = _stacks(model)
    return ModelFacts(
        kind=KINDS[model.config.kind],
        saved_by="attent" if ours else "Hugging Face",
        encoder=encoder,
        decoder=decoder,
        vocabulary=getattr(model.config, "vocab", None),
        target_vocabulary=getattr(model.config, "targets", None),
        images=_images(model),
        labels=getattr(model.config, "labels", ()),
        commands=_commands(model),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        parts=_parts(model),
        precision=str(next(model.parameters()).dtype).removeprefix("torch."),
        checked=ours,
    )


def _stacks(model: Model) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    from attent.models import CausalLM, Seq2Seq

    if isinstance(model, Seq2Seq):
        return _stack(model.config.encoder), _stack(model.config.decoder)
    return (None, _stack(model.config.stack)) if isinstance(model, CausalLM) else (_stack(model.config.stack), None)


def _images(model: Model) -> str:
    from attent.models import Vision

    if not isinstance(model, Vision):
        return ""
    config = model.config
    colour = {1: "grey", 3: "in colour"}.get(config.channels, f"of {config.channels} channels")
    patches = f"in {many(config.patches, 'patch')} of {config.patch} x {config.patch}"
    fit = "the middle of a picture" if config.fit == "crop" else "a picture squashed to a square"
    return f"{config.image} x {config.image}, {colour}, {patches}; {fit}"


def _commands(model: Model) -> tuple[str, ...]:
    from attent.models import CausalLM, Encoder, Seq2Seq

    if isinstance(model, Seq2Seq):
        return ("translate", "score", "look")
    if isinstance(model, CausalLM):
        return ("generate", "embed", "look")
    fill = ("fill",) if isinstance(model, Encoder) and model.masked is not None else ()
    return (*fill, *(("classify",) if model.config.labels else ()), "embed", "look")


def _stack(config: StackConfig) -> dict[str, Any]:
    return {
        "layers": config.layers,
        "width": config.width,
        "heads": config.heads,
        "pruned": config.removed,
        "inner": config.inner,
        "activation": config.activation,
        "positions": config.positions.kind,
        "norm": f"{config.norm_order}-{config.norm}",
    }


def _parts(model: Model) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        counts[name.partition(".")[0]] += parameter.numel()
    shared = getattr(model.config, "share_embeddings", False)
    names = PARTS | ({"source_embedding": "embedding"} if shared else {})
    return {told: counts[name] for name, told in names.items() if counts[name]}


def look_at_tokenizer(root: Path, problems: list[str]) -> TokenizerFacts | None:
    from attent.text.tokenizer import LAYOUTS, Tokenizer, TokenizerError

    names = {name for layout in LAYOUTS for name in layout.needs}
    if not any((root / name).exists() for name in names):
        return None
    try:
        tokenizer = Tokenizer.load(root)
    except (TokenizerError, OSError, ImportError) as error:  # ImportError: tokenizer.json needs an extra
        problems.append(f"the tokenizer cannot be read: {error}")
        return None
    return TokenizerFacts(
        kind=_kind(tokenizer),
        joint=tokenizer.joint,
        source_size=tokenizer.source.size,
        target_size=tokenizer.target.size,
        languages=tokenizer.source.tags,
        sha256=tokenizer.fingerprint,
    )


def _kind(tokenizer: Tokenizer) -> str:
    from attent.text.vocabulary import Pieces

    if not isinstance(tokenizer.source, Pieces):
        return "Marian (SentencePiece)" if "source.spm" in tokenizer.files else "tokenizer.json"
    processor = tokenizer.source.processor
    pieces = [
        i
        for i in range(processor.get_piece_size())
        if not (processor.is_control(i) or processor.is_byte(i) or processor.is_unknown(i))
    ]
    if all(len(processor.id_to_piece(i)) == 1 for i in pieces):
        return "SentencePiece characters"
    merges = all(processor.get_score(i).is_integer() for i in pieces)  # BPE's scores count the merges
    return f"SentencePiece {'BPE' if merges else 'unigram'}"


def look_at_training(root: Path, problems: list[str]) -> TrainingFacts | None:
    from attent.train import log
    from attent.train.checkpoint import steps

    state, run, told = root / STATE, root / RUN, root / log.NAME
    if not (state.is_dir() or run.is_file() or told.is_file()):
        return None
    try:
        events = log.read(told) if told.is_file() else []
    except OSError as error:
        events = []
        problems.append(f"{told}: cannot be read ({error.strerror}); check its permissions")
    progress = _progress(events)
    return TrainingFacts(
        settings=_settings(run, problems),
        checkpoints=tuple(steps(state)) if state.is_dir() else (),
        **progress,
        **_finished(state / FINISHED, progress["step"], problems),
    )


def _finished(path: Path, step: int | None, problems: list[str]) -> dict[str, Any]:
    """What the run wrote when it was complete; a run that has gone on since is complete no longer."""
    from attent import settings

    facts: dict[str, Any] = {}
    try:
        facts = settings.read_json(path) if path.is_file() else {}
    except (settings.SettingsError, OSError) as error:
        problems.append(str(error))
    if step is not None and facts.get("step") != step:
        facts = {}
    scores = facts.get("scores")
    return {
        "weights": facts.get("weights"),
        "scores": tuple(one for one in scores if isinstance(one, dict)) if isinstance(scores, list) else (),
    }


def _settings(path: Path, problems: list[str]) -> dict[str, Any]:
    from attent import settings

    if not path.is_file():
        return {}
    try:
        tables = settings.read_tables(path)
    except (settings.SettingsError, OSError) as error:
        problems.append(str(error))
        return {}
    return {name: value for name in MAIN if (value := _find(tables, name)) is not None}


def _find(tables: Mapping[str, Any], path: str) -> Any:
    value: Any = tables
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _progress(events: Sequence[Event]) -> dict[str, Any]:
    from attent.train.events import Ended, Progress, Started, Validated

    validated = [event for event in events if isinstance(event, Validated)]
    best = [event for event in validated if event.best]
    moves = [event for event in events if isinstance(event, Started | Progress | Ended)]  # notes may follow the end
    ended = moves[-1] if moves and isinstance(moves[-1], Ended) else None
    return {
        "step": max((e.step for e in events if isinstance(e, Progress | Validated | Ended)), default=None),
        "ended": ended.reason if ended else None,
        "last": _validation(validated[-1]) if validated else None,
        "best": _validation(best[-1]) if best else None,
    }


def _validation(event: Validated) -> dict[str, Any]:
    facts = {"step": event.step, "loss": event.loss, "bleu": event.bleu, "chrf": event.chrf, "exact": event.exact}
    if event.accuracy is not None:
        facts["accuracy"] = event.accuracy
    return {name: None if value != value else value for name, value in facts.items()}  # JSON knows no NaN


def _sizes(root: Path) -> Counter[str]:
    """Bytes of what lies in the folder, by its first name inside; links and what vanishes meanwhile count nothing."""
    sizes: Counter[str] = Counter()
    for path in root.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink():
                sizes[path.relative_to(root).parts[0]] += path.stat().st_size
        except OSError:
            continue
    return sizes


# ---- the page --------------------------------------------------------------------------------------------------------


def page(facts: Facts) -> Iterator[str]:
    for problem in facts.problems:
        yield from row("PROBLEM", problem)
    yield from row("folder", facts.folder)
    kept = f", of which {size(facts.state_bytes)} only for resuming ({STATE}/)" if facts.state_bytes else ""
    yield from row("on disk", size(facts.bytes) + kept)
    yield from _model_rows(facts.model)
    if facts.tokenizer:
        yield from _tokenizer_rows(facts.tokenizer, facts.model)
    elif facts.model and facts.model.vocabulary is not None:
        yield from row("tokenizer", "none in this folder")
    if facts.training:
        yield from _training_rows(facts.training)


def _model_rows(model: ModelFacts | None) -> Iterator[str]:
    if model is None:
        yield from row("model", "none yet, or none that can be read")
        return
    yield from row("model", f"{model.kind}, saved by {model.saved_by}")
    yield from row("", "every checksum holds" if model.checked else "has no checksums (Hugging Face writes none)")
    yield from row("made for", ", ".join(f"attent {command}" for command in model.commands))
    if model.encoder and model.encoder == model.decoder:
        yield from row("both stacks", stack(model.encoder))
    else:
        yield from row("encoder", stack(model.encoder)) if model.encoder else ()
        yield from row("decoder", stack(model.decoder)) if model.decoder else ()
    yield from _input_rows(model)
    yield from row("parameters", f"{model.parameters:,} in {model.precision}")
    yield from row("", ", ".join(f"{name} {count:,}" for name, count in model.parts.items()))


def _input_rows(model: ModelFacts) -> Iterator[str]:
    """What goes in, and what it chooses among."""
    if model.images:
        yield from row("images", model.images)
    if model.vocabulary is not None:
        same = model.target_vocabulary in (None, model.vocabulary)
        yield from row("vocabulary", f"{model.vocabulary:,}" + ("" if same else f" and {model.target_vocabulary:,}"))
    if model.labels:
        some = ", ".join(model.labels[:LABELS]) + (" ..." if len(model.labels) > LABELS else "")
        yield from row("labels", f"{len(model.labels):,}: {some}")


def stack(facts: Mapping[str, Any]) -> str:
    pruned = f" ({facts['pruned']} pruned in all layers)" if facts["pruned"] else ""
    return (
        f"{many(facts['layers'], 'layer')}, width {facts['width']:,}, {many(facts['heads'], 'head')}{pruned}, "
        f"inner {facts['inner']:,}, {facts['activation']}, {facts['positions']} positions, {facts['norm']} norm"
    )


def _tokenizer_rows(tokenizer: TokenizerFacts, model: ModelFacts | None) -> Iterator[str]:
    one_sided = model is not None and model.target_vocabulary is None
    pieces = f"{tokenizer.source_size:,} pieces" + ("" if one_sided else " for both sides")
    if not tokenizer.joint:
        pieces = f"{tokenizer.source_size:,} and {tokenizer.target_size:,} pieces"
    yield from row("tokenizer", f"{tokenizer.kind}, {pieces}")
    if tokenizer.languages:
        yield from row("", f"languages to ask for: {', '.join(tokenizer.languages)}")
    yield from row("", f"SHA-256 {tokenizer.sha256[:16]}…")


def _training_rows(training: TrainingFacts) -> Iterator[str]:
    words = {"steps": "all updates done", "patience": "stopped early, no longer better", "stopped": "stopped by hand"}
    if training.step is not None:
        how = words.get(training.ended or "", "not ended: it runs, or was interrupted")
        yield from row("training", f"{many(training.step, 'update')}; {how}")
    if training.checkpoints:
        kept = training.checkpoints
        yield from row("checkpoints", f"{len(kept):,} kept, the newest of step {kept[-1]:,}")
    elif training.step is not None:
        yield from row("checkpoints", "none")
    if training.last:
        yield from row("last checked", validation(training.last))
    if training.best:
        yield from row("best", validation(training.best))
    if training.weights:
        yield from row("kept", f"{training.weights}")
    for one in training.scores:
        yield from row("scored", score(one, UNITS.get(str(training.settings.get("task")), "pair")))
    told = [
        f"{name.removeprefix('train.')} {value_text(value)}" for name, value in training.settings.items() if value != []
    ]
    if told:
        yield from row("run.toml", ", ".join(told))


def validation(facts: Mapping[str, Any]) -> str:
    return f"step {facts['step']:,}: {figures(facts)}"


def score(facts: Mapping[str, Any], unit: str) -> str:
    """`unit`: of what it was measured on, where the run does not say."""
    pairs, told = facts.get("pairs"), facts.get("unit")
    of = f" of {many(pairs, told if isinstance(told, str) else unit)}" if isinstance(pairs, int) else ""
    return f"{facts.get('kind', 'set')} {facts.get('name', '')}{of}: {figures(facts)}"


def figures(facts: Mapping[str, Any]) -> str:
    named = (
        ("loss", "loss", 3, ""),
        ("perplexity", "perplexity", 2, ""),
        ("bleu", "BLEU", 1, ""),
        ("chrf", "chrF", 1, ""),
        ("exact", "exact", 1, "%"),
        ("accuracy", "accuracy", 2, "%"),
    )
    numbers = [(name, facts.get(key), digits, unit) for key, name, digits, unit in named]
    return ", ".join(f"{name} {n:.{digits}f}{unit}" for name, n, digits, unit in numbers if isinstance(n, int | float))


def many(count: int, what: str) -> str:
    ending = "es" if what.endswith("ch") else "s"
    return f"{count:,} {what}{ending if count != 1 else ''}"


def value_text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def row(name: str, text: str) -> Iterator[str]:
    """A name and what is to be said, broken at spaces so that a page has 80 columns."""
    from rich.cells import cell_len, chop_cells

    from attent.cli.data import visible

    lines = [""]
    for word in visible(text).split(" "):
        for i, part in enumerate(chop_cells(word, WIDTH - LABEL) or [""]):
            joined = f"{lines[-1]} {part}" if lines[-1] and i == 0 else lines[-1] + part
            if cell_len(joined) <= WIDTH - LABEL:
                lines[-1] = joined
            else:
                lines.append(part)
    yield f"{name:<{LABEL}}{lines[0]}".rstrip()
    yield from (" " * LABEL + line for line in lines[1:])


def size(count: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
