"""Compiles the C++ kernels when the package is built; everything else is in pyproject.toml.

A machine without a compiler gets a package that runs on plain torch: a failure here is told, not raised.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def _build_kernels(folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("build_kernels", ROOT / "kernels" / "cpu" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for failure in module.build(folder):
        print(f"batchinfer kernels: {failure}", file=sys.stderr)


class BuildPyAndKernels(build_py):
    """An editable install finds the libraries in the source tree, a wheel carries them."""

    def run(self) -> None:
        super().run()
        in_place = ROOT / "kernels" / "cpu"
        _build_kernels(in_place if self.editable_mode else Path(self.build_lib) / "batchinfer" / "kernels" / "cpu")


class PlatformDistribution(Distribution):
    """The wheel holds compiled code, so it is for one platform."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildPyAndKernels}, distclass=PlatformDistribution)
