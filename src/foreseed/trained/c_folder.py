"""A model for firmware: its program and values as C arrays, the engine's sources, and an example that uses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from shutil import copyfile

import foreseed
from foreseed.data import DataError, load_held_out
from foreseed.trained.model import ExportError, Trained

_EXAMPLE = Path(__file__).with_name("firmware")
_COLUMNS = 110
_GUARD = ("#ifndef MODEL_H\n#define MODEL_H\n\n#include <stdint.h>\n", "\n#endif\n")


def engine_sources() -> list[Path]:
    """The C files of the engine: in the package as it is installed, or beside it in the repository."""
    package = Path(foreseed.__file__).parent
    folder = next((place for place in (package / "csrc", package.parents[1] / "csrc") if place.is_dir()), None)
    if folder is None:
        raise ExportError(f"{package} holds no engine sources (csrc); reinstall foreseed")
    return sorted(path for path in folder.iterdir() if path.suffix in (".c", ".h", ".inl"))


def write_c(trained: Trained, out: Path) -> list[Path]:
    """Write a folder: model.h, the engine in engine/, an example, and a test image for it, if the data is here."""
    header, sources, image = _header(trained), engine_sources(), _test_image(trained)
    (out / "engine").mkdir(parents=True)
    for source in sources:
        copyfile(source, out / "engine" / source.name)
    for file in _EXAMPLE.iterdir():
        copyfile(file, out / file.name)
    (out / "model.h").write_text(header, encoding="ascii")
    if image is not None:
        (out / "image.bin").write_bytes(image)
    return sorted(out.iterdir())


def _test_image(trained: Trained) -> bytes | None:
    try:
        return bytes(load_held_out(*trained.config.data.source).images[0])
    except DataError:
        return None


def _header(trained: Trained) -> str:
    program = trained.program
    channels, height, width = program.input_shape
    about = f"{trained.config.model.name} for {channels}x{height}x{width} images and {program.classes} classes"
    stats = _array("float model_stats", _floats(trained.stats)) if trained.stats.size else ""
    return "\n".join(
        [
            f"/* A model trained by foreseed: {about}; {program.n_live:,} live values.",
            " * model_program is the program section of docs/format.md, model_values the numbers that were trained. */",
            _GUARD[0],
            f"#define MODEL_CHANNELS {channels}",
            f"#define MODEL_HEIGHT {height}",
            f"#define MODEL_WIDTH {width}",
            f"#define MODEL_CLASSES {program.classes}",
            "/* Bytes that the engine needs to see one image at a time; less where pointers are shorter than here. */",
            f"#define MODEL_ARENA {_arena_bytes(trained)}",
            "/* What fs_logits and fs_loss take as `stats`: those of the batch norms, if there are any. */",
            f"#define MODEL_STATS {'model_stats' if stats else '((const float *)0)'}",
            "",
            _array("uint8_t model_program", map(str, program.bytes)),
            _array("float model_values", _floats(trained.values)),
            stats,
            _array("char *const model_classes", map(_quoted, trained.classes)),
            _GUARD[1],
        ]
    )


def _arena_bytes(trained: Trained) -> int:
    """For the settings of main.c: an image at a time, and no perturbed copy of the values."""
    try:
        from foreseed.engine.native import NativeEngine
    except ImportError:
        raise ExportError("--to c needs the C engine; install a C compiler and reinstall foreseed") from None
    planned = NativeEngine(trained.program, batch=1, lanes=1, by_row=True).planned
    image = trained.program.image_bytes  # main.c holds it itself
    return planned.total - planned.program - planned.values - image


def _array(declaration: str, items: Iterable[str]) -> str:
    return "\n".join([f"static const {declaration}[] = {{", *_lines(items), "};"])


def _lines(items: Iterable[str]) -> Iterator[str]:
    line = "   "
    for item in items:
        if len(line) + len(item) > _COLUMNS:
            yield line
            line = "   "
        line += f" {item},"
    yield line


def _floats(numbers: Iterable[float]) -> Iterator[str]:
    """Nine digits give a float32 back to the bit."""
    return (f"{number:.8e}f" for number in numbers)


def _quoted(text: str) -> str:
    plain = set(range(32, 127)) - set(b'"\\?')
    return '"' + "".join(chr(byte) if byte in plain else f"\\{byte:03o}" for byte in text.encode()) + '"'
