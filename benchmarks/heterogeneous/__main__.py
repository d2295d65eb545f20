from benchmarks.heterogeneous import SUITE
from benchmarks.suite import start

start(SUITE.main)
