"""Tokens a second of greedy replies: embedded sampler, vLLM and transformers.

    python experiments/bench_rollout.py --model=models/SmolLM2-135M-Instruct \
        --python=FOLDER/bin/python --requests=1,8,32

Prompts of 64 random tokens, replies of 64, float32, on the CPU. The interpreter has
vLLM, and with it torch and transformers (third_party/vllm/install.sh). All engines are
started and warm before the first run; then they take turns, `--repeats` times, and each
figure is the median with its range. Ratios are of runs that were side by side.
"""

import asyncio
import json
import statistics
import subprocess
import time

from absl import flags

from crbc_jax import command_line

_MODEL = flags.DEFINE_string("model", None, "Model directory with weights.")
_PYTHON = flags.DEFINE_string("python", None, "Interpreter that has vLLM and torch.")
_REQUESTS = flags.DEFINE_list("requests", ["1", "8", "32"], "At once.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of each engine.", lower_bound=1)
_TOKENS = 64  # Of a prompt, and of a reply.

# Reads numbers of rows, a line each; answers with the seconds that it took.
_TRANSFORMERS = """
import sys, time
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
tokens = int(sys.argv[2])
for line in sys.stdin:
    rows = int(line)
    prompts = torch.randint(3, model.config.vocab_size, (rows, tokens))
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
            min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0,
        )
    print(time.perf_counter() - started, flush=True)
"""


def make_requests(vocab_size: int, count: int):
    """Requests of random prompts, whose replies nothing ends early."""
    import numpy as np

    from crbc_jax.rollout.engine import Request, SamplingParams

    random = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=_TOKENS, stop_ids=(), temperature=0.0)
    return [
        Request(
            random.integers(3, vocab_size, _TOKENS).astype(np.int32), sampling, seed
        )
        for seed in range(count)
    ]


async def measure(config, model, params, other) -> dict[tuple[str, int], list[float]]:
    """Seconds of each run, by engine and number of requests."""
    from crbc_jax.rollout import make_engine

    seconds: dict[tuple[str, int], list[float]] = {}
    engines = {}
    try:
        for name in ("sampler", "vllm"):
            config.rollout.engine = name
            engines[name] = make_engine(config, model)
            await engines[name].publish(params, 0)
        counts = [int(count) for count in _REQUESTS.value]
        for repeat in range(_REPEATS.value + 1):
            for count in counts:
                requests = make_requests(model.vocab_size, count)
                for name, engine in engines.items():
                    started = time.perf_counter()
                    await asyncio.gather(*map(engine.generate, requests))
                    taken = time.perf_counter() - started
                    if repeat:  # The first one compiles.
                        seconds.setdefault((name, count), []).append(taken)
                other.stdin.write(f"{count}\n")
                other.stdin.flush()
                taken = float(await asyncio.to_thread(other.stdout.readline))
                if repeat:
                    seconds.setdefault(("transformers", count), []).append(taken)
    finally:
        for engine in engines.values():
            await engine.close()
    return seconds


def main(_) -> None:
    from crbc_jax.config import default_config
    from crbc_jax.models.config import load_config
    from crbc_jax.models.weights import import_params

    config, model = default_config(), load_config(_MODEL.value)
    config.model.directory = _MODEL.value
    config.rollout.max_prompt_tokens = config.rollout.max_response_tokens = _TOKENS
    config.rollout.vllm.python = _PYTHON.value
    with subprocess.Popen(
        [_PYTHON.value, "-c", _TRANSFORMERS, _MODEL.value, str(_TOKENS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as other:
        params = import_params(_MODEL.value, model)
        seconds = asyncio.run(measure(config, model, params, other))
        other.stdin.close()
    print(f"{'requests':>8} {'engine':>12}   tokens/s (range)   / transformers")
    for (name, count), runs in sorted(seconds.items(), key=lambda item: item[0][1]):
        speeds = sorted(count * _TOKENS / taken for taken in runs)
        ratios = [
            theirs / ours
            for ours, theirs in zip(runs, seconds["transformers", count], strict=True)
        ]
        print(
            f"{count:>8} {name:>12} {statistics.median(speeds):>10.1f} "
            f"({speeds[0]:.1f} to {speeds[-1]:.1f}) {statistics.median(ratios):>7.2f}"
        )
    print(
        json.dumps({f"{name} {count}": runs for (name, count), runs in seconds.items()})
    )


if __name__ == "__main__":
    command_line.start(
        main, ["model=models/SmolLM2-135M-Instruct", "python=FOLDER/bin/python"]
    )
