# Kmq from a bare machine. `mix compile`, `mix test` and `rebar3 compile` work by themselves where the packages are installed.
#
#   make demo            a queue under bad luck on the embedded sandbox; KAFKA=host:port for a real cluster
#   make test            all tests: C, Elixir on the sandbox, Elixir on a real Kafka that the tests start (or KMQ_KAFKA=host:port)
#   make bench           Kmq beside its peers, on real Kafka; ARGS="--messages 1000000 --runs 3 --bytes 1000 --keyed --only range,kmq --save"
#
#   make test-long       the long runs too                  make test-asan       the NIF under ASan and UBSan, on the sandbox
#   make check           the C tests, under ASan and UBSan  make check-deps      core <- kafka <- {nif, tracker}
#   make tsan            the core's tests under TSan        make coverage        what of the core no test reaches
#   make bench-quick     the ratios that must not fall, in a minute
#   make bench-latency   publish to handler at fixed rates, and redelivery    make bench-plots     pictures of both (gnuplot)
#   make bench-growth    cost of more partitions, open messages, bytes, demand; schedulers and memory
#   make bench-idle      what an idle consumer, publisher and tracker cost; each one's arguments are in the head of bench/NAME.exs
#   make bench-redelivery  the tracker: how fast, in both ways of redelivery
#   make bench-delay     how late delayed messages are when thousands are due in a second
#   make bench-core      the core's data structures alone   make lint            formats, warnings, clang-tidy, shellcheck
#   make setup           what a build needs                 make setup-test      what the tests need, Kafka's jars included
#   make format          as lint wants it                   make docs            HTML, where ex_doc is; make clean
#
#   RDKAFKA=path         test and test-long: this librdkafka.so.1 instead of the one built against. The newer one inside the Python package
#                        confluent-kafka serves: pip download --no-deps confluent-kafka, unzip it, its confluent_kafka.libs/librdkafka*.so.1
#   WERROR=1             warnings are errors
#   KMQ_TEST_SCALE=3     time limits of tests three times as long, for slow or loaded machines

SHELL := /bin/sh
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

JOBS   := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
C      := $(MAKE) -C c_src -j$(JOBS) BUILD=../_build/c
WERROR ?= 0
BUILD  := _build/c

# An Elixir in a bare C locale would complain about file names.
export LC_ALL ?= C.UTF-8
export KMQ_WERROR := $(WERROR)
export WERROR

.PHONY: help demo test test-long test-asan bench bench-quick bench-latency bench-growth bench-idle bench-plots bench-redelivery bench-delay bench-core check check-deps coverage tsan lint format docs setup setup-test clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed '/^An Elixir/,$$d'

setup:
	@sh scripts/setup.sh build

setup-test:
	@sh scripts/setup.sh test
	@if [ -z "$$KMQ_KAFKA" ]; then \
	    sh test/support/kafka/fetch.sh kafka-4.3.1 test/support/kafka/pom.xml && \
	    sh test/support/kafka/fetch.sh kmq-jvm-0.2 test/support/kafka/peer-pom.xml; \
	fi

demo: setup
	@mix kmq.demo $(if $(KAFKA),--kafka $(KAFKA)) $(ARGS)

# Linked by that name into a folder that the loader searches first, for the VM, its port programs and the C tests alike.
ifdef RDKAFKA
export LD_LIBRARY_PATH := $(BUILD)/rdkafka$(if $(LD_LIBRARY_PATH),:$(LD_LIBRARY_PATH))
endif
swap = $(if $(RDKAFKA),@test -e "$(RDKAFKA)" || { echo "no such file: $(RDKAFKA)"; exit 1; }; \
    mkdir -p $(BUILD)/rdkafka && ln -sfn "$(abspath $(RDKAFKA))" $(BUILD)/rdkafka/librdkafka.so.1 && \
    MIX_ENV=test mix run --no-start -e 'IO.puts("librdkafka " <> elem(:kmq_nif.version(), 0))')

test: setup-test
	$(swap)
	@$(C) check check-deps
	@$(if $(ARGS),mix test $(ARGS),sh scripts/test.sh)

test-long: setup-test
	$(swap)
	@KMQ_LONG=1 KMQ_FUZZ=10000000 KMQ_TEST_WORK=10 KMQ_TEST_SCALE=10 $(C) check
	@KMQ_LONG=1 mix test $(ARGS)

# The VM itself is not built with ASan, so its runtime is loaded first; +Mea min lets ASan see the blocks of enif_alloc.
test-asan: setup-test
	@MIX_ENV=test MIX_BUILD_PATH=_build/asan KMQ_VARIANT=asan KMQ_SANITIZER=1 KMQ_TEST_SCALE=$${KMQ_TEST_SCALE:-3} \
	    LD_PRELOAD=$$(cc -print-file-name=libasan.so):$$(cc -print-file-name=libubsan.so) ASAN_OPTIONS=detect_leaks=0 \
	    ERL_FLAGS="+Mea min" mix test --exclude integration $(ARGS)

# Idle schedulers do not spin: on a small machine they would take the broker's processor.
measure = ERL_FLAGS="+sbwt none +sbwtdcpu none +sbwtdio none" KMQ_RDKAFKA_ALONE=$(BUILD)/release/rdkafka_alone MIX_ENV=$(1) \
    mix run --no-start bench/$(2).exs $(if $(KAFKA),--kafka $(KAFKA)) $(ARGS)

bench bench-latency bench-growth bench-idle bench-redelivery: bench-built
bench:
	@$(call measure,prod,bench)

bench-latency:
	@$(call measure,prod,latency)

# Schedulers are watched in the tests' build, which counts how long each call takes.
bench-growth:
	@$(call measure,prod,growth)
	@MIX_ENV=test mix compile
	@$(call measure,test,growth) --only schedulers

bench-idle:
	@$(call measure,prod,idle)

bench-plots:
	@command -v gnuplot >/dev/null || sh scripts/setup.sh plots
	@sh bench/plots.sh

.PHONY: bench-built
bench-built: setup-test
	@$(C) VARIANT=release ../_build/c/release/rdkafka_alone
	@MIX_ENV=prod mix compile

bench-quick:
	@$(MAKE) bench ARGS="--quick $(ARGS)"

bench-redelivery:
	@$(call measure,prod,redelivery)

bench-delay: setup-test
	@MIX_ENV=prod mix compile
	@$(call measure,prod,delay)

bench-core: setup
	@$(C) VARIANT=release ../_build/c/release/bench_core
	@$(BUILD)/release/bench_core $(ARGS)

check: setup-test
	@$(C) check

check-deps: setup
	@$(C) check-deps

coverage: setup-test
	@$(C) coverage

tsan: setup-test
	@$(C) tsan

CLANG_FORMAT ?= $(shell command -v clang-format-14 || command -v clang-format)
format:
	@mix format
	@$(CLANG_FORMAT) -i $$(find c_src test/c bench -name '*.[ch]')

# ex_doc comes from Hex; without it the guides are plain Markdown.
docs:
	@if mix help docs >/dev/null 2>&1; then mix docs; else \
	    echo "docs: ex_doc is not there (mix deps.get, with Hex, brings it). Plain Markdown: README.md, guides/*.md; h Kmq in iex"; fi

lint: setup
	@sh scripts/setup.sh lint
	@sh scripts/lint.sh
	@echo "lint: warnings are errors"
	@$(C) WERROR=1 BUILD=../$(BUILD)/lint PRIV=../$(BUILD)/lint/priv all check-deps
	@KMQ_WERROR=1 BUILD=../$(BUILD)/lint MIX_BUILD_PATH=_build/lint mix compile --warnings-as-errors
	@echo "lint: ok"

clean:
	@rm -rf _build priv
