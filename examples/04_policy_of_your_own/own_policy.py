"""Build, verify and ask an engine of a policy that kvc-trt does not have: methods/keydiff_hybrid.py."""

from pathlib import Path

import kvc_trt
import kvc_trt.methods

# A method is one file in kvc_trt/methods/. To try one from elsewhere, let kvc-trt look into its folder too.
kvc_trt.methods.__path__.append(str(Path(__file__).parent / "methods"))

[found] = [policy for policy in kvc_trt.policies.describe() if policy.name == "keydiff-hybrid"]
print(f"{found.name}: {found.prompt_eviction} x {found.decode_selection}")

engine = kvc_trt.build("retrieval-tiny", policy=found.name, token_budget=64, output="engines/own", verify=False)
numbers = engine.parameters
print(f"of a prompt {numbers.prompt_budget} tokens stay, a step reads {numbers.top_k}, pages of {numbers.page_size}")
print("passed" if engine.verify("logits").passed else "failed")
print(engine.generate("<record> lamp scarlet tiger lagos eight <query> lamp").text)
