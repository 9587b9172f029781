"""The HTTP side, in the main process: validation of per-request options and the control routes.

Control routes are ordinary routes of the server's own application, so its API-key rules hold for them.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from intentkv.config import Config, ConfigError, config_from_environment, parse_request_options
from intentkv.methods import method_problem
from intentkv_sglang import dashboard
from intentkv_sglang.compat import BACKEND_NAME
from intentkv_sglang.status import STATUS_COMMAND


@cache
def _server_config() -> Config:
    return config_from_environment()


def validate_request(manager: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
    """Validate ``custom_params["intentkv"]`` before the request leaves the main process.

    Valid options travel on as JSON text: SGLang's wire type holds no nested lists.

    Raises:
        ConfigError: a ValueError, which SGLang answers with a 400 for this request.
    """
    params = obj.sampling_params.get("custom_params") if isinstance(getattr(obj, "sampling_params", None), dict) else None
    if params is not None and not isinstance(params, dict):
        # SGLang would pass it on, and the scheduler, which looks our options up in it, would die of it.
        raise ConfigError(f"custom_params must be a JSON object, got {type(params).__name__}.")
    if params is None or params.get(BACKEND_NAME) is None:
        return
    options = parse_request_options(params[BACKEND_NAME])
    problem = method_problem(options.method, _server_config()) if options.method is not None else None
    if problem is not None:
        raise ConfigError(problem)
    text = json.dumps(options.model_dump(exclude_none=True, exclude_defaults=True))
    obj.sampling_params["custom_params"] = {**params, BACKEND_NAME: text}


def add_routes(server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any) -> None:
    """Add ``GET /intentkv/status`` and ``/intentkv/dashboard`` to SGLang's application when the plugin is selected."""
    if server_args.radix_cache_backend != BACKEND_NAME:
        return
    from fastapi import HTTPException, Response
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.managers.io_struct import DumperControlReqInput

    @app.get("/intentkv/status")  # type: ignore[untyped-decorator]
    async def intentkv_status(session: str | None = None) -> dict[str, Any]:
        """Method, pool in live units, counters and sessions; with ``session``, that session's dead spans."""
        command = DumperControlReqInput(method=STATUS_COMMAND, body={"session": session})
        replies = await tokenizer_manager.dumper_control(command)
        if not replies[0].success:
            raise HTTPException(500, replies[0].error)
        answer: dict[str, Any] = replies[0].response[0]
        return answer

    # Not async: the first call reads some MB, which is not for the event loop.
    @app.get("/intentkv/dashboard")  # type: ignore[untyped-decorator]
    def intentkv_dashboard() -> Response:
        """A page that draws the status and refreshes itself."""
        try:
            dashboard.plotly_js()
        except ModuleNotFoundError:
            return Response(dashboard.PLOTLY_MISSING, 503, media_type="text/plain")
        return Response(dashboard.page(), media_type="text/html")

    @app.get("/intentkv/plotly.js")  # type: ignore[untyped-decorator]
    def intentkv_plotly() -> Response:
        """What the page draws with."""
        return Response(dashboard.plotly_js(), media_type="text/javascript", headers={"Cache-Control": "private, max-age=86400"})
