"""A student whose layers pass their outputs to losses, together with the teacher's outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from modelopt.torch import opt
from modelopt.torch.distill import loss_balancers
from modelopt.torch.distill.loss_balancers import DistillationLossBalancer

__all__ = ["DistillationLossBalancer", "DistillationModel", "convert", "loss_balancers"]


class DistillationModel(torch.nn.Module):
    """A base of the classes that `convert` gives to students."""

    def _begin(self, teacher: Any, criterion: Mapping[tuple[str, str], Any], loss_balancer: Any) -> None:
        self._loss_balancer, self._only_student_fwd = loss_balancer, False
        self._layers_to_loss = {
            (self.get_submodule(of_student), teacher.get_submodule(of_teacher)): loss
            for (of_student, of_teacher), loss in criterion.items()
        }
        self._teacher_model = teacher.requires_grad_(False)
        self._loss_modules = torch.nn.ModuleList(
            loss for loss in self._layers_to_loss.values() if list(loss.parameters())
        )
        for pair in self._layers_to_loss:
            for layer in pair:
                layer.register_forward_hook(_keep_output)

    @property
    def teacher_model(self) -> Any:
        return self._teacher_model

    @contextlib.contextmanager
    def hide_teacher_model(self, enable: bool = True) -> Iterator[None]:
        teacher = self._teacher_model
        self._teacher_model = torch.nn.Module() if enable else teacher
        try:
            yield
        finally:
            self._teacher_model = teacher

    @contextlib.contextmanager
    def only_student_forward(self) -> Iterator[None]:
        self._only_student_fwd = True
        try:
            yield
        finally:
            self._only_student_fwd = False

    def state_dict(self, *args: Any, **options: Any) -> Any:
        with self.hide_teacher_model():
            return super().state_dict(*args, **options)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        with self.hide_teacher_model():
            return super().load_state_dict(*args, **options)

    def forward(self, *args: Any, **options: Any) -> Any:
        assert self._only_student_fwd  # the framework itself calls the teacher
        return super().forward(*args, **options)

    def compute_kd_loss(self, student_loss: torch.Tensor, loss_reduction_fn: Any) -> Any:
        losses = {loss_balancers.STUDENT_LOSS_KEY: student_loss}
        for number, (layers, loss) in enumerate(self._layers_to_loss.items()):
            outputs = [vars(layer).pop("_intermediate_output") for layer in layers]
            losses[f"{type(loss).__name__}_{number}"] = loss_reduction_fn(loss(*outputs))
        return self._loss_balancer(losses)


def _keep_output(layer: Any, _inputs: Any, output: Any) -> None:
    vars(layer)["_intermediate_output"] = output


def convert(model: Any, mode: Sequence[tuple[str, Mapping[str, Any]]]) -> Any:
    """Make `model` a student, whose class is a subclass of its own."""
    ((name, config),) = mode
    make, args, options = config["teacher_model"]
    teacher = make(*args, **options)
    model.__class__ = type(f"Distillation{type(model).__name__}", (DistillationModel, type(model)), {})
    model._begin(teacher, config["criterion"], config["loss_balancer"])
    is_new = not opt.ModeloptStateManager.is_converted(model)
    opt.ModeloptStateManager(model, init_state=is_new)._state.append((name, {"config": {}, "metadata": {}}))
    return model
