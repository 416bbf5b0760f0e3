"""Options of the algorithm that contradict each other: estimator, policy loss, KL and rollout correction (SEMANTICS 2 to 13)."""

from slime_ppo.config.checked import Checked, cite_restrictions
from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils.registries import resolve_estimator, resolve_policy_loss


def check_algorithm(checked: Checked) -> None:
    """Refuse what the mathematics cannot do, or would silently ignore. Raises ConfigError."""
    for check in (
        _check_names,
        _check_estimator,
        _check_policy_loss,
        _check_losses,
        _check_kl,
        _check_kl_loss,
        _check_kl_controller,
        _check_correction,
        _check_bypass,
    ):
        check(checked)


def _check_names(checked: Checked) -> None:
    """Both names are known; comes first, because everything else asks what they stand for."""
    ppo = checked.config.ppo
    resolve_estimator(ppo.advantage_estimator, origin=_named_by(checked, "ppo.advantage_estimator", "--advantage-estimator"))
    resolve_policy_loss(ppo.policy_loss, origin=_named_by(checked, "ppo.policy_loss", "--policy-loss"))


def _named_by(checked: Checked, key: str, flag: str) -> str:
    origin = checked.origin(key)
    return flag if origin == flag else f"{origin}: {key}"


def _check_estimator(checked: Checked) -> None:
    config, ppo = checked.config, checked.config.ppo
    spec, named = ppo.estimator_spec, checked.cite("ppo.advantage_estimator")
    if not spec.needs_critic and ppo.truncation_policy == "bootstrap":
        raise ConfigError(
            f"{checked.cite('ppo.truncation_policy')} ends a cut response with the critic's value, and {named} has no critic. Use "
            "--truncation-policy terminal or mask"
        )
    if not spec.needs_critic and ppo.num_critic_only_steps > 0:
        raise ConfigError(
            f"{checked.cite('ppo.num_critic_only_steps')} trains the critic alone at first, and {named} has no critic. Use "
            "--num-critic-only-steps 0"
        )
    if not spec.uses_token_rewards and ppo.kl_coef > 0:
        raise ConfigError(
            f"{checked.cite('ppo.kl_coef')} charges the KL in the token rewards, which {named} does not read: it compares the "
            "rewards of whole responses. Use --kl-coef 0, and --use-kl-loss with --kl-loss-coef"
        )
    if spec.uses_groups and config.rollout.n_samples_per_prompt < 2:
        raise ConfigError(
            f"{named} compares the responses to one prompt; found {checked.cite('rollout.n_samples_per_prompt')}: every advantage "
            "would be 0. Use --n-samples-per-prompt 2 or more"
        )


def _check_policy_loss(checked: Checked) -> None:
    ppo = checked.config.ppo
    spec, named = ppo.policy_loss_spec, checked.cite("ppo.policy_loss")
    if ppo.eps_clip_c is not None and not spec.dual_clip:
        raise ConfigError(f"{checked.cite('ppo.eps_clip_c')} is the dual clip, which {named} does not have. Leave it out")
    if all(clip is None for clip in (ppo.eps_clip, ppo.eps_clip_high, spec.eps_clip, spec.eps_clip_high)):
        raise ConfigError(f"{named} has no default clip. Set --eps-clip-high, and --eps-clip for a lower one")


def _check_losses(checked: Checked) -> None:
    ppo = checked.config.ppo
    by_constant = ppo.reduction == "seq-mean-token-sum-norm"
    if by_constant and ppo.loss_length_norm is None:
        raise ConfigError(
            f"{_reduction(checked)} needs --loss-length-norm, the constant it divides by; "
            f"--rollout-max-response-len ({checked.config.rollout.rollout_max_response_len}) is a usual choice"
        )
    if ppo.loss_length_norm is not None and not by_constant:
        raise ConfigError(
            f"{checked.cite('ppo.loss_length_norm')} is used only with --loss-reduction seq-mean-token-sum-norm, found "
            f"{_reduction(checked)}. Leave it out"
        )
    if ppo.kl_early_stop is not None and checked.config.steps_per_rollout == 1:
        raise ConfigError(
            f"{checked.cite('ppo.kl_early_stop')} with one optimizer step per rollout: the KL to the old policy is 0 before the "
            "first step, so there is nothing to stop. Leave it out, or raise --num-epochs-per-rollout or lower --global-batch-size"
        )


def _reduction(checked: Checked) -> str:
    """The reducer in force, and who chose it."""
    ppo = checked.config.ppo
    if ppo.loss_reduction is not None:
        return checked.cite("ppo.loss_reduction")
    return f"--loss-reduction {ppo.reduction} (default of {checked.cite('ppo.policy_loss')})"


def _check_kl(checked: Checked) -> None:
    ppo = checked.config.ppo
    if not ppo.use_kl_loss:
        for key in ("ppo.kl_loss_coef", "ppo.kl_loss_type", "ppo.use_unbiased_kl"):
            checked.refuse_unless_default(key, "--use-kl-loss")
        return
    if ppo.kl_coef > 0 and not ppo.allow_double_kl:
        raise ConfigError(
            f"{checked.cite('ppo.kl_coef')} charges the KL in the rewards and {checked.cite('ppo.use_kl_loss')} charges it again "
            "in the loss. Drop one of them, or say --allow-double-kl"
        )


def _check_kl_loss(checked: Checked) -> None:
    ppo = checked.config.ppo
    if not ppo.use_kl_loss:
        return
    if ppo.kl_loss_coef == 0:
        raise ConfigError(f"{checked.cite('ppo.use_kl_loss')} with --kl-loss-coef 0 adds nothing to the loss. Set --kl-loss-coef")
    if ppo.kl_loss_type == "k1" and not ppo.use_unbiased_kl:
        in_rewards = "; or charge k1 in the rewards with --kl-coef" if ppo.estimator_spec.uses_token_rewards else ""
        raise ConfigError(
            f"{checked.cite('ppo.kl_loss_type')}: as a loss, on-policy, k1 has a gradient of exactly zero in expectation. Use k2 "
            f"(reverse-KL gradient), k3 or low_var_kl, or add --use-unbiased-kl{in_rewards}"
        )


def _check_kl_controller(checked: Checked) -> None:
    ppo = checked.config.ppo
    if ppo.kl_controller == "fixed":
        for key in ("ppo.kl_target", "ppo.kl_horizon", "ppo.kl_target_unit"):
            checked.refuse_unless_default(key, "--kl-controller adaptive")
        return
    adaptive = checked.cite("ppo.kl_controller")
    if ppo.use_kl_loss:
        raise ConfigError(f"{adaptive} steers the KL in the rewards; it is refused with {checked.cite('ppo.use_kl_loss')}")
    if not ppo.estimator_spec.uses_token_rewards:
        raise ConfigError(
            f"{adaptive} steers the KL in the token rewards, which {checked.cite('ppo.advantage_estimator')} does not read. Use "
            "--kl-controller fixed"
        )
    if ppo.kl_target is None or ppo.kl_horizon is None:
        raise ConfigError(
            f"{adaptive} needs --kl-target and --kl-horizon, both above 0; found {checked.cite('ppo.kl_target')} and "
            f"{checked.cite('ppo.kl_horizon')}"
        )
    if ppo.kl_coef == 0:
        raise ConfigError(
            f"{adaptive} multiplies beta, so it must start above 0; found {checked.cite('ppo.kl_coef')}. Set --kl-coef"
        )


def _check_correction(checked: Checked) -> None:
    """The two ends of each range, with a default for the one that is not given."""
    bounds = checked.config.correction.resolved
    for low, high, names in (
        (bounds.low, bounds.high, ("low", "high")),
        (bounds.rejection_low, bounds.rejection_high, ("rejection_low", "rejection_high")),
    ):
        if low is not None and high is not None and not low < high:
            given = " and ".join(checked.cite(f"correction.{name}") for name in names)
            raise ConfigError(f"{given} keep the ratio inside [{low:g}, {high:g}], which holds 1 alone. Move one of the two ends")


def _check_bypass(checked: Checked) -> None:
    config, correction = checked.config, checked.config.correction
    if not correction.use_rollout_log_probs:
        return
    bypass = checked.cite("correction.use_rollout_log_probs")
    for key, value in (("correction.mode", correction.mode), ("correction.rejection", correction.rejection)):
        if value != "none":
            raise ConfigError(
                f"{bypass} takes the engine's log-probs as the old ones, so that every rho is 1; {checked.cite(key)} would do "
                "nothing. Drop one of them"
            )
    ppo = config.ppo
    if ppo.kl_coef > 0 and config.rollout.restricted and ppo.kl_support == "full":
        raise ConfigError(
            f"{bypass} with {checked.cite('ppo.kl_coef')}: the KL in the rewards needs the old policy's log-probs over the whole "
            f"vocabulary, and the engine's are of a restricted sampler ({cite_restrictions(checked)}). Drop "
            "--use-rollout-log-probs, charge the KL in the loss (--use-kl-loss), or say --kl-support sampled"
        )
