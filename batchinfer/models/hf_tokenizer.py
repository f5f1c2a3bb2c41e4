"""The tokenizer of a Hugging Face folder: tokenizer.json with tokenizer_config.json.

Whether special tokens are added is the post-processor's say in tokenizer.json; `add_bos_token` and `add_eos_token`
beside it are ignored, as in transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.errors import InputError
from batchinfer.models.hf_checkpoint import read_json
from batchinfer.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_hf_tokenizer(folder: Path) -> Tokenizer:
    """Raises InputError when there is no tokenizer or a file of it cannot be read."""
    if not (folder / "tokenizer.json").is_file():
        return _from_transformers(folder)
    import tokenizers

    path = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # tokenizers raises plain Exception
        raise InputError(f"{path}: not a tokenizer that this version of tokenizers reads: {e}") from e
    config = _read_config(folder)
    special = _special_tokens(config, folder)
    _add_missing_tokens(backend, config, special)
    return Tokenizer(backend, special, _chat_template(folder, config))


def _read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json (older folders state roles only there)."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            config |= read_json(folder / name)
    return config


def _special_tokens(config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    special = {}
    for role in _ROLES:
        value = config.get(role)
        text = value.get("content") if isinstance(value, Mapping) else value
        if text is None:
            continue
        if not isinstance(text, str):
            raise InputError(f"{folder}/tokenizer_config.json: {role} must be a string, got {value!r}")
        special[role] = text
    return special


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Tokens that only tokenizer_config.json knows, at the ids it gives them; and the named ones, as special."""
    from tokenizers import AddedToken

    declared = config.get("added_tokens_decoder") or {}
    for token_id, token in sorted(declared.items(), key=lambda item: int(item[0])):
        if backend.token_to_id(token["content"]) is None and int(token_id) == backend.get_vocab_size():
            flags = {key: bool(token.get(key, False)) for key in ("lstrip", "rstrip", "normalized", "single_word")}
            backend.add_tokens([AddedToken(token["content"], special=bool(token.get("special", False)), **flags)])
    # Known ones keep their id and only become special.
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in (*special.values(), *_more_special_tokens(config)):
        if text not in known:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        elif not known[text].special:
            backend.add_special_tokens([known[text]])


def _more_special_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = config.get(key) or ()
        for token in tokens.values() if isinstance(tokens, Mapping) else tokens:
            yield token["content"] if isinstance(token, Mapping) else str(token)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as e:
            raise InputError(f"{path}: cannot read it: {e}") from e
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)}
        template = by_name.get("default")
    if template is not None and not isinstance(template, str):
        raise InputError(f"{folder}/tokenizer_config.json: chat_template must be a string, got {template!r:.80}")
    return template


def _from_transformers(folder: Path) -> Tokenizer:
    """Older folders without tokenizer.json: transformers converts what is there."""
    if not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json")):
        raise InputError(f"{folder}: no tokenizer: neither tokenizer.json nor tokenizer.model nor vocab.json is there")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        backend = tokenizer.backend_tokenizer
    except Exception as e:  # whatever the conversion meets
        raise InputError(f"{folder}: transformers cannot convert the tokenizer to tokenizer.json: {e}") from e
    special = {role: str(getattr(tokenizer, role)) for role in _ROLES if getattr(tokenizer, role, None) is not None}
    template = tokenizer.chat_template
    return Tokenizer(backend, special, template if isinstance(template, str) else _chat_template(folder, {}))
