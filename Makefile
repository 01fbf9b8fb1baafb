# One command for everything: each target first brings .venv up to date, which takes no time when nothing changed.
# ARGS goes to the command behind the target: make test ARGS="tests/unit -k batch"

BIN := .venv/bin
ARGS ?=
# Tests wait more than they work (restarts, timeouts): eight at a time keep two cores busy. PARALLEL= runs them one by one.
PARALLEL ?= -n 8

unexport PYTHONDONTWRITEBYTECODE # programs start three times as fast from compiled files

.DEFAULT_GOAL := help
.PHONY: help docs setup test test-full simulate lint format demo bench kafka lock clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

setup: ## create .venv with the locked dependencies; on Debian also Java, PostgreSQL and Chromium if there are none
	@scripts/setup

test: setup ## run the tests (with Apache Kafka too, where Java and Maven are there)
	@scripts/kafka --if-possible
	@$(BIN)/python -m tests.support.jvm
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-full: setup ## run the tests and the long campaigns, then with other versions of PySpark, Kafka and Python
	@scripts/kafka --if-possible
	@$(BIN)/python -m tests.support.jvm
	$(BIN)/python -m pytest -m "" $(PARALLEL) $(ARGS)
	@scripts/spark-matrix
	@scripts/kafka-matrix
	@scripts/python-matrix

simulate: setup ## run clients and broker in simulated worlds: ARGS="--seconds 60", ARGS="--workload producer --seed 17"
	@$(BIN)/python -m tests.simulation $(ARGS)

lint: setup ## check style, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## put the code into the common format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup ## build the site of the documentation into build/site, without warnings
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

demo: setup ## see it work
	@$(BIN)/semel demo $(ARGS)

bench: setup ## run every benchmark side by side with its peers
	@scripts/kafka --if-possible
	@$(BIN)/semel bench all $(ARGS)

kafka: setup ## fetch Apache Kafka into .cache for tests and benchmarks (needs Maven)
	@scripts/kafka

lock: setup ## write the lock files anew with the newest versions
	@scripts/lock

clean: ## remove everything that can be made again
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
