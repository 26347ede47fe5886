"""Endpoints: a table of paths with the models of their requests and responses, from which the routes and the OpenAPI
document are built.

A handler gets a `Call`: the validated body, and the gateway to the models. Bodies are JSON or, where an API has them,
forms, whose fields are strings and files. Wrong requests are answered with 400 and one sentence, which never repeats
the body.
"""

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError, WithJsonSchema
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from attent import settings
from attent.serving.limits import ApiError, Limits, format_error
from attent.serving.messages import AUTO

if TYPE_CHECKING:
    from attent.serving.gateway import Gateway

JSON_TYPE, EVENT_TYPE = "application/json", "text/event-stream"
FORM_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data")
BODY_TYPES = (JSON_TYPE, *FORM_TYPES)
MAX_FORM_FIELDS = 1_000
MAX_NAME_LENGTH = 200  # characters of a language or a model part
AUTHORIZATION_SCHEMES = ("bearer ", "deepl-auth-key ")
KEY_FIELDS = ("api_key", "auth_key", "key")  # of LibreTranslate, DeepL and Apertium


class Body(BaseModel):
    """The base of request bodies: unknown fields are ignored, as other servers do."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class StrictBody(Body):
    """The base of attent's own request bodies: unknown fields are refused, so that no option is ignored."""

    model_config = ConfigDict(extra="forbid")


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
PartName = Annotated[str, Field(max_length=MAX_NAME_LENGTH)]


class SuggestRequest(StrictBody):
    """Ask for translations that continue a prefix with different words."""

    text: str = Field(max_length=2_000)
    prefix: str = Field(description="words that the translations start with", max_length=2_000)
    source: str = Field(AUTO, max_length=40)
    target: str = Field("", max_length=40)
    count: int = Field(5, ge=1, le=20)


class LookRequest(StrictBody):
    """A text to inspect, in the live page and the translation server; None and [] mean the defaults."""

    text: str
    model: str | None = Field(None, description="by default the first translator")
    to: str | None = Field(None, max_length=MAX_NAME_LENGTH, description="target language of a multilingual model")
    beam_size: int | None = Field(None, ge=1)
    prefix: list[TokenId] = Field([], description="forced first tokens of the translation")
    masked_parts: list[PartName] = Field([], description="heads, sub-layers and layers that are switched off")

    def check_limits(self, limits: Limits) -> None:
        """Raise `ApiError` 413 for a long text, and 400 for other values beyond the limits."""
        sizes = {
            "text": (len(self.text), limits.max_characters, "have at most {} characters"),
            "beam_size": (self.beam_size or 1, limits.max_beam_size, "be at most {}"),
            "prefix": (len(self.prefix), limits.max_prefix_tokens, "have at most {} tokens"),
            "masked_parts": (len(self.masked_parts), limits.max_masked_parts, "have at most {} parts"),
        }
        for name, (size, max_size, limit) in sizes.items():
            if size > max_size:
                status = 413 if name == "text" else 400
                raise ApiError(status, f"`{name}` must {limit.format(max_size)}, but this is {size}")
        if any("\0" in text for text in (self.text, self.to or "", *self.masked_parts)):
            raise ApiError(400, "the request contains a NUL character; remove it")


@dataclass(frozen=True)
class UploadedFile:
    name: str
    content: bytes


FileField = Annotated[InstanceOf[UploadedFile], WithJsonSchema({"type": "string", "format": "binary"})]
BodyT = TypeVar("BodyT", bound=BaseModel | None)


@dataclass(frozen=True, kw_only=True)
class Call(Generic[BodyT]):
    gateway: "Gateway"
    request: Request
    body: BodyT
    client: str  # whose rate and share of the queue it counts for


@dataclass(frozen=True)
class Endpoint:
    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Callable[[Call[Any]], Awaitable[Any]]  # returns a response, or a value that JSON can represent
    summary: str
    body: type[BaseModel] | None = None  # of the body; of the query for GET
    response: Any = None  # a type that pydantic knows; None: not JSON
    _: KW_ONLY
    content_types: tuple[str, ...] = (JSON_TYPE,)  # of the body
    is_public: bool = False  # needs no key
    key_status: int = 403  # of the response without a valid key
    tag: str = "attent"  # a group of the documentation
    status: int = 200
    media_type: str = "application/json"
    can_stream: bool = False  # as server-sent events
    format_error: Callable[[str, int], Mapping[str, Any]] = format_error  # from a message and a status


def build_routes(endpoints: Iterable[Endpoint], gateway: "Gateway") -> list[Route]:
    """Return one route per path, so that the response to a wrong method names all methods."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return [Route(path, partial(handle_request, group, gateway), methods=list(group)) for path, group in paths.items()]


async def handle_request(endpoints: Mapping[str, Endpoint], gateway: "Gateway", request: Request) -> Response:
    endpoint = endpoints["GET" if request.method == "HEAD" else request.method]
    data, is_typed = await read_fields(request, endpoint)
    key = find_key(request, data)
    client = gateway.identify(request, key, is_public=endpoint.is_public, key_status=endpoint.key_status)
    body = None if endpoint.body is None else validate_body(endpoint.body, data, strict=is_typed)
    result = await endpoint.handler(Call(gateway=gateway, request=request, body=body, client=client))
    return result if isinstance(result, Response) else JSONResponse(result, endpoint.status)


async def make_event_response(items: AsyncIterator[Mapping[str, Any]]) -> Response:
    """Return server-sent events; an error before the first item is raised, a later one is an event."""
    first = await anext(items)

    def format_event(item: Mapping[str, Any]) -> str:
        return f"data: {json.dumps(item, ensure_ascii=False)}\n\n"

    async def write_events() -> AsyncIterator[str]:
        yield format_event(first)
        try:
            async for item in items:
                yield format_event(item)
        except ApiError as error:
            yield format_event({"error": error.clipped_message})

    return StreamingResponse(write_events(), media_type=EVENT_TYPE)


def find_key(request: Request, data: Mapping[str, Any]) -> str:
    """Return the API key of a request: from the header Authorization, the body or the query; "" if there is none."""
    header = request.headers.get("authorization", "")
    for scheme in AUTHORIZATION_SCHEMES:
        if header.lower().startswith(scheme):
            return header[len(scheme) :].strip()
    keys = (fields.get(name) for fields in (data, request.query_params) for name in KEY_FIELDS)
    return next((key for key in keys if key and isinstance(key, str)), "")


# --- bodies ----------------------------------------------------------------------------------------------------------


async def read_fields(request: Request, endpoint: Endpoint) -> tuple[dict[str, Any], bool]:
    """Return the fields of the query (GET), or of a JSON or form body, and whether they have types: those of JSON do.

    A repeated field of a form or a query is a list.
    """
    content_type, _, parameters = request.headers.get("content-type", "").lower().partition(";")
    content_type = content_type.strip()
    if request.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        raise ApiError(415, "the request must not be compressed")
    if endpoint.method == "GET":  # some clients send its fields as a form
        fields = collect_fields(request.query_params.multi_items())
        return fields | (await read_form(request) if content_type == FORM_TYPES[0] else {}), False
    if endpoint.body is None:
        return {}, False
    if content_type not in endpoint.content_types:
        allowed = ", ".join(endpoint.content_types)
        media_type = ascii(content_type[:80]) if content_type else "absent"
        raise ApiError(415, f"`Content-Type` must be {allowed}, but is {media_type}")
    if "charset" in parameters and "utf-8" not in parameters:
        raise ApiError(415, "the charset must be UTF-8")
    if content_type == JSON_TYPE:
        return parse_json_object(await request.body()), True
    return await read_form(request), False


class MemoryParser(MultiPartParser):
    """Parses a form without temporary files, which need a disk: the guard has bounded the body."""

    spool_max_size = 0


async def read_form(request: Request) -> dict[str, Any]:
    try:
        if request.headers["content-type"].lower().startswith(FORM_TYPES[1]):
            parser = MemoryParser(request.headers, request.stream(), max_files=1, max_fields=MAX_FORM_FIELDS)
            form = await parser.parse()
        else:
            form = await request.form(max_fields=MAX_FORM_FIELDS)
    except (HTTPException, MultiPartException, ValueError) as error:
        raise ApiError(400, f"the form cannot be read: {getattr(error, 'detail', error)}") from None
    items = [
        (name, UploadedFile(value.filename or "", await value.read()) if isinstance(value, UploadFile) else value)
        for name, value in form.multi_items()
    ]
    await form.close()
    return collect_fields(items)


def collect_fields(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    fields = defaultdict[str, list[Any]](list)
    for name, value in items:
        check_text(name)
        check_text(value.name if isinstance(value, UploadedFile) else value)
        fields[name].append(value)
    return {name: values if len(values) > 1 else values[0] for name, values in fields.items()}


def parse_json_object(content: bytes) -> dict[str, Any]:
    try:
        data = settings.decode_strict_json(content.decode("utf-8"), parse_integer)
        check_text(json.dumps(data, ensure_ascii=False))
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the request must be UTF-8, but byte {error.start} is not") from None
    except RecursionError:
        raise ApiError(400, "the request is nested too deeply; send one flat object") from None
    except ApiError:
        raise
    except ValueError as error:
        raise ApiError(400, f"the request must be JSON, but is not: {error}") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the request must be a JSON object")
    return data


def parse_integer(digits: str) -> int:
    """Refuse integers that do not fit into 64 bits, such as those that overflow a float."""
    if len(digits) > 20 or abs(int(digits)) >= 2**63:
        raise ValueError("an integer has more than 64 bits")
    return int(digits)


def check_text(value: object) -> None:
    """Refuse what UTF-8 cannot encode: half of a surrogate pair."""
    try:
        str(value).encode("utf-8")
    except UnicodeEncodeError:
        raise ApiError(400, "the request contains half of a surrogate pair, which is no character") from None


def validate_body(kind: type[BaseModel], data: Mapping[str, Any], *, strict: bool) -> BaseModel:
    """Return the body; `strict` accepts no strings as numbers."""
    try:
        fields = {name: data[name] for name in data if name in kind.model_fields or name not in KEY_FIELDS}
        return kind.model_validate(fields, strict=strict)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        if first["type"] == "extra_forbidden":
            nearest = get_close_matches(str(first["loc"][0])[:80], kind.model_fields, 1)
            advice = f"did you mean `{nearest[0]}`?" if nearest else f"known are {', '.join(kind.model_fields)}"
            raise ApiError(400, f"the request has an unknown field; {advice}") from None
        # The rest of the location may be the keys of a client; the first part is the name of a field.
        name = str(first["loc"][0]) if first["loc"] else "body"
        raise ApiError(400, f"`{name}`: {first['msg'][:200]}") from None
