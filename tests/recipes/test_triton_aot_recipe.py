"""Kernels compile for chips that are not there, and the recipe says what they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from batchinfer.kernels.triton import aot, norm
from batchinfer.kernels.triton.aot import Compiled, compile_variant, faults
from batchinfer.kernels.triton.launch import CHIPS, Chip, is_interpreted

SCRIPT = Path(__file__).parents[2] / "recipes" / "triton_aot.py"


def run_recipe(cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, where kernels are not interpreted."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--jobs", "1", *options],
        env=os.environ | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import triton_aot

    return triton_aot


def test_compiles_and_writes_the_table(tmp_path: Path) -> None:
    document = tmp_path / "kernels.md"
    document.write_text("# Kernels\n", encoding="utf-8")
    done = run_recipe(tmp_path, "--quick", "--only", "silu_and_mul", "--write", str(document))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["num_compiled"], result["num_faults"]) == (len(CHIPS), 0)
    text = document.read_text(encoding="utf-8")
    assert "| `silu_and_mul_kernel` | sm_80 | sm_90 | gfx942 |" in text
    assert "<!-- triton-aot:end -->" in text


@pytest.mark.slow
def test_a_variant_of_every_kernel_compiles_for_every_chip(tmp_path: Path) -> None:
    done = run_recipe(tmp_path, "--quick")
    assert done.returncode == 0, done.stderr
    names = {variant.name for variant in aot.variants(CHIPS["sm_90"])}
    assert len(names) >= 9
    assert json.loads(done.stdout.splitlines()[-1])["num_compiled"] == len(names) * len(CHIPS)
    assert all(f"| `{name}` | sm_80 | sm_90 | gfx942 |" in done.stdout for name in names)


def test_a_text_that_no_kernel_has_is_told(tmp_path: Path) -> None:
    done = run_recipe(tmp_path, "--only", "nothing")
    assert done.returncode == 1
    assert "--only nothing: no kernel has that" in done.stderr


COMPILED = Compiled("linear_kernel", "o, few rows", "sm_80", 4, 3, 64, 32768, 0, ("mma m16k16",), "linear, bf16")


def test_faults_name_what_does_not_fit() -> None:
    assert faults([COMPILED, replace(COMPILED, label="o, many rows")]) == []
    assert faults([replace(COMPILED, shared_bytes=100 * 1024)]) == [
        "linear_kernel (o, few rows) on sm_80 needs 102400 bytes of shared memory, the chip has 101376"
    ]
    assert faults([replace(COMPILED, spilled_bytes=8)]) == [
        "linear_kernel (o, few rows) on sm_80 spills 8 bytes of registers"
    ]


def test_faults_name_products_whose_bits_may_differ() -> None:
    other = replace(COMPILED, label="o, many rows", matrix_instructions=("mma m16k8",))
    assert faults([COMPILED, other]) == [
        "linear_kernel (o, many rows) on sm_80 multiplies by ('mma m16k8',), o, few rows by ('mma m16k16',)"
    ]
    assert faults([COMPILED, replace(other, chip="sm_90")]) == []
    assert faults([COMPILED, replace(other, product="head, bf16")]) == []


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_variants_are_told_apart_by_name_and_label(chip: Chip) -> None:
    names = [(variant.name, variant.label) for variant in aot.variants(chip)]
    assert len(set(names)) == len(names)


def test_a_variant_must_have_a_type_for_each_parameter() -> None:
    (variant, *_) = norm.aot_variants(CHIPS["sm_80"])
    signature = {name: kind for name, kind in variant.signature.items() if name != "eps"}
    with pytest.raises(ValueError, match="eps"):
        aot._source(replace(variant, signature=signature))


@pytest.mark.skipif(not is_interpreted(), reason="kernels are compiled in this process")
def test_interpreted_kernels_are_not_compiled() -> None:
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        compile_variant(norm.aot_variants(CHIPS["sm_80"])[0], CHIPS["sm_80"])


def test_needs_are_read_from_the_assembly_of_amd() -> None:
    assembly = ".vgpr_count:     97\n.vgpr_spill_count: 2\n.private_segment_fixed_size: 12\nv_mfma_f32_16x16x16_bf16 a"
    assert aot._amd_needs(assembly) == {
        "registers": 97,
        "spilled_bytes": 12,
        "matrix_instructions": ("v_mfma_f32_16x16x16_bf16",),
    }


def test_lines_of_the_table_join_what_needs_the_same(recipe: ModuleType) -> None:
    assert recipe.merged(["a, bf16", "b, bf16", "a, fp16", "all"]) == "a, bf16 and fp16; b, bf16; all"
    same = replace(COMPILED, label="o, many rows", product="")
    found = [COMPILED, same, replace(COMPILED, chip="sm_90", spilled_bytes=4), replace(same, chip="sm_90")]
    assert recipe.tables(found).splitlines()[2:] == [
        "| o, few rows | 4 × 3, 64, 32.0 | 4 × 3, 64, 32.0, spills 4 |",
        "| o, many rows | 4 × 3, 64, 32.0 | 4 × 3, 64, 32.0 |",
    ]
