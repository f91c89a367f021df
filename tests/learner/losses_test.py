import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crbc_jax.learner import losses
from crbc_jax.learner.packing import step_weights

GOLDEN = pathlib.Path(__file__).parents[3] / "shared/golden"
CLIPS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


def load(name):
    path = GOLDEN / f"{name}.json"
    if not path.exists():
        pytest.skip(f"golden file {path.name} is not beside this checkout")
    case = json.loads(path.read_text())
    inputs = {
        key: jnp.array(value, jnp.float32) for key, value in case["inputs"].items()
    }
    return inputs, case["outputs"], case["tolerance"]


@pytest.mark.parametrize(
    "name, aggregation",
    [
        ("policy_loss_clip0.2_tokenmean", "token_mean"),
        ("policy_loss_seqmean_tokenmean", "seq_mean_token_mean"),
        ("policy_loss_seqmean_tokensum", "seq_mean_token_sum"),
        ("policy_loss_seqmean_tokensum_norm", "seq_mean_token_sum_norm"),
    ],
)
def test_policy_loss_and_gradient_equal_golden(name, aggregation):
    inputs, outputs, tolerance = load(name)
    mask = inputs["response_mask"] > 0
    weights = step_weights(
        aggregation,
        np.asarray(mask.sum(1)),
        np.arange(len(mask)),
        max_tokens=mask.shape[1],
    )

    def policy_loss(logprobs):
        surrogate = losses.clipped_surrogate(
            losses.log_ratios(logprobs, inputs["old_log_prob"], mask, "token"),
            inputs["advantages"][:, :1],
            mask,
            clip_low=0.2,
            clip_high=0.2,
            dual_clip=3.0,
        )
        return jnp.sum(weights[:, None] * surrogate.loss), surrogate

    grad = jax.value_and_grad(policy_loss, has_aux=True)
    (loss, surrogate), gradient = grad(inputs["log_prob"])
    is_clipped = surrogate.is_clipped_low | surrogate.is_clipped_high
    np.testing.assert_allclose(loss, outputs["loss"], **tolerance)
    np.testing.assert_allclose(gradient, outputs["grad_log_prob"], **tolerance)
    np.testing.assert_allclose(is_clipped.sum() / mask.sum(), outputs["clipfrac"])
    np.testing.assert_allclose(
        surrogate.is_dual_clipped.sum() / mask.sum(), outputs["clipfrac_lower"]
    )


@pytest.mark.parametrize(
    "form, golden", [("k1", "kl"), ("abs", "abs"), ("mse", "mse"), ("k3", "low_var_kl")]
)
def test_kl_equals_golden(form, golden):
    inputs, outputs, tolerance = load("kl_penalties")
    kl = losses.kl_penalty(inputs["log_prob"], inputs["ref_log_prob"], form)
    np.testing.assert_allclose(kl, outputs[golden], **tolerance)


def test_value_loss_equals_golden():
    inputs, outputs, tolerance = load("value_loss_clip0.5")
    loss, clip_fraction = losses.value_loss(
        inputs["vpreds"],
        inputs["values"],
        inputs["returns"],
        inputs["response_mask"] > 0,
        clip=0.5,
    )
    np.testing.assert_allclose(loss, outputs["loss"], **tolerance)
    np.testing.assert_allclose(clip_fraction, outputs["clipfrac"], **tolerance)


def test_scalar_advantage_lands_on_each_steps_own_tokens():
    """A4: the positions with a loss are the response positions, for every step."""
    mask = jnp.arange(12) >= 12 - jnp.array([1, 5, 9])[:, None]
    loss = losses.clipped_surrogate(
        jnp.zeros((3, 12)), jnp.full((3, 1), 2.0), mask, **CLIPS
    ).loss
    np.testing.assert_array_equal(loss, np.where(mask, -2.0, 0))


def test_masked_mean_of_nothing_is_zero_with_zero_gradient():
    """A11: and values that are not numbers do not leak out of the mask."""
    values = jnp.array([1.0, jnp.nan, jnp.inf])
    value, gradient = jax.value_and_grad(losses.masked_mean)(values, jnp.zeros(3, bool))
    assert value == 0
    np.testing.assert_array_equal(gradient, np.zeros(3))
    only_first = jnp.array([True, False, False])
    assert losses.masked_mean(values, only_first) == 1


def test_absurd_log_ratio_stays_finite_and_is_counted():
    """B4: a token the policy cannot have sampled must not turn the loss into NaN."""
    log_ratio = jnp.array([[500.0, -500.0, 0.0]])

    def loss(log_ratio, advantage):
        surrogate = losses.clipped_surrogate(
            log_ratio, advantage, jnp.ones((1, 3), bool), **CLIPS
        )
        return jnp.sum(surrogate.loss), surrogate

    for advantage in (1.0, -1.0):
        (value, surrogate), gradient = jax.value_and_grad(loss, has_aux=True)(
            log_ratio, jnp.array([[advantage]])
        )
        assert np.isfinite(value) and np.isfinite(gradient).all()
        np.testing.assert_array_equal(surrogate.is_clamped, [[True, True, False]])
    k3 = jax.value_and_grad(lambda d: losses.kl_penalty(d, jnp.zeros(())))
    value, gradient = k3(jnp.float32(-500.0))
    assert value == 10 and gradient == 0


@pytest.mark.parametrize(
    "ratio, advantage, loss, flag",
    [
        (1.5, 1.0, -1.28, "is_clipped_high"),  # DAPO's higher upper bound.
        (1.27, 1.0, -1.27, None),
        (0.5, -1.0, 0.8, "is_clipped_low"),
        (0.5, 1.0, -0.5, None),  # The worse of both is kept.
        (1.5, -1.0, 1.5, None),
        (9.0, -2.0, 6.0, "is_dual_clipped"),
        (9.0, 2.0, -2.56, "is_clipped_high"),  # No dual clip for A > 0.
    ],
)
def test_clips_by_hand(ratio, advantage, loss, flag):
    surrogate = losses.clipped_surrogate(
        jnp.log(jnp.array([[ratio]])),
        jnp.array([[advantage]]),
        jnp.ones((1, 1), bool),
        **CLIPS,
    )
    np.testing.assert_allclose(surrogate.loss, [[loss]], rtol=1e-6)
    flags = ("is_clipped_low", "is_clipped_high", "is_dual_clipped")
    assert [f for f in flags if getattr(surrogate, f).all()] == [f for f in [flag] if f]


def test_ratio_levels_by_hand():
    new = jnp.log(jnp.array([[0.5, 0.3, 0.9]]))
    old = jnp.log(jnp.array([[0.25, 0.6, 0.1]]))
    mask = jnp.array([[True, True, False]])
    expected = {
        "token": [[2.0, 0.5, 1.0]],
        "step": [[1.0, 1.0, 1.0]],
        "step_mean": [[1.0, 1.0, 1.0]],
    }
    for ratio, values in expected.items():
        log_ratio = losses.log_ratios(new, old, mask, ratio)
        np.testing.assert_allclose(np.exp(log_ratio), values, rtol=1e-6)
    mask = jnp.array([[True, False, True]])
    step = losses.log_ratios(new, old, mask, "step")
    mean = losses.log_ratios(new, old, mask, "step_mean")
    np.testing.assert_allclose(np.exp(step), [[18.0, 1.0, 18.0]], rtol=1e-5)
    np.testing.assert_allclose(np.exp(mean), [[18**0.5, 1.0, 18**0.5]], rtol=1e-5)
    with pytest.raises(ValueError, match="loss.ratio='word'.*token"):
        losses.log_ratios(new, old, mask, "word")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_entropy(dtype, temperature):
    """D8: float32 whatever the model's dtype, and never above 0. D1: tempered."""
    logits = jnp.asarray(
        np.random.default_rng(0).normal(size=(50, 7)) * 20, dtype=dtype
    )
    ids = jnp.arange(50, dtype=jnp.int32) % 7
    logprobs, entropy = losses.logprobs_and_entropy(logits, ids, temperature)
    assert logprobs.dtype == entropy.dtype == jnp.float32
    assert logprobs.max() <= 0
    scaled = np.float64(logits) / temperature
    log_p = (
        scaled
        - np.log(np.exp(scaled - scaled.max(1, keepdims=True)).sum(1))[:, None]
        - scaled.max(1, keepdims=True)
    )
    np.testing.assert_allclose(logprobs, log_p[np.arange(50), ids], atol=2e-5)
    np.testing.assert_allclose(entropy, -(np.exp(log_p) * log_p).sum(1), atol=2e-5)
