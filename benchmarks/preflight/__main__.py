from benchmarks.preflight import SUITE
from benchmarks.suite import start

start(SUITE.main)
