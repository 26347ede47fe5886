"""Open a model for inspection, inspect inputs, and render the result as HTML, JSON or figures.

inspection = attent.look("runs/en-de", "A man rides a bike.")
inspection.save_html("look.html")
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from attent import settings
from attent.data.pairs import LanguagePair
from attent.decoding.loading import DTYPES, load_tokenizer, read_data_settings
from attent.decoding.options import DeviceOptions, SearchOptions
from attent.decoding.transcriber import Transcriber
from attent.decoding.translator import Translator
from attent.inspection import ablate, head_stats
from attent.inspection.attention_trace import AttentionKind
from attent.inspection.head_masking import ModelPart
from attent.inspection.html_page import render_page
from attent.inspection.inspectors.base import InspectionRequest, Inspector
from attent.inspection.inspectors.speech import SpeechInspector
from attent.inspection.inspectors.text import CausalLMInspector, EncoderInspector
from attent.inspection.inspectors.translation import TranslationInspector
from attent.inspection.inspectors.vision import CaptioningInspector, VisionInspector
from attent.interop import load
from attent.models import CausalLM, Seq2Seq, VisionTransformer
from attent.nn import AudioConfig
from attent.nn.devices import choose_device
from attent.scoring.pipeline import read_test_set
from attent.storage.atomic import write_output
from attent.storage.errors import FolderError
from attent.storage.manifest import explain_save_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CachedT = TypeVar("CachedT")


def look(
    model: str | Path | Translator | Inspector[Any],
    text: str,
    *,
    text_pair: str | None = None,
    target: str | None = None,
    to: str | None = None,
    beam_size: int = 4,
    mask: Sequence[str] = (),
    kind: AttentionKind | None = None,
    layers: Sequence[int] | None = None,
) -> Inspection:
    """Run a model on a text and record every attention head.

    model      a model folder, a `Translator`, or an inspector that is already open
    text       a sentence; for vision and caption models the path of an image, for speech models that of a recording
    text_pair  second segment, for text encoders
    target     inspect this translation instead of searching for one
    mask       parts to switch off, such as `decoder.blocks.3.cross_attn:2`
    kind       record only self-attention or only cross-attention; layers: only these layers of each stack
    """
    request = InspectionRequest(
        text=text,
        text_pair=text_pair,
        target=target,
        to=to,
        search=SearchOptions(beam_size=beam_size),
        masked_parts=tuple(map(ModelPart.parse, mask)),
        kind=kind,
        layers=None if layers is None else tuple(layers),
    )
    return Inspection(open_inspector(model).inspect(request))


def open_inspector(
    model: str | Path | Translator | Inspector[Any],
    options: DeviceOptions = DeviceOptions(dtype="float32"),  # noqa: B008 - frozen
    *,
    languages: LanguagePair = LanguagePair(),  # noqa: B008 - frozen
    notify: Callable[[str], None] | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> Inspector[Any]:
    """Load a model folder, with its stored head statistics and ablation, into the inspector of its family.

    languages  for a model of many languages, such as NLLB
    """
    if isinstance(model, Inspector):
        return model
    if isinstance(model, Translator):
        return TranslationInspector(model)
    folder = Path(model).expanduser()
    name = folder.resolve().name
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    loaded = load(folder, dtype=DTYPES[options.dtype or "float32"], device=choose_device(options.device))
    if isinstance(loaded, VisionTransformer):
        return VisionInspector(loaded, name=name)
    tokenizer = load_tokenizer(folder, languages.source, languages.target)
    if isinstance(loaded, CausalLM):
        return CausalLMInspector(loaded, tokenizer.source, name=name)
    if not isinstance(loaded, Seq2Seq):
        return EncoderInspector(loaded, tokenizer, name=name)
    data = read_data_settings(folder)
    side_languages = (languages.source or data.get("src"), languages.target or data.get("tgt"))
    if isinstance(loaded.config.frontend, AudioConfig):
        return SpeechInspector(Transcriber.load(folder, model=loaded), name=name, languages=side_languages)
    if loaded.config.frontend is not None:
        return CaptioningInspector(loaded, tokenizer, name=name, languages=side_languages)
    stats = load_cached(head_stats.load_head_stats, folder, loaded, warn)
    ablation = load_cached(ablate.load_matching_ablation, folder, loaded, warn)
    translator = Translator(loaded, tokenizer, folder=folder, threads=options.threads, notify=notify)
    inspector = TranslationInspector(translator, name=name, languages=side_languages)
    inspector.head_stats = None if stats is None else stats.to_document()
    inspector.ablation = None if ablation is None else ablation.to_document()
    return inspector


def load_cached(
    load: Callable[[Path, Seq2Seq], CachedT | None], folder: Path, model: Seq2Seq, warn: Callable[[str], None]
) -> CachedT | None:
    """Load stored measurements; a damaged file gives a warning and None, since they can be measured again."""
    try:
        return load(folder, model)
    except (settings.SettingsError, FolderError) as error:
        warn(f"{error}; the file is ignored")
        return None


def measure_head_stats(
    inspector: TranslationInspector,
    folder: Path,
    data: Sequence[str],
    languages: LanguagePair,
    to: str | None = None,
    limit: int | None = None,
    *,
    notify: Callable[[str], None],
    warn: Callable[[str], None] = warnings.warn,
) -> None:
    """Measure head statistics on parallel text; the folder keeps those of the most sentences."""
    test_set = read_test_set(data, languages, warn)
    pairs = [pair for pair in zip(test_set.sources, test_set.references, strict=True) if all(pair)][:limit]
    notify(f"measuring head statistics on {len(pairs):,} pairs ...")
    stored = (inspector.head_stats or {}).get("sentences", 0)
    dataset = ", ".join(Path(name).name for name in test_set.name.split(", "))
    sources, references = [source for source, _ in pairs], [reference for _, reference in pairs]
    tokenizer = inspector.translator.tokenizer
    stats = head_stats.measure_heads(inspector.model, tokenizer, sources, references, to=to, dataset=dataset)
    inspector.head_stats = stats.to_document()
    if stored > stats.sentences:
        notify(f"{head_stats.HEAD_STATS_FILE} was measured on {stored:,} sentences and is not replaced")
        return
    try:
        with explain_save_errors(folder.expanduser(), "head statistics"):
            head_stats.save_head_stats(folder.expanduser(), stats)
    except FolderError as error:  # a read-only folder must not prevent the page
        warn(str(error))


@dataclass(frozen=True)
class Inspection:
    """A trace document and its renderings."""

    document: dict[str, Any]

    def to_json(self) -> str:
        return json.dumps(self.document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)

    def save_html(self, path: str | Path) -> None:
        """Write one HTML file that works offline."""
        write_output(Path(path), render_page(self.document).encode())

    def plot(self, *, kind: AttentionKind | None = None, heads: Sequence[int] = (), all_kinds: bool = False) -> Figure:
        """Return a figure of the recorded heads; by default only of cross-attention if there is any."""
        from attent.inspection.plots import plot_heads

        layers, document = self.document["layers"], self.document
        if not (kind or heads or all_kinds) and any(layer["kind"] == "cross" for layer in layers):
            kind = "cross"
        if len(layers) == 1 == len(heads):
            document = self.label_rows(layers[0]["path"], heads[0])
        return plot_heads(document, kind=kind, heads=heads or None)

    def select_head(self) -> tuple[str, int]:
        """Return the recorded cross-attention head that aligns best."""
        recorded = {layer["path"] for layer in self.document["layers"] if layer["kind"] == "cross"}
        candidates = [entry for entry in self.document["head_stats"]["heads"] if entry["path"] in recorded]
        if not candidates:
            raise ValueError("there must be a recorded head of cross-attention, but there is none; record others")

        def rate_head(entry: dict[str, Any]) -> tuple[float, float]:
            """Alignment weighted by confidence: diffuse heads link at random."""
            values = entry["values"]
            confidence, alignment = values.get("confidence") or 0.0, values.get("alignment")
            return (values.get("same_token") or 0.0) if alignment is None else alignment * confidence, confidence

        best = max(candidates, key=rate_head)
        return best["path"], best["head"]

    def label_rows(self, path: str, head: int) -> dict[str, Any]:
        """Return the document with a layer's rows labeled by decoder input if the head aligns better that way."""
        stats = {(entry["path"], entry["head"]): entry["values"] for entry in self.document["head_stats"]["heads"]}
        values = stats.get((path, head), {})
        if (values.get("aligned_on_input") or 0.0) <= (values.get("aligned_on_output") or 0.0):
            return self.document
        layers = [
            layer | {"queries": "decoder_input"} if layer["path"] == path else layer
            for layer in self.document["layers"]
        ]
        return self.document | {"layers": layers}
