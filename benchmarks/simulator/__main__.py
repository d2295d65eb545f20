from benchmarks.simulator import SUITE
from benchmarks.suite import start

start(SUITE.main)
