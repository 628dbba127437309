"""The C engine's build step; everything else is in pyproject.toml."""

from setuptools import setup

# cffi keeps to the limited API, so one wheel serves every Python from 3.11 on.
setup(cffi_modules=["csrc/binding.py:ffi"], options={"bdist_wheel": {"py_limited_api": "cp311"}})
