from benchmarks.placement import SUITE
from benchmarks.suite import start

start(SUITE.main)
