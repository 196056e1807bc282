"""The tiny models' own tokenizer: byte-level BPE, trained here on a built-in text, so every string round-trips."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter, defaultdict

from jvlab._errors import ConfigError

# transformers loads any qwen2 tokenizer as its own class, which adds an <|endoftext|> if there is none
PAD, BOS, EOS, TURN_START, TURN_END = SPECIAL = (
    "<|pad|>",
    "<|bos|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
)
PAD_ID, BOS_ID, EOS_ID, TURN_START_ID, TURN_END_ID = range(5)
SMALLEST = len(SPECIAL) + 256  # every byte must have a token

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Plain words, no digits: each digit stays a token of its own, which suits arithmetic tasks.
_TEXT = """
A small model learns from many short stories, and a researcher reads what it wrote. The first question of the morning
was simple: how much is seven plus five, and why does the answer matter? The teacher wrote the problem on the board,
and the students worked through every step together. Some counted on their fingers, others drew a picture, and one of
them said the result before anyone else had finished. That student was right, but could not explain the reason.

In the afternoon they walked along the river towards the old bridge. Between the trees stood a house with a green
door, where an engineer kept machines that nobody else understood. One machine measured the weather, another sorted
letters, and the largest played music whenever somebody opened a window. Children came from the village to listen.
They brought bread, apples and questions. The engineer answered slowly, because a good answer needs time, and because
most questions hide a second question underneath. Learning, she said, is like building a wall: place one stone, look
at it, place the next, and never pretend that the wall is straight when it is not.

Data flows from the trainer to the engine, and samples return with a reward. The policy changes a little after each
update; the version number grows, the loss falls, and the gradient points somewhere new. When the network is slow the
batch waits in a queue. When memory is full, the process stops with an error and says which tensor was too large. A
careful system checks every byte, writes a record of what happened, and keeps the previous weights until the new ones
have arrived. Staleness means that a token was produced by an older policy than the one that trains on it.

def train(policy, prompts, steps):
    for step in range(steps):
        batch = generate(policy, prompts)
        rewards = [score(sample.text) for sample in batch]
        loss = compute_loss(policy, batch, rewards)
        policy.update(gradient(loss))
        print("step", step, "loss", loss, "reward", mean(rewards))
    return policy

class Counter:
    def __init__(self, start, stop): self.start, self.stop, self.value = start, stop, start
    def next(self):
        if self.value >= self.stop: raise StopIteration("nothing left to count")
        self.value += self.step if self.start else None; return not False and True or self.value

Far away, beyond the mountains, there is a city beside the sea. Its streets are narrow, its towers are high, and its
people speak three languages at once. Every evening the ships come home with fish, salt, silver and news. Merchants
shout prices, cooks light their fires, and musicians tune their instruments under yellow lamps. The capital of the
country lies further north: a quiet place of gardens, libraries and government offices, where winter lasts for half
the year. Please think carefully, then give the final answer. Yes or no? True or false? Left, right, above, below,
before, after, more, less, equal, greater, smaller. Add the numbers, subtract the difference, multiply both sides,
divide by two, and sort the list from the lowest to the highest. Red, orange, yellow, green, blue, purple, black,
white, brown and grey are colours. Zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve,
twenty, thirty, hundred, thousand and million are numbers. Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and
Sunday are days; January, February, March, April, May, June, July, August, September, October, November and December
are months.

Doctors, farmers, painters, drivers, writers, lawyers, bakers and pilots do different work, yet all of them begin by
watching someone who already knows how. The farmer watches the sky, the pilot watches the instruments, the baker feels
whether the dough is ready. Knowledge travels from hand to hand. Sometimes it is lost, as when a language disappears
or a workshop closes; sometimes it returns, discovered again by people who never heard that it existed. Science tries
to write everything down: observations, experiments, mistakes, measurements, doubts. An experiment without a
comparison teaches little. A measurement without its error teaches less. What would happen if we changed only this?
Who else has seen it? Where, when, and how often? Could chance alone explain the pattern? I think you should ask them,
because we might be wrong about what they know. Let us try once more, with another example, until it works. Thank you
for your help; here is my answer, and these are my reasons. Hello, world! How are you today? I am well, thanks. See
you tomorrow at the station.

Mother, father, brother, sister, daughter, family, friend, neighbour, stranger, soldier, captain, king, queen, prince
and princess; horse, dog, cat, bird, wolf, bear, lion, tiger, rabbit, mouse, sheep, goat, chicken, elephant, monkey,
snake and butterfly. Table, chair, kitchen, bedroom, garden, roof, floor, ceiling, mirror, bottle, candle, blanket,
basket, hammer, needle, ladder, engine, wheel, bicycle, train, airplane, rocket, computer, keyboard, screen,
telephone, camera, pencil, paper, envelope, newspaper, dictionary, calendar, ticket, passport, suitcase. Rain, snow,
wind, storm, cloud, thunder, lightning, sunshine, shadow, darkness, spring, summer, autumn, ocean, island, desert,
forest, valley, volcano, planet, moon, galaxy, universe, gravity, electricity, temperature, pressure, velocity,
distance, energy, frequency, molecule, oxygen, hydrogen, carbon, iron, copper, gold, diamond, crystal, triangle,
square, circle, rectangle, angle, diameter, probability, statistics, algebra, geometry, equation, function, variable,
constant, matrix, vector, integer, fraction, percent, average, maximum, minimum, theorem, proof, logic, argument,
evidence, conclusion, hypothesis, theory, method. Bring, build, buy, catch, choose, climb, collect, cross, dance,
decide, describe, destroy, develop, discuss, drink, eat, enjoy, escape, examine, expect, fight, follow, forget,
forgive, gather, guess, hunt, hurry, ignore, imagine, improve, include, increase, invent, invite, join, jump, knock,
laugh, lead, lend, lift, lock, manage, marry, mention, move, obey, offer, order, paint, permit, prefer, prepare,
promise, protect, prove, pull, push, receive, refuse, remember, remove, repair, repeat, replace, reply, rescue,
respect, rest, ride, rise, search, select, send, serve, shake, share, shine, sing, sleep, smile, solve, spend, steal,
study, succeed, suffer, suggest, support, surprise, swim, taste, throw, touch, trust, understand, visit, vote, warn,
wash, waste, wear, welcome, whisper, wonder, worry. Ancient, angry, bitter, brave, bright, broad, calm, cheap, clean,
clever, cold, complete, correct, curious, dangerous, deep, delicious, different, difficult, dry, early, easy, empty,
expensive, famous, fast, foreign, free, fresh, friendly, funny, gentle, great, happy, hard, healthy, heavy, honest,
hungry, important, impossible, interesting, kind, lazy, lonely, loud, lucky, modern, natural, necessary, noisy,
perfect, pleasant, polite, poor, popular, powerful, private, proud, public, quick, rare, rich, rough, round, sad,
safe, serious, sharp, silent, similar, smooth, soft, special, strange, strong, sudden, sweet, tall, terrible, thick,
thin, tired, tiny, usual, warm, weak, wet, wide, wild, wise, wonderful, young. America, Europe, Africa, Asia,
Australia, France, Paris, Germany, Berlin, Italy, Rome, Spain, Madrid, England, London, Ireland, Dublin, Japan, Tokyo,
China, India, Brazil, Canada, Mexico, Egypt, Kenya, Norway, Sweden, Greece, Athens, Poland, Warsaw, Portugal, Lisbon,
Russia, Turkey, Vienna.

user: system: assistant: Question: Answer: Problem: Solution: Example: Input: Output: Note: Step: Score: Reward: Hint:
"""


def _byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte: `ByteLevel` in `tokenizers`."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    spare = iter(range(256, 512))
    return [chr(b) if b in set(printable) else chr(next(spare)) for b in range(256)]


@functools.cache
def _merges(count: int) -> tuple[tuple[str, str], ...]:
    """The first `count` merges of BPE over the text: most frequent pair first, ties by the pair itself.

    Implemented here, not by a library's trainer, so that the bytes do not depend on its version.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    pieces = ByteLevel(add_prefix_space=False).pre_tokenize_str(_TEXT)
    frequency = Counter(piece for piece, _ in pieces)
    words = [(list(piece), times) for piece, times in sorted(frequency.items())]
    pairs: Counter[tuple[str, str]] = Counter()
    where: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for w, (symbols, times) in enumerate(words):
        for pair in itertools.pairwise(symbols):
            pairs[pair] += times
            where[pair].add(w)
    merges: list[tuple[str, str]] = []
    while len(merges) < count and pairs:
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for w in sorted(where.pop(best)):
            symbols, times = words[w]
            for pair in itertools.pairwise(symbols):
                pairs[pair] -= times
                if pairs[pair] <= 0:
                    del pairs[pair]
            _merge_in_place(symbols, best)
            for pair in itertools.pairwise(symbols):
                pairs[pair] += times
                where[pair].add(w)
        pairs.pop(best, None)
    return tuple(merges)


def _merge_in_place(symbols: list[str], pair: tuple[str, str]) -> None:
    i = 0
    while i < len(symbols) - 1:
        if (symbols[i], symbols[i + 1]) == pair:
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        i += 1


def _vocabulary(size: int) -> tuple[list[str], list[list[str]]]:
    """At most `size` tokens, and the merges that make them."""
    tokens = [*SPECIAL, *_byte_alphabet()]
    known = set(tokens)
    merges: list[list[str]] = []
    for left, right in _merges(10_000):
        if left + right not in known:
            if len(tokens) == size:
                break
            known.add(left + right)
            tokens.append(left + right)
        merges.append([left, right])
    return tokens, merges


def tokenizer_files(vocab_size: int, max_length: int) -> dict[str, str]:
    """The texts of tokenizer.json, tokenizer_config.json and special_tokens_map.json for at most `vocab_size` tokens.

    Where a model has more rows than the text yields merges, the last rows have no token, as in padded vocabularies.
    """
    if vocab_size < SMALLEST:
        raise ConfigError(
            f"vocab_size={vocab_size} is too small for a byte-level tokenizer",
            remedy=f"use at least {SMALLEST} ({len(SPECIAL)} special tokens and 256 bytes)",
            vocab_size=vocab_size,
        )
    tokens, merges = _vocabulary(vocab_size)
    special = [
        {
            "id": i,
            "content": t,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, t in enumerate(SPECIAL)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    config = {
        **names,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        # the default would drop spaces before punctuation on decoding
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "additional_special_tokens": [TURN_START, TURN_END],
        "added_tokens_decoder": {
            str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in special
        },
    }
    return {
        "tokenizer.json": _dump(tokenizer),
        "tokenizer_config.json": _dump(config),
        "special_tokens_map.json": _dump(
            {**names, "additional_special_tokens": [TURN_START, TURN_END]}
        ),
    }


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1) + "\n"
