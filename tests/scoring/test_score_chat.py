"""Which tokens of a chat are the assistant's: templates with generation blocks, and all others by their prefixes."""

from __future__ import annotations

from typing import Any

import pytest
from score_models import EOS, merging_tokenizer

from batchinfer.errors import InputError
from batchinfer.scoring.chat import ChatEncoder
from batchinfer.types import ErrorCode

CHATML = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}[A]{% generation %}{{ m.content }}</s>"
    "{%- endgeneration %}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}\n{% endfor %}"
)
#: Earlier turns lose what they thought, as in templates of reasoning models.
FORGETS = (
    "{% for m in messages %}[{{ m.role }}]{% if loop.last %}{{ m.content }}{% else %}"
    "{{ m.content.split('|')[-1] }}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
#: The prompt for a turn promises something that the finished turn does not have.
PROMISES = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)
NO_EOS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def chat(*turns: str) -> list[dict[str, str]]:
    """user, assistant, user, ..."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def encoder(template: str, turns: Any = "assistant", system: str | None = None) -> ChatEncoder:
    return ChatEncoder(merging_tokenizer(chat_template=template), (EOS,), turns, system)


def scored_text(template: str, messages: Any, turns: Any = "assistant") -> list[str]:
    chats = encoder(template, turns)
    item = chats.item(messages)
    assert item.error is None, item.error
    return [chats.tokenizer.decode(item.token_ids[begin:end].tolist(), False) for begin, end in item.spans]


def error_of(template: str, messages: Any, turns: Any = "assistant") -> tuple[ErrorCode, str]:
    error = encoder(template, turns).item(messages).error
    assert error is not None
    return error.code, error.message


def test_turns_end_with_their_end_of_sequence_token() -> None:
    """The newline behind it is the template's: the model has stopped by then."""
    assert scored_text(CHATML, chat("hi", "abc x", "bye", "ab")) == ["abc x</s>", "ab</s>"]


def test_generation_blocks_say_which_tokens() -> None:
    assert scored_text(MARKED, chat("hi", "abc x", "bye", "ab")) == ["abc x</s>", "ab</s>"]


def test_generation_blocks_change_no_token() -> None:
    tokenizer = merging_tokenizer(chat_template=MARKED)
    messages = chat("hi", " abc {% x %} ", "bye", "ab")
    item = ChatEncoder(tokenizer, (EOS,), "assistant").item(messages)
    assert item.token_ids.tolist() == tokenizer.encode_chat(messages, add_generation_prompt=False).tolist()


def test_messages_that_look_like_marks_are_text() -> None:
    """Marks are random; a private-use character in a message is no mark."""
    assert scored_text(MARKED, chat("\ue000", "\ue000<a\ue000>")) == ["\ue000<a\ue000></s>"]


def test_bytes_and_words_are_those_of_the_turns() -> None:
    item = encoder(CHATML).item(chat("hi", "abc é x", "bye", "ab"))
    assert (item.num_bytes, item.num_words) == (len("abc é xab".encode()), 4)
    assert item.num_scored == 7 + 2, "abc, space, é's two bytes, space, x, its end; ab and its end"


def test_templates_without_an_end_score_the_turn_as_it_is_rendered() -> None:
    assert scored_text(NO_EOS, chat("hi", "abc x")) == ["abc x\n"]


def test_all_scores_everything_but_the_first_token() -> None:
    messages = chat("hi", "abc x")
    item = encoder(CHATML, "all").item(messages)
    assert item.spans == ((1, len(item.token_ids)),)
    assert scored_text(MARKED, messages, "all") == ["[user]hi[A]abc x</s>"], "BOS is context"


def test_a_token_that_reaches_into_a_turn_is_scored() -> None:
    template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    assert scored_text(template, chat("hi", "bc x")) == ["abc x"]


def test_templates_that_rewrite_earlier_turns_are_row_errors() -> None:
    code, message = error_of(FORGETS, chat("hi", "thought|said", "bye", "ab"))
    assert code is ErrorCode.INVALID_MESSAGES
    assert "message 2" in message
    assert "otherwise when more messages follow" in message
    assert "--score all" in message
    assert scored_text(FORGETS, chat("hi", "thought|said")) == ["thought|said</s>"], "one turn is clear"
    assert scored_text(FORGETS, chat("hi", "said", "bye", "th|ab")) == ["said</s>", "th|ab</s>"]


def test_templates_whose_prompt_is_not_the_begin_of_the_turn_are_row_errors() -> None:
    code, message = error_of(PROMISES, chat("hi", "abc"))
    assert (code, "does not begin with the prompt for this turn" in message) == (ErrorCode.INVALID_MESSAGES, True)
    assert scored_text(PROMISES, chat("hi", "<think>abc")) == ["abc</s>"]


def test_an_assistant_that_begins_is_a_row_error_without_generation_blocks() -> None:
    messages = chat("hi", "abc")[1:]
    assert "first message" in error_of(CHATML, messages)[1]
    assert scored_text(MARKED, messages) == ["abc</s>"]


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        (None, ErrorCode.PROMPT_NULL),
        ([], ErrorCode.INVALID_MESSAGES),
        (b"\xff", ErrorCode.INVALID_MESSAGES),
        ([{"role": "user"}], ErrorCode.INVALID_MESSAGES),
        ([{"role": "user", "content": "hi"}], ErrorCode.NOTHING_TO_SCORE),
        ([{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "x"}], ErrorCode.INVALID_MESSAGES),
    ],
)
def test_bad_rows(messages: Any, code: ErrorCode) -> None:
    assert error_of(CHATML, messages)[0] is code


def test_a_template_that_refuses_is_a_row_error() -> None:
    template = "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}" + CHATML
    assert "too long" in error_of(template, chat("a", "b", "c"))[1]
    assert scored_text(template, chat("a", "b")) == ["b</s>"]


def test_a_system_message_goes_first() -> None:
    item = encoder(CHATML, "all", system="be brief").item(chat("hi"))
    assert merging_tokenizer().decode(item.token_ids.tolist(), False).startswith("[system]be brief</s>")


def test_options() -> None:
    with pytest.raises(InputError, match="no chat template"):
        ChatEncoder(merging_tokenizer(), (EOS,), "assistant")
    with pytest.raises(InputError, match="--score must be one of assistant, all"):
        encoder(CHATML, "user")
