"""Open a model for inspection, inspect inputs, and render the result as HTML, JSON, figures, arrays or tables."""

from __future__ import annotations

import html
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from attent import settings
from attent.data.pairs import LanguagePair
from attent.decoding.loading import DTYPES, load_tokenizer, read_data_settings
from attent.decoding.options import DeviceOptions, SearchOptions
from attent.decoding.transcriber import Transcriber
from attent.decoding.translator import Translator
from attent.formatting import format_count
from attent.inspection import ablate, head_stats
from attent.inspection import attention_trace as trace
from attent.inspection.ablate import ModelPart
from attent.inspection.html_page import render_page
from attent.inspection.inspectors.base import InspectionRequest, Inspector
from attent.inspection.inspectors.front_ends import CaptioningInspector, SpeechInspector, VisionInspector
from attent.inspection.inspectors.seq2seq import TranslationInspector
from attent.inspection.inspectors.text import CausalLMInspector, EncoderInspector
from attent.interop import load
from attent.models import CausalLM, Seq2Seq, VisionTransformer
from attent.models.folder import write_side_settings
from attent.nn import AudioConfig
from attent.nn.devices import choose_device
from attent.scoring.pipeline import read_test_set
from attent.storage.atomic import write_output
from attent.storage.errors import AttentError, FolderError
from attent.storage.hub import get_model_name, locate_model
from attent.storage.manifest import explain_save_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

CachedT = TypeVar("CachedT")


def look(
    model: str | Path | Translator | Inspector[Any],
    text: str,
    *,
    text_pair: str | None = None,
    target: str | None = None,
    to: str | None = None,
    beam_size: int = 4,
    mask: str | Sequence[str] = (),
    kind: trace.AttentionKind | None = None,
    layers: int | Sequence[int] | None = None,
) -> Inspection:
    """Run a model on a text and record every attention head; a notebook shows the result as an interactive page.

    model      a model folder, or a `Translator`
    text       a sentence; for vision and caption models the path of an image, for speech models that of a recording
    text_pair  second segment, for text encoders
    target     inspect this translation instead of searching for one
    mask       parts to switch off, such as `decoder.blocks.3.cross_attn:2`
    kind       record only self-attention or only cross-attention; layers: only these layers of each stack

    >>> inspection = attent.look("runs/en-de", "A man sings.")
    >>> inspection
    Inspection of 'A man sings.' -> 'Ein Mann singt.': 3 attention layers; save_html(path) writes the page
    >>> inspection.save_html("look.html")

    `help(attent.Inspection)` lists the rest: `attention` (arrays), `plot` (a figure) and `to_frame` (a table).
    """
    if not isinstance(text, str | Path):
        raise AttentError(f"`text` must be one string, but is of type {type(text).__name__}; give one text")
    request = InspectionRequest(
        text=str(text),
        text_pair=text_pair,
        target=target,
        to=to,
        search=SearchOptions(beam_size=beam_size),
        masked_parts=tuple(map(ModelPart.parse, [mask] if isinstance(mask, str) else mask)),
        kind=kind,
        layers=None if layers is None else (layers,) if isinstance(layers, int) else tuple(layers),
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
    """Load a model folder, with its stored head statistics and ablation, into the inspector of its family."""
    if isinstance(model, Inspector):
        return model
    if isinstance(model, Translator):
        return open_translator(model, warn)
    if not isinstance(model, str | Path):
        raise AttentError(f"`model` must be a folder or a Translator, but is of type {type(model).__name__}")
    folder = locate_model(model)
    name = get_model_name(folder)
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
    data_languages = (data.get("src"), data.get("tgt"))
    if isinstance(loaded.config.frontend, AudioConfig):
        return SpeechInspector(Transcriber.load(folder, model=loaded), name=name, languages=data_languages)
    if loaded.config.frontend is not None:
        return CaptioningInspector(loaded, tokenizer, name=name, languages=data_languages)
    return open_translator(Translator(loaded, tokenizer, folder=folder, threads=options.threads, notify=notify), warn)


def open_translator(translator: Translator, warn: Callable[[str], None]) -> TranslationInspector:
    folder = translator.folder
    if folder is None or not isinstance(translator.model, Seq2Seq):
        return TranslationInspector(translator)
    data = read_data_settings(folder)
    languages = translator.tokenizer.languages or (data.get("src"), data.get("tgt"))
    inspector = TranslationInspector(translator, name=get_model_name(folder), languages=languages)
    stats = load_cached(head_stats.load_head_stats, folder, translator.model, warn)
    ablation = load_cached(ablate.load_matching_ablation, folder, translator.model, warn)
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
    """Measure head statistics on parallel text; the folder keeps them."""
    test_set = read_test_set(data, languages, warn)
    pairs = [pair for pair in zip(test_set.sources, test_set.references, strict=True) if all(pair)][:limit]
    notify(f"measuring head statistics on {len(pairs):,} pairs ...")
    dataset = ", ".join(Path(name).name for name in test_set.name.split(", "))
    stats = head_stats.measure_heads(inspector.translator, pairs, to=to, dataset=dataset)
    inspector.head_stats = stats.to_document()
    try:
        with explain_save_errors(folder.expanduser(), "head statistics"):
            write_side_settings(folder.expanduser(), head_stats.HEAD_STATS_FILE, stats)
    except FolderError as error:  # a read-only folder must not prevent the page
        warn(str(error))


@dataclass(frozen=True, repr=False)
class Inspection:
    """A recorded input: notebooks show the page. All is derived from `document`, which docs/inspection.md describes.

    >>> inspection = attent.look("runs/en-de", "A man sings.")
    >>> weights = inspection.attention["decoder.blocks.0.cross_attn"]  # a NumPy array with the tokens of both sides
    >>> weights.shape == (2, len(weights.queries), len(weights.keys))
    True
    >>> weights.keys[-1]
    '‹end›'
    >>> inspection.to_frame().columns.tolist()
    ['path', 'head', 'query', 'key', 'weight', 'query_token', 'key_token']
    >>> figure = inspection.plot(layer=0, head=1)
    """

    document: dict[str, Any]

    def __repr__(self) -> str:
        texts = " -> ".join(repr(side["text"]) for side in self.document["sides"].values() if side["text"])
        layers = format_count(len(self.document["layers"]), "attention layer")
        return f"Inspection of {texts or 'a model'}: {layers}; save_html(path) writes the page"

    def _repr_html_(self) -> str:
        """Return the page in a frame without access to the notebook; a host that removes frames shows its text."""
        page = render_page(self.document).replace("&", "&amp;").replace("'", "&#39;")  # JSON is full of double quotes
        style = "width: 100%; height: 800px; border: 1px solid #8884; border-radius: 4px"
        attributes = f'sandbox="allow-scripts" title="attent look" style="{style}"'
        return f"<iframe {attributes} srcdoc='{page}'>{html.escape(repr(self))}</iframe>"

    @cached_property
    def attention(self) -> Mapping[str, trace.AttentionWeights]:
        """The weights of each layer by module path: arrays (heads, queries, keys) with `.queries` and `.keys`."""
        sides = self.document["sides"].items()
        tokens = {name: tuple(map(trace.format_token, side["tokens"])) for name, side in sides}
        weights = trace.LayerMapping[trace.AttentionWeights]()
        for layer in self.document["layers"]:
            queries, keys = tokens[layer["queries"]], tokens[layer["keys"]]
            weights[layer["path"]] = trace.AttentionWeights.from_tensor(
                trace.unpack_weights(layer, len(keys)), queries, keys
            )
        return weights

    def to_frame(self) -> DataFrame:
        """Return a pandas table of all weights: path, head, query, key (positions, from 0), weight, and both tokens."""
        import pandas as pd

        frames = []
        for path, weights in self.attention.items():
            frames.append(trace.build_frame(weights, ("head", "query", "key"), path=path))
            for axis, tokens in (("query", weights.queries), ("key", weights.keys)):
                frames[-1][f"{axis}_token"] = np.array(tokens)[frames[-1][axis]]
        return pd.concat(frames, ignore_index=True)

    @classmethod
    def from_json(cls, text: str) -> Inspection:
        """Read the output of `to_json` or `attent look --json`; weights are exact to 0.8e-5, q, k, v to 3 digits."""
        document = settings.parse_json(text.encode(), "the inspection")
        if (document.get("format"), document.get("version")) != (trace.FORMAT, trace.VERSION):
            raise AttentError(
                f'an inspection must have "format": "{trace.FORMAT}" and "version": {trace.VERSION}; create it again'
            )
        return cls(document)

    def to_json(self) -> str:
        return json.dumps(self.document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)

    def save_html(self, path: str | Path) -> None:
        """Write one HTML file that works offline."""
        write_output(Path(path), render_page(self.document).encode())

    def plot(
        self, layer: int | str | None = None, head: int | None = None, *, kind: trace.AttentionKind | None = None
    ) -> Figure:
        """Return a matplotlib figure of one head: of those selected, the one that aligns best.

        layer      number from 0, or a path such as "decoder.blocks.2.cross_attn"; None: any
        head       number from 0; None: any
        kind       self or cross; None: cross-attention, if there is any
        """
        from attent.inspection.plots import plot_head

        layers = [each for each in self.document["layers"] if layer in (None, each["layer"], each["path"])]
        kinds = [kind] if kind else ["cross", "self"]
        groups = ([each["path"] for each in layers if each["kind"] == name] for name in kinds)
        path, index = self.select_head(next(filter(None, groups), []), head)
        return plot_head(self.label_rows(path, index), path, index)

    def select_head(self, paths: Sequence[str] | None = None, head: int | None = None) -> tuple[str, int]:
        """Return the head that aligns best: of these layers, or of those with cross-attention."""
        if paths is None:
            paths = [layer["path"] for layer in self.document["layers"] if layer["kind"] == "cross"]
        entries = self.document["head_stats"]["heads"]
        candidates = [entry for entry in entries if entry["path"] in paths and head in (None, entry["head"])]
        if not candidates:
            recorded = ", ".join(self.attention)
            raise AttentError(f"no head of this layer, number and kind was recorded; recorded: {recorded}")

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
