"""Options and arguments that commands share: their types, their checks, and the prompts that they give."""
