"""One rank of one role: what the actor and the critic have in common."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from slime_ppo.backends.megatron.checkpoint import UnfinishedSave, load_checkpoint
from slime_ppo.backends.megatron.collectives import context_parallel_group, gather_objects, token_parallel_group
from slime_ppo.backends.megatron.forward import Head, Loss, forward_backward, forward_columns
from slime_ppo.backends.megatron.init import init_rank
from slime_ppo.backends.megatron.lm_head import widen_output_layer
from slime_ppo.backends.megatron.memory import Offloader
from slime_ppo.backends.megatron.mixture import LoadBalance
from slime_ppo.backends.megatron.model import build_chunks, load_hf_weights, start_value_head, transformer_config
from slime_ppo.backends.megatron.optimizer import (
    StepOutcome,
    apply_gradients,
    build_optimizer,
    complete_parameters,
    wrap_chunks,
    zero_gradients,
)
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.conversion.hf_io import HfWeights
from slime_ppo.conversion.table import ConversionTable
from slime_ppo.conversion.table import Head as HeadKind
from slime_ppo.data.cost import flop_costs
from slime_ppo.data.pack import ContextRank, pack_micro_batch
from slime_ppo.data.schedule import split_rows
from slime_ppo.errors import EchoedError, NumericsError
from slime_ppo.parallel.cp_map import CpMap
from slime_ppo.parallel.worker_settings import WorkerSettings
from slime_ppo.ppo_utils.aggregate import masked_sum
from slime_ppo.ppo_utils.denominator import Denominator, make_denominator
from slime_ppo.ppo_utils.packed import require_finite
from slime_ppo.types.micro_batch import MicroBatch
from slime_ppo.types.rollout_batch import COLUMNS, ColumnPart, RolloutBatch
from slime_ppo.types.stats import Stats
from slime_ppo.types.step_plan import Step, StepPlan

Made = TypeVar("Made")


class MegatronRole:
    """Model, optimizer and memory of this rank. Methods that the docstring calls collective are called by all ranks.

    `models` are the pipeline stages that lie on this rank, `chunks` the same, wrapped for training.
    """

    def __init__(self, settings: WorkerSettings, head: HeadKind) -> None:
        self.settings = settings
        self.layout = settings.layout
        self.device = init_rank(settings.rank, settings.layout)
        rank = settings.rank.rank
        self.dp_rank = settings.layout.dp_rank(rank)
        self.cp_rank = settings.layout.cp_rank(rank)
        # of a training step every context-parallel rank has seen other tokens; of a pass all have the same whole samples
        self.reports_tokens = settings.layout.tp_rank(rank) == 0 and settings.layout.is_last_stage(rank)
        self.reports = self.reports_tokens and self.cp_rank == 0
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.model.dtype]
        self.shape = ModelShape.from_hf_folder(settings.model.hf_folder)
        self.num_outputs = self.shape.vocab_size if head == "language_model" else 1
        self.table = ConversionTable(self.shape, head)
        aux_coeff = settings.model.moe_aux_loss_coeff
        config = transformer_config(
            self.shape,
            settings.layout,
            dtype,
            settings.model.transformer_impl,
            settings.execution,
            moe_aux_loss_coeff=aux_coeff,
        )
        self.load_balance = LoadBalance(config, settings.layout, aux_coeff) if aux_coeff > 0 else None
        models = build_chunks(
            self.shape,
            config,
            settings.layout,
            head=head,
            make_vocab_size_divisible_by=settings.model.make_vocab_size_divisible_by,
        )
        if settings.model.fp32_lm_head and head == "language_model":
            for model in models:
                widen_output_layer(model)
        if settings.model.init_value_head == "normal":
            start_value_head(models, settings.model.init_value_head_std, seed=settings.rank.seed)
        self.models = [model.to(self.device) for model in models]
        self.reference = None
        if settings.model.ref_folder is not None:
            self._load(settings.model.ref_folder)
        self.chunks = wrap_chunks(self.models, config, settings.execution)
        if settings.model.ref_folder is not None:
            self.reference = ReferenceWeights(self.chunks)
        if settings.model.ref_folder != settings.model.hf_folder and settings.model.checkpoint_folder is None:
            self._load(settings.model.hf_folder)
        self.optimizer = build_optimizer(
            self.chunks,
            settings.optimizer,
            bf16=dtype == torch.bfloat16,
            overlap_param_gather=settings.execution.overlap_param_gather,
        )
        self.memory = Offloader(self.chunks, self.optimizer)
        self.unfinished_save: UnfinishedSave | None = None
        if settings.model.checkpoint_folder is not None:
            self._load_checkpoint(settings.model.checkpoint_folder)
        if settings.starts_offloaded:
            self.memory.offload()

    def _load(self, folder: str) -> None:
        load_hf_weights(
            self.models,
            self.table,
            HfWeights(folder),
            layout=self.layout,
            source=folder,
            keeps_missing_head=self.settings.model.init_value_head is not None,
        )

    def _load_checkpoint(self, folder: str) -> None:
        keeps_missing_head = self.settings.model.init_value_head is not None
        load_checkpoint(self, folder, with_optimizer=False, keeps_missing_head=keeps_missing_head)

    def micro_batches(self, batch: RolloutBatch, rows: np.ndarray) -> list[MicroBatch]:
        """This rank's share of `rows`; every data-parallel rank gets equally many micro-batches.

        The token limit is of one rank, which under context parallelism holds its part of each sample.
        """
        cp_size, batching = self.layout.cp_size, self.settings.batch
        cp_map = CpMap(cp_size, batch.prompt_lens, batch.response_lens)
        by_flops = batching.balance_by == "flops"
        shares = split_rows(
            rows,
            cp_map.rank_lens,
            dp_size=self.layout.dp_size,
            micro_batch_size=batching.micro_batch_size,
            max_tokens=batching.max_tokens,
            costs=flop_costs(self.shape, cp_map.padded_lens, num_outputs=self.num_outputs) if by_flops else None,
            multiple_of=self.layout.micro_batch_multiple,
        )
        context = ContextRank(cp_size, self.cp_rank, context_parallel_group()) if cp_size > 1 else None
        multiple = self.layout.tp_size
        return [
            pack_micro_batch(batch, share, multiple=multiple, device=self.device, context=context) for share in shares[self.dp_rank]
        ]

    def columns(self, micro_batches: Sequence[MicroBatch], head: Head) -> ColumnPart:
        """A pass without gradients over this rank's micro-batches. Collective."""
        return forward_columns(self.chunks, micro_batches, head)

    def accumulate(self, micro_batches: Sequence[MicroBatch], loss: Loss, stats: Stats) -> None:
        """Gradients of one optimizer step, summed over data- and context-parallel ranks. Collective."""
        zero_gradients(self.chunks, self.optimizer)
        if self.load_balance is not None:
            self.load_balance.begin_step(micro_batches)
        forward_backward(self.chunks, micro_batches, loss)
        if self.load_balance is not None:
            stats.add_value("moe_aux_loss", self.load_balance.mean())

    def apply(self, lr: float) -> StepOutcome:
        """Clip and update. Collective."""
        return apply_gradients(self.optimizer, lr=lr, clip_grad=self.settings.optimizer.clip_grad)

    def run_plan(
        self, plan: StepPlan, batch: RolloutBatch, learning_rates: Sequence[float], run: Callable[[Step, float, Stats], bool]
    ) -> list[Stats]:
        """`run_steps`, after which the parameters are whole on every rank; statistics of the ranks that report. Collective."""
        results = run_steps(plan, batch, learning_rates, run)
        complete_parameters(self.chunks)
        return results if self.reports_tokens else [Stats() for _ in results]


def run_steps(
    plan: StepPlan, batch: RolloutBatch, learning_rates: Sequence[float], run: Callable[[Step, float, Stats], bool]
) -> list[Stats]:
    """Call `run(step, lr, stats)` for each planned step that has a trainable token of a sample that was not rejected, until it
    returns True.

    Skipped steps say so in their statistics, with early_stopped = 1 where `run` has asked for it; every step reports its
    learning rate and its number of trainable tokens.
    """
    results: list[Stats] = []
    stopped = False
    for step, lr in zip(plan.steps, learning_rates, strict=True):
        stats = Stats()
        trainable = int(batch.trainable_tokens[step.rows].sum())
        if stopped or not batch.kept_tokens[step.rows].any():
            stats.add_value("skipped", 1.0)
            stats.add_value("early_stopped", float(stopped))
        else:
            stopped = run(step, lr, stats)
        stats.add_value("lr", lr)
        stats.add_value("num_tokens", trainable)
        results.append(stats)
    return results


@dataclass(frozen=True)
class StepDenominator:
    """What the losses of one role are divided by in one step; `rows` are the step's samples, in the order of `whole`.

    Made from the whole step, rejected samples included, before it is cut into ranks and micro-batches (SEMANTICS 9).
    """

    whole: Denominator
    rows: np.ndarray

    @staticmethod
    def of(batch: RolloutBatch, step: Step, ppo: PpoConfig) -> "StepDenominator":
        whole = make_denominator(
            batch.trainable_tokens[step.rows],
            batch.trajectory_ids[step.rows],
            mode=ppo.reduction,
            length_norm=ppo.loss_length_norm,
        )
        return StepDenominator(whole, step.rows)

    def seen_by(self, micro_batch: MicroBatch) -> Denominator:
        """The step's denominator for the samples of one micro-batch."""
        order = np.argsort(self.rows)
        return self.whole.select(order[np.searchsorted(self.rows, micro_batch.rows, sorter=order)])

    def report(self, stats: Stats) -> None:
        """What the step was divided by, to its metrics."""
        for name, value in self.whole.metrics().items():
            stats.add_value(name, value)


def add_token_means(stats: Stats, mask: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
    """Add token averages over the trainable tokens of a micro-batch."""
    for name, value in values.items():
        stats.add_mean(name, *masked_sum(value, mask))


def together(make: Callable[[], Made]) -> Made:
    """What `make` returns here, once it has returned on every data- and context-parallel rank.

    Where it raises, its error goes on; the ranks where it did not raise EchoedError with the same text, so that none waits in
    the next collective for one that has left. Collective over those ranks.
    """
    group = token_parallel_group()
    try:
        made = make()
    except Exception as error:
        gather_objects(f"{type(error).__name__}: {error}", group)
        raise
    failed = [text for text in gather_objects("", group) if text]
    if failed:
        raise EchoedError(f"another data-parallel rank has stopped: {failed[0]}")
    return made


def require_finite_columns(batch: RolloutBatch, columns: Mapping[str, np.ndarray]) -> None:
    """NumericsError naming the sample when a per-token column is not finite at a trainable token, or a per-sample one of a
    sample that has any."""
    mask, lens = torch.tensor(batch.loss_mask), torch.tensor(batch.response_lens)
    for name, values in columns.items():
        if COLUMNS[name].per == "response_token":
            require_finite(torch.tensor(values), mask, lens, sample_ids=torch.tensor(batch.sample_ids), name=name)
            continue
        bad = np.flatnonzero(~np.isfinite(values) & (batch.trainable_tokens > 0))
        if len(bad):
            raise NumericsError(f"{name} of sample {batch.sample_ids[bad[0]]} is {values[bad[0]]}, expected a finite number")


class ReferenceWeights:
    """The frozen reference as host copies of the parameter buffers; no second model on the device.

    While swapped in no optimizer step and no export may run: in float32 the optimizer's parameters are views of the
    same buffers.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._buffers = [buffer.param_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]  # type: ignore[misc]
        self._host = [self._on_host(buffer) for buffer in self._buffers]
        self._policy = [torch.empty_like(copy) for copy in self._host]

    @staticmethod
    def _on_host(buffer: torch.Tensor) -> torch.Tensor:
        copy = buffer.detach().to("cpu", copy=True)
        return copy.pin_memory() if buffer.is_cuda else copy

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model computes with the reference weights inside, and has its own back, bit for bit, after."""
        for buffer, policy, reference in zip(self._buffers, self._policy, self._host, strict=True):
            policy.copy_(buffer)
            buffer.copy_(reference)
        try:
            yield
        finally:
            for buffer, policy in zip(self._buffers, self._policy, strict=True):
                buffer.copy_(policy)
