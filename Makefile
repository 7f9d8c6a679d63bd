# The words are runc's and containerd's. Everything can be run again, also after an interruption.
#
#   make demo              a counter in (emulated) GPU memory is checkpointed, killed and restored
#   make test              unit tests, then end-to-end tests
#   make e2e FILTER=word   the end-to-end tests with word in their name; SUITES=forky: in that lab
#   make bench             containerd's own shim and ours side by side, in numbers
#   make release           the programs as they are installed, with man pages and completions
#   make install           puts them where they belong, see the variables PREFIX and DESTDIR below
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
	@echo "make: man pages and completions"
	cargo run --locked --package stasis-hooks --example manual -- $(GENERATED)

unit: prerequisites
	@echo "make: unit tests"
	cargo test --locked --workspace --exclude stasis-integration
	cargo test --locked --package stasis-integration --lib --test install --test documents

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

# --- install: the names are GNU's. `make release` as yourself, then `make install` as who may.
PREFIX ?= /usr/local
BINDIR ?= $(PREFIX)/bin
LIBDIR ?= $(PREFIX)/lib
DATADIR ?= $(PREFIX)/share
DOCDIR ?= $(DATADIR)/doc/stasis
MANDIR ?= $(DATADIR)/man
BASHDIR ?= $(DATADIR)/bash-completion/completions
ZSHDIR ?= $(DATADIR)/zsh/site-functions
FISHDIR ?= $(DATADIR)/fish/vendor_completions.d
# Where the binaries are taken from, and the pages and completions that are made of the command line of
# stasis.
BINARIES ?= $(or $(CARGO_TARGET_DIR),target)/release
GENERATED ?= $(or $(CARGO_TARGET_DIR),target)/manual

PROGRAMS := containerd-shim-runc-stasis stasis stasis-runc
# A directory for containerd's PATH, in which our shim has the name of containerd's own.
V2 := $(LIBDIR)/stasis/containerd-shim-runc-v2
MANUALS := $(wildcard contrib/man/*.[158])
DOCUMENTS := README.md LICENSE config/config.toml
SAMPLES := $(wildcard config/containerd/* config/docker/* config/podman/* config/kubernetes/*)
MANUAL = $(MANDIR)/man$(patsubst .%,%,$(suffix $1))/$(notdir $1)
# Those that are generated; a page for each command.
PAGES := stasis.1 $(patsubst %,stasis-%.1,check inspect ps repair resume suspend)
COMPLETIONS := $(BASHDIR)/stasis $(ZSHDIR)/_stasis $(FISHDIR)/stasis.fish \
	$(patsubst contrib/completions/bash/%,$(BASHDIR)/%,$(wildcard contrib/completions/bash/*)) \
	$(patsubst contrib/completions/zsh/%,$(ZSHDIR)/%,$(wildcard contrib/completions/zsh/*)) \
	$(patsubst contrib/completions/fish/%,$(FISHDIR)/%,$(wildcard contrib/completions/fish/*))
# All of it, and nothing else, is what uninstall removes.
INSTALLED = $(PROGRAMS:%=$(BINDIR)/%) $(V2) \
	$(foreach page,$(MANUALS) $(PAGES),$(call MANUAL,$(page))) \
	$(addprefix $(DOCDIR)/,$(notdir $(DOCUMENTS)) $(SAMPLES:config/%=%)) $(COMPLETIONS)
# And of directories, those that are ours alone.
OWN = $(sort $(dir $(SAMPLES:config/%=$(DOCDIR)/%))) $(DOCDIR) $(LIBDIR)/stasis

.PHONY: release install uninstall
SCRIPTS += config/kubernetes/stasis-node $(wildcard contrib/completions/bash/*)

release:
	@echo "make: building the release"
	cargo build --locked --release
	@echo "make: man pages and completions"
	cargo run --locked --release --package stasis-hooks --example manual -- $(GENERATED)

# With a space in one of them something else would be installed and removed.
.PHONY: paths
paths:
	@$(foreach name,PREFIX BINDIR LIBDIR DATADIR DOCDIR MANDIR BASHDIR ZSHDIR FISHDIR, \
		$(if $(and $(filter 1,$(words $($(name)))),$(filter /%,$($(name)))),, \
			echo "make: $(name) has to be one path from the root, without spaces" >&2; exit 1;))
	@$(if $(filter-out 0 1,$(words $(DESTDIR))), \
		echo "make: DESTDIR has to be without spaces" >&2; exit 1)

# Builds nothing: what root has built, others cannot build again. Leaves /etc/stasis alone.
install: paths
	@for file in $(PROGRAMS:%=$(BINARIES)/%) $(PAGES:%=$(GENERATED)/man/%) \
			$(GENERATED)/bash/stasis $(GENERATED)/zsh/_stasis $(GENERATED)/fish/stasis.fish; do \
		[ -f $$file ] || { echo "make: there is no $$file; run: make release" >&2; exit 1; }; \
	done
	@echo "make: installing into $(DESTDIR)$(PREFIX)"
	install -d $(addprefix $(DESTDIR),$(sort $(dir $(INSTALLED))))
	install -m 755 $(PROGRAMS:%=$(BINARIES)/%) $(DESTDIR)$(BINDIR)
	ln -sf $(BINDIR)/containerd-shim-runc-stasis $(DESTDIR)$(V2)
	$(foreach page,$(MANUALS),install -m 644 $(page) $(DESTDIR)$(call MANUAL,$(page)) && ) true
	install -m 644 $(PAGES:%=$(GENERATED)/man/%) $(DESTDIR)$(MANDIR)/man1
	install -m 644 $(DOCUMENTS) $(DESTDIR)$(DOCDIR)
	$(foreach sample,$(SAMPLES),install -m $(if $(filter %/stasis-node,$(sample)),755,644) \
		$(sample) $(DESTDIR)$(DOCDIR)/$(sample:config/%=%) && ) true
	install -m 644 contrib/completions/bash/* $(GENERATED)/bash/stasis $(DESTDIR)$(BASHDIR)
	install -m 644 contrib/completions/zsh/* $(GENERATED)/zsh/_stasis $(DESTDIR)$(ZSHDIR)
	install -m 644 contrib/completions/fish/* $(GENERATED)/fish/stasis.fish $(DESTDIR)$(FISHDIR)

uninstall: paths
	@echo "make: removing from $(DESTDIR)$(PREFIX)"
	rm -f $(addprefix $(DESTDIR),$(INSTALLED))
	for directory in $(addprefix $(DESTDIR),$(OWN)); do \
		[ ! -d $$directory ] || rmdir --ignore-fail-on-non-empty $$directory; \
	done
# --- end of install

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
