"""Times a training step of SmolLM2-135M's shape against transformers and torch.

    python experiments/bench_train.py --torch_python=/path/to/other/env/bin/python

Float32, random weights, one batch: forward and backward pass, gradient clipped, AdamW.
Steps of both alternate, so that a machine's other work meets both. The other
environment needs torch and transformers; without the flag only ours is timed.
"""

import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np
from absl import flags

from crbc_jax import command_line
from crbc_jax.learner import gradient, sharding
from crbc_jax.learner.rows import Segment, fill_rows, split_rows
from crbc_jax.learner.warm_start import make_warm_start_step
from crbc_jax.models.config import load_config
from crbc_jax.models.decoder import init_params

TORCH_PYTHON = flags.DEFINE_string("torch_python", "", "Python with transformers.")
REPEATS = flags.DEFINE_integer("repeats", 9, "Timed steps of each.")
ROWS = flags.DEFINE_integer("rows", 8, "Sequences a step.")
LENGTH = flags.DEFINE_integer("length", 128, "Tokens of a sequence.")
LAYERS = flags.DEFINE_integer("layers", 30, "Layers of the model.")

SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def make_ours(directory: str) -> Callable[[], float]:
    """Returns a function that takes a step and gives the loss."""
    config = load_config(directory)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    optimizer = gradient.make_optimizer(1e-4, 0.01, 1.0)
    abstract = gradient.abstract_state(config, optimizer, mesh, keep_reference=False)
    state = gradient.make_init(optimizer, abstract)(init_params(config, 0))
    step = make_warm_start_step(config, optimizer, mesh)
    tokens = np.random.default_rng(0).integers(
        config.vocab_size, size=(ROWS.value, LENGTH.value), dtype=np.int32
    )
    rows = fill_rows(
        [[Segment(row[:1], [row[1:]])] for row in tokens],
        num_rows=ROWS.value,
        length=LENGTH.value,
        num_responses=LENGTH.value - 1,
    )
    rows = split_rows(rows, 1)

    def take_step():
        nonlocal state
        state, scalars = step(state, rows)
        return float(scalars["loss"])

    return take_step


def make_torch(directory: str, threads: int) -> tuple[Callable[[], float], str]:
    """The same of a process in the other environment, and its versions."""
    script = pathlib.Path(__file__).with_name("bench_train_torch.py")
    sizes = [str(n) for n in (ROWS.value, LENGTH.value, threads)]
    process = subprocess.Popen(
        [TORCH_PYTHON.value, str(script), directory, *sizes],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask():
        process.stdin.write("step\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    return ask, process.stdout.readline().strip()


def main(_):
    threads = len(os.sched_getaffinity(0))
    print(f"{jax.default_backend()}, {threads} cores, jax {jax.__version__}", end="")
    with tempfile.TemporaryDirectory() as directory:
        config = SMOLLM2_135M | {"num_hidden_layers": LAYERS.value}
        pathlib.Path(directory, "config.json").write_text(json.dumps(config))
        steps = {"crbc_jax": make_ours(directory)}
        if TORCH_PYTHON.value:
            steps["transformers"], versions = make_torch(directory, threads)
            print(f", {versions}", end="")
        print(f"; {ROWS.value} x {LENGTH.value} tokens, {LAYERS.value} layers")
        times = {name: [] for name in steps}
        for index in range(REPEATS.value + 2):  # The first two warm up.
            for name, take_step in steps.items():
                start = time.perf_counter()
                loss = take_step()
                seconds = time.perf_counter() - start
                if index == 0:
                    print(f"{name:>14} first loss {loss:.4f}")
                if index >= 2:
                    times[name].append(seconds)
    for name, taken in times.items():
        median = statistics.median(taken)
        print(
            f"{name:>14} {median:7.3f} s ({min(taken):.3f} to {max(taken):.3f}), "
            f"{ROWS.value * LENGTH.value / median:.0f} tokens a second"
        )
    if len(times) == 2:
        ours, theirs = times.values()
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        print(
            f"{'ratio':>14} {statistics.median(ratios):7.2f} x as fast "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    command_line.start(main, required=())
