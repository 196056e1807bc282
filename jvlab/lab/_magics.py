"""IPython's `%jv` and `%%rollout`, after `%load_ext jvlab`: shortcuts for the objects in the notebook."""

from __future__ import annotations

import ast
import difflib
import shlex
from html import escape
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from jvlab._errors import ConfigError
from jvlab._files import Plain

HELP = """%jv status                      every lab, pool and link in this notebook, asked now
%jv sync [params] [mode=staged] bring parameters into the engines by the one link; default: the one policy's
%jv bisect PROMPT               engine and trainer disagree on it: why?
%jv help                        this

%%rollout [pool] [n=2] [max_tokens=16] [temperature=0.7] [-o NAME]
one prompt per line             completions below, as a RolloutBatch; -o also keeps it under a name

A word is taken for a variable where one of that name exists; elsewhere name=value, as in Python."""
COMMANDS = ("status", "sync", "bisect", "help")


class MagicError(ConfigError):
    """A magic was used wrongly; IPython shows message and remedy, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@magics_class
class JvMagics(Magics):
    """What `%load_ext jvlab` adds."""

    @line_magic
    def jv(self, line: str) -> Any:
        """%jv status | sync | bisect | help"""
        command, _, rest = line.strip().partition(" ")
        match command:
            case "status":
                return self._status()
            case "sync":
                return self._sync(rest)
            case "bisect":
                return self._bisect(rest)
            case "" | "help":
                print(HELP)
                return None
        close = difflib.get_close_matches(command, COMMANDS, 1)
        hint = (
            f"did you mean %jv {close[0]}?"
            if close
            else f"one of {', '.join(COMMANDS)}"
        )
        raise MagicError(f"%jv has no command {command!r}", remedy=hint)

    @cell_magic
    def rollout(self, line: str, cell: str) -> Any:
        """%%rollout [pool] [n=2] [max_tokens=16] ... with one prompt per line of the cell."""
        words, options, keep = _parse(line)
        prompts = [text for text in cell.splitlines() if text.strip()]
        if not prompts:
            raise MagicError(
                "%%rollout has no prompts", remedy="write one per line, below the first"
            )
        if len(words) > 1:
            raise MagicError(
                f"%%rollout takes one pool, not {words}",
                remedy="settings are written name=value",
            )
        pool = self._named(words[0], "Pool") if words else self._pool()
        batch = pool.generate(prompts, **options)
        if keep:
            self._namespace[keep] = batch
        return batch

    # Finding ------------------------------------------------------------------------------------------------------

    @property
    def _namespace(self) -> Plain:
        shell = self.shell
        assert shell is not None  # magics always have one
        return shell.user_ns

    def _every(self, kind: str) -> Plain:
        """Variable -> object of that kind, each object once, without IPython's own names (_, _1)."""
        wanted = _kind(kind)
        seen = set()
        out = {}
        for name, value in list(self._namespace.items()):
            if (
                not name.startswith("_")
                and isinstance(value, wanted)
                and id(value) not in seen
            ):
                seen.add(id(value))
                out[name] = value
        return out

    def _one(self, kind: str, make: str, say: str) -> Any:
        found = self._every(kind)
        if not found:
            raise MagicError(f"there is no {kind} in this notebook", remedy=make)
        if len(found) > 1:
            raise MagicError(
                f"there are {len(found)} of the kind {kind}: {', '.join(sorted(found))}",
                remedy=f"say which: {say}",
            )
        return next(iter(found.values()))

    def _pool(self) -> Any:
        if not self._every("Pool"):
            pools = [
                pool
                for lab in self._every("Lab").values()
                for pool in lab.known_pools.values()
            ]
            if len(pools) == 1:
                return pools[0]
        return self._one("Pool", "pool = jv.Lab().launch(model)", "%%rollout NAME n=2")

    def _named(self, name: str, kind: str) -> Any:
        value = self._namespace.get(name)
        if not isinstance(value, _kind(kind)):
            known = ", ".join(sorted(self._every(kind))) or "none"
            raise MagicError(
                f"{name!r} is not a {kind} of this notebook",
                remedy=f"there are: {known}",
            )
        return value

    # Commands -----------------------------------------------------------------------------------------------------

    def _status(self) -> None:
        from IPython.display import display

        labs, pools, links = (self._every(kind) for kind in ("Lab", "Pool", "Link"))
        if not (labs or pools or links):
            raise MagicError(
                "there is no Lab, Pool or Link in this notebook",
                remedy="lab = jv.Lab()",
            )
        for pool in pools.values():
            if not pool.snapshot.closed:
                pool.status()  # refreshes the snapshot that is shown below
        found = {**labs, **pools, **links}
        text = "\n".join(f"{name}: {value!r}" for name, value in found.items())
        page = "".join(
            f'<div style="margin:4px 0"><code>{escape(name)}</code>{value._repr_html_()}</div>'
            for name, value in {**pools, **links}.items()
        )
        lines = "".join(
            f"<div><code>{escape(n)}</code>: {escape(repr(v))}</div>"
            for n, v in labs.items()
        )
        display(
            {"text/plain": text, "text/html": f"<div>{lines}{page}</div>"}, raw=True
        )

    def _sync(self, rest: str) -> Any:
        words, options, _ = _parse(rest)
        link = self._one(
            "Link", "link = lab.connect(policy.params, pool)", "link.sync(params)"
        )
        if len(words) > 1:
            raise MagicError(
                f"%jv sync takes one expression, not {words}",
                remedy="%jv sync policy.params",
            )
        if not words:
            policy = self._one(
                "Policy", "%jv sync NAME, or make a jv.Policy", "%jv sync NAME.params"
            )
            return link.sync(policy.params, **options)
        shell = self.shell
        assert shell is not None
        value = shell.ev(words[0])
        return link.sync(
            value.params if isinstance(value, _kind("Policy")) else value, **options
        )

    def _bisect(self, prompt: str) -> Any:
        if not prompt.strip():
            raise MagicError(
                "%jv bisect needs a prompt", remedy="%jv bisect Once upon a time"
            )
        link = self._one(
            "Link", "link = lab.connect(policy.params, pool)", "link.bisect(prompt)"
        )
        policies = self._every("Policy")
        return link.bisect(
            prompt.strip(),
            next(iter(policies.values())) if len(policies) == 1 else None,
        )


def _kind(name: str) -> type:
    import jvlab

    return getattr(jvlab, name)


def _parse(line: str) -> tuple[list[str], Plain, str]:
    """(words, name=value pairs, the name after -o); values are Python literals, or else text."""
    try:
        parts = shlex.split(line, posix=True)
    except ValueError as error:
        raise MagicError(
            f"{line!r}: {error}", remedy="close the quotation mark"
        ) from error
    words: list[str] = []
    options: Plain = {}
    keep = ""
    while parts:
        part = parts.pop(0)
        name, equals, value = part.partition("=")
        if part == "-o":
            if not parts or not parts[0].isidentifier():
                raise MagicError(
                    "-o needs a name to keep the batch under",
                    remedy="%%rollout -o batch",
                )
            keep = parts.pop(0)
        elif equals and name.isidentifier():
            try:
                options[name] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                options[name] = value
        else:
            words.append(part)
    return words, options, keep


def load(shell: Any) -> None:
    """Register the magics."""
    shell.register_magics(JvMagics(shell))
