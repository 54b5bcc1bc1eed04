"""Errors as OpenAI's clients expect them.

raise ApiError("n=0: must be greater than or equal to 1", param="n")
"""

from starlette.responses import JSONResponse


class ApiError(Exception):
    """An OpenAI error object with its HTTP status."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, {"WWW-Authenticate": "Bearer"} if self.status == 401 else None)
