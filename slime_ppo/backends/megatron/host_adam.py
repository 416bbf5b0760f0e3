"""Adam on the host with the state layout of the fused GPU Adam: the step count lives in the parameter group."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam


class HostAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015) with decoupled weight decay (Loshchilov & Hutter 2019) when `adam_w_mode`."""

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **_: Any,  # options of the fused kernel (master weights, capturable) have no meaning here
    ) -> None:
        if not bias_correction:
            raise ValueError("HostAdam always corrects the bias of its moments")
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("HostAdam takes no closure")
        for group in self.param_groups:
            steps_before = group.setdefault("step", 0)
            group["step"] = steps_before + 1
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            if not params:
                continue
            adam(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                [torch.tensor(float(steps_before)) for _ in params],
                foreach=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                decoupled_weight_decay=self.adam_w_mode,
            )
