"""Inspect a translator: the source is a sentence, and the search is that of `Translator`."""

from dataclasses import replace
from typing import Any

from attent.decoding.batching import pad_token_ids
from attent.decoding.constraints.no_repeat import has_loop
from attent.decoding.engines.reference import TorchEngine
from attent.decoding.options import SearchOptions, SearchRequest, Segment, StopCheck
from attent.decoding.search_trace import SearchTrace, trace_search
from attent.decoding.translator import Translator
from attent.inspection.attention_trace import TraceSide
from attent.inspection.display_tokens import build_display_tokens
from attent.inspection.inspectors import base
from attent.inspection.inspectors.seq2seq import LoadedSource, Seq2SeqInspector, encode_with_sentinels
from attent.models import Seq2Seq
from attent.storage.errors import AttentError


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
            return trace_search(engine, search_request, replace(search, forbid_loops=True)), True
        return search_trace, False
