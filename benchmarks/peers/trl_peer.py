"""The TRL side of `benchmarks/step.py`; it runs in an environment of its own and imports nothing of ours.

It reads one request a line from stdin and answers one line of JSON. A trainer stays inside `GRPOTrainer.train()` and
waits there between two steps, so that it can be asked in turns with our side:

    {"task": "begin", "folder": …, "levels": [[system, user, user, …], …], "size": 16, "reply": 16, "kind": "single",
     "settings": {"per_device_train_batch_size": 32}}        -> the first step of a new trainer, with its tokens
    {"task": "step"}                                         -> {"seconds": …, "rollout": …}: one more step

With `"device": "cuda"` it runs on a GPU, in bf16. A trainer that runs out of memory answers {"problem": …}.

A level is the system text and the user message of each turn. Kinds:

- `single`: one reply, from `GRPOTrainer` as it is.
- `environment`: many turns, by `environment_factory`. TRL goes on to the next turn where the reply is a tool call, so
  every reply is read as a call of the one tool, and the tool's answer is the next user message. The model's chat
  template knows no tools: the template here renders the same messages in the same tokens, and tools too.
- `rollout_func`: many turns, by a loop over `generate` in TRL's hook for custom rollouts, with the cache kept.

Everything of a step counts, from the moment it is asked for: sampling, rewards, gradients, the optimizer, the trainer's
bookkeeping. `rollout` is the part within `GRPOTrainer._generate`.
"""

import gc
import json
import os
import sys
import tempfile
import time

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

USE_TRITON = trl.trainer.utils._use_triton
MAX_STEPS = 1000
NEVER_REACHED = 1 << 16  # tokens of a completion; the length of each reply is forced
# What stands before and after a role's name, and after a message, by the token that ends it.
LAYOUTS = {"<|end|>": ("<|", "|>", ""), "<|im_end|>": ("<|im_start|>", "\n", "\n")}
# A tool's answer stands where the next user message stands. Replies of forced length do not end themselves, so it
# brings the end-of-turn token along.
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- 'END' + 'AFTER' + 'OPEN' + 'user' + 'CLOSE' + message.content + 'END' + 'AFTER' -}}
{%- elif message.tool_calls -%}
{{- 'OPEN' + message.role + 'CLOSE' + message.content + (message.tool_calls | tojson) + 'END' -}}
{%- else -%}
{{- 'OPEN' + message.role + 'CLOSE' + message.content + 'END' + 'AFTER' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'OPEN' + 'assistant' + 'CLOSE' -}}{%- endif -%}"""


class TimedTrainer(GRPOTrainer):
    """TRL's trainer; it notes the seconds of sampling, the tokens and the norm of the gradient."""

    def _generate(self, prompts):
        started = time.perf_counter()
        result = super()._generate(prompts)
        wait()
        self.rollout_seconds = time.perf_counter() - started
        self.tokens = {"prompts": result[0], "completions": result[1]}
        return result

    def _clip_grad_norm(self, model):
        self.gradient_norm = super()._clip_grad_norm(model)
        return self.gradient_norm


class OneStepAtATime(TrainerCallback):
    """Answers after each step and waits for the next request; any other request than a step ends the training."""

    def __init__(self, answer):
        self.answer, self.trainer, self.next_request = answer, None, {}
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        wait()
        report = {"seconds": time.perf_counter() - self.started, "rollout": self.trainer.rollout_seconds}
        if state.global_step == 1:
            report |= {"gradient_norm": float(self.trainer.gradient_norm), **self.trainer.tokens}
        self.answer(report)
        self.next_request = read_request()
        control.should_training_stop = self.next_request.get("task") != "step"
        self.started = time.perf_counter()


def make_environment(levels):
    """The class that `environment_factory` calls: its tool answers any reply with the level's next message."""

    class Environment:
        def reset(self, level, **columns):
            self._level, self._turn = levels[level], 1

        def act(self, reply: str) -> str:
            """Act in the game.

            Args:
                reply: What to do.

            Returns:
                What is seen then.
            """
            self._turn += 1
            return self._level[self._turn]

    return Environment


def make_rollout(levels, template, reply):
    """TRL's `rollout_func`: the whole batch turn by turn; the cache is kept because all rows are equally long."""
    level_of = {level[1]: level for level in levels}

    def rollout(prompts, trainer):
        tokenizer = trainer.processing_class
        rows = [level_of[prompt[-1]["content"]] for prompt in prompts]
        first = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped).eval()
        cache = DynamicCache(config=model.config)
        ids, mask = generate(trainer, model, torch.tensor(first, device=model.device), cache), [1] * reply
        for turn in range(2, len(levels[0])):
            suffixes = {text: tool_suffix(tokenizer, template, text) for text in {row[turn] for row in rows}}
            given = torch.tensor([suffixes[row[turn]] for row in rows], device=model.device)
            ids = generate(trainer, model, torch.cat([ids, given], dim=1), cache)
            mask += [0] * given.shape[1] + [1] * reply
        model.train()
        completions = ids[:, len(first[0]) :].tolist()
        masks = [mask] * len(completions)
        return {"prompt_ids": first, "completion_ids": completions, "logprobs": None, "env_mask": masks}

    return rollout


@torch.no_grad()
def generate(trainer, model, ids, cache):
    everything = torch.ones_like(ids)
    config = trainer.generation_config
    return model.generate(ids, attention_mask=everything, generation_config=config, past_key_values=cache)


def tool_suffix(tokenizer, template, text):
    """The tokens between a reply and the next one."""
    called = {"role": "assistant", "content": "", "tool_calls": [{"name": "act"}]}
    messages = [{"role": "user", "content": ""}, called]
    before = tokenizer.apply_chat_template(messages, chat_template=template, return_dict=False)
    messages.append({"role": "tool", "content": text})
    whole = tokenizer.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    return whole[len(before) :]


def layout_of(tokenizer):
    if tokenizer.eos_token not in LAYOUTS:
        raise SystemExit(f"no layout for a model whose turns end with {tokenizer.eos_token!r}: add it to LAYOUTS")
    return LAYOUTS[tokenizer.eos_token]


def tool_template(tokenizer):
    before, behind, after = layout_of(tokenizer)
    parts = {"OPEN": before, "CLOSE": behind, "END": tokenizer.eos_token, "AFTER": after}
    template = TEMPLATE
    for name, value in parts.items():
        template = template.replace(f"'{name}'", json.dumps(value))
    return template


def read_any_reply_as_a_call(tokenizer):
    """What TRL calls a response template: where a tool call is in a reply. Here the reply is one."""
    before, behind, _ = layout_of(tokenizer)
    tokenizer.response_template = {
        "defaults": {"role": "assistant", "content": ""},
        "start_anchor": f"{before}assistant{behind}",
        "fields": {
            "tool_calls": {
                "content": "text",
                "transform": [{"type": "function", "function": {"name": "act", "arguments": {"reply": "{content}"}}}],
            }
        },
    }


def count_even(completion_ids, **columns):
    """The reward: how many ids of the last reply are even."""
    return [float(sum(id_ % 2 == 0 for id_ in ids[-count_even.reply :])) for ids in completion_ids]


def make_trainer(request, callback):
    levels, reply, settings = request["levels"], request["reply"], dict(request["settings"])
    count_even.reply = reply
    tokenizer = AutoTokenizer.from_pretrained(request["folder"], padding_side="left")
    attention = settings.pop("attn_implementation", "sdpa")
    kind = getattr(torch, settings.pop("dtype", "float32" if is_cpu(request) else "bfloat16"))
    model = AutoModelForCausalLM.from_pretrained(request["folder"], dtype=kind, attn_implementation=attention)
    # Where the padding token ends turns, too, as SmolLM2's does, transformers leaves its gradient out.
    model.get_input_embeddings().padding_idx = None
    score_only_replies(settings.pop("score_only_replies", False))
    more = {}
    if request["kind"] == "environment":
        tokenizer.chat_template = tool_template(tokenizer)
        read_any_reply_as_a_call(tokenizer)
        more["environment_factory"] = make_environment(levels)
    elif request["kind"] == "rollout_func":
        more["rollout_func"] = make_rollout(levels, tool_template(tokenizer), reply)
    rows = [
        {"prompt": [{"role": "system", "content": level[0]}, {"role": "user", "content": level[1]}], "level": index}
        for index, level in enumerate(levels)
    ]
    trainer = TimedTrainer(
        model=model,
        reward_funcs=count_even,
        args=make_config(request, settings),
        train_dataset=Dataset.from_list(rows * MAX_STEPS),
        processing_class=tokenizer,
        callbacks=[callback],
        **more,
    )
    callback.trainer = trainer
    return trainer


def make_config(request, settings):
    """One optimizer step over all completions; gradient accumulation follows from the batch size."""
    reply, num_completions = request["reply"], len(request["levels"]) * request["size"]
    fixed = {
        "output_dir": os.path.join(tempfile.gettempdir(), "trl_peer"),
        "use_cpu": is_cpu(request),
        "bf16": not is_cpu(request),
        "gradient_accumulation_steps": num_completions // settings["per_device_train_batch_size"],
        "num_generations": request["size"],
        "max_completion_length": NEVER_REACHED,
        "max_tool_calling_iterations": len(request["levels"][0]) - 2,
        "generation_kwargs": {"min_new_tokens": reply, "max_new_tokens": reply},
        "temperature": 1.0,
        "beta": 0.0,
        "learning_rate": request["learning_rate"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "shuffle_dataset": False,
        "max_steps": MAX_STEPS,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return GRPOConfig(**fixed, **{"gradient_checkpointing": False} | settings)


def is_cpu(request):
    return request.get("device", "cpu") == "cpu"


def wait():
    """For the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def score_only_replies(wanted):
    """Not a setting of TRL. Without Triton it projects every position onto the vocabulary, prompts included; this makes
    it leave them out, as it does on a GPU."""
    trl.trainer.utils._use_triton = (lambda device: True) if wanted else USE_TRITON


def read_request():
    line = sys.stdin.readline()
    return json.loads(line) if line else {"task": "quit"}


def main():
    answers, sys.stdout = sys.stdout, sys.stderr  # trainers print to stdout

    def answer(report):
        print(json.dumps(report), file=answers, flush=True)

    torch.set_num_threads(2)
    transformers.utils.logging.set_verbosity_error()
    answer({"versions": {module.__name__: module.__version__ for module in (trl, transformers, torch)}})
    request = read_request()
    while request["task"] == "begin":
        callback = OneStepAtATime(answer)
        try:
            make_trainer(request, callback).train()
            request = callback.next_request
        except torch.OutOfMemoryError:
            answer({"problem": "out of memory"})
            request = read_request()
        del callback
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


main()
