"""What tests share: tiny models, recipes, brute force."""
