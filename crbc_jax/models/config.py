"""A Hugging Face model directory's config.json -> DecoderConfig, or why not."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from crbc_jax.types import UserError

_PRESETS = pathlib.Path(__file__).parent / "presets"
PRESET_PREFIX = "preset:"

LORA_TARGETS = ("query", "key", "value", "out", "gate", "up", "down")

# Fields of which the decoder must know the value.
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_SIZES = {
    *_REQUIRED,
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
}
_READ = {
    "model_type",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "initializer_range",
}
# Fields that leave the computation alone: metadata, storage types, token ids (which
# the tokenizer's files say), and settings of training scripts and generation.
_IGNORED = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "is_llama_config",
    "max_window_layers",  # Only read when use_sliding_window is true.
    "pad_token_id",
    "pretraining_tp",  # Slices the same products.
    "sliding_window",  # Only read when use_sliding_window is true.
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
}
# Fields of which only these values are implemented.
_FIXED = {
    "hidden_act": ("silu",),
    "attention_dropout": (0,),
    "use_sliding_window": (False,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's: low rotary frequencies are divided, high ones stay.

    A frequency counts as high (low) if it turns at least `high_freq_factor` (at most
    `low_freq_factor`) times over the `original_max_positions`; between, a mixture.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of a decoder's products; see lora.py."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # Some of LORA_TARGETS.

    @property
    def scale(self) -> float:
        """Of what an adapter adds."""
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape of a Qwen2 or Llama decoder; hashable, to be a static argument."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # Divides num_heads.
    head_dim: int  # Even; num_heads * head_dim need not be hidden_size.
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool  # The output head is the transposed embedding.
    qkv_bias: bool
    out_bias: bool  # Of the attention's output projection.
    mlp_bias: bool
    initializer_range: float  # Standard deviation of fresh kernels.
    max_positions: int
    lora: LoraConfig | None = None


def preset_names() -> list[str]:
    """Returns the model shapes that come with the package."""
    return sorted(path.name for path in _PRESETS.iterdir() if path.is_dir())


def resolve_directory(directory: str) -> pathlib.Path:
    """Finds the folder that `config.model.directory` names.

    Args:
        directory: "preset:NAME" for a model shape that comes with the package, or the
            path of a Hugging Face model directory.

    Raises:
        UserError: if there is no such preset, folder, or config.json in it.
    """
    field = f"config.model.directory={directory!r}"
    presets = preset_names()
    known = f"use one of {[PRESET_PREFIX + name for name in presets]} or a path"
    if directory.startswith(PRESET_PREFIX):
        name = directory.removeprefix(PRESET_PREFIX)
        if name not in presets:
            raise UserError(f"{field}: no such preset; {known}")
        return _PRESETS / name
    path = pathlib.Path(directory).expanduser()
    if not path.is_dir():
        raise UserError(f"{field}: no such directory; {known}")
    if not (path / "config.json").is_file():
        raise UserError(f"{field}: it holds no config.json; {known}")
    return path


def load_config(directory: str) -> DecoderConfig:
    """Reads the config.json of `directory`, a path or "preset:NAME".

    Raises:
        UserError: as `resolve_directory` and `parse_config`.
    """
    path = resolve_directory(directory) / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(
            f"config.model.directory={directory!r}: {path} is not JSON ({error})"
        ) from error
    return parse_config(fields, str(path))


def load_shape(directory: str) -> DecoderConfig:
    """As `load_config`; of a published model that is not there, the known shape.

    Raises:
        UserError: as `load_config`.
    """
    path = pathlib.Path(directory)
    if not path.expanduser().is_dir() and path.name in preset_names():
        directory = f"{PRESET_PREFIX}{path.name}"
    return load_config(directory)


def parse_config(fields: Mapping[str, Any], source: str) -> DecoderConfig:
    """Turns the fields of a Hugging Face config.json into a DecoderConfig.

    Absent fields take the value that transformers gives them. A field that is not
    known here is an error, not a guess: it may well change the computation.

    Args:
        fields: the parsed file.
        source: what error messages call it.

    Raises:
        UserError: naming the field, its value and what is supported.
    """
    model_type = fields.get("model_type")
    if model_type not in ("qwen2", "llama"):
        raise UserError(
            f"{source}: model_type={model_type!r} is not supported; "
            "known: ['llama', 'qwen2']"
        )
    if missing := [name for name in _REQUIRED if name not in fields]:
        raise UserError(f"{source}: the fields {missing} are missing")
    _check_fields(fields, source)

    num_heads = fields["num_attention_heads"]
    is_qwen2 = model_type == "qwen2"
    attention_bias = bool(fields.get("attention_bias", False))
    rope_theta, rope_scaling = _rope(fields, source)
    config = DecoderConfig(
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads") or num_heads,
        head_dim=fields.get("head_dim") or fields["hidden_size"] // num_heads,
        rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        # Qwen2 always has biases here, whatever its file says; Llama says so.
        qkv_bias=is_qwen2 or attention_bias,
        out_bias=not is_qwen2 and attention_bias,
        mlp_bias=not is_qwen2 and bool(fields.get("mlp_bias", False)),
        initializer_range=float(fields.get("initializer_range", 0.02)),
        max_positions=fields.get("max_position_embeddings", 32768),
    )
    _check_shape(config, source)
    return config


def count_params(config: DecoderConfig) -> int:
    """Number of parameters of a decoder of this shape."""
    hidden = config.hidden_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    attention = hidden * (2 * queries + 2 * keys)
    attention += config.qkv_bias * (queries + 2 * keys) + config.out_bias * hidden
    mlp = 3 * hidden * config.intermediate_size
    mlp += config.mlp_bias * (2 * config.intermediate_size + hidden)
    embedding = config.vocab_size * hidden
    layers = config.num_layers * (attention + mlp + 2 * hidden)
    return layers + hidden + embedding * (1 if config.tie_embeddings else 2)


def _rope(fields: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary frequencies; transformers 5 keeps both in one."""
    theta, scaling = fields.get("rope_theta"), None
    for name in ("rope_parameters", "rope_scaling"):
        options = fields.get(name) or {}
        kind = options.get("rope_type", options.get("type", "default"))
        try:
            if kind == "llama3":
                scaling = RopeScaling(
                    factor=float(options["factor"]),
                    low_freq_factor=float(options["low_freq_factor"]),
                    high_freq_factor=float(options["high_freq_factor"]),
                    original_max_positions=options["original_max_position_embeddings"],
                )
            elif kind != "default":
                raise UserError(
                    f"{source}: {name}={options!r}: rotary scaling {kind!r} is not "
                    "supported; known: ['default', 'llama3']"
                )
        except KeyError as error:
            raise UserError(f"{source}: {name}={options!r} lacks {error}") from None
        theta = options.get("rope_theta", theta)
    return 10000.0 if theta is None else float(theta), scaling


def _check_fields(fields: Mapping[str, Any], source: str) -> None:
    for name, value in fields.items():
        if name in _IGNORED or name in _READ or value is None:
            continue
        if name == "layer_types":
            if set(value) != {"full_attention"}:
                raise UserError(
                    f"{source}: layer_types={sorted(set(value))} are not supported; "
                    "known: ['full_attention']"
                )
        elif name in _SIZES:
            if not isinstance(value, int) or value < 1:
                raise UserError(
                    f"{source}: {name}={value!r} must be a positive whole number"
                )
        elif name not in _FIXED:
            raise UserError(
                f"{source}: the field {name}={value!r} is not supported; if it does "
                "not change the computation, remove it from the file"
            )
        elif value not in _FIXED[name]:
            raise UserError(
                f"{source}: {name}={value!r} is not supported; "
                f"known: {list(_FIXED[name])}"
            )


def _check_shape(config: DecoderConfig, source: str) -> None:
    if config.num_heads % config.num_kv_heads:
        raise UserError(
            f"{source}: num_key_value_heads={config.num_kv_heads} must divide "
            f"num_attention_heads={config.num_heads}"
        )
    if config.head_dim % 2:
        raise UserError(
            f"{source}: head_dim={config.head_dim} must be even: rotary positions "
            "turn pairs of channels"
        )
