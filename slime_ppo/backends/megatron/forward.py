"""Running packed micro-batches through Megatron's schedules, with and without gradients."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from slime_ppo.backends.megatron.collectives import from_last_stage
from slime_ppo.types.micro_batch import MicroBatch
from slime_ppo.types.rollout_batch import COLUMNS, ColumnPart

# both get the output of the last stage over the whole pack [T, ...] and look at the micro-batch's positions themselves
Head = Callable[[MicroBatch, torch.Tensor], dict[str, torch.Tensor]]
Loss = Callable[[MicroBatch, torch.Tensor], torch.Tensor]


def forward_columns(chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], head: Head) -> ColumnPart:
    """A pass without gradients. `head` turns the model's output into named columns; they come back as numpy arrays in
    the order of the micro-batches' rows, of whole samples on every context-parallel rank and pipeline stage. All ranks of the
    role call it with equally many micro-batches."""
    collected: list[dict[str, torch.Tensor]] = []

    def forward_step(batches: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., object]]:
        micro_batch = next(batches)
        output = _forward(chunk, micro_batch)

        def collect(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
            flat = output[0]
            columns = _whole_samples(micro_batch, head(micro_batch, flat))
            collected.append({name: column.cpu() for name, column in columns.items()})
            return _schedule_result(flat.new_zeros(()))

        return output, collect

    with torch.no_grad():
        _run(chunks, micro_batches, forward_step, forward_only=True)
    rows = np.concatenate([micro_batch.rows for micro_batch in micro_batches])
    columns = {name: torch.cat([columns[name] for columns in collected]).numpy() for name in collected[0]} if collected else {}
    return ColumnPart(rows, from_last_stage(columns))


def _whole_samples(micro_batch: MicroBatch, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The columns with the tokens of the other context-parallel ranks, in one collective, and each per-sample entry from the
    rank that holds the sample's last position."""
    if micro_batch.context is None:
        return own
    per_sample = [name for name in own if name in COLUMNS and COLUMNS[name].per == "sample"]
    per_token = [name for name in own if name not in per_sample]
    columns = dict(zip(per_token, micro_batch.context.gather(*(own[name] for name in per_token)), strict=True))
    return columns | {name: micro_batch.context.share_last(own[name]) for name in per_sample}


def forward_backward(chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], loss: Loss) -> None:
    """Accumulate the gradient of the sum of `loss` over all micro-batches of all data- and context-parallel ranks.

    `loss` gets the model's output [T, ...] and returns this micro-batch's share of the objective, already divided by the
    step's denominator. An empty micro-batch contributes exactly 0.
    """

    def forward_step(batches: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., object]]:
        micro_batch = next(batches)
        output = _forward(chunk, micro_batch)

        def share(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
            return _schedule_result(loss(micro_batch, output[0]))

        return output, share

    _run(chunks, micro_batches, forward_step, forward_only=False)


def _forward(chunk: torch.nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
    """Of the last stage: [1, T, vocabulary shard] logits of the actor (fused: its last hidden states) in the dtype of its
    weights, [1, T, 1] values of the critic in float32. Of the others: their hidden states. `chunk` is a
    DistributedDataParallel."""
    cu_seqlens = micro_batch.cu_seqlens
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=micro_batch.max_seqlen,
        max_seqlen_kv=micro_batch.max_seqlen,
    )
    # by default it returns float32: all logits once more, and last hidden states that do not fit their bf16 weight
    own_dtype = {"fp32_output": False} if isinstance(chunk.get_submodule("module"), Float16Module) else {}
    output: torch.Tensor = chunk(micro_batch.tokens[None], None, None, packed_seq_params=packed, **own_dtype)
    return output


def _schedule_result(loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
    """What Megatron's schedules want with calculate_per_token_loss: the loss, a token count (unused), a report."""
    return loss, torch.ones((), dtype=torch.int, device=loss.device), {}


def _run(
    chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], step: Callable[..., object], *, forward_only: bool
) -> None:
    get_forward_backward_func()(
        forward_step_func=step,
        # each stage of the rank reads all micro-batches
        data_iterator=[iter(micro_batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        seq_length=1,  # unused with variable sequence lengths
        micro_batch_size=1,
        forward_only=forward_only,
    )
