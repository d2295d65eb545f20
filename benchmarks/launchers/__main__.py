from benchmarks.launchers import SUITE
from benchmarks.suite import start

start(SUITE.main)
