"""Plays a checkpoint once on every task of its run's held-out panel.

    python experiments/evaluate.py --workdir=runs/quickstart --checkpoint=best

Prints success by category with 95 % intervals, and writes the same with the outcome
of each task to evaluation-STEP-tTEMPERATURE.json in the workdir.
"""

import json
import pathlib

from absl import flags
from ml_collections import ConfigDict

from crbc_jax import command_line

_WORKDIR = flags.DEFINE_string("workdir", None, "Workdir of a run.")
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "best", "`best` by held-out success, `latest`, or its update."
)
_TEMPERATURE = flags.DEFINE_float(
    "temperature",
    None,
    "Of sampling; 0 is greedy. By default config.evaluate.temperature of the run.",
    lower_bound=0.0,
)


def play(config: ConfigDict, checkpoints, step: int):
    """Lets the parameters of a checkpoint play the panel of its run."""
    from crbc_jax.background import Background, StopSignal
    from crbc_jax.checkpoint import check_same_run
    from crbc_jax.learner.learner import make_learner
    from crbc_jax.learner.sharding import make_mesh
    from crbc_jax.metrics import Progress
    from crbc_jax.models.pretrained import load_policy
    from crbc_jax.stages import Rollouts

    decoder_config, tokenizer = load_policy(config.model)
    mesh = make_mesh(**config.mesh)
    learner = make_learner(config, decoder_config, mesh)
    params = checkpoints.restore_params(step, learner.abstract_state.params)
    with (
        Background(StopSignal()) as background,
        Rollouts(config, decoder_config, tokenizer, background) as rollouts,
        Progress() as progress,
    ):
        saved = checkpoints.meta(step)["identity"]["tasks"]
        check_same_run({"tasks": saved}, {"tasks": rollouts.digests})
        rollouts.publish(params, step)
        return rollouts.evaluate(step, progress)


def print_table(result, title: str) -> None:
    """Success of each category, then of all."""
    import rich.console
    import rich.table

    table = rich.table.Table(title=title, title_justify="left")
    table.add_column("category")
    for name in ("solved", "success", "95 % interval"):
        table.add_column(name, justify="right")
    shares = result.by_category if len(result.by_category) > 1 else {}
    for name, share in (shares | {"all": result.overall}).items():
        if name == "all":
            table.add_section()
        low, high = share.interval
        table.add_row(
            name,
            f"{share.successes}/{share.trials}",
            f"{share.rate:.3f}",
            f"[{low:.3f}, {high:.3f}]",
        )
    console = rich.console.Console(markup=False, highlight=False)
    console.print(table)
    console.print(result.counts)


def main(_) -> None:
    workdir = pathlib.Path(_WORKDIR.value)
    # Only now: this loads Orbax, which takes seconds.
    from crbc_jax.checkpoint import Checkpointer
    from crbc_jax.workdir import read_config

    config = read_config(workdir)

    checkpoints = Checkpointer(workdir, keep_last=1)
    step = checkpoints.find(_CHECKPOINT.value)
    if _TEMPERATURE.value is not None:
        config.evaluate.temperature = _TEMPERATURE.value
    temperature = config.evaluate.temperature
    result = play(config, checkpoints, step)
    panel = checkpoints.meta(step)["identity"]["tasks"]["eval"]
    print_table(
        result,
        f"update {step}, temperature {temperature:g}, panel {panel[:12]}",
    )
    if _CHECKPOINT.value == "best":
        print("`best` was chosen by its success on this panel, which flatters it.")
    path = workdir / f"evaluation-{step:06d}-t{temperature:g}.json"
    labels = {"update": step, "temperature": temperature, "panel": panel}
    path.write_text(json.dumps(labels | result.to_json(), indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    command_line.start(main, ["workdir=runs/quickstart"])
