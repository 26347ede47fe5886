"""OpenAI's API: completions by language models, and chat completions, where translators translate the last message.

The model of a chat is a translator's name, a language pair such as `en-de`, or `auto`. Weblate sends its texts to
language models in one message: as JSON with languages and a glossary, or, in older versions, separated by a line.
"""

import json
import re
import secrets
import time
from functools import partial
from typing import Annotated, Any

from pydantic import Field, ValidationError, create_model
from starlette.responses import Response

from attent.decoding.options import GenerationOptions
from attent.serving.endpoints import Body, Call, Endpoint
from attent.serving.limits import ApiError
from attent.serving.messages import AUTO, CompletionRequest, TranslateRequest

WEBLATE_SEPARATOR = "\n==WEBLATE_PART==\n"
WEBLATE_LANGUAGES = re.compile(r"from language '(?P<source>[^']{1,40})'\s+to language '(?P<target>[^']{1,40})'")
PLACEHOLDER = re.compile(r"@@PH\d+@@|\[X\d+X\]")  # of Weblate; the translation must have them too
FINISH_REASONS = {"end": "stop", "stop": "stop", "length": "length"}
TOKEN = re.compile(r"\w+|[^\w\s]")  # how the tokens of a chat are counted


class CompletionBody(Body):
    model: str
    prompt: str | list[str]
    max_tokens: int | None = Field(None, ge=1, le=4_096, description="by default 16")
    temperature: float | None = Field(None, ge=0, le=2, description="by default 1")
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=16, description="texts per prompt")
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    stream: bool | None = None


class ChatMessage(Body):
    role: str
    content: str | list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        texts = [part.get("text") for part in self.content] if isinstance(self.content, list) else [self.content]
        return "".join(text for text in texts if isinstance(text, str))


class ChatBody(Body):
    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    stream: bool | None = None


class WeblateText(Body):
    """A text, or a term of a glossary with its translation."""

    source: str
    target: str = ""


class WeblateMessage(Body):
    """The texts that Weblate sends in one message."""

    source_language: str = Field("", max_length=40)
    target_language: str = Field("", max_length=40)
    glossary: list[WeblateText] | dict[str, str] = Field([])
    strings: list[WeblateText]

    @property
    def terms(self) -> dict[str, str]:
        terms = self.glossary
        return terms if isinstance(terms, dict) else {each.source: each.target for each in terms if each.target}


async def list_models(call: Call[None]) -> Any:
    info = call.gateway.backend.info
    names = dict.fromkeys([*(model["name"] for model in info.models), *map("-".join, info.language_pairs)])
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "attent"} for name in names]
    return {"object": "list", "data": data}


async def complete(call: Call[CompletionBody]) -> Any:
    body, gateway = call.body, call.gateway
    prompts = (body.prompt,) if isinstance(body.prompt, str) else tuple(body.prompt)
    gateway.check_sizes(TranslateRequest(texts=prompts))
    try:
        options = GenerationOptions(
            max_new_tokens=body.max_tokens or 16,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=body.top_p or 1.0,
            n=body.n or 1,
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            seed=secrets.randbelow(2**31) if body.seed is None else body.seed,
        )
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    work = sum(map(len, prompts)) + 4 * options.max_new_tokens * options.n * len(prompts) + 1
    request = CompletionRequest(model=body.model, prompts=prompts, options=options)
    results = await gateway.call("complete", request, call.client, characters=work)
    texts = [text for group in results for text in group]
    choices = [
        {"index": index, "text": each.text, "logprobs": None, "finish_reason": FINISH_REASONS[each.finish_reason]}
        for index, each in enumerate(texts)
    ]
    counts = (sum(group[0].prompt_tokens for group in results), sum(len(each.token_ids) for each in texts))
    return build_result(body, "text_completion", choices, *counts)


async def chat(call: Call[ChatBody]) -> Any:
    body, info = call.body, call.gateway.backend.info
    pairs = {"-".join(pair): pair for pair in info.language_pairs}
    names = {each.model for each in info.directions}
    if body.model not in {*pairs, *names, AUTO}:
        raise ApiError(404, "`model` must be a translator, a language pair such as en-de, or auto; see /v1/models")
    message = next((each.text for each in reversed(body.messages) if each.role == "user"), None)
    if message is None:
        raise ApiError(400, "`messages` must have one of the role user")
    prompt = WEBLATE_LANGUAGES.search("\n".join(each.text for each in body.messages if each.role == "system"))
    source, target = prompt.group("source", "target") if prompt else pairs.get(body.model, (AUTO, ""))
    texts, terms, join = message.split(WEBLATE_SEPARATOR), {}, WEBLATE_SEPARATOR.join
    try:
        data = WeblateMessage.model_validate_json(message)
        source, target = data.source_language or source, data.target_language or target
        texts, terms, join = [each.source for each in data.strings], data.terms, json.dumps
    except ValidationError:
        pass  # any other message
    terms = terms | {mark: mark for text in texts for mark in PLACEHOLDER.findall(text)}
    model = body.model if body.model in names else None
    request = TranslateRequest(
        texts=tuple(texts), source=source, target=target, model=model, glossary=tuple(terms.items())
    )
    translated = [each.text for each in await call.gateway.translate(request, call.client)]
    choice = {"index": 0, "message": {"role": "assistant", "content": join(translated)}, "finish_reason": "stop"}
    counts = [sum(len(TOKEN.findall(text)) for text in group) for group in (texts, translated)]
    return build_result(body, "chat.completion", [choice], *counts)


def build_result(
    body: CompletionBody | ChatBody, kind: str, choices: list[dict[str, Any]], prompt_tokens: int, tokens: int
) -> Any:
    """Return the response; for a client that wants a stream, as a single server-sent event."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
    head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": body.model}
    if not body.stream:
        return {**head, "choices": choices, "usage": usage}
    if kind == "chat.completion":
        head["object"] = "chat.completion.chunk"
        choices[0]["delta"] = choices[0].pop("message")
    events = f"data: {json.dumps({**head, 'choices': choices, 'usage': usage})}\n\ndata: [DONE]\n\n"
    return Response(events, media_type="text/event-stream")


def format_error(message: str, status: int) -> dict[str, Any]:
    default = ("server_error" if status >= 500 else "invalid_request_error", None)
    kind, code = {401: ("invalid_request_error", "invalid_api_key"), 429: ("requests", "rate_limit_exceeded")}.get(
        status, default
    )
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


ModelCard: Any = create_model("ModelCard", id=str, object=str, created=int, owned_by=str)
CompletionResult: Any = create_model("CompletionResult", id=str, object=str, created=int, model=str,
                                     choices=list[dict[str, Any]], usage=dict[str, int])  # fmt: skip
endpoint: Any = partial(Endpoint, tag="OpenAI", format_error=format_error, can_stream=True, key_status=401)
ENDPOINTS: tuple[Endpoint, ...] = (
    endpoint("GET", "/v1/models", list_models, "List models and language pairs.", None,
             create_model("ModelList", object=str, data=list[ModelCard]), can_stream=False),
    endpoint("POST", "/v1/completions", complete, "Continue prompts.", CompletionBody, CompletionResult),
    endpoint("POST", "/v1/chat/completions", chat, "Translate the last message.", ChatBody, CompletionResult),
)  # fmt: skip
