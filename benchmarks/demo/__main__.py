from benchmarks.demo import main
from benchmarks.suite import start

start(main)
