# Short names for `python -m steps ...`, `python -m results...` and the test tools.
#
# The first target that needs Python makes a virtual environment and installs what pyproject.toml
# lists; it does so again when pyproject.toml changes.
#
#   CUDA=13|12    which toolkit wheels to install; by default 12 where nvidia-smi reports a driver of
#                 CUDA 12, else 13
#   PYTHON=...    the interpreter to make the environment with (default python3)
#   VENV=system   use $(PYTHON) as it is and install nothing
#   TORCH=1       any target, in an environment of its own with torch, tokenizers and transformers:
#                 .venv-torch; `test`: the tests that need them, and no others
#
#   STEP= FORMAT= SCHEME= M= N= K= DIST= SEED= ARCH= TOOL=   are passed on to the commands
#   DTYPE=          step%, ladder, check, ptx, sass, profile, sanitize: of C, and of A where a step
#                   reads it: float32, float16 or bfloat16
#   ONLY=           bench: steps (the matrix), home (of it the home shapes), calls (what a caller
#                   gets), sweep (that at every M up to 128)
#   LONG=1          step%, ladder, check: a line for each format
#   FILE=           check, bench, diff, ptx, sass, trace: a file of your own, such as an exercise
#   HINT=1 SOLUTION=1    check FILE=: the next TODO in outline; the diff to the step
#   GGUF= TENSOR=   step%, ladder, check: weights of a file, such as model.gguf and
#                   blk.0.ffn_up.weight, and not random ones
#   RUN=            tune: the run.json of a bench, whose times are taken; needs no GPU
#   PROMPT= TOKENS= TEMPERATURE= TOP_P= SEED= ACCURACY=   chat, decoder: one question or a text,
#                   tokens of an answer, drawn tokens and their seed, exact or fast products
#   SYSTEM=         chat: how to answer
#   REFERENCE=1     chat, decoder, quality: torch on the dequantized weights, on the CPU
#   TEXT= LLAMA_CPP=1    quality: another text; llama.cpp on the CPU too, where it is installed
#   EXPERTS=1       decoder BENCH=1: with the shapes of a model with experts
#   GPUS=2          chat, decoder: share the model among so many GPUs

PYTHON ?= python3
VENV ?= .venv$(if $(TORCH),-torch)
CUDA ?=
ARCH ?= sm_90a

ifeq ($(VENV),system)
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready$(CUDA)
endif

# What is typed as NAME=value reaches the shell as "$$NAME", of the environment, and is expanded neither
# by make nor by the shell: quotes, dollars and blanks in it stay what they are.
VALUES := STEP FILE FORMAT SCHEME M N K DIST SEED DTYPE GGUF TENSOR ARCH TOOL ONLY RUN OUT SECONDS COUNT CASE JOBS \
          LINE WARP PROMPT SYSTEM IDS TOKENS TEMPERATURE TOP_P ACCURACY TEXT GPU GPUS
$(foreach one,$(VALUES),$(if $(value $(one)),$(eval override $(one) := $$(value $(one)))$(eval export $(one))))
# NAME= alone is refused: a shell's variable that is empty would ask for all steps and not for one file.
$(foreach one,$(VALUES),$(if $(value $(one)),,$(if $(filter command,$(origin $(one))),\
    $(error $(one)= is empty: give it a value, or leave it out))))

# $(call options,M:m OUT:json) is --m "$$M" --json "$$OUT", of those that have a value;
# $(call flags,LONG:long) is --long where LONG= is not empty.
options = $(foreach one,$(1),$(call option,$(subst :, ,$(one))))
option = $(if $($(firstword $(1))),--$(lastword $(1)) "$$$(firstword $(1))")
flags = $(foreach one,$(1),$(if $($(firstword $(subst :, ,$(one)))),--$(lastword $(subst :, ,$(one)))))

STEPS = $(if $(STEP),"$$STEP")
MODEL = $(if $(GGUF),"$$GGUF")
OWN = $(call options,FILE:file)
DATA = $(call options,FORMAT:format SCHEME:scheme M:m N:n K:k DIST:dist SEED:seed)
TYPE = $(call options,DTYPE:dtype)
TOLD = $(DATA) $(TYPE) $(call options,GGUF:gguf TENSOR:tensor) $(call flags,LONG:long)
DRAWN = $(call options,PROMPT:prompt TOKENS:tokens TEMPERATURE:temperature TOP_P:top-p SEED:seed \
        ACCURACY:accuracy GPUS:gpus) $(call flags,REFERENCE:reference)
LINTED = qformats reference results steps tests
TYPED = qformats reference results steps
need-step = @test -n "$$STEP$$FILE" || { echo 'name a step: make $@ STEP=4' >&2; exit 2; }

.DEFAULT_GOAL := help
.PHONY: help setup list ladder check exercise exercises notebook fuzz test bench tune charts results report chat \
        quality decoder doctor diff ptx sass trace profile \
        counters sanitize gpu-tests warm cache pitfalls lint docs-check clean clean-venv

help: ## this list
	@echo 'make <target>, such as: make ladder, make step4 FORMAT=q4_0, make sass STEP=4 ARCH=sm_80'
	@echo
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { sub(/%/, "N", $$1); printf "  %-12s %s\n", $$1, $$2 }' \
		$(firstword $(MAKEFILE_LIST))

setup: $(READY) ## make the virtual environment (every other target does it, too)

step%: $(READY) ## check step N in all formats; with a GPU, time it
	@$(PY) -m steps run '$(subst ','"'"',$*)' $(TOLD)

ladder: $(READY) ## the same for every step; with a GPU, draw build/ladder.svg
	@$(PY) -m steps ladder $(TOLD)

list: $(READY) ## the steps, their branches and home shapes
	@$(PY) -m steps list

check: $(READY) ## all check shapes of all steps (or STEP=), nothing timed; or FILE=, what is wrong with it
	@$(PY) -m steps check $(STEPS) $(OWN) $(TOLD) $(call flags,HINT:hint SOLUTION:solution)

exercise: $(READY) ## STEP= with holes to fill in: build/exercises/<step>.py (or OUT=)
	$(need-step)
	@$(PY) -m steps exercise $(STEPS) $(call options,OUT:out)

exercises: $(READY) ## how far the exercises are
	@$(PY) -m steps exercises

notebook: $(READY) ## steps/ladder.ipynb in a browser; installs Jupyter the first time (200 MB)
	$(if $(READY),@$(PY) -c 'import jupyterlab' 2>/dev/null || \
		$(PY) -m pip install --quiet --disable-pip-version-check $$($(PY) -c "$$REQUIREMENTS" notebook))
	@$(PY) -m jupyterlab steps/ladder.ipynb

fuzz: $(READY) ## random products of all steps and of experts (or STEP=) for SECONDS= (60) [COUNT= SEED= JOBS=], or one CASE=
	@$(PY) -m steps fuzz $(STEPS) $(call options,SECONDS:seconds COUNT:count SEED:seed CASE:case JOBS:jobs)

LEFT_OUT := $(if $(ALL),,$(if $(QUICK), and not slow) and not every)
# Files that import torch, also in tests/conftest.py.
NEED_TORCH := tests/nn tests/decoder tests/results/test_on_torch.py
TESTS := $(if $(TORCH),$(NEED_TORCH),$(NEED_TORCH:%=--ignore=%))

test: $(READY) ## the tests, no GPU needed: formats by turns (QUICK=1: one a step; ALL=1: every format and tile);
test: ## TORCH=1: those of layers and of the decoder, instead
	$(if $(TORCH),@$(PY) -c 'from importlib.metadata import version; \
		[*map(version, ("torch", "tokenizers", "transformers"))]')
	@$(PY) -m pytest $(TESTS) -n auto --dist loadgroup --no-loadscope-reorder -m 'not alone$(LEFT_OUT)'
	@$(PY) -m pytest $(TESTS) -m 'alone$(LEFT_OUT)'

bench: $(READY) ## measure what is missing or stale into results/<gpu>/run.json (FRESH=1: all of it)
	@$(PY) -m steps bench $(STEPS) $(OWN) $(DATA) $(call flags,FRESH:fresh) $(call options,ONLY:only OUT:out)

tune: $(READY) ## time the steps at many M into results/<gpu>/tuning.json, by which gemm chooses (or of RUN=)
	@$(PY) -m steps tune $(STEPS) $(DATA) $(call options,RUN:run)

charts: $(READY) ## redraw charts, README.md's tables, results/RESULTS.md and CSV files from the runs
	@$(PY) -m results charts

results: $(READY) ## any row of the runs: M= N= K= FORMAT= STEP= GPU= (or python -m results API=gemm.plan)
	@$(PY) -m results $(foreach key,M N K FORMAT STEP SCHEME GPU,$(if $($(key)),"$(key)=$$$(key)"))

report: $(READY) ## one page of all of it for a browser: build/report.html (or OUT=); a minute
	@$(PY) -m results page $(call options,OUT:out)

chat: $(READY) ## talk to a model, GGUF=model.gguf [PROMPT= SYSTEM= TEMPERATURE=] (needs torch, tokenizers)
	@$(PY) -m steps chat $(MODEL) $(DRAWN) $(call options,SYSTEM:system OUT:json)

quality: $(READY) ## perplexity and distance from float32 of GGUF=model.gguf [TEXT=file] (needs torch, tokenizers)
	@$(PY) -m steps quality $(MODEL) $(call options,TEXT:text OUT:json) \
		$(call flags,REFERENCE:reference LLAMA_CPP:against-llama-cpp)

decoder: $(READY) ## continue PROMPT= or IDS= [TOKENS=] by GGUF=model.gguf, or BENCH=1 [EXPERTS=1] (needs torch)
	@$(PY) -m steps decoder $(MODEL) $(DRAWN) $(call options,IDS:ids OUT:json) $(if $(BENCH),--check --bench) \
		$(call flags,EXPERTS:experts)

doctor: $(READY) ## what runs on this machine, and what is missing
	@$(PY) -m steps doctor

diff: $(READY) ## what STEP= changes in the step it grew from, or FILE= in its step
	$(need-step)
	@$(PY) -m steps diff $(STEPS) $(OWN)

ptx: $(READY) ## the PTX of STEP= for ARCH=; needs no GPU
	$(need-step)
	@$(PY) -m steps ptx $(STEPS) $(OWN) $(call options,ARCH:arch) $(DATA) $(TYPE)

sass: $(READY) ## the machine code of STEP= for ARCH=; needs no GPU
	$(need-step)
	@$(PY) -m steps sass $(STEPS) $(OWN) $(call options,ARCH:arch) $(DATA) $(TYPE)

trace: $(READY) ## what a warp of STEP= loads and stores, lane by lane: build/trace.html [LINE= WARP=]; no GPU
	$(need-step)
	@$(PY) -m steps trace $(STEPS) $(OWN) $(DATA) $(TYPE) $(call options,LINE:line WARP:warp OUT:out)

profile: $(READY) ## Nsight Compute on one launch of STEP=
	$(need-step)
	@$(PY) -m steps profile $(STEPS) $(DATA) $(TYPE)

counters: $(READY) ## Nsight Compute on the launches of a bench (or STEP=), into results/<gpu>/ncu.json
	@$(PY) -m steps counters $(STEPS) $(call options,FORMAT:format OUT:out)

sanitize: $(READY) ## Compute Sanitizer (all tools, or TOOL=) over the checks (or STEP=)
	@$(PY) -m steps sanitize $(STEPS) $(call options,FORMAT:format SCHEME:scheme TOOL:tool) $(TYPE)

gpu-tests: $(READY) ## all GPU tests, the sanitizer and fuzzing, on record in results/<gpu>/ [SECONDS=540]
	@$(PY) -m steps gpu-tests $(call options,SECONDS:seconds OUT:out)

warm: $(READY) ## compile what GGUF=model.gguf, or N= K= [FORMAT= M= DTYPE=], needs, on all cores
	@$(PY) -m steps warm $(TYPE) $(call options,GGUF:gguf FORMAT:format M:m N:n K:k)

cache: $(READY) ## the compiled kernels kept on disk (CLEAR=1: remove them)
	@$(PY) -m steps cache $(call flags,CLEAR:clear)

pitfalls: $(READY) ## the museum of known bugs, and what catches each
	@$(PY) -m steps pitfalls

lint: $(READY) ## ruff and mypy
	@$(PY) -m ruff format --check $(LINTED)
	@$(PY) -m ruff check $(LINTED)
	@$(PY) -m mypy $(TYPED)

docs-check: $(READY) ## whether charts, README.md's tables, RESULTS.md and CSV files are those of the runs
	@$(PY) -m results check

clean: ## remove caches
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis build
	find $(LINTED) -name __pycache__ -type d -prune -exec rm -rf {} +

clean-venv: ## remove the virtual environment; the next target makes it again
	$(if $(filter-out system,$(VENV)),rm -rf '$(VENV)')

# --- set-up ---------------------------------------------------------------------------------------

# What pip is asked for: the dependencies in pyproject.toml and its extras. The project itself is run
# from its root here, not installed.
define REQUIREMENTS
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *(one for name in sys.argv[1:] for one in extras[name]), sep="\n")
endef
export REQUIREMENTS

# 12 where the driver's own "CUDA Version" is 12.x: such a driver cannot run what the 13 wheels compile.
DETECT = nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p' | head -n 1

# --no-compile: most files of torch and transformers are never imported; the others are compiled then.
$(VENV)/.ready$(CUDA): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Python 3.11 or later is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Set PYTHON=..." >&2; \
		exit 2; }
	@test -x '$(PY)' || $(PYTHON) -m venv '$(VENV)' || { \
		echo "$(PYTHON) cannot make a virtual environment: install its venv module (python3-venv)" >&2; \
		rm -rf '$(VENV)'; exit 2; }
	@cuda='$(CUDA)'; test -n "$$cuda" || { test "$$($(DETECT))" = 12 && cuda=12 || cuda=13; }; \
		echo "setting up $(VENV) with the CUDA $$cuda wheels$(if $(TORCH), and torch) (once; a minute or two)" >&2; \
		$(PY) -c "$$REQUIREMENTS" "cu$$cuda" test $(if $(TORCH),test-torch) > '$(VENV)/requirements.txt' \
		&& $(PY) -m pip install --quiet --no-compile --disable-pip-version-check -r '$(VENV)/requirements.txt'
	@rm -f '$(VENV)'/.ready* && touch '$@'
