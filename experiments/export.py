"""Writes the policy of a run as a Hugging Face model directory.

    python experiments/export.py --workdir=runs/quickstart --directory=models/sokoban

transformers, vLLM and `--config.model.directory=` load it, with the tokenizer and chat
template of the model that the run began with.
"""

import pathlib

from absl import flags

from crbc_jax import command_line

_WORKDIR = flags.DEFINE_string("workdir", None, "Workdir of a run.")
_DIRECTORY = flags.DEFINE_string("directory", None, "Where to; must not exist.")
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "best", "`best` by held-out success, `latest`, or its update."
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Of the weights; training has float32."
)
_ADAPTERS = flags.DEFINE_boolean(
    "adapters", False, "Of a LoRA run the adapters alone, in PEFT's format."
)


def main(_) -> None:
    # Only now: this loads JAX and Orbax, which takes seconds.
    from crbc_jax.checkpoint import Checkpointer
    from crbc_jax.learner.learner import make_learner
    from crbc_jax.learner.sharding import make_mesh
    from crbc_jax.models import lora
    from crbc_jax.models.pretrained import load_policy
    from crbc_jax.models.weights import export_adapters, export_model
    from crbc_jax.workdir import read_config

    workdir = pathlib.Path(_WORKDIR.value)
    config = read_config(workdir)
    checkpoints = Checkpointer(workdir, keep_last=1)
    step = checkpoints.find(_CHECKPOINT.value)
    model, _ = load_policy(config.model)
    learner = make_learner(config, model, make_mesh(**config.mesh))
    params = checkpoints.restore_params(step, learner.abstract_state.params)
    source, directory = config.model.directory, _DIRECTORY.value
    if _ADAPTERS.value:
        export_adapters(params, model, source, directory)
    else:
        plain = lora.without_adapters(model)
        params = lora.merge(model, params)
        export_model(params, plain, source, directory, dtype=_DTYPE.value)
    print(f"wrote update {step} to {_DIRECTORY.value}")


if __name__ == "__main__":
    command_line.start(main, ["workdir=runs/quickstart", "directory=models/sokoban"])
