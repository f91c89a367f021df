import jax
import numpy as np
import pytest

from crbc_jax.learner import gradient, sharding
from crbc_jax.learner.warm_start import (
    BatchMaker,
    Demonstration,
    make_warm_start_step,
    run_warm_start,
)
from crbc_jax.models.decoder import init_params

REPLIES = [np.array([4, 2], np.int32), np.array([5, 2], np.int32)]


def demonstrations(count=40):
    """The reply is told by the first token of the prompt."""
    random = np.random.default_rng(0)
    prompts = random.integers(6, 20, size=(count, 5)).astype(np.int32)
    return [
        Demonstration(prompt, REPLIES[prompt[0] % 2], REPLIES) for prompt in prompts
    ]


def make_batches(**options):
    options = {"batch_rows": 16, "microbatch_rows": 8, "seed": 0} | options
    return BatchMaker(demonstrations(), **options)


def test_batches_depend_on_seed_and_step_alone():
    first, again = make_batches(), make_batches()
    first(0)
    jax.tree.map(np.testing.assert_array_equal, first(3, 0.5), again(3, 0.5))
    tokens = first(3).rows.tokens
    assert not np.array_equal(tokens, first(4).rows.tokens)
    assert not np.array_equal(tokens, make_batches(seed=1)(3).rows.tokens)
    assert tokens.shape == (2, 8, 7)


@pytest.mark.parametrize("noise", [0.0, 0.5, 1.0])
def test_label_noise_is_the_share_of_random_actions(noise):
    make_batch = make_batches(batch_rows=2000, microbatch_rows=2000)
    rows = make_batch(0, label_noise=noise).rows
    is_right = rows.response_ids[0, :, 0] == 4 + rows.tokens[0, :, 0] % 2
    # Half of the random ones are right by chance; 5 standard deviations.
    assert abs(is_right.mean() - (1 - noise / 2)) <= 5 * 0.5 / np.sqrt(2000)
    clean = make_batch(0).rows
    np.testing.assert_array_equal(clean.tokens[..., :5], rows.tokens[..., :5])


def test_bad_batches_are_refused():
    with pytest.raises(ValueError, match="no demonstrations"):
        BatchMaker([], batch_rows=8, microbatch_rows=8, seed=0)
    with pytest.raises(ValueError, match="row_tokens=6 cannot hold .* of 7 tokens"):
        make_batches(row_tokens=6)


@pytest.fixture(scope="module")
def run(decoder_config):
    """Returns a function: parameters, steps -> state, [(steps done, loss), ...]."""
    optimizer = gradient.make_optimizer(1e-2, 0.0, 1.0)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    abstract = gradient.abstract_state(
        decoder_config, optimizer, mesh, keep_reference=False
    )
    init = gradient.make_init(optimizer, abstract)
    step = make_warm_start_step(decoder_config, optimizer, mesh)

    def run(params, steps, **options):
        losses = []
        state = run_warm_start(
            step,
            make_batches(**options),
            init(params),
            steps=steps,
            noise_steps=2,
            label_noise=0.5,
            on_step=lambda done, loss: losses.append((done, loss)),
        )
        return state, losses

    return run


def test_imitates_and_repeats_itself(decoder_config, run):
    params = init_params(decoder_config, 0)
    state, losses = run(params, 60)
    assert [done for done, _ in losses] == list(range(1, 63))
    clean = [loss for _, loss in losses[:60]]
    # Of two tokens one is always the same, the other one of two.
    assert clean[0] > 2 and np.mean(clean[-5:]) < 0.1
    assert losses[-1][1] > 2 * clean[-1]  # The labels are noisy by then.
    assert state.step == 62
    again, losses_again = run(params, 60)
    assert losses_again == losses
    jax.tree.map(np.testing.assert_array_equal, again.params, state.params)


def test_packing_and_micro_batches_change_nothing(decoder_config, run):
    """Four demonstrations a row, in 1 to 3 micro-batches, of which one is not full."""
    params = init_params(decoder_config, 0)
    expected, losses = run(params, 3)
    for rows in (1, 3, 8):
        state, packed = run(params, 3, row_tokens=30, microbatch_rows=rows)
        np.testing.assert_allclose(packed, losses, rtol=1e-5)
        # Adam divides by the gradient's own size: rounding grows where that is small.
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, atol=1e-4),
            state.params,
            expected.params,
        )
    batch = make_batches(row_tokens=30, microbatch_rows=3)(0)
    assert batch.rows.tokens.shape == (2, 3, 30)
    assert batch.num_microbatches == 2 and np.isclose(batch.weight.sum(), 1)


def test_first_loss_is_the_mean_cross_entropy_of_the_rows(decoder_config, run):
    """Rows count alike; the sum over micro-batches is divided once."""
    params = init_params(decoder_config, 0)
    rows = jax.tree.map(lambda leaf: leaf.reshape(16, -1), make_batches()(0).rows)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    logprobs, _ = jax.jit(
        lambda params, rows: gradient.response_logprobs(
            decoder_config, params, rows, 1.0, mesh
        )
    )(params, rows)
    _, losses = run(params, 1)
    mean = np.mean(np.asarray(logprobs), where=rows.response_mask)
    np.testing.assert_allclose(losses[0][1], -mean, rtol=1e-5)


def test_nonfinite_loss_is_an_error_with_the_remedy(decoder_config, run):
    params = init_params(decoder_config, 0)
    params = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), params)
    with pytest.raises(ValueError, match="step 1; lower config.warm_start.learning"):
        run(params, 3)
