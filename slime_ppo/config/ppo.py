"""Section `ppo`: the algorithm. Every rule behind these options is in the docstrings of slime_ppo.ppo_utils."""

from dataclasses import dataclass
from typing import Literal

from slime_ppo.config.fields import option
from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils.registries import (
    EstimatorSpec,
    PolicyLossSpec,
    Reduction,
    resolve_estimator,
    resolve_policy_loss,
)


@dataclass(frozen=True)
class PpoConfig:
    """Advantages, losses, KL and the passes over a rollout."""

    advantage_estimator: str = option(
        "gae",
        help="how advantages are made: gae (with a critic), grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, or "
        "your own EstimatorSpec as package.module.NAME",
    )
    gamma: float = option(1.0, help="discount per trainable token", at_least=0, at_most=1)
    lambd: float = option(0.95, help="GAE lambda of the advantages", at_least=0, at_most=1)
    lambd_critic: float | None = option(
        None, help="GAE lambda of the critic's returns", default_text="same as --lambd", at_least=0, at_most=1
    )
    adaptive_lambd: float | None = option(
        None,
        help="a of lambda = clamp(1 - 1/(a n), 0, 1) with n trainable tokens, for advantages only",
        default_text="off",
        above=0,
    )
    truncation_policy: Literal["terminal", "bootstrap", "mask"] = option(
        "terminal",
        help="a response cut by length: ends with value 0, ends with the critic's value of its last state, or does not train",
    )
    masked_in_baseline: bool = option(
        False, help="with --truncation-policy mask, rewards of cut responses stay in their group's baseline"
    )
    grpo_std_normalization: bool = option(True, help="grpo divides by the standard deviation of the group's rewards")
    normalize_advantages: bool | None = option(
        None,
        help="whiten advantages over all trainable tokens of all ranks",
        default_text="on for gae and reinforce_plus_plus, off for the others",
    )
    whiten_domain: Literal["rollout", "step"] = option("rollout", help="whiten once per rollout, or anew in each optimizer step")
    policy_loss: str = option(
        "ppo",
        help="ppo, gspo (one ratio per sample), cispo (clipped weights, gradient of every token), or your own PolicyLossSpec as "
        "package.module.NAME",
    )
    eps_clip: float | None = option(
        None,
        help="lower clip of the ratio, at 1 - eps_clip",
        default_text="0.2 with ppo, 3e-4 with gspo, no lower clip with cispo",
        above=0,
        at_most=1,
    )
    eps_clip_high: float | None = option(
        None,
        help="upper clip of the ratio, at 1 + eps_clip_high",
        default_text="same as --eps-clip where that is given, else 0.2 with ppo and cispo, 4e-4 with gspo",
        above=0,
    )
    eps_clip_c: float | None = option(
        None,
        help="dual clip of the ppo loss: the loss of a token with negative advantage is at most -c A",
        default_text="off",
        above=1,
    )
    value_clip: float = option(0.2, help="values move at most this far from the old values in the value loss; 0 = off", at_least=0)
    entropy_coef: float = option(0.0, help="entropy bonus in the actor's loss", at_least=0)
    entropy_support: Literal["full", "sampled"] = option(
        "full", help="entropy over the whole vocabulary, or over the tokens that a restricted sampler could draw"
    )
    kl_coef: float = option(0.0, help="KL to the reference charged in the token rewards (beta)", at_least=0)
    kl_reward_type: Literal["k1", "k2", "k3"] = option(
        "k1", help="estimator of the KL in the rewards; k2 and k3 give a wrong gradient there and are for comparison"
    )
    kl_controller: Literal["fixed", "adaptive"] = option("fixed", help="keep beta, or steer it toward --kl-target")
    kl_target: float | None = option(
        None, help="KL that the adaptive controller steers to", unit="nats per --kl-target-unit", default_text="unset", above=0
    )
    kl_horizon: int | None = option(
        None, help="the adaptive controller's time constant", unit="trajectories", default_text="unset", above=0
    )
    kl_target_unit: Literal["trajectory", "token"] = option(
        "trajectory", help="--kl-target is the mean over trajectories of the sum over tokens, or the mean per token"
    )
    use_kl_loss: bool = option(False, help="add the KL to the reference to the actor's loss")
    kl_loss_coef: float = option(0.0, help="weight of the KL in the actor's loss", at_least=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = option(
        "k3",
        help="estimator of the KL in the loss; as a loss k2 gives the reverse-KL gradient, k3 the forward one, k1 none "
        "without --use-unbiased-kl",
    )
    use_unbiased_kl: bool = option(
        False, help="multiply the KL in the loss by the unclipped ratio of the current to the old policy: unbiased off-policy"
    )
    kl_support: Literal["full", "sampled"] = option(
        "full",
        help="KL to the reference over the whole vocabulary, or over the tokens that a restricted sampler could draw (blind "
        "outside of them)",
    )
    allow_double_kl: bool = option(False, help="allow the KL in the rewards and in the loss together")
    kl_early_stop: float | None = option(
        None,
        help="skip the rollout's remaining actor steps when a step's mean KL (k3) to the old policy passes this",
        unit="nats per token",
        default_text="off",
        above=0,
    )
    num_epochs_per_rollout: int = option(1, help="passes over each rollout, each with its own shuffle", unit="passes", at_least=1)
    num_critic_only_steps: int = option(0, help="first rollouts in which only the critic trains", unit="rollouts", at_least=0)
    loss_reduction: Reduction | None = option(
        None,
        help="how token losses become a step's loss; seq-mean-token-mean favours short good and long bad answers",
        default_text="token-mean; with gspo seq-mean-token-mean",
    )
    loss_length_norm: float | None = option(
        None, help="the constant of seq-mean-token-sum-norm", unit="tokens", default_text="unset", above=0
    )
    max_skipped_steps: int = option(10, help="stop after this many skipped optimizer steps in a row", unit="steps", at_least=1)

    @property
    def estimator_spec(self) -> EstimatorSpec:
        """What the advantage estimator needs and where its function is. Raises ConfigError for an unknown name."""
        return resolve_estimator(self.advantage_estimator, origin="--advantage-estimator")

    @property
    def policy_loss_spec(self) -> PolicyLossSpec:
        """Defaults of the policy loss and where its function is. Raises ConfigError for an unknown name."""
        return resolve_policy_loss(self.policy_loss, origin="--policy-loss")

    @property
    def needs_critic(self) -> bool:
        """True when the advantage estimator reads values."""
        return self.estimator_spec.needs_critic

    @property
    def whitens(self) -> bool:
        """True when advantages are whitened, default resolved."""
        return self.estimator_spec.whitens if self.normalize_advantages is None else self.normalize_advantages

    @property
    def clip_low(self) -> float | None:
        """Lower clip, default resolved; None = no lower clip."""
        return self.policy_loss_spec.eps_clip if self.eps_clip is None else self.eps_clip

    @property
    def clip_high(self) -> float:
        """Upper clip, default resolved: a lower clip that is given alone is meant for both sides.

        Raises ConfigError for a user's loss without any default.
        """
        spec = self.policy_loss_spec
        for clip in (self.eps_clip_high, self.eps_clip, spec.eps_clip_high, spec.eps_clip):
            if clip is not None:
                return clip
        raise ConfigError(f"--policy-loss {self.policy_loss} has no default clip. Set --eps-clip-high")

    @property
    def reduction(self) -> Reduction:
        """The loss reducer, default resolved."""
        return self.policy_loss_spec.reduction if self.loss_reduction is None else self.loss_reduction

    @property
    def critic_lambd(self) -> float:
        """Lambda of the returns, default resolved."""
        return self.lambd if self.lambd_critic is None else self.lambd_critic

    @property
    def needs_reference(self) -> bool:
        """True when the KL to the reference enters rewards or loss."""
        return self.kl_coef > 0 or self.use_kl_loss
