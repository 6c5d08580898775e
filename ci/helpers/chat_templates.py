"""Small chat templates, each of which takes messages and writes calls in the way of a family of public checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    source: str
    parser: str = ""
    """What reads the calls that it writes; "" = none of ours does, or it writes none."""
    before_call: str = ""
    """Stands before the calls of a message."""
    behind_call: str = ""
    tells_tools: bool = True
    """Whether the model is told of the tools."""
    takes_system: bool = True
    """Whether there may be a system message."""
    reasoning: str = ""
    """Family of the reasoning that it knows."""


LLAMA = """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if date_string is not defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}{% set system_message = "" %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday: " + date_string + "\n\n" }}
{%- if tools is not none %}
    {{- "Answer with a call of one of these functions.\n" }}
    {%- for t in tools %}{{ t | tojson(indent=4) }}{{ "\n\n" }}{% endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{ raise_exception("only one call at a time") }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}
        {%- else %}{{ message.content }}{% endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

LLAMA_PYTHONIC = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|header_start|>' + ('ipython' if message.role == 'tool' else message.role) + '<|header_end|>\n\n' }}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {{- '<|python_start|>[' }}
        {%- for call in message.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- key + '=' }}{{ value | tojson }}{{ ', ' if not loop.last }}
            {%- endfor %}
            {{- ')' }}{{ ', ' if not loop.last }}
        {%- endfor %}
        {{- ']<|python_end|>' }}
    {%- elif message.content is string %}{{ message.content }}
    {%- else %}
        {%- for part in message.content %}{{ part.text if part.type == 'text' }}{% endfor %}
    {%- endif %}
    {{- '<|eot|>' }}
    {%- if loop.first and tools %}{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
    {{- "<tools>" }}
    {%- for tool in tools %}{{ "\n" }}{{ tool | tojson }}{% endfor %}
    {{- "\n</tools>\nWrite <tool_call> and </tool_call> around a call.<|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(in_tool_use=true, last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if ns.in_tool_use and message.role == "user" and message.content is string
          and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.in_tool_use = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls %}
            {%- if (loop.first and content) or not loop.first %}{{ '\n' }}{% endif %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

MISTRAL_3 = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{% set loop_messages = messages[1:] %}
{%- else %}{% set loop_messages = messages %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("the roles of user and assistant must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.items() if key != "return" %}
                    {%- if value is string %}{{ '"' + key + '": "' + value + '"' }}
                    {%- else %}{{ '"' + key + '": ' + value | tojson }}{% endif %}
                    {%- if not loop.last %}{{ ", " }}{% endif %}
                {%- endfor %}
                {{- "}}" }}{{ "[/AVAILABLE_TOOLS]" if loop.last else ", " }}
            {%- endfor %}
        {%- endif %}
        {%- if loop.last and system_message is defined %}{{ "[INST] " + system_message + "\n\n" }}
        {%- else %}{{ "[INST] " }}{% endif %}
        {{- message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("the id of a call has nine characters") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}{{ "]" + eos_token if loop.last else ", " }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{ " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- "[/TOOL_RESULTS]" }}
    {%- else %}{{ raise_exception("only user, assistant and tool are roles here") }}{% endif %}
{%- endfor %}"""

MISTRAL_13 = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if message.content is string %}{{ '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
        {%- else %}{{ '[SYSTEM_PROMPT]' + message.content[0].text + '[/SYSTEM_PROMPT]' }}{% endif %}
    {%- elif message.role == 'user' %}
        {%- if tools and loop.last %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {%- if message.content %}{{ message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set arguments = call.function.arguments %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
            {{- arguments if arguments is string else arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content | string + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

GEMMA_2 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

GEMMA_3 = """{{ bos_token }}
{%- set prefix = '' %}{% set rest = messages %}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}{% set prefix = messages[0]['content'] + '\n\n' %}
    {%- else %}{% set prefix = messages[0]['content'][0]['text'] + '\n\n' %}{% endif %}
    {%- set rest = messages[1:] %}
{%- endif %}
{%- for message in rest %}
    {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}
    {{- prefix if loop.first }}
    {%- if message['content'] is string %}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable %}
        {%- for item in message['content'] %}
            {%- if item['type'] == 'image' %}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}
        {%- endfor %}
    {%- else %}{{ raise_exception('Invalid content type') }}{% endif %}
    {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

GEMMA_4 = """{{ bos_token }}
{%- if tools or messages[0]['role'] == 'system' %}
    {{- '<|turn>system\n' }}
    {%- if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}{% endif %}
    {%- for tool in tools or [] %}
        {{- '<|tool>declaration:' + tool['function']['name'] + '{description:<|"|>' }}
        {{- tool['function']['description'] + '<|"|>}<tool|>' }}
    {%- endfor %}
    {{- '<turn|>\n' }}
{%- endif %}
{%- for message in messages if message['role'] != 'system' %}
    {%- if message['role'] == 'tool' %}
        {{- '<|tool_response>response:' + (message['name'] or 'tool') + '{value:<|"|>' }}
        {{- message['content'] + '<|"|>}<tool_response|>' }}
    {%- else %}
        {{- '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}
        {%- for call in message['tool_calls'] or [] %}
            {{- '<|tool_call>call:' + call['function']['name'] + '{' }}
            {%- for key, value in call['function']['arguments'].items() %}
                {{- ('' if loop.first else ',') + key + ':' }}
                {{- '<|"|>' + value + '<|"|>' if value is string else value | tojson }}
            {%- endfor %}
            {{- '}<tool_call|>' }}
        {%- endfor %}
        {%- if message['content'] %}{{ message['content'] | trim }}{% endif %}
        {{- '<turn|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"""

PHI_3 = """{% for message in messages %}
{% if message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + '<|end|>\n' }}
{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '<|end|>\n' }}
{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n' + message['content'] + '<|end|>\n' }}
{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

DEEPSEEK_R1 = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_tool=false, is_first=true, system_prompt='') %}
{%- for message in messages if message['role'] == 'system' %}
    {%- set ns.system_prompt = message['content'] %}
{%- endfor %}
{{- bos_token + ns.system_prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{% set ns.is_tool = false %}{{ '<｜User｜>' + message['content'] }}{% endif %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
        {%- for tool in message['tool_calls'] %}
            {{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] }}
            {{- '\n```json\n' + tool['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""

GPT_OSS = """{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') }}
{{- '\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- if messages[0].role in ('developer', 'system') %}
    {%- set instructions = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set instructions = '' %}{% set rest = messages %}{% endif %}
{%- if instructions or tools %}
    {{- '<|start|>developer<|message|>' + instructions }}
    {%- for tool in tools or [] %}{{ '\n// ' + tool.function.description + '\ntype ' + tool.function.name }}{% endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- set thought = message.content or message.thinking %}
        {%- if message.content and message.thinking %}{{ raise_exception('content beside thinking') }}{% endif %}
        {%- if thought %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}{% endif %}
        {%- set call = message.tool_calls[0].function %}{% set last.name = call.name %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson }}{{ '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson }}{{ '<|end|>' }}
    {%- else %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

PARTS = """{% for message in messages %}
{{- message.role }}: {% for part in message.content %}
{%- if part.type != 'text' %}{% continue %}{% endif %}
{{- part.text }}{% if loop.index > 3 %}{% break %}{% endif %}
{%- endfor %};
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""

SHAPES = {
    "Llama 3.1": Shape(
        source=LLAMA,
        parser="llama3_json",
        before_call="<|start_header_id|>assistant<|end_header_id|>\n\n",
        behind_call="<|eot_id|>",
    ),
    "Llama 4": Shape(
        source=LLAMA_PYTHONIC,
        parser="pythonic",
        before_call="<|header_start|>assistant<|header_end|>\n\n",
        behind_call="<|eot|>",
    ),
    "Qwen3": Shape(
        source=QWEN,
        parser="hermes",
        before_call="<|im_start|>assistant\n",
        behind_call="<|im_end|>",
        reasoning="qwen3",
    ),
    "Mistral, version 3": Shape(source=MISTRAL_3, parser="mistral", before_call="[/INST]", behind_call="</s>"),
    "Mistral, version 13": Shape(source=MISTRAL_13, parser="mistral", before_call="[/INST]", behind_call="</s>"),
    "Gemma 2": Shape(source=GEMMA_2, takes_system=False),
    "Gemma 3": Shape(source=GEMMA_3),
    "Gemma 4": Shape(
        source=GEMMA_4,
        parser="gemma4",
        before_call="<|turn>model\n",
        behind_call="<turn|>",
    ),
    "Phi 3": Shape(source=PHI_3),
    "DeepSeek R1, distilled": Shape(
        source=DEEPSEEK_R1,
        parser="deepseek_v3",
        before_call="<｜Assistant｜>",
        behind_call="<｜end▁of▁sentence｜>",
        tells_tools=False,
        reasoning="deepseek_r1",
    ),
    "gpt-oss": Shape(
        source=GPT_OSS,
        parser="harmony",
        before_call="<|start|>assistant",
        behind_call="<|call|>",
        reasoning="harmony",
    ),
    "content in parts alone": Shape(source=PARTS),
}
"""Families of checkpoints by name."""
