"""Real lack of memory in a step: a process that may not grow halves its steps and gives the same results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import INSTRUCTION_SETS

SCRIPT = """
import json, resource, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
import torch
from tiny_models import SMALL_SPEC, tiny_engine
from batchinfer.config import EngineConfig
from batchinfer.types import Prompt, SamplingParams

kernels, spare = sys.argv[1], int(sys.argv[2])
config = EngineConfig(max_batch_tokens=65_536, max_num_seqs=64, block_size=64, kv_memory_bytes=24 << 20, threads=1)
torch.set_num_threads(1)
engine = tiny_engine(config, spec=replace(SMALL_SPEC, max_position=2048), dtype=torch.bfloat16, max_model_len=2048,
                     kernels=None if kernels == "torch" else kernels)
engine.check_integrity = False
rng = np.random.default_rng(0)
params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=0)
rows = [Prompt(i, rng.integers(6, 256, 1000).astype(np.int32), params, key=i) for i in range(64)]
list(engine.run(rows[:1]))  # pool, threads and libraries are there
if spare:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (spare << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
found = sorted((one.row_index, one.token_ids, one.logprobs) for one in engine.run(rows))
print(json.dumps({"found": found, "without": engine.stats.num_steps_without_memory}))
"""


def run(kernels: str, spare_mib: int) -> dict[str, object]:
    tests = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kernels, str(spare_mib)], cwd=tests, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
@pytest.mark.parametrize("kernels", INSTRUCTION_SETS)
def test_a_process_that_may_not_grow_makes_smaller_steps(kernels: str) -> None:
    free, limited = run(kernels, 0), run(kernels, 60)
    assert free["without"] == 0
    assert limited["without"]
    assert limited["found"] == free["found"]
