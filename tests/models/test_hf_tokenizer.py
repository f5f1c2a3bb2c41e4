"""Tokenizers of Hugging Face folders against transformers: special tokens, chat templates, unknown ids."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchinfer.errors import InputError
from batchinfer.models.hf_tokenizer import read_hf_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'fail' %}{{ raise_exception('role ' ~ message.role) }}{% endif %}\n"
    "{{ '[' + message['role'] + '] ' + message['content'] + eos_token }}{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
MESSAGES = [{"role": "user", "content": "hello world 12"}, {"role": "assistant", "content": "  é 🙂"}]
TEXTS = ["hello world", "", " ", "12  hello\n", "🙂🙂 汉字 é", "<s>hello", "a</s>b", "<s><s>hello", "<s"]


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_ids_equal_transformers(byte_tokenizer: Any, tmp_path: Path) -> None:
    theirs = byte_tokenizer(tmp_path)
    ours = read_hf_tokenizer(tmp_path)
    for text, ids in zip(TEXTS, ours.encode_batch(TEXTS), strict=True):
        assert ids.dtype == np.int32
        expected = theirs(text)["input_ids"]
        assert ids.tolist() == (expected[1:] if text.startswith("<s>") else expected), repr(text)
    for text, ids in zip(TEXTS, ours.encode_batch(TEXTS, add_special_tokens=False), strict=True):
        assert ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"]


def test_a_prompt_with_bos_gets_exactly_one(byte_tokenizer: Any, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, chat_template=TEMPLATE)
    tokenizer = read_hf_tokenizer(tmp_path)
    assert tokenizer.bos_token_id == 1
    rendered = tokenizer.render_chat(MESSAGES)
    assert rendered.startswith("<s>")
    from_messages = tokenizer.encode_chat(MESSAGES).tolist()
    from_text = tokenizer.encode_batch([rendered])[0].tolist()
    assert from_messages == from_text
    assert from_messages.count(1) == 1
    plain = tokenizer.encode_batch(["hello"])[0].tolist()  # the tokenizer's own way
    assert plain[0] == 1
    assert plain.count(1) == 1


def test_a_tokenizer_without_bos_adds_none(byte_tokenizer: Any, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, adds_bos=False, chat_template=TEMPLATE)
    tokenizer = read_hf_tokenizer(tmp_path)
    assert 1 not in tokenizer.encode_batch(["hello"])[0]
    assert len(tokenizer.encode_batch([""])[0]) == 0
    assert tokenizer.encode_batch(["<s>hello"])[0].tolist().count(1) == 1
    assert tokenizer.encode_chat(MESSAGES).tolist().count(1) == 1


@pytest.mark.parametrize("generation", [True, False])
def test_chat_equals_apply_chat_template(generation: bool, byte_tokenizer: Any, tmp_path: Path) -> None:
    theirs = byte_tokenizer(tmp_path, chat_template=TEMPLATE)
    ours = read_hf_tokenizer(tmp_path)
    text = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=generation)
    assert ours.render_chat(MESSAGES, add_generation_prompt=generation) == text
    ids = theirs.apply_chat_template(MESSAGES, tokenize=True, add_generation_prompt=generation)["input_ids"]
    assert ours.encode_chat(MESSAGES, add_generation_prompt=generation).tolist() == ids


RICH = [
    {"role": "user", "content": [{"type": "text", "text": "<a> & 'b'"}, {"type": "text", "text": "é"}], "name": None},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, None]}}}]},
]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson }}",
        "{{ messages[1].tool_calls | tojson(indent=2) }}",
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ tools is none }}{{ documents is none }}{{ eos_token }}{{ 'name' in messages[0] }}",
        "{% generation %}x{% set y = 1 %}{% endgeneration %}{{ messages | length }}",
        "  {% if true %}  \n  a\n  {%- endif %}\n b",
    ],
)
def test_template_features_equal_transformers(template: str, byte_tokenizer: Any, tmp_path: Path) -> None:
    theirs = byte_tokenizer(tmp_path, chat_template=template)
    ours = read_hf_tokenizer(tmp_path)
    assert ours.render_chat(RICH, add_generation_prompt=False) == theirs.apply_chat_template(RICH, tokenize=False)


def test_strftime_now(byte_tokenizer: Any, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, chat_template="{{ strftime_now('%Y') }}")
    assert int(read_hf_tokenizer(tmp_path).render_chat(MESSAGES)) >= 2024


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        ("hello", "must be a list of messages"),
        ({"role": "user"}, "must be a list of messages"),
        (["hello"], "message 1 is str, not an object with role and content"),
        ([*MESSAGES, {"content": "x"}], "message 3 has no role"),
        ([{"role": "", "content": "x"}], "message 1 has no role"),
        ([{"role": 3, "content": "x"}], "message 1 has no role"),
        ([{"role": "user"}], "message 1 (user) has no content"),
        ([{"role": "user", "content": None}], "message 1 (user) has no content"),
        ([{"role": "user", "content": 7}], "message 1 has content of type int, not text"),
        ([{"role": "fail", "content": "x"}], "refused the messages: role fail"),
        ([{"role": "user", "content": [{"text": "x"}]}], "failed on the messages: TypeError"),
    ],
)
def test_bad_messages_are_value_errors(messages: Any, message: str, byte_tokenizer: Any, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, chat_template=TEMPLATE)
    with pytest.raises(ValueError, match="message") as error:
        read_hf_tokenizer(tmp_path).encode_chat(messages)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].x.y }}"]
)
def test_templates_run_in_a_sandbox(template: str, byte_tokenizer: Any, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(ValueError, match="chat template refused"):
        read_hf_tokenizer(tmp_path).render_chat(MESSAGES)


def test_no_template_and_invalid_template(byte_tokenizer: Any, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        read_hf_tokenizer(tmp_path).render_chat(MESSAGES)
    edit_config(tmp_path, chat_template="{% for %}")
    with pytest.raises(ValueError, match="not valid: line 1"):
        read_hf_tokenizer(tmp_path).render_chat(MESSAGES)


def test_where_the_template_comes_from(byte_tokenizer: Any, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, chat_template=TEMPLATE)
    assert (tmp_path / "chat_template.jinja").is_file()  # as transformers 5 saves it
    edit_config(tmp_path, chat_template="from config")
    assert read_hf_tokenizer(tmp_path).chat_template == TEMPLATE
    (tmp_path / "chat_template.jinja").unlink()
    assert read_hf_tokenizer(tmp_path).chat_template == "from config"
    edit_config(
        tmp_path, chat_template=[{"name": "tool_use", "template": "x"}, {"name": "default", "template": "the default"}]
    )
    assert read_hf_tokenizer(tmp_path).chat_template == "the default"


def test_special_tokens_as_dicts(byte_tokenizer: Any, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    edit_config(tmp_path, bos_token={"__type": "AddedToken", "content": "<s>"}, eos_token={"content": "</s>"})
    tokenizer = read_hf_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    edit_config(tmp_path, eos_token=7)
    with pytest.raises(InputError, match="eos_token must be a string"):
        read_hf_tokenizer(tmp_path)


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("flag", [True, False])
def test_bos_is_the_post_processors_say_as_in_transformers(
    flag: bool, adds_bos: bool, byte_tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    byte_tokenizer(tmp_path, adds_bos=adds_bos)
    edit_config(tmp_path, add_bos_token=flag, add_eos_token=flag)
    ids = read_hf_tokenizer(tmp_path).encode_batch(["hello"])[0].tolist()
    assert ids == AutoTokenizer.from_pretrained(tmp_path)("hello")["input_ids"]


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
def test_special_tokens_that_only_the_config_names(key: str, byte_tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    byte_tokenizer(tmp_path)
    edit_config(tmp_path, **{key: ["hello", "<extra>"], "pad_token": "<pad>"})
    ours, theirs = read_hf_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "a hello<extra><pad>hell"
    ids = ours.encode_batch([text])[0].tolist()
    assert [theirs.convert_ids_to_tokens(i) for i in ids] == theirs.convert_ids_to_tokens(theirs(text)["input_ids"])
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "a hell"


def test_decode_equals_transformers_and_leaves_unknown_ids_out(byte_tokenizer: Any, tmp_path: Path) -> None:
    theirs = byte_tokenizer(tmp_path)
    ours = read_hf_tokenizer(tmp_path)
    assert ours.num_ids == len(theirs)
    assert ours.special_ids == {0, 1, 2}
    for text in TEXTS:
        ids = ours.encode_batch([text])[0].tolist()
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected
        # The model's vocabulary is padded to 320: such an id may be sampled.
        padded = [315, *ids[: len(ids) // 2], 319, *ids[len(ids) // 2 :], 2**31 - 1]
        assert ours.decode(padded) == ours.decode(ids)
    assert ours.decode([315]) == ours.decode([]) == ""


def test_ids_may_be_sparse(byte_tokenizer: Any, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["vocab"]["hello"] = 300  # was 262, the highest ids follow it
    path.write_text(json.dumps(data))
    tokenizer = read_hf_tokenizer(tmp_path)
    assert tokenizer.num_ids == 301
    assert len(tokenizer.backend.get_vocab()) < 301
    assert tokenizer.encode_batch(["hello"])[0].tolist() == [1, 300]
    assert tokenizer.decode([300, 262, 290]) == "hello"


def test_characters_cut_over_tokens(byte_tokenizer: Any, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    tokenizer = read_hf_tokenizer(tmp_path)
    ids = tokenizer.encode_batch(["🙂🙂 汉字 é"], add_special_tokens=False)[0]
    assert tokenizer.decode(ids) == "🙂🙂 汉字 é"
    assert tokenizer.decode(ids[:2]) == "\ufffd"


def test_truncation_and_padding_in_the_file_are_not_applied(byte_tokenizer: Any, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    ids = read_hf_tokenizer(tmp_path).encode_batch(["abcdefg", "a"])
    assert [len(row) for row in ids] == [8, 2]


def test_invalid_unicode_is_named(byte_tokenizer: Any, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    tokenizer = read_hf_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="text 1 is not valid Unicode"):
        tokenizer.encode_batch(["fine", "bad \ud800"])
    with pytest.raises(ValueError, match="text 0 is not a string but int"):
        tokenizer.encode_batch([3])  # type: ignore[list-item]


def test_missing_and_broken_files(byte_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tokenizer"):
        read_hf_tokenizer(tmp_path)
    byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InputError, match=r"tokenizer_config\.json: must hold a JSON object"):
        read_hf_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json: not a tokenizer"):
        read_hf_tokenizer(tmp_path)


def test_without_tokenizer_json_transformers_converts(byte_tokenizer: Any, tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    byte_tokenizer(tmp_path / "json")
    data = json.loads((tmp_path / "json" / "tokenizer.json").read_text())
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps(data["model"]["vocab"]))
    (old / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in data["model"]["merges"]))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (old / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"} | names))
    tokenizer = read_hf_tokenizer(old)
    theirs = GPT2Tokenizer.from_pretrained(old)
    assert tokenizer.encode_batch(["hello world</s>"])[0].tolist() == theirs("hello world</s>")["input_ids"]
    assert tokenizer.bos_token_id == 1


def test_digest_follows_what_decides_ids(byte_tokenizer: Any, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, chat_template=TEMPLATE)
    first = read_hf_tokenizer(tmp_path).digest()
    assert first == read_hf_tokenizer(tmp_path).digest()
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE + " ")
    assert first == read_hf_tokenizer(tmp_path).digest(), "the template is told apart from the tokenizer"
    edit_config(tmp_path, eos_token="<unk>")
    second = read_hf_tokenizer(tmp_path).digest()
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert len({first, second, read_hf_tokenizer(tmp_path).digest()}) == 3


def test_transformers_is_not_imported_where_it_is_not_needed(byte_tokenizer: Any, tmp_path: Path) -> None:
    import subprocess

    byte_tokenizer(tmp_path, chat_template=TEMPLATE)
    code = (
        "import sys; from pathlib import Path; from batchinfer.models.hf_tokenizer import read_hf_tokenizer\n"
        "read_hf_tokenizer(Path(sys.argv[1])).encode_chat([{'role': 'user', 'content': 'hi'}])\n"
        "from batchinfer.models.source import resolve_model\n"
        "resolve_model('smollm2-135m').tokenizer.encode_batch(['hi'])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=tmp_path)
