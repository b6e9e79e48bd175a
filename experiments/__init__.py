"""The paper's tasks as recipes."""
