"""TOML layering and the checks of values."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from batchinfer.config import EngineConfig
from batchinfer.errors import InputError
from batchinfer.settings import SETTINGS, JobSettings, job_settings, load_config, parse_size
from batchinfer.types import SamplingParams

REQUIRED = {"prompts": "p.parquet", "model": "m", "output": "o.parquet"}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def settings_of(flags: dict[str, Any], config: dict[str, Any] | None = None) -> JobSettings:
    return job_settings({**REQUIRED, **flags}, config or {}, Path("run.toml"))


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4GiB", 4 << 30),
        ("512MB", 512_000_000),
        ("1.5 gib", 3 << 29),
        ("100", 100),
        ("7b", 7),
        (" 2 KiB ", 2048),
        (4096, 4096),
    ],
)
def test_sizes(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["4GBit", "-1", "", "GiB", "1e3", "nan", True])
def test_what_is_not_a_size_is_refused(text: Any) -> None:
    with pytest.raises(InputError, match="not a size"):
        parse_size(text)


def test_every_field_of_the_configurations_is_a_setting() -> None:
    sampling = {name for name, s in SETTINGS.items() if s.section == "sampling"}
    engine = {name for name, s in SETTINGS.items() if s.section == "engine"}
    assert sampling == set(SamplingParams.names())
    assert engine == {f.name.removesuffix("_bytes") for f in fields(EngineConfig)}


def test_config_is_read_by_section(tmp_path: Path) -> None:
    path = write(
        tmp_path / "run.toml",
        """
        [input]
        prompts = "p.parquet"
        [model]
        name = "smollm2-135m"
        [sampling]
        temperature = 1
        stop = "END"
        stop_token_ids = 7
        [engine]
        kv_memory = "1GiB"
        prefix_sharing = false
        [output]
        path = "o.parquet"
        prefix = "bi_"
        """,
    )
    settings = job_settings({}, load_config(path), path)
    assert (settings.prompts, settings.model, settings.output) == ("p.parquet", "smollm2-135m", Path("o.parquet"))
    assert settings.output_prefix == "bi_"
    assert settings.engine == EngineConfig(kv_memory_bytes=1 << 30, prefix_sharing=False)
    assert settings.sampling.config == {"temperature": 1, "stop": "END", "stop_token_ids": [7]}


def test_flags_win_over_the_file() -> None:
    settings = settings_of(
        {"block_size": 16, "max_tokens": 5}, {"block_size": 32, "max_num_seqs": 4, "max_tokens": 9, "prompts": "other"}
    )
    assert settings.prompts == "p.parquet"
    assert settings.engine == EngineConfig(block_size=16, max_num_seqs=4)
    assert settings.sampling.flags == {"max_tokens": 5}
    assert settings.sampling.config == {"max_tokens": 9}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[sampling]\ntemprature = 1\n", ["run.toml", "unknown key 'temprature' in [sampling]", "'temperature'"]),
        ("[sampling]\nblock_size = 16\n", ["unknown key 'block_size' in [sampling]", "it is [engine] block_size"]),
        ("[output]\nxyzzy = 1\n", ["unknown key 'xyzzy' in [output]", "known: path, prefix, overwrite, strict"]),
        ("[sampler]\nn = 1\n", ["unknown section [sampler]", "[sampling]"]),
        ("[zzz]\n", ["unknown section [zzz]", "[input], [model], [sampling], [engine], [output]"]),
        ("temperature = 1\n", ["'temperature' stands outside any section", "it belongs in [sampling] temperature"]),
        ("model = 1\n", ["'model' stands outside any section", "[model] name"]),
        ("[sampling]\nmax_tokens = 1.5\n", ["run.toml [sampling] max_tokens must be a whole number, got 1.5"]),
        ("[sampling]\nmax_tokens = true\n", ["max_tokens must be a whole number, got True"]),
        ("[sampling]\ntemperature = 'hot'\n", ["[sampling] temperature must be a number, got 'hot'"]),
        ("[sampling]\nstop = [1]\n", ["[sampling] stop must be a string or a list of strings, got [1]"]),
        ("[engine]\nprefix_sharing = 1\n", ["[engine] prefix_sharing must be a boolean, got 1"]),
        ("[input\n", ["run.toml is not valid TOML"]),
    ],
)
def test_config_mistakes_name_file_and_key(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        load_config(write(tmp_path / "run.toml", text))
    for word in words:
        assert word in str(caught.value)


def test_missing_config_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read --config .*none\.toml: No such file"):
        load_config(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"top_p": 1.5}, "--top-p: top_p must be between 0.0 and 1.0, got 1.5"),
        ({"top_p": 0.0}, "--top-p: top_p must be above 0"),
        ({"temperature": -1.0}, "--temperature: temperature must be between"),
        ({"temperature": float("nan")}, "--temperature: temperature must be between 0.0 and 10000.0, got nan"),
        ({"max_tokens": 0}, "--max-tokens: max_tokens must be between 1 and"),
        ({"n": 0}, "--n: n must be between 1 and"),
        ({"repetition_penalty": 1e-40}, "--repetition-penalty: repetition_penalty must be between 0.01 and 100.0"),
        ({"stop": [""]}, "--stop: stop must be non-empty strings"),
        ({"stop_token_ids": [-1]}, "--stop-token-id: stop_token_ids must be whole numbers from 0"),
        ({"logprobs": -1}, "--logprobs: logprobs must be between 0 and 1000"),
        ({"logprobs_mode": "cooked"}, "--logprobs-mode: logprobs_mode must be 'raw' or 'processed'"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens (9) is above max_tokens (5)"),
        ({"block_size": 48}, "--block-size: block_size must be one of 16, 32"),
        ({"dtype": "int8"}, "--dtype: dtype must be one of auto, float32"),
        ({"policy": "random"}, "--policy: policy must be one of prefix, fcfs, priority"),
        ({"threads": 0}, "--threads: threads must be a whole number from 1, got 0"),
        ({"kv_memory": "lots"}, "--kv-memory: not a size: 'lots'"),
        ({"kv_memory": "0"}, "--kv-memory: kv_memory_bytes must be a whole number from 1, got 0"),
        ({"limit": 0}, "--limit must be at least 1, got 0"),
        ({"prompt_column": "a", "messages_column": "b"}, "either --prompt-column or --messages-column"),
        ({"priority_column": "p"}, "--priority-column has no effect with --policy prefix"),
    ],
)
def test_impossible_values_name_the_flag(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        settings_of(flags)
    assert message in str(caught.value)


def test_impossible_values_of_the_file_name_the_file() -> None:
    with pytest.raises(InputError, match=r"run\.toml \[sampling\] top_p: top_p must be"):
        settings_of({}, {"top_p": 2.0})
    with pytest.raises(InputError, match=r"run\.toml \[engine\] block_size: block_size must be"):
        settings_of({}, {"block_size": 1})


def test_min_tokens_above_the_default_max_tokens_waits_for_the_model() -> None:
    assert settings_of({"min_tokens": 5000}).sampling.flags == {"min_tokens": 5000}


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("prompts", "PROMPTS is missing; give it, or [input] prompts"),
        ("model", "--model is missing; give it, or [model] name"),
        ("output", "--output is missing; give it, or [output] path"),
    ],
)
def test_what_a_job_cannot_do_without(missing: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        job_settings({k: v for k, v in REQUIRED.items() if k != missing}, {}, None)
    assert message in str(caught.value)


def test_a_plan_needs_no_output() -> None:
    assert job_settings({"prompts": "p", "model": "m"}, {}, None, needs_output=False).output is None
