"""The assembly that widens fp8 numbers on NVIDIA's chips, carried out here: no interpreter of Triton's does."""

from __future__ import annotations

import re

import pytest
import torch

from batchinfer.kernels.fp8_kv import FP8
from batchinfer.kernels.triton import fp8
from batchinfer.kernels.triton.launch import CHIPS

HALF = 0xFFFF


def as_numbers(register: int, dtype: torch.dtype) -> torch.Tensor:
    """The two 16-bit numbers of a register, the lower half first."""
    halves = torch.tensor([register & HALF, register >> 16], dtype=torch.int32)
    return halves.to(torch.uint16).view(dtype)


def carry_out(source: str, word: int) -> list[int]:
    """Registers $0 and $1, given $2; by PTX ISA 8.5, sections 9.7.1 to 9.7.9."""
    registers = {"$2": word}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for instruction in source.strip("{ }").split(";"):
        name, *operands = re.split(r"[\s,]+", instruction.strip())
        if name in ("", ".reg"):
            continue
        target, *values = operands[0], *map(value, operands[1:])
        if name == "prmt.b32":
            low, high, selector = values
            both = low.to_bytes(4, "little") + high.to_bytes(4, "little")
            result = int.from_bytes(bytes(both[selector >> 4 * i & 7] for i in range(4)), "little")
        elif name == "fma.rn.bf16x2":
            x, factor, addend = (as_numbers(each, torch.bfloat16).double() for each in values)
            bits = (x * factor + addend).to(torch.bfloat16).view(torch.uint16).tolist()
            result = bits[0] | bits[1] << 16
        else:
            result = {
                "mov.b32": lambda a: a,
                "and.b32": lambda a, b: a & b,
                "or.b32": lambda a, b: a | b,
                "shr.b32": lambda a, b: a >> b,
            }[name](*values)
        registers[target] = result
    return [registers["$0"], registers["$1"]]


@pytest.mark.parametrize(
    ("source", "dtype"), [(fp8.PTX_TO_BF16, torch.bfloat16), (fp8.PTX_TO_FP16, torch.float16)], ids=["bf16", "fp16"]
)
def test_every_code_becomes_its_number(source: object, dtype: torch.dtype) -> None:
    codes = torch.randperm(256, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    expected = codes.view(FP8).float() / fp8.FP8_UNIT.value
    found = []
    for four in codes.view(-1, 4).tolist():
        found += [as_numbers(each, dtype) for each in carry_out(source.value, int.from_bytes(bytes(four), "little"))]  # type: ignore[attr-defined]
    is_number = expected.isfinite()
    assert int(is_number.sum()) == 254
    assert torch.equal(torch.cat(found).float()[is_number], expected[is_number])
    assert torch.signbit(torch.cat(found))[codes == 0x80].all(), "-0 stays"


def test_it_is_for_16_bit_numbers_on_nvidia_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "is_interpreted", lambda: False)
    for chip in ("sm_80", "sm_90"):
        assert fp8.kv_format(torch.bfloat16, 128, CHIPS[chip]) == fp8.FP8_BY_PTX
        assert fp8.kv_format(torch.float32, 128, CHIPS[chip]) == fp8.FP8_BY_INTEGERS
    assert fp8.kv_format(torch.bfloat16, 256, CHIPS["sm_80"]) == fp8.FP8_BY_INTEGERS
    assert fp8.kv_format(torch.bfloat16, 128, CHIPS["gfx942"]) == fp8.FP8_BY_INTEGERS
    monkeypatch.setattr(fp8, "is_interpreted", lambda: True)
    assert fp8.kv_format(torch.bfloat16, 128, CHIPS["sm_90"]) == fp8.FP8_BY_INTEGERS
