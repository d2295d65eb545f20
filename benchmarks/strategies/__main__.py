from benchmarks.strategies import SUITE
from benchmarks.suite import start

start(SUITE.main)
