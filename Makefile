# The words are runc's and containerd's. Everything can be run again, also after an interruption.
#
#   make demo              a counter in (emulated) GPU memory is checkpointed, killed and restored
#   make test              unit tests, then end-to-end tests
#   make e2e FILTER=word   the end-to-end tests with word in their name; SUITES=forky: in that lab
#   make bench             containerd's own shim and ours side by side, in numbers
#   make lab               the Debian roots in which demo and e2e run (needs root, as they do)

SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := build
.PHONY: prerequisites build unit lab e2e demo bench test lint deny clean

FILTER ?=
SUITES ?= trixie forky
ENTER := integration/lab/enter --
SCRIPTS := $(filter-out %.md %.log,$(wildcard integration/lab/* integration/evidence/*)) .ci/run

# Installs what is missing and says so; nothing where nothing is.
prerequisites:
	@integration/lab/prerequisites

build: prerequisites
	@echo "make: building the binaries, the emulated GPU and the workloads"
	cargo build --locked --workspace

unit: prerequisites
	@echo "make: unit tests"
	cargo test --locked --workspace --exclude stasis-integration
	cargo test --locked --package stasis-integration --lib

lab: prerequisites
	@echo "make: the labs in target/lab, Debians with containerd, runc, CRIU, Docker, Podman: $(SUITES)"
	integration/lab/build $(SUITES)

e2e: build lab
	@for suite in $(SUITES); do \
	    echo "make: end-to-end tests in $$suite $(if $(FILTER),named *$(FILTER)*,of all names)"; \
	    STASIS_SUITE=$$suite $(ENTER) /stasis-target/debug/e2e $(FILTER) || exit; \
	done

# One lab is enough to see it.
demo bench: SUITES := trixie
demo: build lab
	@echo "make: the demo"
	$(ENTER) /stasis-target/debug/demo

bench: prerequisites lab
	@echo "make: building the release"
	cargo build --locked --workspace --release
	@echo "make: the benchmark"
	$(ENTER) env STASIS_PROFILE=release /stasis-target/release/bench

test: unit e2e

lint: prerequisites
	@echo "make: format, clippy, shellcheck"
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	shellcheck -x $(SCRIPTS)

deny:
	@echo "make: licences, bans and sources of the dependencies (no advisories: they need a network)"
	cargo deny --locked --workspace check licenses bans sources

clean:
	@echo "make: removing what was built, the lab too"
	cargo clean
	rm -rf --one-file-system target/lab
