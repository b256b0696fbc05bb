"""Runs seeds of the simulation: scripts/sim --help."""

import argparse
import os
import sys
import time
from concurrent import futures

from tests.sim.run import Result, run_seed, run_seeds, summary

CHUNK = 50


def _chunk(seeds: range) -> Result:
    return run_seeds(seeds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/sim",
        description="Simulate jobs, log servers and a coordinator under faults, one seed at a time.",
    )
    parser.add_argument("--seeds", type=int, default=2000, metavar="N", help="how many (default 2000)")
    parser.add_argument(
        "--from", type=int, default=0, metavar="S", dest="first", help="the first (default 0)"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="this one alone, with the trace of its end")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="J", help="processes (default: one per CPU)"
    )
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    return arguments


def _one(seed: int) -> int:
    outcome = run_seed(seed)
    print("\n".join(outcome.trace))
    print("\n".join(summary(outcome.counts)))
    print(f"seed {seed}: {outcome.violation or 'nothing is wrong'}")
    return 1 if outcome.violation else 0


def main() -> int:
    """0: nothing is wrong; 1: a seed fails."""
    arguments = _arguments()
    if arguments.seed is not None:
        return _one(arguments.seed)
    began = time.monotonic()
    last = arguments.first + arguments.seeds
    chunks = [range(at, min(last, at + CHUNK)) for at in range(arguments.first, last, CHUNK)]
    total = Result()
    with futures.ProcessPoolExecutor(arguments.jobs) as pool:
        for done in pool.map(_chunk, chunks):
            total.add(done)
            for outcome in done.failed:
                print(f"seed {outcome.seed}: {outcome.violation}", flush=True)
    failed = total.failed
    print("\n".join(summary(total.counts)))
    seconds = time.monotonic() - began
    print(f"{total.seeds} seeds, {total.seeds / seconds:.0f} a second, {len(failed)} failed")
    if failed:
        print(f"the end of seed {failed[0].seed}; scripts/sim --seed {failed[0].seed} repeats it:")
        print("\n".join(failed[0].trace))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
