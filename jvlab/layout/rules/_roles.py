"""Templates of numbered names, and the role that each name implies (query, down, final norm, …)."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jvlab.layout._types import Shape
from jvlab.layout.rules._syntax import Index, Name, Part, name_text

_LAYER_WORDS = re.compile(
    r"((hidden_)?layers?|(res|decoder_?)?blocks?|blk|h|groups?|stages?|cells?)_?$"
)
_EXPERT_WORDS = re.compile(r"(experts?|local_experts?)_?$")
_DIGITS = re.compile(r"(\d+)")
_MODULE_NUMBER = re.compile(r"(?<=[A-Za-z_])\d+(?=[./])")
_LAYER_LEAVES = 4  # of a module that is a layer: attention and an MLP have more
_PARAM_WORDS = {
    "kernel",
    "weight",
    "w",
    "scale",
    "gamma",
    "embedding",
    "table",
    "value",
    "param",
    "weights",
    "g",
}
_BIAS_WORDS = {"bias", "b", "beta"}


@dataclass(frozen=True, eq=False)
class Template:
    """Names that differ in numbers only: the pieces between the numbers, and the member for each tuple of numbers."""

    pieces: tuple[str, ...]  # one more than there are slots
    kinds: tuple[str, ...]  # of each slot: "layer" or "expert"
    members: Mapping[Shape, str]
    shape: Shape

    def values(self, slot: int) -> frozenset[int]:
        """The numbers seen in a slot."""
        return frozenset(key[slot] for key in self.members)

    def name(self, variables: Sequence[str]) -> Name:
        """The template as a rule's name, with a capture for each slot."""
        parts: list[Part] = [self.pieces[0]] if self.pieces[0] else []
        for variable, piece in zip(variables, self.pieces[1:], strict=True):
            parts += [Index(((1, variable),)), *([piece] if piece else [])]
        return Name(tuple(parts))

    def variables(self) -> list[str]:
        """A capture name for each slot: `i` layers, `e` experts."""
        out: list[str] = []
        for kind in self.kinds:
            pool = "eabc" if kind == "expert" else "ijml"
            out.append(next(v for v in pool if v not in out))
        return out

    @functools.cached_property
    def segments(self) -> list[list[str]]:
        """The words of the name, without its numbers."""
        return words(".".join(p.strip("./") for p in self.pieces)) or [["?"]]

    @functools.cached_property
    def words(self) -> set[str]:
        return _flat(self.segments)

    @property
    def elements(self) -> int:
        """The elements of all members."""
        return math.prod(self.shape) * len(self.members)

    @property
    def last_segment(self) -> list[str]:
        """The words behind the last number's last dot: `kernel`; `?` if it ends in a number."""
        return words(self.pieces[-1].strip("./") or "?")[-1]

    def __str__(self) -> str:
        return name_text(self.name(self.variables()))


@dataclass(frozen=True)
class Role:
    """What a parameter is for; `base` "?" if its name does not say."""

    base: str
    bias: bool = False
    expert: bool = False  # one of many experts, or a stack of them
    shared: bool = False

    def __str__(self) -> str:
        words = _DESCRIPTIONS.get(self.base, self.base)
        who = ""
        if self.shared:
            who = "shared expert's "
        elif self.expert:
            who = "experts' "
        return f"the {who}{words}{' bias' if self.bias else ''}"


_DESCRIPTIONS = {
    "q": "query projection",
    "k": "key projection",
    "v": "value projection",
    "o": "attention output projection",
    "qkv": "fused query, key and value projection",
    "kv": "fused key and value projection",
    "gate": "gate projection",
    "up": "up projection",
    "down": "down projection",
    "gate_up": "fused gate and up projection",
    "router": "expert router",
    "embed": "token embedding",
    "pos": "position embedding",
    "head": "output head",
    "norm.final": "final norm",
    "norm.attn": "attention norm",
    "norm.mlp": "MLP norm",
    "norm.pre_attn": "norm before attention",
    "norm.post_attn": "norm after attention",
    "norm.pre_mlp": "norm before the MLP",
    "norm.post_mlp": "norm after the MLP",
    "norm.q": "query norm",
    "norm.k": "key norm",
}


# ---------------------------------------------------------------------------------------------------- templates


@functools.lru_cache(maxsize=4096)
def _slot_kinds(texts: tuple[str, ...]) -> tuple[str, ...]:
    """For each number between these texts: "layer" or "expert" if it is a slot, "" if it belongs to the name."""
    out = []
    for before, after in itertools.pairwise(texts):
        stem = re.split(r"[./]", before)[-1]
        whole = (stem != before or not out) and (not after or after[0] in "./")
        word = (stem or re.split(r"[./]", before.rstrip("./"))[-1]).lower()
        slot = whole and (
            not stem or _LAYER_WORDS.fullmatch(word) or _EXPERT_WORDS.fullmatch(word)
        )
        kind = "expert" if _EXPERT_WORDS.search(word) else "layer"
        out.append(kind if slot else "")
    return tuple(out)


def templates(shapes: Mapping[str, Shape]) -> list[Template]:
    """Groups names into templates. A number is a slot if it stands alone, ends a word such as `layer` or `block`, or
    ends the name of a module that is repeated: `Tower_0`, `Tower_1`, … with the same leaves.
    """
    repeated = _repeated(shapes)
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[Shape, str]] = (
        defaultdict(dict)
    )
    for name in shapes:
        texts = _DIGITS.split(name)
        pieces = [texts[0]]
        kinds = []
        key = []
        at = 0
        for kind, before, number, text in zip(
            _slot_kinds(tuple(texts[::2])),
            texts[::2],
            texts[1::2],
            texts[2::2],
            strict=False,
        ):
            at += len(before)
            kind = kind or (
                "layer" if name[:at] in repeated and text[:1] in ("", ".", "/") else ""
            )
            at += len(number)
            if kind and (number == "0" or number[0] != "0"):
                kinds.append(kind)
                key.append(int(number))
                pieces.append(text)
            else:
                pieces[-1] += number + text
        groups[tuple(pieces), tuple(kinds)][tuple(key)] = name
    out = []
    for (pieces, kinds), members in groups.items():
        first = next(iter(members.values()))
        out.append(Template(pieces, kinds, members, tuple(shapes[first])))
    return out


def _repeated(names: Iterable[str]) -> set[str]:
    """What stands before the number of a repeated module: `Tower_` of `Tower_0.x`, `Tower_1.x`, …

    Numbered from 0, each with the same leaves, and with enough of them to be a layer: `Dense_0` and `Dense_1` are not.
    """
    below: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        for found in _MODULE_NUMBER.finditer(name):
            below[name[: found.start()]][found[0]].add(name[found.end() :])
    out: set[str] = set()
    for prefix, modules in below.items():
        numbered = (
            set(modules) == set(map(str, range(len(modules)))) and len(modules) > 1
        )
        leaves = list(modules.values())
        outermost = not any(prefix.startswith(other) for other in out)
        if (
            numbered
            and outermost
            and len(leaves[0]) >= _LAYER_LEAVES
            and all(one == leaves[0] for one in leaves)
        ):
            out.add(prefix)
    return out


# ---------------------------------------------------------------------------------------------------- roles


def words(text: str) -> list[list[str]]:
    """A path as segments of lower-case words: `SelfAttention_0.q_proj` → [[self, attention, 0], [q, proj]]."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text)
    return [
        [w for w in s.lower().split("_") if w]
        for s in re.split(r"[./]", snake)
        if s.strip("_")
    ]


_ATTENTION = {"attn", "attention", "mha", "selfattn", "selfattention", "mixer"}
_MLP = {"mlp", "ffn", "ffw", "feedforward", "moe", "experts", "expert", "ff", "feed"}
_NORM = re.compile(r"(ln|norm|layernorm|rmsnorm|layer_norm|rms|lnorm)\d*$")
# (zone, role) → the words that name it
_ROLE_WORDS = {
    ("attn", "qkv"): "qkv wqkv",
    ("attn", "kv"): "kv wkv",
    ("attn", "q"): "q query queries wq",
    ("attn", "k"): "k key keys wk",
    ("attn", "v"): "v value values val wv",
    ("attn", "o"): "o out output wo dense proj vec merge",
    ("mlp", "router"): "router routing",
    ("mlp", "gate_up"): "gateup w13 gating",
    ("mlp", "gate"): "gate w1 wg",
    ("mlp", "up"): "up w3 fc fc1 wi wu linear1 in",
    ("mlp", "down"): "down w2 wo fc2 wd linear2 linear out output proj",
}
# whole segments whose words mislead
_PHRASES = {
    phrase: role
    for role, phrases in {
        "qkv": "c_attn query_key_value in_proj",
        "kv": "key_value",
        "gate": "wi_0",
        "up": "wi_1 h_to_4h dense_h_to_4h c_fc fc_in",
        "down": "dense_4h_to_h fc_out",
        "gate_up": "gate_up_proj gate_up",
    }.items()
    for phrase in phrases.split()
}


def split_param(segments: list[list[str]]) -> tuple[list[list[str]], bool]:
    """The path without its parameter word (`kernel`, `w`, `bias`, …), and whether it is a bias."""
    last = segments[-1]
    if len(last) == 1 and last[0] in _BIAS_WORDS:
        return segments[:-1], True
    if len(last) > 1 and last[-1] == "bias":
        return [*segments[:-1], last[:-1]], True
    if len(last) == 1 and last[0] in _PARAM_WORDS and len(segments) > 1:
        # `attn.value` is a projection, `x.value` a parameter's value: a projection has no projection above it
        if last[0] == "value" and not (
            _is_norm(segments[-2]) or _role(segments[:-1]) != "?"
        ):
            return segments, False
        return segments[:-1], False
    return segments, False


def _is_norm(segment: list[str]) -> bool:
    return any(_NORM.fullmatch(w) for w in segment)


def _flat(segments: Sequence[Sequence[str]]) -> set[str]:
    return {w for s in segments for w in s}


def _zone(segments: Sequence[Sequence[str]]) -> str:
    for segment in reversed(segments):
        if set(segment) & _ATTENTION or "attn" in "".join(segment):
            return "attn"
        if set(segment) & _MLP:
            return "mlp"
    return ""


def _role(segments: list[list[str]], inside: bool = False) -> str:
    """The role named by the last meaningful segment."""
    if not segments:
        return "?"
    everything = _flat(segments)
    # a `LayerNorm` is not a layer
    modules = _flat([s for s in segments if not _is_norm(s)])
    inside = (
        inside
        or bool(modules & {"layers", "layer", "blocks", "block", "h", "blk"})
        or _zone(segments) != ""
    )
    if any(_is_norm(s) for s in segments[-2:]):
        return _norm_role(segments, inside)
    phrase = "_".join(segments[-1])
    if phrase in _PHRASES:
        return _PHRASES[phrase]
    if everything & {"wpe"} or (everything & {"pos", "position"} and not inside):
        return "pos"
    if not inside:
        tail = _flat(segments[-2:])
        if tail & {"head", "unembed", "logits", "lm", "unembedding"} or phrase in (
            "embed_out",
            "output",
            "out",
        ):
            return "head"
        if any(w.startswith("embed") or w in ("wte", "vocab") for w in everything):
            return "embed"
        return "?"
    zone = _zone(segments)
    last = set(segments[-1])
    if {"q", "k", "v"} <= last or {"query", "key", "value"} <= last:
        return "qkv"
    found = _named(last, zone)
    if "router" in found:
        return "router"
    if (
        zone == "mlp"
        and last <= {"dense", "linear", "fc", "layer", "0", "1", "2", "3"}
        and segments[-1][-1].isdigit()
    ):
        return f"mlp.#{segments[-1][-1]}"
    # `q_proj`, `w_out_proj`: words that only mean "projection" are ignored
    generic = {"proj", "dense", "linear", "merge", "vec"}
    found = _named(last - generic, zone) or found
    return found[0] if len(found) == 1 else "?"


def _named(segment: set[str], zone: str) -> list[str]:
    """The roles that these words may name in this zone, or in any if it is not known."""
    return [
        base
        for (where, base), known in _ROLE_WORDS.items()
        if zone in ("", where) and not segment.isdisjoint(known.split())
    ]


def _norm_role(segments: list[list[str]], inside: bool) -> str:
    near = _flat(segments[-2:])
    own = set(segments[-1]) if _is_norm(segments[-1]) else near
    if own & {"q", "query"}:
        return "norm.q"
    if own & {"k", "key"}:
        return "norm.k"
    if (
        own & {"final", "f", "last"}
        or not inside
        or ("decoder" in own and not own & _ATTENTION)
    ):
        return "norm.final"
    if "input" in own:
        return "norm.pre_attn"
    text = "_".join(w for s in segments[-2:] for w in s)
    about_mlp = bool(own & _MLP)
    about_attn = bool(own & _ATTENTION)
    if not about_mlp and not about_attn:
        about_mlp = bool(near & _MLP)
        about_attn = bool(near & _ATTENTION)
    when = next((f"{word}_" for word in ("post", "pre") if word in own), "")
    if about_mlp != about_attn:
        return f"norm.{when}{'mlp' if about_mlp else 'attn'}"
    number = re.search(r"(\d)$", text)
    return f"norm.#{number[1]}" if number else "?"


def identity(template: Template) -> tuple[object, ...]:
    """Equal for templates that differ only in the parameter word: `x.{}.q_proj.kernel` and `….weight`."""
    body, bias = split_param(
        words(".".join(p.strip("./") or "-" for p in template.pieces))
    )
    return (tuple(map(tuple, body)), bias, template.kinds)


def classify(group: Sequence[Template]) -> dict[Template, Role]:
    """The role of each template; norms of a layer, or router and experts, disambiguate each other."""
    roles: dict[Template, Role] = {}
    for template in group:
        body, bias = split_param(template.segments)
        everything = template.words
        expert = "expert" in template.kinds or bool(everything & {"experts", "expert"})
        shared = "shared" in everything
        inside = bool(template.kinds)
        base = _role(body, inside)
        if base == "?" and len(body) > 1 and not bias:
            # the last word may be an unknown parameter word: `attn.q.mat`
            base = _role(body[:-1], inside)
        roles[template] = Role(base, bias, expert and not shared, shared)
    _settle_lone_number(roles)
    _settle_numbered(roles, "norm.#", ("norm.pre_attn", "norm.pre_mlp"))
    _settle_numbered(roles, "mlp.#", ("up", "down"))
    _settle_router(roles)
    _settle_ungated(roles)
    _settle_layer_norms(roles)
    return roles


def _rename(roles: dict[Template, Role], old: str, new: str) -> None:
    for template, role in roles.items():
        if role.base == old:
            roles[template] = replace(role, base=new)


_LAYER_NORM = re.compile(r"norm\.((pre_|post_)?(attn|mlp)|#\d)")


def _layer_norms(roles: dict[Template, Role]) -> set[str]:
    return {r.base for r in roles.values() if _LAYER_NORM.fullmatch(r.base)}


def _settle_lone_number(roles: dict[Template, Role]) -> None:
    """`ln1` or `ln2` beside one named norm is the other of the two."""
    norms = _layer_norms(roles)
    numbers = [b for b in norms if b.startswith("norm.#")]
    if len(norms) != 2 or len(numbers) != 1:
        return
    (other,) = norms - set(numbers)
    second = other in ("norm.attn", "norm.pre_attn")
    if numbers[0][-1] in ("12" if second else "01"):
        _rename(roles, numbers[0], "norm.pre_mlp" if second else "norm.pre_attn")


def _settle_layer_norms(roles: dict[Template, Role]) -> None:
    """What `attn_norm` and `post_attention_layernorm` mean depends on which other norms a layer has."""
    for zone in ("attn", "mlp"):
        norms = _layer_norms(roles)
        if {f"norm.{zone}", f"norm.post_{zone}"} < norms and len(norms) > 2:
            _rename(roles, f"norm.{zone}", f"norm.pre_{zone}")
    if _layer_norms(roles) in (
        {"norm.pre_attn", "norm.post_attn"},
        {"norm.attn", "norm.post_attn"},
    ):
        # Llama's `post_attention_layernorm` is the norm before the MLP: there is no other
        _rename(roles, "norm.attn", "norm.pre_attn")
        _rename(roles, "norm.post_attn", "norm.pre_mlp")


def _settle_numbered(
    roles: dict[Template, Role], prefix: str, pair: tuple[str, str]
) -> None:
    """`LayerNorm_0`, `LayerNorm_1` or `Dense_0`, `Dense_1`: two of a kind are in the order of the forward pass."""
    numbers = sorted({r.base for r in roles.values() if r.base.startswith(prefix)})
    taken = {r.base for r in roles.values()} & set(pair)
    for j, number in enumerate(numbers):
        _rename(roles, number, pair[j] if len(numbers) == 2 and not taken else "?")


def _settle_router(roles: dict[Template, Role]) -> None:
    """A `gate` beside other gates of experts is the router; what else is in a `moe` module are the experts."""
    moe = {t: any("moe" in word for word in t.words) for t in roles}
    if not any(r.expert or moe[t] for t, r in roles.items()):
        return
    if not any(r.base == "router" for r in roles.values()):
        gates = [
            t
            for t, r in roles.items()
            if r.base == "gate" and not r.bias and not r.shared
        ]
        fused = any(r.base == "gate_up" for r in roles.values())
        named = [t for t in gates if ["gate"] in split_param(t.segments)[0][-2:]]
        if len(named) > 1:
            named = [t for t in named if not roles[t].expert]
        if len(named) == 1 and (len(gates) > 1 or fused):
            roles[named[0]] = replace(roles[named[0]], base="router", expert=False)
    for template, role in list(roles.items()):
        if (
            role.base in ("gate", "up", "down", "gate_up")
            and moe[template]
            and not role.shared
        ):
            roles[template] = replace(role, expert=True)


def _settle_ungated(roles: dict[Template, Role]) -> None:
    bases = {r.base for r in roles.values()}
    if {"gate", "down"} <= bases and not bases & {"up", "gate_up"}:
        _rename(roles, "gate", "up")  # w1 and w2 of an MLP without a gate
