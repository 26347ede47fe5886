"""The API of Apertium APy, as OmegaT and Weblate use it."""

from functools import partial
from typing import Any

from pydantic import Field, create_model

from attent.serving.endpoints import Body, Call, Endpoint
from attent.serving.messages import TranslateRequest


class ApertiumQuery(Body):
    q: str
    langpair: str = Field(description="such as en|de", pattern=r"^[^|]{1,40}\|[^|]{1,40}$")
    key: str = Field("", description="needed if the server has keys")


async def translate(call: Call[ApertiumQuery]) -> Any:
    source, _, target = call.body.langpair.partition("|")
    request = TranslateRequest(texts=(call.body.q,), source=source, target=target)
    (translation,) = await call.gateway.translate(request, call.client)
    return build_result({"translatedText": translation.text})


async def list_pairs(call: Call[None]) -> Any:
    pairs = call.gateway.backend.info.language_pairs
    return build_result([{"sourceLanguage": source, "targetLanguage": target} for source, target in pairs])


def build_result(data: Any, details: str | None = None, status: int = 200) -> dict[str, Any]:
    return {"responseData": data, "responseDetails": details, "responseStatus": status}


ApertiumResult: Any = create_model("ApertiumResult", responseData=Any, responseDetails=str | None, responseStatus=int)
endpoint: Any = partial(Endpoint, tag="Apertium", format_error=lambda text, status: build_result(None, text, status))
ENDPOINTS: tuple[Endpoint, ...] = (
    endpoint("GET", "/translate", translate, "Translate a text.", ApertiumQuery, ApertiumResult),
    endpoint("GET", "/listPairs", list_pairs, "List language pairs.", None, ApertiumResult, is_public=True),
)
