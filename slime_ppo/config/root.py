"""`Config`: all sections, and the numbers that follow from more than one of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Literal, TypeVar

from slime_ppo.config.batch import BatchConfig
from slime_ppo.config.checkpoint import CheckpointConfig
from slime_ppo.config.cluster import ClusterConfig
from slime_ppo.config.correction import CorrectionConfig
from slime_ppo.config.critic import CriticConfig
from slime_ppo.config.data import DataConfig
from slime_ppo.config.debug import DebugConfig
from slime_ppo.config.eval import ONE_SET, EvalConfig
from slime_ppo.config.fields import OptionSpec, Value, section_options, yaml_text
from slime_ppo.config.model import ModelConfig
from slime_ppo.config.optimizer import OptimizerConfig
from slime_ppo.config.parallel import ParallelConfig
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.config.recompute import RecomputeConfig
from slime_ppo.config.reward import RewardConfig
from slime_ppo.config.roles import ROLE_NAMES, RoleName, RoleSettings
from slime_ppo.config.rollout import SGLANG_MAX_TOP_K, RolloutConfig
from slime_ppo.config.run import RunConfig
from slime_ppo.config.sft import SftConfig
from slime_ppo.config.sglang import SglangConfig
from slime_ppo.config.tracking import TrackingConfig

Number = TypeVar("Number", int, float)
Objective = Literal["ppo", "sft"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The resolved configuration of a run. Nothing assigns to it; derived numbers are properties.

    Example: `Config(model=ModelConfig(hf_checkpoint="m"), data=DataConfig(prompt_data="p.jsonl"))` takes every default.
    """

    run: RunConfig = field(default_factory=RunConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sglang: SglangConfig = field(default_factory=SglangConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PpoConfig = field(default_factory=PpoConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    objective: Objective = "ppo"

    @property
    def saves_checkpoints(self) -> bool:
        """True when the run saves its state: one that trains nothing has none."""
        return self.checkpoint.save_checkpoints and self.trains

    @property
    def trains(self) -> bool:
        """False when rollouts are generated only (--debug-rollout-only): no role is started."""
        return not self.debug.debug_rollout_only

    @property
    def generates(self) -> bool:
        """False when rollouts come from files (--debug-train-only) and in supervised fine-tuning: no engine is started,
        and nothing is answered for an evaluation."""
        return not self.debug.debug_train_only and self.objective == "ppo"

    @property
    def has_critic(self) -> bool:
        """True when the advantage estimator reads values; otherwise nothing of a critic is started, checked or saved."""
        return self.ppo.needs_critic and self.trains

    @property
    def roles(self) -> tuple[RoleName, ...]:
        """The trained roles of this run."""
        return () if not self.trains else ROLE_NAMES if self.has_critic else ("actor",)

    @property
    def samples_per_rollout(self) -> int:
        """Samples of one rollout when none is dropped."""
        return self.rollout.samples_per_rollout

    @property
    def steps_per_pass(self) -> int:
        """Optimizer steps of one pass over a rollout."""
        return -(-self.samples_per_rollout // self.batch.global_batch_size)

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps of a rollout, all passes."""
        return self.steps_per_pass * self.ppo.num_epochs_per_rollout

    @property
    def planned_actor_steps(self) -> int:
        """Optimizer steps of the actor in the whole run."""
        return self.steps_per_rollout * (self.run.num_rollout - self.ppo.num_critic_only_steps)

    @property
    def planned_critic_steps(self) -> int:
        """Optimizer steps of the critic in the whole run."""
        return self.steps_per_rollout * self.run.num_rollout if self.has_critic else 0

    @property
    def bundles(self) -> dict[str, range]:
        """The bundles (one device or CPU slot each) of every tenant, its first process in the first: all tenants from bundle 0 on,
        or with --no-colocate one behind the other."""
        sizes = {**{str(role): self.role(role).num_ranks for role in self.roles}, "rollout": self.num_rollout_devices}
        if self.cluster.colocate:
            return {tenant: range(size) for tenant, size in sizes.items()}
        ends = accumulate(sizes.values())
        return {tenant: range(end - sizes[tenant], end) for tenant, end in zip(sizes, ends, strict=True)}

    @property
    def num_rollout_devices(self) -> int:
        """Devices of the rollout engines, default resolved: one for the embedded engine, none for servers that others have
        started, or where nothing is generated."""
        rollout = self.rollout
        if not self.generates:
            return 0
        if rollout.engine == "embedded":
            return 1
        if self.sglang.server_urls is not None:
            return 0
        if rollout.rollout_num_gpus is not None:
            return rollout.rollout_num_gpus
        per_engine = rollout.rollout_num_gpus_per_engine
        shared = max(self.role(role).num_ranks for role in self.roles) if self.cluster.colocate and self.roles else per_engine
        return max(shared - shared % per_engine, per_engine)

    @property
    def engine_bundles(self) -> list[range]:
        """The bundles of each SGLang engine that the run starts."""
        if not self.generates or self.rollout.engine == "embedded" or self.sglang.server_urls is not None:
            return []
        places, size = self.bundles["rollout"], self.rollout.rollout_num_gpus_per_engine
        return [range(first, first + size) for first in places[::size]]

    @property
    def engine_shares_devices(self) -> bool:
        """True when SGLang's servers, started by the run, are on the devices of the roles."""
        shares = self.cluster.colocate and self.trains and self.generates
        return shares and self.rollout.engine == "sglang" and self.sglang.server_urls is None

    @property
    def weight_sync_folder(self) -> str:
        """--weight-sync-folder, default resolved."""
        given = self.rollout.weight_sync_folder
        return f"{self.run.save.rstrip('/')}/weight_sync" if given is None else given

    @property
    def push_attempts(self) -> int:
        """Times that a push of weights is tried: an engine in a process of the run's own fails for good."""
        return 1 if self.rollout.engine == "embedded" else self.sglang.max_attempts

    @property
    def num_bundles(self) -> int:
        """Bundles of the placement group."""
        return max(bundles.stop for bundles in self.bundles.values())

    @property
    def offloads(self) -> bool:
        """True when a tenant frees its device for the next one."""
        return self.cluster.colocate and self.cluster.offload and self.trains

    @property
    def eval_files(self) -> dict[str, str]:
        """Name -> file of the held-out prompts or examples that this run evaluates on."""
        if self.objective == "sft":
            return {} if self.sft.eval_data is None else {ONE_SET: self.sft.eval_data}
        return self.eval.data_sets if self.eval.eval_interval > 0 and self.generates else {}

    @property
    def eval_flag(self) -> str:
        """The option that names them."""
        return "--eval-data" if self.objective == "sft" else "--eval-prompt-data"

    @property
    def eval_max_response_len(self) -> int:
        """Longest held-out response, default resolved."""
        given = self.eval.eval_max_response_len
        return self.rollout.rollout_max_response_len if given is None else given

    @property
    def eval_sampler_top_k(self) -> int:
        """top-k of held-out responses, with off as 0, and as the engine demands it where they are restricted."""
        given, restricted = max(self.eval.eval_top_k, 0), self.eval.eval_top_p < 1 or self.eval.eval_min_p > 0
        sets = self.rollout.engine == "sglang" and given == 0 and restricted and self.eval.eval_temperature > 0
        return SGLANG_MAX_TOP_K if sets else given

    @property
    def max_sample_tokens(self) -> int:
        """Tokens of the longest possible training sample."""
        return self.data.rollout_max_prompt_len + self.rollout.rollout_max_response_len

    def role(self, name: RoleName) -> RoleSettings:
        """The settings of one role, defaults resolved."""
        return _actor(self) if name == "actor" else _critic(self)

    def values(self) -> dict[str, Value]:
        """Every value under its `section.field`, in the order of OPTIONS; in supervised fine-tuning those of its section, too."""
        options = OPTIONS if self.objective == "ppo" else OPTION_BY_KEY.values()
        return {spec.key: self.value(spec) for spec in options}

    def value(self, spec: OptionSpec) -> Value:
        """The value of one option."""
        found: Value = getattr(getattr(self, spec.section), spec.name)
        return found

    def to_yaml(self) -> str:
        """All values, nested by section; reading it again gives an equal Config."""
        nested: dict[str, dict[str, Value]] = {}
        for spec in OPTIONS if self.objective == "ppo" else SFT_OPTIONS:
            nested.setdefault(spec.section, {})[spec.name] = self.value(spec)
        return yaml_text(nested)


def _shared(config: Config, planned_steps: int) -> dict[str, Any]:
    """What both roles take from the optimizer section."""
    optimizer = config.optimizer
    return {
        "min_lr": optimizer.min_lr,
        "lr_decay_style": optimizer.lr_decay_style,
        "lr_decay_iters": planned_steps if optimizer.lr_decay_iters is None else optimizer.lr_decay_iters,
        "planned_steps": planned_steps,
        "weight_decay": optimizer.weight_decay,
        "adam_betas": (optimizer.adam_beta1, optimizer.adam_beta2),
        "adam_eps": optimizer.adam_eps,
    }


def _first(*given: Number | None) -> Number:
    """The first that was given; the last always is."""
    return next(one for one in given if one is not None)


def _actor(config: Config) -> RoleSettings:
    run_folder = config.run.save.rstrip("/")
    return RoleSettings(
        role="actor",
        hf_folder=config.model.hf_checkpoint,
        checkpoint_folder=f"{run_folder}/actor",
        save_folder=f"{run_folder}/hf",
        num_nodes=config.parallel.actor_num_nodes,
        num_ranks_per_node=config.parallel.actor_num_gpus_per_node,
        tp_size=config.parallel.tensor_model_parallel_size,
        cp_size=config.parallel.context_parallel_size,
        pp_size=config.parallel.pipeline_model_parallel_size,
        vpp_size=config.parallel.num_virtual_stages_per_pipeline_rank,
        ep_size=config.parallel.expert_model_parallel_size,
        etp_size=_first(config.parallel.expert_tensor_parallel_size, config.parallel.tensor_model_parallel_size),
        lr=config.optimizer.lr,
        lr_warmup_iters=config.optimizer.lr_warmup_iters,
        clip_grad=config.optimizer.clip_grad,
        **_shared(config, config.planned_actor_steps),
    )


def _critic(config: Config) -> RoleSettings:
    critic, actor = config.critic, _actor(config)
    folder = f"{config.run.save.rstrip('/')}/critic" if critic.save is None else critic.save
    tp_size = _first(critic.tensor_model_parallel_size, actor.tp_size)
    return RoleSettings(
        role="critic",
        hf_folder=actor.hf_folder if critic.load is None else critic.load,
        checkpoint_folder=folder,
        save_folder=f"{folder.rstrip('/')}/hf",
        num_nodes=_first(critic.num_nodes, actor.num_nodes),
        num_ranks_per_node=_first(critic.num_gpus_per_node, actor.num_ranks_per_node),
        tp_size=tp_size,
        cp_size=_first(critic.context_parallel_size, actor.cp_size),
        pp_size=_first(critic.pipeline_model_parallel_size, actor.pp_size),
        vpp_size=_first(critic.num_virtual_stages_per_pipeline_rank, actor.vpp_size),
        ep_size=_first(critic.expert_model_parallel_size, actor.ep_size),
        etp_size=_first(critic.expert_tensor_parallel_size, config.parallel.expert_tensor_parallel_size, tp_size),
        lr=_first(critic.lr, actor.lr),
        lr_warmup_iters=_first(critic.lr_warmup_iters, actor.lr_warmup_iters),
        clip_grad=_first(critic.clip_grad, actor.clip_grad),
        **_shared(config, config.planned_critic_steps),
    )


# in the order of Config
_ALL_SECTIONS: Mapping[str, type] = {one.name: one.type for one in fields(Config) if isinstance(one.type, type)}
SECTIONS: Mapping[str, type] = {name: declared for name, declared in _ALL_SECTIONS.items() if name != "sft"}
OPTION_BY_KEY: Mapping[str, OptionSpec] = {
    spec.key: spec for name, declared in _ALL_SECTIONS.items() for spec in section_options(name, declared)
}
OPTIONS: tuple[OptionSpec, ...] = tuple(spec for spec in OPTION_BY_KEY.values() if spec.section in SECTIONS)

# of supervised fine-tuning: the sections it shares with PPO, without the options that it has no use for, and its own
SFT_SECTIONS: Mapping[str, type] = {
    name: _ALL_SECTIONS[name]
    for name in (
        *("run", "checkpoint", "model", "data", "sft", "batch", "optimizer", "parallel", "recompute", "cluster", "tracking"),
    )
}
_NOT_OF_SFT = frozenset(
    (
        *("model.ref_load", "data.label_key", "batch.partial_step", "cluster.colocate", "cluster.offload"),
        *("tracking.log_sample_interval", "tracking.num_logged_samples"),
    )
)
_SFT_HELP = {
    "run.num_rollout": "total number of batches of the run, one optimizer step each",
    "data.prompt_data": "training file: JSON Lines (one object a line), or parquet where the name ends in .parquet; or a "
    "folder of shards of either; some of the rows, counted from 0, as path@[start:end]",
}
SFT_OPTIONS: tuple[OptionSpec, ...] = tuple(
    replace(spec, help=_SFT_HELP[spec.key]) if spec.key in _SFT_HELP else spec
    for section in SFT_SECTIONS
    for spec in OPTION_BY_KEY.values()
    if spec.section == section and spec.key not in _NOT_OF_SFT
)


def sft_config(sections: Mapping[str, Any]) -> Config:
    """Supervised fine-tuning as its sections say. To everything that it shares with PPO it is a run without engine and critic,
    whose rollouts are the batches of the file, each of one optimizer step."""
    batch, sft = sections["batch"], sections["sft"]
    rollout = RolloutConfig(
        rollout_batch_size=batch.global_batch_size, n_samples_per_prompt=1, rollout_max_response_len=sft.max_response_len
    )
    own = {**sections, "cluster": replace(sections["cluster"], offload=False)}  # one role shares its devices with nobody
    return Config(**own, rollout=rollout, ppo=PpoConfig(advantage_estimator="grpo"), objective="sft")
