"""How examples, predictions and scores are shown: shared by report, explorer and command line."""
