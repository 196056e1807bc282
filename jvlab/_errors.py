"""The exception tree: every error jvlab raises on purpose.

JvlabError
├── ConfigError            an argument, file or setting is wrong (nothing was started or changed)
│   ├── ModelError         a model path, family or checkpoint is unusable
│   ├── RewardError        a reward function fails for every sample; shows its own lines
│   ├── UnknownName        no pool, task or attribute has that name; lists those that there are
│   └── SamplingError      a prompt or sampling parameter is wrong
│       └── LimitExceeded  one call asks for more than the pool allows; names the limit
├── MissingDependency      an optional package is needed here; the message says what to install
├── Unsupported            this device or engine cannot do that; the message says what can
├── LayoutError            trainer and engine do not fit together
│   ├── RuleError          a rule is malformed; points at the character
│   ├── MatchError         rules="auto" found no match, or more than one
│   ├── TraceError         vLLM's loader could not be traced
│   ├── CoverageError      the plan would leave gaps, overlaps or mismatches; lists all of them
│   └── MeaningError       everything is covered, but numbers would mean something else; names the leaves
├── ControlError           the control plane refused or failed
│   ├── AuthError          wrong or missing token
│   ├── GatewayUnreachable the gateway does not answer
│   ├── DeadlineExceeded   an operation ran past its deadline; names who was waited for
│   ├── MessageTooLarge    a request or reply is over the limit
│   └── LabNotFound        attach() found no lab, or several; lists them
├── SyncError              a weight sync did not commit; says which state each engine is in
│   ├── VerifyError        digests differ: the engine does not hold the trainer's bits; names the tensors
│   ├── NonFiniteError     NaN or Inf among the parameters, or made by the cast to the engine's dtype; names the leaves
│   ├── LinkBusy           another trainer holds the pool, or publishes into the folder; names it
│   ├── SyncDeadline       a sync or a check ran past its deadline (also a DeadlineExceeded); names who was waited for
│   ├── TransportError     weights did not reach the engine: a dead peer, a deadline, a full disk
│   └── EngineDirty        an engine refuses to generate until a sync commits
├── DeviceMemoryError      the trainer's device has no memory left; names who holds it
├── StorageError           a folder or bucket cannot be written, or read: a full disk, a damaged version
├── LaunchError            a rollout process did not start; carries the engine's last log lines
├── ReplicaLost            a replica died and its work could not be finished elsewhere
└── TrainerLost            a process of a trainer of several died, fell silent or gave up; names it

Each says what to do next, and holds what it is about:

>>> try:
...     jv.tasks.named("gsm8k")
... except jv.errors.UnknownName as error:
...     print(error.remedy)
...     print(error.fields["name"])
there are: add, digits, guess-number, repeat-letter, sort-digits; jv.tasks.jsonl(path) reads a file
gsm8k

In a notebook an error shows your own lines and its message; `%tb Verbose` shows everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from jvlab import _tracebacks

__all__ = [
    "AuthError",
    "ConfigError",
    "ControlError",
    "CoverageError",
    "DeadlineExceeded",
    "DeviceMemoryError",
    "EngineDirty",
    "GatewayUnreachable",
    "JvlabError",
    "LabNotFound",
    "LaunchError",
    "LayoutError",
    "LimitExceeded",
    "LinkBusy",
    "MatchError",
    "MeaningError",
    "MessageTooLarge",
    "MissingDependency",
    "ModelError",
    "NonFiniteError",
    "ReplicaLost",
    "RewardError",
    "RuleError",
    "SamplingError",
    "StorageError",
    "SyncDeadline",
    "SyncError",
    "TraceError",
    "TrainerLost",
    "TransportError",
    "UnknownName",
    "Unsupported",
    "VerifyError",
]


def module_names(
    module: str, names: Sequence[str], what: str, instead: str | Callable[[str], str]
) -> tuple[Callable[[], list[str]], Callable[[str], object]]:
    """`__dir__` and `__getattr__` of a public module: its names alone are listed, another is an UnknownName.

    `what` and `instead` as for `UnknownName.of`; `instead` may depend on the name.
    """

    def missing(name: str) -> object:
        # modules of a package that are not loaded yet, and Python's own questions
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise UnknownName.of(
            what, name, names, instead if isinstance(instead, str) else instead(name)
        )

    return lambda: sorted(names), missing


if not TYPE_CHECKING:  # a type checker knows the names by itself
    __dir__, __getattr__ = module_names(
        __name__, __all__, "error", "help(jv.errors) draws the tree"
    )


class JvlabError(Exception):
    """Root of every error jvlab raises on purpose. `remedy` says what to do next.

    >>> try:
    ...     jv.models.tiny("no-such-family")
    ... except jv.JvlabError as error:
    ...     print(error.remedy)
    there are: llama, qwen2, ...
    """

    def __init__(self, message: str, *, remedy: str = "", **fields: object) -> None:
        self.message = message
        self.remedy = remedy
        self.fields = fields
        super().__init__(f"{message}\n  → {remedy}" if remedy else message)

    def _render_traceback_(self) -> list[str]:
        """What IPython prints."""
        return _tracebacks.render(self)


class ConfigError(JvlabError, ValueError):
    """An argument, file or setting is wrong; nothing was started or changed."""


class ModelError(ConfigError):
    """A model path, family or checkpoint is unusable."""


class UnknownName(ConfigError, KeyError, AttributeError):
    """Nothing has that name; `fields["known"]` lists what there is. Also a KeyError and an AttributeError, so that
    `in`, `get`, `hasattr` and `getattr` with a default work as they do for any mapping or module.

    >>> try:
    ...     jv.Polcy
    ... except jv.errors.UnknownName as error:
    ...     print(error)
    no name of jvlab is called 'Polcy'
      → did you mean 'Policy'? help(jv) lists all
    """

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError's own would be quoted

    @classmethod
    def of(
        cls, what: str, name: object, known: Iterable[str], instead: str = ""
    ) -> UnknownName:
        """`what` is the kind of thing ("pool"), `instead` what else could be done."""
        import difflib

        listed = sorted(known)
        close = difflib.get_close_matches(str(name), listed, 1, 0.6)
        hint = (
            f"did you mean {close[0]!r}?"
            if close
            else f"there are: {', '.join(listed) or 'none'}"
        )
        remedy = f"{hint}{' ' if close else '; '}{instead}" if instead else hint
        return cls(
            f"no {what} is called {name!r}", remedy=remedy, name=name, known=listed
        )


class RewardError(ConfigError):
    """A reward function, or an environment, fails for every sample. `fields` hold the `kind` of the failure ("raised",
    "timeout", "died", "not a number"), how many `failed`, and the `traceback` of the user's own lines.
    """


class SamplingError(ConfigError):
    """A prompt or a sampling parameter is wrong."""


class LimitExceeded(SamplingError):
    """One call asks for more than the pool allows; `fields` hold the limit's `name`, the `limit`, what was `asked`."""


class MissingDependency(JvlabError, ImportError):
    """An optional package is needed here."""


class Unsupported(JvlabError):
    """This device or engine cannot do that."""


class LayoutError(JvlabError):
    """Trainer and engine do not fit together."""


class RuleError(LayoutError, ValueError):
    """A rule is malformed; the message points at the character."""


class MatchError(LayoutError):
    """No match, or more than one, between a JAX leaf and the checkpoint."""


class TraceError(LayoutError):
    """vLLM's loader could not be traced."""


class CoverageError(LayoutError):
    """The plan would leave gaps, overlaps or mismatches; `problems` lists all of them."""

    @property
    def problems(self) -> tuple[str, ...]:
        return _texts(self.fields.get("problems"))


class MeaningError(LayoutError):
    """A mapping covers everything and puts numbers in the wrong places; `leaves` names those where it was seen."""

    @property
    def leaves(self) -> tuple[str, ...]:
        return _texts(self.fields.get("leaves"))


def _texts(found: object) -> tuple[str, ...]:
    return tuple(map(str, found)) if isinstance(found, (list, tuple)) else ()


class ControlError(JvlabError):
    """The control plane refused or failed."""


class AuthError(ControlError):
    """Wrong or missing token."""


class GatewayUnreachable(ControlError):
    """The gateway does not answer."""


class DeadlineExceeded(ControlError, TimeoutError):
    """An operation ran past its deadline; the message names who was waited for."""


class MessageTooLarge(ControlError):
    """A request or a reply is over the message limit."""


class LabNotFound(ControlError):
    """`attach()` found no lab to rejoin, or several; `fields["labs"]` lists the labs found."""


class SyncError(JvlabError):
    """A weight sync did not commit; once it has begun, `fields["outcomes"]` says which state each replica is in."""


class VerifyError(SyncError):
    """Digests differ: an engine does not hold the trainer's bits."""


class NonFiniteError(SyncError):
    """Parameters are NaN or Inf where the engine would hold them; `fields["leaves"]` names them, with counts."""


class LinkBusy(SyncError):
    """Another trainer holds the pool, or publishes into the folder."""


class SyncDeadline(SyncError, DeadlineExceeded):
    """A sync, a check or a connect ran past its deadline; the message names who was waited for."""


class TransportError(SyncError):
    """Weights did not reach the engine: a dead peer, a deadline, a full disk."""


class EngineDirty(SyncError):
    """An engine holds parts of two versions and refuses to generate until a sync commits."""


class DeviceMemoryError(JvlabError, MemoryError):
    """A device has no memory left for the trainer; `fields["holders"]` has the processes that hold it, if known."""


class StorageError(JvlabError, OSError):
    """A record, a checkpoint or a version of weights cannot be written or read. `fields` hold the `path`, or the
    `version` and `why`; what was written before is kept.
    """


class LaunchError(JvlabError):
    """A rollout process did not start; `log` holds the engine's last lines."""


class ReplicaLost(JvlabError):
    """A replica died and its work could not be finished elsewhere."""


class TrainerLost(JvlabError):
    """A process of a trainer of several died, fell silent or gave up; the message names it."""
