"""Inspect an encoder-decoder: the search as a tree, and the attention of a forward pass. Subclasses load the source."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from attent.decoding.constraints.token_rules import has_loop
from attent.decoding.engines.reference import TorchEngine
from attent.decoding.loading import pad_token_ids
from attent.decoding.mask_tokens import MaskTokens
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest, Segment, StopCheck
from attent.decoding.search_trace import SearchTrace, TraceNode, trace_search, trace_source
from attent.decoding.source_search import build_source_context
from attent.decoding.translator import Translator
from attent.inspection.attention_trace import TraceSide, build_display_tokens
from attent.inspection.inspectors import base
from attent.models import Seq2Seq
from attent.models.seq2seq import find_suppressed_tokens, shift_right
from attent.nn.devices import get_device
from attent.storage.errors import AttentError
from attent.text.tokenizer import Tokenizer
from attent.text.vocabulary import Vocabulary, replace_surrogates


@dataclass(frozen=True, kw_only=True)
class LoadedSource:
    tensor: Tensor  # (1, ...), as `Seq2Seq` takes it
    lengths: Tensor | None
    side: TraceSide
    request: SearchRequest = SearchRequest(source_ids=())  # noqa: RUF009 - frozen
    prompt_ids: tuple[int, ...] = ()  # read by the decoder before the text
    suppressed_tokens: tuple[int, ...] = ()  # besides those that no target contains


class Seq2SeqInspector(base.Inspector[Seq2Seq]):
    supported_options = frozenset({"target", "to"})
    output_name: ClassVar[str]  # of the target

    def __init__(
        self,
        model: Seq2Seq,
        tokenizer: Tokenizer,
        *,
        name: str = "",
        languages: tuple[str | None, str | None] = (None, None),
    ) -> None:
        super().__init__(model, name=name)
        self.tokenizer, self.languages = tokenizer, languages

    def _load_source(self, request: base.InspectionRequest) -> LoadedSource:
        raise NotImplementedError

    def _trace_search(
        self, source: LoadedSource, search: SearchOptions, should_stop: StopCheck | None
    ) -> tuple[SearchTrace, bool]:
        inputs, search = (source.tensor, source.lengths), replace(search, n_best=search.beam_size)
        (request,), context = build_source_context(
            self.model, self.tokenizer, *inputs, search, source.prompt_ids, source.suppressed_tokens
        )
        prompt_ids = (self.model.config.start_id, *source.prompt_ids)[:-1]
        check = partial(base.check_cancelled, should_stop)
        return trace_source(self.model, *inputs, request, context, prompt_ids=prompt_ids, check_cancelled=check), False

    def _run(self, request: base.InspectionRequest, should_stop: StopCheck | None) -> base.RecordedPass:
        target = None if request.target is None else replace_surrogates(request.target)
        request = replace(request, text=replace_surrogates(request.text), target=target)
        source = self._load_source(request)
        search_trace, repeated = None, False
        if request.target is None:
            search_trace, repeated = self._trace_search(source, request.search, should_stop)
            hypothesis = search_trace.hypotheses[0]
            hypothesis = replace(hypothesis, token_ids=(*source.prompt_ids, *hypothesis.token_ids))
        else:
            ids = (*source.prompt_ids, *self._encode_target(request.target.strip()))
            base.check_length(self.model.decoder, len(ids) + 1, f"the {self.output_name}")
            hypothesis = Hypothesis(token_ids=ids, log_prob=math.nan, score=math.nan, is_finished=True)
        sides = self._build_sides(request, source, hypothesis)
        layers, log_probs = self._run_forward(request, source, hypothesis, sides, should_stop)
        predictions = base.describe_predictions(self.tokenizer.target, self._get_output_ids(hypothesis), log_probs)
        if search_trace is None:
            decoding = describe_given_target(hypothesis, sides, predictions, len(source.prompt_ids))
        else:
            decoding = self._describe_search(search_trace, source, request.search, predictions)
            decoding["forbid_loops"] = repeated
        return base.RecordedPass(title=source.side.text, sides=sides, layers=layers, sections={"decoding": decoding})

    # --- forward pass ------------------------------------------------------------------------------------------------

    def _build_sides(
        self, request: base.InspectionRequest, source: LoadedSource, hypothesis: Hypothesis
    ) -> dict[str, TraceSide]:
        vocabulary, output_ids = self.tokenizer.target, self._get_output_ids(hypothesis)
        input_ids = [self.model.config.start_id, *output_ids[:-1]]
        input_tokens = build_display_tokens(vocabulary, input_ids, is_decoder_input=True)
        output_tokens = build_display_tokens(vocabulary, output_ids)
        to = request.to or self.languages[1]
        has_spans = any(token in self.tokenizer.source.sentinels for token in source.request.source_ids)
        label = "filled spans" if has_spans else self.output_name
        text = self._decode_target(hypothesis.token_ids[len(source.prompt_ids) :])
        return {
            "source": source.side,
            "decoder_input": TraceSide(label="decoder input", tokens=input_tokens, language=to),
            "target": TraceSide(label=label, text=text, tokens=output_tokens, language=to),
        }

    def _encode_target(self, text: str) -> list[int]:
        return [*self.tokenizer.target_prefix, *encode_with_sentinels(self.tokenizer.target, text)]

    def _decode_target(self, token_ids: Sequence[int]) -> str:
        target = self.tokenizer.target
        has_spans = any(token in target.sentinels for token in token_ids)
        return format_spans(target, token_ids) if has_spans else target.decode(token_ids)

    def _get_output_ids(self, hypothesis: Hypothesis) -> list[int]:
        return [*hypothesis.token_ids, *([self.model.config.end_id] if hypothesis.is_finished else [])]

    def _run_forward(
        self,
        request: base.InspectionRequest,
        source: LoadedSource,
        hypothesis: Hypothesis,
        sides: Mapping[str, TraceSide],
        should_stop: StopCheck | None,
    ) -> tuple[list[dict[str, Any]], Tensor]:
        """Return the recorded layers and the log-probabilities of every output position, (T, V)."""
        target, lengths = pad_token_ids([self._get_output_ids(hypothesis)], get_device(self.model))
        with self.record_layers(sides, request, should_stop) as layers:
            memory = self.model.encode(source.tensor, source.lengths)
            states = self.model.decode(shift_right(target, self.model.config.start_id), memory, lengths)
        logits = self.model.output(states)[0].float()
        suppressed = [*find_suppressed_tokens(self.model.config, self.tokenizer), *source.suppressed_tokens]
        suppressed_ids = torch.tensor(suppressed, dtype=torch.int64, device=logits.device)
        return layers, logits.index_fill(-1, suppressed_ids, -math.inf).log_softmax(-1).cpu()

    # --- document sections -------------------------------------------------------------------------------------------

    def _describe_search(
        self, search_trace: SearchTrace, source: LoadedSource, search: SearchOptions, predictions: list[dict[str, Any]]
    ) -> dict[str, Any]:
        paths = [set(search_trace.path_to(last)) for last in search_trace.last_nodes]
        on_best_path, in_results = paths[0], set().union(*paths)
        last_step = max(node.step for node in search_trace.nodes)
        shown = [n for n in search_trace.nodes if last_step < base.LONG_TEXT_STEPS or n.is_live or n.score is not None]
        results = zip(search_trace.hypotheses, search_trace.last_nodes, strict=True)
        return {
            "formula": search.score_formula,
            "beam_size": search.beam_size,
            "forced": len(source.prompt_ids) + len(source.request.prefix_ids),
            "nodes": [self._describe_node(n, n.index in on_best_path, n.index in in_results) for n in shown],
            "results": [
                {
                    "text": self._decode_target(hypothesis.token_ids),
                    "score": base.round_for_json(hypothesis.score),
                    "log_prob": base.round_for_json(hypothesis.log_prob),
                    "node": last_node,
                    "ended": hypothesis.is_finished,
                }
                for hypothesis, last_node in results
            ],
            "choices": predictions,
        }

    def _describe_node(self, node: TraceNode, on_best_path: bool, in_results: bool) -> dict[str, Any]:
        return {
            "id": node.index,
            "parent": node.parent,
            "step": node.step,
            **base.describe_token(self.tokenizer.target, node.token),
            "log_prob": base.round_for_json(node.log_prob),
            "sum": base.round_for_json(node.total_log_prob),
            "expanded": node.is_live,
            "ended": node.score is not None,
            "score": None if node.score is None else base.round_for_json(node.score),
            "on_best_path": on_best_path,
            "in_results": in_results,
        }


def describe_given_target(
    hypothesis: Hypothesis, sides: Mapping[str, TraceSide], predictions: list[dict[str, Any]], prompt_length: int
) -> dict[str, Any]:
    """The section `decoding` for a given target: token probabilities only."""
    log_prob = base.round_for_json(
        math.fsum(math.log(choice["p"]) if choice["p"] else -math.inf for choice in predictions[prompt_length:])
    )
    text, ended = sides["target"].text, hypothesis.is_finished
    result = {"text": text, "score": log_prob, "log_prob": log_prob, "node": None, "ended": ended}
    return {
        "given": True,
        "formula": "",
        "forced": prompt_length,
        "nodes": [],
        "results": [result],
        "choices": predictions,
    }


def encode_with_sentinels(vocabulary: Vocabulary, text: str) -> list[int]:
    """Encode a text; sentinels and masks written in it become their tokens if the vocabulary has them."""
    if not vocabulary.sentinels:
        return vocabulary.encode([text])[0]
    mask_tokens = MaskTokens(vocabulary)
    return mask_tokens.encode(mask_tokens.parse(text))


def format_spans(vocabulary: Vocabulary, token_ids: Sequence[int]) -> str:
    """Return an output of a span-corruption model as readable text: `<extra_id_0> cat <extra_id_1> on the`."""
    spans: list[list[int]] = []
    for token in token_ids:
        if token in vocabulary.sentinels:
            spans.append([token])
        elif spans:
            spans[-1].append(token)
    parts = [part for first, *rest in spans for part in (vocabulary.to_pieces([first])[0], vocabulary.decode(rest))]
    return " ".join(filter(None, map(str.strip, parts))) or vocabulary.decode(token_ids)


class TranslationInspector(Seq2SeqInspector):
    model_kind = "a translator"
    supported_options = frozenset({"target", "to", "prefix"})
    output_name = "translation"

    def __init__(
        self, translator: Translator, *, name: str = "", languages: tuple[str | None, str | None] = (None, None)
    ) -> None:
        if not isinstance(translator.model, Seq2Seq):
            raise AttentError("one model can be inspected at a time, but this is an ensemble; give one folder")
        super().__init__(translator.model, translator.tokenizer, name=name, languages=languages)
        self.translator = translator

    def _load_source(self, request: base.InspectionRequest) -> LoadedSource:
        base.check_is_text(request.text, self.model_kind)
        search_request = self._build_search_request(request)
        ids, vocabulary = search_request.source_ids, self.tokenizer.source
        source, lengths = pad_token_ids([ids], self.translator.device)
        tokens, text = build_display_tokens(vocabulary, ids), request.text.strip()
        side = TraceSide(label="source", text=text, tokens=tokens, language=self.languages[0])
        return LoadedSource(tensor=source, lengths=lengths, side=side, request=search_request)

    def _build_search_request(self, request: base.InspectionRequest) -> SearchRequest:
        text = self.translator._clean_text(request.text)
        if not text:
            raise AttentError("the sentence must not be empty")
        source = self.tokenizer.source
        (row,) = self.tokenizer.add_source_tokens([encode_with_sentinels(source, text)], request.to)
        base.check_length(self.model.encoder, len(row), "the sentence", request.max_tokens)
        search_request = self.translator._build_request(Segment(text), row, request.search, request.to)
        limit, size = search_request.max_length, self.model.config.output_vocab
        invalid = [token_id for token_id in request.prefix if not 0 <= token_id < size]
        if invalid:
            raise AttentError(f"`prefix` must hold token ids from 0 to {size - 1}, but one is {invalid[0]}")
        limit -= len(search_request.prefix_ids)
        if len(request.prefix) >= limit:
            raise AttentError(f"`prefix` must be shorter than {limit} tokens, but has {len(request.prefix)}")
        return replace(search_request, prefix_ids=(*search_request.prefix_ids, *request.prefix))

    def _trace_search(
        self, source: LoadedSource, search: SearchOptions, should_stop: StopCheck | None
    ) -> tuple[SearchTrace, bool]:
        """Search as `Translator` does: again with repetition suppressed if the result has a loop; True if it had."""
        engine: TorchEngine[Any] = self.translator._build_torch_engine(should_stop)
        search_request = source.request
        if self.translator._forbids_loops_in_first_search and not search_request.prefix_ids:
            search_request = replace(search_request, forbid_loops=not has_loop(search_request.source_ids))
        search_trace = trace_search(engine, search_request, search)
        if not search_trace.hypotheses:
            raise AttentError("no translation can continue this prefix; remove its last token")
        if has_loop(search_trace.hypotheses[0].token_ids) and not has_loop(search_request.source_ids):
            return trace_search(engine, replace(search_request, forbid_loops=True), search), True
        return search_trace, False
