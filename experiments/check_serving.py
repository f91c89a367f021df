"""Shows that vLLM serves a model as the learner computes it, also after new weights.

    python experiments/check_serving.py --model=models/SmolLM2-135M-Instruct \
        --python=FOLDER/bin/python

Starts a server, publishes the model, then weights that are a little off, then the
model again, and then ten times the same (what a learning rate of 0 would do). Each
time the server's log-probabilities are compared with our own; greedy replies are
compared token for token. Exits non-zero if any of it does not agree.
"""

import asyncio
import sys
import time

from absl import flags

from crbc_jax import command_line
from crbc_jax.types import UserError

_MODEL = flags.DEFINE_string("model", None, "Model directory, or preset:NAME.")
_PYTHON = flags.DEFINE_string("python", None, "Interpreter that has vLLM.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of serving.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.6, "Of sampling.", lower_bound=0.01)
_REPEATS = flags.DEFINE_integer("repeats", 10, "Publishings of the same weights.")


def make_config():
    """The settings of a run that is served like this."""
    from crbc_jax.config import default_config

    config = default_config()
    config.model.directory = _MODEL.value
    config.model.fresh = True  # Weights of a preset; see `read_params`.
    config.rollout.engine = "vllm"
    config.rollout.temperature = _TEMPERATURE.value
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = 32, 32
    config.rollout.vllm.python = _PYTHON.value
    config.rollout.vllm.dtype = _DTYPE.value
    config.learner.compute_dtype = _DTYPE.value
    return config


async def check(config, model, params, perturbed, report) -> None:
    """Publishes in turn, and reports each as (what, seconds, mean, largest, tokens)."""
    import dataclasses

    import numpy as np

    from crbc_jax.parity import ParityProbe
    from crbc_jax.rollout import make_engine

    probe = ParityProbe(config, model)
    greedy = [
        dataclasses.replace(
            request, sampling=dataclasses.replace(request.sampling, temperature=0.0)
        )
        for request in probe.requests
    ]
    sampler_config = config.copy_and_resolve_references()
    sampler_config.rollout.engine = "sampler"
    engine, sampler = make_engine(config, model), make_engine(sampler_config, model)
    try:
        plan = [("start", params), ("a little off", perturbed), ("back", params)]
        plan += [(f"the same, {i + 1}", params) for i in range(_REPEATS.value)]
        for version, (what, weights) in enumerate(plan):
            started = time.perf_counter()
            await engine.publish(weights, version)
            seconds = time.perf_counter() - started
            replies = await asyncio.gather(*map(engine.generate, probe.requests))
            difference = probe.compare(weights, replies)
            agreed = ""
            if version < 3:
                await sampler.publish(weights, version)
                theirs = await asyncio.gather(*map(engine.generate, greedy))
                ours = await asyncio.gather(*map(sampler.generate, greedy))
                same = [
                    np.array_equal(one.token_ids, other.token_ids)
                    for one, other in zip(theirs, ours, strict=True)
                ]
                agreed = f"{sum(same)}/{len(same)}"
                if _DTYPE.value == "float32" and not all(same):
                    raise UserError(f"{what}: greedy replies equal only {agreed}")
            report(what, seconds, *difference.values(), agreed)
    finally:
        await engine.close()
        await sampler.close()


def main(_) -> None:
    import jax
    import numpy as np
    import rich.console
    import rich.table

    from crbc_jax.learner.sharding import make_mesh, tree_shardings
    from crbc_jax.models.config import load_config
    from crbc_jax.models.decoder import abstract_params
    from crbc_jax.models.pretrained import start_params
    from crbc_jax.models.weights import has_weights

    config = make_config()
    model = load_config(_MODEL.value)
    config.model.fresh = not has_weights(_MODEL.value)
    shardings = tree_shardings(abstract_params(model), make_mesh())
    params = start_params(config.model, model, 0, shardings)
    params = jax.device_put(params, shardings)
    random = np.random.default_rng(1)
    perturbed = jax.device_put(
        jax.tree.map(
            lambda x: x * (1 + 0.02 * random.standard_normal(x.shape, np.float32)),
            params,
        ),
        shardings,
    )
    table = rich.table.Table(title=f"{_MODEL.value}, {_DTYPE.value}")
    for name in ("published", "seconds", "mean nats", "largest", "greedy equal"):
        table.add_column(name, justify="left" if name == "published" else "right")

    def report(what, seconds, mean, largest, agreed):
        print(f"{what}: {seconds:.2f} s, {mean:.2g} nats", file=sys.stderr, flush=True)
        table.add_row(what, f"{seconds:.2f}", f"{mean:.2g}", f"{largest:.2g}", agreed)

    try:
        asyncio.run(check(config, model, params, perturbed, report))
    finally:
        rich.console.Console(markup=False).print(table)


if __name__ == "__main__":
    command_line.start(main, ["model=preset:text_tiny", "python=FOLDER/bin/python"])
