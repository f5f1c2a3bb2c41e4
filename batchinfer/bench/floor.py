"""The least time a job can take on a machine: what must be computed and moved, over what the machine reaches.

Each part takes at least the greater of its FLOPs over the rate of a matrix product and its bytes over the
memory's rate (the roofline of Williams, Waterman and Patterson, 2009). The parts run one after the other.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchinfer.machine_speed import MachineSpeed
    from batchinfer.planner.cost import JobCost


@dataclass(frozen=True, slots=True)
class Part:
    """What one kind of work takes at least."""

    name: str
    flops: int
    bytes: int
    floor_s: float


@dataclass(frozen=True, slots=True)
class Floor:
    """Of a whole job, every shared token computed once."""

    parts: tuple[Part, ...]  # matmul, attention, head
    flops_per_s: float
    bytes_per_s: float

    @property
    def seconds(self) -> float:
        return sum(part.floor_s for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, **asdict(self)}


def floor_of(cost: JobCost, speed: MachineSpeed) -> Floor:
    """`cost` says what is counted: the weights once for each of the fewest steps, KV once for all rows below it."""
    head_bytes = cost.lm_head_bytes_read
    work = (
        ("matmul", cost.matmul_flops, cost.weight_bytes_read - head_bytes),
        ("attention", cost.attention_flops, cost.kv_bytes_read + cost.kv_bytes_written),
        ("head", cost.lm_head_flops, head_bytes),
    )
    parts = tuple(
        Part(name, flops, num_bytes, max(flops / speed.flops_per_s, num_bytes / speed.read_bytes_per_s))
        for name, flops, num_bytes in work
    )
    return Floor(parts, speed.flops_per_s, speed.read_bytes_per_s)
