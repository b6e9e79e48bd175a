"""docs/leaderboard.md and its figures, from results/leaderboard.json; or benchmarks for others.

python -m experiments.leaderboard
python -m experiments.leaderboard --publish FOLDER --from SUMS
"""

import argparse
from pathlib import Path

from experiments.pages.leaderboard_page import main as write_page
from experiments.studies.publish import publish


def main() -> None:
    parser = argparse.ArgumentParser(description="The leaderboard's page, or its benchmarks.")
    parser.add_argument("--publish", type=Path, metavar="FOLDER", help="write benchmarks there")
    parser.add_argument("--from", dest="sums", type=Path, default=Path("runs/single/sums"))
    options = parser.parse_args()
    if options.publish is None:
        write_page()
        return
    for place in publish(options.sums, options.publish):
        print(place)


if __name__ == "__main__":
    main()
