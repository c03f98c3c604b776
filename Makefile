# Two commands do all the set-up: `make train` and `make test`. PYTHON names the interpreter that makes .venv.
PYTHON ?= python3
PY := .venv/bin/python

train: .venv/ready
	$(PY) train.py --overwrite

test: .venv/ready
	$(PY) -m pytest -q -n 2 tests

# on a machine with a GPU, with its own python: the device tests, then the kernel's times
gpu:
	$(PYTHON) -m pytest -q -m gpu tests
	$(PYTHON) bench.py kernel

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q -r requirements.txt
	touch $@

.PHONY: train test gpu
