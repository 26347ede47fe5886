"""`attent distil`: a small, fast student learns from the translations of a teacher, or of an ensemble.

A student has a deep encoder and a shallow decoder (Kasai et al. 2021): decoding takes most of the time. Its run is
an ordinary one, whose targets the teacher has written (`synthetic_pairs`); `attent train --out` resumes it.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attent.data.corpus import open_corpora
from attent.data.formats.registry import detect_format
from attent.data.in_memory import CorpusInput, is_in_memory
from attent.data.pairs import CorpusError, LanguagePair
from attent.decoding.engines.ctranslate2 import CTranslate2Engine
from attent.decoding.loading import load_tokenizer
from attent.decoding.options import SearchOptions, SearchRequest
from attent.interop import load_as
from attent.interop.ctranslate2 import MAX_POSITIONS
from attent.models import Seq2Seq, Seq2SeqConfig, build, presets
from attent.models.folder import WEIGHTS_FILE
from attent.storage.hub import locate_model
from attent.text.tokenizer import Tokenizer
from attent.training import checkpoint, run
from attent.training import config as run_config
from attent.training.autoconfig import fit_to_tokenizer
from attent.training.config import TrainError
from attent.training.events import EventHandler, Note
from attent.training.result import TrainResult
from attent.training.run_options import DISTIL_GROUPS, DistilOptions, accept_options

HEAD_WIDTH, FFN_FACTOR = 64, 4
MAX_POST_NORM_LAYERS = 6  # deeper stacks learn reliably with the norm first
DEFAULT_N_BEST = 4  # the beam, so that more hypotheses take no more time
MEASURED_SENTENCES, MEASURED_TOKENS, MEASURE_SECONDS = 32, 30, 2.0
NEVER = -1e4  # bias of the end token: all measured translations are equally long


@dataclass(frozen=True)
class StudentShape:
    encoder_layers: int
    decoder_layers: int
    width: int

    def __str__(self) -> str:
        return f"{self.encoder_layers}+{self.decoder_layers}x{self.width}"

    @classmethod
    def parse(cls, text: str) -> "StudentShape":
        match = re.fullmatch(r"(\d+)\+(\d+)x(\d+)", text)
        shape = cls(*map(int, match.groups())) if match else None
        if shape is None or not all(vars(shape).values()) or shape.width % HEAD_WIDTH:
            known = ", ".join(map(str, SHAPES))
            problem = f"must be layers of encoder and decoder and the width, a multiple of {HEAD_WIDTH}, but is {text}"
            raise TrainError(f"`size` {problem}; give one such as {known}")
        return shape

    @property
    def settings(self) -> dict[str, Any]:
        norm = "pre" if self.encoder_layers > MAX_POST_NORM_LAYERS else "post"
        both = {"width": self.width, "heads": self.width // HEAD_WIDTH, "ffn_width": FFN_FACTOR * self.width}
        layers = {"encoder.layers": self.encoder_layers, "decoder.layers": self.decoder_layers}
        return {f"model.{name}": value for name, value in (layers | both | {"norm_order": norm}).items()}

    def build_config(self, tokenizer: Tokenizer, vocab: int | None = None) -> Seq2SeqConfig:
        """The student's config with the vocabulary of a tokenizer, or one of `vocab` ids."""
        base = presets.base(vocab or tokenizer.source.size)
        requested = run_config.read_user_settings(None, self.settings, ())
        return run_config.build_model_config(requested, base if vocab else fit_to_tokenizer(base, tokenizer))


SHAPES = tuple(  # from the smallest to the largest
    StudentShape(*numbers)
    for numbers in ((6, 2, 256), (12, 1, 256), (6, 2, 384), (12, 1, 384), (6, 2, 512), (12, 1, 512))
)


@accept_options(DistilOptions, DISTIL_GROUPS)
def distil(
    data: CorpusInput = (),
    *,
    teacher: str | Path | Sequence[str | Path] | None = None,
    out: str | Path,
    size: str | None = None,
    megabytes: float | None = None,
    speed: float | None = None,
    n_best: int | None = None,
    settings: Mapping[str, Any] | None = None,
    callbacks: EventHandler | Sequence[EventHandler] = (),
    **options: Any,
) -> TrainResult:
    """Train a small, fast student on the translations that a teacher makes of `data`, or resume the run in `out`.

    attent.distil("corpus.tsv", teacher="runs/de-en", src="de", tgt="en", out="runs/de-en-small", megabytes=30)
    """
    if sum(value is not None for value in (size, megabytes, speed)) > 1:
        raise TrainError("only one of `size`, `megabytes` and `speed` can be given; leave the others out")
    teachers = [str(teacher)] if isinstance(teacher, str | Path) else list(map(str, teacher or ()))
    handlers = [callbacks] if callable(callbacks) else callbacks
    chosen: dict[str, Any] = {"data.synthetic.forward": teachers} if teachers else {}
    pairs, texts = (data, ()) if is_in_memory(data) else split_names(data, options)
    has_pairs = is_in_memory(pairs) or bool(pairs)
    if texts:
        chosen["data.synthetic.mono_source"] = texts
    if has_pairs:
        chosen["data.synthetic.replace_targets"] = True
        chosen["data.synthetic.n_best"] = DEFAULT_N_BEST if n_best is None else n_best
    if size is not None:
        chosen |= StudentShape.parse(size).settings
    folder = Path(out).expanduser()
    # With a checkpoint or a model in its folder, a run keeps what it began with.
    is_new = not (checkpoint.list_steps(folder / checkpoint.STATE_FOLDER) or (folder / WEIGHTS_FILE).exists())
    if is_new and not teachers and (has_pairs or texts):
        raise TrainError("a student needs a teacher, but none is named; give the folder of a translation model")
    if is_new and teachers and not (has_pairs or texts):
        raise TrainError("a student needs text, but none is named; give source text or pairs as `data` (--data)")
    if is_new and teachers:
        model, vocab = locate_model(teachers[0]), options.get("vocab")
        tokenizer = load_tokenizer(model, options.get("src"), options.get("tgt"))
        if vocab is None and tokenizer.is_own and not tokenizer.source.tags:  # tags would need --to
            chosen["data.tokenizer_from"] = teachers[0]
        if size is None:
            shape, reason = choose_shape(model, tokenizer, vocab, megabytes, speed, options.get("threads"))
            chosen |= shape.settings
            for handler in handlers:
                handler(Note(text=f"student: {shape}, {reason}"))
    return run.train(pairs, out=out, settings={**chosen, **(settings or {})}, callbacks=handlers, **options)


def split_names(data: Any, options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of corpora of pairs, and of files of text without translations."""
    pairs, texts = [], []
    for name in [str(data)] if isinstance(data, str | Path) else map(str, data):
        try:
            open_corpora([name], LanguagePair(options.get("src"), options.get("tgt")), warn=lambda text: None)
            pairs.append(name)
        except CorpusError:
            if not Path(name).expanduser().is_file() or detect_format(name) is not None:
                raise
            texts.append(name)
    return pairs, texts


def choose_shape(
    teacher: Path,
    tokenizer: Tokenizer,
    vocab: int | None,
    megabytes: float | None,
    speed: float | None,
    threads: int | None,
) -> tuple[StudentShape, str]:
    """Return the largest shape within the limits, and the reason."""
    if megabytes is None and speed is None:
        width = load_as(teacher, Seq2Seq).config.encoder.width
        return StudentShape(6, 2, max(HEAD_WIDTH, min(384, width // HEAD_WIDTH * HEAD_WIDTH))), "the default"
    for shape in SHAPES[::-1]:
        config = shape.build_config(tokenizer, vocab)
        if speed is None and (size := estimate_int8_bytes(config) / 1e6) <= (megabytes or 0):
            return shape, f"{size:.1f} MB as int8"
        if speed is not None and (sentences := measure_speed(config, threads)) >= speed:
            return shape, f"{sentences:,.0f} sentences/s measured with random weights"
    if speed is not None:
        raise TrainError(f"`speed` must be at most {sentences:.0f}, that of {shape} here, but is {speed:g}; lower it")
    problem = f"`megabytes` must be at least {size:.1f}, those of {shape}, but is {megabytes:g}"
    raise TrainError(f"{problem}; raise it, lower `vocab`, or give another `size`")


def estimate_int8_bytes(config: Seq2SeqConfig) -> int:
    """The size of a model in CTranslate2's int8 format: a byte for each weight, a scale for each row, and sinusoids."""
    with torch.device("meta"):
        parameters = list(build(config).parameters())
    weights = sum(p.numel() + 4 * p.shape[0] if p.ndim > 1 else 4 * p.numel() for p in parameters)
    return weights + 4 * MAX_POSITIONS * config.encoder.width


@torch.no_grad()
def measure_speed(config: Seq2SeqConfig, threads: int | None = None) -> float:
    """Translate sentences of 30 tokens into as many, with random weights; return the sentences per second."""
    model = build(replace(config, output_bias=True)).eval()
    assert model.output.bias is not None
    model.output.bias[config.end_id] = NEVER
    engine = CTranslate2Engine(model, None, use_cache=False, threads=threads)
    ids = torch.randint(config.vocab // 2, config.vocab, (MEASURED_TOKENS,)).tolist()
    request = SearchRequest(source_ids=[*ids, config.end_id], max_length=MEASURED_TOKENS)
    requests, count, start = [request] * MEASURED_SENTENCES, 0, time.monotonic()
    while time.monotonic() - start < MEASURE_SECONDS:
        count += len(list(engine.search(requests, SearchOptions())))
    return count / (time.monotonic() - start)
