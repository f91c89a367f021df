"""Parameters <-> the safetensors of a Hugging Face model directory, bit for bit.

A stacked kernel [layers, in, out] of ours is one tensor [out, in] a layer of theirs.
Parameters come and go one array at a time, so that the host holds little more than the
largest of them.
"""

import contextlib
import json
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from crbc_jax.models.config import (
    PRESET_PREFIX,
    DecoderConfig,
    parse_config,
    resolve_directory,
)
from crbc_jax.models.decoder import abstract_params
from crbc_jax.types import UserError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LAYERS = "layers/"  # Start of the path of what each layer has.
_MAX_FILE_BYTES = 5 * 2**30
_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Our path, without its leaf and the prefix "layers/" -> their module.
_MODULES = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
_LEAVES = {
    "embedding": "weight",
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "lora_a": "lora_A.weight",
    "lora_b": "lora_B.weight",
}
_TRANSPOSED = ("kernel", "lora_a", "lora_b")
# What a directory holds besides weights, and an export carries along.
_CARRIED = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "LICENSE",
)


def draws_weights(settings: Any) -> bool:
    """Whether `settings`, a config.model, asks for new weights: presets have none."""
    return settings.fresh or settings.directory.startswith(PRESET_PREFIX)


def has_weights(directory: str) -> bool:
    """Whether `directory` (a path or "preset:NAME") holds weights that we can read."""
    folder = resolve_directory(directory)
    return any((folder / name).is_file() for name in (_INDEX, _SINGLE))


def import_params(
    directory: str,
    config: DecoderConfig,
    *,
    shardings: Any = None,
    dtype: Any = np.float32,
) -> dict[str, Any]:
    """Reads the weights of a Hugging Face directory; each device reads its own part.

    Args:
        directory: with model.safetensors, or its parts and their index.
        config: of the same directory, without adapters.
        shardings: tree like the parameters (more leaves do no harm), or None: all on
            the first local device.
        dtype: of the parameters; float32 holds every supported file exactly.

    Raises:
        UserError: if a file or tensor is missing, unknown, of a wrong shape, damaged or
            quantised.
    """
    files = _find_tensors(directory)
    _check_names(directory, config, files)
    if shardings is None:
        where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: where, abstract_params(config))
    sharding_of = dict(_flatten(shardings))

    def read(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        with _Reader(directory, files) as reader:
            names = _names_of(name, leaf.shape)
            reader.check(names, _shape_there(name, leaf.shape))
            return jax.make_array_from_callback(
                leaf.shape,
                sharding_of[name],
                lambda index: reader.read(name, names, leaf.shape, index, dtype),
            )

    return jax.tree_util.tree_map_with_path(read, abstract_params(config))


def export_model(
    params: dict[str, Any],
    config: DecoderConfig,
    source: str,
    directory: str | pathlib.Path,
    *,
    dtype: Any = None,
) -> None:
    """Writes a Hugging Face model directory, which transformers and vLLM load.

    What `import_params` reads back is equal to the bit. config.json, tokenizer, chat
    template and generation settings are those of `source`. A directory of that name
    appears whole or not at all.

    Args:
        params: without adapters (see `lora.merge`); their shards may lie on several
            devices of this process.
        config: their shape; must be that of `source`.
        source: the model directory they come from, a path or "preset:NAME".
        directory: must not exist.
        dtype: that the weights are stored in; None: that of `params`.

    Raises:
        UserError: if `directory` exists, or `source` is a model of another shape.
        OSError: if the disk is full; nothing is left behind.
    """
    source_folder = resolve_directory(source)
    fields = json.loads((source_folder / "config.json").read_text(encoding="utf-8"))
    if parse_config(fields, str(source_folder)) != config:
        raise UserError(f"source={source!r} is not a model of the parameters' shape")
    dtype = jax.numpy.dtype(dtype or jax.tree.leaves(params)[0].dtype)
    fields.pop("torch_dtype", None)
    with _new_folder(directory) as folder:
        for name in _CARRIED:
            if (source_folder / name).is_file():
                shutil.copy(source_folder / name, folder / name)
        _write_json(folder / "config.json", fields | {"dtype": str(dtype)})
        _write_weights(params, folder, dtype)


def export_adapters(
    params: dict[str, Any],
    config: DecoderConfig,
    source: str,
    directory: str | pathlib.Path,
) -> None:
    """Writes the adapters alone, as the library PEFT does and vLLM loads them.

    Args:
        params: with adapters (see lora.py).
        config: their shape.
        source: what the file shall call the model that they belong to.
        directory: must not exist; appears whole or not at all.

    Raises:
        UserError: if `directory` exists, or the parameters have no adapters.
    """
    adapters = [
        (path, leaf)
        for path, leaf in _flatten(params)
        if path.endswith(("/lora_a", "/lora_b"))
    ]
    if not adapters:
        raise UserError("these parameters have no adapters (config.model.lora_rank=0)")
    modules = {
        name.rpartition("/")[2]: module.rpartition(".")[2]
        for name, module in _MODULES.items()
    }
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "target_modules": [modules[target] for target in config.lora.targets],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with _new_folder(directory) as folder:
        _write_json(folder / "adapter_config.json", fields)
        tensors = {
            f"base_model.model.{name}": tensor
            for name, tensor in _tensors(adapters, adapters[0][1].dtype)
        }
        path = folder / "adapter_model.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})


@contextlib.contextmanager
def _new_folder(directory: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder that becomes `directory` when the block ends well."""
    directory = pathlib.Path(directory)
    if directory.exists():
        raise UserError(f"directory={str(directory)!r} exists; choose a new one")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{directory.name}.", dir=directory.parent
    ) as made:
        folder = pathlib.Path(made) / "model"
        folder.mkdir()
        yield folder
        folder.rename(directory)


class _Reader:
    """The open files that one of our arrays lies in."""

    def __init__(self, directory: str, files: dict[str, pathlib.Path]):
        self._directory = directory
        self._files = files
        self._open: dict[pathlib.Path, Any] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # Else the pages of files that are mapped would count as our memory.
        self._open.clear()

    def check(self, names: list[str], shape: tuple[int, ...]) -> None:
        """Refuses tensors of another shape, or of a dtype that is no real number's."""
        for name in names:
            tensor = self.tensor(name)
            if tuple(tensor.get_shape()) != shape:
                raise self._error(
                    f"{name} has shape {tensor.get_shape()}; its config.json asks for "
                    f"{list(shape)}"
                )
            if tensor.get_dtype() not in _DTYPES:
                raise self._error(
                    f"{name} is stored as {tensor.get_dtype()}; only {sorted(_DTYPES)} "
                    "are supported: get the model that is not quantised"
                )

    def read(self, path, names, shape, index, dtype) -> np.ndarray:
        """The part `index` of our array, of one tensor of theirs a layer."""
        if not _is_layered(path):
            return self._part(path, names[0], index, dtype)
        layers = range(shape[0])[index[0]]
        sizes = [len(range(n)[part]) for n, part in zip(shape, index, strict=True)]
        out = np.empty(sizes, dtype)
        for slot, layer in enumerate(layers):
            out[slot] = self._part(path, names[layer], index[1:], dtype)
        return out

    def _part(self, path, name, index, dtype):
        if _is_transposed(path):
            tensor = self.tensor(name)[tuple(reversed(index))].T
        else:
            tensor = self.tensor(name)[tuple(index)]
        return tensor.astype(dtype, copy=False)

    def tensor(self, name: str):
        """A tensor, not read yet: indexing reads."""
        path = self._files[name]
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="np")
            return self._open[path].get_slice(name)
        except (OSError, SafetensorError) as error:
            raise self._error(f"{path} cannot be read ({error}); get it anew") from None

    def _error(self, text: str) -> UserError:
        return UserError(f"config.model.directory={self._directory!r}: {text}")


def _find_tensors(directory: str) -> dict[str, pathlib.Path]:
    """Names of all tensors, and the file of each."""
    folder = resolve_directory(directory)
    field = f"config.model.directory={directory!r}"
    index = folder / _INDEX
    try:
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {name: folder / file for name, file in names.items()}
            if missing := sorted({p.name for p in files.values() if not p.is_file()}):
                raise UserError(f"{field}: {index.name} names {missing}: not there")
            return files
        with safe_open(folder / _SINGLE, framework="np") as file:
            return dict.fromkeys(file.keys(), folder / _SINGLE)
    except FileNotFoundError:
        raise UserError(
            f"{field}: it holds no {_SINGLE} and no {_INDEX}; get the whole model, or "
            "set config.model.fresh=True to draw new weights"
        ) from None
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"{field}: its weights cannot be read ({error})") from error


def _check_names(directory, config, files) -> None:
    """Every tensor has its place, and every place its tensor."""
    wanted = {
        theirs
        for path, leaf in _flatten(abstract_params(config))
        for theirs in _names_of(path, leaf.shape)
    }
    # Old files store these constants, too.
    found = {name for name in files if not name.endswith(".rotary_emb.inv_freq")}
    field = f"config.model.directory={directory!r}"
    if config.tie_embeddings and "lm_head.weight" in found:
        found.remove("lm_head.weight")
        with _Reader(directory, files) as reader:
            head, embedding = (
                reader.tensor(name)[:]
                for name in ("lm_head.weight", "model.embed_tokens.weight")
            )
        if not np.array_equal(head, embedding):
            raise UserError(
                f"{field}: config.json ties the head to the embedding, but the weights "
                "hold another head; set tie_word_embeddings to false there"
            )
    for problem, names in (
        ("lack", sorted(wanted - found)),
        ("hold the unknown", sorted(found - wanted)),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(f"{field}: the weights {problem} {names[:3]}{more}")


def _write_weights(params, folder: pathlib.Path, dtype) -> None:
    leaves = _flatten(params)
    num_bytes = {path: leaf.size * dtype.itemsize for path, leaf in leaves}
    parts: list[list] = [[]]
    for path, leaf in leaves:
        held = sum(num_bytes[other] for other, _ in parts[-1])
        if parts[-1] and held + num_bytes[path] > _MAX_FILE_BYTES:
            parts.append([])
        parts[-1].append((path, leaf))
    names = [_SINGLE]
    if len(parts) > 1:
        names = [
            f"model-{number + 1:05}-of-{len(parts):05}.safetensors"
            for number in range(len(parts))
        ]
    weight_map = {}
    for name, part in zip(names, parts, strict=True):
        tensors = dict(_tensors(part, dtype))
        weight_map |= dict.fromkeys(tensors, name)
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if len(parts) > 1:
        metadata = {"total_size": sum(num_bytes.values())}
        index = {"metadata": metadata, "weight_map": weight_map}
        _write_json(folder / _INDEX, index)


def _tensors(leaves, dtype) -> Iterator[tuple[str, np.ndarray]]:
    """Our arrays as theirs, one a layer; `leaves` are pairs of path and array."""
    for path, leaf in leaves:
        array = np.asarray(leaf).astype(dtype, copy=False)
        layers = array if _is_layered(path) else [array]
        names = _names_of(path, leaf.shape)
        for name, tensor in zip(names, layers, strict=True):
            if _is_transposed(path):
                tensor = tensor.T
            yield name, np.ascontiguousarray(tensor)


def _flatten(params) -> list[tuple[str, Any]]:
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]


def _is_layered(path: str) -> bool:
    return path.startswith(_LAYERS)


def _is_transposed(path: str) -> bool:
    return path.rpartition("/")[2] in _TRANSPOSED


def _names_of(path: str, shape: tuple[int, ...]) -> list[str]:
    """Their names of our array, one a layer."""
    module, leaf = path.removeprefix(_LAYERS).rsplit("/", 1)
    name = f"{_MODULES[module]}.{_LEAVES[leaf]}"
    if not _is_layered(path):
        return [name]
    return [f"model.layers.{layer}.{name}" for layer in range(shape[0])]


def _shape_there(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    shape = shape[1:] if _is_layered(path) else shape
    return shape[::-1] if _is_transposed(path) else shape


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
