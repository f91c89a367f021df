"""The whole objective against a float64 oracle, and what must not change it."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from crbc_jax.learner import gradient, packing, sharding
from crbc_jax.learner.update import LossOptions, make_score, make_update, run_update
from crbc_jax.models.decoder import forward, init_params, unembed

OPTIONS = LossOptions(
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=3.0,
    ratio="token",
    kl_coef=0.1,
    kl_form="k3",
    entropy_coef=0.05,
    temperature=0.7,
)
PLAIN = LossOptions(
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=3.0,
    ratio="token",
    kl_coef=0.0,
    kl_form="k3",
    entropy_coef=0.0,
    temperature=1.0,
)
SGD = optax.sgd(1.0)  # Parameters then move by minus the gradient.
ADAM = gradient.make_optimizer(3e-4, 0.01, 1.0)
LENGTHS = [[3, 5], [7, 2], [1, 1]]  # Steps of the rollouts of each group: 19 in all.


def pack_rows(
    groups,
    advantages,
    microbatch_rows=8,
    row_tokens=0,
    share_prompts=False,
    **options,
):
    """All shapes are the same but for these sizes: each one is a compilation."""
    capacity = packing.Capacity(
        microbatch_rows, 32, 8, 4, row_tokens=row_tokens, share_prompts=share_prompts
    )
    options = {"aggregation": "group_step"} | options
    batches, _ = packing.pack(groups, advantages, capacity=capacity, **options)
    return batches


@pytest.fixture(scope="module")
def params(decoder_config):
    return init_params(decoder_config, 0)


@pytest.fixture(scope="module")
def other_params(decoder_config):
    return init_params(decoder_config, 1)


@pytest.fixture(scope="module")
def step_on(decoder_config):
    """Returns a function: options, optimizer, mesh sizes -> init and jitted step."""

    @functools.cache
    def make(options=PLAIN, optimizer=ADAM, num_devices=1, **sizes):
        mesh = sharding.make_mesh(**sizes, devices=jax.devices()[:num_devices])
        abstract = gradient.abstract_state(
            decoder_config, optimizer, mesh, keep_reference=options.kl_coef > 0
        )
        return (
            gradient.make_init(optimizer, abstract),
            make_update(decoder_config, options, optimizer, mesh),
        )

    return make


def on_device(old_logprobs):
    """Where `score` leaves them, so that all tests share one compilation."""
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    return jax.device_put(old_logprobs, sharding.microbatch_sharding(mesh))


def moved(before, after):
    return jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), before, after)


def assert_trees_close(tree, expected, atol):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), tree, expected
    )


def oracle(logits_of, params, reference, old_logprobs, batch, options):
    """The objective in float64 NumPy, from full logits of every position."""

    def log_softmax(params):
        logits = np.float64(logits_of(params)) / options.temperature
        logits -= logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    new, anchor = log_softmax(params), log_softmax(reference)
    loss = 0.0
    for index in np.ndindex(batch.advantage.shape[:2]):
        rows = jax.tree.map(lambda leaf, i=index: leaf[i], batch.rows)
        for slot in np.flatnonzero(rows.response_mask):
            at = (*index, rows.response_index[slot])
            token = rows.response_ids[slot]
            log_p = new[at][token]
            ratio = np.exp(log_p - np.float64(old_logprobs[index][slot]))
            advantage = np.float64(batch.advantage[index][slot])
            bounded = np.clip(ratio, 1 - options.clip_low, 1 + options.clip_high)
            surrogate = -min(advantage * ratio, advantage * bounded)
            if advantage < 0:
                surrogate = min(surrogate, -advantage * options.dual_clip)
            d = anchor[at][token] - log_p
            entropy = -(np.exp(new[at]) * new[at]).sum()
            if options.importance_cap:
                sampled = np.float64(batch.sampled_logprobs[index])
                of_reply = rows.response_mask & (rows.step_ids == rows.step_ids[slot])
                here = of_reply if options.importance_level == "step" else slot
                log_weight = np.sum(old_logprobs[index][here] - sampled[here])
                surrogate *= min(np.exp(log_weight), options.importance_cap)
            loss += np.float64(batch.pg_weight[index][slot]) * surrogate
            loss += np.float64(batch.kl_weight[index][slot]) * (
                options.kl_coef * (np.exp(d) - d - 1) - options.entropy_coef * entropy
            )
    return loss


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        dataclasses.replace(OPTIONS, importance_cap=1.5),
        dataclasses.replace(OPTIONS, importance_cap=1.5, importance_level="step"),
    ],
    ids=["plain", "importance of tokens", "importance of replies"],
)
def test_loss_and_gradient_match_float64_oracle(
    decoder_config, params, other_params, step_on, make_groups, options
):
    """Ratios off 1, clipped both ways and dually; KL and entropy with gradients."""
    random = np.random.default_rng(0)
    groups = make_groups(LENGTHS)
    advantages = random.normal(size=19).astype(np.float32) * 2
    (batch,) = pack_rows(groups, advantages)
    init, step = step_on(options, SGD)

    @jax.jit
    def all_logits(params, rows):
        flat = jax.tree.map(lambda leaf: leaf.reshape(32, -1), rows)
        hidden, _ = forward(
            decoder_config, params, flat.tokens, flat.positions, flat.segment_ids
        )
        logits = unembed(decoder_config, params, hidden)
        return logits.reshape(4, 8, *logits.shape[1:])

    def logits_of(params):
        return all_logits(params, batch.rows)

    logprobs = jax.nn.log_softmax(np.asarray(logits_of(params)) / 0.7)
    chosen = np.take_along_axis(
        np.take_along_axis(
            np.asarray(logprobs), batch.rows.response_index[..., None], axis=2
        ),
        batch.rows.response_ids[..., None],
        axis=-1,
    )[..., 0]
    # Ratios in every piece of the surrogate, but none near where two pieces meet.
    old = (chosen - random.choice([-0.7, -0.1, 0.1, 0.7, 1.3], chosen.shape)).astype(
        np.float32
    )
    state = init(params)._replace(reference=init(other_params).params)
    new_state, scalars = step(state, batch, on_device(old))

    evaluate = functools.partial(
        oracle,
        logits_of,
        reference=other_params,
        old_logprobs=old,
        batch=batch,
        options=options,
    )
    np.testing.assert_allclose(scalars["loss"], evaluate(params), rtol=2e-6)
    if options.importance_cap:
        assert 0 < scalars["importance_clip_fraction"] < 0.9
    for kind in ("low", "high", "dual"):
        assert scalars[f"clip_fraction_{kind}"] > 0
    # Along the gradient the loss must grow by its squared norm.
    grads = moved(params, new_state.params)
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(grads)))
    np.testing.assert_allclose(scalars["grad_norm"], norm, rtol=1e-5)
    size = 1e-3 / norm
    ahead, behind = (
        jax.tree.map(lambda p, g, s=sign: p + s * size * g, params, grads)
        for sign in (1, -1)
    )
    slope = (evaluate(ahead) - evaluate(behind)) / (2 * size)
    np.testing.assert_allclose(slope, norm**2, rtol=2e-3)


@pytest.fixture(scope="module")
def expected(params, step_on, make_groups):
    """A batch, and the state and scalars after a step on it, on one device."""
    groups = make_groups(LENGTHS)
    advantages = np.random.default_rng(1).normal(size=19).astype(np.float32)
    (batch,) = pack_rows(groups, advantages)
    init, step = step_on()
    return groups, advantages, *step(init(params), batch, None)


def assert_same_step(state, scalars, expected_state, expected_scalars):
    """Parameters, and moments (they hold the gradient), to 1e-5."""
    for tree, other in (
        (state.params, expected_state.params),
        (state.opt_state, expected_state.opt_state),
    ):
        assert_trees_close(tree, other, 1e-5)
    for name in ("loss", "grad_norm", "entropy"):
        np.testing.assert_allclose(
            scalars[name], expected_scalars[name], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("microbatch_rows", [1, 8, 32])
def test_microbatch_size_changes_nothing(microbatch_rows, params, step_on, expected):
    """And on-policy the ratio is exactly 1 in every one of them (D9)."""
    groups, advantages, *state_and_scalars = expected
    (batch,) = pack_rows(groups, advantages, microbatch_rows)
    init, step = step_on()
    state, scalars = step(init(params), batch, None)
    assert_same_step(state, scalars, *state_and_scalars)
    assert scalars["ratio_max"] == 1 and scalars["clip_fraction"] == 0
    assert scalars["policy_kl"] == 0


@pytest.mark.parametrize("share_prompts", [False, True])
def test_packing_changes_nothing(share_prompts, params, step_on, expected):
    """Several steps a row, on two devices, with equal prompts laid once."""
    groups, advantages, *_ = expected
    first, second = groups[0]
    twin = dataclasses.replace(second, steps=(*second.steps[:2], *first.steps))
    groups = [(first, twin), *groups[1:]]
    options = dataclasses.replace(PLAIN, ratio="step")

    def train(num_devices, **capacity):
        (batch,) = pack_rows(groups, advantages, **capacity)
        init, step = step_on(options, num_devices=num_devices)
        return step(init(params), batch, batch.sampled_logprobs)

    alone = train(1)
    packed = train(2, row_tokens=48, share_prompts=share_prompts)
    assert_same_step(*packed, *alone)
    assert alone[1]["ratio_max"] > 1.01


@pytest.mark.parametrize(
    "sizes",
    [{"data": 8}, {"fsdp": 8, "data": 1}, {"data": 2, "fsdp": 4}, {"tensor": 2}],
    ids=str,
)
def test_devices_change_nothing(sizes, params, step_on, expected):
    groups, advantages, *state_and_scalars = expected
    (batch,) = pack_rows(groups, advantages)
    init, step = step_on(num_devices=8, **sizes)
    state, scalars = step(init(params), batch, None)
    assert_same_step(state, scalars, *state_and_scalars)
    kernel = state.params["layers"]["mlp"]["gate"]["kernel"]
    split = sizes.get("fsdp", 1) * sizes.get("tensor", 1)
    assert kernel.addressable_shards[0].data.size * split == kernel.size
    moment = state.opt_state[1][0].mu["layers"]["mlp"]["gate"]["kernel"]
    assert moment.sharding == kernel.sharding


@pytest.mark.parametrize("poison", ["advantage", "params"])
def test_nonfinite_steps_leave_the_state_bit_equal(
    poison, params, step_on, make_groups
):
    groups = make_groups([[3, 5]])
    (batch,) = pack_rows(groups, np.ones(8, np.float32))
    init, step = step_on()
    if poison == "params":
        embedding = np.array(params["embed"]["embedding"])
        embedding[:] = np.nan
        params = params | {"embed": {"embedding": embedding}}
    else:
        batch.advantage[0, 3, 0] = np.inf
    before = jax.device_get(init(params))
    state, scalars = step(init(params), batch, None)
    assert scalars["nonfinite"] == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)


def test_nothing_to_train_on_leaves_the_state_bit_equal(params, step_on, make_groups):
    """A11: neither weight decay nor momentum moves the parameters then."""
    groups = make_groups([[3, 5]])
    init, step = step_on()
    before = jax.device_get(init(params))
    for choice in ("drop_all", "drop_pg"):
        (batch,) = pack_rows(groups, np.zeros(8, np.float32), degenerate_groups=choice)
        state, scalars = step(init(params), batch, None)
        assert (scalars["skipped"], scalars["nonfinite"]) == (1, 0)
        assert scalars["loss"] == 0 and scalars["grad_norm"] == 0
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)


def test_dropped_group_does_not_act_through_kl(
    params, other_params, step_on, make_groups
):
    """A13: with drop_all the gradient is that of the other group alone."""
    groups = make_groups([[3, 1], [2, 2]])
    advantages = np.array([1, 0, -1, 2, 0, 0, 0, 0], np.float32)
    init, step = step_on(OPTIONS, SGD)

    def train(groups, advantages, choice):
        (batch,) = pack_rows(groups, advantages, degenerate_groups=choice)
        state = init(params)._replace(reference=init(other_params).params)
        return step(state, batch, on_device(batch.sampled_logprobs))[0].params

    alone = train(groups[:1], advantages[:4], "keep")
    assert_trees_close(train(groups, advantages, "drop_all"), alone, 1e-6)
    kept = train(groups, advantages, "keep")
    assert any(
        np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(moved(kept, alone))
    )


def test_empty_microbatch_does_not_change_the_gradient(params, step_on, make_groups):
    """A11: and it is counted."""
    groups = make_groups([[3, 5]])
    (batch,) = pack_rows(groups, np.ones(8, np.float32))
    init, step = step_on()
    expected, _ = step(init(params), batch, None)
    longer = batch._replace(num_microbatches=np.int32(3))
    state, scalars = step(init(params), longer, None)
    assert scalars["empty_microbatches"] == 2
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)


def test_one_compilation_serves_every_number_of_rows(params, step_on, make_groups):
    """B10."""
    init, step = step_on()
    state = init(params)
    compiled = []
    for count in (1, 2, 7, 20, 31):
        groups = make_groups([[count, 1]], seed=count)
        (batch,) = pack_rows(groups, np.ones(count + 1, np.float32))
        state, scalars = step(state, batch, None)
        compiled.append(step._cache_size())
        tokens = sum(len(s.response_ids) for t in groups[0] for s in t.steps)
        assert scalars["response_tokens"] == tokens
    assert len(set(compiled)) == 1
    assert state.step == 5


def test_several_optimiser_steps_share_their_old_policy(
    decoder_config, params, step_on, make_groups
):
    """Recomputed before the first step; the first ratio is 1, later ones move."""
    groups = make_groups([[3, 5], [4, 4]])
    advantages = np.random.default_rng(2).normal(size=16).astype(np.float32)
    batches = pack_rows(groups, advantages, minibatch_groups=1)
    init, step = step_on(OPTIONS, SGD)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    score = make_score(decoder_config, OPTIONS.temperature, mesh)
    seen = []

    def spy(state, batch, old):
        state, scalars = step(state, batch, on_device(old))
        seen.append((np.asarray(old), scalars))
        return state, scalars

    run = functools.partial(run_update, spy, score)
    state, combined = run(init(params), batches, old_logprobs="recomputed")
    np.testing.assert_allclose(seen[0][1]["ratio_max"], 1, atol=1e-5)
    assert abs(seen[1][1]["ratio_max"] - 1) > 1e-3
    assert combined["ratio_max"] == max(float(s["ratio_max"]) for _, s in seen)
    assert combined["response_tokens"] == sum(
        len(s.response_ids) for g in groups for t in g for s in t.steps
    )
    mask = batches[1].rows.response_mask
    expected = np.asarray(score(init(params).params, batches[1]))
    np.testing.assert_allclose(seen[1][0][mask], expected[mask], atol=1e-6)
    assert state.step == 2

    seen.clear()
    run(init(params), batches, old_logprobs="sampled")
    np.testing.assert_array_equal(seen[0][0], batches[0].sampled_logprobs)
    difference = np.abs(
        np.asarray(score(init(params).params, batches[0])) - batches[0].sampled_logprobs
    )[batches[0].rows.response_mask]
    np.testing.assert_allclose(
        seen[0][1]["logprob_difference"], difference.mean(), rtol=1e-5
    )
    np.testing.assert_allclose(
        seen[0][1]["logprob_difference_max"], difference.max(), rtol=1e-5
    )


def test_no_further_step_after_a_nonfinite_one(params, step_on, make_groups):
    groups = make_groups([[4], [4], [4]])
    advantages = np.ones(12, np.float32)
    batches = pack_rows(groups, advantages, minibatch_groups=1)
    batches[1].advantage[0, 0, 0] = np.nan
    init, step = step_on(OPTIONS, SGD)
    state, scalars = run_update(
        lambda state, batch, old: step(state, batch, on_device(old)),
        pytest.fail,
        init(params),
        batches,
        old_logprobs="sampled",
    )
    assert scalars["nonfinite"] == 1
    assert state.step == 1


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_nothing(remat, decoder_config, params, expected):
    groups, advantages, *state_and_scalars = expected
    (batch,) = pack_rows(groups, advantages)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    step = make_update(decoder_config, PLAIN, ADAM, mesh, gradient.Compute(remat=remat))
    abstract = gradient.abstract_state(decoder_config, ADAM, mesh, keep_reference=False)
    init = gradient.make_init(ADAM, abstract)
    assert_same_step(*step(init(params), batch, None), *state_and_scalars)


def test_bfloat16_computes_nearly_the_same(decoder_config, params, expected):
    """And parameters, moments and the sums over micro-batches stay float32."""
    groups, advantages, state, scalars = expected
    (batch,) = pack_rows(groups, advantages)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    compute = gradient.Compute(dtype="bfloat16")
    step = make_update(decoder_config, PLAIN, ADAM, mesh, compute)
    abstract = gradient.abstract_state(decoder_config, ADAM, mesh, keep_reference=False)
    rounded, found = step(gradient.make_init(ADAM, abstract)(params), batch, None)
    # A product keeps eight bits; losses of a fresh model hardly depend on them.
    np.testing.assert_allclose(found["grad_norm"], scalars["grad_norm"], rtol=0.02)
    np.testing.assert_allclose(found["entropy"], scalars["entropy"], rtol=1e-3)
    assert found["ratio_max"] == 1
    for leaf, other in zip(*map(jax.tree.leaves, (rounded, state)), strict=True):
        assert leaf.dtype == other.dtype
    moments, exact = (s.opt_state[1][0].mu for s in (rounded, state))
    difference, size = (
        float(optax.tree.norm(tree)) for tree in (moved(moments, exact), exact)
    )
    assert 0 < difference < 0.02 * size


def test_epochs_share_the_old_policy_of_the_first(params, step_on, make_groups):
    groups = make_groups([[3, 5]])
    (batch,) = pack_rows(groups, np.linspace(-1, 1, 8, dtype=np.float32))
    init, step = step_on(OPTIONS, SGD)
    seen, scored = [], on_device(batch.sampled_logprobs)

    def spy(state, batch, old):
        assert old is scored
        state, scalars = step(state, batch, old)
        seen.append(scalars)
        return state, scalars

    state, combined = run_update(
        spy,
        lambda params, batch: scored,
        init(params),
        [batch],
        old_logprobs="recomputed",
        num_epochs=3,
    )
    assert state.step == 3 and len(seen) == 3
    assert combined["logprob_difference"] == float(seen[0]["logprob_difference"])
    assert float(seen[2]["policy_kl"]) != float(seen[0]["policy_kl"])
