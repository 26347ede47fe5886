"""A sentence through a translator, as a document: the search as it went, and every weight of every head in the pass
over what it found. `page`, `plots`, `terminal` and the live page show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attent.decoding import Translator
from attent.decoding.constraints.no_repeat import has_loop
from attent.decoding.engines.reference import TorchEngine
from attent.decoding.forced_decoding import TeacherForcingBatch, eval_mode
from attent.decoding.mask_tokens import MaskTokens
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest
from attent.decoding.search_trace import SearchTrace, TraceNode, trace_search
from attent.decoding.span_infilling import format_spans as told_spans
from attent.inspection.attention_trace import TraceSide, build_document
from attent.inspection.display_tokens import build_display_tokens
from attent.inspection.head_masking import mask_parts
from attent.inspection.head_stats import measure_document_heads
from attent.inspection.inspectors.base import (
    LONG_TEXT_STEPS,
    InspectionError,
    InspectionRequest,
    Inspector,
    LayerFilter,
    check_length,
    describe_predictions,
    describe_token,
    mark_masked_heads,
    round_for_json,
)
from attent.interop.ctranslate2 import find_suppressed_tokens
from attent.models import Seq2Seq
from attent.text.tokenizer import add_end_and_tag
from attent.text.vocabulary import Vocabulary, replace_surrogates

__all__ = ["InspectionError", "InspectionRequest", "Inspector", "LayerFilter"]


class TranslationInspector(Inspector[Seq2Seq]):
    """Answers questions about one translator."""

    def __init__(
        self,
        translator: Translator,
        *,
        name: str = "",
        languages: tuple[str | None, str | None] = (None, None),
        head_stats: dict[str, Any] | None = None,
        ablation: dict[str, Any] | None = None,
    ) -> None:
        """`properties` and `ablation` as for every `Reading`."""
        if not isinstance(translator.model, Seq2Seq):
            raise InspectionError("an ensemble must be looked at one model at a time; give one folder")
        super().__init__(translator.model, name=name, head_stats=head_stats, ablation=ablation)
        self.translator, self.languages = translator, languages

    def inspect(
        self,
        request: InspectionRequest,
        layer_filter: LayerFilter | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> dict[str, Any]:
        """The document of one sentence."""
        if request.text_pair is not None:
            raise InspectionError("a second text is for encoders, and this is a translator; leave it out")
        request = replace(
            request, text=replace_surrogates(request.text), target=request.target and replace_surrogates(request.target)
        )
        job = self._build_search_request(request)
        with eval_mode(self.model), mask_parts(self.model, request.masked_parts):
            seen, again = (
                (None, False) if request.target is not None else self._trace_search(job, request.search, should_stop)
            )
            target = self._encode_given_target(request) if seen is None else seen.hypotheses[0]
            sides = self._build_sides(request, job, target)
            layers, options = self._run_forward(job, target, sides, layer_filter or LayerFilter())
        mark_masked_heads(layers, request.masked_parts)
        found = build_document(request.text.strip(), sides, layers) | {"model": self.get_model_info()}
        steps = describe_predictions(self.translator.tokenizer.target, self._get_output_ids(target), options)
        if seen is None:
            found["decoding"] = describe_given_target(target, sides, steps)
        else:
            found["decoding"] = self._describe_search(seen, request, steps) | {"no_loops": again}
        found["properties"] = self.head_stats or measure_document_heads(found)
        return found | self.get_model_sections()

    # --- the search --------------------------------------------------------------------------------------------------

    def _build_search_request(self, request: InspectionRequest) -> SearchRequest:
        text = self.translator.clean_text(request.text)
        if not text:
            raise InspectionError("there must be a sentence to look at, but it is empty; type one")
        source = self.translator.tokenizer.source
        (row,) = add_end_and_tag([encode_with_sentinels(source, text)], source, request.to)
        framing = 1 if request.to is None else 2
        limit = request.search.compute_max_length(len(row) - framing)
        check_length(self.model.encoder, len(row), "the sentence")
        most = self.model.decoder.positions.max_length
        size = self.model.config.output_vocab
        wrong = [token for token in request.prefix if not 0 <= token < size]
        if wrong:
            raise InspectionError(f"`prefix` must hold token ids from 0 to {size - 1}, but one is {wrong[0]}")
        if len(request.prefix) >= (limit := min(limit, most or limit)):
            raise InspectionError(f"`prefix` must be shorter than {limit} tokens, but has {len(request.prefix)}")
        return SearchRequest(source_ids=row, prefix_ids=request.prefix, max_length=limit)

    def _trace_search(
        self, search_request: SearchRequest, search: SearchOptions, should_stop: Callable[[], bool] | None
    ) -> tuple[SearchTrace, bool]:
        """The search, as translating does it: one that runs in circles is made anew without, unless that was forbidden
        from the start; was it made anew?"""
        engine: TorchEngine[Any] = self.translator.build_torch_engine(should_stop)
        if self.translator.can_forbid_loops and not search_request.prefix_ids:
            search_request = replace(search_request, forbid_loops=not has_loop(search_request.source_ids))
        seen = trace_search(engine, search_request, search)
        if not seen.hypotheses:
            raise InspectionError("the translation cannot go on behind these tokens; take back the last")
        if has_loop(seen.hypotheses[0].token_ids) and not has_loop(search_request.source_ids):
            return trace_search(engine, search_request, replace(search, forbid_loops=True)), True
        return seen, False

    def _encode_given_target(self, request: InspectionRequest) -> Hypothesis:
        assert request.target is not None
        ids = encode_with_sentinels(self.translator.tokenizer.target, request.target.strip())
        check_length(self.model.decoder, len(ids) + 1, "the translation")
        return Hypothesis(token_ids=tuple(ids), log_prob=math.nan, score=math.nan, is_finished=True)

    # --- what the model did ------------------------------------------------------------------------------------------

    def _build_sides(
        self, request: InspectionRequest, search_request: SearchRequest, hypothesis: Hypothesis
    ) -> dict[str, TraceSide]:
        tokenizer, config = self.translator.tokenizer, self.model.config
        written = self._get_output_ids(hypothesis)
        source, to = self.languages
        hidden = any(token in tokenizer.source.sentinels for token in search_request.source_ids)
        return {
            "source": TraceSide(
                label="source",
                text=request.text.strip(),
                tokens=build_display_tokens(tokenizer.source, search_request.source_ids),
                language=source,
            ),
            "read": TraceSide(
                label="read so far",
                tokens=build_display_tokens(tokenizer.target, [config.start_id, *written[:-1]], is_decoder_input=True),
                language=request.to or to,
            ),
            "target": TraceSide(
                label="hidden spans" if hidden else "translation",
                text=self._decode_target(hypothesis.token_ids),
                tokens=build_display_tokens(tokenizer.target, written),
                language=request.to or to,
            ),
        }

    def _decode_target(self, token_ids: Sequence[int]) -> str:
        target = self.translator.tokenizer.target
        return (
            told_spans(target, token_ids)
            if any(token in target.sentinels for token in token_ids)
            else target.decode(token_ids)
        )

    def _get_output_ids(self, hypothesis: Hypothesis) -> list[int]:
        return [*hypothesis.token_ids, *([self.model.config.end_id] if hypothesis.is_finished else [])]

    @torch.no_grad()
    def _run_forward(
        self,
        search_request: SearchRequest,
        hypothesis: Hypothesis,
        sides: Mapping[str, TraceSide],
        layer_filter: LayerFilter,
    ) -> tuple[list[dict[str, Any]], Tensor]:
        """Every layer while the decoder reads what was found, and the log-probabilities of what it could write."""
        one = TeacherForcingBatch.from_ids(
            self.model, [list(search_request.source_ids)], [self._get_output_ids(hypothesis)]
        )
        with self.record_layers(sides, layer_filter) as layers:
            states = one.compute_states(self.model)
        logits = self.model.output(states)[0].float()
        never = torch.tensor(find_suppressed_tokens(self.model.config, self.translator.tokenizer), device=logits.device)
        return layers, logits.index_fill(-1, never, -math.inf).log_softmax(-1).cpu()

    # --- as JSON -----------------------------------------------------------------------------------------------------

    def _describe_search(
        self, search_trace: SearchTrace, request: InspectionRequest, predictions: list[dict[str, Any]]
    ) -> dict[str, Any]:
        alive = {number for last in search_trace.last_nodes for number in search_trace.path_to(last)}
        won = set(search_trace.path_to(search_trace.last_nodes[0]))
        last = max(node.step for node in search_trace.nodes)
        shown = [n for n in search_trace.nodes if last < LONG_TEXT_STEPS or n.is_live or n.score is not None]
        results = zip(search_trace.hypotheses, search_trace.last_nodes, strict=True)
        return {
            "formula": request.search.score_formula,
            "beam_size": request.search.beam_size,
            "forced": len(request.prefix),
            "nodes": [self._describe_node(node, node.index in won, node.index in alive) for node in shown],
            "results": [
                {
                    "text": self._decode_target(one.token_ids),
                    "score": round_for_json(one.score),
                    "log_prob": round_for_json(one.log_prob),
                    "node": last,
                    "ended": one.is_finished,
                }
                for one, last in results
            ],
            "choices": predictions,
        }

    def _describe_node(self, node: TraceNode, on_best_path: bool, on_result_path: bool) -> dict[str, Any]:
        return {
            "id": node.index,
            "parent": node.parent,
            "step": node.step,
            **describe_token(self.translator.tokenizer.target, node.token),
            "log_prob": round_for_json(node.log_prob),
            "sum": round_for_json(node.total_log_prob),
            "kept": node.is_live,
            "ended": node.score is not None,
            "score": None if node.score is None else round_for_json(node.score),
            "won": on_best_path,
            "alive": on_result_path,
        }


def encode_with_sentinels(vocabulary: Vocabulary, text: str) -> list[int]:
    """The ids of a text; what is written as a sentinel, or as a mask, is one where the vocabulary has them."""
    marks = MaskTokens(vocabulary)
    return marks.encode(marks.parse(text)) if vocabulary.sentinels else vocabulary.encode([text])[0]


def describe_given_target(
    hypothesis: Hypothesis, sides: Mapping[str, TraceSide], predictions: list[dict[str, Any]]
) -> dict[str, Any]:
    """Of a translation that was not searched for: how likely each of its words is."""
    log_prob = round_for_json(math.fsum(math.log(choice["p"]) if choice["p"] else -math.inf for choice in predictions))
    result = {
        "text": sides["target"].text,
        "score": log_prob,
        "log_prob": log_prob,
        "node": None,
        "ended": hypothesis.is_finished,
    }
    return {"given": True, "formula": "", "forced": 0, "nodes": [], "results": [result], "choices": predictions}
