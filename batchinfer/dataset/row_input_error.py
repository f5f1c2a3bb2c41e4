"""How the code that reads one row says that the row cannot run."""

from __future__ import annotations

from batchinfer.types import ErrorCode, RowError


class RowInputError(Exception):
    """One row cannot run. It becomes that row's error; the others go on."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.error = RowError(code, message)


def check_text(text: str, what: str, code: ErrorCode = ErrorCode.INVALID_PROMPT) -> str:
    """`text`, if it is valid Unicode: half a surrogate pair has no UTF-8 form and so no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise RowInputError(code, f"{what} is not valid Unicode: \\u{half:04x} at character {error.start}") from error
    return text
