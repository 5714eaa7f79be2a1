"""The harness: arms side by side on prompts, and what they show."""
