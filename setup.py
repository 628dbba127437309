"""The C engine's build step, and its sources in the package; everything else is in pyproject.toml."""

from pathlib import Path
from shutil import copyfile

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithSources(build_py):
    """`foreseed export --to c` gives the engine to firmware, so the package holds what it was built of."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # they lie beside the package
        target = Path(self.build_lib, "foreseed", "csrc")
        self.mkpath(str(target))
        for source in sorted(path for suffix in ("c", "h", "inl") for path in Path("csrc").glob(f"*.{suffix}")):
            copyfile(source, target / source.name)


# cffi keeps to the limited API, so one wheel serves every Python from 3.11 on.
setup(
    cffi_modules=["csrc/binding.py:ffi"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    cmdclass={"build_py": BuildWithSources},
)
