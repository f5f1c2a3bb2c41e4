"""The two runs side by side: what differs between them, and what does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchinfer.evals.report.text import one_line
from batchinfer.evals.result import ComparisonResult, RunIdentity

_MAX_LENGTH = 400
_DIGEST_LENGTH = 16
#: Said elsewhere in the identity, or made of what is.
_TWICE = ("params", "digests", "version", "created", "identity", "job", "input_stamp")


@dataclass(frozen=True, slots=True)
class IdentityLine:
    name: str
    before: str | None  # None: not said
    after: str | None


@dataclass(frozen=True, slots=True)
class Identities:
    different: list[IdentityLine]
    same: list[IdentityLine]


def identities(result: ComparisonResult) -> Identities:
    before, after = (dict(_flat(run)) for run in (result.before, result.after))
    lines = [IdentityLine(name, before.get(name), after.get(name)) for name in dict.fromkeys([*before, *after])]
    return Identities(
        different=[line for line in lines if line.before != line.after],
        same=[line for line in lines if line.before == line.after],
    )


def _flat(run: RunIdentity) -> Iterator[tuple[str, str]]:
    yield "file", one_line(run.path, _MAX_LENGTH)
    yield "rows", f"{run.num_rows:,}"
    for name, value in (("model", run.model), ("batchinfer", run.version), ("created", run.created)):
        if value is not None:
            yield name, one_line(value, _MAX_LENGTH)
    for name, digest in run.digests.items():
        if digest is not None:
            yield f"digest of {name}", str(digest)[:_DIGEST_LENGTH]
    for name, param in run.params.items():
        if isinstance(param, Mapping):
            yield f"params.{name}", f"{_text(param.get('value'))} ({param.get('origin', '?')})"
        else:
            yield f"params.{name}", _text(param)
    for name, value in run.metadata.items():
        if name not in _TWICE:
            yield from _leaves(name, value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}", item)
    else:
        yield name, _text(value)


def _text(value: Any) -> str:
    return "none" if value is None else one_line(str(value), _MAX_LENGTH)
