"""How examples, predictions and scores are shown. Shared by report, explorer and command line."""
