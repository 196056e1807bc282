# jvlab: `make` prints the targets. Every target first makes .venv ready; that is a no-op when nothing changed.

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast soak compat lint lab notebooks clean
RUN := .venv/bin/python
PYTEST_ARGS ?=
# Tests and engines are many processes: each would compile every file again.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

help:  ## print this
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup:  ## make .venv ready: vLLM for CPU, JAX, Jupyter (minutes the first time; PYTHON=... chooses the Python)
	@for p in "$$PYTHON" .venv/bin/python python3 python3.11 python3.12 python3.13; do \
	  if [ -n "$$p" ] && "$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then \
	    exec "$$p" .ci/setup.py; \
	  elif [ -n "$$PYTHON" ]; then \
	    echo "PYTHON=$$PYTHON is no Python 3.11 to 3.13" >&2; \
	    echo "  -> unset PYTHON, or set it to one" >&2; exit 1; \
	  fi; \
	done; \
	echo "no Python 3.11 to 3.13 found (tried python3, python3.11, python3.12, python3.13)" >&2; \
	echo "  -> install one (apt install python3.11 python3.11-venv; brew install python@3.12), or: make setup PYTHON=/path/to/python" >&2; \
	exit 1

demo: setup  ## the whole loop on this machine: rollouts, training, weight syncs
	$(RUN) -m jvlab demo

test: setup  ## lint, types, every test, every notebook; all of it runs, and the end says what failed
	@$(RUN) .ci/test.py

test-fast: setup  ## the quick tests: no engine, no vLLM
	$(RUN) -m pytest -p no:nbval -n 3 --dist loadfile -m "not engine and not browser and not vllm and not slow and not soak" $(PYTEST_ARGS)

soak: setup  ## what `make test` leaves out: full products of faults, engines and families, long runs, Ray, real weights
	@$(RUN) .ci/test.py soak

compat: setup  ## the tests that touch an engine, with another vLLM, in an environment over .venv (ONLY="0.33.0")
	@$(RUN) .ci/compat.py $(ONLY)

lint: setup  ## ruff, the order of the rooms, pyright
	@$(RUN) .ci/test.py lint types

lab: setup  ## JupyterLab on the tutorials
	$(RUN) -m jvlab lab

notebooks: setup  ## execute every notebook, in place (ONLY=notebooks/02_*.ipynb: some)
	$(RUN) .ci/notebooks.py $(ONLY)

clean:  ## remove .venv and everything that can be made again
	rm -rf .venv .compat build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
