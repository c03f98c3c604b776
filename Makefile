# Each command does all the set-up: `make train` and `make test`. PYTHON names the interpreter that makes .venv.
PYTHON ?= python3
PY := .venv/bin/python

train: .venv/ready
	$(PY) train.py --overwrite

# the same techniques in the paper's other models, minutes each: a classifier of drawn images, a masked language model
train-vit: .venv/ready
	$(PY) train.py --model=vit-tiny --out=out/vit --overwrite --global_batch=32 --batch_size=32 --train_tokens=3000000 \
		--learning_rate=2e-3 --ltd_multiple=8 --eval_samples=0 --eval_interval=400 --log_interval=50

PARAGRAPHS := data/stdlib_paragraphs
$(PARAGRAPHS)/T128-documents/seqlen.json: .venv/ready
	test -d $(PARAGRAPHS) || $(PY) data_analyze.py --tokenizer=bytes --split=paragraph --out=$(PARAGRAPHS) --metric=
	$(PY) data_analyze.py --data=$(PARAGRAPHS) --samples=document --block_size=128 --metric=seqlen

train-bert: $(PARAGRAPHS)/T128-documents/seqlen.json
	$(PY) train.py --arch=bert --data=$(PARAGRAPHS) --samples=document --out=out/bert --overwrite --pos=rotary --n_embd=64 \
		--block_size=128 --train_tokens=2000000 --pool=seqlen:30%..100%:40%:sqrt --seqlen=off --eval_interval=200 --log_interval=50

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

.PHONY: train train-vit train-bert test gpu
