"""Rows of a table -> tokenized prompts. One bad row is that row's error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from batchinfer.dataset.columns import URL_NAME, InputColumns
from batchinfer.dataset.messages import clean_messages
from batchinfer.dataset.openai_batch import BatchRequest, parse_body
from batchinfer.dataset.row_input_error import RowInputError, check_text
from batchinfer.dataset.row_params import RowParams
from batchinfer.dataset.token_ids import checked_token_ids
from batchinfer.errors import InputError
from batchinfer.types import ErrorCode, Prompt, RowError, SamplingParams, TokenIds, row_key

# Bounds what a tokenizer's offsets and token strings take before the ids are taken out of them.
_BATCH_TEXTS = 1024
_BATCH_CHARS = 4_000_000


class PromptTokenizer(Protocol):
    """What is needed of a tokenizer here."""

    @property
    def num_ids(self) -> int: ...

    @property
    def chat_template(self) -> str | None: ...

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[TokenIds]: ...

    def render_chat(self, messages: list[dict[str, Any]]) -> str: ...


class _Text(NamedTuple):
    """Text to tokenize. A rendered chat already holds its special tokens."""

    text: str
    is_chat: bool


_Request = _Text | TokenIds


def build_prompts(
    table: pa.Table,
    first_row_index: int,
    columns: InputColumns,
    tokenizer: PromptTokenizer,
    defaults: SamplingParams,
    *,
    system: str | None = None,
    vocab_size: int | None = None,
    row_errors: Mapping[int, str] | None = None,
) -> list[Prompt]:
    """One Prompt per row of `table`, in order; row r has row_index first_row_index + r.

    A row that cannot run has `error` set and no token ids. A row's own parameters count before
    `defaults`. `system` goes first in messages that do not start with a system message.
    `vocab_size` bounds given token ids (default: the tokenizer's num_ids). `row_errors` are the source's, by row_index.
    Raises InputError for what concerns all rows: no chat template, `system` without messages.
    """
    check_can_build(columns, tokenizer, system)
    reader = _RowReader(columns, tokenizer, RowParams(defaults), system, vocab_size or tokenizer.num_ids)
    requests, params = reader.read(table)
    token_ids = _encode(requests, tokenizer)
    ids = _column_ids(table, columns.id)
    priorities = _column_priorities(table, columns.priority)
    prompts = []
    for row in range(table.num_rows):
        found = _source_error(row_errors, first_row_index + row) or token_ids[row]
        error = found if isinstance(found, RowError) else None
        row_params = params[row]
        if isinstance(row_params, RowError):
            error, row_params = error or row_params, defaults
        priority = priorities[row]
        if not math.isfinite(priority):
            error = error or RowError(ErrorCode.INVALID_PARAMS, f"{columns.priority} must be finite, got {priority}")
            priority = 0.0
        row_ids = _NO_IDS if error is not None or isinstance(found, RowError) else found
        prompts.append(
            Prompt(
                row_index=first_row_index + row,
                token_ids=row_ids,
                params=row_params,
                key=row_key(ids[row], row_ids),
                priority=priority,
                error=error,
            )
        )
    return prompts


def _source_error(row_errors: Mapping[int, str] | None, row_index: int) -> RowError | None:
    message = row_errors.get(row_index) if row_errors else None
    return None if message is None else RowError(ErrorCode.INVALID_ROW, message)


_NO_IDS: TokenIds = np.empty(0, dtype=np.int32)


def check_can_build(columns: InputColumns, tokenizer: PromptTokenizer, system: str | None = None) -> None:
    """Refuse what no row could be run with. Raises InputError."""
    if system is not None and columns.messages is None and columns.body is None:
        raise InputError(
            f"--system needs messages: column {columns.prompt or columns.token_ids!r} holds plain prompts. "
            "Put the system text into the prompts, or give a messages column"
        )
    if columns.messages is not None and not tokenizer.chat_template:
        raise InputError(
            f"column {columns.messages!r} holds messages and the model has no chat template: "
            "give a column of plain prompts with --prompt-column"
        )


class _RowReader:
    """What each row asks for, from whichever column says it."""

    def __init__(
        self,
        columns: InputColumns,
        tokenizer: PromptTokenizer,
        params: RowParams,
        system: str | None,
        vocab_size: int,
    ) -> None:
        self._columns = columns
        self._tokenizer = tokenizer
        self._params = params
        self._system = system
        self._vocab_size = vocab_size

    def read(self, table: pa.Table) -> tuple[list[_Request | RowError], list[SamplingParams | RowError]]:
        columns = self._columns
        requests: list[_Request | RowError] = []
        params: list[SamplingParams | RowError]
        if columns.params is None:
            params = [self._params.override({})] * table.num_rows
        else:
            values = cells(table.column(columns.params))
            params = [_or_error(self._struct_params, value) for value in values]
        if columns.body is not None:
            has_urls = URL_NAME in table.column_names
            urls = cells(table.column(URL_NAME)) if has_urls else iter([None] * table.num_rows)
            for row, (body, url) in enumerate(zip(cells(table.column(columns.body)), urls, strict=True)):
                request, body_params = self._from_body(body, url)
                requests.append(request)
                params[row] = params[row] if body_params is None else body_params
            return requests, params
        name, read = self._source()
        requests = [_or_error(read, value) for value in cells(table.column(name))]
        return requests, params

    def _source(self) -> tuple[str, Any]:
        columns = self._columns
        if columns.prompt is not None:
            return columns.prompt, self._from_text
        if columns.messages is not None:
            return columns.messages, self._from_messages
        assert columns.token_ids is not None
        return columns.token_ids, self._from_ids

    def _struct_params(self, values: Any) -> SamplingParams:
        if isinstance(values, bytes):
            raise RowInputError(ErrorCode.INVALID_PARAMS, "the row's sampling parameters are not valid UTF-8")
        return self._params.over_defaults(values)

    def _from_text(self, text: Any) -> _Request:
        if text is None:
            raise RowInputError(ErrorCode.PROMPT_NULL, "the prompt is null")
        if isinstance(text, bytes):
            raise RowInputError(ErrorCode.INVALID_PROMPT, "the prompt is not valid UTF-8")
        return _Text(check_text(text, "the prompt"), is_chat=False)

    def _from_messages(self, value: Any) -> _Request:
        if value is None:
            raise RowInputError(ErrorCode.PROMPT_NULL, "the messages are null")
        if isinstance(value, bytes):
            raise RowInputError(ErrorCode.INVALID_MESSAGES, "the messages are not valid UTF-8")
        messages = clean_messages(value, self._system)
        try:
            return _Text(self._tokenizer.render_chat(messages), is_chat=True)
        except ValueError as error:
            raise RowInputError(ErrorCode.INVALID_MESSAGES, str(error)) from error
        except Exception as error:  # templates are programs of their own: they raise anything
            reason = f"the chat template refused the messages: {error or type(error).__name__}"
            raise RowInputError(ErrorCode.INVALID_MESSAGES, reason) from error

    def _from_ids(self, value: Any) -> _Request:
        if value is None:
            raise RowInputError(ErrorCode.PROMPT_NULL, "the token ids are null")
        return checked_token_ids(value, self._vocab_size)

    def _from_body(self, body: Any, url: Any) -> tuple[_Request | RowError, SamplingParams | RowError | None]:
        """The request and its parameters; None: the body could not be read."""
        try:
            if isinstance(body, bytes):
                raise RowInputError(ErrorCode.INVALID_PROMPT, "the body is not valid UTF-8")
            request = parse_body(body, url if isinstance(url, str) else None)
        except RowInputError as error:
            return error.error, None
        return _or_error(self._from_request, request), _or_error(self._params.override, request.params)

    def _from_request(self, request: BatchRequest) -> _Request:
        if request.messages is not None:
            if not self._tokenizer.chat_template:
                raise RowInputError(ErrorCode.INVALID_MESSAGES, "the model has no chat template: use body.prompt")
            return self._from_messages(request.messages)
        if self._system is not None:
            raise RowInputError(ErrorCode.INVALID_PROMPT, "--system needs messages and the body has a plain prompt")
        return self._from_ids(request.token_ids) if request.prompt is None else self._from_text(request.prompt)


def _or_error(read: Any, value: Any) -> Any:
    try:
        return read(value)
    except RowInputError as error:
        return error.error


def cells(column: pa.ChunkedArray) -> Iterator[Any]:
    """The Python values of a column; `bytes` for one whose text is not valid UTF-8."""
    for chunk in column.chunks:
        if pt.is_dictionary(chunk.type):
            values = list(cells(pa.chunked_array([chunk.dictionary])))
            yield from (None if index is None else values[index] for index in chunk.indices.to_pylist())
            continue
        try:
            values = chunk.to_pylist()
        except UnicodeDecodeError:
            values = [_cell(scalar) for scalar in chunk]
        yield from values


def _cell(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return scalar.as_buffer().to_pybytes() if hasattr(scalar, "as_buffer") else b""


def _encode(requests: Sequence[_Request | RowError], tokenizer: PromptTokenizer) -> list[TokenIds | RowError]:
    encoded: list[TokenIds | RowError] = [_NO_IDS] * len(requests)
    for is_chat in (False, True):
        rows = [r for r, request in enumerate(requests) if isinstance(request, _Text) and request.is_chat == is_chat]
        for batch in _batches(rows, requests):
            texts = [requests[row].text for row in batch]  # type: ignore[union-attr]
            for row, token_ids in zip(batch, _encode_texts(texts, tokenizer, not is_chat), strict=True):
                encoded[row] = token_ids
    for row, request in enumerate(requests):
        if not isinstance(request, _Text):
            encoded[row] = request
        found = encoded[row]
        if not isinstance(found, RowError) and len(found) == 0:
            encoded[row] = RowError(ErrorCode.PROMPT_EMPTY, "the prompt has no tokens")
    return encoded


def _batches(rows: Sequence[int], requests: Sequence[_Request | RowError]) -> Iterator[list[int]]:
    batch: list[int] = []
    num_chars = 0
    for row in rows:
        batch.append(row)
        num_chars += len(requests[row].text)  # type: ignore[union-attr]
        if len(batch) == _BATCH_TEXTS or num_chars > _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _encode_texts(
    texts: Sequence[str], tokenizer: PromptTokenizer, add_special_tokens: bool
) -> list[TokenIds | RowError]:
    try:
        return list(tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens))
    except Exception as error:  # the tokenizers package raises plain Exception, e.g. for a missing unknown token
        if len(texts) == 1:
            return [RowError(ErrorCode.INVALID_PROMPT, f"the tokenizer refused the text: {error}")]
    encoded: list[TokenIds | RowError] = []
    for text in texts:
        encoded += _encode_texts([text], tokenizer, add_special_tokens)
    return encoded


def _column_ids(table: pa.Table, name: str | None) -> list[str | int | None]:
    if name is None:
        return [None] * table.num_rows
    values = cells(table.column(name))
    return [value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value for value in values]


def _column_priorities(table: pa.Table, name: str | None) -> list[float]:
    """Null counts as 0."""
    if name is None:
        return [0.0] * table.num_rows
    return [0.0 if value is None else float(value) for value in table.column(name).to_pylist()]
