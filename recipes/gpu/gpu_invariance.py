"""Does a row's result depend on its company? batchinfer's own self-test on this device, with rows made afresh.

With --deterministic it must not, to the last bit; without, products may sum in another order, and the report says in
which ways rows differed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_setup import Check, run_part

if TYPE_CHECKING:
    from batchinfer.types import Prompt


def random_rows(check: Check) -> list[Prompt]:
    """Below stems of several lengths, greedy and drawn."""
    import numpy as np

    from batchinfer import self_test
    from batchinfer.types import Prompt, SamplingParams

    rng = np.random.default_rng()
    is_dry = check.sizes.is_dry
    stems = [rng.integers(0, self_test.SPEC.vocab_size, length) for length in ((17,) if is_dry else (64, 70, 130, 1))]
    rows = []
    for index in range(2 if is_dry else 40):
        own = rng.integers(0, self_test.SPEC.vocab_size, 1 + index if is_dry else rng.integers(1, 100))
        ids = np.concatenate([stems[index % len(stems)], own]).astype(np.int32)
        params = SamplingParams(
            max_tokens=2 if is_dry else int(rng.integers(1, 30)),
            temperature=0.9 * (index % 3 == 2),
            seed=index,
            logprobs=0,
            prompt_logprobs=True,
        )
        rows.append(Prompt(index, ids, params, key=index))
    return rows


def part(check: Check) -> None:
    from batchinfer import self_test

    if check.sizes.is_dry:
        self_test.WAYS = {"in company": self_test.WAYS["in company"]}
    for found in self_test.check_triton(check.dtype, check.device, random_rows(check)):
        figures = {
            "holds": found.holds,
            "is_promised": found.is_promised,
            "differs": list(found.differing),
            "from_torch_nats": found.torch_difference,
        }
        check.report.put(**{found.kernels: figures})
        if not found.is_sound:
            check.report.fail(f"{found.kernels}: rows differ {', '.join(found.differing)}")


if __name__ == "__main__":
    run_part(part)
