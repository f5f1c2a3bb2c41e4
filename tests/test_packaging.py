"""The package as it is installed: names, contents, version, and what an import costs."""

from __future__ import annotations

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import batchinfer
from batchinfer.kernels.cpu.build import find_compiler
from batchinfer.kernels.cpu.library import supported_instruction_sets

# Packages of the tree: folder -> import name.
HOMES = {"batchinfer": "batchinfer", "kernels": "batchinfer.kernels", "evals": "batchinfer.evals"}


def run_python(code: str, cwd: Path, *options: str, **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
    done = subprocess.run(
        [sys.executable, *options, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def pyproject(repo_root: Path) -> dict:
    return tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))


def packages_of_the_tree(repo_root: Path) -> dict[str, Path]:
    """Import name -> folder, of every folder with Python files in it."""
    packages = {}
    for folder, import_name in HOMES.items():
        for path in (repo_root / folder).rglob("*.py"):
            below = path.parent.relative_to(repo_root / folder).parts
            packages[".".join([import_name, *below])] = path.parent
    return packages


def test_every_folder_with_code_is_a_listed_package(pyproject: dict, repo_root: Path) -> None:
    packages = packages_of_the_tree(repo_root)
    assert set(pyproject["tool"]["setuptools"]["packages"]) == set(packages)
    assert all((folder / "__init__.py").exists() for folder in packages.values())


def test_tested_releases_lie_in_the_stated_ranges(pyproject: dict, repo_root: Path) -> None:
    lines = (repo_root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    project = pyproject["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        if requirement.name == "torch":  # pinned in the Makefile, as a CPU build
            makefile = (repo_root / "Makefile").read_text(encoding="utf-8")
            pinned["torch"] = re.findall(r"^TORCH \?= torch==([\w.]+)\+cpu$", makefile, re.MULTILINE)[0]
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, text


def test_version_is_the_same_everywhere(repo_root: Path) -> None:
    assert metadata.version("batchinfer") == batchinfer.__version__
    changelog = (repo_root / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{batchinfer.__version__}]" in changelog


def test_public_names_resolve_and_unknown_ones_do_not() -> None:
    for name in batchinfer.__all__:
        assert getattr(batchinfer, name) is not None
    assert set(batchinfer.__all__) == set(dir(batchinfer))
    with pytest.raises(AttributeError, match="no_such_name"):
        batchinfer.no_such_name  # noqa: B018


def test_importing_the_package_loads_no_heavy_module(tmp_path: Path) -> None:
    heavy = ("torch", "transformers", "datasets", "pandas", "pyarrow", "tokenizers")
    code = f"import sys, batchinfer; print([name for name in {heavy!r} if name in sys.modules])"
    assert run_python(code, tmp_path) == "[]"


def test_kernels_and_evals_import_under_the_package_from_any_folder(tmp_path: Path, repo_root: Path) -> None:
    code = "import batchinfer.kernels as k, batchinfer.evals as e; print(k.__file__, e.__file__)"
    assert run_python(code, tmp_path) == run_python(code, repo_root)
    assert run_python("import importlib.util as u; print(u.find_spec('evals'))", tmp_path) == "None"


# What `python -c` and `python -m` do: the folder they are started in comes first on the path, so that
# `import kernels` from the repository root finds our folder, whoever asks.
TRANSFORMERS_FROM_THE_ROOT = """
import importlib.util, sys
assert sys.path[0] == "", sys.path
print(importlib.util.find_spec("kernels").origin)
import torch, transformers.integrations.hub_kernels
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available
print(is_kernels_available())
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
print(tuple(LlamaForCausalLM(LlamaConfig(**sizes))(torch.tensor([[1, 2, 3]])).logits.shape))
"""


def test_transformers_does_not_take_our_kernels_for_the_hub_package(repo_root: Path) -> None:
    installed = [d for d in metadata.distributions() if (d.metadata["Name"] or "").lower() == "kernels"]
    assert not installed, "this test is about environments without Hugging Face's package `kernels`"
    ours, is_available, shape = run_python(TRANSFORMERS_FROM_THE_ROOT, repo_root).splitlines()
    assert ours == str(repo_root / "kernels" / "__init__.py")  # found, and yet
    assert is_available == "False"
    assert shape == "(1, 3, 32)"


def test_kernels_package_is_safe_to_import_under_the_wrong_name(repo_root: Path) -> None:
    """transformers looks for `__version__` to tell whether a package `kernels` is Hugging Face's, importing it."""
    tree = ast.parse((repo_root / "kernels" / "__init__.py").read_text(encoding="utf-8"))
    assigned = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    assert "__version__" not in assigned
    code = "import sys, kernels; print(hasattr(kernels, '__version__'), 'torch' in sys.modules, kernels.__file__)"
    assert run_python(code, repo_root) == f"False False {repo_root / 'kernels' / '__init__.py'}"


@pytest.fixture(scope="module")
def source(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that builds leave nothing in the checkout; without what was built there."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(repo_root / name, source / name)
    for folder in HOMES:
        shutil.copytree(repo_root / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return source


def build_wheel(source: Path, target: Path, **environment: str) -> tuple[Path, str]:
    """The wheel, and what was said."""
    shutil.rmtree(source / "build", ignore_errors=True)  # what an earlier build compiled
    command = ["-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), "."]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=source,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    (built,) = target.glob("batchinfer-*.whl")
    return built, done.stdout


#: The quickest to compile that this machine knows.
KERNELS = "avx2" if platform.machine() in ("x86_64", "AMD64") else "portable"
LIBRARY = f"batchinfer/kernels/cpu/libbatchinfer_{KERNELS}.so"
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("wheel"), BATCHINFER_BUILD_KERNELS=KERNELS)[0]


@needs_compiler
def test_wheel_holds_kernels_and_their_sources(wheel: Path, repo_root: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith(".so")] == [LIBRARY]
    sources = {f"batchinfer/kernels/cpu/src/{path.name}" for path in (repo_root / "kernels/cpu/src").iterdir()}
    assert sources <= set(names)
    assert not [name for name in names if name.endswith(".tmp")]


def test_wheel_is_for_one_platform(wheel: Path) -> None:
    assert sysconfig.get_platform().replace("-", "_").replace(".", "_") in wheel.name
    assert "none-any" not in wheel.name


# A row on torch and, if there are any, on the kernels that the package finds in itself.
USE_KERNELS = """
import torch
from batchinfer.kernels.cpu.choice import best_built
from batchinfer.kernels.cpu.library import load_library
chosen = best_built()
print(chosen.name)
x = torch.ones(2, 16, dtype=torch.bfloat16)
out = torch.empty(2, 16, dtype=torch.bfloat16)
if chosen.name != "torch":
    load_library(chosen.name).bi_rms_norm(None, x.data_ptr(), x.data_ptr(), 0.0, out.data_ptr(), 2, 16)
    assert torch.equal(x, out)
from batchinfer.kernels import reference
assert torch.equal(reference.rms_norm(x, x[0], 0.0)[0], x)
"""


def use_kernels(wheel: Path, folder: Path) -> str:
    zipfile.ZipFile(wheel).extractall(folder)
    # -S leaves out the editable install, so torch's folder is named.
    torch_home = Path(metadata.distribution("torch").locate_file(""))
    return run_python(USE_KERNELS, folder, "-S", "-P", PYTHONPATH=f"{folder}{os.pathsep}{torch_home}")


@needs_compiler
def test_wheel_runs_its_kernels(wheel: Path, tmp_path: Path) -> None:
    expected = KERNELS if KERNELS in supported_instruction_sets() else "torch"
    assert use_kernels(wheel, tmp_path) == expected


def test_without_a_compiler_the_wheel_runs_on_torch(source: Path, tmp_path: Path) -> None:
    built, said = build_wheel(source, tmp_path / "wheel", CXX="/nonexistent", BATCHINFER_BUILD_KERNELS=KERNELS)
    assert "no C++ compiler (g++ or clang++) was found: the kernels were not built, plain torch is used" in said
    assert not [name for name in zipfile.ZipFile(built).namelist() if name.endswith(".so")]
    assert use_kernels(built, tmp_path) == "torch"


def test_wheel_holds_the_package_and_nothing_else(wheel: Path, repo_root: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert tops == {"batchinfer", f"batchinfer-{batchinfer.__version__}.dist-info"}
    expected = {
        "/".join([*import_name.split("."), *path.relative_to(repo_root / folder).parts])
        for folder, import_name in HOMES.items()
        for path in (repo_root / folder).rglob("*.py")
    }
    assert expected <= names
    templates = {path.name for path in (repo_root / "evals/report/templates").iterdir()}
    assert {f"batchinfer/evals/report/templates/{name}" for name in templates} <= names
    assert "batchinfer/py.typed" in names


def test_wheel_imports_and_declares_its_command(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import batchinfer.kernels, batchinfer.evals; print(batchinfer.kernels.__file__)"
    # -P and -S: neither the folder it starts in nor an editable install can answer for the wheel.
    found = run_python(code, tmp_path, "-S", "-P", PYTHONPATH=str(tmp_path))
    assert found == str(tmp_path / "batchinfer" / "kernels" / "__init__.py")
    entry_points = (tmp_path / f"batchinfer-{batchinfer.__version__}.dist-info" / "entry_points.txt").read_text()
    assert "batchinfer = batchinfer.cli.main:app" in entry_points
