"""Inspect an encoder-decoder model: the beam search as a tree, and every attention weight of the forward pass over the
best hypothesis (or over a given translation).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attent.decoding import Translator
from attent.decoding.constraints.no_repeat import has_loop
from attent.decoding.engines.reference import TorchEngine
from attent.decoding.forced_decoding import TeacherForcingBatch
from attent.decoding.mask_tokens import MaskTokens
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest, StopCheck
from attent.decoding.search_trace import SearchTrace, TraceNode, trace_search
from attent.decoding.span_infilling import format_spans
from attent.inspection.attention_trace import TraceSide
from attent.inspection.display_tokens import build_display_tokens
from attent.inspection.inspectors import base
from attent.models import Seq2Seq
from attent.models.seq2seq import find_suppressed_tokens
from attent.text.tokenizer import add_end_and_tag
from attent.text.vocabulary import Vocabulary, replace_surrogates


class TranslationInspector(base.Inspector[Seq2Seq]):
    """Inspects a translator."""

    model_kind = "a translator"
    supported_options = frozenset({"target", "to", "prefix"})

    def __init__(
        self,
        translator: Translator,
        *,
        name: str = "",
        languages: tuple[str | None, str | None] = (None, None),
        head_stats: dict[str, Any] | None = None,
        ablation: dict[str, Any] | None = None,
    ) -> None:
        if not isinstance(translator.model, Seq2Seq):
            raise ValueError("one model can be inspected at a time, but this is an ensemble; give one folder")
        super().__init__(translator.model, name=name, head_stats=head_stats, ablation=ablation)
        self.translator, self.languages = translator, languages

    def _run(self, request: base.InspectionRequest, should_stop: StopCheck | None) -> base.RecordedPass:
        target = None if request.target is None else replace_surrogates(request.target)
        request = replace(request, text=replace_surrogates(request.text), target=target)
        search_request = self._build_search_request(request)
        search_trace, repeated = None, False
        if request.target is None:
            search_trace, repeated = self._trace_search(search_request, request.search, should_stop)
            hypothesis = search_trace.hypotheses[0]
        else:
            ids = tuple(encode_with_sentinels(self.translator.tokenizer.target, request.target.strip()))
            base.check_length(self.model.decoder, len(ids) + 1, "the translation")
            hypothesis = Hypothesis(token_ids=ids, log_prob=math.nan, score=math.nan, is_finished=True)
        sides = self._build_sides(request, search_request, hypothesis)
        layers, log_probs = self._run_forward(request, search_request, hypothesis, sides, should_stop)
        vocabulary = self.translator.tokenizer.target
        predictions = base.describe_predictions(vocabulary, self._get_output_ids(hypothesis), log_probs)
        if search_trace is None:
            decoding = describe_given_target(hypothesis, sides, predictions)
        else:
            decoding = self._describe_search(search_trace, request, predictions) | {"forbid_loops": repeated}
        return base.RecordedPass(
            title=request.text.strip(), sides=sides, layers=layers, sections={"decoding": decoding}
        )

    # --- search ------------------------------------------------------------------------------------------------------

    def _build_search_request(self, request: base.InspectionRequest) -> SearchRequest:
        text = self.translator.clean_text(request.text)
        if not text:
            raise ValueError("the sentence must not be empty")
        source = self.translator.tokenizer.source
        (row,) = add_end_and_tag([encode_with_sentinels(source, text)], source, request.to)
        num_added = 1 if request.to is None else 2  # end token and language tag
        limit = request.search.compute_max_length(len(row) - num_added)
        base.check_length(self.model.encoder, len(row), "the sentence", request.max_tokens)
        limit = min(limit, self.model.decoder.positions.max_length or limit)
        size = self.model.config.output_vocab
        invalid = [token_id for token_id in request.prefix if not 0 <= token_id < size]
        if invalid:
            raise ValueError(f"`prefix` must hold token ids from 0 to {size - 1}, but one is {invalid[0]}")
        if len(request.prefix) >= limit:
            raise ValueError(f"`prefix` must be shorter than {limit} tokens, but has {len(request.prefix)}")
        return SearchRequest(source_ids=row, prefix_ids=request.prefix, max_length=limit)

    def _trace_search(
        self, search_request: SearchRequest, search: SearchOptions, should_stop: StopCheck | None
    ) -> tuple[SearchTrace, bool]:
        """Search as `Translator` does: if the result has a loop, search again with repetition suppressed. Also return
        whether the search was repeated."""
        engine: TorchEngine[Any] = self.translator.build_torch_engine(should_stop)
        if self.translator.forbids_loops_in_first_search and not search_request.prefix_ids:
            search_request = replace(search_request, forbid_loops=not has_loop(search_request.source_ids))
        search_trace = trace_search(engine, search_request, search)
        if not search_trace.hypotheses:
            raise ValueError("no translation can continue this prefix; remove its last token")
        if has_loop(search_trace.hypotheses[0].token_ids) and not has_loop(search_request.source_ids):
            return trace_search(engine, search_request, replace(search, forbid_loops=True)), True
        return search_trace, False

    # --- forward pass ------------------------------------------------------------------------------------------------

    def _build_sides(
        self, request: base.InspectionRequest, search_request: SearchRequest, hypothesis: Hypothesis
    ) -> dict[str, TraceSide]:
        tokenizer, output_ids = self.translator.tokenizer, self._get_output_ids(hypothesis)
        input_ids = [self.model.config.start_id, *output_ids[:-1]]
        source_tokens = build_display_tokens(tokenizer.source, search_request.source_ids)
        input_tokens = build_display_tokens(tokenizer.target, input_ids, is_decoder_input=True)
        output_tokens = build_display_tokens(tokenizer.target, output_ids)
        source, to = self.languages[0], request.to or self.languages[1]
        has_spans = any(token in tokenizer.source.sentinels for token in search_request.source_ids)
        label, text = "filled spans" if has_spans else "translation", self._decode_target(hypothesis.token_ids)
        return {
            "source": TraceSide(label="source", text=request.text.strip(), tokens=source_tokens, language=source),
            "decoder_input": TraceSide(label="decoder input", tokens=input_tokens, language=to),
            "target": TraceSide(label=label, text=text, tokens=output_tokens, language=to),
        }

    def _decode_target(self, token_ids: Sequence[int]) -> str:
        target = self.translator.tokenizer.target
        has_spans = any(token in target.sentinels for token in token_ids)
        return format_spans(target, token_ids) if has_spans else target.decode(token_ids)

    def _get_output_ids(self, hypothesis: Hypothesis) -> list[int]:
        return [*hypothesis.token_ids, *([self.model.config.end_id] if hypothesis.is_finished else [])]

    def _run_forward(
        self,
        request: base.InspectionRequest,
        search_request: SearchRequest,
        hypothesis: Hypothesis,
        sides: Mapping[str, TraceSide],
        should_stop: StopCheck | None,
    ) -> tuple[list[dict[str, Any]], Tensor]:
        """Return the recorded layers and the log-probabilities of every output position, (T, V)."""
        batch = TeacherForcingBatch.from_ids(
            self.model, [list(search_request.source_ids)], [self._get_output_ids(hypothesis)]
        )
        with self.record_layers(sides, request, should_stop) as layers:
            states = batch.compute_states(self.model)
        logits = self.model.output(states)[0].float()
        suppressed = find_suppressed_tokens(self.model.config, self.translator.tokenizer)
        suppressed_ids = torch.tensor(suppressed, device=logits.device)
        return layers, logits.index_fill(-1, suppressed_ids, -math.inf).log_softmax(-1).cpu()

    # --- document sections -------------------------------------------------------------------------------------------

    def _describe_search(
        self, search_trace: SearchTrace, request: base.InspectionRequest, predictions: list[dict[str, Any]]
    ) -> dict[str, Any]:
        paths = [set(search_trace.path_to(last)) for last in search_trace.last_nodes]
        on_best_path, in_results = paths[0], set().union(*paths)
        last_step = max(node.step for node in search_trace.nodes)
        shown = [n for n in search_trace.nodes if last_step < base.LONG_TEXT_STEPS or n.is_live or n.score is not None]
        results = zip(search_trace.hypotheses, search_trace.last_nodes, strict=True)
        return {
            "formula": request.search.score_formula,
            "beam_size": request.search.beam_size,
            "forced": len(request.prefix),
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
            **base.describe_token(self.translator.tokenizer.target, node.token),
            "log_prob": base.round_for_json(node.log_prob),
            "sum": base.round_for_json(node.total_log_prob),
            "expanded": node.is_live,
            "ended": node.score is not None,
            "score": None if node.score is None else base.round_for_json(node.score),
            "on_best_path": on_best_path,
            "in_results": in_results,
        }


def encode_with_sentinels(vocabulary: Vocabulary, text: str) -> list[int]:
    """Encode a text; sentinels and masks written in it become their tokens if the vocabulary has them."""
    if not vocabulary.sentinels:
        return vocabulary.encode([text])[0]
    mask_tokens = MaskTokens(vocabulary)
    return mask_tokens.encode(mask_tokens.parse(text))


def describe_given_target(
    hypothesis: Hypothesis, sides: Mapping[str, TraceSide], predictions: list[dict[str, Any]]
) -> dict[str, Any]:
    """The section `decoding` for a given translation: token probabilities only."""
    log_prob = base.round_for_json(
        math.fsum(math.log(choice["p"]) if choice["p"] else -math.inf for choice in predictions)
    )
    text, ended = sides["target"].text, hypothesis.is_finished
    result = {"text": text, "score": log_prob, "log_prob": log_prob, "node": None, "ended": ended}
    return {"given": True, "formula": "", "forced": 0, "nodes": [], "results": [result], "choices": predictions}
