"""Completions in the forms of OpenAI's API: response bodies, log-probabilities, and lines of a Batch output file.

After the API reference: "The request output object" of the Batch API; the chat completion, completion and
response objects. A request that is itself at fault is a response with status 400 and an error in its body, as a
server would have given; `error` of the line is for what is not a response.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from batchinfer.types import ErrorCode, FinishReason

Kind = Literal["chat", "completion", "response"]

#: What the API gives where a token is very unlikely; JSON has no -inf.
LOWEST_LOGPROB = -9999.0
# Codes that clients of the API know, where ours mean the same.
_KNOWN_CODES = {ErrorCode.PROMPT_TOO_LONG: "context_length_exceeded", ErrorCode.NEVER_FITS: "context_length_exceeded"}
_NOT_THE_REQUESTS_FAULT = frozenset({ErrorCode.NON_FINITE_LOGITS})


@dataclass(frozen=True, slots=True)
class RowResults:
    """What one input row came to.

    Attributes:
        row_index: its place in the input.
        custom_id: names it for whoever asked.
        kind: of the request.
        samples: result columns by name, a mapping per sample.
    """

    row_index: int
    custom_id: str | None
    kind: Kind
    samples: Sequence[Mapping[str, Any]]


class BatchLines:
    """Makes the line of a row.

    Args:
        token_bytes: of a token id, as Tokenizer.token_bytes.
        model: name of the model.
        created: when the job began, in seconds since 1970. With the rows it fixes every id in the lines.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], model: str, created: int) -> None:
        self._token_bytes = token_bytes
        self._model = model
        self._created = created

    def line(self, row: RowResults) -> dict[str, Any]:
        """The request output object of one row."""
        error = row.samples[0]["error"]
        response: dict[str, Any] | None = None
        if error is None:
            response = {"status_code": 200, "body": self._body(row)}
        elif error["code"] not in _NOT_THE_REQUESTS_FAULT:
            response, error = {"status_code": 400, "body": {"error": _request_error(error)}}, None
        if response is not None:
            response = {"status_code": response["status_code"], "request_id": self._id(row, "req_"), **response}
        return {
            "id": self._id(row, "batch_req_"),
            "custom_id": row.custom_id,
            "response": response,
            "error": None if error is None else {"code": error["code"], "message": error["message"]},
        }

    def _id(self, row: RowResults, prefix: str) -> str:
        named = f"{self._model}\0{self._created}\0{row.row_index}\0{prefix}"
        return prefix + hashlib.blake2b(named.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()

    def _body(self, row: RowResults) -> dict[str, Any]:
        return {"chat": self._chat, "completion": self._completion, "response": self._response}[row.kind](row)

    def _chat(self, row: RowResults) -> dict[str, Any]:
        choices = [
            {
                "index": sample["sample_index"],
                "message": {"role": "assistant", "content": sample["output"], "refusal": None},
                "logprobs": None if (tokens := self._tokens(sample)) is None else {"content": tokens, "refusal": None},
                "finish_reason": _finish_reason(sample),
            }
            for sample in row.samples
        ]
        return {
            "id": self._id(row, "chatcmpl-"),
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": _usage(row.samples, "prompt", "completion"),
            "system_fingerprint": None,
        }

    def _completion(self, row: RowResults) -> dict[str, Any]:
        choices = [
            {
                "index": sample["sample_index"],
                "text": sample["output"],
                "logprobs": self._legacy_logprobs(sample),
                "finish_reason": _finish_reason(sample),
            }
            for sample in row.samples
        ]
        return {
            "id": self._id(row, "cmpl-"),
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": _usage(row.samples, "prompt", "completion"),
            "system_fingerprint": None,
        }

    def _response(self, row: RowResults) -> dict[str, Any]:
        is_cut = any(_finish_reason(sample) == "length" for sample in row.samples)
        output = [
            {
                "id": f"{self._id(row, 'msg_')}_{sample['sample_index']}",
                "type": "message",
                "role": "assistant",
                "status": "incomplete" if _finish_reason(sample) == "length" else "completed",
                "content": [
                    {
                        "type": "output_text",
                        "text": sample["output"],
                        "annotations": [],
                        "logprobs": self._tokens(sample) or [],
                    }
                ],
            }
            for sample in row.samples
        ]
        return {
            "id": self._id(row, "resp_"),
            "object": "response",
            "created_at": self._created,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "model": self._model,
            "output": output,
            "usage": _usage(row.samples, "input", "output"),
        }

    def _tokens(self, sample: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """One entry per sampled token; None where no log-probabilities were asked for."""
        logprobs = sample.get("logprobs")
        if logprobs is None:
            return None
        tops = sample.get("top_logprobs") or [[]] * len(logprobs)
        return [
            {
                **self._token(token_id, logprob),
                "top_logprobs": [self._token(other["token_id"], other["logprob"]) for other in top],
            }
            for token_id, logprob, top in zip(sample["output_token_ids"], logprobs, tops, strict=True)
        ]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._token_bytes(token_id)
        return {"token": _token_text(data), "logprob": _finite(logprob), "bytes": list(data)}

    def _legacy_logprobs(self, sample: Mapping[str, Any]) -> dict[str, Any] | None:
        """Offsets are characters from the beginning of the completion."""
        tokens = self._tokens(sample)
        if tokens is None:
            return None
        offsets, data = [], b""
        for token in tokens:
            offsets.append(len(data.decode("utf-8", "ignore")))
            data += bytes(token["bytes"])
        has_tops = sample.get("top_logprobs") is not None
        tops = [{top["token"]: top["logprob"] for top in token["top_logprobs"]} for token in tokens]
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": tops if has_tops else None,
            "text_offset": offsets,
        }


def _token_text(data: bytes) -> str:
    """Part of a character has no text of its own; the API writes its bytes then."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else LOWEST_LOGPROB


def _finish_reason(sample: Mapping[str, Any]) -> str:
    return "length" if sample["finish_reason"] == FinishReason.LENGTH else "stop"


def _usage(samples: Sequence[Mapping[str, Any]], prompt: str, completion: str) -> dict[str, Any]:
    """The prompt counts once, whatever the number of samples."""
    num_prompt_tokens = samples[0]["num_prompt_tokens"]
    num_output_tokens = sum(sample["num_output_tokens"] for sample in samples)
    return {
        f"{prompt}_tokens": num_prompt_tokens,
        f"{completion}_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        f"{prompt}_tokens_details": {"cached_tokens": samples[0]["num_cached_tokens"]},
    }


def _request_error(error: Mapping[str, Any]) -> dict[str, Any]:
    code = error["code"]
    return {
        "message": error["message"],
        "type": "invalid_request_error",
        "param": None,
        "code": _KNOWN_CODES.get(code, code),
    }
