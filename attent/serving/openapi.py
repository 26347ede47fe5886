"""The OpenAPI document of the endpoints, and a page that shows it without scripts."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from attent.serving.endpoints import Endpoint

ERROR_STATUSES = {
    400: "The request is not valid.",
    403: "The API key is missing or not valid, or the request comes from another site.",
    404: "Not found.",
    405: "The method is not allowed.",
    408: "The body did not arrive in time.",
    413: "The text or the file is too long.",
    415: "The content type is not supported.",
    421: "The host name is not served.",
    422: "The request is valid, but the model cannot process it.",
    429: "The client sent too many requests; see the header Retry-After.",
    431: "The headers are too long.",
    503: "The server is busy or stopping, and has the header Retry-After; without it, the text takes too long.",
}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 14px/1.4 ui-monospace, monospace; } pre { overflow: auto; padding: .7rem; background: #8881; }
summary { cursor: pointer; padding: .3rem 0; } summary code { font-weight: 600; } h2 { margin-top: 2rem; }
@media (prefers-color-scheme: dark) { body { background: #16181d; color: #e6e6e6; } a { color: #8ab4f8; } }
"""


def build_openapi(endpoints: Sequence[Endpoint], *, version: str) -> dict[str, Any]:
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    _, definitions = models_json_schema(
        [(body, "validation") for body in dict.fromkeys(bodies)], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = build_operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "attent", "version": version},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def build_operation(endpoint: Endpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "operationId": f"{endpoint.method.lower()}{endpoint.path.replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": build_responses(endpoint),
    }
    if endpoint.body is not None and endpoint.method == "GET":
        schema = endpoint.body.model_json_schema(ref_template="#/components/schemas/{model}")
        operation["parameters"] = [
            {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": field}
            for name, field in schema["properties"].items()
        ]
    elif endpoint.body is not None:
        reference = {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}
        content = {kind: {"schema": reference} for kind in endpoint.content_types}
        operation["requestBody"] = {"required": True, "content": content}
    names = [part.strip("{}") for part in endpoint.path.split("/") if part.startswith("{")]
    operation.setdefault("parameters", []).extend(
        {"name": name.partition(":")[0], "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    )
    return operation


def build_responses(endpoint: Endpoint) -> dict[str, Any]:
    schema: Any = {} if endpoint.response is None else TypeAdapter(endpoint.response).json_schema()
    definitions = schema.pop("$defs", None)
    if definitions:  # inlined: a response has a schema of its own
        schema = inline_references(schema, definitions)
    content = {} if endpoint.status == 204 else {endpoint.media_type: {"schema": schema}}
    content |= {"text/event-stream": {}} if endpoint.can_stream else {}
    success = {"description": "Success.", "content": content}
    errors = {str(status): {"description": text} for status, text in ERROR_STATUSES.items()}
    return {str(endpoint.status): success, **errors}


def inline_references(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [inline_references(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return inline_references(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: inline_references(value, definitions) for name, value in schema.items()}


def render_documentation(endpoints: Sequence[Endpoint], document: dict[str, Any]) -> str:
    """Return a page that lists the endpoints by API; it has no scripts and loads nothing."""
    sections: dict[str, list[str]] = {}
    for endpoint in endpoints:
        parts = [f"<p>{html.escape(endpoint.summary)}</p>"]
        if endpoint.body is not None:
            schema = document["components"]["schemas"][endpoint.body.__name__]
            text = json.dumps(schema.get("properties", {}), indent=2, ensure_ascii=False)
            parts.append(f"<p>{'Query' if endpoint.method == 'GET' else 'Body'}</p><pre>{html.escape(text)}</pre>")
        title = f"<summary><code>{endpoint.method} {html.escape(endpoint.path)}</code></summary>"
        sections.setdefault(endpoint.tag, []).append(f"<details>{title}{''.join(parts)}</details>")
    body = "".join(f"<h2>{html.escape(tag)}</h2>{''.join(items)}" for tag, items in sections.items())
    intro = '<p>The machine-readable description is <a href="openapi.json">openapi.json</a>.</p>'
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{viewport}<title>attent API</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><h1>attent API</h1>{intro}{body}</body></html>'
