from benchmarks.replay import SUITE
from benchmarks.suite import start

start(SUITE.main)
