"""A digest of all that a model holds, also in a worker of a live engine."""

from __future__ import annotations

import hashlib

import torch

from jvlab.engine.worker._extension import WorkerExtension


def model_digest(model: torch.nn.Module) -> str:
    """A digest of every parameter and buffer: names, shapes, strides, dtypes, and values where they are not on meta."""
    state = hashlib.sha256()
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, t in named:
        state.update(
            repr(
                (
                    name,
                    type(t).__name__,
                    tuple(t.shape),
                    t.stride(),
                    t.dtype,
                    t.device.type,
                )
            ).encode()
        )
        if not t.is_meta:
            state.update(
                t.detach()
                .contiguous()
                .reshape(-1)
                .view(torch.uint8)
                .cpu()
                .numpy()
                .tobytes()
            )
    return state.hexdigest()


class Extension(WorkerExtension):
    """With a call that digests the live model."""

    def jv_digest(self) -> str:
        return model_digest(self.get_model())
