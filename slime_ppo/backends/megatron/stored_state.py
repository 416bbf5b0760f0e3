"""What of a role's state lies on this rank, as rectangles of the tensors that a checkpoint stores.

Weights are whole per tensor-parallel rank; the optimizer's main parameters and moments are flat ranges of them, one per data- and
context-parallel rank. A flat range of a matrix is up to three rectangles, so each rank writes and reads its own numbers, in
place: nothing is gathered, and no rank holds more than it trains.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer

from slime_ppo.backends.megatron.model import converted_parameters, split_place
from slime_ppo.backends.megatron.torch_dist_io import Piece
from slime_ppo.conversion.mapping import Rule, Split
from slime_ppo.conversion.table import ConversionTable
from slime_ppo.conversion.torch_dist import OPTIMIZER_PREFIX, Place, is_tied_copy, place_of
from slime_ppo.parallel.layout import ParallelLayout

MAIN, MOMENTS = "param", ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StoredParameter:
    """A parameter of this rank. `writes`: of the ranks that have the same numbers this one puts them into a checkpoint;
    `writes_weight`: also among data-parallel ranks, which take turns."""

    parameter: torch.nn.Parameter
    place: Place
    writes: bool
    writes_weight: bool


def stored_parameters(models: Sequence[GPTModel], table: ConversionTable, layout: ParallelLayout) -> list[StoredParameter]:
    """All parameters of this rank, in the order of the model."""
    found = []
    for number, (rule, parameter) in enumerate(converted_parameters(models, table, layout)):
        size, rank = split_place(rule)
        place = place_of(rule, table, tuple(parameter.shape), size=size, rank=rank)
        writes = not is_tied_copy(rule, table) and (rule.split is not Split.REPLICATED or rank == 0)
        replicas = _replicas(rule)
        found.append(StoredParameter(parameter, place, writes, writes and number % replicas.size() == replicas.rank()))
    return found


def _replicas(rule: Rule) -> torch.distributed.ProcessGroup:
    """The ranks that hold the same part of the rule's parameter and share its optimizer state."""
    group: torch.distributed.ProcessGroup = (
        parallel_state.get_expert_data_parallel_group()
        if rule.per_expert
        else parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    return group


def weight_pieces(stored: StoredParameter) -> Iterator[Piece]:
    """The parameter itself; the tensors are views."""
    yield from _pieces(stored.place, stored.place.key, stored.parameter.data.view(-1), 0)


@dataclass(frozen=True)
class OptimizerShard:
    """Elements `start` ... of a parameter, which this rank updates: `main` [n] float32, and where the moments are, or will be."""

    stored: StoredParameter
    start: int
    main: torch.Tensor
    part: DistributedOptimizer

    def pieces(self) -> Iterator[Piece]:
        """Main parameter and moments; the tensors are views. Moments that do not exist yet are left out."""
        state = self.part.optimizer.state.get(self.main, {})
        yield from self._named({MAIN: self.main.data} | {name: state[name] for name in MOMENTS if name in state})

    def expected_pieces(self, *, with_moments: bool) -> Iterator[Piece]:
        """The same without numbers, and without a look at what the optimizer has now."""
        empty = torch.empty_like(self.main, device="meta")
        yield from self._named(dict.fromkeys((MAIN, *MOMENTS) if with_moments else (MAIN,), empty))

    def _named(self, flats: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
        for name, flat in flats.items():
            key = f"{OPTIMIZER_PREFIX}{name}.{self.stored.place.key}"
            yield from _pieces(self.stored.place, key, flat.view(-1), self.start)


def optimizer_shards(optimizer: ChainedOptimizer, stored: Sequence[StoredParameter]) -> list[OptimizerShard]:
    """Everything that this rank updates."""
    by_parameter = {id(one.parameter): one for one in stored}
    shards = []
    for part in optimizer.chained_optimizers:
        starts = _starts(part)
        for parameter, main in _main_parameters(part):
            shards.append(OptimizerShard(by_parameter[id(parameter)], starts[id(parameter)], main, part))
    return shards


def _main_parameters(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Each parameter of which this rank updates a range, and that range in float32.

    Not by `model_param_group_index_map`: in a group with parameters of both types (a bfloat16 critic, whose head is float32) it
    numbers them in another order than the optimizer has them, for which Megatron (0.16 to 0.19) can neither save nor load their
    states.
    """
    of_bf16, of_fp32 = part.shard_fp32_from_float16_groups, part.shard_fp32_groups
    for groups, shards in ((part.model_float16_groups, of_bf16), (part.model_fp32_groups, of_fp32)):
        for parameters, mains in zip(groups, shards, strict=True):
            yield from zip(parameters, mains, strict=True)


def _starts(part: DistributedOptimizer) -> dict[int, int]:
    """The first element that this rank updates, by the id of the parameter."""
    ranges = [of_bucket["param_map"] for of_buffer in part.gbuf_ranges for of_dtype in of_buffer.values() for of_bucket in of_dtype]
    return {id(parameter): found["param"].start for of_bucket in ranges for parameter, found in of_bucket.items()}


def _pieces(place: Place, key: str, flat: torch.Tensor, start: int) -> Iterator[Piece]:
    """`flat` [n], elements `start` ... of the flattened parameter, cut into rectangles."""
    for one in place.rectangles(start, start + len(flat)):
        size = torch.Size(one.sizes)
        at = one.flat_start - start
        yield Piece(key, place.whole, one.offsets, flat[at : at + size.numel()].view(size), place.of_vocabulary)


def steps_done(optimizer: ChainedOptimizer) -> int:
    """Adam's count of updates on this rank; 0 where it updates nothing, or has not yet."""
    counts = [int(group["step"]) for part in optimizer.chained_optimizers for group in part.param_groups if "step" in group]
    # torch's own Adam counts for every parameter
    counts += [
        int(state["step"]) for part in optimizer.chained_optimizers for state in part.optimizer.state.values() if "step" in state
    ]
    return max(counts, default=0)


def set_steps_done(optimizer: ChainedOptimizer, steps: int) -> None:
    """Give Adam moments, of zeros, and its count; with 0 it is as before its first step."""
    for part in optimizer.chained_optimizers:
        adam = part.optimizer
        per_parameter = isinstance(adam, torch.optim.Adam)
        adam.state.clear()
        for group in adam.param_groups:
            group.pop("step", None)
            if not steps:
                continue
            if not per_parameter:
                group["step"] = steps
            for parameter in group["params"]:
                adam.state[parameter] = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in MOMENTS}
                if per_parameter:
                    adam.state[parameter]["step"] = torch.tensor(float(steps))
