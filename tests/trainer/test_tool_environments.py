"""Environments in TRL's style, token for token with scripted turns, and Gymnasium's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab._errors import ConfigError
from jvlab.record._sample import Sample
from jvlab.trainer._environment import Episode, ToolEnvironment, run_episode
from jvlab.trainer._tasks import Example, Task

TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


NO_CALLS = TEMPLATE.replace("{{ call.function | tojson }}", "")


class Shop:
    """As TRL's documentation has them: state of its own, tools with docstrings."""

    def __init__(self) -> None:
        self.bought: list[str] = []

    def reset(self, **row: Any) -> str | None:
        self.row = row
        self.bought = []
        return row.get("note")

    def buy(self, item: str, count: int = 1) -> str:
        """
        Buys something.

        Args:
            item: What to buy.
            count: How many.
        """
        self.bought += [item] * count
        return f"bought {count} {item}"

    async def leave(self) -> str:
        """Leaves the shop."""
        await asyncio.sleep(0)
        return "bye"

    def _secret(self) -> str:
        return "not a tool"

    def get_reward(self) -> float:
        return float(len(self.bought))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(jv.models.tiny("llama"))
    made.chat_template = TEMPLATE
    return made


def call(name: str, **arguments: Any) -> str:
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


class Script:
    """Generates given turns; the tokens of each are not those that an encoder would choose: one for each character."""

    def __init__(self, tokenizer: Any, *turns: str, end: str = "<|im_end|>") -> None:
        ids = lambda text: tokenizer.encode(text, add_special_tokens=False)
        ends = ids(end) if end else []
        self.turns = [[t for c in turn for t in ids(c)] + ends for turn in turns]
        self.texts = turns
        self.prompts: list[list[int]] = []
        self.finish = "stop"

    async def __call__(self, prompt: list[int]) -> Sample:
        number = len(self.prompts)
        self.prompts.append(prompt)
        tokens = self.turns[number]
        return Sample(
            prompt_index=0,
            sample_index=0,
            prompt_token_ids=np.array(prompt),
            token_ids=np.array(tokens),
            logprobs=np.full(len(tokens), -0.5 - number),
            versions=((7, 0, len(tokens)),),
            text=self.texts[number],
            finish_reason=self.finish,
        )


def play(
    tokenizer: Any, script: Script, example: Example | None = None, **options: Any
) -> tuple[Episode, ToolEnvironment]:
    environment = Task(["Shop!"], environment=Shop).environment
    assert environment is not None
    made: Any = environment()
    made.bind(tokenizer)
    encode = lambda text, special: tokenizer.encode(text, add_special_tokens=False)
    example = example or Example("Buy two pens.", "2", {"level": 3}, 0)
    episode = asyncio.run(run_episode(made, example, script, encode, **options))
    return episode, made


def test_masks_and_tokens_are_exactly_what_was_sampled(tokenizer: Any) -> None:
    turns = [call("buy", item="pen", count=2), "I bought two."]
    script = Script(tokenizer, *turns)
    episode, made = play(tokenizer, script)
    first, second = script.turns
    given = script.prompts[1][len(script.prompts[0]) + len(first) :]
    assert episode.token_ids.tolist() == [*first, *given, *second]
    mask = [True] * len(first) + [False] * len(given) + [True] * len(second)
    assert episode.loss_mask.tolist() == mask
    assert episode.logprobs.tolist() == [-0.5] * len(first) + [0.0] * len(given) + [
        -1.5
    ] * len(second)
    assert set(episode.token_versions[~episode.loss_mask]) == {-1}
    assert script.prompts[1] == [*script.prompts[0], *first, *given]
    assert (
        tokenizer.decode(given)
        == "\n<|im_start|>tool\nbought 2 pen<|im_end|>\n<|im_start|>assistant\n"
    )
    assert first != tokenizer.encode(turns[0], add_special_tokens=False), (
        "an encoder would have chosen other tokens"
    )
    # the whole is what the template makes of the conversation
    said = [
        {"role": "user", "content": "Buy two pens."},
        {"role": "assistant", "content": turns[0]},
        {"role": "tool", "content": "bought 2 pen"},
        {"role": "assistant", "content": turns[1]},
    ]
    tools = list(made.tools.values())
    whole = tokenizer.apply_chat_template(said, tools=tools, tokenize=False)
    found = [*episode.prompt_token_ids.tolist(), *episode.token_ids.tolist()]
    assert tokenizer.decode(found) + "\n" == whole
    assert (episode.reward, episode.turns, episode.finish_reason) == (2.0, 2, "stop")
    assert made.inner.row == {"prompt": "Buy two pens.", "answer": "2", "level": 3}
    assert sorted(made.tools) == ["buy", "leave"]


def test_what_reset_returns_follows_the_last_message(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "Buy. "}]
    script = Script(tokenizer, "No.")
    episode, _ = play(tokenizer, script, Example(chat, None, {"note": "Pens: 3"}, 0))
    prompt = tokenizer.decode(script.prompts[0])
    assert "<|im_start|>user\nBuy. Pens: 3<|im_end|>" in prompt
    assert '"name": "buy"' in prompt
    assert chat[0]["content"] == "Buy. ", "the row is as it was"
    assert episode.reward == 0.0


def test_several_calls_async_tools_and_mistakes(tokenizer: Any) -> None:
    turns = [
        call("buy", item="pen") + call("leave"),
        call("steal", item="pen"),
        call("buy", wrong=1),
        "<tool_call>{no JSON</tool_call>",
        '{"name": "buy", "parameters": {"item": "cup"}}',
        "Done.",
    ]
    script = Script(tokenizer, *turns)
    episode, made = play(tokenizer, script)
    shown = tokenizer.decode(episode.token_ids[~episode.loss_mask])
    assert "tool\nbought 1 pen<|im_end|>\n<|im_start|>tool\nbye<|im_end|>" in shown
    assert "no tool 'steal'; there are: buy, leave" in shown
    assert "TypeError" in shown
    assert "no tool None" in shown
    assert made.inner.bought == ["pen", "cup"]
    assert episode.reward == 2.0
    assert episode.failure is None


def test_a_turn_that_ended_otherwise_is_closed_by_the_template(tokenizer: Any) -> None:
    script = Script(tokenizer, call("leave"), "Bye.", end="<|endoftext|>")
    episode, _ = play(tokenizer, script)
    assert tokenizer.decode(episode.token_ids[~episode.loss_mask]).startswith(
        "<|im_end|>\n<|im_start|>tool\nbye<|im_end|>"
    )
    cut = Script(tokenizer, call("buy", item="pen"), end="")
    cut.finish = "length"
    episode, made = play(tokenizer, cut)
    assert made.inner.bought == [], "a turn that was cut off calls nothing"
    assert episode.reward == 0.0


def test_out_of_turns_or_tokens_the_reward_is_asked_for(tokenizer: Any) -> None:
    turns = [call("buy", item="pen")] * 3
    episode, _ = play(tokenizer, Script(tokenizer, *turns), max_turns=2)
    assert (episode.turns, episode.finish_reason, episode.reward) == (2, "length", 2.0)
    script = Script(tokenizer, *turns)
    asyncio.run(script([]))
    long = len(script.turns[0]) + 400
    episode, _ = play(tokenizer, Script(tokenizer, *turns), max_length=long)
    assert episode.finish_reason == "length"
    assert episode.reward == episode.turns > 0
    assert len(episode.prompt_token_ids) + len(episode.token_ids) < long + 100


def test_a_parser_of_the_tokenizer_is_used(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = {"tool_calls": [{"function": {"name": "leave", "arguments": "{}"}}]}
    answers = iter([parsed, {"content": "x"}])
    monkeypatch.setattr(tokenizer, "response_template", "…", raising=False)
    parse = lambda ids: next(answers)
    monkeypatch.setattr(tokenizer, "parse_response", parse, raising=False)
    episode, _ = play(tokenizer, Script(tokenizer, "!leave", "x"))
    assert episode.turns == 2


SPECIAL = ["<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("qwen2_5", "<|im_end|>"),
        ("qwen3", "<|im_end|>"),
        ("qwen3_instruct_2507", "<|im_end|>"),
        ("llama3_1", "<|eot_id|>"),
        ("glm4moe", "<|observation|>"),
    ],
)
def test_templates_of_models_that_people_have(
    tokenizer: Any, name: str, end: str
) -> None:
    """The observation is what the template itself puts between two turns."""
    trl = pytest.importorskip(
        "trl", reason="TRL, which has these templates, is missing"
    )
    import copy
    from pathlib import Path

    own = copy.deepcopy(tokenizer)
    marks = ["<|eot_id|>", "<|observation|>", "<|user|>", "<|assistant|>"]
    own.add_special_tokens({"additional_special_tokens": [*SPECIAL, *marks]})
    file = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    own.chat_template = file.read_text()
    made = ToolEnvironment(Shop())
    made.bind(own)
    first = own.decode(made.reset(Example("Buy a pen.", index=0)))
    assert "Buys something." in first
    turn = own.encode(call("leave") + end, add_special_tokens=False)
    answer = {"role": "tool", "name": "leave", "content": "bye"}
    shown = own.decode(made._suffix([answer], turn))
    used = {"name": "leave", "arguments": {}}
    said = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": used}],
        },
        answer,
    ]
    whole = own.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    _, _, after = whole.rpartition("bye")
    assert shown.endswith(f"bye{after}")
    assert whole.endswith(end + shown), "from the turn's last token on"
    assert "leave" not in shown.partition("bye")[0], "nothing of the call itself"


@pytest.mark.parametrize(
    ("template", "tool", "message"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None, "does not show tools"),
        (TEMPLATE, lambda self, x: x, "cannot show these tools"),
        (NO_CALLS, None, "does not show calls"),
    ],
)  # fmt: skip
def test_templates_that_do_not_work_are_said(
    tokenizer: Any, template: str, tool: Any, message: str
) -> None:
    import copy

    own = copy.deepcopy(tokenizer)
    own.chat_template = template
    kind = type("Shop2", (Shop,), {"tool": tool} if tool else {})
    made = ToolEnvironment(kind())
    made.bind(own)
    answer = {"role": "tool", "name": "buy", "content": "x"}

    def both() -> None:
        made.reset(Example("Buy.", index=0))
        made._suffix([answer], [1])

    with pytest.raises(ConfigError, match=message):
        both()


def test_an_environment_that_raises_fails_its_episode(tokenizer: Any) -> None:
    class Broken(Shop):
        def get_reward(self) -> float:
            raise RuntimeError("no scales")

    made = ToolEnvironment(Broken())
    made.bind(tokenizer)
    encode = lambda text, special: tokenizer.encode(text)
    episode = asyncio.run(
        run_episode(made, Example("a", index=0), Script(tokenizer, "x"), encode)
    )
    assert episode.failure is not None
    assert "no scales" in episode.failure.message


def test_factories_and_classes() -> None:
    made: Any = Task(["a"], environment=lambda: Shop()).environment
    assert isinstance(made(), ToolEnvironment)

    class Neither:
        def reset(self, **row: Any) -> None: ...

    with pytest.raises(ConfigError, match=r"neither step\(\) nor get_reward\(\)"):
        Task(["a"], environment=Neither)


# ---------------------------------------------------------------------------------------------------- Gymnasium


def test_a_gymnasium_environment() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    task = jv.tasks.gymnasium(
        "FrozenLake-v1", "Move: ", show="at {}: ".format, is_slippery=False
    )
    script = ["2", "go 2", "1", "down 1", "1", "2"]  # around the holes, to the goal
    seen: list[str] = []

    async def generate(prompt: list[int]) -> Any:
        seen.append(bytes(prompt).decode())
        text = script[len(seen) - 1]
        return Sample(
            prompt_index=0,
            sample_index=0,
            prompt_token_ids=np.array(prompt),
            token_ids=np.array(list(text.encode())),
            logprobs=np.zeros(len(text)),
            versions=[1] * len(text),
            text=text,
        )

    assert task.environment is not None
    encode = lambda text, special: list(text.encode())
    episode = asyncio.run(
        run_episode(task.environment(), task.example(0), generate, encode)
    )
    assert seen[0] == "Move: at 0: "
    assert seen[1] == "Move: at 0: 2at 1: "
    assert (episode.reward, episode.turns, episode.finish_reason) == (1.0, 6, "stop")
    env: Any = task.environment()
    env.reset(task.example(1))
    assert env.step("no number") == jv.EnvironmentTurn(reward=0.0, done=True)
    assert env.step("77").done
    with pytest.raises(ConfigError, match="no environment 'NoSuch-v0'"):
        jv.tasks.gymnasium("NoSuch-v0")
    own = jv.tasks.gymnasium(lambda: 3)
    assert own.name == "gymnasium"
