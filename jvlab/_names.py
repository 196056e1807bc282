"""Names of pools, labs, adapters and runs, which become parts of paths; of a model, this process, a lost replica."""

from __future__ import annotations

import os
import platform
import re

from jvlab._errors import ConfigError

LONGEST = 100  # characters: a log's file name is a little longer than its pool's
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST - 1}}}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_MADE = re.compile(r"-[0-9a-f]{12}$")  # what jv.models.tiny() ends a folder's name with
RULE = f"letters, digits, '.', '_' and '-', beginning with a letter or digit, at most {LONGEST} characters"


def check_name(what: str, name: object) -> str:
    """The name, if it is safe in a path, a header and a log; `what` says what it names.

    >>> check_name("pool", "demo-1")
    'demo-1'
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        shown = ascii(name)  # a name may hold what a terminal or an encoder chokes on
        raise ConfigError(
            f"the {what} name {shown if len(shown) <= 60 else shown[:60] + '…'} is not allowed",
            remedy=f"choose another: {RULE}",
            what=what,
            name=name,
        )
    return name


def model_words(model: str) -> str:
    """A model for people: without its folders, which differ from machine to machine, and without a made folder's hash.

    >>> model_words("/home/me/.cache/jvlab/trainer/models/llama-6de9e5c70c44/")
    'llama'
    """
    return _MADE.sub("", model.rstrip("/").rpartition("/")[2])


def check_replica(name: object) -> str:
    """A replica's name, "pool/number"."""
    pool, slash, number = name.partition("/") if isinstance(name, str) else ("", "", "")
    if not slash or _NUMBER.fullmatch(number) is None:
        raise ConfigError(
            f"the replica name {name!a} is not allowed",
            remedy="it is written POOL/NUMBER",
        )
    check_name("replica's pool", pool)
    return f"{pool}/{number}"


def own_name() -> str:
    """This process, as others are told of it: "python 4711 on host"."""
    return f"python {os.getpid()} on {platform.node()}"


class LostNote(str):
    """A note that a replica was lost, and which."""

    replica: str

    def __new__(cls, text: str, replica: str = "") -> LostNote:
        made = super().__new__(cls, text)
        made.replica = replica
        return made
