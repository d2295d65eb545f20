from benchmarks.link_scores import SUITE
from benchmarks.suite import start

start(SUITE.main)
