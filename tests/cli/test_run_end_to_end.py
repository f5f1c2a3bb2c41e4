"""`batchinfer run` with real parts: a tiny random Llama, and the embedded model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from batchinfer.cli.main import app

MakeModel = Callable[..., Path]
PREFIX = "Sort each message to the help desk into one of five labels. " * 2


@pytest.fixture(scope="module")
def model(tiny_llama: MakeModel) -> Path:
    return tiny_llama()


def write(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def run(prompts: object, model: object, output: Path, *args: object) -> Result:
    words = ["run", prompts, "--model", model, "--output", output, "--device", "cpu", "--threads", 1, *args]
    return CliRunner().invoke(app, list(map(str, words)))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def params_of(path: Path) -> dict[str, Any]:
    return json.loads(pq.read_metadata(path).metadata[b"batchinfer"])["params"]


def refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.stderr
    message = result.stderr.rsplit("error: ", 1)[1]
    for word in words:
        assert word in message
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_shared_prefixes_are_computed_once_and_the_summary_says_so(model: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.parquet", id=list(range(20)), prompt=[f"{PREFIX}{i}" for i in range(20)])
    output = tmp_path / "out.parquet"
    result = run(prompts, model, output, "--max-tokens", 6, "--json", "--ignore-eos")
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    assert [row["id"] for row in rows_of(output)] == list(range(20))
    assert value["num_rows_ok"] == 20
    assert value["num_output_tokens"] == 120
    assert value["num_prompt_tokens_computed"] + value["num_prompt_tokens_reused"] == value["num_prompt_tokens"]
    assert value["sharing_achieved_of_possible"] >= 0.97
    assert value["tokens_per_second"]["output"] > 0
    metadata = json.loads(pq.read_metadata(output).metadata[b"batchinfer"])
    assert metadata["engine"]["dtype"] == "float32"
    assert metadata["engine"]["device"] == "cpu"
    assert metadata["engine"]["max_model_len"] == 256


def test_sharing_off_and_small_memory_change_no_token(model: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.parquet", id=list(range(8)), prompt=[f"{PREFIX}{i}" for i in range(8)])
    common = ("--max-tokens", 40, "--temperature", 0.8, "--seed", 5, "--logprobs", 1, "--ignore-eos")
    variants: list[tuple[object, ...]] = [
        (),
        ("--no-prefix-sharing", "--max-num-seqs", 3),
        ("--block-size", 16, "--kv-memory", 100_000, "--max-batch-tokens", 37, "--policy", "fcfs"),
    ]
    outputs, num_preemptions = [], 0
    for index, variant in enumerate(variants):
        path = tmp_path / f"{index}.parquet"
        result = run(prompts, model, path, *common, *variant, "--json")
        assert result.exit_code == 0, result.stderr
        num_preemptions += json.loads(result.stdout)["num_preemptions"]
        outputs.append(pq.read_table(path).drop_columns("num_cached_tokens"))
    assert num_preemptions > 0
    assert outputs[0].equals(outputs[1])
    assert outputs[0].equals(outputs[2])


def test_a_left_over_temperature_beside_do_sample_false_is_not_used(tiny_llama: MakeModel, tmp_path: Path) -> None:
    model = tiny_llama(generation={"do_sample": False, "temperature": 0.6, "top_p": 0.9})
    prompts = write(tmp_path / "p.parquet", prompt=["abc"])
    greedy, default = tmp_path / "greedy.parquet", tmp_path / "default.parquet"
    assert run(prompts, model, default, "--max-tokens", 20).exit_code == 0
    assert run(prompts, model, greedy, "--max-tokens", 20, "--temperature", 0).exit_code == 0
    assert rows_of(default) == rows_of(greedy)
    assert params_of(default)["temperature"] == {"value": 0.0, "origin": "model"}
    assert params_of(greedy)["temperature"] == {"value": 0.0, "origin": "flag"}


def test_the_model_s_sampling_defaults_are_used_and_named(tiny_llama: MakeModel, tmp_path: Path) -> None:
    model = tiny_llama(generation={"do_sample": True, "temperature": 0.6, "top_k": 7, "max_new_tokens": 9})
    prompts = write(tmp_path / "p.parquet", prompt=["abc"])
    config = tmp_path / "run.toml"
    config.write_text("[sampling]\ntop_p = 0.5\n")
    output = tmp_path / "out.parquet"
    result = run(prompts, model, output, "--seed", 1, "--ignore-eos", "--config", config)
    assert result.exit_code == 0, result.stderr
    params = params_of(output)
    assert params["temperature"] == {"value": 0.6, "origin": "model"}
    assert params["top_k"] == {"value": 7, "origin": "model"}
    assert params["max_tokens"] == {"value": 9, "origin": "model"}
    assert params["top_p"] == {"value": 0.5, "origin": "config"}
    assert params["seed"] == {"value": 1, "origin": "flag"}
    assert params["min_p"] == {"value": 0.0, "origin": "default"}
    assert rows_of(output)[0]["num_output_tokens"] == 9


def test_over_long_prompts_are_row_errors(model: Path, tmp_path: Path) -> None:
    """max_model_len is 64 and <s> is one token: prompts of 63, 64 and 65 tokens."""
    texts = ["x" * (62 + i % 3) for i in range(30)]
    prompts = write(tmp_path / "p.parquet", prompt=texts)
    output = tmp_path / "out.parquet"
    result = run(prompts, model, output, "--max-model-len", 64, "--strict", "--json", "--ignore-eos")
    assert result.exit_code == 3
    value = json.loads(result.stdout)
    assert value["failed_by_code"] == {"prompt_too_long": 20}
    assert value["num_rows_truncated"] == 10
    for index, row in enumerate(rows_of(output)):
        if index % 3 == 0:
            assert (row["finish_reason"], row["num_output_tokens"], row["error"]) == ("length", 1, None)
        else:
            assert (row["output"], row["finish_reason"]) == (None, "error")
            assert row["error"]["code"] == "prompt_too_long"


def test_null_and_empty_prompts_are_row_errors(model: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.parquet", prompt=["a", "", None, "  "])
    output = tmp_path / "out.parquet"
    assert run(prompts, model, output, "--max-tokens", 3).exit_code == 0
    rows = rows_of(output)
    assert [row["prompt"] for row in rows] == ["a", "", None, "  "]
    assert rows[2]["error"]["code"] == "prompt_null"
    # This tokenizer puts <s> in front, so "" is one token and can run.
    assert [row["num_prompt_tokens"] for row in rows] == [2, 1, 0, 3]


def test_chat_rows_with_and_without_a_system_message(model: Path, tmp_path: Path) -> None:
    messages = [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "mine"}, {"role": "user", "content": "hi"}],
        [],
    ]
    prompts = write(tmp_path / "p.parquet", messages=messages)
    output = tmp_path / "out.parquet"
    assert run(prompts, model, output, "--max-tokens", 2, "--system", "be brief").exit_code == 0
    rows = rows_of(output)
    sizes = [len("<system>be brief\n<user>hi\n<a>"), len("<system>mine\n<user>hi\n<a>"), 0]
    assert [row["num_prompt_tokens"] for row in rows] == sizes
    assert rows[2]["error"]["code"] == "invalid_messages"


def test_json_lines_and_openai_batch(model: Path, tmp_path: Path) -> None:
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "a", "n": 1}\n{"prompt": "bc", "n": 2}\n')
    assert run(lines, model, tmp_path / "1.parquet", "--max-tokens", 2).exit_code == 0
    assert [row["n"] for row in rows_of(tmp_path / "1.parquet")] == [1, 2]
    batch = tmp_path / "batch.jsonl"
    requests = [
        {"custom_id": f"c{i}", "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1 + i}}
        for i in range(3)
    ]
    batch.write_text("".join(json.dumps(request) + "\n" for request in requests))
    result = run(batch, model, tmp_path / "2.parquet", "--max-tokens", 9, "--ignore-eos")
    assert result.exit_code == 0, result.stderr
    rows = rows_of(tmp_path / "2.parquet")
    assert [(row["custom_id"], row["num_output_tokens"]) for row in rows] == [("c0", 1), ("c1", 2), ("c2", 3)]
    assert params_of(tmp_path / "2.parquet")["max_tokens"]["if_null"] == {"value": 9, "origin": "flag"}


# Bad models and engine settings.


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "p.parquet", prompt=["abc"])


def test_model_that_is_not_there(prompts: Path, tmp_path: Path) -> None:
    refused(run(prompts, "./no-such-folder", tmp_path / "o.parquet"), "./no-such-folder", "no such folder or file")


def test_folder_without_a_model(prompts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    refused(run(prompts, folder, tmp_path / "o.parquet"), str(folder), "config.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_folder_that_may_not_be_read(prompts: Path, tiny_llama: MakeModel, tmp_path: Path) -> None:
    folder = tiny_llama()
    folder.chmod(0)
    try:
        refused(run(prompts, folder, tmp_path / "o.parquet"), str(folder))
    finally:
        folder.chmod(0o700)


def test_config_that_is_not_json(prompts: Path, tiny_llama: MakeModel, tmp_path: Path) -> None:
    folder = tiny_llama()
    (folder / "config.json").write_text("{")
    refused(run(prompts, folder, tmp_path / "o.parquet"), str(folder / "config.json"))


def test_unknown_architecture(prompts: Path, tiny_llama: MakeModel, tmp_path: Path) -> None:
    folder = tiny_llama(config={"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    refused(run(prompts, folder, tmp_path / "o.parquet"), "MambaForCausalLM", "LlamaForCausalLM")


def test_missing_weight(prompts: Path, tiny_llama: MakeModel, tmp_path: Path) -> None:
    folder = tiny_llama(config={"tie_word_embeddings": False})
    refused(run(prompts, folder, tmp_path / "o.parquet"), "lm_head.weight")


def test_unsupported_gguf_type(prompts: Path, tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    blocks = np.zeros((32, 66), np.uint8)  # IQ2_XXS: 66 bytes for 256 weights
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(run(prompts, path, tmp_path / "o.parquet"), str(path), "IQ2_XXS")


def test_messages_without_a_chat_template(tiny_llama: MakeModel, tmp_path: Path) -> None:
    chats = write(tmp_path / "p.parquet", messages=[[{"role": "user", "content": "hi"}]])
    refused(run(chats, tiny_llama(chat=False), tmp_path / "o.parquet"), "'messages'", "chat template")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--device", "tpu9"], ["--device"]),
        (["--device", "cuda:99"], ["--device cuda:99"]),
        (["--system", "be brief"], ["--system needs messages"]),
        (["--max-model-len", 1000], ["--max-model-len 1000 is above the 256"]),
    ],
)
def test_engine_settings_that_cannot_work(
    model: Path, prompts: Path, tmp_path: Path, args: list[object], words: list[str]
) -> None:
    refused(run(prompts, model, tmp_path / "o.parquet", *args), *words)
    assert not (tmp_path / "o.parquet").exists()


def test_the_embedded_model(tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.parquet", prompt=["The capital of France is", "The capital of Italy is"])
    output = tmp_path / "out.parquet"
    result = run(prompts, "smollm2-135m", output, "--max-tokens", 2, "--dtype", "float32")
    assert result.exit_code == 0, result.stderr
    assert [row["output"] for row in rows_of(output)] == [" Paris.", " Rome."]
