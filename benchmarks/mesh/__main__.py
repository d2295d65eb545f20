from benchmarks.mesh import SUITE
from benchmarks.suite import start

start(SUITE.main)
