"""Parameters -> versioned model directories that servers load, and can prove."""

import hashlib
import json
import os
import pathlib
import shutil
from typing import Any

from crbc_jax.models.config import DecoderConfig
from crbc_jax.models.weights import export_model

_KEPT = 2  # The newest versions: a server may still read the one before.
_CHUNK_BYTES = 2**22


class Publisher:
    """Writes versions into a folder of its own.

    Args:
        folder: made if missing; what a former run left of versions there goes.
        config: shape of the parameters.
        source: model directory whose config and tokenizer go with the weights.
        dtype: of the weights.
    """

    def __init__(
        self, folder: pathlib.Path, config: DecoderConfig, source: str, dtype: str
    ):
        self._folder = folder
        self._config = config
        self._source = source
        self._dtype = dtype
        folder.mkdir(parents=True, exist_ok=True)
        self._remove_all_but(())

    def write(self, params: Any, version: int) -> pathlib.Path:
        """Writes version `version`; returns its directory, complete and on disk.

        Raises:
            OSError: if it cannot be written; older versions stay.
        """
        directory = self._folder / f"{version:06d}"
        making = self._folder / f"making-{version:06d}"
        for old in (making, directory):
            shutil.rmtree(old, ignore_errors=True)
        try:
            export_model(params, self._config, self._source, making, dtype=self._dtype)
            _write_manifest(making)
            making.rename(directory)
        except OSError:
            shutil.rmtree(making, ignore_errors=True)
            raise
        _sync(self._folder)
        known = sorted(self._folder.glob("[0-9]" * 6))
        self._remove_all_but({directory, *known[-_KEPT:]})
        return directory

    def _remove_all_but(self, kept) -> None:
        for path in self._folder.glob("*[0-9]"):
            if path not in kept and path.name.removeprefix("making-").isdigit():
                shutil.rmtree(path, ignore_errors=True)


def _write_manifest(directory: pathlib.Path) -> None:
    """Size and SHA-256 of every file, and all of it on disk."""
    files = {}
    for path in sorted(directory.iterdir()):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
            os.fsync(file.fileno())
        files[path.name] = {
            "size": path.stat().st_size,
            "sha256": digest.hexdigest(),
        }
    with (directory / "manifest.json").open("w") as file:
        json.dump({"files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(directory)


def _sync(folder: pathlib.Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
