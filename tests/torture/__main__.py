"""``python -m tests.torture``: everything that can go wrong, again and again, and a count of what was lost.

Exit code 0: nothing was lost; 1: something was, and the lines above say how to see it again; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from contextlib import ExitStack

from tests.torture.broken import ORDERS
from tests.torture.campaigns import CAMPAIGNS, PROFILES, Servers, torture
from tests.torture.report import Report


def main(arguments: list[str]) -> int:
    """Run the campaigns that are asked for."""
    parser = argparse.ArgumentParser("python -m tests.torture", description=__doc__)
    parser.add_argument("--profile", choices=PROFILES, default="full", help="full: up to 30 minutes; ci: 3 minutes")
    parser.add_argument("--seed", type=int, help="of all dice; by default a new one, which is printed")
    parser.add_argument("--only", default=",".join(CAMPAIGNS), help=f"some of {','.join(CAMPAIGNS)}")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the sizes of the profile")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--broken", choices=ORDERS, help="break the commit order on purpose: must end with exit code 1")
    asked = parser.parse_args(arguments)
    only = asked.only.split(",")
    if set(only) - CAMPAIGNS.keys():
        parser.error(f"no campaign {', '.join(sorted(set(only) - CAMPAIGNS.keys()))}: there are {', '.join(CAMPAIGNS)}")
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(2**32)
    logging.getLogger("ckptstore").addHandler(logging.NullHandler())
    report = Report(asked.json)
    with ExitStack() as stack:
        servers = stack.enter_context(Servers())
        tallies = [torture(name, asked.profile, asked.scale, seed, servers, report, asked.broken) for name in only]
    options = f"--profile {asked.profile}" + (f" --scale {asked.scale:g}" if asked.scale != 1 else "")
    options += f" --broken {asked.broken}" if asked.broken else ""
    report.end(tallies, {"profile": asked.profile, "seed": seed, "broken_order": asked.broken, "arguments": options})
    return 1 if any(tally.broken for tally in tallies) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
