"""Chat templates: Jinja in a sandbox, with the names that transformers gives them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from batchinfer.models.messages import clean_messages
from batchinfer.types import Messages

if TYPE_CHECKING:
    import jinja2


class ChatTemplate:
    """A compiled chat template. Raises ValueError when the source is not valid Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        import jinja2

        self.source = source
        self._special_tokens = dict(special_tokens)
        self._marks = _Marks()
        try:
            self._template = _environment(None).from_string(source)
            marks_turns = _GENERATION.search(source) is not None
            self._marked_template = _environment(self._marks).from_string(source) if marks_turns else None
        except jinja2.TemplateSyntaxError as e:
            raise ValueError(f"the chat template is not valid: line {e.lineno}: {e.message}") from e

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """The prompt text. Raises ValueError for messages that are malformed or that the template refuses."""
        return self._render(self._template, messages, add_generation_prompt)

    def render_turns(self, messages: Messages) -> tuple[str, list[tuple[int, int]]] | None:
        """The text and the ranges of characters that `{% generation %}` blocks printed; None if there are no such
        blocks, or if marking them changes the text. Raises ValueError as render."""
        if self._marked_template is None:
            return None
        text, spans = self._marks.take_out(self._render(self._marked_template, messages, False))
        return (text, spans) if text == self.render(messages, add_generation_prompt=False) else None

    def _render(self, template: jinja2.Template, messages: Messages, add_generation_prompt: bool) -> str:
        import jinja2

        checked = clean_messages(messages, joins_text=False)
        try:
            return template.render(
                messages=checked,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as e:
            raise ValueError(f"the chat template refused the messages: {e.message or type(e).__name__}") from e
        except (TypeError, KeyError, AttributeError, IndexError, ValueError, OverflowError, RecursionError) as e:
            raise ValueError(f"the chat template failed on the messages: {type(e).__name__}: {e}") from e


@dataclass(frozen=True, slots=True)
class _Marks:
    """Strings around what a generation block prints; random, so that no message holds them."""

    begin: str = field(default_factory=lambda: f"\ue000{secrets.token_hex(8)}<")
    end: str = field(default_factory=lambda: f"\ue000{secrets.token_hex(8)}>")

    def take_out(self, marked: str) -> tuple[str, list[tuple[int, int]]]:
        """The text without the marks, and the ranges between them."""
        text, spans = "", []
        for place, part in enumerate(marked.split(self.begin)):
            inside, _, outside = part.partition(self.end) if place else ("", "", part)
            if inside:
                spans.append((len(text), len(text) + len(inside)))
            text += inside + outside
        return text, spans


_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")


def _environment(marks: _Marks | None) -> jinja2.Environment:
    """With `marks`, they are printed around what stands in generation blocks."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}...{% endgeneration %}` marks the assistant's text for training."""

        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: jinja2.parser.Parser) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            scope = jinja2.nodes.Scope(body, lineno=line)
            if marks is None:
                return scope
            begin, end = (
                jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)], lineno=line) for mark in (marks.begin, marks.end)
            )
            return [begin, scope, end]

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
