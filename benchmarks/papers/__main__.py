from benchmarks.papers import SUITE
from benchmarks.suite import start

start(SUITE.main)
