"""Builds the communication backend, once, at install: a job never compiles."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

source_directory = Path("tm_slurm") / "comm" / "src"

setup(
    ext_modules=[
        CppExtension(
            "tm_slurm.comm._tm",
            [str(path) for path in sorted(source_directory.glob("*.cpp"))],
            libraries=["crypto"],
            extra_compile_args=["-O3", "-g0", "-std=c++20", "-Wall", "-Wextra", "-Wno-unused-parameter"],
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=True)},
)
