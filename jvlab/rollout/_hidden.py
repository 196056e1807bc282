"""Hidden states of a live engine: hooks on its decoder layers while one sequence is scored, for `link.bisect`.

They travel as `peek` of three made-up names, one call each, so that nothing new crosses the wire:

    @hidden/listen    hooks on; answers the number of layers, as text
    @hidden/<i>       float32 rows [tokens, width] that layer i has given since
    @hidden/end       hooks off, rows dropped
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jvlab._errors import Unsupported

MARK = "@hidden/"
ROWS = 1 << 16  # a listener that nobody ends must not fill the memory


class Listener:
    """Keeps what each layer of a model gives."""

    def __init__(self, model: Any) -> None:
        self._layers = decoder_layers(model)
        self._rows: list[list[Any]] = [[] for _ in self._layers]
        self._count = 0
        self._hooks = [layer.register_forward_hook(partial(self._heard, i)) for i, layer in enumerate(self._layers)]

    def __len__(self) -> int:
        return len(self._layers)

    def _heard(self, index: int, _module: Any, _inputs: Any, output: Any) -> None:
        if self._count > ROWS * len(self._layers):
            return
        states, *rest = output if isinstance(output, tuple) else (output,)
        if rest and rest[0] is not None:  # vLLM adds a layer's output to the residual in the next layer's norm
            states = states + rest[0]
        self._count += len(states)
        self._rows[index].append(states.detach().float().cpu())

    def rows(self, index: int) -> bytes:
        import torch

        kept = self._rows[index]
        return torch.cat(kept).contiguous().numpy().tobytes() if kept else b""

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._rows = [[] for _ in self._layers]


def decoder_layers(model: Any) -> list[Any]:
    """The layers of the decoder: the one list of modules that is called `layers` (gpt2: `h`)."""
    import torch

    lists = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList)}
    found = [m for n, m in lists.items() if n.rpartition(".")[2] in ("layers", "h")]
    if len(found) != 1:
        raise Unsupported(
            f"{len(found)} lists of layers in this model ({', '.join(lists) or 'no list at all'})",
            remedy="hidden states can be had of plain decoders only",
        )
    return list(found[0])


def answer(listener: Listener | None, model: Any, name: str) -> tuple[Listener | None, bytes]:
    """One of the made-up names: the listener from now on, and what is told."""
    what = name.removeprefix(MARK)
    if what == "listen":
        if listener is not None:
            listener.end()
        listener = Listener(model)
        return listener, str(len(listener)).encode()
    if listener is None:
        raise Unsupported("nobody listens to this model", remedy="pool.hidden(token_ids) does it all")
    if what == "end":
        listener.end()
        return None, b""
    return listener, listener.rows(int(what))
