"""Where an assistant's turns and calls begin and end in a template's rendering."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pipeline.chats.habits import habits_of, settle_speaker
from pipeline.chats.messages import ChatError, read_chat
from pipeline.chats.rendering import LearnRule, render_chat
from pipeline.chats.templates import ChatTemplate
from tests.support.chats import (
    CALLS,
    CONTROLS,
    NAMES,
    TOOLS,
    TWO_TURNS,
    WEATHER,
    put_together,
    render_in,
    said,
    said_in,
    template,
    user,
)


def test_a_call_that_both_sides_render_alike_is_text() -> None:
    call = (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}\n</tool_call>'
    )
    chat = render_in(TOOLS, "qwen2_5", "qwen3", tools=[WEATHER])
    assert said_in(chat) == [f"{call}<|im_end|>\n", "18 degrees.<|im_end|>\n"]
    assert call.encode() in chat.text
    assert len(chat.learned) == 2


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": "Hm."}])
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_a_call_may_have_no_content(name: str, content: dict[str, Any]) -> None:
    """`null` is what services that call tools give."""
    messages = [TOOLS[0], {"role": "assistant", **content, **CALLS}, *TOOLS[2:]]
    chat = render_in(messages, name, tools=[WEATHER])
    given = [messages[0], {"content": None, **messages[1]}, *messages[2:]]
    (expected,), _ = render_jinja_template(
        [given], tools=[WEATHER], chat_template=template(name).text, **NAMES
    )
    assert (chat.sides[0].text.decode(), put_together(chat, 0)) == (expected, chat.sides[0].text)
    turn, answer = said_in(chat)
    assert turn.startswith(content.get("content") or "<tool_call>")
    assert turn.endswith('"days": 2}}\n</tool_call><|im_end|>\n')
    assert answer == "18 degrees.<|im_end|>\n"
    # Llama 3's first template knows no calls: its student would learn to end the turn instead.
    with pytest.raises(ChatError, match=r"teacher: .*drops the tool_calls of message 1"):
        render_in(messages, name, "llama3", tools=[WEATHER])


_WRITES_CALLS = (
    "{%% for m in messages %%}<|{{ m.role }}|>\n{{ m.content or '' }}"
    "{%% for c in m.tool_calls or [] %%}[%s]{%% endfor %%}<|end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|assistant|>\n{%% else %%}{{ eos_token }}{%% endif %%}"
)


@pytest.mark.parametrize("has_ids", [True, False])
@pytest.mark.parametrize(
    ("written", "later"),
    [
        ("", user("Well?")),  # the student learned the turn's end, and half of what follows
        ("{{ '(called)' }}", user("Well?")),
        ("{{ c.function.name if loop.first }}", TOOLS[2]),  # of two only one, as gpt-oss's
    ],
)
def test_calls_that_a_template_drops_are_named(
    written: str, later: dict[str, Any], has_ids: bool
) -> None:
    side = settle_speaker(ChatTemplate(_WRITES_CALLS % written, NAMES), CONTROLS, side="student")
    calls = [{**call, "id": f"call{n}"} for n, call in enumerate(CALLS["tool_calls"] * 2)]
    if not has_ids:
        calls = [{"function": call["function"]} for call in calls]
    messages = [TOOLS[0], {"role": "assistant", "tool_calls": calls}, later, TOOLS[3]]
    with pytest.raises(ChatError, match="drops the tool_calls of message 1"):
        render_chat(read_chat(messages), (side, side), LearnRule())


_CALLS_FIRST = (
    "{%% for m in messages %%}<|{{ m.role }}|>\n{%% for c in m.tool_calls or [] %%}"
    "[{{ c.function.name }}]%s{%% endfor %%}{{ m.content or '' }}<|end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|assistant|>\n{%% endif %%}"
)


@pytest.mark.parametrize("later", [[], [user("Well?"), said("Warm.")], TOOLS[2:]])
def test_calls_before_a_content_are_learned(later: list[dict[str, Any]]) -> None:
    """As Gemma 4 and pythonic templates write them: they were refused as dropped."""
    side = settle_speaker(ChatTemplate(_CALLS_FIRST % "", NAMES), CONTROLS, side="student")
    messages = [TOOLS[0], said("Wait.", **CALLS), *later]
    chat = render_chat(read_chat(messages), (side, side), LearnRule())
    assert said_in(chat)[0] == "[weather]Wait.<|end|>\n"


def test_calls_that_are_not_found_are_not_called_dropped() -> None:
    """DeepSeek R1's distilled models write them in a turn of their own."""
    text = _CALLS_FIRST % "<|end|>\n<|assistant|>\n"
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    messages = [TOOLS[0], said("Wait.", **CALLS), *TOOLS[2:]]
    with pytest.raises(ChatError, match="some of the tool_calls of message 1, or writes them"):
        render_chat(read_chat(messages), (side, side), LearnRule())


def test_a_call_after_a_result_without_what_asks_for_it_is_learned() -> None:
    """As Apertus' and DeepSeek V3's second call: it was refused as dropped."""
    text = (
        "{% for m in messages %}{% if m.role == 'tool' %}[{{ m.content }}]{% else %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|{{ m.role }}|>{% endif %}"
        "{% for c in m.tool_calls or [] %}<|end|>{{ c.function.name }}{% endfor %}"
        "{{ m.content }}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(read_chat([*TOOLS[:3], *TOOLS[1:]]), (side, side), LearnRule())
    assert said_in(chat) == ["<|end|>weather</s>", "<|end|>weather</s>", "18 degrees.</s>"]


@pytest.mark.parametrize("later", [[user("Well?")], [TOOLS[2]]])
@pytest.mark.parametrize("as_json", ["", " | tojson"])
def test_a_call_is_learned_as_json_and_to_the_end_of_its_turn(
    as_json: str, later: list[dict[str, Any]]
) -> None:
    """Not as Python writes a dict, and without what the next turn and the text's end begin with."""
    text = _WRITES_CALLS % f"{{{{ c.function.name }}}} {{{{ c.function.arguments{as_json} }}}}"
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(read_chat([*TOOLS[:2], *later, TOOLS[3]]), (side, side), LearnRule())
    assert said_in(chat)[0] == '[weather {"city": "Bonn", "days": 2}]<|end|>\n'


_LATE_THOUGHTS = (
    "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > ns.asked %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize("thoughts", [{}, {"reasoning_content": "Look it up."}])
def test_a_call_of_an_earlier_turn_whose_thoughts_are_dropped_is_learned(
    thoughts: dict[str, str],
) -> None:
    side = settle_speaker(ChatTemplate(_LATE_THOUGHTS, NAMES), CONTROLS, side="student")
    messages = [TOOLS[0], {**TOOLS[1], **thoughts}, *TOOLS[2:], user("Thanks"), said("Bye.")]
    assert said_in(render_chat(read_chat(messages), (side, side), LearnRule())) == [
        "<tool_call>weather</tool_call><|im_end|>\n",
        "18 degrees.<|im_end|>\n",
        "Bye.<|im_end|>\n",
    ]


@pytest.mark.parametrize("result", ["18 C", ""])
@pytest.mark.parametrize("thoughts", [{}, {"reasoning_content": "Look it up."}])
def test_a_turn_that_goes_on_after_a_result_has_no_header(
    thoughts: dict[str, str], result: str
) -> None:
    """As Gemma 4's: a second call was refused, and its thoughts lost their opening mark."""
    text = (
        "{% for m in messages %}{% if m.role == 'tool' %}[{{ m.content }}]<result|>{% else %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
        "<turn>{{ m.role }}\n{% endif %}"
        "{% if m.reasoning_content %}<thought>{{ m.reasoning_content }}</thought>{% endif %}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
        "{% if not m.tool_calls %}{{ m.content }}</turn>\n{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<turn>assistant\n{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    asked = [{**TOOLS[1], **thoughts}, {**TOOLS[2], "content": result}]
    chat = render_chat(
        read_chat([TOOLS[0], *asked, *asked, {**TOOLS[3], **thoughts}]), (side, side), LearnRule()
    )
    thought = "<thought>Look it up.</thought>" if thoughts else ""
    call = '<call>{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}</call>'
    turns = [thought + call, thought + call, thought + "18 degrees.</turn>\n"]
    assert said_in(chat) == turns


@pytest.mark.parametrize("result", ["18 C", ""])
@pytest.mark.parametrize("call_id", ["call00001", "another01"])
def test_what_follows_a_tools_result_is_not_the_answers(result: str, call_id: str) -> None:
    """Mistral's turns have no header, and its results end with the call's id: it was learned."""
    text = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ c.function | tojson }}"
        "{% endfor %}]</s>{% elif m.role == 'tool' %}[TOOL_RESULTS] "
        '{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    messages = [*TOOLS[:2], {**TOOLS[2], "content": result, "tool_call_id": call_id}, TOOLS[3]]
    call = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}]</s>'
    chat = render_chat(read_chat(messages), (side, side), LearnRule())
    assert said_in(chat) == [call, " 18 degrees.</s>"]


def test_an_earlier_empty_answer_ends_as_others() -> None:
    side = settle_speaker(ChatTemplate(_LATE_THOUGHTS, NAMES), CONTROLS, side="student")
    messages = [user("Say nothing."), said(""), user("Thanks"), said("Bye.")]
    chat = render_chat(read_chat(messages), (side, side), LearnRule())
    assert said_in(chat) == ["<|im_end|>\n", "Bye.<|im_end|>\n"]


@pytest.mark.parametrize("preamble", [False, True])
@pytest.mark.parametrize(
    ("header", "end"),
    [("<|%s|>", "<|end|>"), ("<|turn|>%s\n", "<|end|>\n"), ("### %s: ", "\n\n")],
)
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (TWO_TURNS, ["It is 4.", "6, of course."]),
        (TOOLS, ['weather {"city": "Bonn", "days": 2}', "18 degrees."]),
        (TOOLS[:2], ['weather {"city": "Bonn", "days": 2}']),
    ],
)
def test_a_generation_prompt_that_a_template_always_writes_is_not_learned(
    messages: list[dict[str, Any]], expected: list[str], header: str, end: str, preamble: bool
) -> None:
    """As Command R7B's for tools and Phi-4-mini's; what it begins with begins other turns, too."""
    text = (
        "{{ bos_token }}"
        + (f"{header % 'system'}Be kind.{end}" if preamble else "")
        + "{% for m in messages %}"
        + header % "{{ m.role }}"
        + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }} "
        + "{{ c.function.arguments | tojson }}{% endfor %}"
        + f"{{{{ {end!r} }}}}{{% endfor %}}{{{{ {header % 'assistant'!r} }}}}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(read_chat(messages), (side, side), LearnRule())
    assert said_in(chat) == [answer + end for answer in expected]
    everything = render_chat(read_chat(messages), (side, side), LearnRule("all"))
    assert said_in(everything)[0] == messages[0]["content"] + end


@pytest.mark.parametrize("header", ["<|im_start|>%s\n", ""])
def test_a_long_chat_of_calls_is_rendered_few_times(
    header: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call, and every answer to a result, rendered all that was before it, twice."""
    text = (
        "{% for m in messages %}"
        + header.replace("%s", "{{ m.role }}")
        + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
        + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
        + header.replace("%s", "assistant")
        + "{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    messages = [TOOLS[0], *TOOLS[1:3] * 200, TOOLS[3], user("Thanks"), said("Bye.")]
    chat, sizes = read_chat(messages), list[int]()
    render = ChatTemplate.render

    def count(self: ChatTemplate, given: Any, *rest: Any, **more: Any) -> str:
        sizes.append(len(given))
        return render(self, given, *rest, **more)

    monkeypatch.setattr(ChatTemplate, "render", count)
    rendered = render_chat(chat, (side, side), LearnRule())
    assert sum(sizes) < 20 * len(messages)
    call = '{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}<|im_end|>\n'
    assert said_in(rendered) == [*[call] * 200, "18 degrees.<|im_end|>\n", "Bye.<|im_end|>\n"]


def test_a_call_that_begins_like_the_prompts_thoughts_is_learned() -> None:
    """As Gemma 4's: half of its prompt's mark was taken for the header, and the call as dropped."""
    text = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content }}<response|>{% else %}"
        "<|turn>{{ m.role }}\n{% for c in m.tool_calls or [] %}"
        "<|call>{{ c.function | tojson }}<call|>{% endfor %}{{ m.content }}"
        "{{ '<|response>' if m.tool_calls else '<turn|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|turn>assistant\n<|thought>\n<thought|>{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    call = '<|call>{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}<call|><|response>'
    chat = render_chat(read_chat([*TOOLS[:3], *TOOLS[1:]]), (side, side), LearnRule())
    assert said_in(chat) == [call, call, "18 degrees.<turn|>\n"]


_IN_LOOP = "{% for m in messages %}<|turn|>{{ m.role }}\n"

_TO_ALL = "<|turn|>system\nAnswer in JSON.<|end|>\n"


@pytest.mark.parametrize(
    "text",
    [
        # DeepSeek V3.2's thoughts, of which earlier turns have the end alone.
        _IN_LOOP + "{% if m.role == 'assistant' %}</think>{% endif %}{{ m.content }}<|end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n<think></think>{% endif %}",
        # Command R+'s instructions for tools, which follow every chat.
        _IN_LOOP
        + "{{ m.content }}<|end|>\n{% endfor %}"
        + _TO_ALL
        + "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}",
        # Llama 4's, whose prompt goes on where turns do.
        _IN_LOOP + "{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}" + _TO_ALL + "<|turn|>assistant\n{% endif %}",
    ],
    ids=["end of thoughts", "instructions", "instructions in the prompt"],
)
def test_what_a_prompt_ends_with_is_not_learned(text: str) -> None:
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(read_chat(TWO_TURNS), (side, side), LearnRule())
    assert said_in(chat) == ["It is 4.<|end|>\n", "6, of course.<|end|>\n"]
    assert put_together(chat, 0) == chat.sides[0].text


@pytest.mark.parametrize("before", ["\n\n### Response:\n", "        <|assistant|>\n"])
def test_a_header_with_other_white_space_than_the_prompts_is_not_learned(before: str) -> None:
    """As in Alpaca's template and others' of vLLM, and in templates with indentation."""
    prompt = " ".join(before.split()) + "\n"
    text = (
        f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{{{{ {before!r} }}}}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<|end|>{{ c.function.name }}{% endfor %}"
        "</s>{% else %}<|user|>{{ m.content }}{% endif %}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ {prompt!r} }}}}{{% endif %}}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(read_chat([*TWO_TURNS, *TOOLS]), (side, side), LearnRule())
    turns = ["It is 4.</s>", "6, of course.</s>", "<|end|>weather</s>", "18 degrees.</s>"]
    assert said_in(chat) == turns


def test_what_asks_for_a_call_may_have_other_white_space() -> None:
    """As in vLLM's template of DeepSeek V3.1, whose calls were learned with their header."""
    text = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<|assistant|></think>' if m.tool_calls else '   <|assistant|>  </think>' }}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<|end|>{{ c.function.name }}{% endfor %}"
        "</s>{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ ' <|assistant|> </think>' }}{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(read_chat(TOOLS), (side, side), LearnRule())
    assert [said.strip() for said in said_in(chat)] == ["<|end|>weather</s>", "18 degrees.</s>"]


@pytest.mark.parametrize("later", [[TOOLS[2]], [user("Well?")]])
def test_what_begins_the_next_turn_ends_no_call(later: list[dict[str, Any]]) -> None:
    """As behind Command R+'s calls, which end by themselves: a header's first token was learned."""
    text = (
        "{% for m in messages %}<|im_start|><|{{ m.role }}|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}\n{% else %}<|im_end|>{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|><|assistant|>{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(read_chat([*TOOLS[:2], *later, TOOLS[3]]), (side, side), LearnRule())
    assert said_in(chat) == ["weather\n", "18 degrees.<|im_end|>"]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("later", [[TOOLS[2]], [user("Well?")]])
def test_calls_that_the_last_turn_has_otherwise_are_learned_whole(
    later: list[dict[str, Any]], count: int
) -> None:
    """As Apriel's, which have ids but in the last turn: half a call was learned, and no end."""
    text = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% set is_last = loop.last %}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ ',' + c.id if not is_last }}]"
        "{% endfor %}{{ '<|end|>\n' if m.role == 'assistant' and not loop.last }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    calls = said("", tool_calls=CALLS["tool_calls"] * count)
    chat = render_chat(read_chat([TOOLS[0], calls, *later, TOOLS[3]]), (side, side), LearnRule())
    assert said_in(chat) == ["[weather,call00001]" * count + "<|end|>\n", "18 degrees."]


@pytest.mark.parametrize("later", [[], TOOLS[2:], [user("Well?"), said("Warm.")]])
def test_a_blank_turn_behind_a_call_is_not_learned(later: list[dict[str, Any]]) -> None:
    """As DeepSeek R1's distilled models write a content of "": its header was learned."""
    text = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "<|assistant|>[{{ c.function.name }}]<|end|>\n{% endfor %}"
        "{% if m.content is not none %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(read_chat([*TOOLS[:2], *later]), (side, side), LearnRule())
    assert said_in(chat)[0] == "[weather]<|end|>\n"


@pytest.mark.parametrize("later", [[], TOOLS[2:]])
def test_a_turn_of_white_space_behind_a_call_is_not_learned(later: list[dict[str, Any]]) -> None:
    text = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "<|assistant|>\n[{{ c.function.name }}]<|end|>\n{% endfor %}"
        "{% if m.content is not none %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(
        read_chat([TOOLS[0], said(" \n", **CALLS), *later]), (side, side), LearnRule()
    )
    assert said_in(chat)[0] == "[weather]<|end|>\n"


@pytest.mark.parametrize("later", [[], [user("Well?"), said("Warm.")]])
@pytest.mark.parametrize("end", [True, False])
def test_an_end_and_a_header_between_content_and_call_are_not_learned(
    later: list[dict[str, Any]], end: bool
) -> None:
    """As Nemotron Nano v2 writes a last turn: its student would end the turn before a call."""
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<|im_end|>\n<|im_start|>assistant\n"
        "<call>{{ c.function.name }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    messages = [TOOLS[0], said("Wait.", tool_calls=CALLS["tool_calls"] * 2), *later]
    chat = render_chat(read_chat(messages), (side, side), LearnRule(end=end))
    call, ending = "<call>weather</call>", "<|im_end|>\n" * end
    assert said_in(chat)[:3] == ["Wait.", call, f"{call}{ending}"]
    assert said_in(chat)[3:] == [f"Warm.{ending}"] * bool(later)


@pytest.mark.parametrize(("before", "header"), [("", "<|im_start|>%s\n"), ("<s>", "<|%s|>")])
def test_an_end_that_only_another_turn_brings_is_learned(before: str, header: str) -> None:
    """As in vLLM's ChatML and Qwen 1.5's: it was taken for a header, and never learned."""
    text = (
        f"{{{{ {before!r} }}}}{{% for m in messages %}}{header % '{{ m.role }}'}{{{{ m.content }}}}"
        "{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{header % 'assistant'}{{% endif %}}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    assert habits_of(side).end == "<|im_end|>\n"
    chat = read_chat([*TWO_TURNS, said("Sure.")])
    turns = ["It is 4.<|im_end|>\n", "6, of course.<|im_end|>\n", "Sure."]
    assert said_in(render_chat(chat, (side, side), LearnRule())) == turns
    everything = said_in(render_chat(chat, (side, side), LearnRule("all")))
    assert everything[::2][:2] == ["What is 2+2?<|im_end|>\n", "And 3+3?<|im_end|>\n"]
    assert [*everything[1::2], everything[-1]] == turns


@pytest.mark.parametrize("before", ["", "<s>"])
def test_what_begins_every_turn_ends_none(before: str) -> None:
    text = (
        f"{{{{ {before!r} }}}}"
        "{% for m in messages %}<|im_start|><|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|><|assistant|>{% endif %}"
    )
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = render_chat(read_chat(TWO_TURNS), (side, side), LearnRule())
    assert said_in(chat) == ["It is 4.", "6, of course."]


_CLOSED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}OPEN"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}{% endif %}</think>\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\nPROMPT{% endif %}"
)


@pytest.mark.parametrize("messages", [TWO_TURNS, TOOLS])
@pytest.mark.parametrize(
    ("opened", "prompt"),
    [
        ("", "<think>"),  # Laguna's with thoughts, GLM 4.7's
        ("", ""),  # MiniMax M3's
        ("<mark>", "<mark>"),  # DeepSeek V3.1's with thoughts
    ],
)
def test_what_closes_empty_thoughts_alone_is_not_learned(
    messages: list[dict[str, Any]], opened: str, prompt: str
) -> None:
    text = _CLOSED.replace("OPEN", opened).replace("PROMPT", prompt)
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    turns = said_in(render_chat(read_chat(messages), (side, side), LearnRule()))
    first = "[weather]" if messages is TOOLS else "It is 4."
    assert turns[0] == f"{first}<|end|>\n"
    assert len(turns) == 2
    assert "</think>" not in turns[1]


def test_what_closes_thoughts_is_learned_behind_them() -> None:
    text = _CLOSED.replace("OPEN", "").replace("PROMPT", "<think>")
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    chat = read_chat([user("17*3?"), said("51.", reasoning_content="17*3 is 51."), *TWO_TURNS])
    first = said_in(render_chat(chat, (side, side), LearnRule()))[0]
    assert first == "17*3 is 51.</think>\n51.<|end|>\n"


_SPEAKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<|answer|>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("blank", ["", "  ", " \n"])
@pytest.mark.parametrize("last", [[], [said("Yes."), user("Sure?")]])
@pytest.mark.parametrize(
    ("text", "before"), [(template("chatml").text, ""), (_SPEAKS, "<|answer|>")]
)
def test_a_blank_answer_is_learned_to_its_line_end(
    blank: str, last: list[dict[str, Any]], text: str, before: str
) -> None:
    """The line end was lost; what stands before a content was taken for the next turn's."""
    side = settle_speaker(ChatTemplate(text, NAMES), CONTROLS, side="student")
    messages = [user("Say nothing."), said(blank), user("Really?"), *last, said(blank)]
    chat = render_chat(read_chat(messages), (side, side), LearnRule())
    silent = f"{before}{blank}<|im_end|>\n"
    assert said_in(chat) == [silent, *([f"{before}Yes.<|im_end|>\n"] if last else []), silent]
    assert put_together(chat, 0) == chat.sides[0].text
