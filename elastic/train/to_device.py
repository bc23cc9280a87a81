"""Tensors inside tuples, lists and dicts end up on the run's device; everything else is passed through as it is."""

from typing import Any

import torch
from torch import Tensor


def on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(on_device(item, device) for item in value)
    if isinstance(value, dict):
        return {name: on_device(item, device) for name, item in value.items()}
    return value
