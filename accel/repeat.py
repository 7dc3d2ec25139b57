"""Decode steps that repeat: a swapped callable keeps those that it was admitted for, and serves their like at once.

A model feeds the same shapes to the same callable in every step. The next step of a kind is recognised by its metadata
(`accel.ops.plans`) and goes from its adapter's `again` straight to the launch, past the reading of arguments, admission
and plan. Whatever differs, and every doubt, takes the whole way through `dispatch.run`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from accel import cpu, environment
from accel.call import UpdateCall, is_one_token
from accel.environment import DeviceFacts
from accel.ops import plans
from accel.routes import Route, failed, profiling, record
from accel.tracing import observed

MAX_STEPS = 8  # kept of one callable


class Step(NamedTuple):
    """A step that was served: guards of its tensors, what else must be the same, and what it came to.

    `launch(x, state, weight, bias, residual, y, indices, pad_slot_id, status)` fills y and shifts the state.
    """

    guards: Any
    activation: str | None
    no_bias: bool
    grad: bool  # gradients were enabled
    facts: DeviceFacts
    route: Route
    launch: Callable


class Steps:
    """The kept steps of one swapped callable, the newest first."""

    def __init__(self) -> None:
        self.kept: tuple[Step, ...] = ()

    def serve(
        self, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor | None:
        """y of a step like a kept one, recorded; None, and nothing done, where it is like none."""
        for step in self.kept:
            known = step.activation
            if known is not activation and (type(activation) is not str or known != activation):
                continue
            no_bias = step.no_bias
            if (
                no_bias is (bias is None)
                and plans.fits(step.guards, (x, state, weight) if no_bias else (x, state, weight, bias))
                and step.grad is is_grad_enabled()
                and step.facts is environment.facts(x.device)
                and not profiling()
            ):
                break
        else:
            return None
        _, _, _, _, facts, route, launch = step
        record(route)
        status = facts.status
        try:
            status.raise_pending()
            y = torch.empty_like(x, memory_format=torch.contiguous_format)
            launch(x, state, weight, bias, None, y, None, -1, status.address)
        except Exception as error:
            failed(route, error)
            raise
        return y

    def keep(self, call: UpdateCall, facts: DeviceFacts, plan: Callable | None, route: Route) -> None:
        """Keep a call that was just served, if it is a step of one token with nothing but a state and maybe a bias."""
        x, form, state, weight, bias, residual, activation, _, indices, *_ = call
        plain = is_one_token(call) and state is not None and residual is None and indices is None
        if not plain or not x.numel() or observed(x) or profiling():
            return
        tensors = (x, state, weight) if bias is None else (x, state, weight, bias)
        guards = plans.guards_of(tensors)
        if guards is None or not plans.fits(guards, tensors):
            return
        launch = on_cpu(form, activation, facts) if plan is None else plans.bare(plan)
        step = Step(guards, activation, bias is None, is_grad_enabled(), facts, route, launch)
        self.kept = (step, *self.kept)[:MAX_STEPS]


def on_cpu(form: str, activation: str | None, facts: DeviceFacts) -> Callable:
    """What stands for a launch on the CPU backend."""

    def launch(x, state, weight, bias, residual, y, indices, pad_slot_id, status) -> None:
        call = UpdateCall(x, form, state, weight, bias, residual, activation, None, indices, pad_slot_id)
        cpu.update(call, y, facts.status)

    return launch
