"""What a measurement came to, as JSON and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from batchinfer.bench.floor import Floor
from batchinfer.version import __version__

#: Names that kernels have for the parts of the floor.
_PART_OF = {"products": "matmul"}
HEADERS = ("part", "FLOPs", "bytes", "floor s", "of the time")
MEASURED_HEADERS = ("measured s", "of its optimum")


@dataclass(frozen=True, slots=True)
class KvUse:
    """Bytes of KV."""

    pool_bytes: int  # that there were
    used_bytes: int  # at most at a time
    planned_bytes: int  # what the plan says the running samples need at most


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Prompt tokens count once for each sample, as in a job's summary."""

    prompts: str
    model: str
    machine: dict[str, Any]  # processor, cores, threads
    engine: dict[str, Any]  # what the engine ran with
    params: dict[str, Any]  # sampling parameters
    counts: dict[str, int]  # see Tally.counts
    failed_by_code: dict[str, int]
    num_unique_prompt_tokens: int  # what must be computed
    seconds: dict[str, float]  # load, read (tokenizing too), plan, run
    first_row_s: float  # from the process's start to the first result
    floor: Floor
    kernel_seconds: dict[str, float] | None  # of the parts, where the kernels tell
    kv: KvUse

    @property
    def generation_s(self) -> float:
        """Prompts in to texts out: everything but loading."""
        return sum(self.seconds.values()) - self.seconds["load"]

    @property
    def share_of_optimum(self) -> float:
        """The floor over the time it took, 0 to 1: 1 is as fast as this machine can."""
        return self.floor.seconds / self.generation_s

    @property
    def parts(self) -> dict[str, PartTime]:
        """Floor and measured seconds of each part; what no part has is "rest"."""
        found = {
            part.name: PartTime(part.flops, part.bytes, part.floor_s, part.floor_s / self.generation_s)
            for part in self.floor.parts
        }
        if self.kernel_seconds is None:
            return found
        times = {_PART_OF.get(name, name): seconds for name, seconds in self.kernel_seconds.items()}
        times["rest"] = self.generation_s - sum(times.values())
        for name, seconds in times.items():
            known = found.get(name) or PartTime()
            found[name] = PartTime(known.flops, known.bytes, known.floor_s, known.share, seconds)
        return found

    @property
    def tokens_per_second(self) -> dict[str, float]:
        """Per second of generation. `prompt` has reused tokens too."""
        counts, seconds = self.counts, self.generation_s
        return {
            "prompt": counts["num_prompt_tokens"] / seconds,
            "prompt_computed": counts["num_prompt_tokens_computed"] / seconds,
            "output": counts["num_output_tokens"] / seconds,
        }

    @property
    def sharing(self) -> dict[str, float | None]:
        """Of all prompt tokens, 0 to 1; None without any."""
        total = self.counts["num_prompt_tokens"]
        return {
            "achieved": self.counts["num_prompt_tokens_reused"] / total if total else None,
            "possible": self.counts["num_prompt_tokens_shareable"] / total if total else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON values: no NaN, no infinity."""
        return {
            "version": __version__,
            "prompts": self.prompts,
            "model": self.model,
            "generation_s": self.generation_s,
            "share_of_optimum": self.share_of_optimum,
            "floor": self.floor.to_dict(),
            "parts": {name: asdict(part) for name, part in self.parts.items()},
            "seconds": self.seconds,
            "first_row_s": self.first_row_s,
            "tokens_per_second": self.tokens_per_second,
            "num_unique_prompt_tokens": self.num_unique_prompt_tokens,
            **self.counts,
            "failed_by_code": self.failed_by_code,
            "sharing": self.sharing,
            "kv": asdict(self.kv),
            "machine": self.machine,
            "engine": self.engine,
            "params": self.params,
        }

    def headline(self) -> str:
        """ "62 % of the optimum: matmul 41 %, attention 12 %, head 9 %"."""
        parts = ", ".join(f"{part.name} {_percent(part.floor_s / self.generation_s)}" for part in self.floor.parts)
        return f"{_percent(self.share_of_optimum)} of the optimum: {parts}"

    def facts(self) -> list[tuple[str, str]]:
        """Label and text, one fact each."""
        counts, seconds, rates, floor = self.counts, self.seconds, self.tokens_per_second, self.floor
        failed = f" · failed: {counts['num_rows_failed']:,}" if counts["num_rows_failed"] else ""
        sharing, machine = self.sharing, self.machine
        return [
            ("machine", f"{machine['name']} · threads: {machine['threads']} · kernels: {self.engine['kernels']}"),
            ("reaches", f"{floor.flops_per_s / 1e12:.3f} TFLOP/s · {floor.bytes_per_s / 1e9:.1f} GB/s"),
            (
                "tokens",
                f"prompt: {counts['num_prompt_tokens']:,} (unique: {self.num_unique_prompt_tokens:,}, computed: "
                f"{counts['num_prompt_tokens_computed']:,}) · output: {counts['num_output_tokens']:,}",
            ),
            ("rows", f"ok: {counts['num_rows_ok']:,}{failed} · steps: {counts['num_steps']:,}"),
            ("sharing", f"achieved: {_percent(sharing['achieved'])} · possible: {_percent(sharing['possible'])}"),
            (
                "KV",
                f"used: {size(self.kv.used_bytes)} of {size(self.kv.pool_bytes)} · planned: "
                f"{size(self.kv.planned_bytes)} · preemptions: {counts['num_preemptions']:,}",
            ),
            (
                "seconds",
                f"generation: {self.generation_s:.2f} (read: {seconds['read']:.2f}, plan: {seconds['plan']:.2f}, "
                f"run: {seconds['run']:.2f}) · load: {seconds['load']:.2f} · first row after {self.first_row_s:.2f}",
            ),
            (
                "tokens/s",
                f"prompt: {rates['prompt']:,.0f} (computed: {rates['prompt_computed']:,.0f}) · "
                f"output: {rates['output']:,.0f}",
            ),
        ]

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Headers and rows, the total last."""
        has_times = self.kernel_seconds is not None
        rows = [_row(name, part, has_times) for name, part in self.parts.items()]
        parts = self.floor.parts
        total = PartTime(
            sum(part.flops for part in parts),
            sum(part.bytes for part in parts),
            self.floor.seconds,
            self.share_of_optimum,
            self.generation_s,
        )
        return HEADERS + MEASURED_HEADERS * has_times, [*rows, _row("total", total, has_times)]


@dataclass(frozen=True, slots=True)
class PartTime:
    """One part of the job. None: not known, or nothing that the floor counts."""

    flops: int | None = None
    bytes: int | None = None
    floor_s: float | None = None
    share: float | None = None  # of the whole generation, 0 to 1
    measured_s: float | None = None


def _row(name: str, part: PartTime, has_times: bool) -> tuple[str, ...]:
    cells = [
        name,
        "" if part.flops is None else number(part.flops),
        "" if part.bytes is None else size(part.bytes),
        "" if part.floor_s is None else f"{part.floor_s:.2f}",
        "" if part.share is None else _percent(part.share),
    ]
    if has_times:
        cells.append("" if part.measured_s is None else f"{part.measured_s:.2f}")
        is_known = part.floor_s is not None and part.measured_s
        cells.append(_percent(part.floor_s / part.measured_s) if is_known else "")  # type: ignore[operator]
    return tuple(cells)


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.0f} %"


def number(value: float) -> str:
    """Three digits and a prefix: "14.2 T"."""
    for prefix in ("", " k", " M", " G", " T", " P"):
        if value < 999.5:
            return f"{value:.3g}{prefix}"
        value /= 1000
    return f"{value:.3g} E"


def size(num_bytes: float) -> str:
    """Decimal units: memory rates are told in GB/s."""
    return f"{number(num_bytes)}B" if num_bytes >= 999.5 else f"{num_bytes:.0f} B"
