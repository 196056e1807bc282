"""Hidden states of a live engine: hooks on its decoder layers while one sequence is scored, for `link.bisect`."""

from __future__ import annotations

from functools import partial
from typing import Any

from jvlab._errors import Unsupported

MAX_ROWS = 1 << 16  # per layer, so that forgotten hooks do not fill the memory


class HiddenStates:
    """Records the output of each decoder layer."""

    def __init__(self, model: Any) -> None:
        self._layers = decoder_layers(model)
        self._rows: list[list[Any]] = [[] for _ in self._layers]
        self._count = 0
        self._hooks = [layer.register_forward_hook(partial(self._keep, i)) for i, layer in enumerate(self._layers)]

    def __len__(self) -> int:
        return len(self._layers)

    def _keep(self, index: int, _module: Any, _inputs: Any, output: Any) -> None:
        if self._count > MAX_ROWS * len(self._layers):
            return
        states, *rest = output if isinstance(output, tuple) else (output,)
        if rest and rest[0] is not None:  # vLLM adds a layer's output to the residual in the next layer's norm
            states = states + rest[0]
        self._count += len(states)
        self._rows[index].append(states.detach().float().cpu())

    def rows(self, index: int) -> bytes:
        """The layer's output so far, float32 [tokens, width]."""
        import torch

        kept = self._rows[index]
        return torch.cat(kept).contiguous().numpy().tobytes() if kept else b""

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._rows = [[] for _ in self._layers]


def decoder_layers(model: Any) -> list[Any]:
    """The decoder's layers: the only module list called `layers` (gpt2: `h`)."""
    import torch

    lists = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList)}
    found = [m for n, m in lists.items() if n.rpartition(".")[2] in ("layers", "h")]
    if len(found) != 1:
        raise Unsupported(
            f"{len(found)} lists of layers in this model ({', '.join(lists) or 'no list at all'})",
            remedy="only plain decoders have hidden states to read",
        )
    return list(found[0])
