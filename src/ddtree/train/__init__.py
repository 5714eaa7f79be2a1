"""Making a drafter for a target. First stage: the target answers the prompts itself (`respond`)."""
