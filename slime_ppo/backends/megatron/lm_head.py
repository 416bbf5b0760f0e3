"""From the output of the policy's model to log-probs of the response tokens.

Two ways with one result. By default the output layer makes logits and ppo_utils reads them. Fused, the output layer hands its
input on, and the log-probs come from hidden states and weight block by block: the logits of a micro-batch never exist, and
those of prompt tokens are never computed.
"""

from dataclasses import dataclass

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from slime_ppo.backends.megatron.collectives import tensor_parallel_group
from slime_ppo.ppo_utils.linear_logprob import linear_log_probs, linear_support_log_probs
from slime_ppo.ppo_utils.top_p import EntropySupport, SupportLogProbs, TokenSupports, support_and_vocab_log_probs
from slime_ppo.ppo_utils.vocab_parallel import EntropyMode, TokenLogProbs, vocab_log_probs
from slime_ppo.types.micro_batch import MicroBatch


@dataclass(frozen=True)
class LmHead:
    """`weight`: this rank's rows of the output layer when it is fused, None when the model's output is logits. Asked on the
    last pipeline stage alone."""

    vocab_size: int
    temperature: float
    entropy_support: EntropySupport
    weight: torch.nn.Parameter | None
    sequence_parallel: bool

    def log_probs(self, micro_batch: MicroBatch, output: torch.Tensor, entropy: EntropyMode) -> SupportLogProbs:
        """Over the recorded support and over the vocabulary, the same when the sampler was unrestricted; each [N].

        `output` [T, ...] is the model's, over the whole pack. Collective over tensor-parallel ranks.
        """
        if micro_batch.batch.support_ids is None:
            return _unrestricted(self._over_vocabulary(micro_batch, output, entropy))
        labels = micro_batch.column("response_ids").long()
        supports = TokenSupports(micro_batch.column("support_ids").long(), micro_batch.column("support_counts").long())
        if self.weight is None:
            return support_and_vocab_log_probs(
                output.index_select(0, micro_batch.positions),
                labels,
                supports,
                vocab_size=self.vocab_size,
                temperature=self.temperature,
                group=tensor_parallel_group(),
                entropy=entropy,
                entropy_support=self.entropy_support,
            )
        return linear_support_log_probs(
            output,
            self.weight,
            labels,
            supports,
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            group=tensor_parallel_group(),
            entropy=entropy,
            entropy_support=self.entropy_support,
            positions=micro_batch.positions,
            sequence_parallel=self.sequence_parallel,
        )

    def _over_vocabulary(self, micro_batch: MicroBatch, output: torch.Tensor, entropy: EntropyMode) -> TokenLogProbs:
        labels = micro_batch.column("response_ids").long()
        if self.weight is None:
            return vocab_log_probs(
                output.index_select(0, micro_batch.positions),
                labels,
                vocab_size=self.vocab_size,
                temperature=self.temperature,
                group=tensor_parallel_group(),
                entropy=entropy,
                overwrite_logits=True,  # the selected rows are a copy that nobody else sees
            )
        return linear_log_probs(
            output,
            self.weight,
            labels,
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            group=tensor_parallel_group(),
            entropy=entropy,
            positions=micro_batch.positions,
            sequence_parallel=self.sequence_parallel,
        )


def _unrestricted(found: TokenLogProbs) -> SupportLogProbs:
    return SupportLogProbs(found.log_probs, found.log_probs, torch.zeros_like(found.log_probs), found.entropy)


def fuse_output_layer(model: GPTModel) -> torch.nn.Parameter | None:
    """Make the model's output its last hidden states (under sequence parallelism this rank's slice); the weight it would have
    multiplied them with is returned, and stays where checkpoints and weight sync look for it. None on a stage without one."""
    if not model.post_process:
        return None

    def hand_on(hidden: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        return hidden, None

    model.output_layer.forward = hand_on
    own: torch.nn.Parameter | None = model.output_layer.weight
    if own is not None:
        return own
    # an output layer that shares the embedding of its own stage has no weight; Megatron passes it in at every call
    tied: torch.nn.Parameter = model.embedding.word_embeddings.weight
    return tied


def widen_output_layer(model: GPTModel) -> None:
    """Make the output layer and its input float32 in a model of another dtype: so are the logits, or, fused, the last hidden
    states. An embedding that is tied to it is float32 too, and hands its result on in the model's dtype.

    Call before weights are loaded, which would lose their lower bits, and before the model is wrapped.
    """
    if model.pre_process and model.share_embeddings_and_output_weights:
        model.embedding.word_embeddings.float()
        model.embedding.register_forward_hook(lambda _module, _inputs, output: output.to(model.config.params_dtype))
    if model.post_process:
        model.output_layer.float()
        model.output_layer.register_forward_pre_hook(lambda _module, inputs: (inputs[0].float(), *inputs[1:]))
