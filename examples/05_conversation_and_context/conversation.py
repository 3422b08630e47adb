"""Ask a chat model question after question, then save what it has read of a text and go on from the file."""

import sys
import tempfile
from pathlib import Path

import kvc_trt

model, *questions = sys.argv[1:] or ("smollm2-135m-instruct", "What is the capital of France?", "And of Spain?")
lengths = {"max_input_len": 512, "max_output_len": 16, "max_conversation_len": 1024}
directory = f"engines/{Path(model).name}"
engine = kvc_trt.build(model, policy="rocketkv", token_budget=64, output=directory, verify=False, **lengths)

conversation = engine.conversation()
for question in questions:
    answer = conversation.ask(question)  # one pass over what is new since the last answer
    print(f"{question} {answer.output.text!r}, {answer.output.logical_length} tokens seen")
conversation.close()

context = engine.context(engine.chat_prompt(questions[0]))
with tempfile.TemporaryDirectory() as folder:
    engine.save_context(context, Path(folder) / "first.context")
    loaded = engine.load_context(Path(folder) / "first.context")
print(f"{context.logical_length} tokens saved and loaded: {engine.generate('', context=loaded).text!r}")
