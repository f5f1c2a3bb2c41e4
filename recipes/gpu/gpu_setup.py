"""What the parts of recipes/gpu_check.py have in common: their sizes, their model, their clock, their report."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from batchinfer.models.spec import DecoderSpec
    from batchinfer.models.weights import DecoderWeights

ROOT = Path(__file__).resolve().parents[2]


def make_importable() -> None:
    """The checkout as it lies: its kernels/ and evals/ import as parts of batchinfer, installed or not.

    It does not stay on sys.path: transformers would take kernels/ for a library of Hugging Face's.
    """
    sys.path.insert(0, str(ROOT))
    try:
        import batchinfer
    finally:
        sys.path.remove(str(ROOT))
    if str(ROOT) not in batchinfer.__path__:
        batchinfer.__path__.append(str(ROOT))


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a part's work is."""

    is_dry: bool
    num_layers: int
    rows: int  # decoding together
    context: int  # tokens of KV of each
    prefill_tokens: int
    prefixes: int
    prefix_tokens: int
    own_tokens: int  # behind a shared prefix
    layers_unshared: int  # as many as leave room for KV that is not shared
    prompts: int  # through an engine
    prompt_tokens: int
    output_tokens: int
    repeats: int


FULL = Sizes(
    is_dry=False,
    num_layers=32,
    rows=256,
    context=1024,
    prefill_tokens=8192,
    prefixes=8,
    prefix_tokens=4096,
    own_tokens=128,
    layers_unshared=8,
    prompts=256,
    prompt_tokens=512,
    output_tokens=128,
    repeats=10,
)
DRY = Sizes(
    is_dry=True,
    num_layers=1,
    rows=4,
    context=66,
    prefill_tokens=24,
    prefixes=2,
    prefix_tokens=64,
    own_tokens=3,
    layers_unshared=1,
    prompts=3,
    prompt_tokens=9,
    output_tokens=3,
    repeats=1,
)


@dataclass(frozen=True, slots=True)
class Check:
    """One part's run."""

    sizes: Sizes
    device: torch.device
    dtype: torch.dtype
    spec: DecoderSpec  # Llama-3-8B, or a dwarf of it
    report: Report

    def wait(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object], repeats: int | None = None) -> float:
        """Of one call: the median of several, after one that compiles and fills caches."""
        call()
        return statistics.median(self._once(call) for _ in range(repeats or self.sizes.repeats))

    def kernel_seconds(self, call: Callable[[], object]) -> float:
        """Of one call on the device, without what it takes to launch it: calls are recorded and replayed."""
        if self.device.type != "cuda":
            return self.seconds(call)
        import torch

        call()
        self.wait()
        graph, calls, replays = torch.cuda.CUDAGraph(), 10, self.sizes.repeats
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        self.wait()
        return begin.elapsed_time(end) / 1e3 / (calls * replays)

    def _once(self, call: Callable[[], object]) -> float:
        self.wait()
        began = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - began


class Report:
    """Figures by name, written after each one: what is known survives a crash."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []

    def put(self, **values: Any) -> None:
        self.values |= values
        for name, value in values.items():
            print(f"  {name}: {value}", file=sys.stderr, flush=True)
        self._write()

    def fail(self, problem: str) -> None:
        print(f"  FAILED {problem}", file=sys.stderr, flush=True)
        self.problems.append(problem)
        self._write()

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """An error inside is this name's problem; what follows goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.fail(f"{name}: {type(error).__name__}: {str(error)[:500]}")

    def _write(self) -> None:
        text = json.dumps({**self.values, "problems": self.problems}, default=str)
        partial = self._path.with_suffix(".partial")
        partial.write_text(text)
        os.replace(partial, self._path)


def run_part(part: Callable[[Check], None]) -> None:
    """`python PART.py REPORT.json [--dry-run]`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded; asking for it would take time
    make_importable()
    import torch

    from batchinfer.kernels.triton.floors import LLAMA_3_8B

    torch.manual_seed(time.time_ns() % (1 << 31))  # fresh inputs each time
    sizes = DRY if args.dry_run else FULL
    report = Report(args.report)
    check = Check(
        sizes=sizes,
        device=torch.device("cpu" if args.dry_run else "cuda"),
        dtype=torch.float32 if args.dry_run else torch.bfloat16,
        spec=_dwarf(LLAMA_3_8B) if args.dry_run else LLAMA_3_8B,
        report=report,
    )
    report.put(seed=torch.initial_seed())
    with report.guarded("the part"):
        part(check)


def _dwarf(spec: DecoderSpec) -> DecoderSpec:
    return with_layers(
        replace(
            spec,
            vocab_size=160,
            hidden_size=64,
            intermediate_size=96,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            rope=replace(spec.rope, dim=16),
            max_position=256,
        ),
        DRY.num_layers,
    )


def with_layers(spec: DecoderSpec, num_layers: int) -> DecoderSpec:
    return replace(spec, num_layers=num_layers, sliding_windows=(None,) * num_layers)


def random_weights(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Made on the device: no file of 16 GB is read."""
    import torch

    from batchinfer.models import random_model

    return random_model.random_weights(
        spec, dtype, device, lambda shape: torch.randn(shape, dtype=dtype, device=device)
    )
