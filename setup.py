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


setup(cffi_modules=["csrc/binding.py:ffi"], cmdclass={"build_py": BuildWithSources})
