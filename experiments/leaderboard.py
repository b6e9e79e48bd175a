"""docs/leaderboard.md and its figures, from results/leaderboard.json.

python -m experiments.leaderboard
"""

from experiments.pages.leaderboard_page import main

if __name__ == "__main__":
    main()
