"""Who a run is: everything that its tokens, log-probabilities and columns depend on but the input's rows.

Batch size, memory, threads, policy, prefix sharing and how often is flushed are no part of it: they alter
nothing. Nor are names and paths: the same weights under another path are the same model. Whether the
rows are the same is seen from the files' stamps, and where these differ from the rows themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.version import __version__

if TYPE_CHECKING:
    from batchinfer.job_input import InputRows
    from batchinfer.models.source import ModelSource
    from batchinfer.params import ResolvedParams
    from batchinfer.settings import JobSettings

_SHOWN_CHARS = 60


def run_identity(
    settings: JobSettings,
    rows: InputRows,
    model: ModelSource,
    params: ResolvedParams,
    digests: Mapping[str, str | None],
) -> dict[str, Any]:
    """JSON values.

    Args:
        digests: from metadata.model_digests().
    Raises:
        InputError: for a device that is not there.
    """
    from batchinfer.engine.machine import choose_device, choose_dtype, choose_kv_dtype
    from batchinfer.kernels.choice import choose_kernels
    from batchinfer.models.spec import choose_max_model_len

    spec = model.spec
    device = choose_device(settings.engine.device)
    dtype = choose_dtype(settings.engine.dtype, spec.dtype, device)
    kv_dtype = choose_kv_dtype(settings.engine.kv_dtype, dtype)
    kernels = choose_kernels(
        spec, dtype, device, deterministic=settings.engine.deterministic, has_fp8_kv=kv_dtype != dtype
    )
    identity = {
        "version": __version__,
        "model": dict(digests),
        "params": _values(params),
        "engine": {
            "dtype": str(dtype).removeprefix("torch."),
            "kv_dtype": str(kv_dtype).removeprefix("torch."),
            "device": _device_kind(device),
            "kernels": kernels.name,
            "max_model_len": choose_max_model_len(settings.engine.max_model_len, spec, settings.model),
        },
        "input": {
            "num_rows": rows.source.num_rows,
            "schema": _sha256(rows.schema.serialize().to_pybytes()),
            "columns": {
                name: column
                for name, column in asdict(rows.columns).items()
                if column is not None and name != "priority"  # an order, which alters nothing
            },
            "system": settings.system,
        },
        "output": {"prefix": settings.output_prefix},
    }
    return json.loads(json.dumps(identity))  # as it comes back from a file


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs, one text a field: its name, its value now and its value then."""
    mine, theirs = dict(flat(new)), dict(flat(old))
    return [
        f"{name} is {_shown(mine.get(name))} and was {_shown(theirs.get(name))}"
        for name in {**theirs, **mine}
        if mine.get(name) != theirs.get(name)
    ]


def digest_of(identity: Mapping[str, Any]) -> str:
    return _sha256(json.dumps(identity, sort_keys=True).encode())


def input_stamp(spec: str) -> str | None:
    """Of the files that `spec` names: equal as long as nobody writes to them. None where it names no files."""
    from batchinfer.dataset.huggingface import PREFIXES, is_saved_dataset, split_off
    from batchinfer.dataset.parquet import find_parquet_files
    from batchinfer.errors import InputError

    is_of_hub = spec.startswith(PREFIXES)
    name, split = split_off(spec.partition(":")[2] if is_of_hub else spec)
    if is_saved_dataset(Path(name).expanduser()):
        files = sorted(path for path in Path(name).expanduser().rglob("*") if path.is_file())
    elif is_of_hub:
        return None
    else:
        split = None
        try:
            files = find_parquet_files(spec)
        except InputError:
            return None
    stamps = [(path.name, (status := path.stat()).st_size, status.st_mtime_ns) for path in files]
    return _sha256(json.dumps([split, stamps]).encode())


def _values(params: ResolvedParams) -> dict[str, Any]:
    """Without who said so: a flag that says what the model says changes nothing."""
    said = params.to_dict()
    return {
        name: f"by row, else {one['if_null']['value']}" if one["origin"] == "row" else one["value"]
        for name, one in said.items()
    }


def _device_kind(device: Any) -> str:
    """Which one of several equal GPUs runs alters nothing."""
    if device.type != "cuda":
        return str(device.type)
    import torch

    return f"cuda ({torch.cuda.get_device_name(device)})"


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS + 10 else f"{text[:_SHOWN_CHARS]}..."


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
