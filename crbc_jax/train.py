"""The training loop: environment -> rollouts -> credit -> update -> checkpoint, logs.

The only module, with stages.py, that sees all the others.
"""

import contextlib
import pathlib

import jax
from ml_collections import ConfigDict

from crbc_jax import distributed
from crbc_jax.background import Background, Interrupted, StopSignal
from crbc_jax.checkpoint import Checkpointer
from crbc_jax.learner.learner import make_learner
from crbc_jax.learner.sharding import make_mesh
from crbc_jax.metrics import CompileCounter, MetricsWriter, Progress
from crbc_jax.models.pretrained import load_policy, start_params
from crbc_jax.rollout.collect import check_any_played, check_replies, rollout_stats
from crbc_jax.stages import Clock, Credit, Rollouts
from crbc_jax.types import TrainState, UserError
from crbc_jax.workdir import Workdir


def train(config: ConfigDict, path: pathlib.Path, *, command: str) -> None:
    """Trains to `config.learner.num_updates`, continuing what the workdir holds.

    Args:
        config: every setting; see config.py.
        path: the workdir, of this run alone.
        command: how the run was started, for the report.

    Raises:
        UserError: naming what to mend; the last good checkpoint stays.
        Interrupted: on SIGINT or SIGTERM, after a checkpoint of what was reached.
    """
    num_updates = config.learner.num_updates
    decoder_config, tokenizer = load_policy(config.model)
    mesh = make_mesh(**config.mesh)
    learner = make_learner(config, decoder_config, mesh)
    clock, estimate = Clock(), Credit(config.advantage, jax.local_devices())
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        compiles = stack.enter_context(CompileCounter())
        # One of several processes may not leave a collection that others finish.
        waits = StopSignal() if jax.process_count() > 1 else stop
        background = stack.enter_context(Background(waits))
        rollouts = stack.enter_context(
            Rollouts(config, decoder_config, tokenizer, background)
        )
        workdir = Workdir(path, config, rollouts.digests)
        progress = stack.enter_context(Progress())

        def evaluate(update):
            with clock("evaluate"):
                result = rollouts.evaluate(update, progress)
                workdir.write_evaluation(update, result)
            return result.scalars()

        def save(update, scalars):
            success = scalars.get("eval/success_rate")
            workdir.save(update, state, success=success, ahead=rollouts.ahead)

        saved = workdir.restore(learner.abstract_state)
        first, state, ahead = saved or (0, None, [])
        metrics = MetricsWriter(path, continue_from=first if saved else None)
        stack.callback(metrics.close)
        if saved:
            progress.say(f"continuing after update {first} of {num_updates}")
            rollouts.put_ahead(first, ahead)
            rollouts.publish(state.params, first)
        else:
            with clock("warm_start"):
                state = start(config, decoder_config, learner, rollouts, progress, stop)
            scalars = rollouts.publish(state.params, 0) | evaluate(0)
            metrics.write(0, scalars | {"compilations": compiles.count} | clock.read())
            save(0, scalars)

        progress.start("updates", num_updates, first)
        for update in range(first, num_updates):
            try:
                with clock("rollout"):
                    groups = rollouts.take(update)
            except Interrupted:
                save(update, {})
                raise
            check_any_played(groups)
            if update == 0:
                check_replies(groups, tokenizer, config.rollout.max_invalid_share)
                if cut := sum(t.prompts_truncated for group in groups for t in group):
                    progress.say(
                        f"warning: {cut} prompts lost history to fit "
                        "config.rollout.max_prompt_tokens="
                        f"{config.rollout.max_prompt_tokens}"
                    )
            rollouts.start_ahead(update + 1)
            with clock("credit"):
                advantages, columns, scalars = estimate(groups)
                batch_path = workdir.write_rollouts(update + 1, groups, columns)
            with clock("update"):
                try:
                    minibatches, packed = learner.pack(groups, advantages)
                except ValueError as error:  # Such as log-probabilities that are NaN.
                    save(update, {})
                    raise UserError(
                        f"update {update + 1} cannot be trained on: {error}. Its "
                        f"rollouts are in {batch_path}; the last checkpoint is {update}"
                    ) from error
                state, losses = learner.update(state, minibatches)
            if losses["nonfinite"]:
                save(update, {})  # The state is as it was: a bad step is not applied.
                raise UserError(
                    f"update {update + 1}: loss {losses['loss']} or its gradient, of "
                    f"norm {losses['grad_norm']}, is not finite; its rollouts are in "
                    f"{batch_path}, the last good state is checkpoint {update}. Lower "
                    "config.learner.learning_rate, or look for a broken reward"
                )
            with clock("rollout"):
                rollouts.finish_ahead()
            scalars |= rollout_stats(groups) | rollouts.engine_stats()
            with clock("publish"):
                scalars |= rollouts.publish(state.params, update + 1)
            scalars["groups/cut"] = config.rollout.tasks_per_update - len(groups)
            scalars |= {f"batch/{name}": value for name, value in packed.items()}
            scalars |= {f"learner/{name}": value for name, value in losses.items()}
            is_last = update + 1 == num_updates
            is_evaluated = is_last or (update + 1) % config.evaluate.every == 0
            if is_evaluated:
                scalars |= evaluate(update + 1)
            scalars["compilations"] = compiles.count
            metrics.write(update + 1, scalars | clock.read())
            progress.show("updates", update + 1, _note(scalars))
            is_due = (update + 1) % config.checkpoint.every == 0
            signal = distributed.agree(stop.number)
            if is_due or is_evaluated or signal:
                save(update + 1, scalars)
            if signal and not is_last:
                raise Interrupted(signal)
        progress.finish("updates")
        if jax.process_index() == 0:
            from crbc_jax.report import write_report  # Loads matplotlib.

            report = write_report(path, command=command)
            progress.say(f"{workdir.summary()}\nreport: {report}")


def start(config, decoder_config, learner, rollouts, progress, stop) -> TrainState:
    """Draws or reads parameters, and warms them up on demonstrations if asked to.

    Raises:
        Interrupted: if a signal came; a warm start begins anew.
    """

    def on_step(done, loss):
        progress.show("warm start", done, f"loss {loss:.3f}")
        if signal := distributed.agree(stop.number):
            raise Interrupted(signal)

    settings = config.warm_start
    if settings.directory:
        progress.say(f"warm start: parameters of {settings.directory}")
        saved = Checkpointer(settings.directory, keep_last=1)
        return learner.init_state(
            saved.restore_params(0, learner.abstract_state.params)
        )
    shardings = jax.tree.map(lambda x: x.sharding, learner.abstract_state.params)
    params = start_params(config.model, decoder_config, config.seed, shardings)
    if num_steps := settings.steps + settings.noise_steps:
        progress.start("warm start", num_steps)
        params = learner.warm_start(params, rollouts.demonstrate(), on_step)
        progress.finish("warm start")
    return learner.init_state(params)


def _note(scalars) -> str:
    """What the progress bar shows of an update."""
    note = f"success {scalars['rollout/success_rate']:.2f}"
    if "eval/success_rate" in scalars:
        note += f", held out {scalars['eval/success_rate']:.2f}"
    return note
