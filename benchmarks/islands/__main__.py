from benchmarks.islands import SUITE
from benchmarks.suite import start

start(SUITE.main)
