"""What a client is told when a request is refused: an HTTP status and OpenAI's error object."""

from __future__ import annotations

from typing import Any


class RequestError(Exception):
    """param: the field of the body that is at fault. code: for programs, such as "context_length_exceeded"."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
