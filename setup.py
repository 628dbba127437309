"""The C engine's build step; everything else is in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["csrc/binding.py:ffi"])
