from benchmarks.suite import start
from benchmarks.training import SUITE

start(SUITE.main)
