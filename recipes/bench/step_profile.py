"""Where the host's time goes in a decode step: everything that is not inside the kernels.

    python recipes/bench/step_profile.py --rows 256,8

Rows of random tokens are decoded together, greedily, end of sequence ignored. Only steps in which all rows advance
by one token count. Around each part of a step a timer takes the part's own time, what it calls left out:

    kernels     the calls into the library of C++ kernels (the whole forward pass and the head, with plain torch)
    schedule    who advances, blocks for it
    apply       rows in and out of the batch, copies of blocks
    inputs      the step's tensors
    call        what the decoder does around the kernels
    sample      from hidden states to drawn tokens
    collect     what the host reads of the step, the check for NaN and infinity among it
    advance     the scheduler's view of the step
    append      tokens to their rows, stops, text
    count       statistics
    rest        what is left of a step

Medians over the steps. What a row costs when it ends (its blocks given back, its text decoded) is told apart.
The bars: at most 5 % of a step of 256 rows and 20 % of one of 8 rows. Prints a Markdown table for each number of rows,
and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import publish

if TYPE_CHECKING:
    from batchinfer.engine.engine import Engine

KERNELS = "kernels"
REST = "rest"
#: Greatest share of the host that is accepted, by rows.
BARS = {256: 0.05, 8: 0.20}


class Timers:
    """Own seconds of each part in the current step; parts may call each other."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.returned: dict[str, Any] = {}  # what each part returned last
        self._open: list[float] = []  # for each part that runs: seconds of what it has called

    def wrap(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            self._open.append(0.0)
            began = time.perf_counter()
            try:
                result = self.returned[part] = call(*args, **options)
                return result
            finally:
                took = time.perf_counter() - began
                self.seconds[part] += took - self._open.pop()
                if self._open:
                    self._open[-1] += took

        return timed

    @contextmanager
    def around(self, owner: object, name: str, part: str) -> Iterator[None]:
        """Time the attribute `name` of `owner` until the block ends."""
        known = owner.__dict__.get(name)
        setattr(owner, name, self.wrap(part, getattr(owner, name)))
        try:
            yield
        finally:
            if known is None:
                delattr(owner, name)
            else:
                setattr(owner, name, known)


class TimedLibrary:
    """The kernels' library, each call timed."""

    def __init__(self, library: Any, timers: Timers) -> None:
        self._library = library
        self._timers = timers

    def __getattr__(self, name: str) -> Any:
        found = self._timers.wrap(KERNELS, getattr(self._library, name))
        setattr(self, name, found)  # the next call comes here no more
        return found


@contextmanager
def timed_parts(engine: Engine, timers: Timers, ends: Timers) -> Iterator[None]:
    """Timers around the parts of every step of the engine, others around what the end of a row takes."""
    from batchinfer.engine.batch import PersistentBatch
    from batchinfer.engine.core import EngineRun
    from batchinfer.engine.detokenizer import OutputText
    from batchinfer.engine.draws import Drawer
    from batchinfer.engine.flight import Flight
    from batchinfer.engine.scheduler import Scheduler

    model: Any = engine.model
    library = getattr(model, "_library", None)
    of_model = KERNELS if library is None else "call"
    places: list[tuple[object, str, str]] = [
        (EngineRun, "_step", REST),
        (Scheduler, "schedule", "schedule"),
        (EngineRun, "_apply", "apply"),
        (PersistentBatch, "inputs", "inputs"),
        (model, "forward", of_model),
        (Drawer, "launch", "sample"),
        (model, "logits", of_model),
        (Flight, "of", "collect"),
        (EngineRun, "_advance", "advance"),
        (EngineRun, "_append", "append"),
        (EngineRun, "_count", "count"),
    ]
    if hasattr(model, "greedy"):
        places.append((model, "greedy", of_model))
    with ExitStack() as stack:
        for owner, name, part in places:
            stack.enter_context(timers.around(owner, name, part))
        stack.enter_context(ends.around(Scheduler, "finish", "finish"))
        stack.enter_context(ends.around(OutputText, "finish", "detokenize"))
        if library is not None:
            model._library = TimedLibrary(library, timers)
            stack.callback(setattr, model, "_library", library)
        yield


def profile(engine: Engine, num_rows: int, prompt_tokens: int, steps: int) -> dict[str, Any]:
    """Median seconds of the parts of a decode step of `num_rows` rows.

    Raises ValueError if no step had all rows decoding.
    """
    from unittest import mock

    import numpy as np

    from batchinfer.engine import engine as engine_module
    from batchinfer.types import Prompt, SamplingParams

    random = np.random.default_rng(0)
    vocab = min(engine.model.spec.vocab_size, engine.tokenizer.num_ids)
    params = SamplingParams(max_tokens=steps + 2, ignore_eos=True)
    prompts = []
    for row in range(num_rows):
        tokens = random.integers(0, vocab, prompt_tokens, dtype=np.int32)
        tokens[0] = row % vocab  # nothing is shared
        prompts.append(Prompt(row, tokens, params, key=row))
    timers, ends = Timers(), Timers()
    found: list[dict[str, float]] = []

    def on_step(stats: Any) -> None:
        step = timers.returned["schedule"]
        # Every row decoded and none ended: an end releases blocks.
        if len(step.scheduled) == step.num_tokens == stats.num_seqs_running == num_rows and not step.admitted:
            found.append(dict(timers.seconds))
        timers.seconds.clear()

    # Full steps from the first one on: all rows are to decode together.
    with timed_parts(engine, timers, ends), mock.patch.object(engine_module, "FIRST_ROW_TOKENS", 0):
        for _ in engine.run(prompts, on_step):
            pass
    if not found:
        raise ValueError(f"{num_rows} rows never decoded together: raise --max-num-seqs or the KV memory")
    parts = sorted({part for step in found for part in step})
    seconds = {part: statistics.median(step.get(part, 0.0) for step in found) for part in parts}
    step_s = sum(seconds.values())
    host_s = step_s - seconds.get(KERNELS, 0.0)
    return {
        "rows": num_rows,
        "num_steps": len(found),
        "num_output_tokens": params.max_tokens,
        "step_s": step_s,
        "host_s": host_s,
        "host_share": host_s / step_s,
        "bar": BARS.get(num_rows),
        "parts_s": seconds,
        "end_of_a_row_s": {part: ends.seconds[part] / num_rows for part in ("finish", "detokenize")},
    }


def table(result: dict[str, Any]) -> str:
    parts = sorted(result["parts_s"].items(), key=lambda item: -item[1])
    rows = [[name, f"{1e3 * value:.3f}", f"{100 * value / result['step_s']:.1f} %"] for name, value in parts]
    share = f"{100 * result['host_share']:.1f} %"
    ends = ", ".join(f"{name} {1e3 * value:.3f} ms" for name, value in result["end_of_a_row_s"].items())
    bar = "" if result["bar"] is None else f" (the bar is {100 * result['bar']:.0f} %)"
    return f"""**{result["rows"]} rows**: {1e3 * result["step_s"]:.2f} ms a step, of which the host \
{1e3 * result["host_s"]:.2f} ms, {share}{bar}. Medians of {result["num_steps"]} steps.

{publish.markdown_table(["part", "ms", "of the step"], rows)}

The end of a row of {result["num_output_tokens"]} tokens: {ends}."""


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parse(arguments)
    from batchinfer.config import EngineConfig
    from batchinfer.engine.engine import Engine

    config = EngineConfig(threads=args.threads, max_num_seqs=max(args.rows), dtype=args.dtype)
    engine = Engine(args.model, config)
    results = [profile(engine, rows, args.prompt_tokens, args.steps) for rows in args.rows]
    print(f"{publish.provenance()} Kernels: {engine.kernels}. {args.prompt_tokens} tokens of prompt.\n")
    print("\n\n".join(map(table, results)))
    print(json.dumps({"kernels": engine.kernels, "results": results}, allow_nan=False))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=_row_counts, default="256,8", help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of each row; default: %(default)s")
    parser.add_argument("--steps", type=int, default=32, help="decode steps; default: %(default)s")
    parser.add_argument("--threads", type=int, help="default: the physical cores")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args(arguments)
    if args.steps < 1 or args.prompt_tokens < 1:
        parser.error("--steps and --prompt-tokens must be at least 1")
    return args


def _row_counts(text: str) -> list[int]:
    counts = [int(name) for name in text.split(",")]
    if min(counts) < 1:
        raise ValueError(text)  # argparse names the option
    return counts


if __name__ == "__main__":
    main()
