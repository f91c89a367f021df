"""Every setting of a run: each field once, with its default, unit and meaning."""

from ml_collections import ConfigDict


def default_config() -> ConfigDict:
    """Returns the defaults; files in configs/ change what differs.

    Real numbers have float defaults, and there are no lists and no None, so that
    every leaf can be overridden from the command line.
    """
    config = ConfigDict()
    config.seed = 0  # Of everything random in the run.

    config.env = ConfigDict()
    config.env.name = "sokoban"  # A row of crbc_jax.envs.ENVIRONMENTS.
    config.env.max_steps = 15  # Environment steps an episode; then truncated.
    config.env.num_workers = 0  # Worker processes; 0 steps episodes in this one.
    config.env.step_timeout = 30.0  # Seconds a worker may take; then aborted.
    config.env.num_train_tasks = 4096  # Distinct tasks that training cycles through.
    config.env.num_eval_tasks = 256  # Size of the held-out panel.
    config.env.alfworld = ConfigDict()
    config.env.alfworld.data_dir = ""  # Folder with json_2.1.1; "": $ALFWORLD_DATA, or
    # where alfworld-download puts it.
    config.env.alfworld.train_folder = "train"  # Or valid_train, ...: of json_2.1.1.
    config.env.alfworld.eval_folder = "valid_seen"  # Or valid_unseen.
    config.env.alfworld.task_types = "all"  # Or some, as "Pick,Look".
    config.env.alfworld.cached = True  # Cache what the engine computes anew each step.
    config.env.appworld = ConfigDict()
    config.env.appworld.python = ""  # Interpreter that has the package appworld.
    config.env.appworld.root = ""  # AppWorld's root directory, with the folder data.
    config.env.appworld.train_set = "train"  # Or dev, test_normal, test_challenge.
    config.env.appworld.eval_set = "dev"
    config.env.appworld.start_timeout = 60.0  # Seconds for a server to answer.
    config.env.appworld.call_timeout = 100.0  # Seconds that the agent's code may take.
    config.env.sokoban = ConfigDict()
    config.env.sokoban.levels = "generated"  # Or a Boxoban file or folder of them.
    config.env.sokoban.size = 6  # Cells a side, walls included (generated levels).
    config.env.sokoban.num_boxes = 1
    config.env.sokoban.min_moves = 2  # Shortest solution of a generated level, at
    config.env.sokoban.max_moves = 9  # least and at most, in steps.
    config.env.webshop = ConfigDict()
    config.env.webshop.data_dir = "generated"  # Or a folder of WebShop's own files.
    config.env.webshop.size = "small"  # "all": 1.18 million products.
    config.env.webshop.goals = "synthetic"  # Or "human".
    config.env.webshop.observation = "text"  # Or "text_rich".
    config.env.webshop.seed = 42  # Of prices and price limits.
    config.env.webshop.shuffle_seed = 233  # Of the order of goals, so of the splits.
    config.env.webshop.num_products = 200  # Of a generated catalogue.

    config.model = ConfigDict()
    config.model.directory = "preset:sokoban_tiny"  # Or a Hugging Face directory.
    config.model.fresh = False  # Draw new weights, not those of the directory.
    config.model.lora_rank = 0  # Of adapters, which then train alone; 0: all trains.
    config.model.lora_alpha = 32.0  # What an adapter adds is scaled by alpha / rank.
    config.model.lora_targets = "query,key,value,out,gate,up,down"  # Products of the
    # layers that have adapters.

    config.rollout = ConfigDict()
    config.rollout.engine = "sampler"  # A row of crbc_jax.rollout.ENGINES.
    config.rollout.tasks_per_update = 16  # Groups an update.
    config.rollout.group_size = 8  # Episodes of each task.
    config.rollout.temperature = 1.0
    config.rollout.prompt = "sokoban_compact"  # A row of rollout.templates.PROMPTS.
    config.rollout.parser = "strict"  # A row of crbc_jax.rollout.actions.PARSERS.
    config.rollout.episode_timeout = 3600.0  # Seconds an episode may take; then it is
    # aborted. Generous: it is for engines that never answer.
    config.rollout.history_length = 0  # Observation-action records in the prompt.
    config.rollout.max_prompt_tokens = 16
    config.rollout.max_response_tokens = 4
    config.rollout.gate_step = 0  # Steps after which a group is cut if its rollouts'
    config.rollout.min_divergence = 0.12  # mean edit distance, a step, is below this
    # (selective rollout). 0 plays all groups to the end; published: 10.
    config.rollout.max_policy_lag = 0  # Updates; 1 overlaps collection and update.
    config.rollout.max_invalid_share = 0.9  # Of the first rollouts' actions; above
    # it the run stops before its first update, with the reasons. 1.0 never stops.

    config.rollout.vllm = ConfigDict()  # Of the engine "vllm"; see third_party/vllm.
    config.rollout.vllm.python = ""  # Interpreter that has vLLM, to start servers with.
    config.rollout.vllm.num_servers = 1  # That the run starts,
    config.rollout.vllm.urls = ""  # unless these are there: URLs, with commas between.
    config.rollout.vllm.folder = ""  # Where weights are published: servers see it, too.
    config.rollout.vllm.dtype = "float32"  # Of served weights; "bfloat16".
    config.rollout.vllm.arguments = "--enforce-eager"  # More ones of vLLM's server.
    config.rollout.vllm.start_timeout = 600.0  # Seconds for a server to answer.
    config.rollout.vllm.request_timeout = 600.0  # Seconds that a call may take.
    config.rollout.vllm.num_retries = 3  # Of a request; then its episode is aborted.
    config.rollout.vllm.max_mismatch = 0.0  # Nats a token, between log-probabilities
    # of servers and learner; more stops the run. 0: 1e-3, in bfloat16 5e-2.

    config.advantage = ConfigDict()
    config.advantage.name = "crbc"  # A row of crbc_jax.advantages.ESTIMATORS.
    # A sub-config an estimator: its options, with the defaults of its function. An
    # option means the same wherever it appears.
    config.advantage.crbc = ConfigDict()
    config.advantage.crbc.beta = 0.98  # Discount of the closure, a transition.
    config.advantage.crbc.depth = -1  # Bellman backups; -1 is the full closure.
    config.advantage.crbc.sigma_min = 0.1  # Floor of the credit's scale.
    config.advantage.crbc.group_weight = 1.0  # Of the trajectory's advantage.
    config.advantage.crbc.step_weight = 5.0  # Of the step's.
    config.advantage.crbc.stat_weighting = "trajectories"  # What counts once in group
    # statistics; "steps": long trajectories weigh more, as in verl-agent.
    config.advantage.crbc.invalid_action_penalty = 0.1  # Reward units a step.
    config.advantage.grpo = ConfigDict()
    config.advantage.grpo.stat_weighting = "trajectories"
    config.advantage.grpo.normalization = "mean_std"  # "mean": no division (Dr.GRPO).
    config.advantage.grpo.invalid_action_penalty = 0.1
    for name in ("rloo", "reinforce_pp", "reinforce_pp_baseline"):
        config.advantage[name] = ConfigDict()
        config.advantage[name].stat_weighting = "trajectories"
        config.advantage[name].invalid_action_penalty = 0.1
    for name in ("gigpo", "hgpo", "graphgpo", "migpo", "g2po", "gated_bepo"):
        config.advantage[name] = ConfigDict()
        config.advantage[name].discount = 0.95  # An environment step.
        config.advantage[name].normalization = "mean_std"
        config.advantage[name].stat_weighting = "trajectories"
        config.advantage[name].invalid_action_penalty = 0.1
    for name in ("gigpo", "graphgpo", "migpo", "g2po"):
        config.advantage[name].step_weight = 1.0
    config.advantage.hgpo.history_length = 2  # Anchors before the current one.
    config.advantage.hgpo.length_weight_alpha = 1.0  # Longer histories weigh more.
    config.advantage.hgpo.base_group = False  # Include the trajectory's advantage.
    config.advantage.graphgpo.discount = 0.1  # WebShop 0.2, Sokoban 0.8.
    config.advantage.graphgpo.normalize_distance = False  # Progress, not distance.
    config.advantage.graphgpo.success_reward = 10.0  # Reward units.
    config.advantage.graphgpo.episode_weight = 1.0
    config.advantage.migpo.milestone_reward = 10.0
    config.advantage.g2po.success_reward = 10.0
    config.advantage.gated_bepo.gae_lambda = 0.95
    config.advantage.gated_bepo.mix = 0.5  # Share of Bellman credit where gated.
    config.advantage.rtmc = ConfigDict()
    config.advantage.rtmc.discount = 0.95
    config.advantage.proas = ConfigDict()
    config.advantage.proas.base = "grpo"  # Estimator that it re-weights, with the
    # options of that one's sub-config.

    config.loss = ConfigDict()
    config.loss.clip_low = 0.2
    config.loss.clip_high = 0.2
    config.loss.dual_clip = 3.0  # Bound of ratio x advantage when it is negative.
    config.loss.ratio = "token"  # Importance ratio of each token; "step": of the whole
    # reply; "step_mean": its geometric mean over the tokens.
    config.loss.importance_cap = 0.0  # Of the weight p_learner / p_sampler, for a
    # sampler that is not quite the policy: 2.0, say. 0 weighs nothing.
    config.loss.importance_level = "token"  # Or "step": of the whole reply.
    config.loss.aggregation = "group_step"  # A row of learner.packing.AGGREGATIONS.
    config.loss.kl_coef = 0.0  # Of the penalty to the warm-started reference.
    config.loss.kl_form = "k3"  # A row of learner.losses.KL_FORMS.
    config.loss.entropy_coef = 0.0
    config.loss.degenerate_groups = "keep"  # "drop_pg", "drop_all": for groups
    # whose advantages are all zero.

    config.learner = ConfigDict()
    config.learner.num_updates = 30
    config.learner.learning_rate = 3e-4  # Constant.
    config.learner.weight_decay = 0.01
    config.learner.max_grad_norm = 1.0
    config.learner.old_logprobs = "recomputed"  # Or "sampled" (the engine's).
    config.learner.minibatch_groups = 0  # Groups an optimiser step; 0: all.
    config.learner.minibatch_rows = 0  # Environment steps an optimiser step; 0: off.
    config.learner.num_epochs = 1  # Times that an update goes through its steps.
    config.learner.microbatch_rows = 64  # Rows at once on all devices together.
    config.learner.row_tokens = 0  # Slots of a row that several steps share; 0: one
    # step a row. Padding is small from four times the longest step on.
    config.learner.share_prompts = False  # Equal prompts of a group once a row.
    config.learner.compute_dtype = "float32"  # Of forward and backward pass.
    config.learner.moment_dtype = "float32"  # Of Adam's first moment.
    config.learner.remat = "none"  # "dots", "full": less memory, layers run twice.

    config.mesh = ConfigDict()
    config.mesh.data = -1  # Devices along each axis; -1: all that remain.
    config.mesh.fsdp = 1
    config.mesh.tensor = 1

    config.warm_start = ConfigDict()
    config.warm_start.steps = 0  # Supervised steps on demonstrations before RL.
    config.warm_start.noise_steps = 0  # Further ones on noisy labels, which loosen
    config.warm_start.label_noise = 0.5  # the policy: share of random actions.
    config.warm_start.batch_rows = 256
    config.warm_start.learning_rate = 1e-3
    config.warm_start.num_tasks = 2048  # Training tasks that are demonstrated.
    config.warm_start.directory = ""  # Workdir of a run of no updates, to start from.

    config.evaluate = ConfigDict()
    config.evaluate.every = 10  # Updates; also before the first and after the last.
    config.evaluate.temperature = 0.4

    config.checkpoint = ConfigDict()
    config.checkpoint.every = 10  # Updates; also at each evaluation.
    config.checkpoint.keep_last = 2  # Besides the best by held-out success.
    return config


def published_config(model: str) -> ConfigDict:
    """Returns what the published runs of CRBC share (arXiv 2609.35082, table 5).

    Args:
        model: "1.5b" or "7b", of Qwen2.5-Instruct.
    """
    config = default_config()
    name = {"1.5b": "Qwen2.5-1.5B-Instruct", "7b": "Qwen2.5-7B-Instruct"}[model]
    config.model.directory = f"models/{name}"
    config.rollout.history_length = 2
    config.rollout.max_response_tokens = 512
    config.loss.kl_coef = 0.01
    config.loss.entropy_coef = 0.001
    config.learner.num_updates = 150
    config.learner.learning_rate = 1e-6
    config.learner.minibatch_rows = {"1.5b": 256, "7b": 64}[model]
    config.learner.microbatch_rows = {"1.5b": 32, "7b": 16}[model]
    config.learner.compute_dtype = "bfloat16"
    config.learner.remat = "full"
    config.mesh.data, config.mesh.fsdp = 1, -1
    config.evaluate.every = 5
    return config
