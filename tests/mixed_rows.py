"""Rows of all kinds, for tests that run them in many ways."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

import numpy as np

from batchinfer.types import Completion, Prompt, SamplingParams, row_key


def mixed_rows(num_rows: int = 64) -> list[Prompt]:
    """Rows of all lengths and parameters; families of shared prefixes, duplicates, prefixes of other rows."""
    rng = random.Random(7)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(6, 256) for _ in range(count)]

    stems = [tokens(length) for length in (3, 16, 40, 64, 97)]
    stems += [stems[2] + tokens(24), stems[3] + tokens(1), stems[4] + tokens(31)]
    rows: list[Prompt] = []
    for index in range(num_rows):
        kind = rng.random()
        if kind < 0.12 and rows:
            ids = rows[rng.randrange(len(rows))].token_ids.tolist()  # a duplicate
        elif kind < 0.25:
            ids = rng.choice(stems)  # ends where others part
        else:
            ids = rng.choice(stems) + tokens(rng.choice((1, 2, 5, 17, 50)))
        array = np.array(ids, dtype=np.int32)
        rows.append(Prompt(index, array, mixed_params(rng), row_key(None, array), priority=rng.randrange(3)))
    return rows


def mixed_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(1, 40),
        min_tokens=rng.choice((0, 0, 1)),
        temperature=rng.choice((0.0, 0.0, 0.7, 1.3)),
        top_k=rng.choice((0, 0, 5, 40)),
        top_p=rng.choice((1.0, 1.0, 0.9, 0.5)),
        min_p=rng.choice((0.0, 0.0, 0.05)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
        presence_penalty=rng.choice((0.0, 0.0, 0.5)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.3)),
        seed=rng.randrange(5),
        n=rng.choice((1, 1, 1, 3)),
        stop=rng.choice(((), (), ("e",), ("q", "zz"))),
        stop_token_ids=rng.choice(((), (), (9, 77))),
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice((None, 0, 3)),
        logprobs_mode=rng.choice(("raw", "processed")),
        prompt_logprobs=rng.random() < 0.3,
    )


def outcome(completion: Completion) -> dict[str, Any]:
    """All of a completion that the contract fixes: how much was cached may differ."""
    values = asdict(completion)
    del values["num_cached_tokens"]
    return values
