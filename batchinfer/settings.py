"""What a job is told to do: command-line flags layered over a TOML file, checked before any work.

One table, `SETTINGS`, says which settings exist, what type each has, and where it is written in the
TOML file; the flag is the setting's name with dashes. Precedence between the layers: flag, then file,
then the default (for sampling parameters also the row and the model, see params.py).
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from batchinfer.config import EngineConfig
from batchinfer.errors import InputError
from batchinfer.params import SamplingLayers
from batchinfer.types import SamplingParams

Kind = Literal["string", "integer", "number", "boolean", "size", "strings", "integers"]

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_size(text: str | int) -> int:
    """Bytes of "4GiB", "512MB", "1.5 gib" or a plain number. KB is 1000 bytes, KiB is 1024."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text) if isinstance(text, str) else None
    if match is None or match[2].lower() not in _SIZE_UNITS:
        raise InputError(f"not a size: {text!r}; write for example 4GiB, 512MB or a number of bytes")
    return int(float(match[1]) * _SIZE_UNITS[match[2].lower()])


@dataclass(frozen=True, slots=True)
class Setting:
    name: str  # the flag is this with dashes, unless flag says otherwise
    section: str  # of the TOML file
    key: str
    kind: Kind
    flag: str

    @property
    def config_name(self) -> str:
        return f"[{self.section}] {self.key}"


def setting(section: str, name: str, kind: Kind, *, key: str | None = None, flag: str | None = None) -> Setting:
    """The flag is `name` with dashes unless it is given, and so is the key in the file."""
    return Setting(name, section, key or name, kind, flag or "--" + name.replace("_", "-"))


SETTINGS: dict[str, Setting] = {
    one.name: one
    for one in (
        setting("input", "prompts", "string", flag="PROMPTS"),
        setting("input", "prompt_column", "string"),
        setting("input", "messages_column", "string"),
        setting("input", "id_column", "string"),
        setting("input", "priority_column", "string"),
        setting("input", "system", "string"),
        setting("input", "limit", "integer"),
        setting("input", "window", "integer"),
        setting("model", "model", "string", key="name"),
        setting("model", "adapter", "string"),
        setting("sampling", "max_tokens", "integer"),
        setting("sampling", "min_tokens", "integer"),
        setting("sampling", "temperature", "number"),
        setting("sampling", "top_p", "number"),
        setting("sampling", "top_k", "integer"),
        setting("sampling", "min_p", "number"),
        setting("sampling", "repetition_penalty", "number"),
        setting("sampling", "presence_penalty", "number"),
        setting("sampling", "frequency_penalty", "number"),
        setting("sampling", "seed", "integer"),
        setting("sampling", "n", "integer"),
        setting("sampling", "stop", "strings"),
        setting("sampling", "stop_token_ids", "integers", flag="--stop-token-id"),
        setting("sampling", "include_stop", "boolean"),
        setting("sampling", "ignore_eos", "boolean"),
        setting("sampling", "logprobs", "integer"),
        setting("sampling", "logprobs_mode", "string"),
        setting("sampling", "prompt_logprobs", "boolean"),
        setting("engine", "dtype", "string"),
        setting("engine", "kv_dtype", "string"),
        setting("engine", "device", "string"),
        setting("engine", "threads", "integer"),
        setting("engine", "max_batch_tokens", "integer"),
        setting("engine", "max_num_seqs", "integer"),
        setting("engine", "kv_memory", "size"),
        setting("engine", "block_size", "integer"),
        setting("engine", "policy", "string"),
        setting("engine", "prefix_sharing", "boolean", flag="--prefix-sharing/--no-prefix-sharing"),
        setting("engine", "max_model_len", "integer"),
        setting("engine", "deterministic", "boolean", flag="--deterministic/--no-deterministic"),
        setting("output", "output", "string", key="path"),
        setting("output", "output_prefix", "string", key="prefix"),
        setting("output", "overwrite", "boolean"),
        setting("output", "strict", "boolean"),
        setting("output", "output_format", "string", key="format"),
        setting("output", "max_row_errors", "integer"),
        setting("output", "flush_seconds", "number"),
        setting("output", "flush_rows", "integer"),
    )
}

#: Finished completions go to the journal after so many seconds, or when there are so many of them.
FLUSH_SECONDS = 5.0
FLUSH_ROWS = 1000

# setting -> its least value
_LEAST: dict[str, float] = {"limit": 1, "window": 1, "max_row_errors": 0, "flush_seconds": 0, "flush_rows": 1}

# setting -> EngineConfig field, where the names differ
_ENGINE_FIELDS = {"kv_memory": "kv_memory_bytes"}


@dataclass(frozen=True, slots=True)
class JobSettings:
    """One job, as asked for. Values are checked; nothing has been opened yet."""

    prompts: str
    model: str
    output: Path | None  # None for `plan`
    sampling: SamplingLayers
    engine: EngineConfig
    adapter: str | None = None
    prompt_column: str | None = None
    messages_column: str | None = None
    id_column: str | None = None
    priority_column: str | None = None
    system: str | None = None
    limit: int | None = None
    window: int | None = None  # rows; None: WINDOW_ROWS
    output_prefix: str = ""
    overwrite: bool = False
    strict: bool = False
    max_row_errors: int | None = None
    flush_seconds: float = FLUSH_SECONDS
    flush_rows: int = FLUSH_ROWS


def load_config(path: Path, settings: Mapping[str, Setting] = SETTINGS) -> dict[str, Any]:
    """Values of a TOML file by setting name. Raises InputError naming the file and the key at fault.

    Args:
        settings: that the command has.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read --config {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path} is not valid TOML: {error}") from error
    by_place = {(setting.section, setting.key): setting for setting in settings.values()}
    sections = list(dict.fromkeys(setting.section for setting in settings.values()))
    values: dict[str, Any] = {}
    for section, content in document.items():
        if section not in sections or not isinstance(content, dict):
            raise InputError(_unknown_section(path, section, isinstance(content, dict), settings))
        for key, value in content.items():
            setting = by_place.get((section, key))
            if setting is None:
                raise InputError(_unknown_key(path, section, key, settings))
            values[setting.name] = _typed(setting, value, path)
    return values


def job_settings(
    flags: Mapping[str, Any], config: Mapping[str, Any], config_path: Path | None, *, needs_output: bool = True
) -> JobSettings:
    """Flags over config file over defaults. Both map setting names to values that somebody gave.

    Raises InputError naming the flag or the key in the file whose value is missing or impossible.
    """
    source = Origins(flags, config_path)
    merged = {**config, **flags}
    for name in ("prompts", "model") + (("output",) if needs_output else ()):
        if not merged.get(name):
            setting = SETTINGS[name]
            raise InputError(f"{setting.flag} is missing; give it, or {setting.config_name} in a --config file")
    for name, least in _LEAST.items():
        if not merged.get(name, least) >= least:
            raise InputError(f"{source(name)} must be at least {least}, got {merged[name]}")
    if merged.get("prompt_column") and merged.get("messages_column"):
        raise InputError(f"give either {source('prompt_column')} or {source('messages_column')}, not both")
    engine = engine_config(merged, source)
    if merged.get("priority_column") and engine.policy != "priority":
        raise InputError(f"{source('priority_column')} has no effect with --policy {engine.policy}; use priority")
    output = Path(merged["output"]) if needs_output else None
    if output is not None and "output_format" in merged:
        _check_output_format(output, merged["output_format"], source)
    others = {name: merged[name] for name in _OTHER_NAMES if name in merged}
    return JobSettings(
        prompts=merged["prompts"],
        model=merged["model"],
        output=output,
        sampling=_sampling_layers(flags, config, source),
        engine=engine,
        **others,
    )


_OTHER_NAMES = {field.name for field in fields(JobSettings)} - {"prompts", "model", "output", "sampling", "engine"}


def _check_output_format(output: Path, given: str, origin: Origins) -> None:
    """The name's ending says the format; one that is given must be the same. Raises InputError."""
    if given not in _FITTING_NAMES:
        raise InputError(f"{origin('output_format')} must be {' or '.join(_FITTING_NAMES)}, got {given!r}")
    if (given == "openai") != (output.suffix.lower() == ".jsonl"):
        fits = _FITTING_NAMES[given]
        raise InputError(f"{origin('output_format')} {given} needs {fits} as {origin('output')}, got {output}")


_FITTING_NAMES = {"parquet": "a folder, or a name that ends in .parquet,", "openai": "a name that ends in .jsonl"}


@dataclass(frozen=True)
class Origins:
    """Says where a setting's value was given, for messages."""

    flags: Mapping[str, Any]
    config_path: Path | None
    settings: Mapping[str, Setting] = field(default_factory=lambda: SETTINGS)

    def __call__(self, name: str) -> str:
        setting = self.settings[name]
        return setting.flag if name in self.flags else f"{self.config_path} {setting.config_name}"


def engine_config(merged: Mapping[str, Any], origin: Origins) -> EngineConfig:
    """Raises InputError naming the flag or the key in the file whose value is impossible."""
    values: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        if setting.section != "engine" or name not in merged:
            continue
        try:
            value = parse_size(merged[name]) if setting.kind == "size" else merged[name]
            this: dict[str, Any] = {_ENGINE_FIELDS.get(name, name): value}
            EngineConfig(**this)  # alone, so that the message is about this value
        except ValueError as error:
            raise InputError(f"{origin(name)}: {error}") from error
        values.update(this)
    return EngineConfig(**values)


def _sampling_layers(flags: Mapping[str, Any], config: Mapping[str, Any], origin: Origins) -> SamplingLayers:
    names = SamplingParams.names()
    layers = SamplingLayers(
        flags={name: flags[name] for name in names if name in flags},
        config={name: config[name] for name in names if name in config},
    )
    for name, value in {**layers.config, **layers.flags}.items():
        # Alone, so that the message is about this value: only min_tokens is bound to another one.
        room = {"max_tokens": max(value, 1)} if name == "min_tokens" else {}
        try:
            SamplingParams(**{**room, name: value})
        except ValueError as error:
            raise InputError(f"{origin(name)}: {error}") from error
    layers.check()
    return layers


def _typed(setting: Setting, value: Any, path: Path) -> Any:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    fits = {
        "string": isinstance(value, str),
        "integer": is_whole,
        "number": is_whole or isinstance(value, float),
        "boolean": isinstance(value, bool),
        "size": is_whole or isinstance(value, str),
        "strings": isinstance(value, str) or _is_list_of(value, str),
        "integers": is_whole or _is_list_of(value, int),
    }
    if not fits[setting.kind]:
        wanted = {"strings": "a string or a list of strings", "integers": "a whole number or a list of them"}
        text = wanted.get(setting.kind, {"integer": "a whole number"}.get(setting.kind, f"a {setting.kind}"))
        raise InputError(f"{path} {setting.config_name} must be {text}, got {value!r}")
    if setting.kind == "integers" and is_whole:
        return [value]
    return value


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)


def _unknown_section(path: Path, name: str, is_table: bool, settings: Mapping[str, Setting]) -> str:
    sections = list(dict.fromkeys(s.section for s in settings.values()))
    what = f"unknown section [{name}]" if is_table else f"{name!r} stands outside any section"
    places = [s.config_name for s in settings.values() if name in (s.key, s.name)]
    near = difflib.get_close_matches(name, sections, n=1)
    if places:
        hint = f"it belongs in {places[0]}"
    elif near:
        hint = f"did you mean [{near[0]}]?"
    else:
        hint = "sections are " + ", ".join(f"[{s}]" for s in sections)
    return f"{path}: {what}; {hint}"


def _unknown_key(path: Path, section: str, key: str, settings: Mapping[str, Setting]) -> str:
    """Names the nearest key of the same section, else one of the same name elsewhere."""
    keys = [s.key for s in settings.values() if s.section == section]
    elsewhere = [s.config_name for s in settings.values() if key in (s.key, s.name)]
    near = difflib.get_close_matches(key, keys, n=1)
    if elsewhere:
        hint = f"it is {elsewhere[0]}"
    elif near:
        hint = f"did you mean {near[0]!r}?"
    else:
        hint = f"known: {', '.join(keys)}"
    return f"{path}: unknown key {key!r} in [{section}]; {hint}"
